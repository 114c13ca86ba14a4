"""What is found by looking: jobs of a store, strays of any job in a cloud, and this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.adapters.home import SightingsFile, has_room, temporary_files
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import CredentialsError, FleetElsewhere, GpucloudError, NodeError, UsageError
from gpucloud.domain.job.spec import AwsChoices, Cloud, KnownJob, Resources
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.node.bootstrap.steps import MINIMUM_FREE_BYTES
from gpucloud.domain.node.gate.report import GateOrder, GateWanted
from gpucloud.domain.state.order import Refusal, ending_cloud
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.strays import Owner, Thing, is_owned
from gpucloud.store import Stored, open_store
from gpucloud.store.directory import DirectoryStore
from gpucloud.system import smi
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.runs import may_be_run
from gpucloud.usecases.machines import Check, Here, Sweeper, aws_check, disk_check, store_check, terraform_check
from gpucloud.usecases.services import cluster_of
from gpucloud.usecases.supervise.needs import parse_checked
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
        is_here = False
        with suppress(FleetElsewhere):
            is_here = not in_s3 and state.group is not None and gpucloud.local().nodes().describe(state.group).exists
        cloud = ending_cloud(self.known.name, state.group, in_s3=in_s3, is_here=is_here)
        if isinstance(cloud, Refusal):
            raise CredentialsError(cloud.why, hint=cloud.hint)
        return self.known


def jobs_in(gpucloud: Gpucloud, url: str) -> tuple[FoundJob, ...]:
    """Return every job of a store, with its file if the very one is here, two folders deep at most.

    Nothing of a file that lies in the store alone is obeyed: the job's own machines could have put it there.
    """
    store = gpucloud.home.require_same(open_store(url, profile=None), gpucloud.home.known())
    return tuple(_found(gpucloud, store.url, name, JobStore(store, name).spec()) for name in job_names(store))


def _found(gpucloud: Gpucloud, url: str, name: str, spec: bytes | None) -> FoundJob:
    near = (path for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in sorted(Path.cwd().glob(depth)))
    for path in near:
        if spec is not None and _is_same(path, spec) and (cloud := _cloud(gpucloud, path, name)) is not None:
            return FoundJob(KnownJob(name=name, store=url, file=path, cloud=cloud), has_own_file=True)
    nowhere = gpucloud.home.nowhere(name)
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


# What a cloud still lists of any job: strays.


_SWEPT = (CloudName.LOCAL, CloudName.AWS)  # what stands on the user's own hosts is theirs


@dataclass(frozen=True, slots=True)
class Unasked:
    """What could not be asked, and why, so that it is not known what stands there: AWS by a profile, or a store."""

    profile: str | None
    error: GpucloudError
    store: str | None = None


def sweepers(
    gpucloud: Gpucloud,
    clouds: tuple[CloudName, ...],
    store: str | None,
    regions: tuple[str, ...],
    story: Callable[[str], None],
) -> Iterator[Sweeper | Unasked]:
    """Give what looks for strays: in each cloud (those of known jobs, if none is named) for each store there.

    Stores are the named one, else the cloud's own and those of known jobs. Of AWS, each account is looked at to which a
    known job's profile leads; in the regions that are named, else in the profile's own and those of known jobs.
    """
    known = gpucloud.home.known()
    for name in swept_clouds(gpucloud, clouds):
        there = _on(known, name)
        looks = _accounts(gpucloud, regions, there) if name is CloudName.AWS else ((gpucloud.local(), there),)
        for look in looks:
            if isinstance(look, Unasked):
                yield look
                continue
            cloud, jobs = look
            urls = (store,) if store else (cloud.default_store(), *(one.store for one in jobs))
            stores = {kept.url: kept for kept in (open_store(url, profile=cloud.profile) for url in urls)}
            for kept in stores.values():
                gpucloud.home.require_same(kept, known)
                yield Sweeper(
                    census=cloud.census(kept),
                    store=kept,
                    clock=gpucloud.clock,
                    sightings=SightingsFile(gpucloud.home.sightings),
                    story=story,
                    known=frozenset(one.name for one in known if one.store == kept.url),
                )


def what_stays(gpucloud: Gpucloud, known: KnownJob) -> Iterator[str]:
    """Say what may still run, and cost, of a job whose store is away, and how that is ended once it is forgotten."""
    if known.cloud.traits.owned:
        yield "what runs of it on your own hosts ends within half an hour; results that lie there stay"
    else:
        yield from _what_runs(gpucloud, known)
    if known.store.startswith("s3://"):
        yield f"what is in {known.store} stays there, and is paid as long as it does"


def _what_runs(gpucloud: Gpucloud, known: KnownJob) -> Iterator[str]:
    cluster, things = cluster_of(known.name), list[Thing]()
    ends = f"gpucloud gc --cloud {known.cloud.value} --store {shlex.quote(known.store)}"
    ends = f"AWS_PROFILE={shlex.quote(known.profile)} {ends}" if known.profile else ends
    try:
        for one in sweepers(gpucloud, (known.cloud,), known.store, (), lambda _: None):
            if isinstance(one, Unasked):
                raise one.error
            owner = Owner(account=one.census.account, store=one.store.url)
            things += (thing for thing in one.census.things() if thing.cluster == cluster and is_owned(thing, owner))
    except GpucloudError as error:
        yield f"its machines may still run, and cost: {error}. Once it is forgotten, `{ends} --wait --yes` ends them"
        return
    if not things:
        where = "on the embedded fleet of this home" if known.cloud is CloudName.LOCAL else known.cloud.value
        yield f"no machine of it is listed ({where})"
        return
    regions = dict.fromkeys(thing.region for thing in things if known.cloud is CloudName.AWS)
    ends = " ".join((ends, *(f"--region {region}" for region in regions)))
    listed = ", ".join(f"{thing.kind} {thing.id}" for thing in things)
    costs = ", and paid" if known.cloud is CloudName.AWS else ""
    yield f"still there{costs}: {listed}. Once the job is forgotten, `{ends} --wait --yes` ends that"


def swept_clouds(gpucloud: Gpucloud, clouds: tuple[CloudName, ...]) -> tuple[CloudName, ...]:
    """Return the clouds that are looked at: those named, else the embedded fleet and known jobs'. UsageError."""
    if any(one.traits.owned for one in clouds):
        raise UsageError(
            "own hosts have no strays: a job's files are removed when it ends, its software stays in ~/.gpucloud there",
            hint="`rm -r ~/.gpucloud` on a host that no job uses any more",
        )
    known = gpucloud.home.known()
    return clouds or tuple(one for one in _SWEPT if one is CloudName.LOCAL or _on(known, one))


