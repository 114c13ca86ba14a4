"""One schedule of several supervisors that want one job, over the product's own lease and the agent's own fence."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.agent.attempt.files import Inbox
from gpucloud.domain.errors import GpucloudError, LeaseHeld
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.status import Desired, Stop, desired_to_json
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import JobState
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from tests.sim.loom import EPOCH, Loom, Process
from tests.sim.store import Faults, Store, StoreLine
from tests.sim.threads import simulated

_LEASE_S = 15.0
_LENGTH_S = 150.0
_POOL = Pool(instance_type="p2.xlarge", zone="us-east-2a", market=Market.SPOT)
FIRST = JobState(
    job="job",
    pool=_POOL,
    cap_usd_per_hour=Decimal(1),
    lease_s=_LEASE_S,
)


@dataclass(slots=True)
class Outcome:
    """What one schedule showed; `wrong` says each breach in words, and is empty where all is well."""

    wrong: list[str] = field(default_factory=list)
    owners: int = 0
    acknowledged: int = 0
    refused_commands: int = 0


class Node:
    """A machine that obeys through the agent's own inbox."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._path = folder / "desired.json"
        self._inbox = Inbox(folder)
        self._written = 0

    def command(self, epoch: int) -> bool:
        """Write a command, as a supervisor does, and return whether the agent goes by it."""
        self._written += 1
        mark = EPOCH + timedelta(seconds=self._written)
        self._path.write_text(desired_to_json(Desired(epoch=epoch, launch=None, stop=Stop.NO, paid_until=mark)))
        self._inbox.poll()
        return self._inbox.desired is not None and self._inbox.desired.paid_until == mark


class Schedule:
    """Supervisors on hosts with wrong clocks that pause, die, lose replies, and begin again."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._dice = random.Random(seed)
        self._loom = Loom()
        self._store = Store(self._loom)
        self._node = Node(folder)
        self._processes: dict[int, Process] = {}
        self._acknowledged: set[int] = set()
        self._owner_of: dict[int, str] = {}
        self._highest_obeyed = 0
        self._highest_epoch = 0
        self._wedged_since: float | None = None
        self.outcome = Outcome()

    def run(self) -> Outcome:
        JobStore(self._store, "job").create(FIRST)
        with simulated(self._loom, self._dice, self._processes, lambda: None):
            for number in range(self._dice.choice((2, 3, 4))):
                self._loom.at(self._dice.uniform(0, 5), lambda number=number: self._begin(f"host{number % 3}"))
            self._loom.at(self._dice.uniform(5, 30), self._disturb)
            self._loom.watch = self._look
            self._loom.run(_LENGTH_S)
            for process in self._processes.values():
                process.kill()
        if not self._acknowledged:
            self.outcome.wrong.append("nobody ever wrote")
        return self.outcome

    def _begin(self, host: str) -> None:
        process = Process(self._loom, host, host=host, skew_s=self._dice.uniform(-3600, 3600))
        self._processes[process.pid] = process
        self._loom.spawn(process, lambda: self._supervise(process))

    def _disturb(self) -> None:
        process = self._dice.choice([one for one in self._processes.values() if one.alive])
        if self._dice.random() < 0.4:
            process.kill()
            self._begin(process.host)
        else:
            process.pause(self._dice.uniform(0, 4 * _LEASE_S))
        self._loom.after(self._dice.expovariate(1 / 12), self._disturb)

    def _supervise(self, process: Process) -> None:
        line = StoreLine(self._store, process, self._dice, Faults(refused=0.05, reply_lost=0.08))
        while True:
            try:
                self._hold(process, JobStore(line, "job"))
            except GpucloudError:
                process.sleep(self._dice.uniform(0.5, 5))

    def _hold(self, process: Process, jobs: JobStore) -> None:
        lease = take(jobs, process)
        self._take_note(lease.state)
        with lease:
            for _ in range(self._dice.randint(1, 8)):
                process.sleep(self._dice.uniform(0.1, 5))
                self._command(lease.state.epoch)
                process.sleep(self._dice.uniform(0, 1))
                counted = lease.state.reopened_after + 1
                try:
                    lease.write(replace(lease.state, reopened_after=counted))
                except LeaseHeld:
                    self._judge_loss(process, lease.state)
                    raise
                self._acknowledge(counted)
        process.sleep(self._dice.uniform(0, 4))

    def _take_note(self, state: JobState) -> None:
        self.outcome.owners += 1
        assert state.owner is not None
        if self._owner_of.setdefault(state.epoch, state.owner.id) != state.owner.id:
            self.outcome.wrong.append(f"epoch {state.epoch} was given to two owners")

    def _command(self, epoch: int) -> None:
        if self._node.command(epoch):
            if epoch < self._highest_obeyed:
                self.outcome.wrong.append(f"a command of epoch {epoch} was obeyed after one of {self._highest_obeyed}")
            self._highest_obeyed = max(epoch, self._highest_obeyed)
        else:
            self.outcome.refused_commands += 1

    def _acknowledge(self, counted: int) -> None:
        if counted in self._acknowledged:
            self.outcome.wrong.append(f"update {counted} was acknowledged twice: one of them is lost")
        self._acknowledged.add(counted)
        self.outcome.acknowledged += 1

    def _judge_loss(self, process: Process, state: JobState) -> None:
        """An owner may be told that it was followed only if it was."""
        stored = JobStore(self._store, "job").load()
        assert stored is not None
        if stored[0].epoch == state.epoch:
            self.outcome.wrong.append(f"{process.name} was told that it lost epoch {state.epoch}, and nobody took it")

    def _look(self) -> None:
        found = JobStore(self._store, "job").store.get("jobs/job/state.json")
        if found is None:
            self.outcome.wrong.append("the state was deleted")
            return
        epoch = _epoch(found.data)
        if epoch < self._highest_epoch:
            self.outcome.wrong.append(f"the epoch fell from {self._highest_epoch} to {epoch}")
        self._highest_epoch = max(epoch, self._highest_epoch)


def _epoch(data: bytes) -> int:
    start = data.index(b'"epoch"') + 8
    return int(data[start : data.index(b",", start)])
