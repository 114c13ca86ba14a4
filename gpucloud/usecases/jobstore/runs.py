"""The runs of a job in a store: `digits`, then `digits-2`, …; whose a run is, and what a start changes of it.

Each run's order says of which job it is which run.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from decimal import Decimal
from itertools import pairwise

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.errors import GpucloudError, StoreError, StrangersRun, UsageError
from gpucloud.domain.job.code import files_in
from gpucloud.domain.job.quantities import counted, format_usd
from gpucloud.domain.job.spec import NOT_IN_FILE, Job
from gpucloud.domain.node.launch import REACHES_SCRIPT, reaching
from gpucloud.domain.state.order import Order, begins_anew, is_of_another_file, run_of
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.domain.supervision.membership import since_anew, unit_of
from gpucloud.domain.untrusted import in_one_line
from gpucloud.ports import Clock
from gpucloud.store import ObjectStore
from gpucloud.store.contract import NoBucket
from gpucloud.usecases.jobstore.condition import ConditionKind
from gpucloud.usecases.jobstore.jobstore import JobStore, job_names
from gpucloud.usecases.jobstore.orders import Given, Orders, Reader, caller, is_strangers


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A run as it stands in the store."""

    name: str
    state: JobState
    given: Given

    def begins_anew(self, job: Job, now: datetime, *, again: bool) -> bool:
        """Whether a start by that job file begins a new run after this one."""
        order = self.given.order
        return begins_anew(order, self.state, again=again, deadline=job.deadline, now=now)


def current_run(store: ObjectStore, base: str, clock: Clock) -> Found | None:
    """Return a job's newest run; None when there is none, or no store yet.

    A name proves nothing: `digits-2` is the second run of `digits`, or a job that is called so.
    """
    found: list[Found] = []
    try:
        names = job_names(store)
    except NoBucket:
        return None
    for name in names:
        jobs = JobStore(store, name)
        given = Orders(jobs=jobs, clock=clock).given() if may_be_run(base, name) else None
        loaded = jobs.believed() if given is not None and given.order.base == base else None
        if given is not None and loaded is not None:
            found.append(Found(name=name, state=loaded[0], given=given))
    return max(found, key=lambda one: one.given.order.run, default=None)


def require_own(found: Found, job: Job, spec_sha256: str, host: str, way: str, reader: Reader | None = None) -> None:
    """UsageError for a run that another job file began: two jobs of one name would go on with each other's weights.

    `way` is how it can be meant all the same. With a `reader`, a stranger's run is another's, whatever its file: that
    raises StrangersRun, for pipelines take a wrong command (2) for one that has nothing to end.
    """
    order, other = found.given.order, found.given.order.resolved.source
    is_there = order.host == host and other.is_file() and not other.samefile(job.source)
    strangers = is_strangers(found.given, host, reader)
    if not is_of_another_file(order, job, spec_sha256, is_there=is_there, is_strangers=strangers):
        return
    whose = f"{other}" if order.host == host else f"{other} of {order.by}"
    stands = f", {found.state.status.value if found.state.status.ended else 'unfinished'}{_at_step(found.state)}"
    mine, whence, same = job.source.parent.name, f", and {job.source} is another job file of that name", ""
    error: type[GpucloudError] = UsageError
    if strangers:
        error = StrangersRun
        mine, whence = caller().partition("@")[0], ", ordered from another home by nobody whom you trust"
        same = (
            "; if you gave it elsewhere, `gpucloud keys add NAME KEY` with what `gpucloud keys` shows there"
            "; in a pipeline, one GPUCLOUD_SSH_KEY for all its runners (`gpucloud ci init`), or --adopt"
        )
    free = re.sub(r"[^a-z0-9]+", "-", mine.lower()).strip("-") or "2"
    raise error(
        f"{found.name} is a run of {whose}{stands}{whence}", hint=f"name: {job.name}-{free} in this file{same}; {way}"
    )


def _at_step(state: JobState) -> str:
    told = [(unit_of(one, state.checkpoint), one.last_step or 0) for one in since_anew(state.attempts) if one.last_step]
    return f" at {told[-1][0].named(max(step for unit, step in told if unit is told[-1][0]))}" if told else ""


def next_run(base: str, last: int, taken: Collection[str]) -> tuple[str, int]:
    """Return name and number of a job's next run after its `last`, with no name that another job has."""
    number = last + 1
    while (name := base if number == 1 else f"{base}-{number}") in taken:
        number += 1
    return name, number


