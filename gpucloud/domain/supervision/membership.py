"""An attempt as it is seen: who takes part, who answers, when silence is death; how fast it works, when it hangs."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import FREE_WHEN_INTERRUPTED_WITHIN
from gpucloud.domain.node.node import Node, NodeState, PeerReport
from gpucloud.domain.node.status import DONE, OUTPUT, AttemptStatus, Outcome, Progress, RunState, Stop
from gpucloud.domain.state.state import (
    Attempt,
    CheckpointRef,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobState,
    Member,
)
from gpucloud.domain.supervision.snapshot import Limits, NodeSnapshot, Snapshot

NOBODY_ANSWERS = "no machine answers"
NOTICE = timedelta(seconds=120)
"""How long before it takes a machine a cloud gives notice, at the longest."""
TAKEN_WITHIN = timedelta(seconds=60)
"""How long after the time that a notice names the machine is gone."""


def part_of(attempt: Attempt, node: NodeSnapshot | None) -> AttemptStatus | None:
    """Return what the node says of its part in the attempt; None while it has not heard of it."""
    part = node.status.attempt if node is not None and node.status is not None else None
    return part if part is not None and part.attempt == attempt.number else None


def outcome_of(attempt: Attempt, member: Member, node: NodeSnapshot | None) -> Outcome | None:
    """Return how the member's part ended, as its agent says or once said; None where nobody knows."""
    part = part_of(attempt, node)
    return (part.outcome if part is not None else None) or member.outcome


def outcomes_of(attempt: Attempt, snapshot: Snapshot) -> tuple[Outcome | None, ...]:
    """Return how each member's part ended, in rank order."""
    found = zip(attempt.members, members_of(attempt, snapshot), strict=True)
    return tuple(outcome_of(attempt, member, node) for member, node in found)


def is_broken(attempt: Attempt, snapshot: Snapshot) -> bool:
    """Whether some members are over, and not done, while others still work; that one is done is no harm to others."""
    outcomes = outcomes_of(attempt, snapshot)
    overs = [is_over(attempt, node) for node in members_of(attempt, snapshot)]
    undone = any(over and outcome is not Outcome.DONE for over, outcome in zip(overs, outcomes, strict=True))
    return undone and not all(overs)


def members_of(attempt: Attempt, snapshot: Snapshot) -> tuple[NodeSnapshot | None, ...]:
    """Return the attempt's members as seen, in rank order; None for one that the cloud no longer lists."""
    by_id = {node.node.id: node for node in snapshot.nodes}
    return tuple(by_id.get(member.node_id) for member in attempt.members)


def progress_of(attempt: Attempt, snapshot: Snapshot) -> Progress | None:
    """Return what is reckoned with of rank 0's script: what it last reported, or what its output says."""
    part = part_of(attempt, members_of(attempt, snapshot)[0])
    return part.counted if part else None


def unit_of(attempt: Attempt, checkpoint: CheckpointRef | None) -> Counts:
    """Return what an attempt's steps are: as it told, else, as in states of before that, as the job's checkpoint."""
    return attempt.counts or (checkpoint.counts if checkpoint is not None else Counts.STEPS)


def since_anew(attempts: tuple[Attempt, ...]) -> tuple[Attempt, ...]:
    """Return the attempts from the newest on whose script began anew, else all: what was done before is lost."""
    return attempts[max((at for at, one in enumerate(attempts) if one.begun_anew), default=0) :]


def shown_of(attempt: Attempt, snapshot: Snapshot) -> tuple[Progress | None, tuple[tuple[str, float], ...]]:
    """Return what people are told of rank 0's script: how far it is, and other numbers that it prints."""
    part = part_of(attempt, members_of(attempt, snapshot)[0])
    return (part.shown, part.readings.values if part.readings else ()) if part else (None, ())


def time_left(snapshot: Snapshot) -> timedelta | None:
    """Return the time to the last step at the pace of the last steps; None while nobody knows, or none comes."""
    attempt = snapshot.state.attempt
    goes_on = attempt is not None and not is_over(attempt, members_of(attempt, snapshot)[0])
    return time_to_go(shown_of(attempt, snapshot)[0]) if attempt is not None and goes_on else None


