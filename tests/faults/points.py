"""Every point at which a process can be struck, and what must be so afterwards by the cloud's own records."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

from gpucloud.domain.money.ledger import Terms, meter, total
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.state.state import ExitReason, JobState, UsageInterval
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.faults.happenings import stored, wrong_events
from tests.faults.process import Ended, run
from tests.faults.rig import AWAY, GROUP, JOB, Outside
from tests.faults.strikes import Blow, Strikes

TRIES = 3
"""How often the same command may be given again, before a point is said to need a hand."""
OF_EVENTS = "events: "
"""How what is wrong with a job's events begins."""
_TAKEN = f"store.put jobs/{JOB}/state.json"
_SIGNALLED = {Blow.INT: 130, Blow.TWICE: 130, Blow.TERM: 143}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What is struck: one command, after others.

    `abandoned_at` is the call at which those before are killed: the struck one finds a job under way.
    """

    name: str
    before: tuple[tuple[str, ...], ...] = ()
    command: tuple[str, ...]
    abandoned_at: int | None = None


STORIES = (
    Story(name="up", command=("up", "small.yaml")),
    Story(name="train", command=("train", "small.yaml", "--drill")),
    Story(
        name="again", before=(("train", "small.yaml", "--drill"),), abandoned_at=222, command=("train", "small.yaml")
    ),
    Story(name="down", before=(("train", "small.yaml"),), abandoned_at=130, command=("down", "small.yaml")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One strike in one story; `away`: nobody comes back for longer than anything was paid for."""

    story: Story
    blow: Blow
    at: int
    after: bool = False
    away: bool = False

    def __str__(self) -> str:
        side = "after" if self.after else "before"
        return f"{self.story.name} {self.blow.value} {side} call {self.at}{', then nobody' if self.away else ''}"


@dataclass(slots=True)
class Verdict:
    """What is wrong after a point; `breaches` are those of `looks` moments at which no shut-off lay ahead."""

    point: Point
    wrong: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    call: str = ""
    looks: int = 0

    def __str__(self) -> str:
        return f"{self.point} ({self.call}): {'; '.join([*self.wrong, *self.breaches])}"


def points(story: Story, blow: Blow, *, every: bool, away: bool = False) -> Iterator[Point]:
    """Yield each point of the story: before and after every call, or before each that changes something.

    A process that makes one call after the other, and is killed, leaves the same before a call that only reads as
    before the next one that changes something; and the same after a call as before the next one.
    """
    strikes = undisturbed(story)
    ends = ((n, after) for n in range(1, len(strikes.calls) + 1) for after in (False, True))
    changes = (*((n, False) for n in strikes.changing), (len(strikes.calls), True))
    for at, after in ends if every else changes:
        yield Point(story=story, blow=blow, at=at, after=after, away=away)


def undisturbed(story: Story) -> Strikes:
    """Return the calls of the story's command when nothing strikes it."""
    with _outside() as outside:
        return _strike(story, outside, None)[0]


def judge(point: Point) -> Verdict:
    """Strike there, have the same command given until it is done, end the job, and say what is wrong."""
    verdict = Verdict(point)
    with _outside() as outside:
        strikes, ended = _strike(point.story, outside, point)
        if not strikes.struck:
            verdict.wrong.append(f"not reached: {len(strikes.calls)} calls")
        verdict.call = strikes.calls[point.at - 1] if len(strikes.calls) >= point.at else ""
        begun = any(_TAKEN in call for call in strikes.calls[: point.at - 1])
        verdict.wrong += _left(point, outside, ended, begun=begun)
        if point.away:
            outside.pass_by(AWAY)
            verdict.wrong += [f"{node.id} lives on" for node in outside.cloud.describe(GROUP).alive]
        verdict.wrong += _finished(point.story, outside)
        verdict.breaches += outside.breaches
        verdict.looks = outside.looks
    return verdict


@contextlib.contextmanager
def _outside() -> Iterator[Outside]:
    with tempfile.TemporaryDirectory(prefix="gpucloud-points-") as folder:
        yield Outside(Path(folder))


def _strike(story: Story, outside: Outside, point: Point | None) -> tuple[Strikes, Ended]:
    for command in story.before:
        _run(command, outside, Strikes(at=story.abandoned_at))
    strikes = Strikes(blow=point.blow, at=point.at, after=point.after) if point is not None else Strikes()
    return strikes, _run(story.command, outside, strikes)


def _run(command: tuple[str, ...], outside: Outside, strikes: Strikes) -> Ended:
    """Run the command, the job's file by its path."""
    arguments = tuple(str(outside.file) if word == outside.file.name else word for word in command)
    return run(arguments, outside.over(strikes), strikes)


