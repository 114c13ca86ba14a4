"""Every command at every moment of a job's life, twice, from two places, and struck: nothing waits, nothing is lost."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.domain.money.ledger import Terms, meter, total
from gpucloud.domain.node.node import EndCause, Node
from gpucloud.domain.state.order import opened
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.commandline import LIMIT_S, Answer, CommandLine, command_line
from tests.fakes.agent import Training
from tests.faults.rig import AWAY, JOB
from tests.faults.together import Command, Event, Together
from tests.prove.goal import Figure, Form, Goal

_FILE = f"{JOB}.yaml"
_ON_FLEET = 32
_STORIES = {Form.SHORT: 36, Form.LONG: 1000}
_HOURS = 4.0
"""Longer than a lease, a bootstrap, a training and every prepaid time together."""
_TRIES = 4
_NODES = 2
_CODES = {0, 2, 3, 4, 10, 11, 12, 13, 14, 15, 16, 20, 21, 30, 129, 130, 137, 143}

_FIRST = (("train", _FILE), ("train", _FILE, "--drill"), ("train", _FILE, "--keep"), ("up", _FILE))
_SECOND = (
    ("down", JOB), ("down", _FILE), ("train", _FILE), ("up", _FILE), ("train", _FILE, "--keep"), ("reconcile", JOB),
    ("reconcile", "--all"), ("budget", JOB, "0.22 USD"), ("budget", JOB, "0.40 USD"), ("budget", JOB, "3 USD"),
    ("status", JOB, "--json"),
    ("cost", JOB), ("logs", JOB), ("budget", JOB),
)  # fmt: skip
_BUDGETS = ("1 USD", "0.40 USD", "0.25 USD", "0.18 USD")
"""From what is never used up to what a job of these machines just needs to begin."""
_LIFE = 240
"""About so many calls has an undisturbed life; a strike that comes later comes after it."""


@dataclass(slots=True)
class Told:
    """One story: what happened, how each command ended, and what is wrong."""

    seed: int
    happened: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    commands: int = 0
    events: int = 0
    broken: int = 0

    def __str__(self) -> str:
        return f"story {self.seed}: {'; '.join(self.happened)}: {'; '.join(self.wrong)}"


def story(seed: int) -> Told:
    """Let one story happen, drawn from the seed, and judge it."""
    told = Told(seed)
    with tempfile.TemporaryDirectory(prefix="gpucloud-story-") as folder:
        together = Together(Path(folder), seed)
        together.outside.training = Training(nodes=_NODES, steps=60, every=8)
        with together.world():
            _happen(together, told)
            _end(together, told)
    return told


def _happen(together: Together, told: Told) -> None:
    """A first command, and at moments of its life others, from here or elsewhere, and blows to any of them."""
    dice = together.dice
    together.breaks = dice.choice((0, 0, 1, 2))
    together.write_file(dice.choice(_BUDGETS))
    first = together.start(*dice.choice(_FIRST), terminal=_terminal(dice))
    for at in sorted(dice.sample(range(1, _LIFE), dice.choice((1, 1, 2, 3)))):
        first.events.append(_event(together, at, deep=True))
    together.run(hours=_HOURS)
    for _ in range(dice.choice((0, 1, 1, 2))):  # when all have ended: at once, or when what was kept is nearly over
        together.pass_by(timedelta(seconds=dice.choice((0, 30, 600, 3000))))
        _others(together, dice.choice(_SECOND), dice.choice(("laptop", "ci")), dice.choice((1, 1, 2)))
        together.run(hours=_HOURS)
    for command in together.commands:
        told.happened.append(_tale(command))
        told.events += len(command.happened)
    told.commands = len(together.commands)
    told.wrong += _overstated(together)
    told.wrong += _left_waiting(together)
    told.wrong += [w for command in together.commands for w in _wrong_words(command)]


def _event(together: Together, at: int, *, deep: bool) -> Event:
    dice = together.dice
    kind = dice.choice(("other", "other", "twice", "blow", "blow", "sleep", "offline", "edit", "lower"))
    if kind in {"other", "twice"} and deep:
        words, host = dice.choice(_SECOND), dice.choice(("laptop", "laptop", "ci"))
        again = 2 if kind == "twice" else 1
        return Event(at, f"{again} × {' '.join(words)} on {host}", lambda _: _others(together, words, host, again))
    if kind == "sleep":
        seconds = dice.choice((20.0, 90.0, 900.0, 2400.0))
        return Event(at, f"asleep for {seconds:g} s", lambda command: command.process.pause(seconds))
    if kind == "offline":
        seconds = dice.choice((3.0, 30.0, 300.0))
        return Event(at, f"offline for {seconds:g} s", lambda command: _cut(command, seconds))
    if kind == "edit":
        return Event(at, "the code is edited", lambda _: _edit(together))
    if kind == "lower":
        return Event(at, "the file's budget is lowered", lambda _: _lower(together))
    return _blow(dice, at)


def _blow(dice: random.Random, at: int) -> Event:
    name, numbers = dice.choice((
        ("SIGKILL", ()), ("Ctrl-C", (signal.SIGINT,)), ("Ctrl-C twice", (signal.SIGINT, signal.SIGINT)),
        ("SIGTERM", (signal.SIGTERM,)), ("closed terminal", (signal.SIGHUP,)),
    ))  # fmt: skip

    def strike(command: Command) -> None:
        if not numbers:
            command.die(137)
        for number in numbers:
            command.send(number)

    return Event(at, name, strike)


def _others(together: Together, words: tuple[str, ...], host: str, times: int) -> None:
    dice = together.dice
    for _ in range(times):
        other = together.start(*words, host=host, terminal=_terminal(dice))
        if dice.random() < 0.4:
            other.events.append(_event(together, dice.randrange(1, 60), deep=False))


def _terminal(dice: random.Random) -> str | None:
    return dice.choice((None, None, "s\n", "c\n", "d\n", ""))


def _cut(command: Command, seconds: float) -> None:
    command.offline_until = command.process.loom.now + seconds


def _edit(together: Together) -> None:
    together.script.write_text("print('edited')\n")


def _lower(together: Together) -> None:
    together.write_file("0.20 USD")


def _tale(command: Command) -> str:
    befell = f" [{', '.join(command.happened)}]" if command.happened else ""
    return f"{' '.join(command.words)} on {command.process.host}{befell} → {command.code}"


def _overstated(together: Together) -> Iterator[str]:
    """Where no command was ended in the middle, no state says that machines are paid longer than the cloud has them."""
    if any(command.code != 0 for command in together.commands):
        return
    for name in runs(together):
        loaded = JobStore(together.outside.store, name).load()
        view = together.outside.cloud.describe(f"gpucloud-{name}")
        promised = loaded[0].paid_until if loaded is not None else None
        if view.alive and promised is not None and (view.armed_until is None or promised > view.armed_until):
            yield f"{name} is said to be paid until {promised}, and the cloud ends it at {view.armed_until}"


def _left_waiting(together: Together) -> Iterator[str]:
    for command in together.commands:
        if command.code is None:
            yield f"`{' '.join(command.words)}` still waits after {_HOURS:g} hours: {_last(command)}"
            command.process.kill()


def _wrong_words(command: Command) -> Iterator[str]:
    said = command.err.getvalue()
    if command.code not in {None, *_CODES} or "a fault of gpucloud itself" in said or "Traceback" in said:
        yield f"`{' '.join(command.words)}` ends with {command.code}: {_last(command)}"


def _last(command: Command) -> str:
    return command.err.getvalue().strip()[-300:]


def _end(together: Together, told: Told) -> None:
    """Nobody comes for longer than anything is paid; then the job is looked at and ended."""
    outside = together.outside
    told.wrong += [f"not armed: {breach}" for breach in outside.breaches[:2]]
    if outside.most > 2 * _NODES:
        told.wrong.append(f"{outside.most} machines lived at once, {_NODES} are wanted")
    together.pass_by(timedelta(seconds=AWAY))
    told.wrong += [f"{node.id} lives on, long after all was paid" for node in _alive(together)]
    names = runs(together)
    for name in names:
        told.wrong += _unreadable(together, name) if outside.home.find(name) is not None else ()
        told.wrong += _cannot_end(together, name)
    told.wrong += [f"{node.id} is alive in the end" for node in _alive(together)]
    told.wrong += [f"left over: group {group}" for group in outside.cloud.names]
    told.wrong += [line for name in names for line in _wrong_books(together, name)]
    told.wrong += [line for name in names for line in _lost_outputs(together, name)]
    told.broken = together.broken
    told.wrong += [
        f"attempt {attempt} began at step {first}, with {committed} committed"
        for fleet in outside.shell.fleets.values()
        for attempt, first, committed in fleet.resumed
        if first != committed + 1
    ]


def runs(together: Together) -> tuple[str, ...]:
    """Return the names of the runs that the store knows."""
    keys = together.outside.store.list("jobs/")
    return tuple(sorted({key.split("/")[1] for key in keys if key.endswith("/state.json")}))


def _alive(together: Together) -> list[Node]:
    cloud = together.outside.cloud
    return [node for group in cloud.names for node in cloud.describe(group).alive]


def _unreadable(together: Together, name: str) -> Iterator[str]:
    looked = together.await_end("status", name, "--json")
    try:
        json.loads(looked.said)
    except ValueError:
        yield f"status {name} ends with {looked.code} and is not readable: {_last(looked)}"


def _cannot_end(together: Together, name: str) -> Iterator[str]:
    outside = together.outside
    if outside.home.find(name) is None and not outside.cloud.launched_for(f"gpucloud-{name}"):
        return  # struck before it was known here: nothing was rented, and the next `train` goes on with it
    for _ in range(_TRIES):
        ended = together.await_end("down", name)
        if ended.code == 0:
            return
        together.pass_by(timedelta(seconds=60))
    yield f"down {name} ends with {ended.code} {_TRIES} times: {_last(ended)}"


def _wrong_books(together: Together, name: str) -> Iterator[str]:
    """The ledger has a bill for each machine that the cloud started for the run, and no other; within the budget."""
    outside, jobs = together.outside, JobStore(together.outside.store, name)
    loaded = jobs.load()
    if loaded is None:
        yield f"{name} has no state"
        return
    state, charges = loaded[0], jobs.charges()
    launched = outside.cloud.launched_for(f"gpucloud-{name}")
    by_node = {charge.node_id for charge in charges if charge.node_id}
    intervals = {interval.node_id: interval for interval in state.nodes}
    for node in launched:
        told = total(charge for charge in charges if charge.node_id == node.id)
        interval = intervals.get(node.id)
        if interval is None or node.id not in by_node:
            yield f"{node.id} was paid for and is in no bill"
        elif told != _due(together, state, node):
            yield f"{node.id} is billed {told} USD, the cloud charges {_due(together, state, node)}"
    if by_node - {node.id for node in launched}:
        yield f"{name}: bills for machines that never were: {sorted(by_node - {n.id for n in launched})}"
    spent = total(charge for charge in charges if charge.kind.in_budget)
    cost = sum((_due(together, state, node) for node in launched if node.id in intervals), Decimal(0))
    most = _highest_budget(together, name)
    if max(spent, cost) > most:
        yield f"{name} has cost {cost} USD, its ledger says {spent}, and no order allowed more than {most}"


def _lost_outputs(together: Together, name: str) -> Iterator[str]:
    """A script that succeeded has its outputs home, however often the connection broke, unless nobody came in time."""
    loaded = JobStore(together.outside.store, name).load()
    if loaded is None or loaded[0].exit_reason is not ExitReason.SUCCEEDED or name in together.brought:
        return
    nodes = together.outside.cloud.launched_for(f"gpucloud-{name}")
    if any(node.end_cause is EndCause.CHOICE for node in nodes):
        yield f"{name} succeeded, its machines were ended, and its outputs are not home"


def _highest_budget(together: Together, name: str) -> Decimal:
    """The most that the run was ever allowed: whoever lowers it is killed in some stories before the cloud hears."""
    found = JobStore(together.outside.store, name).order()
    assert found is not None
    order = opened(found[0])
    sums = (order.budget_usd, *(usd for one in order.budget_changes for usd in (one.old_usd, one.new_usd)))
    return order.budget_usd if all(command.code == 0 for command in together.commands) else max(sums)


def _due(together: Together, state: JobState, node: Node) -> Decimal:
    """Return what the cloud charges for the machine, from its start to its end."""
    interval = next(interval for interval in state.nodes if interval.node_id == node.id)
    now = together.outside.clock.now()
    prices = together.outside.market.prices(node.pool, node.launched_at, node.ended_at or now)
    listed = replace(interval, launched_at=node.launched_at, ended_at=node.ended_at, end_cause=node.end_cause)
    return total(meter(listed, prices, state.attempts, now, Terms()))


_NAMED: dict[int, tuple[tuple[str, ...], float, signal.Signals | None, str, tuple[str, ...]]] = {
    1: (("train",), 2.0, None, "", ("down", JOB)),
    2: (("train", "--detach"), 4.0, signal.SIGINT, "", ("status", JOB)),
    3: (("train", "--detach"), 25.0, None, "", ("budget", JOB, "0.40 USD")),
    4: (("train",), 14.0, signal.SIGKILL, "edited", ("train",)),
    5: (("train",), 14.0, signal.SIGHUP, "", ("reconcile", JOB)),
    6: (("up",), 3.0, None, "", ("down", JOB)),
}
"""Stories that are told in any case: the first command, when it is struck with what, the code then, and the next."""


def fleet_story(seed: int) -> Told:
    """One story with processes of their own on the embedded fleet: a command, a blow or another one, and the end."""
    told, dice = Told(seed), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="gpucloud-story-") as folder, command_line(Path(folder)) as line:
        file = line.job(steps=80, step_s=0.05, extra="outputs: [results/]\n")
        words, after_s, blow, edits, other = _NAMED.get(seed) or _drawn(dice)
        first = line.start(*words, file)
        told.happened.append(" ".join(words))
        time.sleep(after_s)
        if blow is not None and first.poll() is None:
            told.happened.append(blow.name)
            first.send_signal(blow)
        if edits:
            told.happened.append("the code is edited")
            script = Path(folder) / "code" / "train.py"
            script.write_text(f"{script.read_text()}# edited\n")
        told.happened.append(" ".join(other))
        other = (*other, file) if other == ("train",) else other
        try:
            said = [line.run(*other), *([line.run(*other)] if dice.random() < 0.3 else [])]
            told.wrong += _fleet_end(line, first, said)
        except subprocess.TimeoutExpired as error:
            told.wrong.append(f"{error.cmd[3:]} still waits after {error.timeout:g} s")
    return told


def _drawn(dice: random.Random) -> tuple[tuple[str, ...], float, signal.Signals | None, str, tuple[str, ...]]:
    others = (("down", JOB), ("train",), ("reconcile", JOB), ("budget", JOB, "0.40 USD"), ("status", JOB))
    return (
        dice.choice((("train",), ("train", "--drill"), ("train", "--keep"), ("train", "--detach"), ("up",))),
        dice.uniform(0.5, 20),
        dice.choice((None, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)),
        dice.choice(("", "", "edited")),
        dice.choice(others),
    )


def _fleet_end(line: CommandLine, first: subprocess.Popen[str], said: list[Answer]) -> Iterator[str]:
    first.wait(LIMIT_S)
    for one in said:
        if one.code not in _CODES or "a fault of gpucloud itself" in one.stderr or "Traceback" in one.stderr:
            yield f"another ends with {one.code}: {one.stderr.strip()[-300:]}"
    if line.state() is None:
        return
    ended = next((one for one in (line.run("down", JOB) for _ in range(_TRIES)) if one.code == 0), None)
    if ended is None:
        ended = line.run("down", JOB)
        yield f"down ends with {ended.code} {_TRIES} times: {ended.stderr.strip()[-300:]}"
    if line.nodes():
        yield f"{len(line.nodes())} machines are alive in the end"
    state, order = line.state(), line.order()
    brought = Path(line.folder) / "outputs" / JOB / "results" / "deep" / "rank"
    if state["exit_reason"] == "succeeded" and not brought.is_file():
        yield "it succeeded, and its outputs are not home"
    cost = json.loads(line.run("cost", JOB, "--json").stdout)
    if Decimal(str(cost["spend"]["spent_usd"])) > Decimal(str(order["budget_usd"])):
        yield f"{cost['spend']['spent_usd']} USD are spent of {order['budget_usd']}"
    if line.run("status", JOB, "--json").code not in _CODES:
        yield "its state cannot be read in the end"


def _run(form: Form) -> Iterator[Figure]:
    wrong, commands, events, broken = 0, 0, 0, 0
    count = _STORIES[form]
    for seed in range(1, count + 1):
        told = story(seed)
        commands += told.commands
        events += told.events
        broken += told.broken
        if told.wrong:
            wrong += 1
            sys.stderr.write(f"{told}\n")
    if form is Form.LONG:
        fleet = [fleet_story(seed) for seed in range(1, _ON_FLEET + 1)]
        wrong += sum(bool(told.wrong) for told in fleet)
        sys.stderr.writelines(f"on the fleet: {told}\n" for told in fleet if told.wrong)
        yield Figure(name="commands.on-fleet", value=len(fleet), limit=30, least=True)
    yield Figure(name="commands", value=wrong, limit=0)
    yield Figure(name="commands.stories", value=count, limit=_STORIES[form], least=True)
    yield Figure(name="commands.run", value=commands, limit=2 * count, least=True)
    yield Figure(name="commands.broken-copies", value=broken, limit=count / 10, least=True)
    yield Figure(name="commands.events", value=events, limit=count, least=True)


GOAL = Goal(
    promise="any command at any moment of a job's life, beside others, from two places, struck, asleep or offline: none"
    " waits for ever, each machine is billed once, none outlives what is paid, the state is readable, the job can end",
    real="the command line with its handlers, session, lease, supervision and books, several processes at once",
    simulated="time, store, cloud, SSH and agents are fakes in one process; long: processes of the embedded fleet too",
    run=_run,
)
