"""What stands before any job: its file, a CI pipeline, keys; an account's rights, quotas, catalog and base."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpucloud.cli.render.estimates import need_json
from gpucloud.cli.render.words import is_meant, say, say_json, table, tell
from gpucloud.cli.target import DEFAULT_FILE, read_target
from gpucloud.domain.errors import CleanupIncomplete, JobFileError, UsageError
from gpucloud.domain.job.quantities import format_usd
from gpucloud.domain.job.spec import AwsChoices, Cloud, Job, Resources
from gpucloud.domain.market.catalog import Catalog, QuotaRequest
from gpucloud.domain.market.listing import Query
from gpucloud.domain.state.order import OWN
from gpucloud.system.wholefile import write_whole
from gpucloud.usecases.machines import understood
from gpucloud.usecases.money.estimate import Need, Quotas
from gpucloud.usecases.services import cluster_of
from gpucloud.wiring import Gpucloud, install_pipeline, job_schema, job_templates, sample_job, template_job

if TYPE_CHECKING:
    from gpucloud.adapters.aws.policy import PrintedPolicies
    from gpucloud.wiring.aws import AwsCloud


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """What `init` writes: a short file, with every key if `full`, or a whole job called `template`.

    `name` is the folder's if left out, `run` the script that is there.
    """

    name: str | None
    template: str | None
    run: str | None
    full: bool
    force: bool


def init(request: InitRequest, *, as_json: bool) -> int:
    """Write a job file here, and a template's code beside it; return the exit code."""
    name = request.name or _name_of(Path.cwd())
    if request.template is not None and (request.run is not None or request.full):
        raise UsageError("--template brings its own script and file", hint="leave --run and --full out")
    run = _quoted(request.run or _script_of(Path.cwd()))
    text, code = (
        template_job(request.template, name) if request.template else (sample_job(name, run, full=request.full), {})
    )
    files = {Path(DEFAULT_FILE): text.encode(), **code}
    there = [path for path in files if path.exists()]
    if there and not request.force:
        is_one = len(there) == 1
        raise UsageError(
            f"{', '.join(map(str, there))} {'is' if is_one else 'are'} there already",
            hint=f"--force writes over {'it' if is_one else 'all of them, what you have changed in them too'}",
        )
    for path, data in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)
    if as_json:
        say_json({"file": DEFAULT_FILE, "code": [str(path) for path in code]})
    else:
        say(f"wrote {', '.join(map(str, files))}; `gpucloud train` runs it{_once_it_reads()}")
    return 0


def _quoted(run: str) -> str:
    """Return the line, in quotes where it is the name of a file here that is no word of its own."""
    is_name = Path(run).is_file() and shlex.quote(run) != run
    return shlex.quote(run) if is_name else run


def _once_it_reads() -> str:
    """Return what must be mended first in the file that was written; nothing where it is whole."""
    try:
        Gpucloud().read_job(Path(DEFAULT_FILE), to_start=True)
    except JobFileError as error:
        return f" once this is mended:\n{error.message}"
    return ""


def templates(*, as_json: bool) -> int:
    """Write which templates there are; return the exit code."""
    known = job_templates()
    if as_json:
        say_json({"templates": [{"name": name, "about": about} for name, about in known.items()]})
        return 0
    width = max(map(len, known))
    for name, about in known.items():
        say(f"{name:{width}}  {about}")
    return 0


def schema() -> int:
    """Write the job file's JSON Schema; return the exit code."""
    say(json.dumps(job_schema(), indent=2))
    return 0


def _script_of(folder: Path) -> str:
    """Return the script that is meant where nobody says which: train.py, or the only one."""
    there = sorted(path.name for path in folder.glob("*.py"))
    return there[0] if len(there) == 1 else "train.py"


def _name_of(folder: Path) -> str:
    """Return the folder's name in the letters that a job's name may have."""
    letters = re.sub(r"[^a-z0-9]+", "-", folder.name.lower())
    return letters.strip("-")[:40].strip("-") or "job"


