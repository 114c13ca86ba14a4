"""Deleting checkpoints that no restore needs, while nobody trains."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.errors import UsageError
from gpucloud.domain.manifest import generations
from gpucloud.domain.standing import Standing, Superfluous, superfluous
from gpucloud.domain.state import JobState
from gpucloud.ports import Clock
from gpucloud.store.commits import under
from gpucloud.usecases.checkpoints import Shelf
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.lease import take


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruner:
    """Deletes what retention does not keep, manifests before data, under the job's lease."""

    jobs: JobStore
    shelf: Shelf
    clock: Clock

    def look(self) -> tuple[tuple[Standing, ...], Superfluous]:
        """Return what may go, among all that is there; UsageError while the job trains or may train."""
        loaded = self.jobs.load()
        if loaded is not None:
            self._require_idle(busy=_is_busy(loaded[0]))
        return self._look()

    def prune(self) -> tuple[tuple[Standing, ...], Superfluous]:
        """Delete what may go as it is now, and return that.

        Raises UsageError while the job trains, LeaseHeld while somebody supervises it.
        """
        with take(self.jobs, self.clock) as lease:  # so that nobody starts the job meanwhile
            self._require_idle(busy=_is_busy(lease.state))
            standing, gone = self._look()
            newest = self._newest()
            for number, key in enumerate(gone.keys):
                lease.confirm()
                if number <= len(gone.commits):  # before each manifest, and before all data
                    self._require_idle(busy=self._newest() != newest)
                self.shelf.store.delete(under(self.shelf.prefix, key))
        return standing, gone

    def _look(self) -> tuple[tuple[Standing, ...], Superfluous]:
        keys = self.shelf.listed()
        standing = self.shelf.standing(keys)
        return standing, superfluous(keys, standing)

    def _newest(self) -> tuple[int, ...]:
        """Return the newest generation: where one appears, somebody trains who does not know of the lease."""
        cut = len(under(self.shelf.prefix, ""))
        return generations(key[cut:] for key in self.shelf.store.list(under(self.shelf.prefix, "gen/")))[:1]

    def _require_idle(self, *, busy: bool) -> None:
        if busy:
            name = self.jobs.job
            raise UsageError(
                f"{name} is not at its end: it trains, or has trained and its results are not home yet",
                hint=f"gpucloud train {name} brings it to its end, gpucloud down {name} ends it now;"
                " while it trains, it deletes by itself what it needs no longer",
            )


def _is_busy(state: JobState) -> bool:
    return state.attempt is not None or bool(state.alive)
