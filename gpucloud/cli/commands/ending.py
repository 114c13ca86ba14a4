"""`down` and `rm`: ends a job and shows that nothing of it is left; deletes what is kept of one that is over."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.cli.commands.supervising import bring_stored_home, onlooker, say_what_lives
from gpucloud.cli.interrupts import Interrupts, Leave, obeyed
from gpucloud.cli.render.onlookers import Onlooker
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.use import condition_word
from gpucloud.cli.render.words import is_meant, say, say_json, say_words, tell
from gpucloud.cli.target import called, known_job, other_runs, report_of, require_one_run
from gpucloud.domain.errors import (
    CleanupIncomplete,
    CredentialsError,
    GpucloudError,
    LeaseHeld,
    OrderChanged,
    OrderUnreadable,
    ProvisionError,
    StateUnreadable,
    ToolMissing,
    UsageError,
)
from gpucloud.domain.job.quantities import counted, format_moment, format_size
from gpucloud.domain.job.spec import Job
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.domain.supervision.self_driving import Arming
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.job.jobs import Asker, kept_of
from gpucloud.usecases.job.ordered import enough_to_end
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import Lease, take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.jobstore.report import Condition, JobReport
from gpucloud.usecases.supervise.session import Session
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.found import leftovers
from gpucloud.wiring.jobs import access_to, asker_of

_LINGERS = timedelta(seconds=20)
_LOOK_S = 0.2
_MACHINE_ENDS_WITHIN = timedelta(minutes=30)
"""It saves, and puts the outputs into the store."""


def down(target: str | None, *, as_json: bool) -> int:
    """Save and end the job, end its machines, and show that nothing is left; return the exit code."""
    cloud = Gpucloud()
    cloud.home.give_reserve()
    known = known_job(cloud, target)
    asker = asker_of(cloud, known)
    try:
        with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
            _end(cloud, known, asker, shown, interrupts)
            bring_stored_home(cloud, cloud.ordered(known).newest(), known)
    except Leave as leave:
        say_what_lives(asker.state_as_listed(), asker.clock.now())
        return leave.exit_code
    code = _prove_empty(cloud, known, asker, as_json=as_json)
    if target is None or target != known.name:
        _say_what_is_kept(cloud, known)
    return code


def _say_what_is_kept(cloud: Gpucloud, ended: KnownJob) -> None:
    """Tell which other runs of the job file have machines: who names the file may mean them too."""
    for other in cloud.home.known():
        if other.file != ended.file or other.name == ended.name:
            continue
        with suppress(GpucloudError):  # of a run that cannot be looked at, `status` says why
            asker = asker_of(cloud, other)
            state = asker.state()
            kept = kept_of(asker.order(), state, asker.listed(state), asker.clock.now())
            if kept is not None:
                tell(str(kept))


def end_unsaved(cloud: Gpucloud, known: KnownJob) -> None:
    """End a run that nobody supervises and that is worth nothing, its machines at once. Raises Leave."""
    orders = cloud.orders(known)
    with onlooker() as shown, obeyed(shown, asks=False) as interrupts:
        job, _ = cloud.ordered(known).to_end(orders.end())
        _session(cloud, known, job, orders, shown, interrupts.wanted_end).end_unsaved()


def _end(cloud: Gpucloud, known: KnownJob, asker: Asker, shown: Onlooker, interrupts: Interrupts) -> None:
    """Return when the job has ended and its machines too.

    Machines that drive their job write its state: whatever stands there must not keep its owner from ending them.
    """
    before = asker.jobs.last_armed()
    try:
        _end_by_state(cloud, known, asker, shown, interrupts)
    except Exception as error:
        newest = asker.jobs.last_armed() if before is not None and _is_of_the_state(error, before) else None
        if newest is None:
            raise
        why = str(error) if isinstance(error, GpucloudError) else f"{type(error).__name__}: {error}"
        shown.story(f"{why}\nending the machines by what was armed for them, whatever they wrote")
        _end_as_armed(cloud, known, asker, newest, shown, interrupts)


def _is_of_the_state(error: Exception, before: Arming) -> bool:
    """Whether what the job's machines wrote may be why it could not be ended.

    What cannot be read or decided by, whenever they drove it; else only while they do, and no fault of the cloud, of
    its rights or of a tool: by the state, the job is saved first.
    """
    if isinstance(error, StateUnreadable) or not isinstance(error, GpucloudError):
        return True
    ours = (OrderChanged, CredentialsError, ProvisionError, CleanupIncomplete, ToolMissing)
    return before.machines > 0 and not error.may_pass and not isinstance(error, ours)


def _end_as_armed(
    cloud: Gpucloud, known: KnownJob, asker: Asker, newest: Arming, shown: Onlooker, interrupts: Interrupts
) -> None:
    """End the machines first, which then write nothing more, and the job as far as it is known on the user's side."""
    orders = cloud.orders(known)
    job, _ = cloud.ordered(known).to_end(orders.end())
    session = _session(cloud, known, job, orders, shown, interrupts.wanted_end)
    for group in _groups(asker, newest):
        session.services.group.purge(group)
    asker.jobs.rescue(newest)
    session.end_unsaved()