def time_to_go(progress: Progress | None) -> timedelta | None:
    """Return the time to the last step at that pace, none after `run.done()`; None while it cannot be known."""
    if progress is not None and progress.phase == DONE:
        return timedelta(0)
    if progress is None or progress.total_steps is None or progress.step_seconds is None or progress.stalled_for:
        return None
    return span_of(max(0, progress.total_steps - progress.step) * progress.step_seconds)


def is_over(attempt: Attempt, node: NodeSnapshot | None) -> bool:
    """Whether the member has nothing running of this attempt, and never will."""
    if node is None or is_gone(node):
        return True
    part = part_of(attempt, node)
    if part is None:  # an agent that reads of the end first does not begin
        return attempt.ordered is not Stop.NO and node.heard
    return part.state is RunState.EXITED


def is_gone(node: NodeSnapshot | None) -> bool:
    """Whether the cloud no longer lists the node as alive."""
    return node is None or node.node.state is NodeState.TERMINATED


def has_notice(node: NodeSnapshot) -> bool:
    """Whether the machine says that the cloud is about to take it."""
    return node.status is not None and node.status.notice is not None


def noticed_beside(snapshot: Snapshot, ranks: Collection[str] = ()) -> tuple[Interruption, ...]:
    """Return the notices to write down of machines that have no part in an attempt; those of `ranks` have one.

    As they say, or as we once heard: one that was relieved is among them, for how long it may stay is counted from what
    is written down. What we end ourselves nobody takes.
    """
    known = {*ranks, *(i.node_id for i in snapshot.state.interruptions)}
    alive = [n for n in snapshot.nodes if not is_gone(n) and n.node.id not in known and n.node.end_cause is None]
    news, kind = [n.node.id for n in alive if n.node.relieved or has_notice(n)], InterruptionKind.NOTICE
    return tuple(Interruption(node_id=i, kind=kind, attempt=None, noticed_at=snapshot.now) for i in news)


def warned_until(node: NodeSnapshot, snapshot: Snapshot) -> datetime:
    """Return until when a cloud takes a machine that it warned, as counted from when we wrote that down."""
    heard = [i.noticed_at for i in snapshot.state.interruptions if i.node_id == node.node.id]
    return (max(heard) if heard else snapshot.now) + NOTICE


def interrupted_at(node: NodeSnapshot, snapshot: Snapshot) -> datetime | None:
    """Return when a machine is interrupted that has a notice or was relieved; None for any other.

    The notice is the machine's own word, and what runs there can name any time: it is believed up to what a cloud does.
    """
    notice = node.status.notice if node.status is not None else None
    if notice is None:
        return warned_until(node, snapshot) if node.node.relieved else None
    return min(notice.at, warned_until(node, snapshot))


def some_leave(snapshot: Snapshot) -> bool:
    """Whether machines are about to be interrupted for which money is kept, or was spent: it is free in a moment.

    That is so of those beside the group's level. One that the level counts comes back and costs as much, unless it is
    so young that nothing is charged for it; once it is back, the one that leaves is beside the level. Which one that is
    may not be known yet: the cloud starts the other when it warns.
    """
    alive = [n for n in snapshot.nodes if not is_gone(n)]
    counted = [n for n in alive if not n.node.relieved]
    came_back = len(counted) > snapshot.group.size
    noticed = [(n.node, at) for n in alive if (at := interrupted_at(n, snapshot)) is not None]
    leaving = [at for node, at in noticed if node.relieved or came_back or _is_free(node, at)]
    if came_back:
        leaving.append(max(n.node.launched_at for n in counted) + NOTICE)
    return any(snapshot.now < at + TAKEN_WITHIN for at in leaving)


def _is_free(node: Node, interrupted_at: datetime) -> bool:
    return node.pool.market is Market.SPOT and interrupted_at - node.launched_at < FREE_WHEN_INTERRUPTED_WITHIN


def is_usable(node: NodeSnapshot, limits: Limits) -> bool:
    """Whether an attempt may be placed on the node once it is prepared."""
    return not is_gone(node) and not node.node.relieved and not has_notice(node) and node.silent_for < limits.silent


