"""`down`: ends a job wherever it is supervised, and shows that nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from gpucloud.cli.interrupts import Interrupts, Leave, obeyed
from gpucloud.cli.onlookers import Onlooker, onlooker
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.reports import report_json, report_text
from gpucloud.cli.supervising import bring_stored_home, say_what_lives
from gpucloud.cli.target import known_job
from gpucloud.domain.errors import CleanupIncomplete, GpucloudError, LeaseHeld
from gpucloud.domain.job import AwsChoices, Job
from gpucloud.domain.state import ExitReason, JobState
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.seen import Goal
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.lease import take
from gpucloud.usecases.supervise import supervisor
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.strays import leftovers

_LINGERS = timedelta(seconds=20)


def down(target: str | None, *, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = cloud.asker(known)
    try:
        with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
            _end(cloud, known, asker, shown, interrupts)
    except Leave as leave:
        say_what_lives(asker.state_as_listed())
        return leave.exit_code
    return _prove_empty(cloud, known, asker, as_json=as_json)


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
    _settle(cloud, known, job, shown, wanted_end, saves=readable)
    if readable:
        bring_stored_home(cloud, job, known.name)


def end_unsaved(cloud: Gpucloud, known: KnownJob, job: Job) -> None:
    """End a run that nobody supervises and that is worth nothing, its machines at once. Raises Leave."""
    with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
        _settle(cloud, known, job, shown, interrupts.wanted_end, saves=False)


def _settle(
    cloud: Gpucloud,
    known: KnownJob,
    job: Job,
    shown: Onlooker,
    wanted_end: Callable[[], ExitReason | None],
    *,
    saves: bool,
) -> None:
    """End the job and its machines; without `saves` as it stands now."""
    world = cloud.world(job, known.name, with_secrets=False)
    lease = take(world.jobs, cloud.clock)
    goal = Goal(nodes=job.resources.nodes)
    with supervisor(world, goal, lease, shown, lambda: wanted_end() or ExitReason.STOPPED) as one:
        if lease.state.unattended_s is not None:
            one.actor.preparer.records.withdraw_order()
        if not saves and not lease.state.status.ended:
            lease.write(books.abandon(lease.state, cloud.clock.now()))
        one.run()


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
    left, deadline = leftovers(cloud, known), cloud.clock.now() + _LINGERS
    while left and cloud.clock.now() < deadline:  # disks and interfaces go some seconds after their machine
        cloud.clock.sleep(1)
        left = leftovers(cloud, known)
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
