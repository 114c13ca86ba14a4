"""What a command is about: a job's name, or a file, with neither `gpucloud.yaml` here; and the sum that it names."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from gpucloud.cli.faults import known_error, require_here
from gpucloud.cli.render.ways import found_line
from gpucloud.cli.render.words import tell
from gpucloud.domain.errors import GpucloudError, NeverStarted, StoreError, StrangersRun, UsageError
from gpucloud.domain.job.quantities import counted, format_size, format_usd
from gpucloud.domain.job.spec import Cloud, Job
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.state.order import run_of
from gpucloud.domain.state.state import JobStatus
from gpucloud.usecases.checkpoint.checkpoints import costs_on
from gpucloud.usecases.job.jobs import Asker, with_forecast, with_stored_outputs
from gpucloud.usecases.jobstore.orders import sha256_of
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.jobstore.runs import current_run, require_own
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.jobs import asker_of, refuse_after_the_deadline, starter, visited_report, with_seen_again

DEFAULT_FILE = "gpucloud.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A job file as it is now, read."""

    file: Path
    job: Job
    spec: bytes


def read_target(cloud: Gpucloud, target: str | None, on: Cloud | None = None, *, to_start: bool = False) -> Target:
    """Return the job file that is meant, `on` another cloud than it names if given; a job's name remembers its own.

    UsageError when there is no file, or when that of a run is another job's by now; JobFileError when it is wrong, or
    `to_start` the job when something is missing beside it.
    """
    known = _run_named(cloud, target) if target is not None and not _is_file(target) else None
    path = known.file if known is not None else _job_file(target)
    on = on or (known.cloud if known is not None else None)
    if not path.is_file():
        require_here()
        raise UsageError(f"there is no file {path}", hint=_instead_of(cloud, path, target, known))
    job = cloud.read_job(path, to_start=to_start)
    if known is not None and run_of(job.name, known.name) is None:
        hint = f"`name:` as it was means {target} again; {job.name} is meant by {path}"
        raise UsageError(f"{path} is of {job.name} by now, and {target} is a run of another name", hint=hint)
    return Target(file=path, job=replace(job, cloud=on) if on is not None else job, spec=path.read_bytes())


_DOES = {"down": "ends", "rm": "deletes"}


def known_job(
    cloud: Gpucloud, target: str | None, *, only_own: Literal["down", "rm"] | None = None, adopts: bool = False
) -> KnownJob:
    """Return the run that is meant: a job's newest, `JOB@1` its first, or the one of that name. UsageError if unknown.

    A file means the newest run of the job that it names. A command that is for `only_own` ones takes no stranger's
    unless that is adopted (StrangersRun), and has the run known here: what it says of it names it.
    """
    if target is not None and not _is_file(target):
        return _newest(cloud, _run_named(cloud, target), target)
    if target is None and not Path(DEFAULT_FILE).is_file():
        require_here()
        raise _nothing_named(cloud)
    read = read_target(cloud, target)
    elsewhere = _started_elsewhere(cloud, read)
    if elsewhere is not None:
        return elsewhere
    found = current_run(cloud.store(read.job), read.job.name, cloud.clock)
    if found is None:
        starts = f"gpucloud train {target or ''}".strip()
        raise NeverStarted(
            f"{read.job.name} was never started", hint=f"nothing of it runs or costs; {starts} starts it"
        )
    own = [one for one in cloud.home.known() if one.file == read.file.resolve()]
    newest = max(own, key=lambda one: run_of(read.job.name, one.name) or 0, default=None)
    mine = f", {called(cloud, newest)} this file's" if newest is not None else ""
    meant = cloud.known(read.job, found.name, read.file)
    way = f"named instead of the file, {called(cloud, meant)} is that run{mine}"
    is_new = cloud.home.find(meant.name) is None
    if only_own is not None and (is_new or cloud.home.means_another(meant)):  # its name does not mean it here
        way = f"{' '.join(filter(None, ('gpucloud', only_own, target)))} --adopt {_DOES[only_own]} that run"
    if not adopts:
        reader = cloud.reader() if only_own is not None else None
        require_own(found, read.job, sha256_of(read.spec), cloud.home.identity, way, reader)
    if only_own is not None and is_new:
        with suppress(GpucloudError):  # where nothing can be written here, it is ended all the same
            cloud.home.remember(meant)
    return meant


