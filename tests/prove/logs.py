"""Output of any size, over a line that is cut again and again: every line once, and no memory for it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.home import Home
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.job.spec import KnownJob, Market
from gpucloud.domain.node.status import RunState
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import Attempt, JobState, JobStatus, Member
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.look import LogReader, read_node
from tests.fakes.nodes import Server, embedded_server
from tests.prove.goal import Figure, Form, Goal
from tests.standins.agent_node import AgentNode
from tests.standins.noisy_output import WRITER, unsaid, wrong_lines
from tests.standins.ssh_line import Line, line_to

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
CUTS = 10
GROWTH_MIB = 50
_MOST_DISK_MIB = 1024 + 128
_AHEAD_BYTES = 512 * MIB  # the writer waits for the reader: a node keeps 1 GiB, and what is older is dropped
_LIMIT_S = 3600.0
_WORKER = ("/bin/sh", "-c", 'exec "$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1', "sh")


@dataclass
class _Read:
    """What came of one attempt's output: in the store, and from `logs -f`; what reading it took."""

    jobs: JobStore
    followed: Path
    cuts: int
    reader_growth_mib: float
    follower_growth_mib: float
    disk_mib: float

    def both(self) -> tuple[tuple[str, Iterator[bytes]], ...]:
        return ("the store", _kept(self.jobs)), ("logs -f", _pieces(self.followed))


def run(form: Form) -> Iterator[Figure]:
    """Yield lines that are missing, doubled or torn, in the store and in `logs -f`; cuts; memory; the node's disk."""
    total = 30 * MIB if form is Form.SHORT else 5 * 1024 * MIB
    with _attempted(total, ahead=_AHEAD_BYTES, cuts=CUTS) as read:
        wrong = sum(wrong_lines(where, pieces, total) for where, pieces in read.both())
    yield Figure(name="logs", value=wrong, limit=0)
    yield Figure(name="logs.cuts", value=read.cuts, limit=CUTS, least=True)
    yield Figure(name="logs.mib", value=total / MIB, limit=total / MIB, least=True)
    yield Figure(name="logs.reader_growth_mib", value=read.reader_growth_mib, limit=GROWTH_MIB)
    yield Figure(name="logs.follower_growth_mib", value=read.follower_growth_mib, limit=GROWTH_MIB)
    yield Figure(name="logs.node_disk_mib", value=read.disk_mib, limit=_MOST_DISK_MIB)
    if form is Form.LONG:
        yield from _unthrottled(3 * 1024 * MIB)


def _unthrottled(total: int) -> Iterator[Figure]:
    """A worker that waits for nobody: what is dropped unread, and whether a line says so, with its size."""
    with _attempted(total, ahead=sys.maxsize, cuts=0) as read:
        (wrong, lost), (wrong_followed, lost_followed) = (unsaid(where, pieces, total) for where, pieces in read.both())
    yield Figure(name="logs.unthrottled-unsaid-bytes", value=wrong + wrong_followed, limit=0)
    # A proof in which nothing was lost would show nothing.
    yield Figure(name="logs.unthrottled-dropped-mib", value=min(lost, lost_followed) / MIB, limit=1, least=True)
    yield Figure(name="logs.unthrottled-node_disk_mib", value=read.disk_mib, limit=_MOST_DISK_MIB)


@contextlib.contextmanager
def _attempted(total: int, *, ahead: int, cuts: int) -> Iterator[_Read]:
    """Have a worker write that much, and give what came of it, while its files are there."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as undo:
        folder = Path(name)
        server = undo.enter_context(embedded_server(folder / "node"))
        line = undo.enter_context(line_to(server.node.port))
        agent = _agent(folder, server)
        undo.callback(agent.destroy)
        jobs = _known(folder, server)
        follower = _Follower(folder)
        undo.callback(follower.close)
        env = {"RANK": "0", "GPUCLOUD_RANKS": "0", "TOTAL": str(total), "AHEAD": str(ahead)}
        env["TAKEN"] = str(folder / "taken")
        (folder / "taken").write_text("0")
        agent.want(agent.launch(1, *_WORKER, sys.executable, "-c", WRITER, **env))
        places = sorted(random.Random(3).sample(range(total // 20, total - total // 20), cuts))
        reader = _Reader(jobs, server, line, places, follower, folder / "taken")
        reader.read_all()
        _end(jobs)
        follower.wait()
        disk = _disk_bytes(agent.folder(1) / "rank-0.log")
        yield _Read(jobs, folder / "followed", reader.cuts, reader.growth_mib, follower.growth_mib, disk_mib=disk / MIB)


def _disk_bytes(path: Path) -> int:
    """Return what the file takes in the end: the last of what goes does so 5 s after that was said."""
    deadline = time.monotonic() + 30
    while (taken := path.stat().st_blocks * 512) > _MOST_DISK_MIB * MIB and time.monotonic() < deadline:
        time.sleep(0.2)
    return taken


class _Memory:
    """The most that a process grew by since the first look; the first few looks are its start."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first: int | None = None
        self.growth_mib = 0.0

    def look(self) -> None:
        with contextlib.suppress(OSError, StopIteration):
            text = Path(f"/proc/{self._pid}/status").read_text()
            kib = int(next(row.split()[1] for row in text.splitlines() if row.startswith("VmRSS")))
            self._first = self._first or kib
            self.growth_mib = max(self.growth_mib, (kib - self._first) / 1024)