def _accounts(
    gpucloud: Gpucloud, regions: tuple[str, ...], known: tuple[KnownJob, ...]
) -> Iterator[tuple[AwsCloud, tuple[KnownJob, ...]] | Unasked]:
    """Yield AWS once for each account, in all regions that are to be looked at there, with the account's known jobs."""
    found: dict[str, tuple[str | None, dict[str, None], list[KnownJob]]] = {}
    for profile in dict.fromkeys(one.profile for one in known) or (None,):
        jobs = [one for one in known if one.profile == profile]
        try:
            where = regions or _regions(gpucloud, profile, jobs)
            account = gpucloud.aws(AwsChoices(profile=profile), Resources(regions=where)).account().caller().account
        except GpucloudError as error:
            yield Unasked(profile, error)
            continue
        _, wheres, there = found.setdefault(account, (profile, {}, []))
        wheres.update(dict.fromkeys(where))
        there += jobs
    for profile, wheres, there in found.values():
        yield gpucloud.aws(AwsChoices(profile=profile), Resources(regions=tuple(wheres))), tuple(there)


def _regions(gpucloud: Gpucloud, profile: str | None, known: Sequence[KnownJob]) -> tuple[str, ...]:
    """Return the profile's own region, and those of the jobs: of their files, and where they had machines."""
    cloud = gpucloud.aws(AwsChoices(profile=profile), Resources())
    found = dict.fromkeys([cloud.aws.region] if cloud.aws.knows_region else [])
    for one in known:
        with suppress(GpucloudError):
            found.update(dict.fromkeys(gpucloud.read_job(one.file).resources.regions))
        with suppress(GpucloudError):  # the file may be gone, or name none by now
            had = _had(JobStore(gpucloud.store_of(one), one.name).believed())
            found.update((region, None) for region in had if region in cloud.catalog.regions)
    if not found:
        raise UsageError("no AWS region is known", hint="--region us-east-1, or set AWS_REGION")
    return tuple(found)


