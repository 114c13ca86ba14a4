"""Who takes part in an attempt, what each says of it, and when one that says nothing is believed to be dead."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import FREE_WHEN_INTERRUPTED_WITHIN
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.node.status import AttemptStatus, Outcome, Progress, RunState, Stop
from gpucloud.domain.state.state import Attempt, Interruption, InterruptionKind, JobState, Member
from gpucloud.domain.supervision.seen import Limits, NodeSeen, PeerReport, Seen

NOBODY_ANSWERS = "no machine answers"
NOTICE = timedelta(seconds=120)
"""How long before it takes a machine a cloud gives notice, at the longest."""
TAKEN_WITHIN = timedelta(seconds=60)
"""How long after the time that a notice names the machine is gone."""


def part_of(attempt: Attempt, node: NodeSeen | None) -> AttemptStatus | None:
    """Return what the node says of its part in the attempt; None while it has not heard of it."""
    part = node.status.attempt if node is not None and node.status is not None else None
    return part if part is not None and part.attempt == attempt.number else None


def outcome_of(attempt: Attempt, member: Member, node: NodeSeen | None) -> Outcome | None:
    """Return how the member's part ended, as its agent says or once said; None where nobody knows."""
    part = part_of(attempt, node)
    return (part.outcome if part is not None else None) or member.outcome


def outcomes_of(attempt: Attempt, seen: Seen) -> tuple[Outcome | None, ...]:
    """Return how each member's part ended, in rank order."""
    found = zip(attempt.members, members_of(attempt, seen), strict=True)
    return tuple(outcome_of(attempt, member, node) for member, node in found)


def is_broken(attempt: Attempt, seen: Seen) -> bool:
    """Whether some members are over, and not done, while others still work; that one is done is no harm to others."""
    outcomes = outcomes_of(attempt, seen)
    overs = [is_over(attempt, node) for node in members_of(attempt, seen)]
    return not all(overs) and any(
        over and outcome is not Outcome.DONE for over, outcome in zip(overs, outcomes, strict=True)
    )


def members_of(attempt: Attempt, seen: Seen) -> tuple[NodeSeen | None, ...]:
    """Return the attempt's members as seen, in rank order; None for one that the cloud no longer lists."""
    by_id = {node.node.id: node for node in seen.nodes}
    return tuple(by_id.get(member.node_id) for member in attempt.members)


def progress_of(attempt: Attempt, seen: Seen) -> Progress | None:
    """Return what rank 0's script last reported."""
    part = part_of(attempt, members_of(attempt, seen)[0])
    return part.progress if part else None


def is_over(attempt: Attempt, node: NodeSeen | None) -> bool:
    """Whether the member has nothing running of this attempt, and never will."""
    if node is None or is_gone(node):
        return True
    part = part_of(attempt, node)
    if part is None:  # an agent that reads of the end first does not begin
        return attempt.ordered is not Stop.NO and node.heard
    return part.state is RunState.EXITED


def is_gone(node: NodeSeen | None) -> bool:
    """Whether the cloud no longer lists the node as alive."""
    return node is None or node.node.state is NodeState.TERMINATED


def has_notice(node: NodeSeen) -> bool:
    """Whether the machine says that the cloud is about to take it."""
    return node.status is not None and node.status.notice is not None


def noticed_beside(seen: Seen, ranks: Collection[str] = ()) -> tuple[Interruption, ...]:
    """Return the notices to write down of machines that have no part in an attempt; those of `ranks` have one.

    As they say, or as we once heard: one that was relieved is among them, for how long it may stay is counted from what
    is written down. What we end ourselves nobody takes.
    """
    known = {*ranks, *(i.node_id for i in seen.state.interruptions)}
    alive = [n for n in seen.nodes if not is_gone(n) and n.node.id not in known and n.node.end_cause is None]
    news, kind = [n.node.id for n in alive if n.node.relieved or has_notice(n)], InterruptionKind.NOTICE
    return tuple(Interruption(node_id=i, kind=kind, attempt=None, noticed_at=seen.now) for i in news)


def warned_until(node: NodeSeen, seen: Seen) -> datetime:
    """Return until when a cloud takes a machine that it warned, as counted from when we wrote that down."""
    heard = [i.noticed_at for i in seen.state.interruptions if i.node_id == node.node.id]
    return (max(heard) if heard else seen.now) + NOTICE


