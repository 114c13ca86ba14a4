"""The same order and the same state mean the same next step, through whichever entrance somebody comes."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gpucloud.domain.errors import BudgetRefused
from gpucloud.domain.state.order import Order
from gpucloud.domain.supervision.action import Action, OpenAttempt, Pause, Resize
from gpucloud.domain.supervision.snapshot import Limits, Readiness, Snapshot
from tests.prove import moments
from tests.prove.entrances import AWS, ENTRANCES, MACHINES, PASSES, Entered, Moment, door
from tests.prove.goal import Figure, Form, Goal
from tests.prove.kinds import OUTSIDE, Wish, kind_of, phase_of, wish_of
from tests.sim.many import each

_RUNS = {Form.SHORT: 10, Form.LONG: 64}
_STATES = {Form.SHORT: 1_000, Form.LONG: 10_000}
_KINDS = {Form.SHORT: 100, Form.LONG: 200}
_ROUND = 60
"""In the short form each state is entered once, by the entrances in turn, and each so many-th by all of them."""
_OF_A_STORM = 125
"""So many states of each storm in the short form, spread over its whole time."""
_OUTLIVED = 6
"""Of those in which ranks were ordered to be killed, so many of each storm as if they had not died of it."""
_HELD = 8
"""Of those at a job's end with machines, so many of each storm as if its script had failed, to be mended."""
_HELD_OF_FLEET = 42
_TOO_SMALL = BudgetRefused.exit_code
_TABLE = Path(__file__).with_name("expected.txt")
_LEFT = {"Pause": "gpucloud train", "refused": "gpucloud", "gave up": ""}
"""What a process leaves to somebody else, and the command that it has to name."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What some states showed: what is wrong, how many there were, their kinds, what was left to others."""

    wrong: tuple[str, ...]
    states: int
    entered: int
    kinds: frozenset[str]
    left: int


def run(form: Form) -> Iterator[Figure]:
    """Count the entrances that decide what another does not, or what the table does not expect."""
    if os.environ.get("GPUCLOUD_PROVE_RECORD"):
        sys.stderr.write(f"one-decision: {record()} moments of the fleet are recorded\n")
    fleet = moments.of_fleet()
    sets = [("the fleet", _judge([*fleet, *moments.held(fleet, _HELD_OF_FLEET)], form))]
    work = _short if form is Form.SHORT else _long
    sets += [(f"storm {seed}", judged) for seed, judged in each(work, _RUNS[form], form)]
    for name, judged in sets:
        for line in judged.wrong[:3]:
            sys.stderr.write(f"one-decision: {name}: {line}\n")
    every = [judged for _, judged in sets]
    yield Figure(name="one-decision", value=sum(len(one.wrong) for one in every), limit=0)
    states, kinds = sum(one.states for one in every), frozenset[str]().union(*(one.kinds for one in every))
    yield Figure(name="one-decision.states", value=states, limit=_STATES[form], least=True)
    yield Figure(name="one-decision.fleet-states", value=sets[0][1].states, limit=50, least=True)
    yield Figure(name="one-decision.entered", value=sum(one.entered for one in every), limit=states, least=True)
    yield Figure(name="one-decision.kinds", value=len(kinds), limit=_KINDS[form], least=True)
    yield Figure(name="one-decision.left-to-others", value=sum(one.left for one in every), limit=10, least=True)


def _short(seed: int) -> Judged:
    every = moments.of_storm(seed)
    some = (moments.spread(every, _OF_A_STORM), moments.outlived(every, _OUTLIVED), moments.held(every, _HELD))
    return _judge([one for part in some for one in part], Form.SHORT)


def _long(seed: int) -> Judged:
    every = moments.of_storm(seed)
    made = (moments.outlived(every, len(every)), moments.held(every, 4 * _HELD))
    return _judge([*every, *(one for part in made for one in part)], Form.LONG)


def _judge(found: list[Moment], form: Form) -> Judged:
    wrong: list[str] = []
    kinds: set[str] = set()
    left = entered = 0
    with door() as at:
        for number, moment in enumerate(found):
            some = form is Form.SHORT and number % _ROUND
            chosen = (ENTRANCES[number % len(ENTRANCES)],) if some else ENTRANCES
            results = {entrance: at.enter(moment, entrance) for entrance in chosen}
            entered += len(results)
            for entrance, result in results.items():
                wrong += [f"state {number}: {entrance}: {line}" for line in _wrong(entrance, moment, result)]
                left += _leaves(result)
                if result.snapshot is not None:
                    kinds.add(
                        kind_of(_wished(entrance, result.order, result.snapshot), result.snapshot, moment.rules.limits)
                    )
            wrong += [f"state {number}: {line}" for line in _at_odds(results)]
    return Judged(tuple(wrong), len(found), entered, frozenset(kinds), left)


def _wrong(entrance: str, moment: Moment, result: Entered) -> Iterator[str]:
    if entrance in AWS and result.armed:
        yield f"it moves the shut-off, to {result.armed[0]:%H:%M:%S}"
    if result.action is None or result.goal is None or result.snapshot is None:
        yield from _wrong_without(entrance, moment, result)
        return
    yield from unexpected(
        result.action, _wished(entrance, result.order, result.snapshot), result.snapshot, moment.rules.limits
    )
    if (result.goal.number, result.goal.budget_usd) != (result.order.number, result.order.budget_usd):
        yield f"it goes by order {result.goal.number} of {result.goal.budget_usd} USD, given was {result.order.number}"
    if isinstance(result.action, Pause) and _LEFT["Pause"] not in result.action.message:
        yield f"it leaves the job to others and names no command: {result.action.message}"