def _had(loaded: tuple[JobState, Stored] | None) -> tuple[str, ...]:
    pools = (loaded[0].pool, *(node.pool for node in loaded[0].nodes)) if loaded is not None else ()
    return tuple(pool.region for pool in pools)


def _on(known: tuple[KnownJob, ...], cloud: CloudName) -> tuple[KnownJob, ...]:
    return tuple(one for one in known if one.cloud is cloud)


# Looking at this machine itself: what gpucloud needs, then its GPUs by the code that nodes run.

_LIMIT_S = 400.0
_USUAL_FREE = 5 << 30


def look_here(gpucloud: Gpucloud, *, full: bool) -> Here:
    """Return how this machine is; with `full`, its GPUs are put to work with this interpreter's torch."""
    home = gpucloud.home
    checks = tuple(_checks(gpucloud))
    count = len(smi.gpus()[0] or ())
    order = GateOrder(
        wanted=GateWanted(gpus=count, full=full, torch=full, every=True), digest="", python=sys.executable
    )
    root = home.root / "cache" / "doctor"
    argv = (sys.executable, "-m", "gpucloud.agent", "gate", "--root", str(root))
    try:
        done = subprocess.run(argv, input=to_json(order).encode(), capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NodeError("the check of this machine's GPUs does not end", hint="nvidia-smi") from error
    checked = parse_checked(done.stdout)
    if checked is None:
        raise NodeError(f"the check of this machine failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return Here(checks=checks, checked=checked)


def _checks(gpucloud: Gpucloud) -> Iterator[Check]:
    from gpucloud.adapters.terraform.program import require_terraform

    home = gpucloud.home
    folder = next(path for path in (home.root, *home.root.parents) if path.exists())

    def caller() -> str:
        known = gpucloud.aws(AwsChoices(), Resources()).account().caller()
        return f"{known.arn}, region {known.region}"

    yield Check(name="Python", ok=True, text=f"{sys.version.split()[0]} ({sys.executable})")
    cache = home.root / "cache" / "terraform.json"
    yield terraform_check(partial(require_terraform, os.environ, cache, tools=home.tools))
    yield from _disks(gpucloud, folder)
    yield aws_check(caller if _has_credentials() else None)


def _disks(gpucloud: Gpucloud, home: Path) -> Iterator[Check]:
    """Yield how full the disks are, by the rule of `train`: of gpucloud's folder, temporary files, stores of jobs.

    A full one of a store bars its own jobs alone.
    """
    free = shutil.disk_usage(home).free
    roomy = partial(disk_check, has_room=has_room)
    yield roomy("gpucloud's folder", home, free, least=MINIMUM_FREE_BYTES, usual=_USUAL_FREE)
    judged = partial(store_check, has_room=has_room)
    seen = {home.stat().st_dev}
    others = [(temporary_files(), partial(roomy, "temporary files")), *((one, judged) for one in _stores(gpucloud))]
    for folder, check in others:
        with suppress(OSError):  # what is not there is no full disk
            device = folder.stat().st_dev
            if device not in seen:
                yield check(folder, shutil.disk_usage(folder).free)
            seen.add(device)


def _stores(gpucloud: Gpucloud) -> list[Path]:
    """Return the folders in which known jobs are kept."""
    found: set[Path] = set()
    with suppress(GpucloudError):  # of a job that cannot be looked at, `status` says why
        for known in gpucloud.home.known():
            store = open_store(known.store) if not known.store.startswith("s3://") else None
            if isinstance(store, DirectoryStore):
                found.add(store.root)
    return sorted(found)


_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
"""Variables from which botocore takes credentials, or where they are."""


def _has_credentials() -> bool:
    """Whether the user set any up: nobody is asked, so that a machine without AWS waits for nothing."""
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    return any(name in os.environ for name in _CREDENTIALS) or any(
        _is_file(os.environ.get(name, usual)) for name, usual in files.items()
    )


def _is_file(written: str) -> bool:
    return os.path.isfile(os.path.expanduser(written))  # noqa: PTH111, PTH113  these never raise
