"""`up` and `train`: a job from its file to the end that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.cli.interrupts import Detach, Leave
from gpucloud.cli.launching import detach, launch
from gpucloud.cli.render import tell
from gpucloud.cli.reports import plan_text
from gpucloud.cli.supervising import Begun, answer, run, say_what_lives
from gpucloud.cli.target import Target, read_target
from gpucloud.domain.driving import Unattended, unkept
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Cloud, Job
from gpucloud.domain.plan import Plan
from gpucloud.domain.quantities import format_span, parse_span
from gpucloud.domain.supervision.seen import Goal, Until
from gpucloud.wiring import Gpucloud, KnownJob


def up(target: str | None, *, on: Cloud | None, as_json: bool) -> int:
    """Have the machines up, prepaid and prepared; return the exit code."""
    cloud = Gpucloud()
    begun = _begin(cloud, target, on)
    goal = Goal(nodes=begun.job.resources.nodes, until=Until.READY)
    return _supervise(begun, goal, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What `train` is asked beside the job file.

    `profile_steps` None for no profile, `unattended` as written, `budget_usd` None for the file's.
    """

    keep: bool = False
    detach: bool = False
    drill: bool = False
    profile_steps: int | None = None
    unattended: str | None = None
    budget_usd: Decimal | None = None


def train(target: str | None, asked: Asked, *, on: Cloud | None, as_json: bool) -> int:
    """Run the job to its end, or start or continue it in the background; return the exit code."""
    cloud = Gpucloud()
    lasting = _time(asked.unattended)
    if lasting is not None:
        _require_able(cloud, read_target(cloud, target, on).job, lasting)
    begun = _begin(cloud, target, on, asked.budget_usd)
    job = replace(begun.job, profile_steps=asked.profile_steps)
    begun = replace(begun, read=replace(begun.read, job=job))
    own = Unattended(lasting=lasting, keep=asked.keep, drill=asked.drill) if lasting is not None else None
    if own is not None:
        _say_unkept(begun)
    goal = Goal(nodes=job.resources.nodes, keep=asked.keep, drill=asked.drill)
    if asked.detach:
        return _leave_going(begun, goal, own, as_json=as_json)
    return _supervise(begun, goal, unattended=own, as_json=as_json)


def _leave_going(begun: Begun, goal: Goal, unattended: Unattended | None, *, as_json: bool) -> int:
    """Leave the job to its own machines, or where these cannot drive it to a process here; return the exit code."""
    unable = begun.cloud.unable(begun.job) if unattended is None else None
    if unable is not None:
        tell(f"a process here drives the job, which needs this machine: {unable.why}")
        return detach(begun, keep=goal.keep, drill=goal.drill, as_json=as_json)
    if unattended is None:
        _say_unkept(begun)
    return launch(begun, unattended or Unattended(keep=goal.keep, drill=goal.drill), as_json=as_json)


def _say_unkept(begun: Begun) -> None:
    left_out = unkept(begun.job, begun.start.plan.offer.pool.market)
    if left_out is not None:
        tell(left_out)


def _require_able(cloud: Gpucloud, job: Job, lasting: timedelta) -> None:
    """UsageError for a job that its machines cannot drive, or not worth a time that short."""
    _require_worth(cloud, job, lasting)
    unable = cloud.unable(job)
    if unable is not None:
        raise UsageError(f"--unattended: {unable.why}", hint=unable.hint)


def begin(cloud: Gpucloud, read: Target) -> Begun:
    """Start or continue a run of the job, its plan told; nothing is rented yet."""
    introduce(cloud, read.job)
    if cloud.first_plan(read.job) is not None:  # refused before anything is made, its own store included
        cloud.cloud(read.job).make_store()
    start = cloud.starter(read.job).start(read.job, read.spec)
    known = cloud.known(read.job, start.name, read.file)
    _refuse_to_forget(cloud, known)
    cloud.home.remember(known)
    tell(plan_text(start.plan))
    for line in start.changed:
        tell(f"changed: {line}")
    remark(cloud, read.job, start.plan)
    return Begun(cloud=cloud, read=read, start=start)


def _begin(cloud: Gpucloud, target: str | None, on: Cloud | None, budget_usd: Decimal | None = None) -> Begun:
    read = read_target(cloud, target, on)
    if budget_usd is not None:
        read = replace(read, job=replace(read.job, budget_usd=budget_usd))
    return begin(cloud, read)


def introduce(cloud: Gpucloud, job: Job) -> None:
    """Say who pays, before anything is asked that costs money; CredentialsError when the cloud knows nobody."""
    account = cloud.cloud(job).account()
    if account is not None:
        tell(f"AWS {account.caller()}")


def remark(cloud: Gpucloud, job: Job, plan: Plan) -> None:
    """Say what is emulated on that cloud, what reading the data costs there, what is kept of a script's directory."""
    if (kept := job.checkpoint.directory) is not None:
        where = f"{kept.path}/ of all nodes together" if kept.per_node else f"{kept.path}/"
        tell(f"checkpoints: what is whole in {where} is kept and put back; best effort: what your script saves")
    for line in (*cloud.cloud(job).remarks(), *cloud.data_remarks(job, plan.offer.pool.region)):
        tell(line)


def _refuse_to_forget(cloud: Gpucloud, new: KnownJob) -> None:
    """A name stands for one run: machines of another run of that name would be found by nobody."""
    old = cloud.home.find(new.name)
    if old is None or old.store == new.store:
        return
    state = cloud.asker(old).state()
    if not state.torn_down and state.group is not None:
        raise UsageError(
            f"{old.name} is unfinished on {old.cloud.value}, its state in {old.store}",
            hint=f"gpucloud down {old.name}, or another name in the job file",
        )


def _time(text: str | None) -> timedelta | None:
    try:
        return parse_span(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"--unattended: {error}", hint="--unattended 8h") from error


def _require_worth(cloud: Gpucloud, job: Job, lasting: timedelta) -> None:
    """A shorter time would be over before the machines have made themselves fit."""
    least = 2 * cloud.cloud(job).manners.rules.wall.least
    if lasting < least:
        raise UsageError(
            f"--unattended: {format_span(lasting)} is too short to start and save; the least is {format_span(least)}",
            hint="--unattended 8h",
        )


def _supervise(begun: Begun, goal: Goal, *, unattended: Unattended | None = None, as_json: bool) -> int:
    asker = begun.asker
    try:
        run(begun, goal, unattended)
    except Leave as leave:
        say_what_lives(asker.state_as_listed())
        return leave.exit_code
    except Detach:
        return _leave_going(begun, goal, unattended, as_json=as_json)
    return answer(asker.report(), as_json=as_json)
