"""A job's data sets: listed once, kept in its store, so that every later attempt has exactly the same files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from gpucloud.domain.data import DataSet, DataWanted, difference, gigabytes, wanted
from gpucloud.domain.errors import CredentialsError, StoreError, UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.quantities import counted
from gpucloud.ports import DataSets
from gpucloud.usecases.jobstore import JobStore


@dataclass(slots=True)
class JobData:
    """The sets of one job, for all who prepare its nodes at the same time; `story` hears of them once."""

    job: Job
    jobs: JobStore
    sets: DataSets | None
    story: Callable[[str], None]
    _wanted: tuple[DataWanted, ...] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wanted(self) -> tuple[DataWanted, ...]:
        """Return what every node must have; nothing is asked of anybody for a job without data.

        Raises StoreError, CredentialsError, UsageError when a set that was never listed cannot be listed.
        """
        with self._lock:
            if self._wanted is None:
                self._wanted = tuple(
                    wanted(self._pinned(source), target, self.job.cloud) for source, target in self.job.data
                )
            return self._wanted

    def _pinned(self, source: str) -> DataSet:
        kept = self.jobs.data_set(source)
        if self.sets is None:
            raise UsageError(f"data: nobody here can list {source}")
        if kept is None:
            found = self.sets.listed(source)
            self.jobs.keep_data_set(found)
            self.story(
                f"data: {source}: {counted(len(found.files), 'file')}, {gigabytes(found.size)}, staged on every node"
            )
            return found
        self._compare(kept)
        return kept

    def _compare(self, kept: DataSet) -> None:
        """The job goes on with what it began with; a node that lacks a file that has changed cannot get it."""
        try:
            changed = difference(kept, self.sets.listed(kept.source)) if self.sets else None
        except (StoreError, CredentialsError, UsageError) as error:
            self.story(f"data: {kept.source} could not be listed again: {error}")
            return
        if changed:
            self.story(f"data: {kept.source}: {changed} since this job began; it goes on with the files as they were")
