"""What a launch and an interruption cost a job in time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """`restart_s` passes from a launch to the first step; `handover_s` is what remains of it after a boot beside.

    With a notice, work stops `notice_s` before the machines go, and nothing else is lost. Without one (None), all is
    lost since the last checkpoint, of which there is one every `save_s` of work.
    """

    restart_s: float
    handover_s: float = 0.0
    notice_s: float | None = 120.0
    save_s: float = 600.0

    @property
    def changeover_s(self) -> float:
        """A restart, with the most that an interruption can undo: what policies are told."""
        return self.restart_s + (self.save_s if self.notice_s is None else self.notice_s)

    def lost_s(self, worked_s: float) -> float:
        """Return how much an interruption undoes of the work done since the last start."""
        return worked_s % self.save_s if self.notice_s is None else min(worked_s, self.notice_s)
