"""Who looks on while a job is supervised: what is shown of one pass, and plain lines of it for logs and CI."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Protocol

from gpucloud.cli.render.bills import money_line, to_go_words
from gpucloud.cli.render.output import MOVING_EVERY_S, FirstRank, Paced
from gpucloud.cli.render.use import brief, ending_words, notice_words, printed_words, stalled_words
from gpucloud.cli.render.words import Aside, silence, tell
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import NodeState
from gpucloud.domain.node.output import without_code_folder
from gpucloud.domain.node.status import DONE, UNTOLD, Progress, Stop
from gpucloud.domain.supervision.action import Action, Arm, Done, Wait
from gpucloud.domain.supervision.membership import (
    NOBODY_ANSWERS,
    is_gone,
    members_of,
    part_of,
    patience,
    shown_of,
    time_left,
)
from gpucloud.domain.supervision.snapshot import Limits, NodeSnapshot, Readiness, Snapshot
from gpucloud.domain.untrusted import in_one_line
from gpucloud.usecases.jobstore.condition import (
    WORDS,
    Condition,
    Reached,
    Saves,
    in_short,
    nothing_saved,
    saved_words,
    untold_words,
)
from gpucloud.usecases.supervise.story import script_awaited

if TYPE_CHECKING:
    from gpucloud.usecases.jobstore.report import JobReport


_PLAIN_EVERY_S, _UNTOLD_EVERY_S = 5.0, 300.0
"""So long at least between two lines of progress: of a script that tells steps, and of one that tells none."""
_LIMITS = Limits()


class Onlooker(Protocol):
    """A watcher that can be paused while the user is asked something."""

    def __enter__(self) -> Onlooker:
        """Begin to show."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        ...

    def pause(self) -> None:
        """Leave the terminal alone."""
        ...

    def go_on(self) -> None:
        """Show again."""
        ...

    def story(self, line: str) -> None:
        """Something happened."""
        ...

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """One pass was made."""
        ...

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        ...


class Display(Protocol):
    """Shows a job's report anew at each look."""

    def __enter__(self) -> Display:
        """Begin to show."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        ...

    def show(self, report: JobReport) -> None:
        """Show how it stands now."""
        ...


class Unshaken:
    """Tells an onlooker for as long as it can be told: a terminal that was closed is no reason to leave a job.

    Nor is one that takes nothing: see `Aside`.
    """

    def __init__(self, told: Onlooker) -> None:
        self._told = told
        self._aside = Aside()

    def __enter__(self) -> Unshaken:
        """Begin to show."""
        self._aside.__enter__()
        with ExitStack() as failing:
            failing.push(self._aside)
            self._tell(self._told.__enter__)
            failing.pop_all()
        return self

    def __exit__(self, *why: object) -> None:
        """Stop showing."""
        try:
            self._tell(lambda: self._told.__exit__(*why))
        finally:
            self._aside.__exit__(*why)

    def pause(self) -> None:
        """Leave the terminal alone."""
        self._tell(self._told.pause)

    def go_on(self) -> None:
        """Show again."""
        self._tell(self._told.go_on)

    def story(self, line: str) -> None:
        """Something happened."""
        self._tell(lambda: self._told.story(line))

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """One pass was made."""
        self._tell(lambda: self._told.tick(snapshot, action, spend))

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        self._tell(lambda: self._told.output(attempt, rank, text))

    @staticmethod
    def _tell(say: Callable[[], object]) -> None:
        try:
            say()
        except OSError:  # EIO of a terminal that is gone, EPIPE of a reader
            silence()


class PlainOnlooker:
    """One line an event, and one line of progress now and then. `limits` are the cloud's, `saves` is the job's."""

    def __init__(self, limits: Limits = _LIMITS, saves: Saves | None = None) -> None:
        self._limits, self._saves = limits, saves
        self._said: PanelState | None = None
        self._at = time.monotonic() - _PLAIN_EVERY_S
        self._output = FirstRank()
        self._moving = Paced(every_s=MOVING_EVERY_S)

    def __enter__(self) -> PlainOnlooker:
        """Nothing to set up."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write what the script left unfinished."""
        self._write(self._output.end())

    def pause(self) -> None:
        """Nothing to hide."""

    def go_on(self) -> None:
        """Nothing to show again."""

    def story(self, line: str) -> None:
        """Write the line with the time."""
        tell(f"{datetime.now(timezone.utc):%H:%M:%S} {line}")

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """Write a line of progress when there is some, not more often than every few seconds."""
        self._write_moving()
        now = panel_state(snapshot, action, spend, self._limits, self._saves)
        every_s = _PLAIN_EVERY_S if now.step is not None else _UNTOLD_EVERY_S
        if now.attempt is None or now == self._said or time.monotonic() - self._at < every_s:
            return
        self._said, self._at = now, time.monotonic()
        self.story(line_of(now))

    def output(self, attempt: int, rank: int, text: str) -> None:
        """Write rank 0's lines, and what moves in them now and then; the others' are kept for `gpucloud logs`."""
        if rank == 0:
            self._write(self._moving.untold(self._output.feed(attempt, text)))
            self._write_moving()

    def _write(self, text: str) -> None:
        if text:
            tell("\n".join(f"  | {line}" for line in without_code_folder(text).splitlines()))

    def _write_moving(self) -> None:
        self._write("\n".join(self._moving.due(self._output.moving)))