def quarantined(state: JobState) -> frozenset[str]:
    """Return the nodes that take no part any more."""
    return frozenset(one.node_id for one in state.quarantined)


def barred(state: JobState) -> frozenset[str]:
    """Return those of them whose hosts would be no better another time."""
    return frozenset(one.node_id for one in state.quarantined if not one.may_pass)


def somebody_answers(snapshot: Snapshot) -> bool:
    """All silent at once means that we are offline, and nothing is believed."""
    return any(node.silent_for == timedelta(0) and not is_gone(node) for node in snapshot.nodes)


def all_silent(snapshot: Snapshot, limits: Limits) -> bool:
    """Whether there are nodes, and none has answered for long enough that it is no passing delay."""
    alive = [node for node in snapshot.nodes if not is_gone(node)]
    return bool(alive) and all(node.silent_for >= limits.silent for node in alive)


# When a machine that tells us nothing is believed to be dead: a second witness agrees, or nobody can.


def believed_dead(node: NodeSnapshot, snapshot: Snapshot, limits: Limits) -> bool:
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
    if node.peer_report is PeerReport.ALIVE:
        return False
    if node.peer_report is PeerReport.DEAD and somebody_answers(snapshot):
        return True
    return node.silent_for >= limits.alone and (somebody_answers(snapshot) or _is_only_one(snapshot))


def is_out_of_reach(node: NodeSnapshot, snapshot: Snapshot, limits: Limits) -> bool:
    """Whether the machine is of no use to us: alive or not, we cannot reach it, and others we can."""
    return believed_dead(node, snapshot, limits) or (node.silent_for >= limits.alone and somebody_answers(snapshot))


def vouched_for(snapshot: Snapshot, limits: Limits) -> tuple[NodeSnapshot, ...]:
    """Return the machines that do not answer us, and of which another witness says that they live."""
    silent = (n for n in snapshot.nodes if not is_gone(n) and n.silent_for >= limits.silent)
    return tuple(node for node in silent if node.peer_report is PeerReport.ALIVE and not node.node.impaired)


def is_doubtful(node: NodeSnapshot | None) -> bool:
    """Whether it may yet turn out that the machine went: it is silent, and nobody has vouched for it."""
    return (
        node is not None
        and not is_gone(node)
        and node.silent_for > timedelta(0)
        and node.peer_report is not PeerReport.ALIVE
    )


def _is_only_one(snapshot: Snapshot) -> bool:
    return sum(not is_gone(node) for node in snapshot.nodes) == 1


# How fast a job works: what is left, how long its starts take, and when it makes no step at all (hangs).


