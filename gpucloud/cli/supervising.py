"""Supervising a job from this process until its order is done, and what is said when it lets go of the job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial

from gpucloud.cli.entering import means_to_go_on
from gpucloud.cli.interrupts import Interrupts, obeyed
from gpucloud.cli.onlookers import Onlooker, onlooker
from gpucloud.cli.render import say_json, say_words, tell
from gpucloud.cli.reports import report_json, report_text
from gpucloud.cli.target import Target, called
from gpucloud.domain.errors import LandingRefused, StoreError
from gpucloud.domain.job import Job
from gpucloud.domain.order import Until
from gpucloud.domain.quantities import format_moment
from gpucloud.domain.state import JobState
from gpucloud.domain.supervision.goal import Supervising
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.report import JobReport
from gpucloud.usecases.session import Entering, Session
from gpucloud.usecases.start import Start, adopt
from gpucloud.usecases.sundries import bytes_in
from gpucloud.wiring import Gpucloud, KnownJob


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
    def known(self) -> KnownJob:
        """What is remembered of it."""
        return self.cloud.known(self.job, self.name, self.read.file)

    @property
    def asker(self) -> Asker:
        """What answers questions about it."""
        return self.cloud.asker(self.known)


def run(begun: Begun, *, leaves: bool = False, asks: bool = True) -> None:
    """Give the start's order and hold the job's lease until it is done; bring home what is in the store then.

    With `leaves` only until the machines drive the job. Raises Leave, and Detach from a job that is to be finished, as
    the user wishes; without `asks` any signal is Leave. Raises LeaseHeld when somebody else supervises it, RunIsOver
    when somebody else has ended it; after any other GpucloudError it is said what lives.
    """
    detaches = begun.start.order.until is Until.FINISHED and not leaves
    with onlooker() as shown, obeyed(shown, asks=asks, detaches=detaches) as interrupts:
        _run(begun, leaves, shown, interrupts)


def bring_stored_home(cloud: Gpucloud, job: Job, known: KnownJob) -> None:
    """Bring home what was put into the store: a machine knows no folder of the user's, and the user's may be full.

    What cannot come stays there and is told; how the job ended is no other for that. Where the folder of the job file
    is not, nobody would find it: it stays too.
    """
    if not known.file.parent.is_dir():
        return
    try:
        brought = cloud.bring_stored_home(job, known.name)
    except (LandingRefused, StoreError) as error:
        name = called(cloud, known)
        tell(f"the outputs could not be brought home: {error}")
        tell(
            f"they are in the job's store: `gpucloud down {name}` tries again,"
            f" `gpucloud cp -r {name}:@store/outputs FOLDER` brings them elsewhere"
        )
        return
    for path in brought:
        tell(f"brought home: {path}")
    if brought:
        cloud.asker(known).bill_pull(bytes_in(brought))


def answer(report: JobReport, *, as_json: bool) -> int:
    """Write the job's report; return its exit code, 0 while it goes on."""
    if as_json:
        say_json(report_json(report))
    else:
        say_words(report_text(report))
    return report.exit_code or 0


def say_what_lives(state: JobState, now: datetime) -> None:
    """Tell which machines are left, until when they are paid, and which command goes on or ends them."""
    tell(f"left {state.job} as it is")
    drives_itself = state.drives_itself and state.group is not None
    alive = [life.node_id for life in state.alive]
    until = f" until {format_moment(state.paid_until, now)}" if state.paid_until else ""
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


def _run(begun: Begun, leaves: bool, shown: Onlooker, interrupts: Interrupts) -> None:  # noqa: FBT001
    cloud, start = begun.cloud, begun.start
    means = means_to_go_on(cloud, begun.known, begun.asker.state(), begun.job, start)
    session = Session(
        world=means.world,
        orders=cloud.orders(begun.known),
        watcher=shown,
        who=Supervising(leaves=leaves),
        asked=interrupts.wanted_end,
        # As it was known last: store and cloud may be what fails.
        left=lambda state: say_what_lives(state, cloud.clock.now()),
    )
    going_on = partial(adopt, plan=start.plan, drills=start.order.drill, reopens=start.reopens)
    session.run(Entering(order=start.order, over=start.over, spec=begun.read.spec, adopt=going_on))
    bring_stored_home(cloud, begun.job, begun.known)