def may_be_run(base: str, name: str) -> bool:
    """Whether a run of that name may be one of the job's; its order says whether it is."""
    return run_of(base, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class InItsPlace:
    """What it takes to have another script run in place of an attempt that goes on: its end, and another start.

    `usd` is what the start must find free, None where that, or a start before the deadline, is more than is left.
    With `resumes` it goes on from what is saved by then; `saved`: something is already, how much is not known here.
    """

    usd: Decimal | None
    saved: bool
    resumes: bool

    def told(self, job: str) -> str:
        """Return how it is had, and what it costs; or that it cannot be."""
        if self.usd is None:
            return "too little is left, of the budget or until the deadline, to start it as it is now in its place"
        costs = f"; another start needs {format_usd(self.usd)} of the budget free" if self.usd else ""
        if not self.resumes:
            whence = "from its beginning: nothing of this attempt is saved"
        else:
            whence = f"from what is saved by then{'' if self.saved else ', else from its beginning'}"
        return f"`gpucloud down {job}`, then the same start, has the script run as it is now, {whence}{costs}"


def edited_files(jobs: JobStore, packed: bytes | None, before: Order, order: Order) -> tuple[str, ...]:
    """Return which files of the code, the job file apart, are others than at the last start, are new or are gone.

    `packed` is the code as it is now. None where that cannot be told.
    """
    if packed is None:
        return ()
    try:
        was, now = _files_at(jobs, before.code_sha256), files_in(packed)
    except (StoreError, ValueError):
        return ()
    apart = {before.resolved.path_in_code, order.resolved.path_in_code}
    return tuple(path for path in sorted({*was, *now} - apart) if was.get(path) != now.get(path))


_LISTED = 1 << 20  # bytes: some thousands of files


def _files_at(jobs: JobStore, code_sha256: str) -> dict[str, str]:
    with suppress(ValueError):  # a longer list, which is cut off there
        return files_in(jobs.code_begin(code_sha256, _LISTED))
    return files_in(jobs.code(code_sha256))


def changes_between(
    before: Order,
    order: Order,
    running: Attempt | None,
    anew: InItsPlace,
    heard: ConditionKind | None,
    files: Callable[[Order, Order], tuple[str, ...]],
) -> tuple[str, ...]:
    """Return what an order has otherwise than the one before, a sentence each, as its user is told.

    `files` tells which of its code are others, and so whether an edit was meant: what `cp` brought there is code, too.

    Where nothing can be resumed, nothing is said of how exact that is. An attempt that is `running` goes on without it
    where it is outdated under the new order, unless its user has it started `anew`; as far as it was `heard` to train.
    """
    trained = heard is ConditionKind.TRAINED
    changes, resumes = [], anew.resumes and not trained
    if order.spec_sha256 != before.spec_sha256:
        how = ": resuming is best effort, not exact" if _reaching(before, order) and resumes else ""
        keys = _differing(before, order)
        changes.append(f"the job file differs from the one of the last start in {keys}{how}")
    if _has_other_code(before, order):
        how = ", and resumes best effort, not exact" if resumes else ""
        runs = f": the next attempt runs it{how}" if not trained else ""
        if running is not None and not running.outdated:
            runs = f": it is that which attempt {running.number} runs"
        changes.append(f"the code differs from that of the last start{_named(files(before, order))}{runs}")
    if running is not None and running.outdated and runs_otherwise(before, order):
        changes.extend(_of_outdated(running, order.job, anew, heard))
    if order.budget_usd != before.budget_usd:
        changes.append(f"budget: {format_usd(before.budget_usd)} → {format_usd(order.budget_usd)}")
    return tuple(changes)


_NAMED = 3


def _named(files: tuple[str, ...]) -> str:
    """Return which files, as words to go behind; the first ones of many."""
    more = f" and {counted(len(files) - _NAMED, 'more file')}" if len(files) > _NAMED else ""
    return in_one_line(f" in {', '.join(files[:_NAMED])}{more}") if files else ""


def _of_outdated(running: Attempt, job: str, anew: InItsPlace, heard: ConditionKind | None) -> Iterator[str]:
    """Yield what becomes of an attempt that runs another script; nothing of one that is known to be over."""
    if heard is ConditionKind.TRAINED:
        yield (
            f"attempt {running.number} has trained as it was started:"
            " the same start, once this run is over, begins a new one with the script as it is now"
        )
    elif heard in (None, ConditionKind.TRAINING, ConditionKind.UNSUPERVISED, ConditionKind.HANDING_OVER):
        yield (
            f"attempt {running.number} goes on as it was started, to the end of its script if nothing interrupts it:"
            f" {anew.told(job)}"
        )
    elif heard is ConditionKind.SILENT:
        yield (
            f"attempt {running.number}, which nobody hears, may go on as it was started, to the end of its script:"
            f" {anew.told(job)}"
        )


def outdated(state: JobState, script: str) -> JobState:
    """Return the state whose next attempt runs that script (`script_of`): attempts that ran another are outdated.

    One that ran this very script is none, or no more: an edit was taken back. How many steps another had counts no
    longer: the work left would be reckoned by it until it tells its own.
    """
    attempts = tuple(replace(one, outdated=one.script != script) for one in state.attempts)
    ended = (replace(a, total_steps=None) if a.outdated and a.reason is not None else a for a in attempts)
    return replace(state, attempts=tuple(ended))


_STEPS = re.compile(r"(?:(?:max|total|num|n|train|training)[_-]?)*(?:steps|iters|iterations)", re.IGNORECASE)


def require_steps_left(before: Order, order: Order, state: JobState) -> None:
    """UsageError for a run that was made shorter than what it has saved: its script would refuse that on machines.

    How many steps it has is the script's own word, of its last attempt. Where a word of `run:`, or a variable, said
    that number, and nothing else has changed that reaches the script, what it says now is the number of them. A script
    that saves by itself may do with them what it likes, and one that saves nothing begins at 0.
    """
    saved, last = state.checkpoint, state.attempts[-1] if state.attempts else None
    if saved is None or saved.counts is not Counts.STEPS or last is None or last.outdated:
        return
    sections = before.resolved.checkpoint, order.resolved.checkpoint
    if _has_other_code(before, order) or any(one.none or one.directory is not None for one in sections):
        return
    then, now = _words_of(before.resolved), _words_of(order.resolved)
    changed = [pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]]
    if len(then) != len(now) or len(changed) != 1:
        return
    [((name, was), (name_now, steps))] = changed
    is_length = name == name_now and _STEPS.fullmatch(name) and was == str(last.total_steps)
    if is_length and steps.isdecimal() and int(steps) < saved.step:
        raise UsageError(
            f"the checkpoint of {state.job} is of step {saved.step}, and `{name}` is {steps} now: it is over already",
            hint=f"make `{name}` more than {saved.step} to go on, or give the job another `name:` to begin at step 0",
        )