class _Follower:
    """`gpucloud logs -f` in a process of its own; what it writes is in `followed`."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "GPUCLOUD_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
        argv = (sys.executable, "-m", "gpucloud", "logs", "-f", "noisy")
        self._out = (folder / "followed").open("wb")
        self._process = subprocess.Popen(argv, env=env, stdout=self._out, stdin=subprocess.DEVNULL)
        self._memory = _Memory(self._process.pid)
        self._written = folder / "followed"

    @property
    def growth_mib(self) -> float:
        return self._memory.growth_mib

    def look(self) -> None:
        if self._written.stat().st_size > 0:  # before, it is still starting
            self._memory.look()

    def wait(self) -> None:
        while self._process.poll() is None:
            self.look()
            time.sleep(0.2)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._out.close()


class _Reader:
    """A supervisor's reading, through a line that is cut at seeded places of the output."""

    def __init__(
        self, jobs: JobStore, server: Server, line: Line, places: list[int], follower: _Follower, taken: Path
    ) -> None:
        self.cuts = 0
        self._taken = taken
        self._logs = LogReader(jobs, lambda attempt, rank, text: None)
        self._shell = SshShell(server.key_file)
        self._node = replace(server.node, port=line.port)
        self._line, self._follower = line, follower
        self._places = places
        self._memory = _Memory(os.getpid())

    @property
    def growth_mib(self) -> float:
        return self._memory.growth_mib

    def read_all(self) -> None:
        deadline, flushed = time.monotonic() + _LIMIT_S, time.monotonic()
        attempt = _attempt(self._node.id)
        while time.monotonic() < deadline:
            self._memory.look()
            self._follower.look()
            taken = self._logs.taken
            with contextlib.suppress(HostUnreachable):
                status, news = read_node(self._shell.host(self._node), self._node.id, attempt, 1, self._logs)
                part = status.attempt if status else None
                if part is not None and part.state is RunState.EXITED and not news:
                    break
            self._cut_if_due()
            self._taken.with_suffix(".new").write_text(str(self._logs.taken))
            self._taken.with_suffix(".new").replace(self._taken)
            if time.monotonic() - flushed > 1:
                self._logs.flush()
                flushed = time.monotonic()
            if self._logs.taken == taken:
                time.sleep(0.05)
        self._logs.flush()
        self._shell.close()

    def _cut_if_due(self) -> None:
        """The next piece is asked for at once, so that most cuts fall into the middle of an answer."""
        if self._places and self._logs.taken >= self._places[0]:
            self._places.pop(0)
            self.cuts += 1
            self._line.cut_after(random.Random(self.cuts).randrange(200_000))


def _agent(folder: Path, server: Server) -> AgentNode:
    data, sha256 = package_zip()
    package = folder / f"gpucloud-{sha256}.zip"
    package.write_bytes(data)
    agent = AgentNode(server.home, package)
    agent.start()
    return agent


def _attempt(node_id: str) -> Attempt:
    started = datetime.now(timezone.utc)
    return Attempt(number=1, members=(Member(node_id=node_id, rank=0),), port=1, started_at=started)


def _known(folder: Path, server: Server) -> JobStore:
    """Make the job known to the command line, running."""
    home = Home(folder / "home")
    home.root.mkdir(mode=0o700)
    home.remember(KnownJob(name="noisy", store=home.store, file=folder / "noisy.yaml"))
    jobs = JobStore(open_store(home.store), "noisy")
    pool = Pool(instance_type="cpu", zone="local-a", market=Market.SPOT)
    state = JobState(
        job="noisy", pool=pool,
        cap_usd_per_hour=Decimal(1), status=JobStatus.RUNNING, attempts=(_attempt(server.node.id),),
    )  # fmt: skip
    jobs.create(state)
    return jobs


def _end(jobs: JobStore) -> None:
    loaded = jobs.load()
    assert loaded is not None
    state, stored = loaded
    jobs.replace(replace(state, status=JobStatus.SUCCEEDED), stored.version)


def _kept(jobs: JobStore) -> Iterator[bytes]:
    for part in jobs.records.log_parts():
        yield jobs.records.read_log(part)


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(MIB):
            yield data


GOAL = Goal(
    promise="output arrives whole, each line once, over a line that is cut ten times, as long as what is unread stays "
    "below the 1 GiB that a node keeps of it; of what goes beyond, a line in the log says how much was lost; nobody's "
    "memory or disk fills up",
    real="the agent, SSH, the supervisor's reading, the store, `gpucloud logs -f`; short: 30 MiB, long: 5 GiB, and 3 "
    "GiB as fast as a worker can",
    simulated="the job's other parts: a worker that only writes, no cloud; but for the 3 GiB the writer waits when it "
    "is 512 MiB ahead",
    run=run,
)