def _wrong_without(entrance: str, moment: Moment, result: Entered) -> Iterator[str]:
    """Nothing was decided: because nothing is left to do, or it was refused in words, or another has done it."""
    state = moment.snapshot.state
    over = state.status.ended and state.torn_down
    if entrance in MACHINES:
        ended = state.status.ended
        phase = phase_of(_wished(entrance, result.order, moment.snapshot), moment.snapshot)
        if not ended or result.gave_up != (phase == "to end"):
            yield f"{phase}: it decides nothing, and {'ends' if result.gave_up else 'leaves'} its group"
    elif entrance.startswith("budget"):
        yield from _wrong_budget(entrance, moment, result)
    elif not (over and result.code in (0, state.exit_code)) and not _is_refused(result):
        yield f"nothing is decided, exit {result.code}: {result.said.strip()[-200:]}"


def _wrong_budget(entrance: str, moment: Moment, result: Entered) -> Iterator[str]:
    if result.code == _TOO_SMALL and _is_refused(result):
        return
    raised = result.order.budget_usd > moment.order.budget_usd
    if result.code != 0 or raised != entrance.endswith("higher"):
        yield f"exit {result.code}, {result.order.budget_usd} USD: {result.said.strip()[-200:]}"


def _is_refused(result: Entered) -> bool:
    return result.code != 0 and "error: " in result.said and _LEFT["refused"] in result.said


def _leaves(result: Entered) -> bool:
    return result.gave_up or isinstance(result.action, Pause) or (result.action is None and _is_refused(result))


def _at_odds(results: dict[str, Entered]) -> Iterator[str]:
    """Who wants nothing of his own does what any other such does; so does who wants what is wanted already."""
    first = results.get(PASSES[0])
    if first is None or first.action is None:
        return
    for entrance, other in results.items():
        same = entrance in PASSES or _wish(other.order) == _wish(first.order)
        if same and entrance not in MACHINES and other.goal == first.goal and other.action not in (None, first.action):
            yield f"{entrance} does {other.action}, and {PASSES[0]} {first.action}"
        if entrance in PASSES and other.action not in (None, first.action):
            yield f"{entrance} does {other.action}, and {PASSES[0]} {first.action}"


def _wish(order: Order) -> tuple[object, ...]:
    return (order.end, order.until, order.keep, order.hold, order.drill, order.budget_usd, order.unattended)


def _wished(entrance: str, order: Order, snapshot: Snapshot) -> Wish:
    who = OUTSIDE if entrance not in MACHINES else "machine of AWS" if entrance in AWS else "machine"
    return wish_of(order, who, snapshot.now, leaves=entrance == "train --detach")


def unexpected(action: Action, wish: Wish, snapshot: Snapshot, limits: Limits) -> Iterator[str]:
    """Yield what is wrong with the action in that state, by the table and by what no line of it can say."""
    name, kind = type(action).__name__, kind_of(wish, snapshot, limits)
    rights = expected(kind)
    if rights is None:
        yield f"the table has no line for: {kind} → {name}"
    elif name not in rights:
        yield f"{kind}: {action}, and not one of {', '.join(sorted(rights))}"
    armed = snapshot.group.armed_until is not None and snapshot.group.armed_until > snapshot.now
    if isinstance(action, Resize) and action.size > snapshot.group.size and not armed:
        yield f"{action} with no shut-off ahead"
    if isinstance(action, OpenAttempt):
        fit = {node.node.id for node in snapshot.nodes if node.readiness is Readiness.READY and not node.node.relieved}
        if not set(action.node_ids) <= fit or len(action.node_ids) < wish.fewest:
            yield f"{action} of {', '.join(sorted(fit))}"


@functools.cache
def expected(kind: str) -> frozenset[str] | None:
    """Return the steps that the table has for that kind of state; None where it has no line."""
    return next((steps for pattern, steps in _lines() if fnmatchcase(kind, pattern)), None)


@functools.cache
def _lines() -> tuple[tuple[str, frozenset[str]], ...]:
    rows = (row.partition(" → ") for row in _TABLE.read_text().splitlines() if row and not row.startswith("#"))
    return tuple((pattern, frozenset(steps.split(", "))) for pattern, _, steps in rows)


def record() -> int:
    """Record the moments of the fleet anew; return how many there are."""
    return moments.record(
        lambda one: kind_of(wish_of(one.order, OUTSIDE, one.snapshot.now), one.snapshot, one.rules.limits), each=8
    )


GOAL = Goal(
    promise="train, up, down, budget, reconcile of one job or all, a CI tick and a machine that drives its own job "
    "decide alike from one order and one state as they are stored, and as a table expects that was written by hand; "
    "a machine never does what it has no right to, and says which command goes on",
    real="the command line, the driver, session, orders, lease and state with their codec, every decision; states of "
    "the embedded fleet, recorded",
    simulated="cloud, machines and market are as they were seen at the moment; most moments are those of storm",
    run=run,
)
