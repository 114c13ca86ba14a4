"""This rank's share of the state at one step, as one object in memory that its writer reads."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.arena import Arena
from gpucloud.resume.copying import Copier
from gpucloud.resume.plan import Plan
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.sharded import Shares
from gpucloud.resume.state import Collected, TrainingState


class Capture:
    """Copies into one arena, again and again: a capture must be written before the next one begins."""

    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        self.arena = Arena(_gpu())
        self._state = state
        self._ranks = ranks
        self._shares = Shares(ranks) if state.sharded else None
        self._copier = Copier(state.optimizers)
        self._plan: Plan | None = None
        self._compared = False

    @property
    def size(self) -> int:
        """The object's, in bytes."""
        return self._plan.size if self._plan else 0

    def prepare(self, extra: dict[str, Any]) -> None:
        """Make memory ready for a state like the present one, beside the training."""
        self._planned(self._collected(extra))

    def begin(self, extra: dict[str, Any]) -> None:
        """Copy the state as it is now; `extra` joins the rank's own part. Raises UsageError for what has no form."""
        found = self._collected(extra)
        plan = self._planned(found)
        plan.head(found.metadata)
        self._copier.copy(plan.pairs(found.own), plan.pairs(found.shared))

    def under_way(self) -> bool:
        """Whether a GPU still copies; never waits."""
        return self._copier.under_way()

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._copier.wait()

    def torn(self) -> bool:
        """Whether what was copied changed meanwhile."""
        return self._copier.torn()

    def close(self) -> None:
        """Give the memory back."""
        self.arena.close()
        self._plan = None

    def _collected(self, extra: dict[str, Any]) -> Collected:
        found = self._state.collect(self._ranks.rank, self._ranks.world, extra, self._shares)
        if not self._compared:
            self._compared = True
            self._compare(found.names)
        return found

    def _compare(self, names: tuple[str, ...]) -> None:
        """Raise UsageError, on all ranks alike, when they do not have the same tensors: a share would be of nothing."""
        told = zlib.crc32(json.dumps(sorted(names)).encode())
        if self._ranks.highest(told, -told) != (told, -told):
            raise UsageError(
                "the ranks have different models, and what one has alone would be lost",
                hint="build the whole model on every rank: pipeline stages cannot be saved together",
            )

    def _planned(self, found: Collected) -> Plan:
        tensors = found.shared | found.own
        if self._plan is None or not self._plan.fits(tensors):
            self._plan = Plan(tensors, self.arena, header=sum(map(len, found.metadata.values())))
        return self._plan


def _gpu() -> int | None:
    """Return the GPU that this rank uses; None on a CPU. A script has touched it before `init`."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
