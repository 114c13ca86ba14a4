"""`up` and `down` on the emulated AWS, killed at a sample of their calls and given again; judged by the lab's records.

The calls of an undisturbed pair are counted; then each pair, on a job of its own, is struck once in either command, as
far into it as its share. Every other time Terraform is killed with the command, as by a power cut.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.awsrig import end_everything_of
from tests.standins.aws import Account, account

PAIRS = 11
"""Two points each."""
_LIMIT_S = 400.0
_NODES = 2


@dataclass(slots=True)
class AwsVerdict:
    """What is wrong after a command was struck: by the lab's own records, which no command can change."""

    point: str
    wrong: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.point}: {'; '.join([*self.wrong, *self.breaches])}"


def judged(pairs: int = PAIRS) -> Iterator[AwsVerdict]:
    """Strike as often in each of the two; a minute and more for each pair."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-aws-") as folder, account(Path(folder)) as aws:
        _give(aws, "up", aws.job("base"))  # the region's network stands from here on
        _give(aws, "down", "base")
        plain = aws.job("plain")
        counted = {command: _give(aws, command, plain) for command in ("up", "down")}
        for number in range(pairs):
            yield from _pair(
                aws, f"point-{number:02}", counted, share=(number + 0.5) / pairs, power_cut=number % 2 == 1
            )


def _pair(aws: Account, job: str, counted: dict[str, int], *, share: float, power_cut: bool) -> Iterator[AwsVerdict]:
    file = aws.job(job)
    for command in ("up", "down"):
        at = 1 + int(share * counted[command])
        verdict = AwsVerdict(f"aws {command} of {job}, killed after call {at}{' with Terraform' if power_cut else ''}")
        _strike(aws, command, file, after=at, power_cut=power_cut)
        verdict.breaches += _unarmed(aws, job)
        again = aws.line.run(command, file, limit_s=_LIMIT_S)
        if again.code != 0:
            verdict.wrong.append(f"{command} ends with {again.code}: {again.stderr[-300:]}")
        verdict.wrong += _left(aws, job) if command == "down" else _twins(aws, job)
        yield verdict


def _give(aws: Account, command: str, file: str) -> int:
    """Run the command; return how many calls it made."""
    before = aws.asked()
    done = aws.line.run(command, file, limit_s=_LIMIT_S)
    assert done.code == 0, done.stderr
    return aws.asked() - before


def _strike(aws: Account, command: str, file: str, *, after: int, power_cut: bool) -> None:
    before = aws.asked()
    process = aws.line.start(command, file)
    _wait(process, lambda: aws.asked() - before >= after)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL) if power_cut else process.kill()
    process.wait()
    if power_cut:
        end_everything_of(aws.line.home)


def _wait(process: subprocess.Popen[str], so_far: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while process.poll() is None and not so_far():
        assert time.monotonic() < deadline, "the command makes no calls"
        time.sleep(0.005)


def _unarmed(aws: Account, job: str) -> Iterator[str]:
    armed = any(line.startswith("schedule ") and f"gpucloud-{job} " in line for line in aws.lab.inventory())
    alive = aws.alive(job)
    if alive and not armed:
        yield f"{len(alive)} machines, and no shut-off"


def _twins(aws: Account, job: str) -> Iterator[str]:
    if len(aws.alive(job)) != _NODES or len(aws.ever(job)) != _NODES:
        yield f"{len(aws.alive(job))} machines are up, {len(aws.ever(job))} were started"


def _left(aws: Account, job: str) -> Iterator[str]:
    if aws.alive(job):
        yield f"{', '.join(aws.alive(job))} cost money"
    left = [line for line in aws.lab.inventory() if f"gpucloud-{job}" in line]
    if left:
        yield f"left over: {'; '.join(left)}"
