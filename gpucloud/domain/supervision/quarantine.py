"""Nodes that take no part any more: who, and when it is the whole pool that is bad."""

from __future__ import annotations

from gpucloud.domain.node import Fault
from gpucloud.domain.shown import in_one_line
from gpucloud.domain.state import ExitReason, JobState, Quarantine
from gpucloud.domain.supervision.action import CoolDown, Finish, QuarantineNodes
from gpucloud.domain.supervision.membership import is_gone, quarantined
from gpucloud.domain.supervision.seen import InUse, Limits, NodeSeen, Seen

QUARANTINED = "Quarantined"
"""The code of a cooldown that a pool of bad nodes got."""


def note_bad(seen: Seen, limits: Limits) -> QuarantineNodes | None:
    """Write down who was refused by the gate, who was found bad before an attempt, and who fell ill.

    So too whose GPUs others use for longer than is waited.
    """
    known = {one.node_id for one in seen.state.quarantined}
    alive = {node.node.id: node for node in seen.nodes if not is_gone(node)}
    found = {node_id: why for node_id, node in alive.items() if (why := _why(node)) is not None}
    used: frozenset[str] = frozenset()
    if seen.inspection is not None and seen.inspection.done:
        found.update({node_id: in_one_line(why) for node_id, why in seen.inspection.bad if node_id in alive})
        late = {one.node_id: in_one_line(one.why) for one in seen.inspection.in_use if _is_late(one, seen, limits)}
        used = frozenset(late.keys() & alive.keys() - found.keys())
        found.update({node_id: late[node_id] for node_id in sorted(used)})
    news = tuple((node_id, why) for node_id, why in found.items() if node_id not in known)
    return QuarantineNodes(nodes=news, may_pass=used & {node_id for node_id, _ in news}) if news else None


def to_replace(seen: Seen) -> tuple[str, ...]:
    """Return the quarantined nodes that still live and are counted."""
    known = quarantined(seen.state)
    return tuple(n.node.id for n in seen.nodes if n.node.id in known and not is_gone(n) and not n.node.relieved)


def give_up_pool(seen: Seen, limits: Limits) -> CoolDown | None:
    """After some bad nodes in a row the pool is bad: it cools down, and another one is asked, if there is one."""
    bad = in_a_row(seen.state)
    if len(bad) < limits.quarantines:
        return None
    return CoolDown(
        pool=seen.state.pool,
        fault=Fault.CAPACITY,
        code=QUARANTINED,
        message=f"{len(bad)} nodes in a row were bad: {bad[-1].node_id}: {bad[-1].why}",
        length=limits.cooldown_longest,
        longest=limits.cooldown_longest,
    )


def stop_buying(seen: Seen, limits: Limits) -> Finish | None:
    """After some bad pools in a row it is not the machines: what all of them lack, the next ones lack too."""
    since = max((a.started_at for a in seen.state.attempts if a.last_step is not None), default=None)
    # A pool's last cooldown began so long before its end: a bad pool's has the greatest length from the first.
    bad = [c for c in seen.state.cooldowns if c.code == QUARANTINED]
    bad = [c for c in bad if since is None or c.until - limits.cooldown_longest > since]
    if len(bad) < limits.bad_pools:
        return None
    last = max(bad, key=lambda cooldown: cooldown.until)
    message = f"{len(bad)} pools in a row had bad machines; {last.pool}: {last.message}"
    return Finish(reason=ExitReason.NO_CAPACITY, message=message, exit_code=14)


def in_a_row(state: JobState) -> tuple[Quarantine, ...]:
    """Return the nodes quarantined since an attempt last made a step, the job turned to its pool, or went on."""
    started = [attempt.started_at for attempt in state.attempts if attempt.last_step is not None]
    since = max([*started, *([state.pool_at] if state.pool_at is not None else [])], default=None)
    return tuple(one for one in state.quarantined[state.forgiven :] if since is None or one.at > since)


def _is_late(one: InUse, seen: Seen, limits: Limits) -> bool:
    return seen.now - one.since >= limits.in_use


def _why(node: NodeSeen) -> str | None:
    told = node.refused or (node.status.ill if node.status is not None else None)
    return in_one_line(told) if told is not None else None