def _groups(asker: Asker, newest: Arming) -> tuple[str, ...]:
    """Return the job's groups: the one that was armed, and the one of its state, which is its own where it is read."""
    named = [newest.rented.group]
    with suppress(StateUnreadable):
        named.append(asker.stored_state().group)
    return tuple(dict.fromkeys(name for name in named if name is not None))


def _end_by_state(cloud: Gpucloud, known: KnownJob, asker: Asker, shown: Onlooker, interrupts: Interrupts) -> None:
    """Return when the job has ended and its machines too, by whoever supervises it, or from here."""
    orders, state = cloud.orders(known), asker.state()
    try:
        orders.given()
    except OrderUnreadable as error:
        shown.story(f"{error.message}\nending the job by an order of your own in its place")
        orders.end_in_place(enough_to_end(known, cloud.read_job), cloud.home.identity)
    if not (state.status.ended and state.torn_down):
        orders.end()
    since = asker.clock.now()
    while not (state.status.ended and state.torn_down):
        by = asker.supervisor()
        if by is None:
            with suppress(LeaseHeld):  # one of its machines, or another terminal, has it from this moment on
                _end_here(cloud, known, state, orders, shown, interrupts.wanted_end)
        else:
            shown.story(f"asking {by} to end {known.name}")
            _await_end(asker, orders, by, since)
        state = asker.state()


def _await_end(asker: Asker, orders: Orders, by: str, since: datetime) -> None:
    """Wait while the same supervisor has the job and it is not torn down. OrderChanged where it was started again.

    LeaseHeld where it is a machine that takes too long, whatever names it takes meanwhile: what runs on it may keep the
    job for as long as it is paid.
    """
    while True:
        state, order = asker.state(), orders.newest().order
        if state.status.ended and state.torn_down:
            return
        if order.end is None:
            raise OrderChanged(
                f"{order.job} was started again by {order.by} at {format_moment(order.at, asker.clock.now())}",
                hint=f"gpucloud down {order.job}",
            )
        if state.drives_itself and asker.clock.now() - since > _MACHINE_ENDS_WITHIN:
            minutes = _MACHINE_ENDS_WITHIN.total_seconds() / 60
            raise LeaseHeld(f"{by} has not ended {order.job} for {minutes:.0f} min", hint=None)
        asker.clock.sleep(_LOOK_S)
        if asker.supervisor() != by:
            return


def _end_here(
    cloud: Gpucloud,
    known: KnownJob,
    state: JobState,
    orders: Orders,
    shown: Onlooker,
    asked: Callable[[], ExitReason | None],
) -> None:
    """End the job from here: with a last save if that can be, else the machines at once."""
    means = access_to(cloud, known).to_end(state, orders.newest())
    session = Session(services=means.services, orders=orders, watcher=shown, asked=asked)
    if means.unsaved is None:
        session.run()
    else:
        session.end_unsaved(means.unsaved)


def _session(
    cloud: Gpucloud, known: KnownJob, job: Job, orders: Orders, shown: Onlooker, asked: Callable[[], ExitReason | None]
) -> Session:
    """Return what ends the job: that needs no secrets."""
    services = cloud.services(job, known.name, goes_on=False)
    return Session(services=services, orders=orders, watcher=shown, asked=asked)


def _prove_empty(cloud: Gpucloud, known: KnownJob, asker: Asker, *, as_json: bool) -> int:
    left, deadline = leftovers(cloud, known), cloud.clock.now() + _LINGERS
    while left and cloud.clock.now() < deadline:  # disks and interfaces go some seconds after their machine
        cloud.clock.sleep(1)
        left = leftovers(cloud, known)
    if left:
        # What the same command removes is gone by now; strays that nothing of ours made are not its own.
        raise CleanupIncomplete(f"still listed: {', '.join(left)}", hint="gpucloud gc --wait --yes")
    report = asker.report()
    if as_json:
        say_json({**report_json(report), "left_over": []})
    else:
        say_words(report_text(report))
        tell("listed again: no machines, no node group")
    return 0


# `rm`: deletes what the store and this machine keep of a job that is over; a job with anything alive is refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What is kept of a job in its store: all keys, and its checkpoints with what they take."""

    keys: tuple[str, ...]
    checkpoints: int
    size: int

    def __str__(self) -> str:
        return counted(len(self.keys), "object") + (f" with {self.saved}" if self.checkpoints else "")

    @property
    def saved(self) -> str:
        """Its checkpoints in words."""
        return f"{counted(self.checkpoints, 'checkpoint')} ({format_size(self.size)})"