def refuse_to_forget(cloud: Gpucloud, new: KnownJob) -> None:
    """A name stands for one run: machines of another run of that name would be found by nobody."""
    old = cloud.home.find(new.name)
    if old is None or old.store == new.store or cloud.is_deleted(old):
        return
    state = asker_of(cloud, old).state()
    if not state.torn_down and state.group is not None:
        raise UsageError(
            f"{old.name} is unfinished on {old.cloud.value}, its state in {old.store}",
            hint=f"gpucloud down {old.name}, or another name in the job file",
        )


def what_a_start_finds(cloud: Gpucloud, read: Target, *, offline: bool) -> tuple[str | None, JobReport | None]:
    """Return what a plan of a new run has to say first: a start is refused, or goes on with a run, that stands so."""
    job, other = read.job, cloud.home.find(read.job.name)
    if other is not None and other.file.is_file() and not other.file.samefile(read.file):
        asks = "`gpucloud train` asks for another name, or for --adopt"
        return f"warning: {other.name} is a run of {other.file}: {asks}", None
    if offline:
        return None, None
    try:
        refuse_to_forget(cloud, cloud.known(job, job.name, read.file))
        starting = starter(cloud, job)
        if (found := starting.found(job, read.spec)) is None:
            return None, None
        if found.begins_anew(job, cloud.clock.now(), again=False):
            kept = starting.kept(found)
            return f"{kept}; `gpucloud train` starts a new run on machines of its own" if kept else None, None
        refuse_after_the_deadline(cloud, job, found)
        known = cloud.known(job, found.name, read.file)
        if (supervisor := asker_of(cloud, known).supervisor()) is not None:
            return found_line(found.state, supervisor, None, ran=False), None
        goes_on = report_of(cloud, known) if found.state.status is not JobStatus.SUCCEEDED else None
        held = goes_on if starting.held(found, job, cloud.clock.now()) else None
        return found_line(found.state, None, held, ran=starting.has_run(found, job, read.spec)), goes_on
    except (UsageError, StrangersRun, StoreError) as refused:
        hint = f"; {refused.hint}" if refused.hint else ""
        now = " now" if isinstance(refused, StoreError) else ""
        return f"warning: `gpucloud train` is refused{now}: {refused.message}{hint}", None
    except GpucloudError:  # what it finds is for the start to say
        return None, None


def _nothing_named(cloud: Gpucloud) -> UsageError:
    names = [called(cloud, known) for known in cloud.home.known()]
    if not names:
        return UsageError(f"there is no file {DEFAULT_FILE}", hint="gpucloud init writes one")
    some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return UsageError(
        f"no job is named, and there is no {DEFAULT_FILE} here", hint=f"name one: {some}; gpucloud status lists them"
    )


def called(cloud: Gpucloud, known: KnownJob) -> str:
    """Return what means that very run on a command line: a first run's own name may mean a newer one.

    It is its job file where the name means a run of another store here.
    """
    if cloud.home.means_another(known) and known.file.is_file():
        return shlex.quote(str(known.file))
    runs = cloud.home.known(f"{known.name}-")
    later = (run_of(known.name, one.name) or 0 for one in runs if one.store == known.store)
    return f"{known.name}@1" if max(later, default=0) > 1 else known.name


def require_one_run(cloud: Gpucloud, target: str | None, command: str) -> None:
    """UsageError for a name that several runs have: what is deleted is named by a run's own name, or by a file."""
    if target is None or _is_file(target) or "@" in target:
        return
    first = [f"{target}@1"] if cloud.home.find(target) is not None else []
    names = [*first, *(one.name for one in _later_runs(cloud, target))]
    if len(names) > 1:
        *some, last = (command.replace("JOB", name) for name in names)
        raise UsageError(f"{target} has {len(names)} runs: {', '.join(names)}", hint=f"{', '.join(some)} or {last}")


