"""Composes gpucloud of one user on one machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home, KnownJob, open_home
from gpucloud.domain.errors import CredentialsError, GpucloudError, ToolMissing, UsageError
from gpucloud.domain.job import AwsChoices, Job, Resources, SshChoices
from gpucloud.domain.job import Cloud as CloudName
from gpucloud.store import ObjectStore, open_store
from gpucloud.wiring.jobfile import read_secrets
from gpucloud.wiring.local import LocalCloud

if TYPE_CHECKING:
    from gpucloud.adapters.copying import Copier
    from gpucloud.adapters.datasets import Sources
    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.adapters.plots import Plot
    from gpucloud.domain.driving import Unable, Unattended
    from gpucloud.domain.node import Node
    from gpucloud.domain.plan import Plan
    from gpucloud.domain.state import JobState
    from gpucloud.ports import DataSets, Markets, PolicyTables, Shell
    from gpucloud.usecases.estimate import Estimator
    from gpucloud.usecases.here import Here
    from gpucloud.usecases.jobs import Asker
    from gpucloud.usecases.report import JobReport
    from gpucloud.usecases.start import Starter
    from gpucloud.usecases.world import World
    from gpucloud.wiring.aws import AwsCloud
    from gpucloud.wiring.cloud import Cloud, Manners
    from gpucloud.wiring.hosts import SshCloud

_VISIT_S = 5.0
_LOOK_S = 0.3


class Gpucloud:
    """gpucloud of this user on this machine: everything that a command needs, made when it is asked for."""

    def __init__(self, home: Home | None = None) -> None:
        self.home = home or open_home()
        self.clock = SystemClock()
        self._aws: dict[object, AwsCloud] = {}
        self._data: dict[str | None, Sources] = {}

    @property
    def _cache(self) -> Path:
        return self.home.root / "cache"

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

        cache = self._cache
        own, limit_s = manners.own_login, manners.connect_s
        identity = self.home.key(job) if own is None else UserKeys(own.key)
        return SshShell(identity, connect_timeout_s=limit_s, python=manners.node_python, cache=cache)

    def visitor(self, known: KnownJob) -> Shell:
        """Return SSH for a short look at a known job's nodes: one that does not answer is not waited for."""
        return self.shell(known.name, replace(self.cloud_of(known).manners, connect_s=_VISIT_S))

    def visited(self, known: KnownJob, report: JobReport) -> JobReport:
        """Return the report with what the job's nodes say now; one that does not answer has no status."""
        if not report.nodes:
            return report
        from gpucloud.usecases.visiting import visited

        shell = self.visitor(known)
        try:
            return visited(report, shell)
        finally:
            shell.close()

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
            changeover=cloud.manners.rules.limits.changeover,
        )

    def estimator(self, job: Job, *, offline: bool = False) -> Estimator:
        """Return what says what the job is going to cost, and when it will be done.

        `offline`: by the catalog's prices, for a job on AWS of somebody whom AWS does not know.
        """
        from gpucloud.usecases.estimate import Estimator
        from gpucloud.usecases.outlooks import Outlooks
        from gpucloud.usecases.planning import Planner

        cloud = self.cloud(job)
        outlooks = Outlooks(markets=self.recorded_markets(), tables=self.policy_tables())
        planner = Planner(
            market=self.aws(job.aws, job.resources).listed_market() if offline else cloud.market(),
            account=None if offline else cloud.account(),
            clock=self.clock,
            wall=cloud.manners.rules.wall,
            terms=cloud.manners.terms,
            changeover=cloud.manners.rules.limits.changeover,
        )
        return Estimator(planner=planner, outlooks=outlooks)

    def first_plan(self, job: Job) -> Plan | None:
        """Return the plan of a job whose store does not exist yet; None when it does."""
        if job.store is not None or self.cloud(job).store_is_there():
            return None
        return self.starter(job).plan(job)

    def asker(self, known: KnownJob) -> Asker:
        """Return what answers questions about a known job."""
        from gpucloud.store.counting import CountingStore, Tally
        from gpucloud.usecases.jobs import Asker
        from gpucloud.usecases.jobstore import JobStore

        cloud, store, tally = self.cloud_of(known), self.store_of(known), Tally()
        return Asker(
            jobs=JobStore(CountingStore(store, tally), known.name),
            market=cloud.market(),
            group=cloud.group(store),
            clock=self.clock,
            terms=cloud.manners.terms,
            tally=tally,
            look_s=max(_LOOK_S, cloud.manners.flush_s / 2),  # each look is paid for; output comes no more often
        )

    def world(self, job: Job, name: str, *, with_secrets: bool = True, unattended: Unattended | None = None) -> World:
        """Return everything that supervising a run of the job needs. UsageError for a secret that is not set.

        Ending a job needs no secrets. With `unattended` its own machines are to drive it.
        """
        from gpucloud.wiring.worlds import Around, compose_world

        cloud = self.cloud(job)
        around = Around(
            home=self.home,
            clock=self.clock,
            cloud=cloud,
            store=self.store(job),
            shell=self.shell(name, cloud.manners),
            data_sets=self.data_sets(job),
        )
        return compose_world(
            job, name, around, secrets=read_secrets(job) if with_secrets else {}, unattended=unattended
        )

    def unable(self, job: Job) -> Unable | None:
        """Return why the job's machines cannot drive it, None if they can."""
        from gpucloud.wiring.worlds import why_unable

        return why_unable(job, self.cloud(job).manners, self.store(job).url, self._cache)

    def bring_stored_home(self, job: Job, name: str) -> tuple[str, ...]:
        """Bring home what a machine that drove the job put into the store; return where it is now."""
        if not job.outputs and job.profile_steps is None:
            return ()
        from gpucloud.adapters.storedoutputs import bring_stored_home

        return bring_stored_home(self.store(job), name, job.source.parent / "outputs" / name)

    def require_key(self, known: KnownJob, state: JobState) -> None:
        """Check that the key of the job's machines is here where it has any: a new one would open none of them."""
        own = self.cloud_of(known).manners.own_login
        if own is None and state.group is not None and not self.home.key(known.name).is_file():
            raise CredentialsError(
                f"{known.name} has machines, and their SSH key is not here ({self.home.key(known.name)})",
                hint="GPUCLOUD_SSH_KEY=<the file>: the same key wherever the job is supervised from",
            )

    def data_sets(self, job: Job) -> DataSets | None:
        """Return where the job's data comes from; None for a job without data."""
        if not job.data:
            return None
        from gpucloud.adapters.datasets import Sources

        profile, python = job.aws.profile, self.cloud(job).manners.node_python
        return self._data.setdefault(profile, Sources(profile=profile, python=python, cache=self._cache))

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

    def recorded_markets(self) -> Markets:
        """Return the spot markets of the past that come with the package."""
        from gpucloud.adapters.markets import PackagedMarkets

        return PackagedMarkets()

    def policy_tables(self, without: Collection[str] = ()) -> PolicyTables:
        """Return what makes the learned policy's tables, from recorded markets but not from the zones in `without`."""
        from gpucloud.adapters.tables import TableMaker

        return TableMaker(without)

    def plot(self, path: Path) -> Plot:
        """Return the file to draw charts into. UsageError for none of PNG or SVG, ToolMissing without matplotlib."""
        try:
            from gpucloud.adapters.plots import Plot
        except ImportError as error:
            raise ToolMissing("plots need matplotlib", hint="pip install 'gpucloud[plots]'") from error
        return Plot(path)

    def install_terraform(self, story: Callable[[str], None]) -> Path:
        """Fetch Terraform into this user's own folder and return it. ToolMissing when that fails."""
        from gpucloud.adapters.terraform.install import install

        return install(self.home.tools, story=story)

    def look_here(self, *, full: bool) -> Here:
        """Return how this machine is; with `full`, its GPUs are put to work."""
        from gpucloud.wiring.here import look_here

        return look_here(self.home, lambda: self.aws(AwsChoices(), Resources()).account(), full=full)
