"""Composes gpucloud of one user on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.home import Home, open_home, require_disk, temporary_files
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.code import RESULTS_MARK, results_folder
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.job.spec import AwsChoices, Job, KnownJob, Resources, SshChoices
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.state.order import run_of
from gpucloud.store import ObjectStore, TooMany, open_store
from gpucloud.store.directory import AWAY_HINT, DirectoryStore
from gpucloud.system.retries import SystemClock
from gpucloud.wiring.clouds import Cloud, CloudProfile, LocalCloud, SshCloud

if TYPE_CHECKING:
    from datetime import timedelta

    from gpucloud.adapters.keys import KeyRing
    from gpucloud.adapters.transfer.sync import Sources
    from gpucloud.domain.state.state import Attempt
    from gpucloud.domain.supervision.self_driving import Unable
    from gpucloud.domain.supervision.snapshot import Limits
    from gpucloud.ports import Brought, Clock, DataSets, Shell, Signer, Trust
    from gpucloud.usecases.job.ordered import OrderedJob
    from gpucloud.usecases.jobstore.jobstore import JobStore
    from gpucloud.usecases.jobstore.orders import Orders, Reader
    from gpucloud.usecases.services import Services
    from gpucloud.wiring.aws import AwsCloud


class Gpucloud:
    """What this user has on this machine: clouds, stores, keys, ways to nodes; each made when asked for.

    Use cases are built of it by `gpucloud.wiring.jobs` and `gpucloud.wiring.found`.
    """

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

    def aws(self, choices: AwsChoices, resources: Resources) -> AwsCloud:
        """Return AWS as these choices see it; the same object for the same choices."""
        from gpucloud.wiring.aws import AwsCloud

        key = (choices, resources.regions)
        if key not in self._aws:
            self._aws[key] = AwsCloud(self.home, choices, resources)
        return self._aws[key]

    def hosts(self, choices: SshChoices) -> SshCloud:
        """Return the user's own hosts."""
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
        if (job := self._placed(known)) is not None:
            return self.cloud(job)
        if known.cloud.traits.owned:
            return self.hosts(SshChoices())
        return self.aws(AwsChoices(profile=known.profile), Resources())

    def limits_of(self, known: KnownJob) -> Limits:
        """Return how long whoever supervises the job waits for what, in its cloud."""
        return self.cloud_of(known).cloud_profile.rules.limits

    def orders(self, known: KnownJob) -> Orders:
        """Return a known job's orders, to read and to give."""
        from gpucloud.usecases.jobstore.jobstore import JobStore
        from gpucloud.usecases.jobstore.orders import Orders

        jobs = JobStore(self.store_of(known), known.name)
        return Orders(jobs=jobs, clock=self.store_clock(jobs), signer=self.signer(), reader=self.reader())

    def is_strangers(self, known: KnownJob) -> bool:
        """Whether the job's newest order was given from another home, by nobody who is trusted here."""
        from gpucloud.usecases.jobstore.orders import is_strangers

        return is_strangers(self.orders(known).newest(), self.home.identity, self.reader())

    def ordered(self, known: KnownJob) -> OrderedJob:
        """Return a known job by its orders and its file here. Raises CredentialsError."""
        from gpucloud.usecases.job.ordered import OrderedJob

        def unpack(sha256: str, stored: Callable[[], bytes]) -> Path:
            from gpucloud.adapters.transfer.sync import make_tree

            return make_tree(self._cache / "code" / known.name, sha256, stored)

        orders = self.orders(known)
        return OrderedJob(
            known=known, orders=orders, host=lambda: self.home.identity, read_job=self.read_job, unpack=unpack
        )

    def _placed(self, known: KnownJob) -> Job | None:
        with suppress(GpucloudError):
            if (job := self.ordered(known).placed()) is not None:
                return job
        with suppress(GpucloudError):
            return replace(self.read_job(known.file), cloud=known.cloud)
        return None

    def store_clock(self, jobs: JobStore) -> Clock:
        """Return the clock of a job's store, by which all who have to do with the job agree."""
        from gpucloud.usecases.jobstore.lease import StoreClock

        return StoreClock(self.clock, jobs, lambda _: None)

    def store(self, job: Job) -> ObjectStore:
        """Return where the job's state is kept; a folder is away where it is not the one that its runs are in."""
        runs = [one for one in self.home.known(job.name) if run_of(job.name, one.name) is not None]
        store = open_store(job.store or self.cloud(job).default_store(), profile=job.aws.profile)
        return self.home.require_same(store, runs)

    def store_remarks(self, job: Job) -> tuple[str, ...]:
        """Return what costs on in a bucket of the user's own that a job names as its store."""
        if job.store is None or not job.store.startswith("s3://"):
            return ()
        from gpucloud.adapters.aws.bucket import what_stays

        told = what_stays(self.aws(job.aws, job.resources).aws, job.store)
        return (told,) if told is not None else ()

    def store_of(self, known: KnownJob) -> ObjectStore:
        """Return where a known job's state is kept; a folder is away where it is another than that."""
        return self.home.require_same(open_store(known.store, profile=known.profile), (known,))

    def require_room(self, job: Job) -> None:
        """Raise StoreError where a disk is full that a start of the job writes to here; asked before it rents."""
        from gpucloud.domain.node.bootstrap.steps import MINIMUM_FREE_BYTES

        self.home.require_room(MINIMUM_FREE_BYTES if job.cloud is CloudName.LOCAL else 0)
        require_disk("temporary files", temporary_files(), "have TMPDIR name another folder")
        store = self.store(job)
        if isinstance(store, DirectoryStore):
            require_disk("the job's store", store.root, "have `store` name another folder")

    def known(self, job: Job, name: str, file: Path) -> KnownJob:
        """Return what is remembered of a run of the job."""
        store = self.store(job)
        return KnownJob(
            name=name,
            store=store.url,
            file=file.resolve(),
            cloud=job.cloud,
            profile=job.aws.profile,
            store_identity=store.identity if isinstance(store, DirectoryStore) else None,
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
            from gpucloud.adapters.keys import derive_key

            derive_key(self.home.named_key, job, self.home.key(job))
        return self.home.key(job)

    def machine_key(self, known: KnownJob) -> Path | None:
        """Return where the key that opens a known job's machines is, or would be; None for hosts of the user's own."""
        if self.cloud_of(known).cloud_profile.own_login is not None:
            return None
        return self.home.named_key or self.home.key(known.name)

    def services(self, job: Job, name: str, *, goes_on: bool = True, unattended: timedelta | None = None) -> Services:
        """Return everything that supervising a run of the job needs. UsageError for a secret that is not set.

        Without `goes_on` what ending it needs: no secrets, and no key is made that would open no machine. With
        `unattended` its own machines are to drive it.
        """
        from gpucloud.adapters.keys import generate_key
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

    def has_drill_role(self, job: Job) -> bool:
        """Return whether another job's role for drills stands wherever this one may go, which has none made.

        False where that cannot be told from here.
        """
        if job.cloud is not CloudName.AWS or not job.aws.instance_profile:
            return False
        from gpucloud.adapters.aws.standing import has_drill_role

        with suppress(GpucloudError):
            cloud = self.aws(job.aws, job.resources)
            return all(has_drill_role(cloud.aws, region) for region in cloud.regions)
        return False

    def bring_stored_home(self, job: Job, name: str) -> Brought:
        """Bring home what a machine that drove the job put into the store; return where it is now."""
        from gpucloud.adapters.transfer.localfiles import CameNotes
        from gpucloud.adapters.transfer.outputs import bring_stored_home, stored_attempts
        from gpucloud.ports import Brought
        from gpucloud.usecases.jobstore.jobstore import JobStore

        store, names_any = self.store(job), bool(job.outputs) or job.profile_steps is not None
        stored = stored_attempts(store, name)
        if not names_any and not stored:  # those of an attempt before, whose job file named some
            return Brought()
        home = results_folder(job.source, name)
        brought = bring_stored_home(store, name, home, marks=True)
        with suppress(GpucloudError):
            found = JobStore(store, name).load()
            attempts = found[0].attempts if found is not None and found[0].torn_down else ()
            for attempt in attempts[-1:]:  # of a job that goes on, whoever supervises it tells what came
                if stored & {0, attempt.number}:
                    CameNotes(home).note(attempt, attempt.missing_outputs, attempts[0].started_at)
        return brought

    def is_deleted(self, known: KnownJob) -> bool:
        """Return whether a job's store is there and has nothing of it; False where that cannot be told from here."""
        with suppress(GpucloudError):
            store = self.store_of(known)
            is_there = not isinstance(store, DirectoryStore) or not store.is_empty()
            return is_there and not store.list(f"jobs/{known.name}/")
        return False

    def why_away(self, known: KnownJob) -> GpucloudError | None:
        """Return why nothing of a job can be read in its store, None where something is there of it."""
        try:
            if self.store_of(known).list(f"jobs/{known.name}/"):
                return None
        except TooMany:
            return None
        except GpucloudError as error:
            return error
        forgets = f"gpucloud rm {known.name} --forget forgets the job"
        return UsageError(f"{known.store} has nothing of {known.name}", hint=f"{AWAY_HINT}; if it is lost, {forgets}")

    def has_home(self, known: KnownJob) -> bool:
        """Return whether a job's file, and so its folder, is here, for its outputs to come home to."""
        return self.home.has_folder_of(known.file)

    def outputs_of(self, known: KnownJob, attempts: Iterable[Attempt]) -> str:
        """Return the folder that outputs of one of these attempts of a job came home to; empty where none did here.

        With how many files lay in it before that are none of its run's.
        """
        from gpucloud.adapters.transfer.localfiles import CameNotes

        home = results_folder(known.file, known.name)
        notes = CameNotes(home)  # a folder of that name may be another run's, and this one's on another computer
        came = [attempt for attempt in attempts if notes.came(attempt) is not None]
        beside = notes.beside(came[-1]) if came else 0
        were = f"{counted(beside, 'file')} that {'was' if beside == 1 else 'were'} there before"
        return f"{home}{f', beside {were}' if beside else ''}" if came else ""

    def kept_results(self, known: KnownJob) -> str:
        """Return the folder here that has results of a job, which nothing here deletes; empty where none is."""
        home = results_folder(known.file, known.name)
        return str(home) if (home / RESULTS_MARK).is_file() else ""

    def has_stored_outputs(self, known: KnownJob) -> bool:
        """Return whether outputs of a job are in its store."""
        return bool(self.stored_attempts(known))

    def stored_attempts(self, known: KnownJob) -> frozenset[int]:
        """Return the attempts of which outputs are in the job's store, 0 for outputs of none."""
        from gpucloud.adapters.transfer.outputs import stored_attempts

        return stored_attempts(self.store_of(known), known.name)

    def copy_stored(self, known: KnownJob, target: Path) -> Brought:
        """Bring what was put into the store below `target`, as it was, and leave it there; return where it is now."""
        from gpucloud.adapters.transfer.outputs import copy_stored

        return copy_stored(self.store_of(known), known.name, target)

    def require_secrets(self, job: Job) -> None:
        """Check that every secret of the job is set here. Raises UsageError."""
        read_secrets(job)

    def data_sets(self, job: Job) -> DataSets | None:
        """Return where the job's data comes from; None for a job without data."""
        if not job.data:
            return None
        from gpucloud.adapters.transfer.sync import Sources

        profile, python = job.aws.profile, self.cloud(job).cloud_profile.node_python
        return self._data.setdefault(profile, Sources(profile=profile, python=python, cache=self._cache))

    def read_job(self, path: Path, *, to_start: bool = False) -> Job:
        """Return the job of a job file. JobFileError with all that is wrong, and that `to_start` it is missing."""
        from gpucloud.adapters.jobfile import read_job

        def require_region(region: str) -> None:
            self.aws(AwsChoices(), Resources()).require_regions((region,))

        return read_job(path, require_region, to_start=to_start)

    def require_regions(self, job: Job) -> None:
        """UsageError where a job on AWS names, or its user's settings name, what is no region."""
        if job.cloud is CloudName.AWS:
            self.aws(job.aws, job.resources).require_regions()

    def keys(self) -> KeyRing:
        """Return the user's signing key and the keys that are trusted."""
        from gpucloud.adapters.keys import KeyRing

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


def read_secrets(job: Job) -> dict[str, str]:
    """Return the values of the job's secrets from the caller's environment."""
    missing = [name for name in job.secrets if name not in os.environ]
    if missing:
        raise UsageError(f"secrets: {', '.join(missing)} not set in the environment", hint=f"export {missing[0]}=…")
    return {name: os.environ[name] for name in job.secrets}