def other_runs(cloud: Gpucloud, known: KnownJob) -> tuple[str, ...]:
    """Return what means the known other runs of the same job, the newest first."""
    with suppress(GpucloudError):
        base = asker_of(cloud, known).order().base
        later = [one for one in _later_runs(cloud, base, store=known.store) if one.name != known.name]
        first = cloud.home.find(base) if known.name != base else None
        return (*(one.name for one in later), *([called(cloud, first)] if first is not None else []))
    return ()


def report_of(cloud: Gpucloud, known: KnownJob, *, visits: bool = False) -> JobReport:
    """Return how the job stands, the same for every command that asks at the same moment, under what means it here.

    The nodes of one that nobody supervises are asked, and its store for what they saved last: its state is of an
    earlier time. With `visits` the nodes of any job are asked, for how they are used, its pace and its forecast.
    """
    asker = asker_of(cloud, known)
    report = asker.report()
    report = replace(
        report,
        job=called(cloud, known),
        home=cloud.outputs_of(known, report.attempts[-1:]) if cloud.has_home(known) else None,
        lost_file=_lost_file(cloud, known, report),
        superseded=_is_superseded(cloud, known, report),
    )
    report = with_seen_again(cloud, known, replace(report, message=_message_here(report)))
    is_left = report.torn_down if report.status.ended else report.drives_itself and report.supervisor is None
    if is_left and report.ever_outputs and (attempts := cloud.stored_attempts(known)):
        report = with_stored_outputs(report, attempts)
        if report.has_stored_outputs:
            return report
    if visits or report.supervisor is None:
        report = visited_report(cloud, known, report)
    return with_forecast(asker.with_stored_checkpoint(report))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A known job that cannot be read from here, and why: it may have machines, and may have spent."""

    job: str
    error: GpucloudError


def reports_of_all(cloud: Gpucloud) -> tuple[list[JobReport], list[Unread]]:
    """Return how all known jobs stand; of each that cannot be read, or is deleted, a line says so."""
    reports, unread = [], []
    for known in cloud.home.known():
        try:
            reports.append(report_of(cloud, known))
        except Exception as fault:  # noqa: BLE001  what one job's machines wrote must keep nobody from the others' reports
            if cloud.is_deleted(known):
                tell(f"{called(cloud, known)}: {deleted_words(called(cloud, known))}")
                continue
            unread.append(Unread(job=called(cloud, known), error=known_error(fault)))
            hint = f" ({unread[-1].error.hint})" if unread[-1].error.hint else ""
            tell(f"{unread[-1].job}: {unread[-1].error}{hint}")
    return reports, unread


def deleted_words(name: str) -> str:
    """Return what to say of a known job that was deleted elsewhere, or by a command that was killed before its end."""
    return f"it was deleted, or its store is away: it is not in it; gpucloud rm {name} forgets it and its machines' key"


def _started_elsewhere(cloud: Gpucloud, read: Target) -> KnownJob | None:
    """Return the newest known run of this very file that was started on another cloud than the file names."""
    runs = [known for known in cloud.home.known() if known.file == read.file.resolve()]
    if not runs or any(known.cloud is read.job.cloud for known in runs):
        return None
    return max(runs, key=lambda known: run_of(read.job.name, known.name) or 0)


def _is_file(target: str) -> bool:
    return "/" in target or target in (".", "..") or target.endswith((".yaml", ".yml", ".py"))


def _job_file(target: str | None) -> Path:
    """Return where the job file is, or would be: a folder has one of the usual name. UsageError for a script."""
    if target is not None and target.endswith(".py") and Path(target).exists():
        name = Path(target).name
        raise UsageError(
            f"{target} is a script, not a job file", hint=f"gpucloud init --run {name} writes a job file for it"
        )
    path = Path(target or DEFAULT_FILE)
    return path / DEFAULT_FILE if path.is_dir() else path


def _instead_of(cloud: Gpucloud, path: Path, target: str | None, known: KnownJob | None) -> str:
    """Return what helps where there is no such job file."""
    if known is not None:
        otherwise = f"gpucloud down {target} ends the job"
        with suppress(GpucloudError):
            if asker_of(cloud, known).stored_state().torn_down:
                otherwise = f"gpucloud status {target} shows the job"
        return f"{target} was begun from it: name the file where it is now, or {otherwise}"
    if target is None or path != Path(target):
        return _to_write(path)
    near = _nearest(path)
    return "gpucloud status lists known jobs" if near is None else f"did you mean {near}?"


def _nearest(path: Path) -> Path | None:
    """Return the file of such a kind beside one that is not there whose name is nearest."""
    with suppress(OSError):
        names = [beside.name for beside in path.parent.iterdir() if beside.suffix == path.suffix]
        return next((path.with_name(near) for near in get_close_matches(path.name, names, n=1)), None)
    return None


def _to_write(path: Path) -> str:
    """Return how a folder gets its job file."""
    folder = path.parent
    if not folder.is_dir() or folder.samefile("."):
        return "gpucloud init writes one"
    return f"cd {shlex.quote(str(folder))} && gpucloud init writes one"


def _run_named(cloud: Gpucloud, name: str) -> KnownJob:
    """Return the run of exactly that name; `digits@1`, or `digits-1`, is the first run of `digits`."""
    base, _, number = name.partition("@")
    exact = name if not number.isdigit() else base if int(number) == 1 else f"{base}-{int(number)}"
    known = cloud.home.find(exact) or cloud.home.find(name.removesuffix("-1"))
    if known is not None:
        return known
    for newest in _later_runs(cloud, name):  # its first one was deleted, or is not known here
        tell(f"{name} means its newest run, {newest.name}")
        return newest
    near = get_close_matches(name, [job.name for job in cloud.home.known()], n=1)
    hint = f"did you mean {near[0]}?" if near else "gpucloud status lists known jobs; a file name ends in .yaml"
    if (folder := Path(name)).is_dir():
        file = folder / DEFAULT_FILE
        hint = f"the folder's job file is ./{file}" if file.is_file() else _to_write(file)
    raise UsageError(f"no job is called {name!r}", hint=hint)


def _newest(cloud: Gpucloud, first: KnownJob, name: str) -> KnownJob:
    """Return the newest run of the job whose first run was named so; any other run is meant by its own name alone.

    A name proves nothing: the order of a run says of which job it is. A first run that still has machines is meant by
    its name, so that it can be ended.
    """
    if (run_of(name, first.name) or 0) > 1:  # the first was not found
        return first
    for one in _later_runs(cloud, name, store=first.store):
        with suppress(GpucloudError):
            if not asker_of(cloud, first).stored_state().torn_down:
                tell(f"{name} means its first run, which is not torn down yet; the newest is {one.name}")
                return first
            tell(f"{name} means its newest run, {one.name}; the first is {name}@1")
            return one
    return first


def _lost_file(cloud: Gpucloud, known: KnownJob, report: JobReport) -> str | None:
    """Return what FILE is in a command that needs the job file, where it is not where it was, or is another job's."""
    if not known.file.is_file():
        return f"FILE is its job file where it is now: {known.file} is there no more"
    if report.supervisor is not None or report.status is JobStatus.SUCCEEDED:  # nothing is to go on
        return None
    with suppress(GpucloudError, OSError):  # what is wrong with it is for the start to say
        if sha256_of(known.file.read_bytes()) == report.spec_sha256:  # a list reads none that is as it was
            return None
        name = cloud.read_job(known.file).name
        if run_of(name, known.name) is None:
            return f"FILE is one with `name: {report.base}`: {known.file} is of {name} by now"
    return None


