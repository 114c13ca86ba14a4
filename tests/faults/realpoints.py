"""Processes of the real command line on the embedded fleet, struck at calls of theirs and given again until done."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.commandline import LIMIT_S, Answer, CommandLine, command_line
from tests.faults.strikes import Blow
from tests.faults.struck import breach

TIMES = 2
"""How many of the calls of one kind are struck."""
TRIES = 3
"""How often a point is tried that was not reached: two nodes at once are not asked in the same order each time."""
_SIGNALS = {Blow.KILL: 9, Blow.INT: 2, Blow.TWICE: 2, Blow.TERM: 15, Blow.HUP: 1}
_CODES = {  # those of docs/commands.md, or the signal itself: SIGTERM before a job is begun, SIGHUP at any time
    Blow.KILL: (-9,),
    Blow.INT: (130,),
    Blow.TWICE: (130,),
    Blow.TERM: (143, -15),
    Blow.HUP: (-1,),
}
_LAUNCHED = re.compile(r" (i-[0-9a-f]+) launched in ")
_ENDED = re.compile(r" (i-[0-9a-f]+) ended: (\w+)")
_BEGUN = "store.put jobs/small/launches**.json"
COMMANDS = ("up", "train", "down")
JOB_NAME = "small"
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
    """What is wrong after a real point, by the cloud's own log.

    `breaches` are those of `looks` moments, before and after each call and when the process was gone, at which there
    were machines, or machines asked for, and no shut-off ahead.
    """

    point: RealPoint
    wrong: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    looks: int = 0

    def __str__(self) -> str:
        return f"{self.point}: {'; '.join([*self.wrong, *self.breaches])}"


def judged(blows: tuple[Blow, ...], *, every: int = 1) -> Iterator[RealVerdict]:
    """Strike at each kind of call that changes something, before and after it; at each `every`-th point only."""
    for command in COMMANDS:
        found = tuple((call, nth, after) for call, nth in calls_of(command) for after in (False, True))
        for number, (call, nth, after) in enumerate(found[::every]):
            yield judge(RealPoint(command=command, blow=blows[number % len(blows)], call=call, nth=nth, after=after))


def judge(point: RealPoint) -> RealVerdict:
    """Strike there, give the same command again until it is done, end the job, and say what is wrong."""
    verdict = RealVerdict(point)
    for _ in range(TRIES):
        if _was_reached(point, verdict):
            return verdict
    verdict.wrong.append(f"not reached in {TRIES} tries")
    return verdict


def unarmed(line: CommandLine, command: str) -> tuple[list[str], int]:
    """Run the command with nothing that strikes; return the moments without a shut-off ahead, and how many were seen.

    The job is ended afterwards.
    """
    done = _struck(line, command, None)
    seen = _looked(line)
    ended = line.run("down", "small")
    wrong = [f"{command}: {answer.stderr[-300:]}" for answer in (done, ended) if answer.code != 0]
    return [*wrong, *seen[0]], seen[1]


def _was_reached(point: RealPoint, verdict: RealVerdict) -> bool:
    with prepared(point.command) as line:
        said = _struck(line, point.command, point)
        reached = (line.folder / "struck").exists()
        if reached and said.code not in _CODES[point.blow]:
            verdict.wrong.append(f"exit code {said.code}, not {_CODES[point.blow]}: {said.stderr[-300:]}")
        breaches, looks = _looked(line)
        verdict.breaches += breaches
        verdict.looks += looks
        if reached:
            verdict.wrong += _finish(line, point.command)
    return reached


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
    bills = {path.stem for path in (line.home / "store/jobs/small/control/ledger").glob("*.json")}
    if bills != set(launched):
        yield f"the ledger has {sorted(bills)}, the cloud started {sorted(launched)}"


def _looked(line: CommandLine) -> tuple[list[str], int]:
    """Return the breaches that the process saw, with one after its end, and how often it looked."""
    found = breach(line.home / "cloud", f"gpucloud-{JOB_NAME}")
    looks = (line.folder / "looks").read_text().splitlines()
    return [*filter(None, looks), *([f"afterwards: {found}"] if found else [])], len(looks) + 1


@contextlib.contextmanager
def prepared(command: str) -> Iterator[CommandLine]:
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
    for name in ("calls", "looks", "struck"):  # an earlier process's
        (line.folder / name).unlink(missing_ok=True)
    cloud = str(line.home / "cloud")
    told: dict[str, object] = {"folder": str(line.folder), "cloud": cloud, "group": f"gpucloud-{JOB_NAME}"}
    if point is not None:
        told |= {"call": point.call, "nth": point.nth, "after": point.after}
        told |= {"twice": point.blow is Blow.TWICE, "signal": _SIGNALS[point.blow]}
    done = subprocess.run(
        (sys.executable, "-m", "tests.faults.struck", *_words(command)),
        cwd=line.folder,
        env={**line.env, "GPUCLOUD_TEST_STRIKE": json.dumps(told)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        start_new_session=True,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def calls_of(command: str) -> list[tuple[str, int]]:
    """Return what the command asks of the outside that changes something, and how often, as far as it is struck.

    Two runs are made: what only one of them needed, because of how quick things were, is no point; nor is another
    part of output, which comes when there is some.
    """
    first, second = _counted(command), _counted(command)
    common = {call: min(count, second[call], 1 if "/logs" in call else TIMES) for call, count in first.items()}
    return [(call, nth) for call, count in common.items() for nth in range(1, count + 1)]


def _counted(command: str) -> Counter[str]:
    with prepared(command) as line:
        done = _struck(line, command, None)
        assert done.code == 0, done.stderr
        return Counter((line.folder / "calls").read_text().splitlines())
