"""Whatever is asked of a job at one moment, by whichever command, every answer says the same of it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any
from unittest import mock

from rich.console import Console

from gpucloud.cli.render import live
from gpucloud.cli.render.onlookers import line_of, panel_state
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.supervision.action import Done
from gpucloud.domain.supervision.membership import time_left
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from tests.faults.rig import JOB
from tests.prove import moments
from tests.prove.answers import (
    Said,
    Stands,
    at_odds,
    impossible,
    objects,
    read_cell,
    read_going_on,
    read_line,
    read_money,
    read_rows,
    read_step,
    read_steps,
    read_supervisor,
    strangely_written,
)
from tests.prove.asking import Asked, Held, Window, window
from tests.prove.entrances import Moment
from tests.prove.goal import Figure, Form, Goal

_STORMS = {Form.SHORT: 9, Form.LONG: 100}
_OF_A_STORM = {Form.SHORT: 150, Form.LONG: 400}
_HELD, _HELD_OF_FLEET = 8, 42
_ROUND = {Form.SHORT: 60, Form.LONG: 6}
"""Of each state one view is asked in turn, and of each so many-th all of them."""
_CONDITIONS = 16  # of 24 that occur in storms: three of them in one storm of ten each
_STATES = {Form.SHORT: 1_000, Form.LONG: 10_000}
_ANSWERS = {Form.SHORT: 2_000, Form.LONG: 30_000}
_REFERENCE = ("status", "JOB", "--json")
_LEASE_HELD, _REFUSED, _WATCHED = 4, 2, 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One answer: what it says, and what is wrong with how it was given."""

    said: Said
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A question, and how its answer is read. `asks_if`: where it would act, or wait, it is not asked."""

    words: tuple[str, ...]
    reads: Callable[[Asked, Stands], Shown]
    asks_if: Callable[[Stands], bool] = lambda _: True


def run(form: Form) -> Iterator[Figure]:
    """Count the answers that say another thing than the others do, or a thing that cannot be."""
    sets = (None, *range(_STORMS[form]))
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        every = list(pool.map(_judged, sets, [form] * len(sets)))
    for number, judged in zip(sets, every, strict=True):
        name = "the fleet" if number is None else f"storm {number}"
        for line in judged.wrong[:8]:
            sys.stderr.write(f"views: {name}: {line}\n")
    conditions = frozenset[str]().union(*(one.conditions for one in every))
    yield Figure(name="views", value=sum(len(one.wrong) for one in every), limit=0)
    yield Figure(name="views.states", value=sum(one.states for one in every), limit=_STATES[form], least=True)
    yield Figure(name="views.answers", value=sum(one.answers for one in every), limit=_ANSWERS[form], least=True)
    yield Figure(name="views.conditions", value=len(conditions), limit=_CONDITIONS, least=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What some states showed: what is wrong, how many states and answers there were, and how jobs stood."""

    wrong: tuple[str, ...]
    states: int
    answers: int
    conditions: frozenset[str]


def _judged(seed: int | None, form: Form) -> Judged:
    """Judge the moments of the storm of that seed; without one, those of the fleet."""
    if seed is None:
        fleet = moments.of_fleet()
        return _judge([*fleet, *moments.held(fleet, _HELD_OF_FLEET)], form)
    every = moments.of_storm(seed)
    return _judge([*moments.spread(every, _OF_A_STORM[form]), *moments.held(every, _HELD)], form)