def interrupted_at(node: NodeSeen, seen: Seen) -> datetime | None:
    """Return when a machine is interrupted that has a notice or was relieved; None for any other.

    The notice is the machine's own word, and what runs there can name any time: it is believed up to what a cloud does.
    """
    notice = node.status.notice if node.status is not None else None
    if notice is None:
        return warned_until(node, seen) if node.node.relieved else None
    return min(notice.at, warned_until(node, seen))


def some_leave(seen: Seen) -> bool:
    """Whether machines are about to be interrupted for which money is kept, or was spent: it is free in a moment.

    That is so of those beside the group's level. One that the level counts comes back and costs as much, unless it is
    so young that nothing is charged for it; once it is back, the one that leaves is beside the level. Which one that is
    may not be known yet: the cloud starts the other when it warns.
    """
    alive = [n for n in seen.nodes if not is_gone(n)]
    counted = [n for n in alive if not n.node.relieved]
    came_back = len(counted) > seen.group.size
    noticed = [(n.node, at) for n in alive if (at := interrupted_at(n, seen)) is not None]
    leaving = [at for node, at in noticed if node.relieved or came_back or _is_free(node, at)]
    if came_back:
        leaving.append(max(n.node.launched_at for n in counted) + NOTICE)
    return any(seen.now < at + TAKEN_WITHIN for at in leaving)


def _is_free(node: Node, interrupted_at: datetime) -> bool:
    return node.pool.market is Market.SPOT and interrupted_at - node.launched_at < FREE_WHEN_INTERRUPTED_WITHIN


def is_usable(node: NodeSeen, limits: Limits) -> bool:
    """Whether an attempt may be placed on the node once it is prepared."""
    return not is_gone(node) and not node.node.relieved and not has_notice(node) and node.silent_for < limits.silent


def quarantined(state: JobState) -> frozenset[str]:
    """Return the nodes that take no part any more."""
    return frozenset(one.node_id for one in state.quarantined)


def barred(state: JobState) -> frozenset[str]:
    """Return those of them whose hosts would be no better another time."""
    return frozenset(one.node_id for one in state.quarantined if not one.may_pass)


def somebody_answers(seen: Seen) -> bool:
    """All silent at once means that we are offline, and nothing is believed."""
    return any(node.silent_for == timedelta(0) and not is_gone(node) for node in seen.nodes)


def all_silent(seen: Seen, limits: Limits) -> bool:
    """Whether there are nodes, and none has answered for long enough that it is no passing delay."""
    alive = [node for node in seen.nodes if not is_gone(node)]
    return bool(alive) and all(node.silent_for >= limits.silent for node in alive)


# When a machine that tells us nothing is believed to be dead: a second witness agrees, or nobody can.


def believed_dead(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    """Whether the silent machine is given up, or the one that answers and has said nothing for `alone`.

    Of a silent one the cloud says that it is impaired, or another machine knocked in vain; where nobody can tell, it is
    given up after `alone`. All machines silent at once means that we are offline: then only the cloud is believed,
    unless there is but one machine.
    """
    if is_gone(node):
        return False
    if node.mute_for >= limits.alone:
        return True
    if node.silent_for < limits.silent:
        return False
    if node.node.impaired:
        return True
    if node.word is PeerReport.ALIVE:
        return False
    if node.word is PeerReport.DEAD and somebody_answers(seen):
        return True
    return node.silent_for >= limits.alone and (somebody_answers(seen) or _is_only_one(seen))


def is_out_of_reach(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    """Whether the machine is of no use to us: alive or not, we cannot reach it, and others we can."""
    return believed_dead(node, seen, limits) or (node.silent_for >= limits.alone and somebody_answers(seen))


def vouched_for(seen: Seen, limits: Limits) -> tuple[NodeSeen, ...]:
    """Return the machines that do not answer us, and of which another witness says that they live."""
    silent = (n for n in seen.nodes if not is_gone(n) and n.silent_for >= limits.silent)
    return tuple(node for node in silent if node.word is PeerReport.ALIVE and not node.node.impaired)


def is_doubtful(node: NodeSeen | None) -> bool:
    """Whether it may yet turn out that the machine went: it is silent, and nobody has vouched for it."""
    return (
        node is not None and not is_gone(node) and node.silent_for > timedelta(0) and node.word is not PeerReport.ALIVE
    )


def _is_only_one(seen: Seen) -> bool:
    return sum(not is_gone(node) for node in seen.nodes) == 1
