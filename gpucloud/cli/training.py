"""`plan`, `up`, `train`, `down` and `reconcile`: the commands that supervise, and what they would do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.cli.interrupts import Detach, Interrupts, Leave, obeyed
from gpucloud.cli.onlookers import Onlooker, onlooker
from gpucloud.cli.render import plan_json, plan_text, report_json, report_text, say, say_json, tell
from gpucloud.cli.target import Target, known_job, read_target
from gpucloud.domain.driving import USUAL_TIME, Unattended
from gpucloud.domain.errors import CleanupIncomplete, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job import AwsChoices, Cloud, Job
from gpucloud.domain.quantities import format_span, parse_span
from gpucloud.domain.state import ExitReason, JobState
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.seen import Goal, Until
from gpucloud.usecases.jobs import Asker, caller
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.lease import take
from gpucloud.usecases.report import JobReport
from gpucloud.usecases.start import Start, adopt, budget_wish
from gpucloud.usecases.supervise import supervisor
from gpucloud.wiring import Gpucloud, KnownJob

_LINGERS = timedelta(seconds=20)


def plan(target: str | None, *, on: Cloud | None, as_json: bool) -> int:
    """Say what would be rented and what it costs at the most; nothing is made. Return the exit code."""
    cloud = Gpucloud()
    read = read_target(cloud, target, on)
    _introduce(cloud, read.job)
    made = cloud.starter(read.job).plan(read.job)
    if as_json:
        say_json(plan_json(made))
    else:
        say(plan_text(made))
    for line in (*cloud.cloud(read.job).remarks(), *cloud.data_remarks(read.job, made.offer.pool.region)):
        tell(line)
    return 0


def up(target: str | None, *, on: Cloud | None, as_json: bool) -> int:
    """Have the machines up, prepaid and prepared; return the exit code."""
    cloud = Gpucloud()
    read, start = _started(cloud, target, on)
    goal = Goal(nodes=read.job.resources.nodes, until=Until.READY)
    return _supervise(cloud, read, start, goal, as_json=as_json)


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
    refused = None
    if lasting is not None or asked.detach:
        job = read_target(cloud, target, on).job
        _require_worth(cloud, job, lasting)
        refused = cloud.unable(job)
    if refused is not None and lasting is not None:
        raise UsageError(f"--unattended: {refused.why}", hint=refused.hint)
    read, start = _started(cloud, target, on, asked.budget_usd)
    read = replace(read, job=replace(read.job, profile_steps=asked.profile_steps))
    if refused is not None:
        tell(f"a process here drives the job, which needs this machine: {refused.why}")
        return _detach(cloud, read, start, keep=asked.keep, drill=asked.drill, as_json=as_json)
    goal = Goal(nodes=read.job.resources.nodes, keep=asked.keep, drill=asked.drill)
    if lasting is None and not asked.detach:
        return _supervise(cloud, read, start, goal, as_json=as_json)
    own = Unattended(lasting=lasting or USUAL_TIME, keep=asked.keep, drill=asked.drill)
    if asked.detach:
        return launch(cloud, read, start, own, as_json=as_json)
    return _supervise(cloud, read, start, goal, unattended=own, as_json=as_json)


def _time(text: str | None) -> timedelta | None:
    try:
        return parse_span(text) if text is not None else None
    except ValueError as error:
        raise UsageError(f"--unattended: {error}", hint="--unattended 8h") from error


def _require_worth(cloud: Gpucloud, job: Job, lasting: timedelta | None) -> None:
    """A shorter time would be over before the machines have made themselves fit."""
    least = 2 * cloud.cloud(job).manners.rules.wall.least
    if lasting is not None and lasting < least:
        raise UsageError(
            f"--unattended: {format_span(lasting)} is too short to start and save; the least is {format_span(least)}",
            hint="--unattended 8h",
        )


def launch(cloud: Gpucloud, read: Target, start: Start, unattended: Unattended, *, as_json: bool) -> int:
    """Return when the machines are there, paid, and drive the job: nothing of the user's need run from then on."""
    asker = cloud.asker(_known(cloud, read, start))
    goal = Goal(nodes=read.job.resources.nodes, until=Until.LAUNCHED, keep=unattended.keep, began_at=cloud.clock.now())
    try:
        with onlooker() as shown, obeyed(shown) as interrupts:
            _run(cloud, read, start, goal, shown, interrupts, unattended)
    except Leave as leave:
        _say_what_lives(asker.state())
        return leave.exit_code
    report = asker.report()
    if report.status.ended:
        return _answer(report, as_json=as_json)
    if as_json:
        say_json({**report_json(report), "plan": plan_json(start.plan)})
    else:
        say(f"{start.name} drives itself until {report.paid_until:%Y-%m-%d %H:%M} UTC at the latest")
        tell(f"`gpucloud logs -f {start.name}` follows it, `gpucloud down {start.name}` ends it")
        tell(f"`gpucloud train {start.name}` brings its results home, and goes on when that time is over")
    return 0