def _is_superseded(cloud: Gpucloud, known: KnownJob, report: JobReport) -> bool:
    """Whether a later run is known, or is in the store of a run that the same command would go on with else.

    Asked of runs that have ended alone: each that is found costs a request.
    """
    if not report.status.ended:
        return False
    later = _later_runs(cloud, report.base, store=known.store)
    if any((run_of(report.base, one.name) or 0) > report.run for one in later):
        return True
    with suppress(GpucloudError):
        return report.status is not JobStatus.SUCCEEDED and not asker_of(cloud, known).is_newest_run()
    return False


def _message_here(report: JobReport) -> str | None:
    """Return what the report says, of a used-up budget or deadline with the command that goes on here, if one does."""
    end = report.limit_end
    if end is None:
        return report.message
    if report.superseded:
        return end.told  # it goes on with a later run by now
    return f"{end.said('FILE')}; {report.lost_file}" if report.lost_file is not None else end.said()


def _later_runs(cloud: Gpucloud, base: str, store: str | None = None) -> Iterator[KnownJob]:
    """Yield the known runs of the job after its first, the newest first; with `store`, those of that one."""
    runs = [(run_of(base, one.name) or 0, one) for one in cloud.home.known(f"{base}-") if store in (None, one.store)]
    for number, one in sorted(runs, key=lambda run: run[0], reverse=True):
        if number <= 1:
            return
        with suppress(GpucloudError):
            if asker_of(cloud, one).order().base != base:
                continue
            yield one