def line_of(now: PanelState) -> str:
    """Return progress in one line."""
    saved = now.saved or (in_short(now.unsaved) if now.unsaved is not None else None)
    if now.step is None:
        parts = [now.phase, *([saved] if saved else [])]
    elif now.phase == UNTOLD:
        parts = [f"{now.phase}: {saved or 'nothing is saved yet'}"]
    else:
        parts = [f"{now.phase}: {now.reached}", *([saved] if saved else [])]
    parts += [unheard_words(now)] if now.unheard else []
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    parts += now.printed
    if now.gpus:
        parts.append(now.gpus)
    parts += pace_words(now)
    return f"{', '.join(parts)}, spent {money_line(now.spend)}"


def pace_words(now: PanelState) -> list[str]:
    """Return how long it is to the last step, and what ends the job before; nothing where no machine is heard."""
    if now.unheard:
        return []
    if now.ends:
        return [now.awaited] if now.awaited else []
    return [*stalled_words(now.stalled_for, now.patience), *to_go_words(now.time_left, now.spend)]


def unheard_words(now: PanelState) -> str:
    """Return which machines say nothing, and since when: what is told of the attempt is of then."""
    return ", ".join(f"nothing heard of {node_id} since {at:%H:%M:%S} UTC" for node_id, at in now.unheard)


# One pass, ready to be shown.


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """One node: its id, where it is, its state in one word, and how its GPUs are used, empty without any."""

    node_id: str
    zone: str
    word: str
    gpus: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelState:
    """One pass, ready to be shown."""

    job: str
    phase: str
    attempt: int | None
    step: int | None
    first_step: int | None
    total_steps: int | None
    loss: float | None
    time_left: timedelta | None
    spend: Spend
    paid_until: datetime | None
    nodes: tuple[NodeLine, ...]
    gpus: str = ""
    saved: str | None = None
    """What is saved, in words."""
    unsaved: str | None = None
    """That nothing is saved of a script that trains, in words."""
    printed: tuple[str, ...] = ()
    """Other numbers that the script prints, in words."""
    unheard: tuple[tuple[str, datetime], ...] = ()
    """The attempt's machines of which nothing is heard, and since when."""
    told_at: datetime | None = None
    """When the step was told; None where its machine is heard."""
    stalled_for: timedelta | None = None
    """For how long its script makes no step; None while steps come."""
    patience: timedelta | None = None
    """For how long it may make none before that is taken for a hang."""
    ends: bool = False
    """Whether its attempt is to end for good, wherever its script is."""
    awaited: str = ""
    """Until when its script is waited for then."""

    @property
    def reached(self) -> str:
        """Its step, as `status` tells it."""
        return str(Reached(step=self.step or 0, total_steps=self.total_steps, is_done=self.phase == DONE))


def panel_state(
    snapshot: Snapshot, action: Action, spend: Spend, limits: Limits = _LIMITS, saves: Saves | None = None
) -> PanelState:
    """Return what is to be shown of the pass, by its cloud's limits and what its job file says of checkpoints."""
    attempt = snapshot.state.attempt
    progress, printed = shown_of(attempt, snapshot) if attempt else (None, ())
    unheard = _unheard(snapshot, limits)
    return PanelState(
        job=snapshot.state.job,
        phase=_phase(snapshot, action, progress.phase if progress else None),
        attempt=attempt.number if attempt else None,
        step=progress.step if progress else None,
        first_step=progress.first_step if progress else None,
        total_steps=progress.total_steps if progress else None,
        loss=progress.loss if progress else None,
        time_left=time_left(snapshot),
        ends=attempt is not None and attempt.ends_for_good,
        awaited=script_awaited(attempt, limits, snapshot.now) if attempt is not None else "",
        stalled_for=progress.stalled_for if progress else None,
        patience=patience(progress, snapshot.state.attempts, limits) if progress else None,
        saved=saved_words(progress, snapshot.saved) if attempt else None,
        unsaved=_unsaved(snapshot, saves, progress),
        printed=tuple(printed_words(printed)),
        spend=spend,
        paid_until=snapshot.state.paid_until,
        gpus=brief([gpu for node in _working(snapshot) if node.status for gpu in node.status.gpus]),
        unheard=unheard,
        told_at=dict(unheard).get(attempt.members[0].node_id) if attempt else None,
        nodes=tuple(
            _node_line(node, snapshot) for node in snapshot.nodes if node.node.state is not NodeState.TERMINATED
        ),
    )


