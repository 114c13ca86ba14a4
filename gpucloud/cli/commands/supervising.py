"""Supervising a job from this process: how it is entered, driven, let go of and left."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpucloud.cli.interrupts import SAVES, Interrupts, Leave, obeyed
from gpucloud.cli.render.bills import let_go_words, prepaid_line
from gpucloud.cli.render.onlookers import Onlooker, PlainOnlooker, Unshaken
from gpucloud.cli.render.plans import clearing_line, driven_line, leaving_line, plan_json
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.words import left, say, say_json, say_words, tell
from gpucloud.cli.target import Target, called, report_of, say_what_costs_on
from gpucloud.domain.checkpoint.protection import NEVER, Protection, Saving
from gpucloud.domain.errors import CredentialsError, DataStoreError, GpucloudError, LandingRefused, StoreError
from gpucloud.domain.job.quantities import format_moment, format_span
from gpucloud.domain.job.spec import Job, Market, OnNotice
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import JobState, JobStatus
from gpucloud.domain.supervision.self_driving import TAKES_OVER, USUAL_TIME
from gpucloud.domain.supervision.snapshot import Limits, Supervising
from gpucloud.store import is_refused
from gpucloud.system.retries import Retry
from gpucloud.usecases.job.jobs import Asker, LeftJob
from gpucloud.usecases.job.ordered import adopt, not_ended_by
from gpucloud.usecases.job.start import Start
from gpucloud.usecases.jobstore.condition import Saves
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.session import Entering, Session
from gpucloud.usecases.supervise.story import brought_lines, missing_line
from gpucloud.wiring import Gpucloud, KnownJob, how_it_saves
from gpucloud.wiring.jobs import access_to, asker_of


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
        return asker_of(self.cloud, self.known)

    def report(self) -> JobReport:
        """Return how it stands, as every command says it."""
        return report_of(self.cloud, self.known)

    def tell_that_it_leaves(self, machines: int) -> None:
        """Say at once when this process leaves a job of so many machines, where these can drive it."""
        if self.cloud.unable(self.job) is None:
            tell(leaving_line(self.name, machines))


def run(begun: Begun, *, leaves: bool = False, asks: bool = True) -> bool:
    """Give the start's order and hold the job's lease until it is done; bring home what is in the store then.

    Return whether all of that came.
    With `leaves` only until the machines drive the job. Raises Leave, and Detach from a job that is to be finished, as
    the user wishes; without `asks` any signal is Leave. Raises LeaseHeld when somebody else supervises it, RunIsOver
    when somebody else has ended it; after any other GpucloudError it is said what lives.
    """
    detaches = begun.start.order.until is Until.FINISHED and not leaves
    protection = how_it_saves(begun.job)
    stopping = partial(_what_a_stop_means, begun, protection)
    told = partial(_what_a_detach_prepays, begun)
    before_it = told if detaches else None
    saves = Saves(policy=begun.job.checkpoint, since=begun.asker.clock.now())
    with (
        onlooker(begun.cloud.limits_of(begun.known), saves) as shown,
        obeyed(shown, asks=asks, detaches=before_it, stopping=stopping) as interrupts,
    ):
        return _run(begun, leaves, shown, interrupts)


def clear(begun: Begun, *, anew: bool, as_json: bool) -> int | None:
    """Tear down what is left of a run, whose end was told when it came, before it goes on or one begins `anew`.

    Return the exit code where nothing follows: a start that winds it up alone, who leaves it, results without room.
    """
    if not begun.start.winds_up:
        tell(clearing_line(begun.name, waited=begun.start.waited, anew=anew))
    try:
        is_home = run(begun, asks=False)
    except Leave as leave:
        return answer_left(begun.asker, leave, as_json=as_json)
    if begun.start.winds_up:
        return answer(begun.report(), as_json=as_json, asker=begun.asker)
    if is_home or not anew:
        return None
    tell(f"no new run was begun, as results of {begun.name} are not home yet: the same command again begins one")
    answer(begun.report(), as_json=as_json)
    return StoreError.exit_code


def _what_a_stop_means(begun: Begun, protection: Protection) -> str:
    state = None
    with suppress(GpucloudError):  # a store that does not answer keeps nobody from stopping
        state = begun.asker.state()
    return what_stopping_means(begun.job, protection, state)


def what_stopping_means(job: Job, protection: Protection, state: JobState | None = None) -> str:
    """Return what becomes of the work when somebody stops the job, in words for the question.

    `state` is how the job stands, None where nobody knows; a script that saves after all is asked to, as all are.
    """
    home = "its outputs come home first" if job.outputs else "nothing of its work is lost"
    if state is not None and (state.status.ended or (state.attempt is not None and state.attempt.done_at is not None)):
        return "it has ended already" if state.status.ended else f"its script is done: {home}"
    if state is not None and state.attempt is None:
        kept = f"{state.checkpoint} is kept" if state.checkpoint is not None else "nothing is saved"
        return f"nothing trains now, {kept}" if state.attempts else "nothing trains yet"
    unsaved = state is None or state.checkpoint is None
    if protection.saving is Saving.NONE or (protection.saving is Saving.NOTHING and unsaved):
        return f"its work is lost{', but for the outputs that it has written by then' if job.outputs else ''}"
    directory = job.checkpoint.directory
    if directory is not None and directory.on_notice is OnNotice.NONE:
        return "what its script has not saved yet is lost: nothing asks it to"
    return "saves first, if its script does" if protection.saving in (Saving.UNKNOWN, Saving.NOTHING) else SAVES


def _what_a_detach_prepays(begun: Begun) -> str | None:
    """Return until when machines that drive the job are paid, and for how much; None where nothing is prepaid."""
    if begun.cloud.unable(begun.job):
        return None
    with suppress(GpucloudError):
        found = begun.asker.prepaid_for(begun.start.order.unattended or USUAL_TIME)
        if found is not None:
            return prepaid_line(found, begun.asker.clock.now())
    return None


def onlooker_of(cloud: Gpucloud, known: KnownJob) -> Unshaken:
    """Return the display of a known job, which saves as its newest order says."""
    saves = None
    with suppress(GpucloudError):
        order = asker_of(cloud, known).order()
        saves = None if order.is_stand_in else Saves(policy=order.resolved.checkpoint, since=order.at)
    return onlooker(cloud.limits_of(known), saves)


def onlooker(limits: Limits, saves: Saves | None = None) -> Unshaken:
    """Return the live display on a terminal, plain lines elsewhere; `limits` are the job's cloud's."""
    if sys.stderr.isatty():
        from gpucloud.cli.render.live import LiveOnlooker

        return Unshaken(LiveOnlooker(limits, saves))
    return Unshaken(PlainOnlooker(limits, saves))


def bring_stored_home(cloud: Gpucloud, job: Job, known: KnownJob) -> bool:
    """Bring home what was put into the store: a machine knows no folder of the user's, and the user's may be full.

    Return whether all that can come has come.

    What cannot come stays there and is told; how the job ended is no other for that. Where the job file is
    not, nobody would find it: it stays too.
    """
    if not cloud.has_home(known):
        if stays := cloud.has_stored_outputs(known):
            tell(
                f"the outputs of {known.name} stay in its store: {known.file} is not here;"
                f" `gpucloud cp -r {called(cloud, known)}:@store/outputs FOLDER` copies them"
            )
        return not stays
    try:
        brought = cloud.bring_stored_home(job, known.name)
    except (LandingRefused, StoreError) as error:
        name = called(cloud, known)
        tell(f"the outputs could not be brought home: {error}")
        tell(
            f"they are in the job's store: `gpucloud down {name}` tries again,"
            f" `gpucloud cp -r {name}:@store/outputs FOLDER` brings them elsewhere"
        )
        return False
    for line in (*brought_lines(brought), *map(missing_line, brought.missing)):
        tell(line)
    if brought.size:
        asker_of(cloud, known).bill_pull(brought.size)
    return True


def answer(report: JobReport, *, as_json: bool, asker: Asker | None = None) -> int:
    """Write the job's report; return its exit code, 0 while it goes on. `asker` tells what of it costs on."""
    if as_json:
        say_json(report_json(report))
    else:
        say_words(report_text(report))
    if asker is not None:
        say_what_costs_on(asker, report.job)
    return report.exit_code or 0