def rm(target: str | None, *, with_checkpoints: bool, yes: bool, as_json: bool) -> int:
    """Delete a job that has ended: its state, output, bills, and its checkpoints if told so; return the exit code.

    UsageError while anything of it is alive, and for checkpoints or results that nobody said may go.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    require_one_run(cloud, target, "gpucloud rm JOB")
    jobs, name = JobStore(cloud.store_of(known), known.name), called(cloud, known)
    _require_over(cloud, known, name)
    if others := other_runs(cloud, known):
        tell(f"of {len(others) + 1} runs, only {known.name} is deleted; the others stay: {', '.join(others)}")
    kept = _kept(jobs)
    if kept.checkpoints and not with_checkpoints:
        raise UsageError(
            f"{known.name} has {kept.saved}",
            hint=f"gpucloud rm {name} --with-checkpoints deletes them too;"
            f" gpucloud checkpoints {name} --pull DIR brings one here first",
        )
    tell(f"{known.name}: {kept} in {jobs.store.url}; `gpucloud cost` will no longer know it")
    if not yes and not is_meant(f"gpucloud rm {name}{' --with-checkpoints' if with_checkpoints else ''} --yes"):
        return 2
    _delete(cloud, known, jobs, kept)
    _forget(cloud, known, jobs)
    if as_json:
        say_json({"job": known.name, "store": jobs.store.url, "objects": len(kept.keys), "bytes": kept.size})
    else:
        say(f"{known.name} is deleted: {kept}")
    return 0


def _forget(cloud: Gpucloud, known: KnownJob, jobs: JobStore) -> None:
    """A new run of the name, which may be there by now, is known by the same entry."""
    cloud.home.forget(known)
    if jobs.exists():
        cloud.home.remember(known)


def _require_over(cloud: Gpucloud, known: KnownJob, name: str) -> None:
    state = asker_of(cloud, known).state()
    if not state.status.ended or not state.torn_down:
        raise _not_over(report_of(cloud, known), name)
    if left := leftovers(cloud, known):
        raise UsageError(f"of {known.name} is still listed: {', '.join(left)}", hint=f"gpucloud down {name}")
    if cloud.has_stored_outputs(known):
        raise UsageError(f"results of {known.name} are in the store", hint=f"gpucloud down {name} brings them home")


def _not_over(report: JobReport, name: str) -> UsageError:
    """Return why nothing of the job is deleted yet, and what is to be done first."""
    down = f"gpucloud down {name}"
    match report.condition:
        case Condition.HELD:
            why = f"{report.job} has failed, and its machines wait for a mended {report.awaits}"
            hint = f"{down} ends them; gpucloud train {name} goes on with them"
        case Condition.KEPT:
            why, hint = f"{report.job} has succeeded, and its machines are kept for a look", f"{down} ends them"
        case Condition.ENDING if report.supervisor is not None:
            why = f"{report.job} has {report.status.value}, and {report.supervisor} still ends its machines"
            hint = f"{down} waits for that"
        case Condition.ENDING | Condition.ENDED:
            why = f"{report.job} has {report.status.value}, and is not wound up: machines or results may be left"
            hint = f"{down} brings home what is there, and removes the rest"
        case Condition.TRAINED:
            why = f"{report.job} is not over: {condition_word(report)}"
            hint = f"{down} brings them home, and ends its machines"
        case _:
            why = f"{report.job} is not over: {condition_word(report)}"
            hint = f"{down} ends it and brings home what is there; gpucloud train {name} goes on with it"
    return UsageError(why, hint=hint)


def _kept(jobs: JobStore) -> _Kept:
    stored_checkpoints = StoredCheckpoints(store=jobs.store, prefix=jobs.checkpoints, keep=2)
    manifests = [one.found.manifest for one in stored_checkpoints.standing()]
    pieces = {piece.key: piece.size for manifest in manifests if manifest is not None for piece in manifest.pieces}
    keys = jobs.store.list(f"jobs/{jobs.job}/")
    return _Kept(keys=keys, checkpoints=len(manifests), size=sum(pieces.values()))


def _delete(cloud: Gpucloud, known: KnownJob, jobs: JobStore, kept: _Kept) -> None:
    """Delete everything while the job's lease is ours, so that nobody starts it meanwhile.

    The state goes last: by it the same command again finds what is left, and until then no new run has the name, its
    key or its log.
    """
    root = f"jobs/{jobs.job}/"
    with take(jobs, cloud.clock) as lease:
        _require_unchanged(cloud, known, jobs, kept)
        for key in sorted(kept.keys, key=lambda key: key.startswith(f"{root}control/order")):
            _delete_key(jobs, lease, key)
        for key in jobs.store.list(root):  # a start that was refused meanwhile has left its code
            _delete_key(jobs, lease, key)
        cloud.home.clear(known)
        lease.delete()


def _delete_key(jobs: JobStore, lease: Lease, key: str) -> None:
    if key != f"jobs/{jobs.job}/state.json":
        lease.confirm()
        jobs.store.delete(key)


def _require_unchanged(cloud: Gpucloud, known: KnownJob, jobs: JobStore, kept: _Kept) -> None:
    """UsageError for a job that somebody went on with while the question stood: what was told is no longer all."""
    name = called(cloud, known)
    _require_over(cloud, known, name)
    if set(jobs.store.list(f"jobs/{jobs.job}/")) - set(kept.keys):
        raise UsageError(f"{known.name} has gone on meanwhile", hint=f"gpucloud status {name}")
