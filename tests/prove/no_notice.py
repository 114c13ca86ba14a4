"""A machine that dies without a notice is believed dead within 5 s, and one that lives never is."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from tests.bench.bench_main_job import RESUMED_LIMIT_FLOORS, RESUMED_LIMIT_S, bare_torchrun
from tests.commandline import CommandLine, command_line, until, weights
from tests.prove.goal import Figure, Form, Goal
from tests.standins.sight import BELIEVED_S, Case, wrong

_CASES = {Form.SHORT: 200, Form.LONG: 2000}
_RUNS = 5


def run(form: Form) -> Iterator[Figure]:
    failed = sum(_fails(seed) for seed in range(_CASES[form]))
    yield Figure(name="no-notice", value=failed, limit=0)
    if form is Form.LONG:
        yield from _measured()


def _fails(seed: int) -> bool:
    case = Case.drawn(seed)
    why = wrong(case)
    if why is not None:
        sys.stderr.write(f"no-notice: {why}: {case}\n")
    return why is not None


def _measured() -> Iterator[Figure]:
    """SIGKILL of a whole node of two, at once after a step, on the embedded fleet; `middle` of some runs."""
    noticed, again, ends = [], [], set()
    with tempfile.TemporaryDirectory() as name, command_line(Path(name)) as line:
        for number in range(_RUNS):
            times, end = _lose(line, f"lost-{number}")
            noticed.append(times[0])
            again.append(times[1])
            ends.add(end)
        floor = min(bare_torchrun(line.folder) for _ in range(3))
    middle = sorted(again)[_RUNS // 2]
    yield Figure(name="no-notice.bits-differ", value=len(ends) - 1, limit=0)
    yield Figure(name="no-notice.noticed-worst-s", value=max(noticed), limit=BELIEVED_S)
    yield Figure(name="no-notice.training-again-s", value=middle, limit=RESUMED_LIMIT_S)
    yield Figure(name="no-notice.training-again-in-bare-torchruns", value=middle / floor, limit=RESUMED_LIMIT_FLOORS)


def _lose(line: CommandLine, job: str) -> tuple[tuple[float, float], str]:
    """Return the seconds from the kill to its notice and to the next first step, and the hash of the final weights."""
    train = line.start("train", line.job(job, steps=60, step_s=0.05), "--json")
    until(lambda: line.step(job) >= 12, "step 12")
    victim = line.nodes(job)[-1]
    killed = datetime.now().astimezone()
    line.group.interrupt(f"gpucloud-{job}", victim, notice=False)
    assert train.wait(timeout=150) == 0, (line.folder / "err").read_text()
    (lost,) = line.state(job)["interruptions"]
    noticed, resumed = (datetime.fromisoformat(lost[key]) for key in ("noticed_at", "resumed_at"))
    return ((noticed - killed).total_seconds(), (resumed - killed).total_seconds()), weights(line, job)


GOAL = Goal(
    promise="a machine that dies without notice is believed dead within 5 s by two witnesses; one that lives never is",
    real="decide, the books, who is asked as a witness; long form: SSH nodes, torchrun, SIGKILL of a node's whole tree",
    simulated="short form: machines, SSH and the clock; long form: the cloud, which lists a killed node as ended",
    run=run,
)
