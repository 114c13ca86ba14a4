"""Supervising a job from this process until its goal is reached, and what is said when it lets go of the job."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpucloud.cli.interrupts import Interrupts, obeyed
from gpucloud.cli.onlookers import Onlooker, onlooker
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.reports import report_json, report_text
from gpucloud.cli.target import Target
from gpucloud.domain.driving import Unattended
from gpucloud.domain.errors import GpucloudError, LeaseHeld
from gpucloud.domain.job import Job
from gpucloud.domain.state import JobState
from gpucloud.domain.supervision.seen import Goal, Until
from gpucloud.usecases.jobs import Asker, caller
from gpucloud.usecases.lease import take
from gpucloud.usecases.report import JobReport
from gpucloud.usecases.start import Start, adopt, budget_wish
from gpucloud.usecases.sundries import bytes_in
from gpucloud.usecases.supervise import supervisor
from gpucloud.wiring import Gpucloud


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A run of a job that a command has begun or goes on with: its file as it is now, and its start."""

    cloud: Gpucloud
    read: Target
    start: Start

    @property
    def name(self) -> str:
        """The run's name."""
        return self.start.name

    @property
    def job(self) -> Job:
        """The job as its file says now."""
        return self.read.job

    @property
    def asker(self) -> Asker:
        """What answers questions about it."""
        return self.cloud.asker(self.cloud.known(self.job, self.name, self.read.file))


def run(begun: Begun, goal: Goal, unattended: Unattended | None = None, *, asks: bool = True) -> None:
    """Hold the job's lease until the goal is reached, and bring home what is in the store then.

    Raises Leave, and Detach from a job that is to be finished, as the user wishes; without `asks` any signal is Leave.
    Raises LeaseHeld when somebody else supervises it; after any other GpucloudError it is said what lives.
    """
    with onlooker() as shown, obeyed(shown, asks=asks, detaches=goal.until is Until.FINISHED) as interrupts:
        _run(begun, goal, unattended, shown, interrupts)


def with_limits(goal: Goal, job: Job, state: JobState) -> Goal:
    """Return the goal with the job file's limits: the fewest nodes, the whole time, idle GPUs, dear saved steps."""
    deadline_at = state.created_at + job.deadline if job.deadline else None
    return replace(
        goal,
        least_nodes=job.resources.least_nodes,
        deadline_at=deadline_at,
        idle=job.idle,
        give_up=job.checkpoint.give_up,
        saves_alone=job.checkpoint.directory is not None,
        policy=job.deadline_policy,
        work=job.work,
    )


def bring_stored_home(cloud: Gpucloud, job: Job, name: str) -> None:
    """Bring home what the job's own machine put into the store: it knows no folder of the user's."""
    brought = cloud.bring_stored_home(job, name)
    for path in brought:
        tell(f"brought home: {path}")
    if brought:
        cloud.asker(cloud.known(job, name, job.source)).bill_pull(bytes_in(brought))


def answer(report: JobReport, *, as_json: bool) -> int:
    """Write the job's report; return its exit code, 0 while it goes on."""
    if as_json:
        say_json(report_json(report))
    else:
        say(report_text(report))
    return report.exit_code or 0


def say_what_lives(state: JobState) -> None:
    """Tell which machines are left, until when they are paid, and which command goes on or ends them."""
    tell(f"left {state.job} as it is")
    drives_itself = state.unattended_s is not None and state.group is not None
    alive = [life.node_id for life in state.alive]
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


def _run(begun: Begun, goal: Goal, unattended: Unattended | None, shown: Onlooker, interrupts: Interrupts) -> None:
    cloud, read, start = begun.cloud, begun.read, begun.start
    world = cloud.world(read.job, start.name, unattended=unattended)
    lease = take(world.jobs, cloud.clock)
    drove_itself = lease.state.unattended_s is not None
    going_on = adopt(lease.state, read.spec, start.plan)
    going_on = replace(going_on, unattended_s=unattended.lasting.total_seconds() if unattended is not None else None)
    goal = with_limits(goal, read.job, going_on)
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
            say_what_lives(lease.state)  # as it was known last: store and cloud may be what fails
            raise
    bring_stored_home(cloud, read.job, start.name)