def one_node(cloud: Gpucloud, known: KnownJob, node_id: str | None) -> Node:
    """Return the node that is meant, by its name or the beginning that tables have of it; without one the first."""
    asker = asker_of(cloud, known)
    group, view = group_of(cloud, known), asker.listed(asker.state())
    listed = (asker.group.describe(group) if view.unseen is not None else view).alive  # which says whose they are
    running = [node for node in listed if node.state is NodeState.RUNNING]
    if not running:
        raise none_is_up(known.name, len(listed))
    if node_id is None:
        return running[0]
    found = [node for node in running if node.id == node_id] or [n for n in running if n.id.startswith(node_id)]
    if len(found) != 1:
        why = "has no node" if not found else "has several nodes that begin with"
        raise UsageError(f"{known.name} {why} {node_id}", hint=f"one of {', '.join(n.id for n in running)}")
    return found[0]


def none_is_up(job: str, coming: int) -> UsageError:
    """Return the error for a job without a machine that can be asked, of which so many are on their way."""
    more = f": {coming} {'is' if coming == 1 else 'are'} still being started" if coming else ""
    return UsageError(f"{job} has no machine that is up{more}", hint=f"gpucloud status {job}")


def node_of(cloud: Gpucloud, known: KnownJob, node_id: str | None) -> Node:
    """Return the node that is meant; without a name the one of rank 0 in the newest attempt, where results are.

    Where that one is gone, another, which is told.
    """
    attempts = asker_of(cloud, known).state().attempts
    first = attempts[-1].members[0].node_id if attempts else None
    try:
        return one_node(cloud, known, node_id or first)
    except UsageError:
        if node_id is not None:
            raise
        node = one_node(cloud, known, None)
        tell(f"{first}, which had rank 0, is not up any more: taking {node.id}, whose files may be others")
        return node


def group_of(cloud: Gpucloud, known: KnownJob) -> str:
    """Return the name of the job's node group; UsageError when it has none."""
    state = asker_of(cloud, known).state()
    if state.group is None:
        closed = state.status.ended
        raise UsageError(
            f"{known.name} has {'ended, and has no machines any more' if closed else 'no machines yet'}",
            hint=f"gpucloud status {known.name}" if closed else f"gpucloud up {known.name}",
        )
    return state.group


def say_what_costs_on(asker: Asker, name: str) -> None:
    """Tell which checkpoints of a job that has ended stay in a store that costs; `name` means it on a command line."""
    with suppress(GpucloudError):  # it is said beside an answer that has been given
        found = costs_on(asker.jobs, asker.state(), asker.terms)
        if found is not None:
            kept = f"{counted(found.checkpoints, 'checkpoint')} ({format_size(found.size)})"
            stay = "stays" if found.checkpoints == 1 else "stay"
            on = "the next `train` goes on from the newest; if none is to come, " if found.goes_on else ""
            tell(
                f"{kept} of {name} {stay} in the store, for about {format_usd(found.usd_per_month)} a month:"
                f" {on}gpucloud rm {name} --with-checkpoints deletes them"
            )