# `ci init`: a repository's own copy of all that its CI runs.


def init_ci(*, github: bool, gitlab: bool, force: bool, as_json: bool) -> int:
    """Put pipelines, gpucloud's wheel and the lock into the repository; return the exit code."""
    done = install_pipeline(Path.cwd(), github=github, gitlab=gitlab, force=force)
    found = done.update
    written = (*found.written, *found.in_the_way)
    if as_json:
        lists = {"written": written, "removed": found.removed, "kept": found.kept}
        say_json({name: list(paths) for name, paths in lists.items()} | {"wheel": done.wheel, "sha256": done.sha256})
    else:
        say("\n".join([f"wrote {path}" for path in written] + [f"removed {path}" for path in found.removed]))
    for path in found.kept:
        tell(f"{path} was edited here and stays; what gpucloud would write is as it was")
    if done.to_add is not None:
        name, text = done.to_add
        for line in (f"{name} is yours; add to it:", *text.rstrip().splitlines()):
            tell(line)
    tell(f"{done.wheel} has SHA-256 {done.sha256}; commit all of it (`git add -f` where *.whl is ignored)")
    return 0


# `quota`, `iam`, `keys`, `tools` and `down --base`: what an account allows, and what stands there without any job.


def quota_show(target: str | None, *, as_json: bool) -> int:
    """Say what of the account's quotas a job needs and what there is; 11 when none of them is enough."""
    quotas, job = _quotas(target)
    needs = quotas.needs(job)
    if as_json:
        say_json({"job": job.name, "quotas": [need_json(need) for need in needs]})
    else:
        say(table([("quota", "region", "limit", "in use", "needed", "for", ""), *map(_need_row, needs)]))
    return 0 if any(need.enough for need in needs) else 11


def quota_request(target: str | None, *, vcpus: int | None, as_json: bool) -> int:
    """Ask the cloud for more; return the exit code."""
    quotas, job = _quotas(target)
    request = quotas.request(job, vcpus)
    if as_json:
        say_json({"request": _request_json(request)})
    else:
        say(f"asked for {request.wanted} vCPUs of {request.name!r} in {request.region}: {request.status}")
        tell("gpucloud quota status follows it; a person at AWS may have to decide, which takes hours to days")
    return 0


def quota_status(target: str | None, *, as_json: bool) -> int:
    """List what was asked for in the job's regions; return the exit code."""
    quotas, job = _quotas(target)
    regions = job.resources.regions or (quotas.account.caller().region,)
    requests = [request for region in regions for request in quotas.account.requests(region)]
    if as_json:
        say_json({"requests": [_request_json(request) for request in requests]})
    elif requests:
        rows = [(f"{r.asked_at:%Y-%m-%d %H:%M}", r.region, r.name, str(r.wanted), r.status) for r in requests]
        say(table([("asked at", "region", "quota", "vCPUs", "status"), *rows]))
    else:
        say(f"nothing was asked for in {', '.join(regions)}")
    return 0


class Whose(Enum):
    """Whose policy `iam policy` writes."""

    CALLER = "caller"
    CI = "ci"  # who makes no roles
    UNBOUNDED = "unbounded"  # who makes roles without a boundary
    NODE = "node"
    DRIVER = "driver"  # a machine that drives its job
    BOUNDARY = "boundary"  # of the roles that are made