def _unsaved(snapshot: Snapshot, saves: Saves | None, progress: Progress | None) -> str | None:
    attempt = snapshot.state.attempt
    if attempt is None or saves is None or snapshot.state.status.ended:
        return None
    heard = part_of(attempt, members_of(attempt, snapshot)[0]) is not None
    saved = snapshot.saved
    return nothing_saved(saves, snapshot.state.attempts, progress, saved, snapshot.now, heard=heard)


def _unheard(snapshot: Snapshot, limits: Limits) -> tuple[tuple[str, datetime], ...]:
    """Return which of the attempt's machines are silent, and since when; a moment without a word is no silence."""
    silent = ((node.node.id, _unheard_for(node, snapshot)) for node in _working(snapshot) if not is_gone(node))
    return tuple((node_id, snapshot.now - length) for node_id, length in silent if length >= limits.silent)


def _working(snapshot: Snapshot) -> list[NodeSnapshot]:
    """Return the members of the attempt: a node that was interrupted still counts its GPUs as its own for a while."""
    members = {member.node_id for member in snapshot.state.attempt.members} if snapshot.state.attempt else set()
    return [node for node in snapshot.nodes if node.node.id in members]


def _phase(snapshot: Snapshot, action: Action, reported: str | None) -> str:
    if snapshot.state.status.ended:
        stays = isinstance(action, Arm | Done) and bool(snapshot.group.alive)
        failed = snapshot.state.script_failed
        return WORDS[Condition.HELD if failed else Condition.KEPT] if stays else "tearing down"
    if isinstance(action, Wait) and action.why == NOBODY_ANSWERS:
        return NOBODY_ANSWERS
    if snapshot.state.attempt is not None:
        return in_one_line(_ending(snapshot) or reported or _untold(snapshot))
    return action.why if isinstance(action, Wait) else "machines"


def _ending(snapshot: Snapshot) -> str | None:
    """Return the phase of an attempt that is to end for good; None of any other."""
    attempt = snapshot.state.attempt
    if attempt is None or not attempt.ends_for_good:
        return None
    does = "asked to save and leave" if attempt.ordered is Stop.SAVE else "ending"
    return does + ending_words(attempt.ending_reason)


def _untold(snapshot: Snapshot) -> str:
    """Return the phase of a script that has told none: it starts, or it never will."""
    attempt = snapshot.state.attempt
    if attempt is None:
        return "launch"
    return untold_words(attempt, snapshot.state.attempts, snapshot.now)


def _node_line(node: NodeSnapshot, snapshot: Snapshot) -> NodeLine:
    gpus = brief(node.status.gpus) if node.status is not None else ""
    return NodeLine(node_id=node.node.id, zone=node.node.pool.zone, word=_word(node, snapshot), gpus=gpus)


def _unheard_for(node: NodeSnapshot, snapshot: Snapshot) -> timedelta:
    """Return for how long nobody has heard it, whoever listened then."""
    here = max(node.silent_for, node.mute_for)
    last = next((interval.last_word_at for interval in snapshot.state.nodes if interval.node_id == node.node.id), None)
    return max(here, snapshot.now - last) if here and last is not None else here


def _unheard_words(node: NodeSnapshot, snapshot: Snapshot) -> str:
    return format_span(timedelta(seconds=round(_unheard_for(node, snapshot).total_seconds())))


def _word(node: NodeSnapshot, snapshot: Snapshot) -> str:
    members = {m.node_id: m.rank for m in snapshot.state.attempt.members} if snapshot.state.attempt else {}
    if node.status is not None and node.status.notice is not None:
        return notice_words(node.status.notice)
    if node.silent_for:
        return f"silent for {_unheard_words(node, snapshot)}"
    if node.mute_for:
        return f"answers, and its agent says nothing for {_unheard_words(node, snapshot)}"
    if node.node.state is NodeState.PENDING:
        return "booting"
    if node.node.id in members:
        return f"in the attempt, node rank {members[node.node.id]}"
    words = {Readiness.NO: "up", Readiness.PREPARING: "bootstrap", Readiness.READY: "ready"}
    return words.get(node.readiness, "bootstrap failed")
