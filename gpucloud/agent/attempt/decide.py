"""What the agent does next, from what is wanted, what runs and what time is paid for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.status import LEAVES_AHEAD, LEAVES_MEASURED_SHARE, LEAVES_SHARE, Desired, Launch, Stop

_LONGEST = timedelta(minutes=12)  # that share of 30 minutes, the horizon of a lease that is renewed again and again
_MARGIN = (timedelta(seconds=1), timedelta(seconds=5))  # for ranks to leave, and for a slower store than before


class PrepaidPhase(Enum):
    """Where the node stands in the time that is paid for."""

    FAR = "far"
    NEAR = "near"  # time to save
    PASSED = "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How long a save takes here, as measured: the longest so far, after the step that is under way."""

    save: timedelta
    step: timedelta

    def ahead(self, lease: timedelta) -> timedelta:
        """Return how long before the end of what is paid to begin: twice the time that it took, and a margin."""
        least, most = _MARGIN
        margin = max(least, min(most, lease / 10))
        return min(2 * (self.save + self.step) + margin, LEAVES_MEASURED_SHARE * lease, _LONGEST)

    @property
    def most_ahead(self) -> timedelta:
        """The same before the end of a long time."""
        return self.ahead(timedelta(days=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepaid:
    """The time until which the node is paid for, and since when: the attempt's start, or when it was first heard.

    A short renewal, or a lower budget, so leaves a running attempt no less time for its last save.
    """

    until: datetime
    heard_at: datetime

    def phase(self, now: datetime, saving: Saving | None = None) -> PrepaidPhase:
        """Return where `now` stands: NEAR begins so long before the end as a save takes."""
        if now >= self.until:
            return PrepaidPhase.PASSED
        return PrepaidPhase.NEAR if now >= self.until - self.ahead(saving) else PrepaidPhase.FAR

    def ahead(self, saving: Saving | None = None) -> timedelta:
        """Return how long before the end an attempt is asked to save and leave.

        While no save was measured, 60 s before, or at the last fifth if that is shorter.
        """
        lease = max(timedelta(0), self.until - self.heard_at)
        return min(LEAVES_AHEAD, LEAVES_SHARE * lease) if saving is None else saving.ahead(lease)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnEnd:
    """How the node ends itself when its paid time is over: by a command, none where it is empty, so long after it.

    Where the cloud's own schedule ends it at that time, a node that went before would be replaced.
    """

    argv: tuple[str, ...] = ()
    after: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that the decision needs; `running` is an attempt's number, `newest` the highest ever begun here."""

    desired: Desired | None
    running: int | None
    newest: int
    notice: Notice | None
    prepaid: Prepaid | None
    now: datetime
    power_off_after: timedelta = timedelta(0)
    rebalance: datetime | None = None
    saving: Saving | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Start the attempt."""

    launch: Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Ask the workers to save and leave before `at`."""

    reason: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEarly:
    """Ask the workers to save and go on: since `since` the cloud recommends to leave this machine."""

    since: datetime


@dataclass(frozen=True, slots=True)
class Abort:
    """Have every rank tell where it is, then end the running attempt's whole process tree."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the running attempt's whole process tree."""


@dataclass(frozen=True, slots=True)
class PowerOff:
    """End the node: its paid time is over and nothing runs."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing to do."""


Action = Start | Save | SaveEarly | Abort | Kill | PowerOff | Rest


def decide(snapshot: Snapshot) -> Action:
    """Return the next action; it may be carried out any number of times."""
    phase = snapshot.prepaid.phase(snapshot.now, snapshot.saving) if snapshot.prepaid else PrepaidPhase.FAR
    if snapshot.running is not None:
        return _of_running(snapshot, snapshot.running, phase)
    if phase is PrepaidPhase.PASSED and snapshot.prepaid is not None:
        return PowerOff() if snapshot.now >= snapshot.prepaid.until + snapshot.power_off_after else Rest()
    desired = snapshot.desired
    # A number at or below the newest was begun before: it never starts twice, whatever became of it.
    if desired is None or desired.launch is None or desired.launch.attempt <= snapshot.newest:
        return Rest()
    return Start(launch=desired.launch) if desired.stop is Stop.NO and phase is PrepaidPhase.FAR else Rest()


def _of_running(snapshot: Snapshot, running: int, phase: PrepaidPhase) -> Action:
    if phase is PrepaidPhase.PASSED or _is_unwanted(snapshot.desired, running):
        return Kill()
    if snapshot.desired is not None and snapshot.desired.stop is Stop.ABORT:
        return Abort()
    if snapshot.notice is not None:
        return Save(reason="notice", at=snapshot.notice.at)
    if phase is PrepaidPhase.NEAR and snapshot.prepaid is not None:
        return Save(reason="budget", at=snapshot.prepaid.until)
    if snapshot.desired is not None and snapshot.desired.stop is Stop.SAVE:
        return Save(reason="stop", at=snapshot.now)
    return SaveEarly(since=snapshot.rebalance) if snapshot.rebalance is not None else Rest()


def _is_unwanted(desired: Desired | None, running: int) -> bool:
    """Whether the supervisor wants another attempt, none, or this one dead; silence is no such wish."""
    if desired is None:
        return False
    return desired.launch is None or desired.launch.attempt != running or desired.stop is Stop.KILL