def answer_left(asker: Asker, leave: Leave, *, as_json: bool) -> int:
    """Tell how a job stands that its user leaves, to programs too; return the exit code."""
    stands, way = say_what_is_left(asker.left_job(), asker.clock.now())
    status = f"gpucloud status {asker.jobs.job}"
    return left(leave.exit_code, "; ".join(stands), hint=way or status, as_json=as_json)


def say_what_is_left(left: LeftJob, now: datetime, first: Callable[[], str] = str) -> tuple[list[str], str | None]:
    """Tell, and return, which machines are left, until when they are paid, and who or which command goes on or ends.

    `first` says what has to be so before a command does either: it is asked once all else is told.
    """
    state = left.state
    told = [f"left {state.job}, which is to end" if left.ends else f"left {state.job} as it is"]
    alive = [interval.node_id for interval in state.alive]
    until = f" until {format_moment(state.paid_until, now)}" if state.paid_until else ""
    held, then = ("taken", "free again") if state.pool.market is Market.OWNED else ("paid", "off")
    comes, let_go = bool(until) and not alive and left.asked_for != 0, let_go_words(state.nodes, now)
    if alive:
        told.append(f"alive and {held}{until}, then {then} by themselves: {', '.join(alive)}")
    elif comes:  # behind an armed shut-off machines may have been asked for that no listing has shown yet
        told.append(f"no machine has been seen; one that was asked for last is {held}{until}, then {then} by itself")
    elif not let_go:
        told.append("no machines are alive")
    for line in (told := [*told, *filter(None, [let_go])]):
        tell(line)
    if (way := _way_on(left, first, machines=bool(alive), comes=comes)) is not None:
        tell(way)
    return told, way


