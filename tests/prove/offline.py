"""The way from the command line to every node is cut for a while: the job goes on, and nothing is done about it."""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.commandline import until
from tests.emulation.group import CUTTABLE
from tests.prove.goal import Figure, Form, Goal
from tests.standins.quick_fleet import GROUP, QuickFleet, quick_fleet

_AWAY_S = {Form.SHORT: 4.0, Form.LONG: 60.0}
_STEP_S = 0.1


def run(form: Form) -> Iterator[Figure]:
    """Cut off both machines of a running job, and let them come back."""
    away_s = _AWAY_S[form]
    steps = int((away_s + 4) / _STEP_S)
    with tempfile.TemporaryDirectory() as folder, quick_fleet(Path(folder), daemon=CUTTABLE) as line:
        # On loopback a cut closes the way in only: the machines still reach each other, and the store.
        train = line.start("train", line.quick_job(steps=steps, step_s=_STEP_S))
        before = _trains(line)
        for node in before:
            line.group.cut(GROUP, node)
        at_cut = _newest(line)
        time.sleep(away_s + random.Random(0).uniform(0, 0.5))
        went_on = _newest(line) - at_cut
        after = line.launched()
        for node in before:
            line.group.heal(GROUP, node)
        code = train.wait(150)
        wrong = _wrong(line, code, before, after)
        said = [row for row in line.lines(0) if row.startswith("step ")]
        expected = [f"step {number + 1}" for number in range(steps)]
    for what in wrong:
        sys.stderr.write(f"offline: {what}\n")
    yield Figure(name="offline", value=len(wrong), limit=0)
    astray = len(set(said) ^ set(expected)) + abs(len(said) - steps)
    yield Figure(name="offline.lines-missing-or-doubled", value=astray, limit=0)
    yield Figure(name="offline.steps-committed-meanwhile", value=went_on, limit=5, least=True)


def _trains(line: QuickFleet) -> list[str]:
    until(lambda: _newest(line) >= 5, "the first checkpoint")
    return line.nodes()


def _newest(line: QuickFleet) -> int:
    """The step of the newest checkpoint, from the store itself."""
    found = (line.home / "store" / "jobs").glob("small/checkpoints/commit/*/*.json")
    return max((int(path.stem) for path in found), default=0)


def _wrong(line: QuickFleet, code: int, before: list[str], after: list[str]) -> list[str]:
    state = line.state() or {}
    found = []
    if code != 0:
        found.append(f"train ended with {code}: {(line.folder / 'err').read_text()[-2000:]}")
    paid_for = line.paid_for()
    if after != before or paid_for != set(before):
        found.append(f"machines were {before}, then {after}; paid for were {sorted(paid_for)}")
    if len(state["attempts"]) != 1 or state["interruptions"]:
        found.append(f"attempts {len(state['attempts'])}, interruptions {state['interruptions']}")
    return found


GOAL = Goal(
    promise="a command line that reaches no machine for a while ends nothing, starts nothing and loses no output",
    real="command line, supervisor, agents, SSH, checkpoints, two machines of the embedded fleet",
    simulated="the cut: each machine's SSH server is stopped; training: a counter without torch takes its place",
    run=run,
)
