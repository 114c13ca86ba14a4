"""The two files through which supervisor and agent speak: `desired.json` down, `status.json` up.

Both are levels: written whole, as often as one likes. The agent refuses a `Desired` whose epoch is lower
than the highest that it has seen, and never starts the same attempt twice.
All paths live under the agent's root on the node, `~/.gpucloud` or a folder of one job below it (`Node.root`):

    lib/gpucloud-<sha>.zip     the package, shipped
    agent/desired.json         Desired, by the supervisor
    agent/status.json          Status, by the agent, several times a second while something changes
    code/<sha>/                synced code
    attempts/<number>/         launch.json, launcher.log, rank-<rank>.log, rank-<rank>.times (when output came),
                               stop.json, progress.json, saving.json, left-<rank>.json, done-<rank>.json, exit.json
                               (the agent's verdict); <number> has four digits
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.checkpoint.manifest import CounterDrop, Counts
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.node.container import ContainerRun
from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.node.node import Notice
from gpucloud.domain.untrusted import COUNTED, MOST_RANKS

_MOST, _MOST_TOTAL, _LONGEST_S, _LONGEST_TEXT, _MOST_GPUS = 1 << 60, 1 << 64, 1e10, 4000, 256
MOST_PATTERNS, LONGEST_NAME = 16, 32
"""Of patterns that a job file may have for its script's output; and characters of their names."""
_LONGEST_LEAVING_S = 3600.0
_PAUSE_S, _STEPS_IN_A_PAUSE, _LONGER = 10.0, 5, 1.5
_BEGINS_S = 60.0
_EXIT_CODES = range(-128, 256)  # below nothing: the signal that ended it


class Stop(str, Enum):
    """What the supervisor wants of the running attempt."""

    NO = "no"
    SAVE = "save"  # ranks save at a common step, then leave
    ABORT = "abort"  # every rank tells in its output where it is, then the whole process tree is killed
    KILL = "kill"  # the whole process tree, now


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt on one node: `argv` run in `directory` with `env` added; secrets are in `env`, the file is 0600.

    `address` is the node's own private one: where `env` names no interface for collectives, the agent finds it by it.
    The values of the `hidden` variables are shown nowhere. With `container`, `argv` runs in one. `wrapper` are words
    before it all: the process that keeps the directory of a script that saves by itself, and starts the rest.
    `passed` are variables that it may set, for a container to be handed them too. `sharing` is how many processes share
    the node's CPUs, 0 where one has them all. `outputs`: what its script writes is to come home before the node goes,
    whether or not it saves.
    """

    attempt: int
    argv: tuple[str, ...]
    directory: str
    env: tuple[tuple[str, str], ...]
    address: str | None = None
    hidden: tuple[str, ...] = ()
    container: ContainerRun | None = None
    wrapper: tuple[str, ...] = ()
    metrics: tuple[tuple[str, str], ...] = ()
    """Patterns of numbers that the script prints, by name."""
    passed: tuple[str, ...] = ()
    sharing: int = 0
    outputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The level that the supervisor wants of a node."""

    epoch: int
    launch: Launch | None
    stop: Stop
    paid_until: datetime | None


class RunState(str, Enum):
    """The node's part in one attempt."""

    RUNNING = "running"
    EXITED = "exited"


class Outcome(str, Enum):
    """How the node's part ended. Files in the attempt's folder decide before the exit code does."""

    DONE = "done"  # `run.done()` was called, or exit 0 of a script that does not use the library
    LEFT = "left"  # every rank saved and left (exit 75)
    BARRED = "barred"
    """Then and there, what was saved could not be read, the last state not be saved, or another had the ranks' port."""
    FAILED = "failed"  # anything else, when nobody asked for the end
    KILLED = "killed"  # we killed it, or the agent that watched it died


EXCUSED = frozenset({Outcome.BARRED, Outcome.KILLED})
"""No fault of the script: another attempt may do better."""

LEAVES_AHEAD = timedelta(seconds=60)
"""So long before its paid time ends a job is asked to save and leave of which no save was measured."""
LEAVES_SHARE = 0.2
"""The share of a short paid time that it is asked ahead of its end instead."""
LEAVES_MEASURED_SHARE = 0.4
"""That share at the most where a save was measured: below the half of a lease at which a supervisor renews it."""