_AGAIN = "once its store answers again: "


def _first(asker: Asker, error: GpucloudError) -> str:
    """Return what has to be so before any command can see to the job that the error has left."""
    by: GpucloudError | None = error
    # The job's store is asked as `down` asks it, unless it just went away, or, in S3, may be as far as that of its data
    # which was not reached: it would be waited for, for half a minute.
    url = asker.jobs.store.url
    if isinstance(error, DataStoreError) and error.unreached is not None and url.startswith("s3://"):
        is_its_own = f"{url}/".startswith(f"{error.unreached}/")
        return _AGAIN if is_its_own else f"{error.unreached} was not reached; if its store, {url}, is: "
    if isinstance(error, DataStoreError) or (isinstance(error, StoreError) and not error.may_pass):
        by = not_ended_by(asker)
    if isinstance(by, CredentialsError):
        return "once its credentials are valid again: "
    if not isinstance(by, StoreError):
        return ""
    return "once you may write to its store again: " if is_refused(by) else _AGAIN


def _way_on(left: LeftJob, first: Callable[[], str], *, machines: bool, comes: bool) -> str | None:
    """Return who goes on with a job that is left, or which command does; None where nothing is left to go on with."""
    job, drives_itself = left.state.job, left.state.drives_itself and left.state.group is not None
    driven, once = drives_itself and (machines or comes), "" if machines else " once that machine is there"
    if left.ends and left.supervisor is not None:
        return f"{left.supervisor} sees to its end; `gpucloud down {job}` waits for it"
    if left.ends and driven:
        return f"its own machines see to its end{once}; `gpucloud down {job}` waits for it"
    if left.ends:
        return f"nobody sees to its end now: {first()}`gpucloud down {job}` does"
    if left.state.torn_down:
        return None
    if driven:
        return f"{job} drives itself{once}; `gpucloud logs -f {job}` follows it, `gpucloud down {job}` ends it"
    is_done = left.state.status is JobStatus.SUCCEEDED  # a start means a new run then
    if drives_itself and not is_done:
        return f"nobody looks for machines until `gpucloud train {job}`; `gpucloud down {job}` ends it"
    them = "them now" if machines or comes else "it"
    ways = f"`gpucloud train {job}` goes on, `gpucloud down {job}` ends {them}"
    if is_done:
        ways = f"`gpucloud down {job}` removes what is left on the cloud"
    return f"{first()}{ways}" if machines or comes or left.state.paid_until else None


def _run(begun: Begun, leaves: bool, shown: Onlooker, interrupts: Interrupts) -> bool:  # noqa: FBT001
    cloud, start = begun.cloud, begun.start
    access = access_to(cloud, begun.known)
    means = access.to_go_on(begun.asker.state(), begun.job, start.order, reopens=start.reopens)
    session = Session(
        services=means.services,
        orders=cloud.orders(begun.known),
        watcher=shown,
        who=Supervising(leaves=leaves),
        asked=interrupts.wanted_end,
        # As it was known last: store and cloud may be what fails.
        left=lambda state, error: say_what_is_left(
            LeftJob(state=state), cloud.clock.now(), partial(_first, begun.asker, error)
        ),
    )
    offer = start.plan.offer if start.plan is not None else None
    going_on = partial(adopt, offer=offer, drills=start.order.drill, reopens=start.reopens, reruns=start.reruns)
    entering = Entering(
        order=start.order,
        over=start.over,
        spec=begun.read.spec,
        adopt=going_on,
        after_teardown=start.after_teardown,
        is_newest=begun.asker.is_newest_run,
    )
    session.run(entering)
    return bring_stored_home(cloud, begun.job, begun.known)


