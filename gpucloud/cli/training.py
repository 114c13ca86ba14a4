"""`plan`, `up`, `train`, `down` and `reconcile`: the commands that supervise, and what they would do."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.cli.interrupts import Detach, Interrupts, Leave, obeyed
from gpucloud.cli.onlookers import Onlooker, onlooker
from gpucloud.cli.render import plan_json, plan_text, report_json, report_text, say, say_json, tell
from gpucloud.cli.target import Target, known_job, read_target
from gpucloud.domain.errors import CleanupIncomplete, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job import AwsChoices, Cloud, Job
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
    """What `train` is asked beside the job file; `profile_steps` None for no profile, `budget_usd` for the file's."""

    keep: bool = False
    detach: bool = False
    drill: bool = False
    profile_steps: int | None = None
    budget_usd: Decimal | None = None


def train(target: str | None, asked: Asked, *, on: Cloud | None, as_json: bool) -> int:
    """Run the job to its end, or start or continue it in the background; return the exit code."""
    cloud = Gpucloud()
    read, start = _started(cloud, target, on, asked.budget_usd)
    read = replace(read, job=replace(read.job, profile_steps=asked.profile_steps))
    if asked.detach:
        return _detach(cloud, read, start, keep=asked.keep, drill=asked.drill, as_json=as_json)
    goal = Goal(nodes=read.job.resources.nodes, keep=asked.keep, drill=asked.drill)
    return _supervise(cloud, read, start, goal, as_json=as_json)


def down(target: str | None, *, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = cloud.asker(known)
    state = asker.state()
    while not (state.status.ended and state.torn_down):
        if asker.supervisor() is None:
            end_here(cloud, known, state)
        else:
            tell(f"asking {asker.supervisor()} to end {known.name}")
            asker.ask_to_end()
            _await_end(asker)
        state = asker.state()
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
    world = cloud.world(read.job, known.name)
    lease = take(jobs, cloud.clock)
    goal = _with_limits(Goal(nodes=read.job.resources.nodes), read.job, lease.state)
    with onlooker() as shown, supervisor(world, goal, lease, shown, lambda: None) as one:
        one.settle()


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


def _supervise(cloud: Gpucloud, read: Target, start: Start, goal: Goal, *, as_json: bool) -> int:
    asker = cloud.asker(_known(cloud, read, start))
    try:
        with onlooker() as shown, obeyed(shown) as interrupts:
            _run(cloud, read, start, goal, shown, interrupts)
    except Leave as leave:
        _say_what_lives(asker.state())
        return leave.exit_code
    except Detach:
        return _detach(cloud, read, start, keep=goal.keep, drill=goal.drill, as_json=as_json)
    return _answer(asker.report(), as_json=as_json)


def _run(cloud: Gpucloud, read: Target, start: Start, goal: Goal, shown: Onlooker, interrupts: Interrupts) -> None:
    world = cloud.world(read.job, start.name)
    lease = take(world.jobs, cloud.clock)
    going_on = adopt(lease.state, read.spec, start.plan)
    goal = _with_limits(goal, read.job, going_on)
    with supervisor(world, goal, lease, shown, interrupts.wanted_end) as one:
        world.jobs.withdraw_end()
        world.jobs.keep_spec(read.spec)
        wish = budget_wish(lease.state, read.job, caller(), cloud.clock.now())
        if wish is not None:
            world.jobs.ask_for_budget(wish)
        lease.write(going_on)
        try:
            one.run()
        except LeaseHeld:
            raise
        except GpucloudError:
            _say_what_lives(lease.state)  # as it was known last: store and cloud may be what fails
            raise


def _with_limits(goal: Goal, job: Job, state: JobState) -> Goal:
    """Return the goal with what the job file limits: the whole time, and time with idle GPUs."""
    return replace(goal, deadline_at=state.created_at + job.deadline if job.deadline else None, idle=job.idle)


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
    alive = [life.node_id for life in state.nodes if life.ended_at is None]
    until = f" until {state.paid_until:%H:%M:%S} UTC" if state.paid_until else ""
    if alive:
        tell(f"alive and paid{until}, then off by themselves: {', '.join(alive)}")
    elif until:  # behind an armed shut-off machines may have been asked for that no listing has shown yet
        tell(f"no machine has been seen; one that was asked for last is paid{until}, then off by itself")
    if alive or until:
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


def _await_end(asker: Asker) -> None:
    """Wait while somebody supervises the job and it is not torn down."""
    while asker.supervisor() is not None:
        state = asker.state()
        if state.status.ended and state.torn_down:
            return
        asker.clock.sleep(0.2)


def end_here(cloud: Gpucloud, known: KnownJob, state: JobState) -> None:
    """End the job from here: with a last save if the job file can still be read, else the machines at once."""
    try:
        job, readable = replace(cloud.read_job(known.file), cloud=known.cloud), True
    except GpucloudError as error:
        tell(f"{error}\nending the machines without a last save")
        job, readable = _stand_in(known, state), False
    world = cloud.world(job, known.name, with_secrets=False)
    lease = take(world.jobs, cloud.clock)
    goal = Goal(nodes=job.resources.nodes)
    with onlooker() as shown, supervisor(world, goal, lease, shown, lambda: ExitReason.STOPPED) as one:
        if not readable and not lease.state.status.ended:
            lease.write(books.abandon(lease.state, cloud.clock.now()))
        one.run()


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
        raise CleanupIncomplete(f"still listed: {', '.join(left)}", hint=f"gpucloud down {known.name}")
    report = asker.report()
    if as_json:
        say_json({**report_json(report), "left_over": []})
    else:
        say(report_text(report))
        tell("listed again: no machines, no node group")
    return 0
