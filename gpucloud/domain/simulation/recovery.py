"""What a launch, an interruption and a change of machines cost a job in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.job import CheckpointPolicy, OnNotice
from gpucloud.domain.protection import NEVER, Saving

_HANDOVER = timedelta(minutes=3)  # from the last save on the old machines to the first step on new ones that are ready
_NOTICE = timedelta(minutes=2)  # AWS's
_SAVE = timedelta(minutes=10)  # between saves, where nobody says


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """`restart_s` passes from a launch to the first step; `handover_s` is what remains of it after a boot beside.

    With a notice, work stops `notice_s` before the machines go, and nothing else is lost. Without one (None), all is
    lost since the last checkpoint, of which there is one every `save_s` of work; never, where that is infinite.
    `saves_when_asked`: whether it saves before it leaves for other machines; else that costs what an interruption does.
    """

    restart_s: float
    handover_s: float = 0.0
    notice_s: float | None = 120.0
    save_s: float = 600.0
    saves_when_asked: bool = True

    @property
    def begins_anew(self) -> bool:
        """Whether nothing is ever saved."""
        return math.isinf(self.save_s)

    @property
    def changeover_s(self) -> float:
        """A restart, with the most that an interruption can undo: what policies are told.

        Where nothing is saved, that has no bound, and they are told what they are of any other job, as it trains.
        """
        if self.notice_s is not None:
            return self.restart_s + self.notice_s
        return self.restart_s + (_NOTICE.total_seconds() if self.begins_anew else self.save_s)

    def lost_s(self, worked_s: float) -> float:
        """Return how much an interruption undoes of the work done since the last start."""
        return worked_s % self.save_s if self.notice_s is None else min(worked_s, self.notice_s)

    def left_behind_s(self, worked_s: float) -> float:
        """Return how much a change of machines by choice undoes of the work done since the last start."""
        return 0.0 if self.saves_when_asked else worked_s % self.save_s


def recovery_of(restart: timedelta, saving: Saving, policy: CheckpointPolicy, *, notice: bool = True) -> Recovery:
    """Return what launches and interruptions cost a script that saves so; one of which nobody knows is taken to save.

    `notice`: whether the cloud gives one. A script that saves by itself makes use of it with `on_notice` alone; how
    often it saves is not known beforehand.
    """
    kept = policy.directory
    told = saving not in NEVER and (saving is not Saving.DIRECTORY or _is_told(policy))
    save = _SAVE if kept is not None or policy.every is None else policy.every
    return Recovery(
        restart_s=restart.total_seconds(),
        handover_s=min(restart, _HANDOVER).total_seconds(),
        notice_s=_NOTICE.total_seconds() if notice and told else None,
        save_s=math.inf if saving in NEVER else save.total_seconds(),
        saves_when_asked=told,
    )


def restart_within(changeover: timedelta) -> timedelta:
    """Return what is left for a restart of a changeover that has in it what a notice undoes."""
    return changeover - min(_NOTICE, changeover / 2)


def _is_told(policy: CheckpointPolicy) -> bool:
    return policy.directory is not None and policy.directory.on_notice is not OnNotice.NONE


USUAL = recovery_of(timedelta(minutes=10), Saving.RESUME, CheckpointPolicy())
"""A changeover of 12 minutes: what a start is taken to be as long as none was measured."""