def _left(point: Point, outside: Outside, ended: Ended, *, begun: bool) -> Iterator[str]:
    """What is wrong with how a process left that was asked to: its exit code, and what it said of live machines.

    `begun`: it had taken the job over; before that it has nothing to do with machines of an earlier one.
    """
    expected = _SIGNALLED.get(point.blow)
    if expected is None:
        return
    if ended.code != expected:
        yield f"exit code {ended.code}, not {expected}"
    view = outside.cloud.describe(GROUP)
    if (
        begun
        and view.alive
        and view.armed_until is not None
        and f"until {view.armed_until:%H:%M:%S}" not in ended.stderr
    ):
        yield f"{len(view.alive)} machines live until {view.armed_until:%H:%M:%S}, which it does not say"


def _finished(story: Story, outside: Outside) -> Iterator[str]:
    """Give the command again until it is done, then end the job; say what is wrong on the way."""
    yield from _again(story.command, outside)
    if story.name == "up":
        listed = outside.cloud.describe(GROUP)
        if len(listed.alive) != outside.training.nodes:
            yield f"{len(listed.alive)} machines are up"
        yield from _again(("down", JOB), outside)
    yield from _wrong_end(story, outside)


def _again(command: tuple[str, ...], outside: Outside) -> Iterator[str]:
    ended = None
    for _ in range(TRIES):
        if command[0] == "train" and _is_over(_state(outside)):
            return  # struck when all was done: another `train` would start another run
        ended = _run(command, outside, Strikes())
        if ended.code == 0:
            return
    yield f"{command[0]} ends with {ended and ended.code}: {ended and ended.stderr.strip()[-300:]}"


def _is_over(state: JobState | None) -> bool:
    return state is not None and state.status.ended and state.torn_down


def _state(outside: Outside) -> JobState | None:
    loaded = JobStore(outside.store, JOB).load()
    return loaded[0] if loaded is not None else None


def _wrong_end(story: Story, outside: Outside) -> Iterator[str]:
    """What differs from a job that nothing struck: machines, the money, the steps and the output."""
    state, view = _state(outside), outside.cloud.describe(GROUP)
    if state is None or not _is_over(state):
        yield "the job is not over"
        return
    wanted = ExitReason.SUCCEEDED if story.command[0] == "train" else ExitReason.STOPPED
    if state.exit_reason is not wanted:
        yield f"the job {state.exit_reason}: {state.message}"
    if view.exists or view.alive:
        yield f"left over: group {GROUP}, {len(view.alive)} machines"
    yield from _twins(outside)
    yield from _money(state, outside)
    yield from _lost(outside)
    yield from _output(outside)
    told = (*outside.store.watched.wrong(state.pending_events), *wrong_events(state, stored(outside.store, JOB)))
    yield from (f"{OF_EVENTS}{line}" for line in told)


def _twins(outside: Outside) -> Iterator[str]:
    """As many machines were ever started as were wanted, and one for each that was taken or shut off."""
    launched = outside.cloud.launched
    replaced = sum(node.end_cause in (EndCause.INTERRUPTED, EndCause.SCHEDULE) for node in launched)
    if len(launched) > outside.training.nodes + replaced:
        yield f"{len(launched)} machines were started, {replaced} of them taken or shut off"


def _money(state: JobState, outside: Outside) -> Iterator[str]:
    """The ledger has a bill for each machine that the cloud started, from its start to its end."""
    bills = JobStore(outside.store, JOB).charges()
    intervals = {interval.node_id: interval for interval in state.nodes}
    for node in outside.cloud.launched:
        interval = intervals.get(node.id)
        if interval is None or (interval.launched_at, interval.ended_at) != (node.launched_at, node.ended_at):
            yield f"{node.id} is in the books as {interval}"
        elif total(c for c in bills if c.node_id == node.id) != _bill(interval, state, outside):
            yield f"{node.id} is billed wrongly"
    if {charge.node_id for charge in bills} != {node.id for node in outside.cloud.launched}:
        yield "the ledger and the cloud name different machines"


def _bill(interval: UsageInterval, state: JobState, outside: Outside) -> Decimal:
    prices = outside.market.prices(interval.pool, interval.launched_at, interval.ended_at or outside.clock.now())
    return total(meter(interval, prices, state.attempts, outside.clock.now(), Terms()))


def _lost(outside: Outside) -> Iterator[str]:
    for attempt, first, committed in outside.fleet.resumed:
        if first != committed + 1:
            yield f"attempt {attempt} began at step {first}, with {committed} committed"


def _output(outside: Outside) -> Iterator[str]:
    """Each rank's lines are kept in their order, none twice."""
    jobs = JobStore(outside.store, JOB)
    kept: dict[tuple[int, int], bytes] = {}
    for part in jobs.records.log_parts():
        before = kept.setdefault((part.attempt, part.rank), b"")
        if part.offset != len(before):
            yield f"attempt {part.attempt}, rank {part.rank}: a piece at {part.offset} after {len(before)} bytes"
        kept[part.attempt, part.rank] += jobs.records.read_log(part)
    for (attempt, rank), text in kept.items():
        steps = [int(line.split()[1]) for line in text.splitlines()]
        if any(after != step + 1 for step, after in pairwise(steps)):
            yield f"attempt {attempt}, rank {rank} wrote {steps}"
