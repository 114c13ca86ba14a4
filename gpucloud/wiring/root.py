"""Composes gpucloud of one user on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.home import Home, KnownJob, open_home
from gpucloud.domain.errors import CredentialsError, GpucloudError, UsageError
from gpucloud.domain.job.spec import AwsChoices, Job, Resources, SshChoices
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.state.order import refuse_elsewhere, unusable
from gpucloud.store import ObjectStore, open_store
from gpucloud.wiring.jobfile import read_secrets
from gpucloud.wiring.local import LocalCloud

if TYPE_CHECKING:
    from datetime import timedelta

    from gpucloud.adapters.local.group import LocalNodeGroup
    from gpucloud.adapters.signing import KeyRing
    from gpucloud.adapters.transfer.copying import Copier
    from gpucloud.adapters.transfer.datasets import Sources
    from gpucloud.domain.node.node import Node
    from gpucloud.domain.state.order import Order
    from gpucloud.domain.state.state import JobState
    from gpucloud.domain.supervision.self_driving import Unable
    from gpucloud.ports import Clock, DataSets, Shell, Signer, Trust
    from gpucloud.usecases.job.jobs import Asker
    from gpucloud.usecases.jobstore.jobstore import JobStore
    from gpucloud.usecases.jobstore.orders import Given, Orders, Reader
    from gpucloud.usecases.jobstore.report import JobReport
    from gpucloud.usecases.machines import Here
    from gpucloud.usecases.services import Services
    from gpucloud.wiring.aws import AwsCloud
    from gpucloud.wiring.cloud import Cloud, CloudProfile
    from gpucloud.wiring.hosts import SshCloud

_VISIT_S = 5.0
_LOOK_S = 0.3
_EDITED = "{file} was changed since the job was started: its order {number} counts; `gpucloud train` takes the file up"


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
                hint=f"gpucloud train {known.name} --drill has one machine interrupted",
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
        for job in self._jobs_of(known):
            return self.cloud(job)
        if known.cloud is CloudName.SSH:
            return self.hosts(SshChoices())
        return self.aws(AwsChoices(profile=known.profile), Resources())

    def orders(self, known: KnownJob) -> Orders:
        """Return a known job's orders, to read and to give."""
        from gpucloud.usecases.jobstore.jobstore import JobStore
        from gpucloud.usecases.jobstore.orders import Orders

        jobs = JobStore(self.store_of(known), known.name)
        return Orders(jobs=jobs, clock=self.store_clock(jobs), signer=self.signer(), reader=self.reader())

    def store_clock(self, jobs: JobStore) -> Clock:
        """Return the clock of a job's store, by which all who have to do with the job agree."""
        from gpucloud.usecases.services import StoreClock

        return StoreClock(self.clock, jobs, lambda _: None)

    def ordered(self, known: KnownJob, given: Given, *, with_code: bool = True) -> tuple[Job, str | None]:
        """Return the job that the order says, for a process here, and a line where the job file says another by now.

        An order that nobody signed whose word counts here says nothing but the job's name: that is enough to end it.
        The code is the order's. Data in folders, secrets and keys are those of the file here unless the order was given
        here, by the own key; without `with_code` none is needed. What comes home comes to where the file is known to
        be. Raises JobFileError, StoreError, CredentialsError for what another machine alone can go on with.
        """
        order, orders = given.order, self.orders(known)
        if not orders.is_trusted(given):
            return _stand_in(known, order.budget_usd), None
        is_here = self._is_given_here(orders, given)
        if with_code and not is_here:
            refusal = refuse_elsewhere(order, has_file=known.file.is_file())
            if refusal is not None:
                raise CredentialsError(refusal.why, hint=refusal.hint)
        job = _as_known(order.resolved, known)
        if not is_here:
            job = self._as_meant_here(job, known, needs_all=with_code and known.file.is_file())
        return self.with_pinned_code(job, known, order) if with_code else job, self._edited(known, order)

    def _is_given_here(self, orders: Orders, given: Given) -> bool:
        """Return whether what an order names of its machine is its reader's own word: a signer may name any host."""
        return given.order.host == self.home.identity and orders.is_own(given)

    def _as_meant_here(self, job: Job, known: KnownJob, *, needs_all: bool) -> Job:
        """Return the job of another machine's order with nothing of this machine but what the job file here names.

        JobFileError for a file that cannot be read, where `needs_all`.
        """
        try:
            here = self.read_job(known.file)
        except GpucloudError:
            if needs_all:
                raise
            in_s3 = tuple((source, name) for source, name in job.data if source.startswith("s3://"))
            return replace(job, code=known.file.parent, data=in_s3, ssh=replace(job.ssh, key=None), secrets=())
        return replace(job, code=here.code, data=here.data, ssh=here.ssh, secrets=here.secrets)

    def enough_to_end(self, known: KnownJob) -> Job:
        """Return the job as far as ending it needs it: as its file here says, else by what is remembered of it."""
        with suppress(GpucloudError):
            return _as_known(self.read_job(known.file), known)
        return _stand_in(known, Decimal(0))

    def with_pinned_code(self, job: Job, known: KnownJob, order: Order) -> Job:
        """Return the job with the code that its order names, which no edit of the folder reaches. Raises StoreError."""
        if not order.code_sha256:
            return job
        from gpucloud.adapters.transfer.sync import make_tree
        from gpucloud.usecases.jobstore.jobstore import JobStore

        jobs = JobStore(self.store_of(known), known.name)
        folder, sha256 = self._cache / "code" / known.name, order.code_sha256
        return replace(job, code=make_tree(folder, sha256, lambda: jobs.code(sha256)))

    def _edited(self, known: KnownJob, order: Order) -> str | None:
        from gpucloud.usecases.job.start import sha256_of

        try:
            differs = sha256_of(known.file.read_bytes()) != order.spec_sha256
        except OSError:
            return None
        return _EDITED.format(file=known.file, number=order.number) if differs else None

    def _jobs_of(self, known: KnownJob) -> Iterator[Job]:
        """Yield what says on which account and in which regions a known job runs: its order, else its file."""
        with suppress(GpucloudError):
            orders = self.orders(known)
            given = orders.given()
            if given is not None and orders.is_trusted(given):
                job = _as_known(given.order.resolved, known)
                if self._is_given_here(orders, given):
                    yield job
                elif unusable(given.order) is None:
                    yield self._as_meant_here(job, known, needs_all=False)
        with suppress(GpucloudError):
            yield replace(self.read_job(known.file), cloud=known.cloud)

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

    def shell(self, job: str, cloud_profile: CloudProfile) -> Shell:
        """Return SSH with the key of the job's cluster, or with the user's own where the hosts are."""
        from gpucloud.adapters.ssh.identity import UserKeys
        from gpucloud.adapters.ssh.shell import SshShell

        cache = self._cache
        own, limit_s = cloud_profile.own_login, cloud_profile.connect_s
        identity = self.cluster_key(job) if own is None else UserKeys(own.key)
        return SshShell(identity, connect_timeout_s=limit_s, python=cloud_profile.node_python, cache=cache)

    def cluster_key(self, job: str) -> Path:
        """Return where the private key of the job's cluster is, or is going to be. Raises CredentialsError."""
        if self.home.named_key is not None:
            from gpucloud.adapters.ssh.keys import derive_key

            derive_key(self.home.named_key, job, self.home.key(job))
        return self.home.key(job)

    def visitor(self, known: KnownJob) -> Shell:
        """Return SSH for a short look at a known job's nodes: one that does not answer is not waited for."""
        return self.shell(known.name, replace(self.cloud_of(known).cloud_profile, connect_s=_VISIT_S))

    def visited(self, known: KnownJob, report: JobReport) -> JobReport:
        """Return the report with what the job's nodes say now; one that does not answer has no status."""
        if not report.nodes:
            return report
        from gpucloud.usecases.supervise.look import visited

        shell = self.visitor(known)
        try:
            return visited(report, shell, self.clock.sleep)
        finally:
            shell.close()

    @contextmanager
    def copier(self, known: KnownJob, node: Node, progress: Callable[[int, int], None]) -> Iterator[Copier]:
        """Give what copies to and from a job's node, paths starting in its code folder."""
        from gpucloud.adapters.transfer.copying import Copier

        cloud_profile = self.cloud_of(known).cloud_profile
        shell = self.shell(known.name, cloud_profile)
        try:
            yield Copier(shell.host(node), python=cloud_profile.node_python, progress=progress)
        finally:
            shell.close()

    def asker(self, known: KnownJob) -> Asker:
        """Return what answers questions about a known job."""
        from gpucloud.store.contract import CountingStore, Tally
        from gpucloud.usecases.job.jobs import Asker
        from gpucloud.usecases.jobstore.jobstore import JobStore

        cloud, store, tally = self.cloud_of(known), self.store_of(known), Tally()
        jobs = JobStore(CountingStore(store, tally), known.name)
        return Asker(
            jobs=jobs,
            market=cloud.market(),
            group=cloud.group(store),
            clock=self.store_clock(jobs),
            terms=cloud.cloud_profile.terms,
            wall=cloud.cloud_profile.rules.wall,
            tally=tally,
            reader=self.reader,
            look_s=max(_LOOK_S, cloud.cloud_profile.flush_s / 2),  # each look is paid for; output comes no more often
        )

    def world(self, job: Job, name: str, *, goes_on: bool = True, unattended: timedelta | None = None) -> Services:
        """Return everything that supervising a run of the job needs. UsageError for a secret that is not set.

        Without `goes_on` what ending it needs: no secrets, and no key is made that would open no machine. With
        `unattended` its own machines are to drive it.
        """
        from gpucloud.adapters.ssh.keys import generate_key
        from gpucloud.wiring.services import JobEnvironment, compose_services

        cloud = self.cloud(job)
        around = JobEnvironment(
            home=self.home,
            clock=self.clock,
            cloud=cloud,
            store=self.store(job),
            shell=self.shell(name, cloud.cloud_profile),
            data_sets=self.data_sets(job),
            key=self.cluster_key(name),
        )
        if (
            goes_on or cloud.cloud_profile.own_login is not None
        ):  # there it opens no machine, secrets are made from it alone
            generate_key(around.key)
        return compose_services(job, name, around, secrets=read_secrets(job) if goes_on else {}, unattended=unattended)

    def unable(self, job: Job) -> Unable | None:
        """Return why the job's machines cannot drive it, None if they can."""
        from gpucloud.wiring.services import why_unable

        return why_unable(job, self.cloud(job).cloud_profile, self.store(job).url, self._cache)

    def bring_stored_home(self, job: Job, name: str) -> tuple[str, ...]:
        """Bring home what a machine that drove the job put into the store; return where it is now."""
        if not job.outputs and job.profile_steps is None:
            return ()
        from gpucloud.adapters.transfer.outputs import bring_stored_home

        return bring_stored_home(self.store(job), name, job.source.parent / "outputs" / name, marks=True)

    def has_stored_outputs(self, known: KnownJob) -> bool:
        """Return whether outputs of a job are in the store, and its folder is here for them to come home to."""
        from gpucloud.adapters.transfer.outputs import has_stored

        return known.file.parent.is_dir() and has_stored(self.store_of(known), known.name)

    def copy_stored(self, known: KnownJob, target: Path) -> tuple[str, ...]:
        """Bring what was put into the store below `target`, as it was, and leave it there; return where it is now."""
        from gpucloud.adapters.transfer.outputs import copy_stored

        return copy_stored(self.store_of(known), known.name, target)

    def require_secrets(self, job: Job) -> None:
        """Check that every secret of the job is set here. Raises UsageError."""
        read_secrets(job)

    def require_key(self, known: KnownJob, state: JobState) -> None:
        """Check that the key of the job's machines is here where it has any: a new one would open none of them."""
        own, key = self.cloud_of(known).cloud_profile.own_login, self.home.named_key or self.home.key(known.name)
        if own is None and state.group is not None and not key.is_file():
            raise CredentialsError(
                f"{known.name} has machines, and their SSH key is not here ({key})",
                hint="GPUCLOUD_SSH_KEY=<the file>: the same one wherever the job is supervised from, from its start",
            )

    def data_sets(self, job: Job) -> DataSets | None:
        """Return where the job's data comes from; None for a job without data."""
        if not job.data:
            return None
        from gpucloud.adapters.transfer.datasets import Sources

        profile, python = job.aws.profile, self.cloud(job).cloud_profile.node_python
        return self._data.setdefault(profile, Sources(profile=profile, python=python, cache=self._cache))

    def data_remarks(self, job: Job, region: str) -> tuple[str, ...]:
        """Return what reading the job's data costs machines in that region, where it costs anything."""
        from gpucloud.domain.money.costs import remark

        sets = self.data_sets(job)
        if sets is None or job.cloud is not CloudName.AWS:
            return ()
        found = (sets.listed(source) for source, _ in job.data if source.startswith("s3://"))
        return tuple(line for one in found if (line := remark(one, region, job.resources.nodes)))

    def read_job(self, path: Path) -> Job:
        """Return the job of a job file. JobFileError with everything that is wrong."""
        from gpucloud.adapters.jobfile import read_job

        return read_job(path)

    def keys(self) -> KeyRing:
        """Return the user's signing key and the keys that are trusted."""
        from gpucloud.adapters.signing import KeyRing

        return KeyRing(self.home.signing, os.environ)

    def signer(self) -> Signer:
        """Return the user's own key, made if there is none. Raises CredentialsError."""
        return self.keys().signer()

    def trust(self) -> Trust:
        """Return whose signatures count here. Raises CredentialsError."""
        return self.keys().trust()

    def reader(self) -> Reader:
        """Return who reads orders here. Raises CredentialsError."""
        from gpucloud.usecases.jobstore.orders import Reader

        return Reader(trust=self.trust(), marks=self.home.order_marks)

    def install_terraform(self, story: Callable[[str], None]) -> Path:
        """Fetch Terraform into this user's own folder and return it. ToolMissing when that fails."""
        from gpucloud.adapters.terraform.program import install

        return install(self.home.tools, story=story)

    def look_here(self, *, full: bool) -> Here:
        """Return how this machine is; with `full`, its GPUs are put to work."""
        from gpucloud.wiring.jobfile import look_here

        return look_here(self.home, lambda: self.aws(AwsChoices(), Resources()).account(), full=full)


def _stand_in(known: KnownJob, budget_usd: Decimal) -> Job:
    """A job that is enough to end machines; nothing of it is ever sent to a node."""
    return Job(
        name=known.name,
        run="true",
        budget_usd=budget_usd,
        source=known.file,
        code=known.file.parent,
        cloud=known.cloud,
        store=known.store,
        aws=AwsChoices(profile=known.profile),
    )


def _as_known(job: Job, known: KnownJob) -> Job:
    """The job where this machine knows it to be: an order, or a file, may name another place by now."""
    aws = replace(job.aws, profile=known.profile)
    return replace(job, source=known.file, cloud=known.cloud, store=known.store, aws=aws)
