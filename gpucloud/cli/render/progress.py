"""What a display shows of one pass."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.cli.render.use import brief
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.money.ledger import Spend
from gpucloud.domain.node.node import NodeState
from gpucloud.domain.node.status import Stop
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Action, Arm, Done, Wait
from gpucloud.domain.supervision.membership import NOBODY_ANSWERS, progress_of
from gpucloud.domain.supervision.seen import NodeSeen, Readiness, Seen
from gpucloud.domain.untrusted import in_one_line
from gpucloud.usecases.jobstore.report import WORDS, Condition, time_left

_LAUNCHES_FOR = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """One node: its id, where it is, its state in one word, and how its GPUs are used, empty without any."""

    node_id: str
    zone: str
    word: str
    gpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One pass, ready to be shown."""

    job: str
    phase: str
    attempt: int | None
    step: int | None
    first_step: int | None
    total_steps: int | None
    loss: float | None
    time_left: timedelta | None
    committed_step: int | None
    spend: Spend
    paid_until: datetime | None
    nodes: tuple[NodeLine, ...]
    gpus: str = ""


def snapshot(seen: Seen, action: Action, spend: Spend) -> Snapshot:
    """Return what is to be shown of the pass."""
    attempt = seen.state.attempt
    progress = progress_of(attempt, seen) if attempt else None
    return Snapshot(
        job=seen.state.job,
        phase=_phase(seen, action, progress.phase if progress else None),
        attempt=attempt.number if attempt else None,
        step=progress.step if progress else None,
        first_step=progress.first_step if progress else None,
        total_steps=progress.total_steps if progress else None,
        loss=progress.loss if progress else None,
        time_left=time_left(seen),
        committed_step=progress.committed_step if progress else None,
        spend=spend,
        paid_until=seen.state.paid_until,
        gpus=brief([gpu for node in _working(seen) if node.status for gpu in node.status.gpus]),
        nodes=tuple(_node_line(node, seen) for node in seen.nodes if node.node.state is not NodeState.TERMINATED),
    )


def _working(seen: Seen) -> list[NodeSeen]:
    """Return the members of the attempt: a node that was interrupted still counts its GPUs as its own for a while."""
    members = {member.node_id for member in seen.state.attempt.members} if seen.state.attempt else set()
    return [node for node in seen.nodes if node.node.id in members]


def _phase(seen: Seen, action: Action, reported: str | None) -> str:
    if seen.state.status.ended:
        stays = isinstance(action, Arm | Done) and bool(seen.group.alive)
        failed = seen.state.exit_reason is ExitReason.USER_ERROR
        return WORDS[Condition.HELD if failed else Condition.KEPT] if stays else "tearing down"
    if isinstance(action, Wait) and action.why == NOBODY_ANSWERS:
        return NOBODY_ANSWERS
    if seen.state.attempt is not None:
        return in_one_line(_ending(seen) or reported or _untold(seen))
    return action.why if isinstance(action, Wait) else "machines"


def _ending(seen: Seen) -> str | None:
    """Return the phase of an attempt that is to end for good; None of any other."""
    attempt = seen.state.attempt
    if attempt is None or attempt.ending_reason is None or attempt.ending_reason.retried:
        return None
    return "asked to save and leave" if attempt.ordered is Stop.SAVE else "ending"


def _untold(seen: Seen) -> str:
    """Return the phase of a script that has told none: it starts, or it never will."""
    attempt = seen.state.attempt
    if attempt is None:
        return "launch"
    age = seen.now - attempt.started_at
    return f"running for {format_span(age)}, " + ("no step yet" if age < _LAUNCHES_FOR else "tells no steps")


def _node_line(node: NodeSeen, seen: Seen) -> NodeLine:
    gpus = brief(node.status.gpus) if node.status is not None else ""
    return NodeLine(node_id=node.node.id, zone=node.node.pool.zone, word=_word(node, seen), gpus=gpus)


def _word(node: NodeSeen, seen: Seen) -> str:
    members = {m.node_id: m.rank for m in seen.state.attempt.members} if seen.state.attempt else {}
    if node.status is not None and node.status.notice is not None:
        return f"notice: goes at {node.status.notice.at:%H:%M:%S}"
    if node.silent_for:
        return f"silent for {node.silent_for.total_seconds():.0f} s"
    if node.mute_for:
        return f"answers, and its agent says nothing for {node.mute_for.total_seconds():.0f} s"
    if node.node.state is NodeState.PENDING:
        return "booting"
    if node.node.id in members:
        return f"in the attempt, node rank {members[node.node.id]}"
    words = {Readiness.NO: "up", Readiness.PREPARING: "bootstrap", Readiness.READY: "ready"}
    return words.get(node.readiness, "bootstrap failed")
