"""Composes gpucloud of one user on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home, KnownJob, open_home
from gpucloud.domain.bootstrap.noderecord import LARGEST_CODE_BYTES
from gpucloud.domain.bootstrap.wanted import DriverWanted
from gpucloud.domain.driving import VERSION, DriveOrder, Unable, Unattended, order_key, unable
from gpucloud.domain.errors import CredentialsError, GpucloudError, UsageError
from gpucloud.domain.job import AwsChoices, Job, Resources, SshChoices
from gpucloud.domain.job import Cloud as CloudName
from gpucloud.store import ObjectStore, open_store
from gpucloud.wiring.local import LocalCloud

if TYPE_CHECKING:
    from gpucloud.adapters.copying import Copier
    from gpucloud.adapters.datasets import Sources
    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.domain.node import Node
    from gpucloud.domain.plan import Plan
    from gpucloud.domain.state import JobState
    from gpucloud.ports import Census, DataSets, Shell
    from gpucloud.usecases.gc import Sweeper
    from gpucloud.usecases.here import Here
    from gpucloud.usecases.jobs import Asker
    from gpucloud.usecases.start import Starter
    from gpucloud.usecases.world import SelfBoot, World
    from gpucloud.wiring.aws import AwsCloud
    from gpucloud.wiring.cloud import Cloud, Manners
    from gpucloud.wiring.hosts import SshCloud

_VISIT_S = 5.0
_SWEPT = (CloudName.LOCAL, CloudName.AWS)  # what stands on the user's own hosts is theirs


class Gpucloud:
    """gpucloud of this user on this machine: everything that a command needs, made when it is asked for."""

    def __init__(self, home: Home | None = None) -> None:
        self.home = home or open_home()
        self.clock = SystemClock()
        self._aws: dict[object, AwsCloud] = {}
        self._data: dict[str | None, Sources] = {}

    def local(self) -> LocalCloud:
        """Return the embedded cloud."""
        return LocalCloud(self.home)

    def embedded(self, known: KnownJob) -> LocalNodeGroup:
        """Return the embedded cloud's node groups; UsageError for a job that runs elsewhere."""
        if known.cloud is not CloudName.LOCAL:
            raise UsageError(
                f"{known.name} runs on {known.cloud.value}, not on the embedded fleet",
                hint=f"gpucloud train {known.name} --drill has one machine taken",
            )
        return self.local().nodes()

    def aws(self, choices: AwsChoices, resources: Resources) -> AwsCloud:
        """Return AWS as these choices see it; the same object for the same choices."""
        from gpucloud.wiring.aws import AwsCloud

        key = (choices, resources.regions)
        if key not in self._aws:
            self._aws[key] = AwsCloud(self.home, choices, resources)
        return self._aws[key]

    def hosts(self, choices: SshChoices) -> SshCloud:
        """Return the user's own hosts."""
        from gpucloud.wiring.hosts import SshCloud

        return SshCloud(self.home, choices)

    def cloud(self, job: Job) -> Cloud:
        """Return the cloud that the job names."""
        match job.cloud:
            case CloudName.LOCAL:
                return self.local()
            case CloudName.AWS:
                return self.aws(job.aws, job.resources)
            case CloudName.SSH:
                return self.hosts(job.ssh)

    def cloud_of(self, known: KnownJob) -> Cloud:
        """Return the cloud of a known job, from its file if that can still be read."""
        if known.cloud is CloudName.LOCAL:
            return self.local()
        try:
            job = replace(self.read_job(known.file), cloud=known.cloud)
        except GpucloudError:
            if known.cloud is CloudName.SSH:
                return self.hosts(SshChoices())
            return self.aws(AwsChoices(profile=known.profile), Resources())
        return self.cloud(job)

    def store(self, job: Job) -> ObjectStore:
        """Return where the job's state is kept."""
        return open_store(job.store or self.cloud(job).default_store(), profile=job.aws.profile)

    def store_of(self, known: KnownJob) -> ObjectStore:
        """Return where a known job's state is kept."""
        return open_store(known.store, profile=known.profile)

    def known(self, job: Job, name: str, file: Path) -> KnownJob:
        """Return what is remembered of a run of the job."""
        return KnownJob(
            name=name, store=self.store(job).url, file=file.resolve(), cloud=job.cloud, profile=job.aws.profile
        )

    def shell(self, job: str, manners: Manners) -> Shell:
        """Return SSH with the key of the job's cluster, or with the user's own where the hosts are."""
        from gpucloud.adapters.ssh import SshShell, UserKeys

        cache = self.home.root / "cache"
        own, limit_s = manners.own_login, manners.connect_s
        identity = self.home.key(job) if own is None else UserKeys(own.key)
        return SshShell(identity, connect_timeout_s=limit_s, python=manners.node_python, cache=cache)

    def visitor(self, known: KnownJob) -> Shell:
        """Return SSH for a short look at a known job's nodes: one that does not answer is not waited for."""
        return self.shell(known.name, replace(self.cloud_of(known).manners, connect_s=_VISIT_S))

    @contextmanager
    def copier(self, known: KnownJob, node: Node, progress: Callable[[int, int], None]) -> Iterator[Copier]:
        """Give what copies to and from a job's node, paths starting in its code folder."""
        from gpucloud.adapters.copying import Copier

        manners = self.cloud_of(known).manners
        shell = self.shell(known.name, manners)
        try:
            yield Copier(shell.host(node), python=manners.node_python, progress=progress)
        finally:
            shell.close()

    def starter(self, job: Job) -> Starter:
        """Return what starts jobs in the job's store."""
        from gpucloud.usecases.start import Starter

        cloud = self.cloud(job)
        return Starter(
            store=self.store(job),
            market=cloud.market(),
            account=cloud.account(),
            clock=self.clock,
            wall=cloud.manners.rules.wall,
            terms=cloud.manners.terms,
        )

    def first_plan(self, job: Job) -> Plan | None:
        """Return the plan of a job whose store does not exist yet; None when it does."""
        if job.store is not None or self.cloud(job).store_is_there():
            return None
        return self.starter(job).plan(job)

    def asker(self, known: KnownJob) -> Asker:
        """Return what answers questions about a known job."""
        from gpucloud.usecases.jobs import Asker
        from gpucloud.usecases.jobstore import JobStore

        cloud, store = self.cloud_of(known), self.store_of(known)
        return Asker(
            jobs=JobStore(store, known.name),
            market=cloud.market(),
            group=cloud.group(store),
            clock=self.clock,
            terms=cloud.manners.terms,
        )

    def world(self, job: Job, name: str, *, with_secrets: bool = True, unattended: Unattended | None = None) -> World:
        """Return everything that supervising a run of the job needs. UsageError for a secret that is not set.

        Ending a job needs no secrets. With `unattended` its own machines are to drive it.
        """
        from gpucloud.adapters.outputs import OutputsFolder
        from gpucloud.adapters.package import package_zip
        from gpucloud.adapters.ssh import generate_key
        from gpucloud.usecases.bootstrap import Package
        from gpucloud.usecases.world import World

        cloud, store = self.cloud(job), self.store(job)
        data, sha256 = package_zip()
        rules = cloud.manners.rules
        if unattended is not None:
            rules = replace(rules, wall=replace(rules.wall, horizon=unattended.lasting))
        world = World(
            job=job,
            name=name,
            clock=self.clock,
            store=store,
            provisioner=cloud.provisioner(store),
            group=cloud.group(store),
            market=cloud.market(),
            shell=self.shell(name, cloud.manners),
            outputs=OutputsFolder(job.outputs, job.source.parent / "outputs" / name, python=cloud.manners.node_python),
            data_sets=self.data_sets(job),
            public_key=generate_key(self.home.key(name)),
            package=Package(data=data, sha256=sha256),
            rules=rules,
            terms=cloud.manners.terms,
            period_s=cloud.manners.period_s,
            flush_s=cloud.manners.flush_s,
            knows_our_address=cloud.manners.knows_our_address,
            power_off=cloud.manners.power_off,
            key=self.home.key(name).read_bytes(),
            secrets=read_secrets(job) if with_secrets else {},
            self_boot=self._self_boot(cloud.manners, unattended),
        )
        return world if unattended is None else self._driven(world, cloud.manners, unattended)

    def bring_stored_home(self, job: Job, name: str) -> tuple[str, ...]:
        """Bring home what a machine that drove the job put into the store; return where it is now."""
        if not job.outputs and job.profile_steps is None:
            return ()
        from gpucloud.adapters.storedoutputs import bring_stored_home

        return bring_stored_home(self.store(job), name, job.source.parent / "outputs" / name)

    def unable(self, job: Job) -> Unable | None:
        """Return why the job's machines cannot drive it, None if they can."""
        from gpucloud.adapters.sync import whole_code

        manners, store = self.cloud(job).manners, self.store(job).url
        if manners.drives_as is None and job.cloud is not CloudName.SSH:
            return Unable(why=f"machines on {job.cloud.value} do not drive their jobs", hint="leave --unattended out")
        found = unable(job, store, code_fits=True)
        if found is not None:
            return found
        code = whole_code(job.code, limit=LARGEST_CODE_BYTES, cache=self.home.root / "cache")[1]
        return unable(job, store, code_fits=code is not None)

    def _driven(self, world: World, manners: Manners, unattended: Unattended) -> World:
        """Return the world with what its machines go by; what the store adds to the order is added there."""
        order = DriveOrder(
            version=VERSION,
            name=world.name,
            cluster=world.cluster,
            group="",
            job=world.job,
            store=world.store.url,
            region=None,
            tree="",
            tree_name="",
            package="",
            package_sha256="",
            rules=world.rules,
            terms=world.terms,
            period_s=world.period_s,
            flush_s=world.flush_s,
            node_python=manners.node_python,
            power_off=world.power_off,
            records=str(self.home.cloud) if world.job.cloud is CloudName.LOCAL else "",
            keep=unattended.keep,
            drill=unattended.drill,
            key=world.key,
        )
        driver = DriverWanted(store=order.store, order=order_key(order.cluster), pip_mirror=world.job.mirrors.pip)
        return replace(world, order=order, driver=driver)

    def require_key(self, known: KnownJob, state: JobState) -> None:
        """Check that the key of the job's machines is here where it has any: a new one would open none of them."""
        own = self.cloud_of(known).manners.own_login
        if own is None and state.group is not None and not self.home.key(known.name).is_file():
            raise CredentialsError(
                f"{known.name} has machines, and their SSH key is not here ({self.home.key(known.name)})",
                hint="GPUCLOUD_SSH_KEY=<the file>: the same key wherever the job is supervised from",
            )

    def _self_boot(self, manners: Manners, unattended: Unattended | None) -> SelfBoot | None:
        from gpucloud.adapters.sync import whole_code
        from gpucloud.usecases.world import SelfBoot

        login = manners.boots_as or (manners.drives_as if unattended is not None else None)
        if login is None:
            return None
        return SelfBoot(login=login, pack_code=partial(whole_code, cache=self.home.root / "cache"))

    def data_sets(self, job: Job) -> DataSets | None:
        """Return where the job's data comes from; None for a job without data."""
        if not job.data:
            return None
        from gpucloud.adapters.datasets import Sources

        profile, python = job.aws.profile, self.cloud(job).manners.node_python
        return self._data.setdefault(profile, Sources(profile=profile, python=python, cache=self.home.root / "cache"))

    def data_remarks(self, job: Job, region: str) -> tuple[str, ...]:
        """Return what reading the job's data costs machines in that region, where it costs anything."""
        from gpucloud.domain.egress import remark

        sets = self.data_sets(job)
        if sets is None or job.cloud is not CloudName.AWS:
            return ()
        found = (sets.listed(source) for source, _ in job.data if source.startswith("s3://"))
        return tuple(line for one in found if (line := remark(one, region, job.resources.nodes)))

    def read_job(self, path: Path) -> Job:
        """Return the job of a job file. JobFileError with everything that is wrong."""
        from gpucloud.adapters.jobfile import read_job

        return read_job(path)

    def install_terraform(self, story: Callable[[str], None]) -> Path:
        """Fetch Terraform into this user's own folder and return it. ToolMissing when that fails."""
        from gpucloud.adapters.terraform.install import install

        return install(self.home.tools, story=story)

    def look_here(self, *, full: bool) -> Here:
        """Return how this machine is; with `full`, its GPUs are put to work."""
        from gpucloud.wiring.here import look_here

        return look_here(self.home, lambda: self.aws(AwsChoices(), Resources()).account(), full=full)

    def jobs_in(self, url: str) -> tuple[KnownJob, ...]:
        """Return every job of a store, with its file: the same one here, two folders deep at most, or as it was stored.

        A file that was stored has no code beside it: passes that only end machines need none.
        """
        from gpucloud.usecases.jobstore import JobStore, job_names

        store = open_store(url, profile=None)
        specs = ((name, JobStore(store, name).spec()) for name in job_names(store))
        return tuple(self._stored_job(store.url, name, spec) for name, spec in specs if spec is not None)

    def _stored_job(self, url: str, name: str, spec: bytes) -> KnownJob:
        near = (path for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in sorted(Path.cwd().glob(depth)))
        same = next((path for path in near if _is_same(path, spec)), None)
        file = same or self.home.keep_spec(name, spec)
        cloud = CloudName.AWS if url.startswith("s3://") else CloudName.LOCAL
        with suppress(GpucloudError):
            cloud = self.read_job(file).cloud
        return KnownJob(name=name, store=url, file=file, cloud=cloud)

    def sweepers(
        self,
        clouds: tuple[CloudName, ...],
        store: str | None,
        regions: tuple[str, ...],
        story: Callable[[str], None],
    ) -> Iterator[Sweeper]:
        """Give what looks for strays: in each cloud (those of known jobs, if none is named) for each store there.

        Stores are the named one, else the cloud's own and those of known jobs; regions those named, else the AWS
        profile's and those of known jobs.
        """
        known = self.home.known()
        for name in clouds or tuple(one for one in _SWEPT if one is CloudName.LOCAL or _on(known, one)):
            there = _on(known, name)
            cloud = self.local() if name is CloudName.LOCAL else self._aws_of(regions, there)
            urls = (store,) if store else (cloud.default_store(), *(one.store for one in there))
            stores = {kept.url: kept for kept in (open_store(url, profile=cloud.profile) for url in urls)}
            for kept in stores.values():
                yield self._sweeper(cloud.census(kept), kept, story)

    def _sweeper(self, census: Census, store: ObjectStore, story: Callable[[str], None]) -> Sweeper:
        from gpucloud.adapters.sightings import SightingsFile
        from gpucloud.usecases.gc import Sweeper

        sightings = SightingsFile(self.home.sightings)
        return Sweeper(census=census, store=store, clock=self.clock, sightings=sightings, story=story)

    def _aws_of(self, regions: tuple[str, ...], known: tuple[KnownJob, ...]) -> AwsCloud:
        """Return AWS in the regions that are named, else in the profile's own and those of known jobs' files."""
        if regions or not known:
            return self.aws(AwsChoices(), Resources(regions=regions))
        cloud = self.aws(AwsChoices(profile=known[0].profile), Resources())
        found = dict.fromkeys((cloud.aws.region,))
        for one in known:
            with suppress(GpucloudError):
                found.update(dict.fromkeys(self.read_job(one.file).resources.regions))
        return self.aws(AwsChoices(profile=known[0].profile), Resources(regions=tuple(found)))

    def leftovers(self, known: KnownJob) -> tuple[str, ...]:
        """Return what the cloud still lists for a job, of any kind: its group, machines, disks, keys, roles."""
        from gpucloud.usecases.world import cluster_of

        asker, cloud, cluster = self.asker(known), self.cloud_of(known), cluster_of(known.name)
        provisioner, store = cloud.provisioner(self.store_of(known)), self.store_of(known)
        region = asker.state().pool.region
        name = provisioner.group(cluster, region)
        listed = asker.group.describe(name)
        found = [f"group {name}", *(node.id for node in listed.alive)] if listed.exists else []
        if known.cloud is CloudName.AWS:
            census = self.aws(AwsChoices(profile=known.profile), Resources(regions=(region,))).census(store)
            found += [f"{one.kind} {one.id}" for one in census.of_cluster(cluster)]
        return tuple(dict.fromkeys(found))


def _is_same(path: Path, spec: bytes) -> bool:
    try:
        return path.stat().st_size == len(spec) and path.read_bytes() == spec
    except OSError:
        return False


def _on(known: tuple[KnownJob, ...], cloud: CloudName) -> tuple[KnownJob, ...]:
    return tuple(one for one in known if one.cloud is cloud)


def sample_job(name: str) -> str:
    """Return the commented job file that `gpucloud init` writes."""
    from gpucloud.adapters import jobfile

    return jobfile.sample_job(name)


def job_schema() -> dict[str, object]:
    """Return the JSON Schema of job files."""
    from gpucloud.adapters import jobfile

    return jobfile.json_schema()


def read_secrets(job: Job) -> dict[str, str]:
    """Return the values of the job's secrets from the caller's environment."""
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UsageError(f"secrets: {', '.join(missing)} not set in the environment", hint=f"export {missing[0]}=…")
    return {name: os.environ[name] for name in job.secrets}