def _judge(found: list[Moment], form: Form) -> Judged:
    wrong: list[str] = []
    conditions: set[str] = set()
    answers = 0
    with window() as at:
        for number, moment in enumerate(found):
            held = tuple(Held)[number % len(Held)]
            at.lay(moment, held)
            stands, lines = _reference(at, held)
            wrong += [f"state {number}, {held.value}: {line}" for line in lines]
            answers += 1
            if stands is None:
                continue
            conditions.add(stands.told["condition"])
            asked = [view for view in VIEWS if view.asks_if(stands)]
            if number % _ROUND[form]:
                asked = [asked[number // len(Held) % len(asked)]]
            told = {view.words: _shown(at, view, stands) for view in asked}
            answers += len(told)
            for words, shown in told.items():
                called = f"state {number}, {held.value}: {' '.join(words)}"
                wrong += [f"{called}: {line}" for line in (*shown.wrong, *at_odds(shown.said, stands))]
            phrases = {shown.said.phrase: words for words, shown in told.items() if shown.said.phrase is not None}
            if len(phrases) > 1:
                wrong.append(f"state {number}, {held.value}: it is called {' and '.join(map(str, phrases))}")
    return Judged(wrong=tuple(wrong), states=len(found), answers=answers, conditions=frozenset(conditions))


def _reference(at: Window, held: Held) -> tuple[Stands | None, list[str]]:
    """Return the job as `status JOB --json` tells it, and what is wrong with that by itself."""
    asked = at.ask(*_REFERENCE)
    if asked.fault is not None or asked.code != 0:
        return None, [f"{' '.join(_REFERENCE)}: exit {asked.code}, {asked.fault or asked.err}"]
    told = next(objects(asked.out))
    stands = Stands(told=told, held=held, now=at.moment.snapshot.now, exit_code=at.state.exit_code or 0)
    return stands, list(impossible(stands))


def _shown(at: Window, view: View, stands: Stands) -> Shown:
    if view.words == _PANEL:
        return _of_who_supervises(at)
    asked = at.ask(*view.words)
    if asked.fault is not None:
        return Shown(said=Said(), wrong=(asked.fault.strip().splitlines()[-1],))
    try:
        shown = view.reads(asked, stands)
    except (StopIteration, KeyError, ValueError) as error:
        return Shown(said=Said(), wrong=(f"it is not understood ({error!r}): {asked.out[:300]} {asked.err[:300]}",))
    wrong = list(shown.wrong)
    if "nobody supervises" in f"{asked.out}{asked.err}".lower() and not (stands.held.is_free and stands.is_open):
        wrong.append("nobody supervises it, it says")
    return Shown(said=shown.said, wrong=tuple(wrong))


# How each answer is read.


def _ends(asked: Asked, code: int) -> tuple[str, ...]:
    return () if asked.code == code else (f"exit {asked.code}, and not {code}: {asked.err.strip()[-200:]}",)


def _report(asked: Asked, stands: Stands) -> Shown:
    return Shown(said=_of_report(asked.out), wrong=_ends(asked, 0))


def _of_report(text: str) -> Said:
    head = next((line for line in text.splitlines() if line.startswith(f"{JOB}: ")), "")
    line = read_line(head, f"{JOB}: ")
    return Said(
        phrase=line.phrase,
        condition=line.condition,
        supervisor=read_supervisor(head) or "",
        reached=read_step(head),
        **read_money(text),  # type: ignore[arg-type]
        **read_rows(text),  # type: ignore[arg-type]
        **read_steps(text),  # type: ignore[arg-type]
    )


def _list(asked: Asked, stands: Stands) -> Shown:
    line = read_line(asked.out, f"{JOB} ")
    money = read_money(asked.out)
    said = Said(phrase=line.phrase, condition=line.condition, spent=money["spent"], budget=money["budget"])
    return Shown(said=replace(said, reached=read_cell(asked.out)), wrong=_ends(asked, 0))


def _watched(asked: Asked, stands: Stands) -> Shown:
    line = read_line(asked.out, f"{JOB}: ")
    said = Said(phrase=line.phrase, condition=line.condition, **read_money(asked.out))  # type: ignore[arg-type]
    said = replace(said, reached=read_step(asked.out.partition("\n")[0]))
    return Shown(said=said, wrong=_ends(asked, _watch_code(stands)))


def _watch_code(stands: Stands) -> int:
    """It ends by itself once nothing more will change, and until then by Ctrl-C."""
    stays = stands.told["condition"] in ("held", "kept") or not stands.told["nodes"]
    return 0 if not stands.is_open and stays else _WATCHED


def _budget(asked: Asked, stands: Stands) -> Shown:
    line = read_line(asked.out, f"{JOB}: ")
    money, rows = read_money(asked.out), read_rows(asked.out)
    said = Said(phrase=line.phrase, condition=line.condition, **money, **rows)  # type: ignore[arg-type]
    return Shown(said=said, wrong=_ends(asked, 0))


def _cost(asked: Asked, stands: Stands) -> Shown:
    said = Said(**read_money(asked.out), **read_rows(asked.out))  # type: ignore[arg-type]
    return Shown(said=said, wrong=_ends(asked, 0))


def _cost_of_all(asked: Asked, stands: Stands) -> Shown:
    row = next((line for line in asked.out.splitlines() if line.startswith(f"{JOB} ")), None)
    sums = [word for word in (row or "").split() if word.count(".") == 1]
    said = Said(spent=sums[-1] if sums else "0")
    return Shown(said=said, wrong=_ends(asked, 0))


def _refused(asked: Asked, stands: Stands) -> Shown:
    """`rm` says of an unfinished job how it stands, or what is left of one that has ended."""
    line = read_line(asked.err, f"error: {JOB} is not over: ")
    wrong = list(_ends(asked, _REFUSED))
    by, condition = stands.told["supervisor"], stands.told["condition"]
    rest = {
        "held": "has failed, and its machines wait for a mended",
        "kept": "has succeeded, and its machines are kept for a look",
        "ending": f"and {by} still ends its machines",
        "not_torn_down": "and is not wound up",
        "ended": "nothing is deleted: gpucloud rm",
    }
    has_saved = condition == "ended" and "--with-checkpoints deletes them too" in asked.err
    if condition in rest and rest[condition] not in asked.err and not has_saved:
        wrong.append(f"it is {condition}, and it says {asked.err.strip()[:200]}")
    if condition not in rest and line.phrase is None:
        wrong.append(f"it says nothing of it: {asked.err.strip()[:200]}")
    return Shown(said=line, wrong=tuple(wrong))


def _passed(asked: Asked, stands: Stands) -> Shown:
    """After a pass, the report; what another supervises it leaves, and names whom."""
    if not stands.held.is_free:
        return _held_by_another(asked, stands)
    return Shown(said=_of_report(asked.out), wrong=_ends(asked, stands.exit_code))


def _held_by_another(asked: Asked, stands: Stands) -> Shown:
    return Shown(said=Said(supervisor=read_supervisor(asked.err) or ""), wrong=_ends(asked, _LEASE_HELD))


def _passed_all(asked: Asked, stands: Stands) -> Shown:
    """A job that is over has no row; what another supervises is none of its failures."""
    if stands.is_over:
        return Shown(said=Said(), wrong=() if "no job has anything to do" in asked.out else (asked.out,))
    line = read_line(asked.out, f"{JOB} ")
    named = read_supervisor(asked.out) or "" if not stands.held.is_free else None
    said = Said(phrase=line.phrase, condition=line.condition, supervisor=named)
    return Shown(said=said, wrong=_ends(asked, stands.exit_code if stands.held.is_free and not stands.is_open else 0))


def _begun(asked: Asked, stands: Stands) -> Shown:
    if not stands.held.is_free:
        return _held_by_another(asked, stands)
    return Shown(said=Said(reached=read_going_on(asked.err)), wrong=_ends(asked, 0))


def _asks_for_its_end(asked: Asked, stands: Stands) -> Shown:
    by = stands.told["supervisor"]
    wrong = () if f"asking {by} to end {JOB}" in asked.err else (f"it asks nobody: {asked.err.strip()[:200]}",)
    return Shown(said=Said(), wrong=wrong)


def _same(*, visits: bool = True, code: Callable[[Stands], int] = lambda _: 0) -> Callable[..., Shown]:
    """Return what reads an object that is to be the reference's, key by key, as far as it has them.

    Without `visits` the nodes of a job that somebody supervises are not asked: how they are used, and what only their
    pace tells, is missing then, and the step is that of a time which is told.
    """

    def reads(asked: Asked, stands: Stands) -> Shown:
        told = next(objects(asked.out))
        if code is _passed_code and asked.code == _LEASE_HELD:
            return _held_by_another(asked, stands)
        if "jobs" in told:
            (told,) = told["jobs"]
        wrong = [*_ends(asked, code(stands)), *strangely_written(told)]
        expected, told = (one if visits else _unvisited(one, stands.held) for one in (stands.told, told))
        keys = [key for key in expected if key in told and told[key] != expected[key]]
        wrong += [f"{key} is {told[key]}, and the reference has {expected[key]}" for key in keys]
        return Shown(said=Said(), wrong=(*wrong, *_counted_twice(told)))

    return reads


def _unvisited(told: dict[str, Any], held: Held) -> dict[str, Any]:
    """Return what is told of a job without what nobody but its nodes knows; where nobody has it, they are asked."""
    if held.is_free:
        return told
    gone = {key: None for key in ("use", "last_step_at") if key in told}
    return {**told, **gone, "spend": {**told["spend"], "forecast_usd": None, "budget_ends_at": None}}


def _passed_code(stands: Stands) -> int:
    return stands.exit_code if stands.held.is_free else _LEASE_HELD


def _counted_twice(told: dict[str, Any]) -> Iterator[str]:
    """Charges make up what is spent, however they are summed."""
    for key in ("charges", "by_attempt", "by_node"):
        if key in told:
            found = sum((Decimal(one["usd"]) for one in told[key]), Decimal(0))
            if found != Decimal(told["spend"]["spent_usd"]):
                yield f"{key} come to {found}, and {told['spend']['spent_usd']} is spent"


def _passed_all_json(asked: Asked, stands: Stands) -> Shown:
    jobs = next(objects(asked.out))["jobs"]
    if stands.is_over:
        return Shown(said=Said(), wrong=() if jobs == [] else (f"it has {jobs}",))
    (told,) = jobs
    wrong = [
        f"{key} is {told.get(key)}, and the reference has {stands.told[key]}"
        for key in ("status", "condition", "supervisor")
        if told.get(key, "nothing") != stands.told[key]
    ]
    return Shown(said=Said(), wrong=tuple(wrong))


def _of_who_supervises(at: Window) -> Shown:
    """What the one who supervises shows at its pass: the panel of a terminal, and a plain line."""
    snapshot, state, wrong = at.moment.snapshot, at.state, []
    jobs = JobStore(at.store, JOB)
    tracker = SpendTracker(jobs, at.market)
    unproven = tracker.unproven_usd(state, snapshot.group, snapshot.now)
    spend = tracker.spend(state, snapshot.group, snapshot.now, at.moment.order.budget_usd, PrepaidRule(), unproven)
    now = panel_state(snapshot, Done(), spend.for_job_of(time_left(snapshot), at.moment.order.deadline_at))
    console = Console(file=io.StringIO(), width=160)
    with mock.patch.object(live, "Live"):
        console.print(live._panel(now, (), 160))
    panel, plain = console.file.getvalue(), line_of(now)  # type: ignore[attr-defined]
    if read_money(panel) != read_money(plain):
        wrong.append(f"the panel says {read_money(panel)}, and a line {read_money(plain)}")
    if state.status.ended and now.phase not in ("tearing down", "failed, machines held", "succeeded, machines kept"):
        wrong.append(f"it has ended, and the panel says {now.phase}")
    return Shown(said=Said(**read_money(panel)), wrong=tuple(wrong))  # type: ignore[arg-type]


_PANEL = ("the panel",)
VIEWS = (
    View(words=("status", "JOB"), reads=_report),
    View(words=("status",), reads=_list),
    View(words=("status", "--json"), reads=_same(visits=False)),
    View(words=("watch", "JOB"), reads=_watched),
    View(words=("watch", "JOB", "--json"), reads=_same(code=_watch_code)),
    View(words=("budget", "JOB"), reads=_budget),
    View(words=("budget", "JOB", "--json"), reads=_same(visits=False)),
    View(words=("cost", "JOB"), reads=_cost),
    View(words=("cost", "JOB", "--json"), reads=_same()),
    View(words=("cost", "--all"), reads=_cost_of_all),
    View(words=("cost", "--all", "--json"), reads=_same(visits=False)),
    View(words=("rm", "JOB"), reads=_refused),
    View(words=("reconcile", "JOB"), reads=_passed),
    View(words=("reconcile", "JOB", "--json"), reads=_same(visits=False, code=_passed_code)),
    View(words=("reconcile", "--all"), reads=_passed_all),
    View(words=("reconcile", "--all", "--json"), reads=_passed_all_json),
    View(words=("down", "JOB"), reads=_report, asks_if=lambda stands: stands.is_over),
    View(
        words=("down", "JOB"),
        reads=_asks_for_its_end,
        asks_if=lambda stands: not (stands.held.is_free or stands.is_over),
    ),
    View(words=("train", "FILE"), reads=_begun, asks_if=lambda stands: stands.is_open),
    View(words=_PANEL, reads=_report, asks_if=lambda stands: stands.held is Held.ELSEWHERE),
)


GOAL = Goal(
    promise="whatever is asked of a job at one moment, every answer says the same: how it stands, what is spent, "
    "unproven and left, the rate, the steps trained and saved, by when it is off, and who supervises it",
    real="the command line from its words to what it writes, the store's codec, lease, ledger and money; states of "
    "the embedded fleet, recorded",
    simulated="cloud, machines and prices stand still as they were seen; most moments are those of storm; a pass of "
    "reconcile finds nothing to do, and who would act stops there",
    run=run,
)