WRITING = "writing.json"
"""In an attempt's folder: the files that its script was writing when it was killed, each as its whole path."""
OUTPUT = "output"
"""The phase of a script whose steps are read from its output."""
SAVES = "save"
"""The phase of a script that uses `gpucloud.resume`, while it saves."""
DONE = "done"
"""The phase of a script that has called `run.done()`."""
UNTOLD = "script"
"""The phase of a script of which nothing is known but its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What rank 0's script reports through `gpucloud.resume`; `phase` is one of start, train, save, evaluate, done.

    After `run.done()` the phase stays done, whatever else the script does.

    For a script that does not, its steps are what was kept of its directory, and the phase is UNTOLD.
    """

    step: int
    first_step: int
    total_steps: int | None
    loss: float | None
    phase: str
    committed_step: int | None
    step_seconds: float | None  # median of the last steps
    age_s: float  # seconds since the script last wrote it, by the node's clock
    waiting_share: float | None = None  # of the last steps' time, from 0 to 1: waiting for the next batch
    longest_s: float | None = None
    """The longest step but the first; None before the second."""
    counts: Counts = Counts.STEPS
    """What its numbers are of: of a script that does not report, perhaps its saves."""
    counter_drop: CounterDrop | None = None
    """By what its first save was behind the checkpoint that was put back: it began anew; None where it was not."""
    unsaved: str | None = None
    """Why the last step of a run that is done, or a directory's last checkpoint, is not saved; None where it is."""

    @property
    def stalled_for(self) -> timedelta | None:
        """For how long a script that trains has made no step, where a step does not take so long; else None.

        It may come all the same: what is taken for a hang is far longer. What the script reports to do beside, such as
        saving and evaluating, takes its own time, and so does what it does after its last step. Before there is a pace,
        a script that reports is given `_BEGINS_S`.
        """
        over = self.total_steps is not None and self.step >= self.total_steps
        begins = self.step_seconds is None and self.phase in {"start", "train"}
        if over or not (begins or (self.step_seconds is not None and self.phase in {"train", OUTPUT})):
            return None
        paced_s = max(_PAUSE_S, _STEPS_IN_A_PAUSE * (self.step_seconds or 0.0), _LONGER * (self.longest_s or 0.0))
        usual_s = _BEGINS_S if begins else paced_s
        return timedelta(seconds=self.age_s) if self.age_s > usual_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What a script's output says by the patterns of its job file; `values` are those that are only shown."""

    step: int | None
    first_step: int | None  # that was read in this attempt
    total_steps: int | None
    loss: float | None
    step_seconds: float | None  # mean of the last steps
    longest_s: float | None  # between two looks that found another step
    age_s: float  # seconds since the step became another one
    values: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """The node's part in the newest attempt; `output` is how many bytes each local rank has written.

    `dropped` is how many of them, from the beginning, the node keeps no longer.
    """

    attempt: int
    state: RunState
    outcome: Outcome | None
    exit_code: int | None
    progress: Progress | None
    failed_rank: int | None  # the first local rank that failed, as a global rank
    output: tuple[tuple[int, int], ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    readings: Readings | None = None
    over_s: float | None = None
    """For how long all of it has been over, by the node's clock; None while it runs, and where no agent saw its end."""

    def later(self, span: timedelta) -> AttemptStatus:
        """Return how the part stands so long after this was said, where its script says nothing more."""

        def aged(age_s: float) -> float:
            return min(age_s + span.total_seconds(), _LONGEST_S)

        progress, readings = self.progress, self.readings
        return replace(
            self,
            over_s=aged(self.over_s) if self.over_s is not None else None,
            progress=progress and replace(progress, age_s=aged(progress.age_s)),
            readings=readings and replace(readings, age_s=aged(readings.age_s)),
        )

    @property
    def shown(self) -> Progress | None:
        """How far the script is, as people are told: what it reports itself, else what its output says.

        Then `counts` is of the newest checkpoint alone.
        """
        kept, read = self.progress, self.readings
        if read is None or read.step is None or read.first_step is None or (kept and kept.phase != UNTOLD):
            return kept
        return Progress(
            step=read.step,
            first_step=kept.first_step if kept and kept.counts is Counts.STEPS else read.first_step,
            total_steps=read.total_steps,
            loss=read.loss,
            phase=OUTPUT,
            committed_step=kept.committed_step if kept else None,
            step_seconds=read.step_seconds,
            age_s=read.age_s,
            longest_s=read.longest_s,
            counts=kept.counts if kept else Counts.STEPS,
            counter_drop=kept.counter_drop if kept else None,
            unsaved=kept.unsaved if kept else None,
        )

    @property
    def numbers(self) -> tuple[tuple[str, float], ...]:
        """What the script says of itself by now: its step, its loss, and what it prints beside."""
        shown = self.shown if self.shown is not None and self.shown.phase != UNTOLD else None
        step = (("step", float(shown.step)),) if shown is not None else ()
        loss = (("loss", shown.loss),) if shown is not None and shown.loss is not None else ()
        return (*step, *loss, *(self.readings.values if self.readings is not None else ()))

    @property
    def counted(self) -> Progress | None:
        """How far it is, as the job is reckoned with: as it is shown, but in saves where these alone are counted."""
        kept = self.progress
        return kept if kept is not None and kept.counts is Counts.SAVES else self.shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the agent says of its node. `heartbeat` rises with every write; `epoch` is the highest seen.

    `gpus` is the newest sample of each device, `unhealthy` why a GPU here must not be trusted any more, `host` how the
    machine itself is used; `rebalance` is since when the cloud recommends to leave it.
    `desired_sha256` is of the `desired.json` that the agent goes by, empty before the first one.
    """

    heartbeat: int
    epoch: int
    boot_id: str
    notice: Notice | None
    attempt: AttemptStatus | None
    desired_sha256: str = ""
    gpus: tuple[GpuSample, ...] = ()
    unhealthy: str | None = None
    host: HostSample | None = None
    rebalance: datetime | None = None
    leaves_s: float | None = None
    """How long before its paid time ends what runs, or ran last, is asked to save and leave; None where nothing was."""
    leaves_at_most_s: float | None = None
    """The same once that time has been prolonged for long; None where nothing was."""
    leaves_share: float | None = None
    """Which share of a shorter time that is at the most: of more, where a save was measured."""


def desired_to_json(desired: Desired) -> str:
    """Return the text of `desired.json`. It may hold secrets: write it with mode 0600."""
    return to_json(desired)


def desired_from_json(text: str | bytes) -> Desired:
    """Return what the supervisor wants; raises Malformed (a ValueError) for anything torn or unknown."""
    return from_json(Desired, text, of_any_version=True)


def status_to_json(status: Status) -> str:
    """Return the text of `status.json`."""
    return to_json(status)


def status_from_json(text: str | bytes) -> Status:
    """Return what the agent says; raises Malformed (a ValueError) for anything torn, unknown or impossible."""
    status = from_json(Status, text, of_any_version=True)
    if not _is_possible(status):
        raise Malformed("Status: a number, a time or a text that cannot be")
    return status


def is_possible_part(part: AttemptStatus) -> bool:
    """Whether a node's part can stand so: within what machines and scripts have. All of it is reckoned with."""
    rows = (*part.output, *part.dropped)
    return (
        0 <= part.attempt < COUNTED
        and (part.exit_code is None or part.exit_code in _EXIT_CODES)
        and all(0 <= rank < MOST_RANKS for rank in (part.failed_rank or 0, *(rank for rank, _ in rows)))
        and all(0 <= length <= _MOST for _, length in rows)
        and (part.progress is None or is_possible_progress(part.progress))
        and (part.readings is None or _are_possible(part.readings))
        and 0 <= (part.over_s or 0.0) <= _LONGEST_S
    )


def _are_possible(readings: Readings) -> bool:
    counts = (readings.step or 0, readings.first_step or 0, readings.total_steps or 0)
    spans = (readings.step_seconds or 0.0, readings.longest_s or 0.0, abs(readings.age_s))
    return (
        all(0 <= count < COUNTED for count in counts)
        and all(0 <= span <= _LONGEST_S for span in spans)
        and len(readings.values) <= MOST_PATTERNS
        and all(len(name) <= LONGEST_NAME for name, _ in readings.values)
    )


def is_possible_progress(progress: Progress) -> bool:
    """Whether a script can stand so; it may mean to make more steps than any makes."""
    drop = progress.counter_drop
    behind = (drop.saved, drop.put_back) if drop is not None else ()
    counts = (progress.step, progress.first_step, progress.committed_step or 0, *behind)
    seconds = (progress.step_seconds or 0.0, progress.longest_s or 0.0)
    return (
        all(0 <= count < COUNTED for count in counts)
        and (drop is None or drop.saved < drop.put_back)
        and 0 <= (progress.total_steps or 0) <= _MOST_TOTAL
        and all(0 <= span <= _LONGEST_S for span in (*seconds, abs(progress.age_s), abs(progress.waiting_share or 0.0)))
        and max(len(progress.phase), len(progress.unsaved or "")) <= _LONGEST_TEXT
    )


def written_in(text: bytes) -> tuple[str, ...]:
    """Return the paths that the text of WRITING names; none of one that is torn, or not there."""
    try:
        paths = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(map(str, paths)) if isinstance(paths, list) else ()


def _is_possible(status: Status) -> bool:
    """Whether everything is within what machines have: what runs there may write it, and it is reckoned with."""
    samples = (*status.gpus, *((status.host,) if status.host else ()))
    texts = [
        status.boot_id,
        status.unhealthy or "",
        status.desired_sha256,
        status.notice.action if status.notice else "",
    ]
    return (
        0 <= status.heartbeat <= _MOST
        and 0 <= status.epoch < COUNTED
        and (status.attempt is None or is_possible_part(status.attempt))
        and 0 <= (status.leaves_s or 0.0) <= _LONGEST_LEAVING_S
        and 0 <= (status.leaves_at_most_s or 0.0) <= _LONGEST_LEAVING_S
        and 0 <= (status.leaves_share or 0.0) <= LEAVES_MEASURED_SHARE
        and all(len(text) <= _LONGEST_TEXT for text in texts)
        and len(status.gpus) <= _MOST_GPUS
        and all(0 <= sample.index < _MOST_GPUS for sample in status.gpus)
        and all(map(_is_possible_sample, samples))
    )


def _is_possible_sample(sample: GpuSample | HostSample) -> bool:
    values = [getattr(sample, field.name) for field in fields(sample)]
    words = [value for value in values if isinstance(value, str)] + [
        word for value in values if isinstance(value, tuple) for word in value
    ]
    numbers = [value for value in values if isinstance(value, int | float)]
    return all(-_MOST <= number <= _MOST for number in numbers) and sum(map(len, words)) <= _LONGEST_TEXT
