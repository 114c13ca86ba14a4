"""What kind of state a job is in, in a few words: all that the next step may depend on, told apart by hand.

Written down here anew, and not as the product tells it; `expected.txt` beside says what each kind is to lead to.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.node.node import NodeState
from gpucloud.domain.node.status import AttemptStatus, RunState, Stop
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import Attempt, ExitReason
from gpucloud.domain.supervision.snapshot import Limits, NodeSnapshot, Readiness, Snapshot

OUTSIDE = "outside"
_AT_ONCE = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an order wants of whoever decides: `who` is one of outside, machine, machine of AWS."""

    who: str
    until: str
    end: bool
    keep: bool
    hold: timedelta | None
    drill: bool
    nodes: int
    fewest: int


def wish_of(order: Order, who: str, now: datetime, *, leaves: bool = False) -> Wish:
    """Return what the order wants now; a process that leaves stays only until the machines go on by themselves."""
    resources = order.resolved.resources
    return Wish(
        who=who,
        until="launched" if leaves else order.until.value,
        end=order.end is not None or (order.deadline_at is not None and now >= order.deadline_at),
        keep=order.keep and order.end is None,
        hold=order.hold if order.end is None and order.unattended is None and who == OUTSIDE else None,
        drill=order.drill and who != "machine of AWS",
        nodes=resources.nodes,
        fewest=resources.least_nodes or resources.nodes,
    )


def kind_of(wish: Wish, snapshot: Snapshot, limits: Limits) -> str:
    """Return the kind: the phase, who decides and what is wanted, then what is there."""
    phase = phase_of(wish, snapshot)
    if phase == "held":
        return f"held | {wish.who} | {_paid_beyond(wish, snapshot)}"
    if phase in ("over", "to end", "kept"):
        return f"{phase} | {wish.who}{_unpaid(snapshot) if phase == 'kept' else ''}"
    if phase in ("works", "broken", "all over"):
        facts = _during(snapshot.state.attempts[-1], wish, snapshot, limits)
    else:
        facts = _between(wish, snapshot, limits)
    return " | ".join((phase, wish.who, _wanted(wish, snapshot), *facts))


def phase_of(wish: Wish, snapshot: Snapshot) -> str:
    """Return where the job is between its start and its end."""
    state = snapshot.state
    if state.status.ended:
        if state.torn_down:
            return "over"
        return "kept" if _is_kept(wish, snapshot) else "held" if _is_held(wish, snapshot) else "to end"
    attempt = state.attempts[-1] if state.attempts else None
    if attempt is not None and attempt.reason is None:
        if all(_is_over(attempt, member.node_id, snapshot) for member in attempt.members):
            return "all over"
        gone = any(not _lives(_node(member.node_id, snapshot)) for member in attempt.members)
        return "broken" if gone or attempt.ordered is not Stop.NO else "works"
    return "between" if snapshot.group.exists else "no group"


def _is_kept(wish: Wish, snapshot: Snapshot) -> bool:
    armed = snapshot.group.armed_until
    there = any(node.state is not NodeState.TERMINATED for node in snapshot.group.nodes)
    stay = there or (armed is not None and armed > snapshot.now)
    return wish.keep and snapshot.state.exit_reason is ExitReason.SUCCEEDED and stay


def _unpaid(snapshot: Snapshot) -> str:
    """Whether the cloud ends machines that live later than the budget pays for, or never: half an hour is told."""
    paid, armed = snapshot.payable_until or snapshot.lasts_until or snapshot.now, snapshot.group.armed_until
    there = any(node.state is not NodeState.TERMINATED for node in snapshot.group.nodes)
    if there and armed is None:
        return " | not armed"
    late = armed is not None and armed - paid > timedelta(seconds=1) and paid - snapshot.now < timedelta(minutes=30)
    return " | not paid" if there and late else ""


def _is_held(wish: Wish, snapshot: Snapshot) -> bool:
    """Machines of a script, or of a setup, that failed by itself wait for the mended one."""
    state = snapshot.state
    there = any(node.state is not NodeState.TERMINATED for node in snapshot.group.nodes)
    failed = state.script_failed
    if wish.hold is None or state.ended_at is None or not failed or not there:
        return False
    return snapshot.now < state.ended_at + wish.hold


def _paid_beyond(wish: Wish, snapshot: Snapshot) -> str:
    """Whether the cloud ends them later than the wait, or the budget, allows, too soon by far, or never."""
    assert wish.hold is not None
    assert snapshot.state.ended_at is not None
    until = min(snapshot.state.ended_at + wish.hold, snapshot.payable_until or snapshot.lasts_until or snapshot.now)
    armed = snapshot.group.armed_until
    if armed is None:
        return "not armed"
    if until - armed >= timedelta(seconds=30):
        return "paid short"
    return "paid beyond" if armed - until > timedelta(seconds=1) else "paid"


