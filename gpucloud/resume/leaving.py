"""How a rank's part in an attempt ends: it is done, or it leaves because it was asked to, or its trial is over.

What the agent reads of it: `done-<rank>.json` or `left-<rank>.json` in the attempt's folder, and the exit code.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.domain.checkpoint.protection import Trial
from gpucloud.domain.errors import StoreError
from gpucloud.resume.folder import AttemptFolder, Progress, say
from gpucloud.resume.profiling import Profiling
from gpucloud.resume.ranks import HINT, Ranks
from gpucloud.resume.save.keeping import Keeper, Moment
from gpucloud.resume.settings import end_quickly

SAVED_AND_LEFT = 75
"""Exit code of a rank that saved and left because it was asked to."""


class Leaving:
    """The end of this rank's part; `moment` says what is saved beside the state of the last step."""

    def __init__(
        self, folder: AttemptFolder, ranks: Ranks, keeper: Keeper, profiling: Profiling, moment: Callable[[], Moment]
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._keeper = keeper
        self._profiling = profiling
        self._moment = moment

    def done(self, step: int, progress: Progress) -> None:
        """Commit the final state, then say that the job is done. Raises StoreError."""
        self._profiling.close()
        if not self._keeper.last(step, self._moment, Why.LAST):
            lacking = self._keeper.no_memory
            raise StoreError(
                f"the final checkpoint, of step {step}, could not be committed" + (f": {lacking}" if lacking else ""),
                hint=HINT if lacking else "start the job again: it continues from its last checkpoint",
            )
        progress.done()
        self._folder.write(f"done-{self._ranks.rank}.json", self._standing(step))
        self._close()

    def leave(self, step: int) -> NoReturn:
        """Save this step if it can be, and leave with the exit code that says so."""
        self._profiling.close()
        if not self._keeper.last(step, self._moment) and self._ranks.rank == 0:
            why = f", {lacking}" if (lacking := self._keeper.no_memory) else ""
            say(f"step {step} could not be saved{why}: the job continues from step {self._keeper.committed}")
        self._folder.write(f"left-{self._ranks.rank}.json", self._standing(step))
        if self._ranks.rank == 0:
            say(f"asked to stop ({self._folder.stop_reason()}): saved step {self._keeper.committed}, leaving")
        self._close()
        atexit.register(_end_groups)  # the script's own `finally` may still end them, as torch's examples do
        raise SystemExit(SAVED_AND_LEFT)

    def try_(self, trial: Trial, step: int, progress: Progress, *, is_fresh: bool) -> None:
        """End the run where its trial ends; die in the middle of it, once, as ranks do whose machine is interrupted."""
        if step >= trial.steps:
            self.done(step, progress)
            atexit.register(_end_groups)
            raise SystemExit(0)
        if is_fresh and step == trial.killed_at:
            self._keeper.settle()
            self._folder.write(f"left-{self._ranks.rank}.json", self._standing(step))  # so that another attempt follows
            self._ranks.highest(0)  # when all have written that
            os.kill(os.getpid(), signal.SIGKILL)

    def _close(self) -> None:
        self._keeper.close()
        self._ranks.close()
        atexit.register(end_quickly)

    def _standing(self, step: int) -> dict[str, int]:
        return {"rank": self._ranks.rank, "step": step, "committed_step": self._keeper.committed}


def _end_groups() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