def down(target: str | None, *, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = cloud.asker(known)
    try:
        with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
            _end(cloud, known, asker, shown, interrupts)
    except Leave as leave:
        _say_what_lives(asker.state_as_listed())
        return leave.exit_code
    return _prove_empty(cloud, known, asker, as_json=as_json)


def reconcile(target: str | None, *, as_json: bool) -> int:
    """Make one pass for the job from nothing but what is stored and seen; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    reconcile_known(cloud, known)
    return _answer(cloud.asker(known).report(), as_json=as_json)


def reconcile_known(cloud: Gpucloud, known: KnownJob) -> None:
    """Make one pass for a known job; LeaseHeld when somebody supervises it, CredentialsError without its SSH key."""
    cloud.require_key(known, cloud.asker(known).state())
    read = read_target(cloud, str(known.file), known.cloud)
    jobs = JobStore(cloud.store_of(known), known.name)
    lease = take(jobs, cloud.clock)
    goal = _with_limits(Goal(nodes=read.job.resources.nodes), read.job, lease.state)
    lasting = lease.state.unattended_s
    unattended = Unattended(lasting=timedelta(seconds=lasting)) if lasting is not None else None
    world = cloud.world(read.job, known.name, unattended=unattended)
    with onlooker() as shown, supervisor(world, goal, lease, shown, lambda: None) as one:
        one.settle()
    _bring_stored_home(cloud, read.job, known.name)


def _started(
    cloud: Gpucloud, target: str | None, on: Cloud | None, budget_usd: Decimal | None = None
) -> tuple[Target, Start]:
    read = read_target(cloud, target, on)
    if budget_usd is not None:
        read = replace(read, job=replace(read.job, budget_usd=budget_usd))
    _introduce(cloud, read.job)
    if cloud.first_plan(read.job) is not None:  # refused before anything is made, its own store included
        cloud.cloud(read.job).make_store()
    start = cloud.starter(read.job).start(read.job, read.spec)
    known = cloud.known(read.job, start.name, read.file)
    _refuse_to_forget(cloud, known)
    cloud.home.remember(known)
    tell(plan_text(start.plan))
    for line in start.changed:
        tell(f"changed: {line}")
    for line in (*cloud.cloud(read.job).remarks(), *cloud.data_remarks(read.job, start.plan.offer.pool.region)):
        tell(line)
    return read, start


def _introduce(cloud: Gpucloud, job: Job) -> None:
    """Say who pays, before anything is asked that costs money; CredentialsError when the cloud knows nobody."""
    account = cloud.cloud(job).account()
    if account is not None:
        tell(f"AWS {account.caller()}")


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


def _supervise(
    cloud: Gpucloud, read: Target, start: Start, goal: Goal, *, unattended: Unattended | None = None, as_json: bool
) -> int:
    asker = cloud.asker(_known(cloud, read, start))
    try:
        with onlooker() as shown, obeyed(shown) as interrupts:
            _run(cloud, read, start, goal, shown, interrupts, unattended)
    except Leave as leave:
        _say_what_lives(asker.state_as_listed())
        return leave.exit_code
    except Detach:
        if unattended is not None:
            return launch(cloud, read, start, unattended, as_json=as_json)
        return _detach(cloud, read, start, keep=goal.keep, drill=goal.drill, as_json=as_json)
    return _answer(asker.report(), as_json=as_json)


def _run(  # noqa: PLR0913, PLR0917  each by its name
    cloud: Gpucloud,
    read: Target,
    start: Start,
    goal: Goal,
    shown: Onlooker,
    interrupts: Interrupts,
    unattended: Unattended | None = None,
) -> None:
    world = cloud.world(read.job, start.name, unattended=unattended)
    lease = take(world.jobs, cloud.clock)
    drove_itself = lease.state.unattended_s is not None
    going_on = adopt(lease.state, read.spec, start.plan)
    lasting = unattended.lasting.total_seconds() if unattended is not None else None
    going_on = replace(going_on, unattended_s=lasting)
    goal = _with_limits(goal, read.job, going_on)
    with supervisor(world, goal, lease, shown, interrupts.wanted_end) as one:
        world.jobs.withdraw_end()
        world.jobs.keep_spec(read.spec)
        wish = budget_wish(lease.state, read.job, caller(), cloud.clock.now())
        if wish is not None:
            world.jobs.ask_for_budget(wish)
        lease.write(going_on)
        try:
            if drove_itself or unattended is not None:
                one.actor.change_driver()
            one.run()
        except LeaseHeld:
            raise
        except GpucloudError:
            _say_what_lives(lease.state)  # as it was known last: store and cloud may be what fails
            raise
    _bring_stored_home(cloud, read.job, start.name)


def _bring_stored_home(cloud: Gpucloud, job: Job, name: str) -> None:
    """Bring home what the job's own machine put into the store: it knows no folder of the user's."""
    for path in cloud.bring_stored_home(job, name):
        tell(f"brought home: {path}")


def _with_limits(goal: Goal, job: Job, state: JobState) -> Goal:
    """Return the goal with what the job file limits: the whole time, idle GPUs, the cost of newly saved steps."""
    deadline_at = state.created_at + job.deadline if job.deadline else None
    return replace(goal, deadline_at=deadline_at, idle=job.idle, give_up=job.checkpoint.give_up)


def _known(cloud: Gpucloud, read: Target, start: Start) -> KnownJob:
    return cloud.known(read.job, start.name, read.file)


def _answer(report: JobReport, *, as_json: bool) -> int:
    if as_json:
        say_json(report_json(report))
    else:
        say(report_text(report))
    return report.exit_code or 0


def _say_what_lives(state: JobState) -> None:
    tell(f"left {state.job} as it is")
    drives_itself = state.unattended_s is not None and state.group is not None
    alive = [life.node_id for life in state.nodes if life.ended_at is None]
    until = f" until {state.paid_until:%H:%M:%S} UTC" if state.paid_until else ""
    if alive:
        tell(f"alive and paid{until}, then off by themselves: {', '.join(alive)}")
    elif until:  # behind an armed shut-off machines may have been asked for that no listing has shown yet
        tell(f"no machine has been seen; one that was asked for last is paid{until}, then off by itself")
    if drives_itself and (alive or until):
        tell(
            f"{state.job} drives itself; `gpucloud logs -f {state.job}` follows it, `gpucloud down {state.job}` ends it"
        )
    elif alive or until:
        tell(f"`gpucloud train {state.job}` goes on, `gpucloud down {state.job}` ends them now")
    else:
        tell("no machines are alive")


def _detach(cloud: Gpucloud, read: Target, start: Start, *, keep: bool, drill: bool, as_json: bool) -> int:
    """Start this command again in a session of its own, its story in a file; wait until it holds the job."""
    log = cloud.home.log(start.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag, on in (("--keep", keep), ("--drill", drill)) if on]
    if read.job.profile_steps:
        flags += ["--profile-steps", str(read.job.profile_steps)]
    flags += ["--budget", f"{read.job.budget_usd:f} USD"]
    with log.open("ab") as out:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpucloud", "train", str(read.file.resolve())),
                *("--cloud", read.job.cloud.value, "--json", *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    asker = cloud.asker(_known(cloud, read, start))
    _await_supervisor(cloud, asker, child, log)
    if as_json:
        say_json({**report_json(asker.report()), "plan": plan_json(start.plan), "log": str(log)})
    else:
        say(f"{start.name} goes on in the background (process {child.pid})")
        tell(f"`gpucloud logs -f {start.name}` follows it, `gpucloud status {start.name}` says where it stands")
    return 0


def _await_supervisor(cloud: Gpucloud, asker: Asker, child: subprocess.Popen[bytes], log: Path) -> None:
    while asker.supervisor() is None:
        code = child.poll()
        if code is not None:
            if asker.state().status.ended:
                return
            raise LeaseHeld(f"the background supervisor ended at once with code {code}", hint=f"see {log}")
        cloud.clock.sleep(0.05)


def _end(cloud: Gpucloud, known: KnownJob, asker: Asker, shown: Onlooker, interrupts: Interrupts) -> None:
    """Return when the job has ended and its machines too, by whoever supervises it, or from here."""
    state = asker.state()
    while not (state.status.ended and state.torn_down):
        if asker.supervisor() is None:
            _end_unless_held(cloud, known, state, shown, interrupts)
        else:
            shown.story(f"asking {asker.supervisor()} to end {known.name}")
            asker.ask_to_end()
            _await_end(asker)
        state = asker.state()


def _await_end(asker: Asker) -> None:
    """Wait while somebody supervises the job and it is not torn down."""
    while asker.supervisor() is not None:
        state = asker.state()
        if state.status.ended and state.torn_down:
            return
        asker.clock.sleep(0.2)


def _end_unless_held(
    cloud: Gpucloud, known: KnownJob, state: JobState, shown: Onlooker, interrupts: Interrupts
) -> None:
    """End the job from here; one of its machines may have begun to drive it meanwhile, and is then asked to end it."""
    try:
        end_here(cloud, known, state, shown, interrupts.wanted_end)
    except LeaseHeld:
        if state.unattended_s is None:
            raise


def end_here(
    cloud: Gpucloud,
    known: KnownJob,
    state: JobState,
    shown: Onlooker,
    wanted_end: Callable[[], ExitReason | None] = lambda: None,
) -> None:
    """End the job from here: with a last save if the job file can still be read, else the machines at once."""
    try:
        job, readable = replace(cloud.read_job(known.file), cloud=known.cloud), True
    except GpucloudError as error:
        shown.story(f"{error}\nending the machines without a last save")
        job, readable = _stand_in(known, state), False
    world = cloud.world(job, known.name, with_secrets=False)
    lease = take(world.jobs, cloud.clock)
    goal = Goal(nodes=job.resources.nodes)
    with supervisor(world, goal, lease, shown, lambda: wanted_end() or ExitReason.STOPPED) as one:
        if state.unattended_s is not None:
            one.actor.preparer.records.withdraw_order()
        if not readable and not lease.state.status.ended:
            lease.write(books.abandon(lease.state, cloud.clock.now()))
        one.run()
    if readable:
        _bring_stored_home(cloud, job, known.name)


def _stand_in(known: KnownJob, state: JobState) -> Job:
    """A job that is enough to end machines; nothing of it is ever sent to a node."""
    return Job(
        name=known.name,
        run="true",
        budget_usd=state.budget_usd,
        source=known.file,
        code=Path.cwd(),
        cloud=known.cloud,
        store=known.store,
        aws=AwsChoices(profile=known.profile),
    )


def _prove_empty(cloud: Gpucloud, known: KnownJob, asker: Asker, *, as_json: bool) -> int:
    left, deadline = cloud.leftovers(known), cloud.clock.now() + _LINGERS
    while left and cloud.clock.now() < deadline:  # disks and interfaces go some seconds after their machine
        cloud.clock.sleep(1)
        left = cloud.leftovers(known)
    if left:
        # What the same command removes is gone by now; strays that nothing of ours made are not its own.
        raise CleanupIncomplete(f"still listed: {', '.join(left)}", hint="gpucloud gc --wait --delete")
    report = asker.report()
    if as_json:
        say_json({**report_json(report), "left_over": []})
    else:
        say(report_text(report))
        tell("listed again: no machines, no node group")
    return 0