def _wanted(wish: Wish, snapshot: Snapshot) -> str:
    if wish.end:
        return "to end"
    return f"{wish.until}, drill" if wish.drill and snapshot.state.drilled is None else wish.until


def _between(wish: Wish, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    if wish.end:
        return ()
    if snapshot.payable_until is None:
        return (_money(snapshot), _news(snapshot))
    if not snapshot.group.exists:
        return (_money(snapshot),)
    ready = sum(_is_usable(node, limits) and node.readiness is Readiness.READY for node in snapshot.nodes)
    enough = "enough ready" if ready >= wish.fewest else "not ready"
    return (_money(snapshot), _armed(snapshot), _level(wish, snapshot), enough, _news(snapshot))


def _during(attempt: Attempt, wish: Wish, snapshot: Snapshot, limits: Limits) -> tuple[str, ...]:
    ending = "goes on"
    if attempt.ending_reason is not None:
        ending = "leaves" if attempt.ending_reason.retried else "ends"
    if wish.who != OUTSIDE and snapshot.payable_until is None and snapshot.lasts_until is None:
        ending = f"{ending}, pays nothing"
    if _outlives_its_end(attempt, snapshot, limits):
        ending = f"{ending}, does not die"
    return (ending, _news(snapshot), *(["nobody answers"] if _nobody_answers(snapshot, limits) else []))


def _outlives_its_end(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> bool:
    if attempt.ordered is not Stop.KILL or attempt.killed_at is None:
        return False
    alive = [_node(one.node_id, snapshot) for one in attempt.members if not _is_over(attempt, one.node_id, snapshot)]
    answering = any(node is not None and node.silent_for < limits.silent for node in alive)
    return answering and snapshot.now - attempt.killed_at >= timedelta(minutes=2)


def _money(snapshot: Snapshot) -> str:
    if snapshot.payable_until is not None:
        return "pays a start"
    return "pays the rest" if snapshot.lasts_until is not None else "pays nothing"


def _armed(snapshot: Snapshot) -> str:
    until = snapshot.group.armed_until
    return "armed" if until is not None and until > snapshot.now else "not armed"


def _level(wish: Wish, snapshot: Snapshot) -> str:
    if any(one.pool == snapshot.state.pool and one.until > snapshot.now for one in snapshot.state.cooldowns):
        return "pool refused" if snapshot.group.size or snapshot.group.counted else "pool refused, empty"
    return "too few asked" if snapshot.group.size < wish.nodes else "asked for"


def _nobody_answers(snapshot: Snapshot, limits: Limits) -> bool:
    alive = [node for node in snapshot.nodes if _lives(node)]
    return bool(alive) and all(node.silent_for >= limits.silent for node in alive)


def _news(snapshot: Snapshot) -> str:
    """What is to be done first about single machines."""
    known = {one.node_id for one in snapshot.state.interruptions}
    alive = [node for node in snapshot.nodes if _lives(node)]
    fresh = [
        node
        for node in alive
        if node.readiness is Readiness.NO and node.node.host_key and not node.node.relieved and not _notice(node)
        and node.node.state is NodeState.RUNNING
    ]  # fmt: skip
    noticed = [node for node in alive if _notice(node)]
    untold = [n for n in alive if n.readiness is Readiness.READY and not n.told and n.silent_for == _AT_ONCE]
    bad = [node for node in alive if node.readiness is Readiness.FAILED]
    facts = {
        "fresh machine": bool(fresh),
        "notice": any(node.node.id not in known for node in noticed),
        "untold": bool(untold),
        "interrupted soon": any(not node.node.relieved for node in noticed if node.node.id in known),
        "unfit": bool(bad),
    }
    return next((name for name, holds in facts.items() if holds), "no news")


def _notice(node: NodeSnapshot) -> bool:
    return node.status is not None and node.status.notice is not None


def _node(node_id: str, snapshot: Snapshot) -> NodeSnapshot | None:
    return next((node for node in snapshot.nodes if node.node.id == node_id), None)


def _lives(node: NodeSnapshot | None) -> bool:
    return node is not None and node.node.state is not NodeState.TERMINATED


def _is_usable(node: NodeSnapshot, limits: Limits) -> bool:
    return _lives(node) and not node.node.relieved and not _notice(node) and node.silent_for < limits.silent


def _part(attempt: Attempt, node: NodeSnapshot | None) -> AttemptStatus | None:
    part = node.status.attempt if node is not None and node.status is not None else None
    return part if part is not None and part.attempt == attempt.number else None


def _is_over(attempt: Attempt, node_id: str, snapshot: Snapshot) -> bool:
    node = _node(node_id, snapshot)
    if node is None or not _lives(node):
        return True
    part = _part(attempt, node)
    if part is None:
        return attempt.ordered is not Stop.NO and node.heard
    return part.state is RunState.EXITED
