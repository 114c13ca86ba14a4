"""What goes on beside attempts: prepaid time, machines in place of taken ones, bootstrap, telling."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.node import NodeState
from gpucloud.domain.state import InterruptionKind
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    Detach,
    Prepare,
    Replace,
    Tell,
)
from gpucloud.domain.supervision.belief import is_out_of_reach
from gpucloud.domain.supervision.membership import all_silent, is_gone
from gpucloud.domain.supervision.prepaid import Wall, sooner
from gpucloud.domain.supervision.seen import Goal, Limits, NodeSeen, Readiness, Seen


def prepare(seen: Seen) -> Prepare | None:
    """Bootstrap what runs and is not prepared; a machine whose host key is not known yet is not spoken to.

    Whether one that did not answer does so now is only known when it is tried again.
    """
    waiting = tuple(
        n.node.id
        for n in seen.nodes
        if n.node.state is NodeState.RUNNING
        and n.node.host_key is not None
        and n.readiness is Readiness.NO
        and not n.node.detached
        and (n.status is None or n.status.notice is None)
    )
    return Prepare(node_ids=waiting) if waiting else None


def unfit(seen: Seen, limits: Limits) -> tuple[str, ...]:
    """Return the machines that no attempt can have: not to be prepared, out of reach, long without a host key."""
    return tuple(n.node.id for n in seen.nodes if _is_unfit(n, seen, limits))


def tell(seen: Seen) -> Tell | None:
    """Write to every agent that has not read what is wanted of it."""
    untold = tuple(
        n.node.id
        for n in seen.nodes
        if n.readiness is Readiness.READY and not n.told and not is_gone(n) and n.silent_for == timedelta(0)
    )
    return Tell(node_ids=untold) if untold else None


def make_room(goal: Goal, seen: Seen) -> Action | None:
    """Ask for another machine while the one with a notice still saves: if the budget has the money for both.

    A job that drives itself does so only within the time that is armed: its machines move no shut-off for it.
    """
    noticed = [n for n in seen.nodes if n.status is not None and n.status.notice is not None]
    counted = [n.node.id for n in noticed if not is_gone(n) and not n.node.detached]
    if counted and seen.payable_with_another is not None and not goal.within_rights:
        lower = _lower(seen, seen.payable_with_another)
        if lower is None or not goal.self_driving:
            return lower or Detach(node_id=counted[0])
    # Given up is given up: a frozen node that wakes later would bring its old ranks back.
    given_up = {i.node_id for i in seen.state.interruptions if i.kind is InterruptionKind.FROZEN}
    alive = tuple(n.node.id for n in seen.nodes if not is_gone(n) and not n.node.detached)
    frozen = tuple(node_id for node_id in alive if node_id in given_up)
    return Replace(node_ids=frozen) if frozen else None


def promise(seen: Seen) -> datetime | None:
    """Return until when the machines can be paid, None when it is not worth a start.

    While one is being taken and its replacement is still to come, the time pays for both: promised for the machines of
    now, it would be raised and lowered in turns for as long as the notice stands. One that is detached is counted
    beside the level anyway.
    """
    counted = [n for n in seen.nodes if not is_gone(n) and not n.node.detached]
    taken = any(n.status is not None and n.status.notice is not None for n in counted)
    if taken and seen.payable_with_another is not None:
        return seen.payable_with_another
    return seen.payable_until


def renew(goal: Goal, seen: Seen, wall: Wall, limits: Limits) -> Arm | None:
    """Renewed when half of the horizon is gone, and only if it is worth a call; lowered whenever it must be.

    Towards the end of the budget, machines cost less than was kept for them: then smaller gains are worth a call too.
    Machines of which none answers end their work at the time that they were told: a later one would only be paid for.
    A machine that drives its own job may end its time sooner, and never later.
    """
    payable = (seen.payable_until if goal.self_driving else promise(seen)) or seen.lasts_until
    until = seen.group.armed_until
    if payable is None or until is None:
        return None
    lower = _lower(seen, payable) if not goal.within_rights else None
    if lower is not None or goal.self_driving:
        return lower
    ends = until - seen.now < min(2 * limits.save, wall.horizon / 4)
    least = min(timedelta(seconds=10), wall.horizon / 30) if ends else min(timedelta(seconds=60), wall.horizon / 4)
    worth = payable - until >= least and not all_silent(seen, limits)
    return Arm(until=payable) if worth and until - seen.now < wall.horizon / 2 else None


def can_renew(seen: Seen) -> bool:
    """Whether the budget can promise a later time than the one that is promised."""
    until = seen.state.paid_until
    return seen.payable_until is not None and (until is None or seen.payable_until > until)


def worth_a_start(seen: Seen, wall: Wall) -> bool:
    """Whether an attempt that left at the end of its paid time is followed by another.

    Not when all that is left is what its machines cost less than was kept for them: a start would use that up. The
    paid time may also have been prolonged just after the ranks were asked to leave.
    """
    least = max(wall.least, wall.horizon / 15)
    prolonged = seen.state.paid_until is not None and seen.state.paid_until - seen.now >= least
    payable = seen.payable_until is not None and seen.payable_until - seen.now >= least
    return payable and (can_renew(seen) or prolonged)


def _is_unfit(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    silent = node.readiness is Readiness.READY and is_out_of_reach(node, seen, limits)
    mute = node.node.host_key is None and seen.now - node.node.launched_at >= limits.boot
    broken = node.readiness is Readiness.FAILED or silent or mute
    return not is_gone(node) and not node.node.detached and broken


def _lower(seen: Seen, payable: datetime) -> Arm | None:
    """The shut-off comes closer when more machines are alive than it was reckoned for."""
    until = sooner(seen.group.armed_until, payable)
    return Arm(until=until) if until is not None else None