# Leaving a job that goes on: driven by its own machines, or by a process here in the background.


def launch(begun: Begun, *, as_json: bool) -> int:
    """Return when the machines are there, paid, and drive the job: nothing of the user's need run from then on."""
    asker = begun.asker
    try:
        run(begun, leaves=True)
    except Leave as leave:
        return answer_left(asker, leave, as_json=as_json)
    driven = _is_driven(asker)
    report = begun.report()
    if report.status.ended:
        return answer(report, as_json=as_json)
    if not driven:
        tell(f"none of its machines has taken over within {format_span(TAKES_OVER)}: `gpucloud status {begun.name}`")
    if as_json:
        say_json({**report_json(report), "plan": _plan_json(begun)})
    elif driven and report.paid_until is not None:
        say(driven_line(begun.name, report.paid_until, keep=asker.order().keep))
    else:
        say_words(report_text(report))
    if not as_json:
        tell(_how_to_go_on(begun))
    return 0


def _how_to_go_on(begun: Begun) -> str:
    """Return what can be done about a job that drives itself, and no more than what its files allow."""
    home = ", and brings its results home, then or when it has ended" if begun.job.outputs else ""
    again = "begins again at step 0" if how_it_saves(begun.job).saving in NEVER else "goes on"
    return (
        f"`gpucloud logs -f {begun.name}` follows it; `gpucloud down {begun.name}` ends it{home};"
        f" `gpucloud train {begun.name}` {again} when that time is over"
    )


_TAKING_OVER = Retry(first_s=0.25, longest_s=2.0, within_s=TAKES_OVER.total_seconds())


def _is_driven(asker: Asker) -> bool:
    """Wait until one of the job's machines holds it, or it has ended; return False where none does in time."""
    clock = asker.clock
    tries = _TAKING_OVER.begin(clock.sleep, now=lambda: clock.now().timestamp())
    while asker.supervisor() is None and not asker.stored_state().status.ended:
        if not tries.again():
            return False
    return True


def detach(begun: Begun, *, as_json: bool) -> int:
    """Start this command again in a session of its own, its story in a file; wait until it holds the job.

    Where it has left by then, what it left with is the answer here too: its error, or how the job stands.
    """
    job, order, log = begun.job, begun.start.order, begun.cloud.home.log(begun.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag, on in (("--keep", order.keep), ("--drill", order.drill)) if on]
    if job.profile_steps:
        flags += ["--profile-steps", str(job.profile_steps)]
    flags += ["--budget", f"{order.budget_usd:f} USD"]
    asker = begun.asker
    epoch = asker.state().epoch
    with log.open("ab") as out:
        said_from = out.tell()
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpucloud", "train", str(begun.read.file.resolve())),
                *("--cloud", job.cloud.value, "--adopt", "--json", *flags),  # whose run it is was asked before
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    if not _holds(asker, child):
        error = _error_of(asker, child.returncode, epoch, log, said_from)
        if error is not None:
            raise error
        return answer(begun.report(), as_json=as_json)
    if as_json:
        say_json({**report_json(begun.report()), "plan": _plan_json(begun), "log": str(log)})
    else:
        say(f"{begun.name} goes on in the background (process {child.pid})")
        tell(f"`gpucloud logs -f {begun.name}` follows it, `gpucloud status {begun.name}` says where it stands")
    return 0


def _plan_json(begun: Begun) -> dict[str, Any] | None:
    return plan_json(begun.start.plan) if begun.start.plan is not None else None


def _holds(asker: Asker, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the child itself holds the job, or has left; another supervisor may be what it is refused for."""
    while True:
        left = child.poll() is not None
        owner = asker.state().owner
        if owner is not None and (owner.pid, owner.node) == (child.pid, ""):
            return True
        if left:
            return False
        asker.clock.sleep(0.05)


def _error_of(asker: Asker, code: int, epoch: int, log: Path, since: int) -> GpucloudError | None:
    """Return what kept a child from the job that left with that code; None where it held the job and saw to its end.

    `epoch` was the last before it came, `since` where its story begins in the log.
    """
    state = asker.state()
    if code == 0 or (state.epoch > epoch and state.status.ended and state.exit_code == code):
        return None
    for line in reversed(log.read_bytes()[since:].splitlines()):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            told = json.loads(line)["error"]
            if told["exit_code"] == code:
                error = GpucloudError(str(told["message"]), hint=told["hint"])
                error.code, error.exit_code = str(told["code"]), code
                return error
    return GpucloudError(f"the process in the background ended at once with code {code}", hint=f"see {log}")