_MANY_STEPS = 10  # from so many on, the clock says what a step takes with all that goes on between
_MANY_STARTS = 3  # so many speak for themselves; before, the guess counts as one of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The job's whole work and what is left of it, as times without interruption; None while nobody knows.

    `changeover` passes from the launch of machines to their first step that is new, the steps that are lost meanwhile
    included; `handover` is what remains of it where the new machines stand ready while the old ones work. `start` is
    it without those steps: once they are lost, they are among the work that is left.
    """

    work: timedelta | None
    left: timedelta | None
    changeover: timedelta
    handover: timedelta
    start: timedelta


def pace_of(state: JobState, work: timedelta | None, now: datetime, limits: Limits, nodes: int) -> Pace:
    """Return the job's pace: measured where it can be, else by what its file says of the work, and by the guess.

    Times of work are those of `nodes` nodes. A step that was only timed on fewer is taken to be as many times longer
    there: the same samples, divided over fewer.
    """
    whole, left = _work(state, work, now, nodes)
    starts = _starts(state, limits)
    return Pace(
        work=whole,
        left=left,
        changeover=_p95([start + lost for start, lost in starts], limits.changeover),
        handover=_p95(_handovers(state), limits.changeover / 2),
        start=_p95([start for start, _ in starts], limits.changeover),
    )


def timed(attempt: Attempt, now: datetime) -> Attempt:
    """Return the attempt, which made its `last_step` just now, with the time of its first step and of one step.

    The median of single steps knows nothing of what goes on between them: saving, evaluating, waiting for data.
    """
    if attempt.first_step is None or attempt.last_step is None:
        return attempt
    made, median_s = attempt.last_step - attempt.first_step, attempt.step_seconds or 0.0
    first = attempt.stepped_at or max(attempt.started_at, now - span_of(made * median_s))
    by_clock_s = (now - first).total_seconds() / made if made >= _MANY_STEPS else 0.0
    return replace(attempt, stepped_at=first, last_step_at=now, pace_s=max(by_clock_s, median_s) or attempt.pace_s)


def _work(
    state: JobState, told: timedelta | None, now: datetime, nodes: int
) -> tuple[timedelta | None, timedelta | None]:
    """Return all work and what is left, from the steps where they are known, else from what the job file says."""
    total = next((a.total_steps for a in reversed(state.attempts) if a.total_steps), None)
    pace_s = _pace_s(state, nodes)
    done = _steps_done(state, pace_s, now)
    if total is not None and pace_s is not None:
        return span_of(total * pace_s), span_of(max(0.0, total - done) * pace_s)
    if told is None:
        return None, None
    share = done / total if total else done * (pace_s or 0.0) / told.total_seconds()
    return told, told * max(0.0, 1 - share)


def _pace_s(state: JobState, nodes: int) -> float | None:
    """Return what a step takes on so many nodes: the newest attempt that had them tells, else the newest at all."""
    timed = [(a.pace_s, len(a.members)) for a in reversed(state.attempts) if a.pace_s]
    return next((pace_s for pace_s, had in timed if had == nodes), timed[0][0] * timed[0][1] / nodes if timed else None)


def _steps_done(state: JobState, pace_s: float | None, now: datetime) -> float:
    """Return the steps done: those that are saved, or made by an attempt that runs, with a part of the next one."""
    known = since_anew(state.attempts)
    lost = (known[0].first_step or 1) - 1 if known and known[0].begun_anew else 0  # saves are numbered on
    saved = max((a.saved_step or 0 for a in known), default=0)
    saved = max(saved, state.checkpoint.step if state.checkpoint is not None else 0) - lost
    running = state.attempt
    if running is None or running.last_step is None:
        return max(0, saved)
    since_s = (now - running.last_step_at).total_seconds() if running.last_step_at is not None else 0.0
    return max(0, saved, running.last_step - lost + min(1.0, since_s / pace_s if pace_s else 0.0))


def _starts(state: JobState, limits: Limits) -> list[tuple[timedelta, timedelta]]:
    """Return how long each start on new machines took, and the steps that were made again after it."""
    launched = {interval.node_id: interval.launched_at for interval in state.nodes}
    found: list[tuple[timedelta, timedelta]] = []
    before: Attempt | None = None
    for attempt in state.attempts:
        since = max((launched[m.node_id] for m in attempt.members if m.node_id in launched), default=None)
        stepped = None if attempt.counts is Counts.SAVES else attempt.stepped_at  # a first save comes late
        resized = before is not None and before.reason is ExitReason.RESIZED  # its machines had stood ready
        if since and stepped and not resized and (before is None or since > before.started_at):
            span = stepped - since
            # The first machines may have stood ready for long, since `up`.
            found.append((min(span, limits.boot) if before is None else span, _lost(before, attempt)))
        before = attempt
    return found


def _lost(before: Attempt | None, attempt: Attempt) -> timedelta:
    """Return the time that the steps took which had to be made again."""
    if before is None or before.last_step is None or attempt.first_step is None or attempt.begun_anew:
        return timedelta(0)
    return span_of(max(0, before.last_step + 1 - attempt.first_step) * (before.pace_s or 0.0))


def _handovers(state: JobState) -> list[timedelta]:
    """Return what it took to save and leave on request, and with it the longest way from there to a step."""
    starts = [a.stepped_at - a.started_at for a in state.attempts if a.stepped_at and a.counts is not Counts.SAVES]
    ends = [a.ended_at - a.ending_at for a in state.attempts if a.ended_at and a.ending_at]
    return [start + max(ends, default=timedelta(0)) for start in starts]


def _p95(spans: Sequence[timedelta], guess: timedelta) -> timedelta:
    known = sorted(spans if len(spans) >= _MANY_STARTS else (*spans, guess))
    return known[math.ceil(0.95 * len(known)) - 1]


# When an attempt hangs: its machines answer, and no step is made.


_TRAINING = ("start", "train")
_REPORT = "what takes longer belongs in `with run.phase(...)`"
_LONGEST_START = 4  # times the limit
AGAIN = 1.5  # times the longest step that came: the next evaluation may take somewhat longer


def hung(attempt: Attempt, snapshot: Snapshot, limits: Limits) -> str | None:
    """Return how the attempt hangs, in one line; None when it does not, or has no source of steps.

    Only while the script starts and while it trains: saving and other phases that it reports take their own time, and
    so does what it does after `run.done()`, or when its part is over while others still work.
    """
    part = part_of(attempt, members_of(attempt, snapshot)[0])
    progress = part.shown if part is not None and part.state is RunState.RUNNING else None
    limit = patience(progress, snapshot.state.attempts, limits) if progress is not None else None
    if progress is None or limit is None or progress.age_s <= limit.total_seconds():
        return None
    if progress.phase == OUTPUT:
        return f"no other step in the output for {progress.age_s:.0f} s (`metrics: {{step: …}}`); stacks are in the log"
    if progress.phase == "start" or progress.step_seconds is None:
        return f"no first step within {limit.total_seconds() / 60:.0f} min ({_REPORT}); stacks are in the log"
    median = f"{progress.step_seconds:.2g} s"
    return f"no step for {progress.age_s:.0f} s (median {median}; {_REPORT}); stacks are in the log"


def patience(progress: Progress, attempts: tuple[Attempt, ...], limits: Limits) -> timedelta | None:
    """Return for how long no step may come of a script that stands so; None where nothing is taken for a hang.

    Where steps are read from the output, nothing tells what goes on between two of them: there it is longer.
    """
    if progress.phase == OUTPUT and progress.step_seconds is not None:
        known = hang_limit(progress.step_seconds, attempts, limits)
        return max(limits.hang_printed, known, span_of(AGAIN * (progress.longest_s or 0.0)))
    if progress.phase not in _TRAINING:
        return None
    if progress.phase == "start" or progress.step_seconds is None:
        return start_limit(attempts, limits)
    return hang_limit(progress.step_seconds, attempts, limits)


def hang_limit(step_seconds: float, attempts: tuple[Attempt, ...], limits: Limits) -> timedelta:
    """Return how long a step may take: `hang_steps` times the median, at least `hang_at_least`.

    Doubled for each attempt in a row that hung: where it is no hang but a long evaluation that the script does not
    report, the job comes through. Once a step has come after so long, in any attempt, one may take that long again.
    """
    longest = max((attempt.longest_step_s or 0.0 for attempt in attempts), default=0.0)
    seconds = max(limits.hang_steps * step_seconds, AGAIN * longest)
    once = max(limits.hang_at_least, span_of(seconds))
    return once * longer_by(attempts)


def start_limit(attempts: tuple[Attempt, ...], limits: Limits) -> timedelta:
    """Return how long a script may take from `resume.init` to its first step: `start`, what it loads and compiles too.

    Doubled for each attempt in a row that hung, four times `start` at most: such an attempt saves nothing, and what
    rightly takes longer can be reported as a phase.
    """
    return limits.start * min(_LONGEST_START, longer_by(attempts))


def longer_by(attempts: tuple[Attempt, ...]) -> int:
    """Return how many times as long as at first a step may take, for the attempts that hung."""
    return 1 << min(10, hangs_in_a_row(attempts))


def hangs_in_a_row(attempts: tuple[Attempt, ...]) -> int:
    """Return how many of the newest attempts that are over hung, one after the other."""
    count = 0
    for attempt in reversed([a for a in attempts if a.reason is not None]):
        if attempt.reason is not ExitReason.HUNG:
            break
        count += 1
    return count
