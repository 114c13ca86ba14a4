"""What is known only from where it lies: jobs of a store, strays of any job in a cloud, and what is left of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.home import SightingsFile
from gpucloud.domain.errors import CredentialsError, GpucloudError, UsageError
from gpucloud.domain.job.spec import AwsChoices, Cloud, KnownJob, Resources
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.state.order import Refusal, ending_cloud
from gpucloud.domain.state.state import JobState
from gpucloud.ports import Census
from gpucloud.store import ObjectStore, open_store
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.orders import may_be_run
from gpucloud.usecases.machines import Sweeper
from gpucloud.usecases.services import cluster_of
from gpucloud.wiring.jobs import asker_of
from gpucloud.wiring.root import Gpucloud

if TYPE_CHECKING:
    from gpucloud.wiring.aws import AwsCloud


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


# What a cloud still lists: strays of any job, and what is left of one.


_SWEPT = (CloudName.LOCAL, CloudName.AWS)  # what stands on the user's own hosts is theirs


def sweepers(
    gpucloud: Gpucloud,
    clouds: tuple[CloudName, ...],
    store: str | None,
    regions: tuple[str, ...],
    story: Callable[[str], None],
) -> Iterator[Sweeper]:
    """Give what looks for strays: in each cloud (those of known jobs, if none is named) for each store there.

    Stores are the named one, else the cloud's own and those of known jobs; regions those named, else the AWS
    profile's and those of known jobs.
    """
    known = gpucloud.home.known()
    for name in swept_clouds(gpucloud, clouds):
        there = _on(known, name)
        cloud = gpucloud.local() if name is CloudName.LOCAL else _aws_of(gpucloud, regions, there)
        urls = (store,) if store else (cloud.default_store(), *(one.store for one in there))
        stores = {kept.url: kept for kept in (open_store(url, profile=cloud.profile) for url in urls)}
        for kept in stores.values():
            yield _sweeper(gpucloud, cloud.census(kept), kept, story)


def swept_clouds(gpucloud: Gpucloud, clouds: tuple[CloudName, ...]) -> tuple[CloudName, ...]:
    """Return the clouds that are looked at: those named, else the embedded fleet and known jobs'. UsageError."""
    if CloudName.SSH in clouds:
        raise UsageError("own hosts have no strays: what stands there is yours", hint="gpucloud gc")
    known = gpucloud.home.known()
    return clouds or tuple(one for one in _SWEPT if one is CloudName.LOCAL or _on(known, one))


def leftovers(gpucloud: Gpucloud, known: KnownJob) -> tuple[str, ...]:
    """Return what the cloud still lists for a job, of any kind: its group, machines, disks, keys, roles."""
    asker, cloud, cluster = asker_of(gpucloud, known), gpucloud.cloud_of(known), cluster_of(known.name)
    provisioner, store = cloud.provisioner(gpucloud.store_of(known)), gpucloud.store_of(known)
    found: list[str] = []
    for region in dict.fromkeys((asker.state().pool.region, *(one.rented.pool.region for one in asker.jobs.armings()))):
        name = provisioner.group(cluster, region)
        listed = asker.group.describe(name)
        found += [f"group {name}", *(node.id for node in listed.alive)] if listed.exists else []
        if known.cloud is CloudName.AWS:
            census = gpucloud.aws(AwsChoices(profile=known.profile), Resources(regions=(region,))).census(store)
            found += [f"{one.kind} {one.id}" for one in census.of_cluster(cluster)]
    return tuple(dict.fromkeys(found))


def _sweeper(gpucloud: Gpucloud, census: Census, store: ObjectStore, story: Callable[[str], None]) -> Sweeper:
    sightings = SightingsFile(gpucloud.home.sightings)
    return Sweeper(census=census, store=store, clock=gpucloud.clock, sightings=sightings, story=story)


def _aws_of(gpucloud: Gpucloud, regions: tuple[str, ...], known: tuple[KnownJob, ...]) -> AwsCloud:
    """Return AWS in the regions that are named, else in the profile's own and those of known jobs' files."""
    if regions or not known:
        return gpucloud.aws(AwsChoices(), Resources(regions=regions))
    cloud = gpucloud.aws(AwsChoices(profile=known[0].profile), Resources())
    found = dict.fromkeys((cloud.aws.region,))
    for one in known:
        with suppress(GpucloudError):
            found.update(dict.fromkeys(gpucloud.read_job(one.file).resources.regions))
    return gpucloud.aws(AwsChoices(profile=known[0].profile), Resources(regions=tuple(found)))


def _on(known: tuple[KnownJob, ...], cloud: CloudName) -> tuple[KnownJob, ...]:
    return tuple(one for one in known if one.cloud is cloud)
