"""What goes on beside attempts: prepaid time, machines in place of interrupted ones, bootstrap, telling."""

from __future__ import annotations

from datetime import datetime, timedelta

from gpucloud.domain.money.prepaid import Wall, may_launch, sooner
from gpucloud.domain.node.node import NodeState
from gpucloud.domain.state.state import InterruptionKind
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    Prepare,
    Relieve,
    Replace,
    Tell,
)
from gpucloud.domain.supervision.membership import (
    TAKEN_WITHIN,
    all_silent,
    has_notice,
    is_gone,
    is_out_of_reach,
    warned_until,
)
from gpucloud.domain.supervision.quarantine import is_in_doubt
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
        and not n.node.relieved
        and not has_notice(n)
    )
    return Prepare(node_ids=waiting) if waiting else None


def unfit(seen: Seen, limits: Limits) -> tuple[str, ...]:
    """Return the machines that no attempt can have: not to be prepared, out of reach, long without a host key.

    One whose setup failed is kept until another one's has shown whose fault that is.
    """
    return tuple(n.node.id for n in seen.nodes if _is_unfit(n, seen, limits) and not is_in_doubt(n, seen))


def tell(seen: Seen) -> Tell | None:
    """Write to every agent that has not read what is wanted of it."""
    untold = tuple(
        n.node.id
        for n in seen.nodes
        if n.readiness is Readiness.READY and not n.told and not is_gone(n) and n.silent_for == timedelta(0)
    )
    return Tell(node_ids=untold) if untold else None


def make_room(goal: Goal, seen: Seen, wall: Wall) -> Action | None:
    """Ask for another machine while the one with a notice still saves: if the budget has the money for both.

    The notice is the machine's own word, and code that runs on it can make one up: it stays in its group, behind the
    shut-off, and is ended when nobody has taken it. A job that drives itself does so only within the time that is
    armed: its machines move no shut-off for it.
    """
    alive = [n for n in seen.nodes if not is_gone(n)]
    outstaying = tuple(n.node.id for n in alive if n.node.relieved and seen.now >= warned_until(n, seen) + TAKEN_WITHIN)
    if outstaying:
        return Replace(node_ids=outstaying)
    relieved = sum(n.node.relieved for n in alive)
    known = {i.node_id for i in seen.state.interruptions}  # from when it was written down, its time is counted
    noticed = [n.node.id for n in alive if n.node.id in known and not n.node.relieved and has_notice(n)]
    if noticed and relieved < goal.nodes and not goal.within_rights and _is_time_to_start(seen, wall):
        lower = _lower(seen, seen.payable_with_another) if seen.payable_with_another is not None else None
        if lower is None or not goal.self_driving:
            return lower or Relieve(node_id=noticed[0])
    # Given up is given up: a frozen node that wakes later would bring its old ranks back.
    given_up = {i.node_id for i in seen.state.interruptions if i.kind is InterruptionKind.FROZEN}
    frozen = tuple(n.node.id for n in alive if not n.node.relieved and n.node.id in given_up)
    return Replace(node_ids=frozen) if frozen else None


def _is_time_to_start(seen: Seen, wall: Wall) -> bool:
    """Whether the budget pays for one more machine, and the cloud would still start one before the shut-off."""
    return may_launch(seen.payable_with_another, seen.now, wall) and may_launch(seen.group.armed_until, seen.now, wall)


def promise(seen: Seen) -> datetime | None:
    """Return until when the machines can be paid, None when it is not worth a start.

    While one is being interrupted and its replacement is still to come, the time pays for both: promised for the
    machines of now, it would be raised and lowered in turns for as long as the notice stands. One that is relieved is
    counted beside the level anyway.
    """
    counted = [n for n in seen.nodes if not is_gone(n) and not n.node.relieved]
    noticed = any(has_notice(n) for n in counted)
    if noticed and seen.payable_with_another is not None:
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
    if payable is None:
        return None
    if until is None:  # somebody removed it, or something holds it back: machines without an end are armed anew
        return Arm(until=payable) if seen.group.exists and not goal.self_driving else None
    lower = _lower(seen, payable) if not goal.within_rights else None
    if lower is not None or goal.self_driving:
        return lower
    ends = until - seen.now < min(2 * limits.save, wall.horizon / 4)
    least = min(timedelta(seconds=10), wall.horizon / 30) if ends else min(timedelta(seconds=60), wall.horizon / 4)
    worth = payable - until >= least and not all_silent(seen, limits)
    return Arm(until=payable) if worth and until - seen.now < wall.horizon / 2 else None


def can_renew(seen: Seen) -> bool:
    """Whether the budget can promise a later time than the one that is promised."""
    until = seen.group.armed_until
    return seen.payable_until is not None and (until is None or seen.payable_until > until)


def worth_a_start(seen: Seen, wall: Wall) -> bool:
    """Whether an attempt that left at the end of its paid time is followed by another.

    Not when all that is left is what its machines cost less than was kept for them: a start would use that up. The
    paid time may also have been prolonged just after the ranks were asked to leave.
    """
    least = max(wall.least, wall.horizon / 15)
    armed = seen.group.armed_until
    prolonged = armed is not None and armed - seen.now >= least
    payable = seen.payable_until is not None and seen.payable_until - seen.now >= least
    return payable and (can_renew(seen) or prolonged)


def _is_unfit(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    silent = node.readiness is Readiness.READY and is_out_of_reach(node, seen, limits)
    keyless = node.node.host_key is None and seen.now - node.node.launched_at >= limits.boot
    broken = node.readiness is Readiness.FAILED or silent or keyless
    return not is_gone(node) and not node.node.relieved and broken


def _lower(seen: Seen, payable: datetime) -> Arm | None:
    """The shut-off comes closer when more machines are alive than it was reckoned for."""
    until = sooner(seen.group.armed_until, payable)
    return Arm(until=until) if until is not None else None
