"""Processes of the real command line on the embedded fleet, struck at calls of theirs and given again until done."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.commandline import LIMIT_S, Answer, CommandLine, command_line
from tests.faults.strikes import Blow

TIMES = 2
"""How many of the calls of one kind are struck."""
_SIGNALS = {Blow.KILL: 9, Blow.INT: 2, Blow.TWICE: 2, Blow.TERM: 15, Blow.HUP: 1}
_CODES = {Blow.INT: 130, Blow.TWICE: 130, Blow.TERM: 143}
_LAUNCHED = re.compile(r" (i-[0-9a-f]+) launched in ")
_ENDED = re.compile(r" (i-[0-9a-f]+) ended: (\w+)")
_BEGUN = "store.put jobs/small/launches**.json"
JOB = """\
name: small
code: code
run: work.py
launcher: plain
resources: {nodes: 2}
budget: 1 USD
"""
WORK = "import time\nfor n in range(10):\n    print('step', n + 1)\n    time.sleep(0.1)\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPoint:
    """The `nth` time that `call` is made by the command, and what strikes before or after it."""

    command: str
    blow: Blow
    call: str
    nth: int
    after: bool

    def __str__(self) -> str:
        side = "after" if self.after else "before"
        return f"real {self.command} {self.blow.value} {side} call {self.nth} of {self.call}"


@dataclass(slots=True)
class RealVerdict:
    """What is wrong after a real point, by the cloud's own log; the shut-off is looked at where it is kept."""

    point: RealPoint
    wrong: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    reached: bool = True

    def __str__(self) -> str:
        return f"{self.point}: {'; '.join([*self.wrong, *self.breaches])}"


def judged(blows: tuple[Blow, ...]) -> Iterator[RealVerdict]:
    """Strike at each kind of call that changes something, before and after it; minutes long."""
    for command in ("up", "train", "down"):
        for number, (call, nth) in enumerate(_calls(command)):
            for after in (False, True):
                blow = blows[(number + after) % len(blows)]
                yield judge(RealPoint(command=command, blow=blow, call=call, nth=nth, after=after))


def judge(point: RealPoint) -> RealVerdict:
    """Strike there, give the same command again until it is done, end the job, and say what is wrong."""
    verdict = RealVerdict(point)
    with _prepared(point.command) as line:
        said = _struck(line, point.command, point)
        expected = _CODES.get(point.blow)
        if expected is not None and said.code not in (expected, -_SIGNALS[point.blow], 0):
            verdict.wrong.append(f"exit code {said.code}, not {expected}: {said.stderr[-300:]}")
        verdict.breaches += _unarmed(line)
        verdict.wrong += _finish(line, point.command)
    return verdict


def _finish(line: CommandLine, command: str) -> Iterator[str]:
    for _ in range(3):
        state = line.state()
        if command == "train" and state is not None and state["torn_down"]:
            break
        again = line.run(*_words(command))
        if again.code == 0:
            break
    else:
        yield f"{command} ends with {again.code}: {again.stderr[-300:]}"
    if command == "up":
        if len(line.nodes()) != 2:
            yield f"{len(line.nodes())} machines are up"
        ended = line.run("down", "small")
        if ended.code != 0:
            yield f"down ends with {ended.code}: {ended.stderr[-300:]}"
    yield from _left_over(line)


def _left_over(line: CommandLine) -> Iterator[str]:
    log = (line.home / "cloud" / "daemon.log").read_text()
    launched, ended = _LAUNCHED.findall(log), dict(_ENDED.findall(log))
    taken = sum(cause != "choice" for cause in ended.values())
    if len(launched) != 2 + taken:
        yield f"{len(launched)} machines were started, {taken} of them taken"
    if set(launched) != set(ended):
        yield f"{sorted(set(launched) - set(ended))} never ended"
    if line.group.describe("gpucloud-small").exists:
        yield "the group is there"
    bills = {path.stem for path in (line.home / "store/jobs/small/ledger").glob("*.json")}
    if bills != set(launched):
        yield f"the ledger has {sorted(bills)}, the cloud started {sorted(launched)}"


def _unarmed(line: CommandLine) -> Iterator[str]:
    view = line.group.describe("gpucloud-small")
    if (view.alive or view.size) and view.armed_until is None:
        yield f"{len(view.alive)} machines, {view.size} asked for, and no shut-off"


@contextlib.contextmanager
def _prepared(command: str) -> Iterator[CommandLine]:
    """Give a home of its own; for `down`, with a job whose supervisor was killed."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-real-") as folder, command_line(Path(folder)) as line:
        code = line.folder / "code"
        code.mkdir()
        (code / "work.py").write_text(WORK)
        (line.folder / "small.yaml").write_text(JOB)
        if command == "down":
            begun = RealPoint(command="train", blow=Blow.KILL, call=_BEGUN, nth=1, after=True)
            _struck(line, "train", begun)
        yield line


def _words(command: str) -> tuple[str, ...]:
    return (command, "small" if command == "down" else "small.yaml")


def _struck(line: CommandLine, command: str, point: RealPoint | None) -> Answer:
    """Run the command in a session of its own; struck at the point, if there is one."""
    env = dict(line.env)
    if point is not None:
        strike = {"call": point.call, "nth": point.nth, "after": point.after, "twice": point.blow is Blow.TWICE}
        env["GPUCLOUD_TEST_STRIKE"] = json.dumps({**strike, "signal": _SIGNALS[point.blow]})
    done = subprocess.run(
        (sys.executable, "-m", "tests.faults.struck", *_words(command)),
        cwd=line.folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def _calls(command: str) -> list[tuple[str, int]]:
    """What the command asks of the outside that changes something, and how often, as far as it is struck."""
    with _prepared(command) as line:
        listed = line.folder / "calls"
        line.env["GPUCLOUD_TEST_CALLS"] = str(listed)
        done = _struck(line, command, None)
        assert done.code == 0, done.stderr
        counts: dict[str, int] = {}
        for call in listed.read_text().splitlines():
            counts[call] = counts.get(call, 0) + 1
        return [(call, nth) for call, count in counts.items() for nth in range(1, min(count, TIMES) + 1)]
