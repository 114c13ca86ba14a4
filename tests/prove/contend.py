"""Eight controllers on one job: exactly one acts, the others leave with exit code 4, told who holds it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.lab.aws import Lab
from tests.prove.goal import Figure, Form, Goal
from tests.unit.worlds import state

CONTROLLERS = 8
LIMIT_S = 5.0
# Everybody is ready before anybody begins. Who has the lease acts, and holds it until the last one has its answer.
_CONTROLLER = """
import sys, time
from pathlib import Path
from gpucloud.system.retries import SystemClock
from gpucloud.domain.errors import LeaseHeld
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take

url, folder, name, rounds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jobs = JobStore(open_store(url), "contended")
jobs.load()


def say(what, text):
    beside = folder / f"new-{what}"
    beside.write_text(text)
    beside.replace(folder / what)


for number in range(rounds):
    (folder / f"ready-{number}-{name}").touch()
    while not (folder / f"go-{number}").exists():
        time.sleep(0.002)
    began = time.monotonic()
    try:
        with take(jobs, SystemClock()) as lease:
            lease.confirm()
            say(f"acted-{number}-{name}", str(lease.state.epoch))
            say(f"done-{number}-{name}", f"0 {time.monotonic() - began}")
            while not (folder / f"end-{number}").exists():
                time.sleep(0.002)
    except LeaseHeld as held:
        told = "process" in held.message or "took" in held.message
        say(f"done-{number}-{name}", f"{held.exit_code if told else 1} {time.monotonic() - began}")
    (folder / f"left-{number}-{name}").touch()
"""


@dataclass
class _Counts:
    rounds: int = 0
    not_one: int = 0
    losers: int = 0
    other_ends: int = 0
    late: int = 0
    longest_s: float = 0.0
    epochs: list[int] = field(default_factory=list)


def run(form: Form) -> Iterator[Figure]:
    """Yield what went wrong, over a directory store and over S3."""
    rounds = 3 if form is Form.SHORT else 100
    counts = _Counts()
    with tempfile.TemporaryDirectory() as folder:
        _contend(Path(folder), str(Path(folder) / "store"), rounds, counts)
    with _bucket() as url, tempfile.TemporaryDirectory() as folder:
        _contend(Path(folder), url, rounds, counts)
    late = counts.late if form is Form.LONG else 0
    yield Figure(name="contend", value=counts.not_one + counts.other_ends + late, limit=0)
    yield Figure(name="contend.rounds", value=counts.rounds, limit=2 * rounds, least=True)
    yield Figure(name="contend.not-exactly-one", value=counts.not_one, limit=0)
    yield Figure(name="contend.losers-without-exit-4", value=counts.other_ends, limit=0)
    yield Figure(name="contend.losers", value=counts.losers, limit=2 * rounds * (CONTROLLERS - 1), least=True)
    if form is Form.LONG:
        yield Figure(name="contend.slowest-loser-s", value=round(counts.longest_s, 3), limit=LIMIT_S)


def _contend(folder: Path, url: str, rounds: int, counts: _Counts) -> None:
    JobStore(open_store(url), "contended").create(state(job="contended", lease_s=15.0))
    argv = (sys.executable, "-c", _CONTROLLER, url, str(folder))
    names = [f"c{number}" for number in range(CONTROLLERS)]
    processes = [subprocess.Popen((*argv, name, str(rounds)), env=os.environ) for name in names]
    epochs: list[int] = []
    try:
        for number in range(rounds):
            _wait(folder, f"ready-{number}-*", processes)
            (folder / f"go-{number}").touch()
            _wait(folder, f"done-{number}-*", processes)
            epochs += _judge(folder, number, counts)
            (folder / f"end-{number}").touch()
            _wait(folder, f"left-{number}-*", processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if epochs != sorted(set(epochs)):
        print(f"contend: epochs {epochs} over {url}", file=sys.stderr)
        counts.not_one += 1


def _judge(folder: Path, number: int, counts: _Counts) -> list[int]:
    ends = [path.read_text().split() for path in folder.glob(f"done-{number}-*")]
    acted = [int(path.read_text()) for path in folder.glob(f"acted-{number}-*")]
    losers = [(int(code), float(took)) for code, took in ends if code != "0"]
    counts.rounds += 1
    counts.not_one += len(acted) != 1
    counts.losers += len(losers)
    counts.other_ends += sum(code != 4 for code, _ in losers)
    counts.late += sum(took > LIMIT_S for _, took in losers)
    counts.longest_s = max([counts.longest_s, *(took for _, took in losers)])
    if len(acted) != 1 or any(code != 4 for code, _ in losers):
        print(f"contend: round {number}: {len(acted)} acted, {ends}", file=sys.stderr)
    return acted


def _wait(folder: Path, pattern: str, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob(pattern))) < CONTROLLERS:
        if time.monotonic() > deadline or any(process.poll() for process in processes):
            raise RuntimeError(f"a controller is stuck or broken before {pattern}")
        time.sleep(0.002)


@contextmanager
def _bucket() -> Iterator[str]:
    """Give a bucket of the emulated AWS, to which this process and its children speak."""
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder)) as lab:
        before = dict(os.environ)
        os.environ.update(lab.settings)
        try:
            lab.client("s3").create_bucket(Bucket="contended")
            yield "s3://contended"
        finally:
            os.environ.clear()
            os.environ.update(before)


GOAL = Goal(
    promise="of eight controllers that take up one job at once exactly one acts; the others leave with exit code 4",
    real="processes, their locks and leases, the directory store on this disk, boto3 over HTTP, compare-and-swap",
    simulated="S3: moto behind the lab's strict front; the controllers take the lease only, and rent nothing",
    run=run,
)