def iam_policy(
    target: str | None,
    whose: Whose,
    kms_keys: tuple[str, ...] = (),
    *,
    account: str | None = None,
    region: str | None = None,
) -> int:
    """Write the least IAM policies of whoever runs gpucloud, by name, or the one that was asked for; the exit code.

    AWS is asked whose account it is unless `account` says so; where nobody can tell, a placeholder stands for it.
    """
    cloud = Gpucloud()
    machines = whose in (Whose.NODE, Whose.DRIVER)
    job = read_target(cloud, target, Cloud.AWS).job if target is not None or machines else None
    aws = cloud.aws(job.aws if job else AwsChoices(), job.resources if job else Resources())
    printed = aws.policies(account=account, region=region)
    if machines and job:
        drives = whose is Whose.DRIVER
        policies = printed.of_machines(job, cluster_of(job.name), unattended=drives, kms_keys=kms_keys)
    elif whose is Whose.BOUNDARY:
        policies = printed.boundary(job, kms_keys)
        tell(f"make it once, as the policy {printed.boundary_name}: roles of gpucloud's making are then under it")
    else:
        bounded, makes_roles = whose is not Whose.UNBOUNDED, whose is not Whose.CI
        policies = printed.of_caller(job, bounded=bounded, makes_roles=makes_roles, kms_keys=kms_keys)
        _tell_of_roles(printed, whose, own_profile=job is not None and job.aws.instance_profile is not None)
    for remark in printed.remarks:
        tell(remark)
    say(json.dumps(policies, indent=2))
    return 0


def _tell_of_roles(printed: PrintedPolicies, whose: Whose, *, own_profile: bool) -> None:
    """Say what the policies leave to an administrator, or make of their holder."""
    if whose is Whose.UNBOUNDED:
        tell("whoever holds these is an ADMINISTRATOR of the account: he may make a role with any rights, and use it")
    elif whose is Whose.CI and not own_profile:
        tell(
            "without roles, machines need an instance profile of your own: `aws: {instance_profile: NAME}`, whose role"
        )
        tell("an administrator gives what `gpucloud iam policy --machines` prints; name the job's file here, too")
    elif whose is Whose.CALLER and not own_profile:
        name = printed.boundary_name
        tell(f"roles are made under the boundary {name} only: `gpucloud iam policy --boundary` prints it")


def end_base(region: str | None, *, with_data: bool, yes: bool, as_json: bool) -> int:
    """Remove what stands in a region without any job: network, roles, and with `with_data` the bucket; 30 if not all.

    UsageError while a job's group stands there.
    """
    cloud = Gpucloud()
    aws = cloud.aws(AwsChoices(), Resources(regions=(region,) if region else ()))
    _require_region(aws)
    aws.require_regions()
    tell(f"AWS {aws.account().caller()}")
    costs = aws.base_costs()
    for what, usd in costs:
        tell(f"{what}: {format_usd(usd)} a month")
    if with_data and not yes:
        tell("the bucket goes too, with the state, the bills and the checkpoints of all jobs in it")
        if not is_meant("gpucloud down --base --with-data --yes"):
            return 2
    left = aws.end_base(with_data=with_data, story=tell)
    if as_json:
        say_json({"region": aws.aws.region, "left_over": list(left)})
    else:
        say("\n".join(left) if left else f"nothing of gpucloud is left in {aws.aws.region}")
    return CleanupIncomplete.exit_code if left else 0


def catalog_refresh(regions: tuple[str, ...], scored: tuple[str, ...], *, as_json: bool) -> int:
    """Ask AWS for the regions' GPU machines and prices, and keep them; return the exit code.

    `scored` are GPU models whose placement scores are asked for.
    """
    aws = Gpucloud().aws(AwsChoices(), Resources(regions=regions))
    _require_region(aws)
    models = understood(Query(gpu=scored), aws.catalog).gpu
    try:
        aws.require_regions()
    except UsageError as error:  # one that AWS has opened since becomes known here
        tell(f"{error.message} that is known here; AWS is asked for it all the same")
    tell(f"AWS {aws.account().caller()}")
    fresh = [_fresh(aws.refresh_catalog(region, models), region) for region in aws.regions]
    if as_json:
        say_json({"regions": fresh})
    else:
        head = ("region", "GPU machines", "list prices", "spot prices", "scores")
        say(table([head, *(tuple(map(str, one.values())) for one in fresh)]))
    return 0


def _require_region(aws: AwsCloud) -> None:
    """Raise UsageError where no region is known, with this command's own option."""
    try:
        _ = aws.aws.region
    except UsageError as error:
        raise UsageError(error.message, hint="--region us-east-1, or set AWS_REGION") from error


