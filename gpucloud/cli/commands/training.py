"""`plan`, `up` and `train`: a job from its file to what it is going to cost, to its machines, to its end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path

from gpucloud.cli.commands.supervising import Begun, answer, answer_left, bring_stored_home, clear, detach, launch, run
from gpucloud.cli.interrupts import Detach, Leave
from gpucloud.cli.render.estimates import deadline_chart, estimate_json, estimate_text
from gpucloud.cli.render.plans import ended_words, new_run_line, onward_line, plan_text, rest_line
from gpucloud.cli.render.ways import cleared_lines, going_on_line
from gpucloud.cli.render.words import is_yes, say_json, say_words, tell, width_of
from gpucloud.cli.target import Target, read_target, refuse_to_forget, report_of, what_a_start_finds
from gpucloud.domain.checkpoint.protection import REMEDY, Protection, must_be_meant
from gpucloud.domain.errors import CredentialsError, GpucloudError, RunIsOver, UsageError
from gpucloud.domain.job.quantities import format_span, parse_span
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.domain.market.plan import Plan
from gpucloud.domain.node.launch import script_of
from gpucloud.domain.state.order import Until, is_finished, repeats_at_a_cost, undrillable, without_drill_done
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.self_driving import USUAL_TIME, unkept
from gpucloud.usecases.job.start import Asked as StartRequest
from gpucloud.usecases.job.start import Prospect
from gpucloud.usecases.jobstore.condition import ConditionKind
from gpucloud.usecases.jobstore.lease import require_free
from gpucloud.usecases.money.estimate import data_remarks
from gpucloud.usecases.supervise.session import CannotLeave
from gpucloud.wiring import Gpucloud, KnownJob, how_it_saves
from gpucloud.wiring.jobs import access_to, asker_of, estimator, first_plan, plot_into, starter

_SPOT_OF_THE_CATALOG = "spot prices that were never read are estimates of AWS's advisor"


def plan(target: str | None, *, on: Cloud | None, plot: Path | None, as_json: bool) -> int:
    """Say what would be rented and what it costs; nothing is made. Return the exit code."""
    cloud = Gpucloud()
    read = read_target(cloud, target, on, to_start=True)
    job = read.job
    protection = how_it_saves(job)
    drawn = plot_into(plot) if plot is not None else None
    named = _named(cloud, job)
    offline = named is not None or not _is_known(cloud, job)
    job = named or job
    head, goes_on = what_a_start_finds(cloud, read, offline=offline)
    if head is not None:
        tell(head)
    estimate = estimator(cloud, job, protection.saving, offline=offline).estimate(job)
    if goes_on is not None:
        script = script_of(starter(cloud, read.job).packed(read.job)[0])
        if (rest := rest_line(goes_on, estimate.plan, script)) is not None:
            tell(rest)
    if drawn is not None:
        drawn.save([deadline_chart(job, estimate)], title=f"{job.name}: cost against deadline")
    if as_json:
        say_json(estimate_json(job, estimate, protection))
    else:
        say_words(estimate_text(job, estimate, width=width_of(sys.stdout), protection=protection))
    if plot is not None:
        tell(f"drawn: {plot}")
    warn(protection)
    _warn_of_secrets(cloud, job)
    if not offline:
        remark(cloud, job, estimate.plan)
    else:
        tell(cloud.aws(job.aws, job.resources).way_in(estimate.plan.offer))
    return 0


def _named(cloud: Gpucloud, job: Job) -> Job | None:
    """Return the job of somebody who has named no AWS region as it is in all that the catalog knows; else None."""
    widened = everywhere(cloud, job)
    if widened is not None:
        tell("no AWS region is named (`resources: {regions: [us-east-1]}`, or AWS_REGION)")
        tell(f"planned in all regions, by the catalog's prices; {_SPOT_OF_THE_CATALOG}")
        tell(cloud.aws(widened.aws, widened.resources).list_remark())
    return widened


def everywhere(cloud: Gpucloud, job: Job) -> Job | None:
    """Return the job in every region whose list prices are known; None where it, or AWS_REGION, names one."""
    cloud.require_regions(job)
    aws = cloud.aws(job.aws, job.resources) if job.cloud is Cloud.AWS and not job.resources.regions else None
    if aws is None or aws.aws.knows_region:
        return None
    return replace(job, resources=replace(job.resources, regions=tuple(aws.catalog.prices)))


def _warn_of_secrets(cloud: Gpucloud, job: Job) -> None:
    try:
        cloud.require_secrets(job)
    except UsageError as missing:
        tell(f"warning: {missing.message}: `gpucloud train` is refused; {missing.hint}")


def _is_known(cloud: Gpucloud, job: Job) -> bool:
    """Say who pays; without credentials for AWS, say what the plan is made from instead."""
    try:
        introduce(cloud, job)
    except CredentialsError as error:
        if job.cloud is not Cloud.AWS:
            raise
        tell(error.message)
        tell(f"planned by the catalog's prices instead; {_SPOT_OF_THE_CATALOG}")
        tell(cloud.aws(job.aws, job.resources).list_remark())
        return False
    return True


# `up` and `train`: a job from its file to the end that was asked for.


_USUAL_HOLD = timedelta(minutes=5)


def up(target: str | None, *, on: Cloud | None, again: bool, as_json: bool) -> int:
    """Have the machines up, prepaid and prepared; return the exit code."""
    cloud = Gpucloud()
    asked = StartRequest(until=Until.READY)

    def start() -> Begun:
        return begin(cloud, read_target(cloud, target, on, to_start=True), asked, again=again)

    go = partial(_supervise, as_json=as_json)
    return _unless_over(lambda: _once(start, go, again=again, as_json=as_json))


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
    adopts: bool = False
    again: bool = False


def train(target: str | None, asked: Asked, *, on: Cloud | None, as_json: bool) -> int:
    """Run the job to its end, or start or continue it in the background; return the exit code."""
    cloud = Gpucloud()
    lasting = _time(asked.unattended)
    if lasting is not None or asked.drill:
        _require_able(cloud, read_target(cloud, target, on, to_start=True), asked, lasting)
    start_request = StartRequest(
        keep=asked.keep,
        drill=asked.drill,
        unattended=lasting,
        budget_usd=asked.budget_usd,
        adopts=asked.adopts,
    )

    def start() -> Begun:
        read = read_target(cloud, target, on, to_start=True)
        profiled = replace(read, job=replace(read.job, profile_steps=asked.profile_steps))
        driven = (lasting is not None or asked.detach) and cloud.unable(profiled.job) is None
        return begin(cloud, profiled, start_request, again=asked.again, driven=driven)

    def go(begun: Begun) -> int:
        if lasting is not None:
            _say_unkept(begun)
        return _leave_going(begun, as_json=as_json) if asked.detach else _supervise(begun, as_json=as_json)

    return _unless_over(lambda: _once(start, go, again=asked.again, as_json=as_json))


def _once(begin: Callable[[], Begun], go: Callable[[Begun], int], *, again: bool, as_json: bool) -> int:
    """Begin the run that `train` or `up` means, and go on with it.

    Held machines that the file no longer fits, or that a new run has no use for, are torn down first; so is what is
    left of a run that has succeeded. No new run begins as long as results of the one before find no room here.
    """
    begun = begin()
    if not (begun.start.clears or begun.start.winds_up):
        return go(begun)
    anew = again or not begun.asker.state().script_failed
    if (left := clear(begun, anew=anew, as_json=as_json)) is not None:
        return left
    for line in (lines := cleared_lines(begun.report(), anew=anew)):
        tell(line)
    try:
        begun = begin()
    except GpucloudError as error:
        if as_json:  # programs read the answer alone
            error.message = "; ".join([*lines, error.message])
        raise
    return go(begun)


def _unless_over(start: Callable[[], int]) -> int:
    """A run that another process ends just now is not gone on with: the same start then means a new one."""
    try:
        return start()
    except RunIsOver as over:
        tell(over.message)
        return start()


def _leave_going(begun: Begun, *, as_json: bool) -> int:
    """Leave the job to its own machines, or where these cannot drive it to a process here; return the exit code."""
    order = begun.start.order
    if order.unattended is None:
        unable = begun.cloud.unable(begun.job)
        if unable is not None:
            tell(f"a process here drives the job, which needs this machine: {unable.why}")
            return detach(begun, as_json=as_json)
        _say_unkept(begun)
        order = replace(order, unattended=USUAL_TIME)
    try:
        return launch(replace(begun, start=replace(begun.start, order=order)), as_json=as_json)
    except CannotLeave as kept:
        tell(f"{begun.name} cannot drive itself: {kept}")
        tell("a process here supervises it instead, and withdraws the machines' right to drive it")
        return _supervise(_attended(begun), as_json=as_json)


def _attended(begun: Begun) -> Begun:
    """Return the start that takes back what its machines were to do: the newest order, without that wish."""
    newest = _by_the_newest(begun)
    return replace(newest, start=replace(newest.start, order=replace(newest.start.order, unattended=None)))


def _by_the_newest(begun: Begun) -> Begun:
    """Return the start by what is ordered now: what it has done already, a run reopened or a drill, is done once."""
    newest = begun.cloud.orders(begun.known).newest()
    order = without_drill_done(newest.order, begun.asker.state())
    return replace(begun, start=replace(begun.start, order=order, over=newest, reopens=False))


def _leave_by_the_newest(begun: Begun, *, as_json: bool) -> int:
    """Leave a job that this process supervised, by what was ordered meanwhile, from here or another terminal.

    One that has come to its end meanwhile is not left: its results are brought home.
    """
    begun = _by_the_newest(begun)
    report = begun.report()
    if report.kind is ConditionKind.ENDED:
        tell(f"{begun.name} has ended meanwhile: {report.status.value}")
        return answer(report, as_json=as_json)
    if report.status.ended or report.kind is ConditionKind.TRAINED:
        tell(f"{begun.name} has come to its end meanwhile: its results come home and its machines end first")
        return _supervise(begun, as_json=as_json)
    if begun.start.order.end is not None:
        tell(f"{begun.start.order.by} asked for its end")
        return _supervise(begun, as_json=as_json)
    begun.tell_that_it_leaves(len(report.nodes))
    return _leave_going(begun, as_json=as_json)


def _say_unkept(begun: Begun) -> None:
    plan = begun.start.plan
    market = plan.offer.pool.market if plan is not None else begun.asker.state().pool.market
    left_out = unkept(begun.job, market)
    if left_out is not None:
        tell(left_out)


def _require_able(cloud: Gpucloud, read: Target, asked: Asked, lasting: timedelta | None) -> None:
    """UsageError for a job that its machines cannot drive as asked, or not worth a time that short."""
    job = read.job
    if lasting is not None:
        _require_worth(cloud, job, lasting)
    unable = cloud.unable(job) if lasting is not None or asked.detach else None
    if lasting is not None and unable is not None:
        raise UsageError(f"--unattended: {unable.why}", hint=unable.hint)
    # With `--detach`, a process here drives what machines cannot.
    leaves = (lasting is not None or asked.detach) and unable is None
    has_role = asked.drill and cloud.has_drill_role(job)
    if asked.drill and (why := undrillable(job, drives_itself=leaves, has_role=has_role)) is not None:
        stays = undrillable(job, drives_itself=False, has_role=has_role) is None
        leaving = " --drill; Ctrl-C leaves the job to its machines after the drill"
        hint = leaving if stays else " --cloud local --drill rehearses it here"
        raise UsageError(f"--drill: {why}", hint=f"gpucloud train {read.file}{hint}")


def begin(
    cloud: Gpucloud, read: Target, start_request: StartRequest, *, again: bool = False, driven: bool = False
) -> Begun:
    """Start or continue a run, its plan told; nothing is rented yet. `again`: what is over; `driven`: by its machines.

    Whatever can refuse it here does so before anything is written: of a refused job no order counts anywhere.
    """
    introduce(cloud, read.job)
    protection = how_it_saves(read.job)
    if first_plan(cloud, read.job) is not None:  # refused before anything is made, its own store included
        _require_able_to_begin(cloud, read, read.job.name, None)
        cloud.cloud(read.job).make_store()

    def check(prospect: Prospect) -> ConditionKind | None:
        _require_free(prospect, cloud, cloud.known(read.job, prospect.name, read.file))
        _require_able_to_begin(cloud, read, prospect.name, None if prospect.reopens else prospect.state)
        if prospect.reopens and prospect.state is not None:
            access_to(cloud, cloud.known(read.job, prospect.name, read.file)).require_key(prospect.state)
        if start_request.until is Until.FINISHED and (prospect.state is None or not prospect.state.attempts):
            _require_meant(read.job, protection)  # `up` has made the state, perhaps, and no script has run yet
        _say_what_it_follows(prospect, start_request.until, cloud.clock.now())
        heard = _say_what_trains(prospect, cloud, cloud.known(read.job, prospect.name, read.file))
        if prospect.plan is not None:
            cloud.require_room(read.job)
            for line in plan_text(prospect.plan, protection, width_of(sys.stderr), driven=driven).splitlines():
                tell(line)
            if not read.job.trial:
                warn(protection)
            remark(cloud, read.job, prospect.plan)
        if not again:
            _require_meant_again(read, prospect, cloud.clock.now())
        return heard

    start_request = replace(start_request, hold=_hold(read.job), again=again)
    start = starter(cloud, read.job).start(read.job, read.spec, start_request, check)
    cloud.home.remember(cloud.known(read.job, start.name, read.file))
    if (last := start.last) is not None:
        bring_stored_home(cloud, read.job, cloud.known(read.job, last.job, read.file))
    for line in start.changed:
        tell(f"changed: {line}")
    if not start.order.code_sha256:
        tell("the code is larger than 64 MiB, so it is not pinned: each machine takes the folder as it is then")
    return Begun(cloud=cloud, read=read, start=start)


def _hold(job: Job) -> timedelta | None:
    """Return for how long machines wait for a mended script: as the file says, else where somebody can mend it."""
    usual = _USUAL_HOLD if job.cloud is Cloud.AWS and sys.stdin.isatty() and sys.stderr.isatty() else None
    held = job.hold if job.hold is not None else usual
    return None if job.trial else held or None


def _say_what_it_follows(prospect: Prospect, until: Until, now: datetime) -> None:
    if prospect.onward is not None and prospect.state is not None:
        tell(onward_line(prospect.onward, prospect.state, now, prospect.held, until))
    if prospect.after is not None:
        tell(new_run_line(prospect.after, prospect.name, now))
    if prospect.kept is not None:
        tell(f"{prospect.kept}; this run has machines of its own")


def _require_meant_again(read: Target, prospect: Prospect, now: datetime) -> None:
    """Ask before a new run pays again for what has succeeded; UsageError where nobody says that it is meant so."""
    if prospect.after is None or prospect.plan is None or not repeats_at_a_cost(read.job, prospect.after):
        return
    new = f"a new run with a budget of {prospect.plan.budget_usd:.2f} USD"
    somebody = sys.stdin.isatty() and sys.stderr.isatty()
    if not somebody or not is_yes(f"start {prospect.name}, {new}?"):
        raise UsageError(
            f"{ended_words(prospect.after, now)}, and {prospect.name} would be {new}: nothing was started",
            hint="the same command with --again trains it once more",
        )


def _say_what_trains(prospect: Prospect, cloud: Gpucloud, known: KnownJob) -> ConditionKind | None:
    """Tell of an attempt that goes on, and return how its machines were heard; None where none is open."""
    if prospect.state is None or prospect.state.attempt is None:
        return None
    report = report_of(cloud, known)
    if (line := going_on_line(report)) is not None:
        tell(line)
    return report.kind


def _require_free(prospect: Prospect, cloud: Gpucloud, known: KnownJob) -> None:
    if prospect.state is not None:
        require_free(asker_of(cloud, known).jobs, is_strangers=cloud.is_strangers(known))
        access_to(cloud, known).require_fleet(prospect.state)


def _require_able_to_begin(cloud: Gpucloud, read: Target, name: str, state: JobState | None) -> None:
    """Raise what a start would be refused for once it has given its order; `state` None for a new run.

    A run that lacks its teardown alone needs nothing for that.
    """
    known = cloud.known(read.job, name, read.file)
    refuse_to_forget(cloud, known)
    if state is None:
        cloud.require_secrets(read.job)
    elif not is_finished(state):
        cloud.require_secrets(read.job)
        access_to(cloud, known).require_key(state)


def introduce(cloud: Gpucloud, job: Job) -> None:
    """Say who pays, before anything is asked that costs money; CredentialsError when the cloud knows nobody."""
    cloud.require_regions(job)
    account = cloud.cloud(job).account()
    if account is not None:
        tell(f"AWS {account.caller()}")


def warn(protection: Protection) -> None:
    """Say before any money is spent that the script saves nothing, and what can be done about it."""
    if protection.warning is not None:
        tell(f"warning: {protection.warning}")
        tell(f"hint: {REMEDY}")


def _require_meant(job: Job, protection: Protection) -> None:
    """UsageError for a script that saves nothing, on machines that cost money, where nobody is there to be warned."""
    somebody = sys.stdin.isatty() and sys.stderr.isatty()
    if protection.warning is not None and not somebody and must_be_meant(job, protection):
        raise UsageError(protection.warning, hint=REMEDY)


def remark(cloud: Gpucloud, job: Job, plan: Plan) -> None:
    """Say what is emulated on that cloud, what reading the data costs there, what is kept of a script's directory."""
    if (kept := job.checkpoint.directory) is not None:
        where = f"{kept.path}/ of all nodes together" if kept.per_node else f"{kept.path}/"
        tell(
            f"checkpoints: whole ones in {where} are kept and put back; a resume is as exact as what your script saves"
        )
    of_data = data_remarks(job, cloud.data_sets(job), plan.offer.pool.region)
    for line in (*cloud.cloud(job).remarks(plan.offer), *of_data, *cloud.store_remarks(job)):
        tell(line)


def _time(text: str | None) -> timedelta | None:
    try:
        return parse_span(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"--unattended: {error}", hint="--unattended 8h") from error


def _require_worth(cloud: Gpucloud, job: Job, lasting: timedelta) -> None:
    """A shorter time would be over before the machines have made themselves fit."""
    least = 2 * cloud.cloud(job).cloud_profile.rules.prepaid_rule.least
    if lasting < least:
        raise UsageError(
            f"--unattended: {format_span(lasting)} is too short to start and save; the least is {format_span(least)}",
            hint="--unattended 8h",
        )


def _supervise(begun: Begun, *, as_json: bool) -> int:
    try:
        run(begun)
    except Leave as leave:
        return answer_left(begun.asker, leave, as_json=as_json)
    except Detach:
        return _leave_by_the_newest(begun, as_json=as_json)
    return answer(begun.report(), as_json=as_json, asker=begun.asker)
