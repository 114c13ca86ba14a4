"""Jobs that are known only from the store they are kept in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gpucloud.adapters.home import KnownJob
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.job import Cloud
from gpucloud.store import open_store
from gpucloud.usecases.jobstore import JobStore, job_names
from gpucloud.wiring.root import Gpucloud


def jobs_in(gpucloud: Gpucloud, url: str) -> tuple[KnownJob, ...]:
    """Return every job of a store, with its file: the same one here, two folders deep at most, or as it was stored.

    A file that was stored has no code beside it: passes that only end machines need none.
    """
    store = open_store(url, profile=None)
    specs = ((name, JobStore(store, name).spec()) for name in job_names(store))
    return tuple(_stored_job(gpucloud, store.url, name, spec) for name, spec in specs if spec is not None)


def _stored_job(gpucloud: Gpucloud, url: str, name: str, spec: bytes) -> KnownJob:
    near = (path for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in sorted(Path.cwd().glob(depth)))
    same = next((path for path in near if _is_same(path, spec)), None)
    file = same or gpucloud.home.keep_spec(name, spec)
    cloud = Cloud.AWS if url.startswith("s3://") else Cloud.LOCAL
    with suppress(GpucloudError):
        cloud = gpucloud.read_job(file).cloud
    return KnownJob(name=name, store=url, file=file, cloud=cloud)


def _is_same(path: Path, spec: bytes) -> bool:
    try:
        return path.stat().st_size == len(spec) and path.read_bytes() == spec
    except OSError:
        return False
