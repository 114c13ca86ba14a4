"""Jobs that are known only from the store they are kept in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.home import KnownJob
from gpucloud.domain.errors import CredentialsError, GpucloudError
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.state.order import Refusal, ending_cloud
from gpucloud.domain.state.state import JobState
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.orders import may_be_run
from gpucloud.wiring.root import Gpucloud


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job of a store, and whether its file is here; without one its order tells all that there is to know."""

    known: KnownJob
    has_own_file: bool

    def to_end(self, gpucloud: Gpucloud, state: JobState) -> KnownJob:
        """Return the job as it is ended from here. CredentialsError where it may not be."""
        if self.has_own_file:
            return self.known
        in_s3 = self.known.store.startswith("s3://")
        is_here = not in_s3 and state.group is not None and gpucloud.local().nodes().describe(state.group).exists
        cloud = ending_cloud(self.known.name, state.group, in_s3=in_s3, is_here=is_here)
        if isinstance(cloud, Refusal):
            raise CredentialsError(cloud.why, hint=cloud.hint)
        return self.known


def jobs_in(gpucloud: Gpucloud, url: str) -> tuple[FoundJob, ...]:
    """Return every job of a store, with its file if the very one is here, two folders deep at most.

    Nothing of a file that lies in the store alone is obeyed: the job's own machines could have put it there.
    """
    store = open_store(url, profile=None)
    return tuple(_found(gpucloud, store.url, name, JobStore(store, name).spec()) for name in job_names(store))


def _found(gpucloud: Gpucloud, url: str, name: str, spec: bytes | None) -> FoundJob:
    near = (path for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in sorted(Path.cwd().glob(depth)))
    for path in near:
        if spec is not None and _is_same(path, spec) and (cloud := _cloud(gpucloud, path, name)) is not None:
            return FoundJob(KnownJob(name=name, store=url, file=path, cloud=cloud), has_own_file=True)
    nowhere = gpucloud.home.root / "specs" / name / "gpucloud.yaml"
    cloud = Cloud.AWS if url.startswith("s3://") else Cloud.LOCAL
    return FoundJob(KnownJob(name=name, store=url, file=nowhere, cloud=cloud), has_own_file=False)


def _cloud(gpucloud: Gpucloud, path: Path, run: str) -> Cloud | None:
    """Return the cloud of the job file, None if it is not that run's: a store may name any file that is here."""
    try:
        job = gpucloud.read_job(path)
    except GpucloudError:
        return None
    return job.cloud if may_be_run(job.name, run) else None


def _is_same(path: Path, spec: bytes) -> bool:
    try:
        return path.stat().st_size == len(spec) and path.read_bytes() == spec
    except OSError:
        return False
