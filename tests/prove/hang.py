"""An attempt that hangs is noticed within its limit, its ranks tell where they are, and the job goes on."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.packaging import package_zip
from gpucloud.domain.node.status import Stop
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import EndAttempt
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal as JobGoal
from gpucloud.domain.supervision.snapshot import Limits, Rules
from gpucloud.system import processes
from tests.commandline import command_line, until, weights
from tests.prove.goal import Figure, Form, Goal
from tests.standins.agent_node import AgentNode, wait_until
from tests.unit.worlds import opened, part, snapshot, state, up

_CASES = {Form.SHORT: 2000, Form.LONG: 50_000}
_AGENTS = {Form.SHORT: 1, Form.LONG: 10}
_SCALED_S = 5.0  # a hang's least time in the long form, in place of 60 s
_LATE_S = 3.0  # one look at the machines, one status and one beat, on a machine that is busy
_RULES = Rules(limits=Limits(hang_at_least=timedelta(seconds=60), hang_steps=5.0))

STUCK = """
import threading, time
def beside():
    time.sleep(600)
threading.Thread(target=beside, daemon=True).start()
def waits_for_a_peer():
    print("in it", flush=True)
    time.sleep(600)
waits_for_a_peer()
"""
STOPS_STEPPING = """
    if run.steps_done == 25 and run.rank == 1 and os.environ["GPUCLOUD_ATTEMPT"] == "1":
        waits_for_ever()
"""


def run(form: Form) -> Iterator[Figure]:
    failed = sum(_judged_wrongly(seed) for seed in range(_CASES[form]))
    failed += sum(_stacks_missing(stopped=bool(number % 2)) for number in range(_AGENTS[form] + 1))
    yield Figure(name="hang", value=failed, limit=0)
    if form is Form.LONG:
        yield from _measured()


def _judged_wrongly(seed: int) -> bool:
    """A hang is one exactly when the script trains and its report is older than its limit; at first that is 30 min."""
    dice = random.Random(seed)
    median = dice.choice((None, 0.01, 0.4, 11.9, 12.1, 60.0, 600.0))
    hangs = dice.choice((0, 0, 1, 3))
    limit = max(60.0, 5 * (median or 0.0)) * 2**hangs
    age = dice.choice((0.1, 0.5, 0.99, 1.01, 2.0, 10.0)) * limit
    phase = dice.choice(("start", "train", "train", "train", "save", "evaluate", "profile"))
    over = tuple(opened("a", "b", number=n, reason=ExitReason.HUNG) for n in range(1, hangs + 1))
    attempt = opened("a", "b", number=hangs + 1)
    told = {"step": 9, "phase": phase, "step_seconds": median, "age_s": age}
    world = snapshot(up("a", part(hangs + 1, **told)), up("b", part(hangs + 1)), state=state(attempts=(*over, attempt)))
    action = decide(JobGoal(nodes=2, budget_usd=Decimal(1)), replace(world, now=world.now), _RULES)
    said = isinstance(action, EndAttempt) and (action.how, action.reason) == (Stop.ABORT, ExitReason.HUNG)
    if phase == "start" or median is None:
        limit = 1800.0 * min(4, 2**hangs)
    if said != (phase in ("start", "train") and age > limit):
        sys.stderr.write(f"hang: seed {seed}: {told} after {hangs} hangs: {action}\n")
        return True
    return False


def _stacks_missing(*, stopped: bool) -> bool:
    """A real agent, told that its attempt hangs: whether a rank's log lacks a thread, or anything lives on."""
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "gpucloud.zip"
        package.write_bytes(package_zip()[0])
        node = AgentNode(Path(name), package)
        try:
            node.start()
            launch = node.python(1, STUCK, RANK="0", PYTHONFAULTHANDLER="1")
            node.want(launch)
            log = node.folder(1) / "launcher.log"
            wait_until(lambda: log.exists() and "in it" in log.read_text(), "the script", 60.0)
            if stopped:
                for pid in node.alive(1):
                    os.kill(pid, signal.SIGSTOP)
            node.want(launch, stop=Stop.ABORT)
            node.wait_exited(1, limit_s=60.0)
            whole = all(word in log.read_text() for word in ("in waits_for_a_peer", "in beside"))
            missing = not whole or bool(node.alive(1))
        finally:
            node.destroy()
    if missing:
        sys.stderr.write(f"hang: a rank that {'was stopped' if stopped else 'waits'} did not tell where\n")
    return missing


def _measured() -> Iterator[Figure]:
    """Two nodes of the embedded fleet: a rank stopped by SIGSTOP, and a script that stops stepping by itself."""
    with tempfile.TemporaryDirectory() as name, command_line(Path(name), GPUCLOUD_HANG_S=f"{_SCALED_S:g}") as line:
        assert line.run("train", line.job("other", steps=60, step_s=0.05)).code == 0
        undisturbed = weights(line, "other")
        untold, late, differ = 0, [], 0
        for number, own in enumerate((False, True)):
            job, since = f"hung-{number}", None
            file = line.job(job, steps=60, step_s=0.05)
            script = line.folder / "code" / "train.py"
            if own:
                text = script.read_text().replace("dist.init_process_group", _WAITS + "dist.init_process_group", 1)
                script.write_text(
                    text.replace("    run.step(loss=loss)\n", f"    run.step(loss=loss)\n{STOPS_STEPPING}")
                )
            train = line.start("train", file)
            until(lambda job=job: line.step(job) >= 20, "step 20")
            if own:
                until(lambda job=job: line.step(job) >= 25, "step 25")
            else:
                _stop_rank(line, "1")
            since = time.time()
            until(lambda job=job: (line.state(job)["attempts"][0]["ending_reason"]) == "hung", "the hang is noticed")
            late.append(time.time() - since - _SCALED_S)
            assert train.wait(timeout=200) == 0, (line.folder / "err").read_text()
            logs = [line.run("logs", job, "--rank", rank).stdout for rank in ("0", "1")]
            untold += sum("most recent call first" not in log for log in logs)
            untold += own and "in waits_for_ever" not in logs[1]
            differ += weights(line, job) != undisturbed
    yield Figure(name="hang.late-s", value=max(late), limit=_LATE_S)
    yield Figure(name="hang.ranks-without-stacks", value=untold, limit=0)
    yield Figure(name="hang.bits-differ", value=differ, limit=0)


_WAITS = "def waits_for_ever():\n    time.sleep(100000)\n\n"


def _stop_rank(line, rank: str) -> None:
    home = str(line.home)
    for pid in processes.marked("RANK", rank):
        if home in Path(f"/proc/{pid}/environ").read_text(errors="replace"):
            os.kill(pid, signal.SIGSTOP)


GOAL = Goal(
    promise="no step for max(60 s, 5 × the median) is noticed; every rank's stacks are in the log; it restarts",
    real="decide and the limits; a real agent and real signals; long form: SSH nodes, torchrun, SIGSTOP of a rank",
    simulated="short form: what ranks report; long form: the least time of a hang is 5 s in place of 60 s",
    run=run,
)