def _words_of(job: Job) -> tuple[tuple[str, str], ...]:
    """Return each word of the command line, and each variable, with what stands before it: its option or its name."""
    words = shlex.split(job.run)
    named = [
        (name.rpartition(".")[2].lstrip("-"), value) if equals else (before.lstrip("-"), word)
        for before, word in pairwise(("", *words))
        for name, equals, value in (word.partition("="),)
    ]
    return (*named, *job.env)


def runs_otherwise(before: Order, order: Order) -> bool:
    """Whether an attempt under the order runs other code than one under the one before, or is started otherwise."""
    return _has_other_code(before, order) or any(
        getattr(before.resolved, name) != getattr(order.resolved, name) for name in REACHES_SCRIPT
    )


def keys_that_differ(before: Job, now: Job) -> tuple[str, ...]:
    """Return the keys of which a job file says something else than it did, sections as a whole."""

    def said(job: Job, name: str) -> object:
        return os.path.relpath(job.code, job.source.parent) if name == "code" else getattr(job, name)

    names = [one.name for one in fields(Job) if one.name not in NOT_IN_FILE]
    return tuple(name.removesuffix("_usd") for name in names if said(before, name) != said(now, name))


def _differing(before: Order, now: Order) -> str:
    keys = keys_that_differ(before.resolved, now.resolved)
    if not keys:
        return "its text alone, and in no key"
    told = _reaching(before, now)
    reaches = f" (what reaches the script: {', '.join(told)})" if told else ""
    return f"{', '.join(keys)}{reaches}"


def _reaching(before: Order, now: Order) -> list[str]:
    names = reaching(now.resolved, now.code_sha256)
    return [name for name in names if getattr(before.resolved, name) != getattr(now.resolved, name)]


def _has_other_code(before: Order, order: Order) -> bool:
    return bool(before.code_sha256) and _code_of(order, before) != _code_of(before, order)


def _code_of(order: Order, other: Order) -> str:
    """Return what an order's code is, the job file apart where both orders know it so."""
    known = order.resolved.own_code_sha256 and other.resolved.own_code_sha256
    return order.resolved.own_code_sha256 if known else order.code_sha256
