"""The CLI is killed and never run again; machines are taken, one after the other and all at once; the job finishes."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpucloud.domain.node.node import NodeState
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.commandline import CommandLine, command_line, undisturbed_weights, until, weights
from tests.faults.happenings import wrong_events
from tests.prove.goal import Figure, Form, Goal

GROUP = "gpucloud-small"
_LIMIT_S = 150.0
_TAKEOVER_S = 20.0  # the lease's 15 s, and the driver's look

# Counts in the store and goes on from there: what a job without torch needs to show that nothing was lost.
_COUNT = """
import os, pathlib, time
place = pathlib.Path(os.environ["GPUCLOUD_STORE"].removeprefix("file://").partition("#")[0], "counted")
place.mkdir(exist_ok=True)
for number in range(sum(1 for _ in place.iterdir()), NUMBERS):
    (place / f"{number:04d}").write_text(os.environ["GPUCLOUD_ATTEMPT"])
    print("step", number + 1, flush=True)
    time.sleep(0.05)
made = pathlib.Path("results", "deep", "rank")
made.parent.mkdir(parents=True)
made.write_text("0")
"""
_COUNTING = """\
name: small
code: code
run: python count.py
resources: {nodes: 1, gpus: 1}
budget: 1 USD
outputs: [results/, result]
"""


@dataclass
class Case:
    """One run: what went wrong in it, and what it survived."""

    name: str
    line: CommandLine
    wrong: list[str] = field(default_factory=list)
    survived: int = 0
    took_over_s: float = 0.0

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)
            sys.stderr.write(f"self-driving: {self.name}: {what}\n")

    @property
    def step(self) -> int:
        """The last step that any attempt made, as far as the state knows."""
        attempts = (self.line.state() or {}).get("attempts") or []
        return max((attempt["last_step"] or 0 for attempt in attempts), default=0)

    def make_steps(self, count: int, what: str) -> None:
        """Wait for so many steps beyond those that were made."""
        wanted = self.step + count
        until(lambda: self.ended() or self.step >= wanted, what, _LIMIT_S)

    @property
    def attempts(self) -> int:
        return len(self.line.state()["attempts"])

    @property
    def driver(self) -> str:
        """The node that holds the job, empty when none does."""
        owner = (self.line.state() or {}).get("owner") or {}
        return owner.get("node", "")

    def nodes(self) -> list[str]:
        listed = self.line.group.describe(GROUP).alive
        return [node.id for node in listed if node.state is NodeState.RUNNING]

    def take(self, *node_ids: str, notice: bool) -> None:
        """Have the cloud take nodes."""
        for node_id in node_ids:
            self.line.group.interrupt(GROUP, node_id, notice=notice)

    def ended(self) -> bool:
        return bool((self.line.state() or {}).get("exit_reason"))


def _run(form: Form) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="gpucloud-") as name:
        cases = list(_short(Path(name)) if form is Form.SHORT else _long(Path(name)))
    yield Figure(name="self-driving", value=sum(len(case.wrong) for case in cases), limit=0)
    events = 1 if form is Form.SHORT else 6
    yield Figure(name="self-driving.events", value=sum(case.survived for case in cases), limit=events, least=True)
    if form is Form.LONG:
        took = max(case.took_over_s for case in cases)
        yield Figure(name="self-driving.takeover_s", value=round(took, 1), limit=_TAKEOVER_S)


def _short(folder: Path) -> Iterator[Case]:
    """One node and a job without torch: it is killed with its driver, and the group brings another one."""
    with command_line(folder) as line:
        case = Case("killed at launch, then no node left", line)
        (folder / "code").mkdir()
        (folder / "code" / "count.py").write_text(_COUNT.replace("NUMBERS", "60"))
        (folder / "small.yaml").write_text(_COUNTING)
        _kill_at_launch(case, str(folder / "small.yaml"))
        counted = line.home / "store" / "counted"
        until(lambda: case.ended() or len(list(counted.glob("*"))) > 5, "the job counts", _LIMIT_S)
        _survive(case, "all at once")
        _await_end(case)
        attempts = [path.read_text() for path in sorted(counted.iterdir())]
        case.check(len(attempts) == 60 and attempts == sorted(attempts), f"counted by attempts {attempts}")
        case.check(set(attempts) == {"1", "2"}, f"attempts {set(attempts)} did the work")
        missing = _bring_home(case)
        said = [(one["path"], one["nearest"], one["attempt"]) for one in missing]
        lost = [(path, None, 1) for path in ("results/", "result")]  # with the machine of the first attempt
        case.check(said == [*lost, ("result", "results", None)], f"what is missing at home is {missing}")
        yield case


def _long(folder: Path) -> Iterator[Case]:
    """Two nodes under DDP, as an undisturbed run has them; both ways of leaving the job alone."""
    undisturbed = undisturbed_weights(folder / "undisturbed", _job, _LIMIT_S)
    for name, leave in (("killed at launch", _kill_at_launch), ("detached", _detach)):
        place = folder / name.replace(" ", "-")
        place.mkdir()
        with command_line(place) as line:
            case = Case(name, line)
            leave(case, _job(line))
            for event in ("notice", "silent", "all at once"):
                case.make_steps(40, f"40 steps before {event}")
                _survive(case, event)
            _await_end(case)
            case.check(weights(line) == undisturbed, "the weights differ from those of the undisturbed run")
            _bring_home(case)
            yield case


def _job(line: CommandLine) -> str:
    return line.job(steps=400, step_s=0.05, extra="outputs: [results/]\n")


def _kill_at_launch(case: Case, file: str) -> None:
    command = case.line.start("train", file, "--unattended", "1h")
    until(case.line.nodes, "machines are asked for", _LIMIT_S)
    os.kill(command.pid, signal.SIGKILL)
    command.wait()
    killed = time.monotonic()
    until(lambda: case.driver, "a node drives", _LIMIT_S)
    case.took_over_s = time.monotonic() - killed


def _detach(case: Case, file: str) -> None:
    answer = case.line.run("train", file, "--detach", limit_s=_LIMIT_S)
    case.check(answer.code == 0, f"--detach ended with {answer.code}: {answer.stderr}")
    until(lambda: case.driver, "a node drives", _LIMIT_S)


def _survive(case: Case, event: str) -> None:
    """Take the node that drives with a notice, without one, or every node; then wait for the next attempt."""
    until(lambda: case.ended() or case.driver in case.nodes(), f"a live node drives before {event}", _LIMIT_S)
    before = case.attempts
    gone = case.nodes() if event == "all at once" else [case.driver]
    case.take(*gone, notice=event == "notice")
    until(lambda: case.ended() or case.attempts > before, f"the next attempt after {event}", _LIMIT_S)
    case.check(case.attempts > before, f"the job ended at {event}")
    case.survived += case.attempts > before


def _await_end(case: Case) -> None:
    line = case.line
    until(case.ended, "the job ends", _LIMIT_S)
    state = line.state()
    case.check(state["exit_reason"] == "succeeded", f"it ended: {state['exit_reason']}: {state['message']}")
    until(lambda: not line.nodes(), "the machines end", _LIMIT_S)
    view = line.group.describe(GROUP)
    case.check(view.size == 0, f"the group's size is {view.size}")
    cost = line.run("cost", "small", "--json").json["spend"]
    spent, budget = Decimal(cost["spent_usd"]), Decimal(cost["budget_usd"])
    case.check(Decimal(0) < spent <= budget, f"spent {spent} of {budget} USD")


def _bring_home(case: Case) -> list[dict[str, Any]]:
    """See to what machines left for a command from outside, outputs and free parts; return the outputs that lack."""
    last = case.line.run("train", "small", "--json", limit_s=_LIMIT_S)
    case.check(last.code == 0 and last.json["status"] == "succeeded", f"train at the end: {last.stderr}")
    case.check(last.json["job"] == "small", f"train began a new run: {last.stderr}")
    arrived = case.line.folder / "outputs" / "small" / "results" / "deep" / "rank"
    case.check(arrived.is_file(), "the outputs did not come home")
    case.check(not case.line.group.describe(GROUP).exists, "the group is still there")
    _judge_events(case)
    missing: list[dict[str, Any]] = last.json["missing_outputs"]
    return missing


def _judge_events(case: Case) -> None:
    """Each event is there once, whichever machine drove the job then, and whatever became of it."""
    jobs = JobStore(open_store(str(case.line.home / "store")), "small")
    loaded = jobs.load()
    wrong = ["its state is gone"] if loaded is None else [*wrong_events(loaded[0], jobs.events.read())]
    case.check(not wrong, f"events: {wrong}")


GOAL = Goal(
    promise="a job whose CLI was killed at once finishes by itself, whatever machines it loses, inside its budget",
    real="CLI, nodes with SSH, agents and drivers, torchrun, checkpoints, lease and budget on the embedded fleet",
    simulated="the cloud: nodes are processes here, and a notice of 120 s runs as 4 s",
    run=_run,
)