def _fresh(catalog: Catalog, region: str) -> dict[str, Any]:
    """Return how much of the region is known now."""
    return {
        "region": region,
        "machines": len(catalog.offered(region)),
        "prices": len(catalog.prices[region].usd_per_hour),
        "spot": len(catalog.spot[region].usd_per_hour),
        "scores": sum(len(scores.by_zone) for scores in catalog.scores.get(region, {}).values()),
    }


def tools_install(*, as_json: bool) -> int:
    """Fetch Terraform into gpucloud's own folder, checked by its checksum; return the exit code."""
    path = Gpucloud().install_terraform(tell)
    if as_json:
        say_json({"terraform": str(path)})
    else:
        say(f"Terraform is at {path}")
    return 0


def _quotas(target: str | None) -> tuple[Quotas, Job]:
    cloud = Gpucloud()
    job = read_target(cloud, target, Cloud.AWS).job
    cloud.require_regions(job)
    chosen = cloud.cloud(job)
    account = chosen.account()
    if account is None:
        raise UsageError("the embedded fleet has no quotas", hint="cloud: aws in the job file")
    tell(f"AWS {account.caller()}")
    return Quotas(market=chosen.market(), account=account), job


def _need_row(need: Need) -> tuple[str, ...]:
    room = need.room
    known = ("?" if number is None else str(number) for number in (room.limit, room.used))
    verdict = "enough" if need.enough else "too small: gpucloud quota request"
    return (room.name, room.region, *known, str(need.vcpus), need.instance_type, verdict)


def _request_json(request: QuotaRequest) -> dict[str, Any]:
    return {
        "region": request.region,
        "code": request.code,
        "name": request.name,
        "wanted": request.wanted,
        "status": request.status,
        "asked_at": request.asked_at.isoformat(),
    }


# `keys`: whose orders may start something here.


def keys_show(*, as_json: bool) -> int:
    """Write the own key, to be handed to others, and the trusted ones; return the exit code."""
    ring = Gpucloud().keys()
    own, others = ring.signer(), ring.listed()
    if as_json:
        say_json(
            {
                "own": {"key_id": own.key_id, "key": own.line},
                "trusted": [_key_json(key.name, key.key_id, key.line, key.place) for key in others],
            }
        )
        return 0
    say(own.line)
    if others:
        say(table([("trusted", "", "from"), *((key.name, key.key_id, key.place) for key in others)]))
    tell(f"yours is {own.key_id}; others trust it with: gpucloud keys add NAME '{own.line}'")
    return 0


def keys_add(name: str, text: str, *, as_json: bool) -> int:
    """Trust somebody's key; return the exit code."""
    key = Gpucloud().keys().add(name, text)
    if as_json:
        say_json({"added": _key_json(key.name, key.key_id, key.line, key.place)})
    else:
        say(f"{key.name} is trusted: {key.key_id}")
    return 0


def keys_revoke(which: str, *, as_json: bool) -> int:
    """Trust a key no longer; return the exit code."""
    key = Gpucloud().keys().revoke(which)
    if as_json:
        say_json({"revoked": _key_json(key.name, key.key_id, key.line, key.place)})
        return 0
    say(f"{key.name} is no longer trusted: {key.key_id}")
    tell("what it signed starts nothing here now; machines that run go on, for as long as they are paid")
    if key.name == OWN:
        tell(
            "a job that you started goes on after `gpucloud train JOB` alone, which signs it anew, or ends with `down`"
        )
        tell(
            "others trust your next key when they add what `gpucloud keys` shows now, and this one until they revoke it"
        )
    else:
        tell("`gpucloud train JOB` gives an order of your own for a job that it signed, `gpucloud down JOB` ends it")
    return 0


def _key_json(name: str, key_id: str, line: str, place: str) -> dict[str, Any]:
    return {"name": name, "key_id": key_id, "key": line, "from": place}
