"""The driver's loop: wait until nobody supervises the job, then do it, with all that a supervisor outside does."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.agent.drive.starting import able, make
from gpucloud.agent.network import MetadataClient, endpoint, watcher_from
from gpucloud.agent.single_process import controller_process
from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import GpucloudError, LeaseHeld, NodeError
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
from gpucloud.domain.state.order import keeps
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.snapshot import DriveTrial, Supervising
from gpucloud.system.retries import Retry
from gpucloud.system.wholefile import read_text
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import is_over, take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.supervise.session import Session
from gpucloud.wiring.services import Machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpucloud.domain.money.budget import Spend
    from gpucloud.domain.node.node import Notice
    from gpucloud.domain.state.state import JobState
    from gpucloud.domain.supervision.action import Action
    from gpucloud.domain.supervision.self_driving import DriveOrder
    from gpucloud.domain.supervision.snapshot import Snapshot

_LONGEST_PAUSE_S = 30.0
_UNMADE = Retry(first_s=30.0, factor=1.0)  # for ever: without it the machine is of no use


class NodeInterrupted(Exception):
    """This node is being taken: another one is to drive."""


def be_controller(root: Path, lock: int, ready: int, *, package: str) -> int:
    """Drive the job of `root` until its order is withdrawn or there is nothing left to do. Return the exit code.

    `package` is the hash of what this process runs from. `lock` is the driver's lock, held for as long as this process
    lives; `ready` is told when the order was read.
    """
    controller_process(root).sit(package)
    wanted = from_json(ControllerWanted, read_text(root / "drive" / "wanted.json") or "")
    if able() != sys.executable:
        return _become_able(root, wanted, lock, ready)
    os.set_inheritable(lock, False)  # noqa: FBT003  (positional in the standard library)
    know_region()
    machine = Machine(root, wanted)
    watcher = watcher_from(os.environ, lambda: None)
    controller = Controller(machine=machine, node=_node_id(), notice=lambda: watcher.notice if watcher else None)
    machine.order()
    os.write(ready, b"ready")
    os.close(ready)
    if watcher:
        watcher.start()
    controller.run()
    return 0


def _become_able(root: Path, wanted: ControllerWanted, lock: int, ready: int) -> int:
    """Have a Python made that can drive, and be it. What is made may take minutes: whoever waits is told at once."""
    os.write(ready, b"ready")
    python = _made(wanted)
    os.set_inheritable(lock, True)  # noqa: FBT003  (positional in the standard library)
    os.set_inheritable(ready, True)  # noqa: FBT003
    argv = (python, "-I", sys.argv[0], "drive", "--root", str(root), "--as", str(lock), str(ready))
    os.execv(python, argv)  # noqa: S606  (no shell, an absolute path)


def _made(wanted: ControllerWanted) -> str:
    tries = _UNMADE.begin()
    while True:
        try:
            return make(wanted.pip_mirror)
        except NodeError as error:
            tell(f"{error}; trying again in {_UNMADE.first_s:.0f} s")
            tries.again()


def know_region() -> None:
    """Let what asks AWS know where this machine stands: there, only the metadata service says so."""
    if "AWS_REGION" in os.environ:
        return
    region = _metadata("/latest/meta-data/placement/region")
    if region is not None:
        os.environ["AWS_REGION"] = region


@dataclass(slots=True)
class Controller:
    """One node's readiness to supervise. All it knows is in the store: it may be killed and started at any time."""

    machine: Machine
    node: str
    notice: Callable[[], Notice | None]
    _complaint: str = field(default="", init=False)
    _trial: DriveTrial | None = field(default=None, init=False)
    _noticed_at: datetime | None = field(default=None, init=False)

    def run(self) -> None:
        """Look, drive when nobody else does, and return when there is nothing left to drive."""
        pause_s = 0.0
        while True:
            try:
                order = self.machine.order()
                if order is None or self._is_over(order):
                    return
                pause_s = self.machine.period_s(order)
            except (LeaseHeld, NodeInterrupted):
                pause_s = max(pause_s, 1.0)
            except (GpucloudError, Malformed) as error:
                pause_s = min(_LONGEST_PAUSE_S, 2 * max(pause_s, 1.0))
                self._complain(str(error))
            time.sleep(pause_s)

    def _is_over(self, order: DriveOrder) -> bool:
        """Drive the job if nobody does; return whether it needs no driver any more."""
        jobs = JobStore(self.machine.store, order.name, on_machine=True)
        loaded = jobs.load()
        if loaded is None:
            return True
        if loaded[0].status.ended:
            return self._end(order, jobs)
        if self._leaves(order):
            return False
        if not is_over(*loaded):
            self._try(order, jobs, loaded[0])
            return False
        state = self._drive(order)
        self._complaint = ""
        return self._end(order, jobs, left=state)

    def _try(self, order: DriveOrder, jobs: JobStore, state: JobState) -> None:
        """Try what driving needs, while somebody outside supervises: he waits for our word before he leaves.

        Writing the state and seeing the group stand for the rest: what ends machines cannot be tried without doing it.
        """
        number, refused = Orders(jobs=jobs, clock=self.machine.clock).newest().order.number, None
        if self._trial == DriveTrial(number=number, refused=None):
            return
        try:
            jobs.try_to_keep(state)
            self.machine.group(order).describe(order.group)
        except GpucloudError as error:
            refused = str(error)
            self._complain(f"not able to drive {order.name}: {refused}")
        trial = DriveTrial(number=number, refused=refused)
        if trial != self._trial:
            jobs.keep_trial(self.node, trial)
            self._trial = trial

    def _drive(self, order: DriveOrder) -> JobState:
        """Drive until nothing is left to do for a machine; return the state then: ended, or waiting for a command."""
        services = self.machine.services(order)
        orders = Orders(jobs=services.jobs, clock=services.clock)
        who = Supervising(node=self.node)
        tell(f"driving {order.name}")
        return Session(
            services=services, orders=orders, watcher=Told(), who=who, asked=lambda: self._asked(order)
        ).run()

    def _end(self, order: DriveOrder, jobs: JobStore, left: JobState | None = None) -> bool:
        """End the group, and so this node: last of all, when the state says what became of the job.

        With the lease: whoever goes on with the job has it, and machines that are new. Raises LeaseHeld then. `left` is
        the state in which this machine's own session left it, where nothing is to be done until a command says so.
        """
        with take(jobs, self.machine.clock, node=self.node) as lease:
            state, wanted = lease.state, Orders(jobs=jobs, clock=self.machine.clock).newest().order
            untouched = left is not None and (left.epoch + 1, left.order_number) == (state.epoch, wanted.number)
            if not state.status.ended and not untouched:
                return False
            if not state.torn_down and not keeps(wanted, state):
                lease.confirm()
                tell(f"{order.name}: {state.message or state.status.value}; ending the machines")
                self.machine.end_group(order, state)
        return True

    def _asked(self, order: DriveOrder) -> ExitReason | None:
        if self._leaves(order):
            raise NodeInterrupted
        return None

    def _leaves(self, order: DriveOrder) -> bool:
        """Whether another machine is to drive, because this one is being taken.

        Others that can have two looks for it. What none of them took by then, as what has one machine, is driven from
        here to the end: nobody else would bring the results into the store.
        """
        if self.notice() is None or order.job.resources.nodes == 1:
            return False
        now = self.machine.clock.now()
        self._noticed_at = self._noticed_at or now
        return (now - self._noticed_at).total_seconds() < 2 * self.machine.period_s(order)

    def _complain(self, said: str) -> None:
        if said != self._complaint:
            self._complaint = said
            tell(said)


class Told:
    """The watcher of a driver: its log."""

    def story(self, line: str) -> None:
        """Write the line."""
        tell(line)

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """Nobody looks on."""

    def output(self, attempt: int, rank: int, text: str) -> None:
        """It is kept in the store."""


def tell(line: str) -> None:
    """Write a line with its time to the driver's log."""
    sys.stderr.write(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} {line}\n")
    sys.stderr.flush()


def _node_id() -> str:
    return _metadata("/latest/meta-data/instance-id") or os.uname().nodename


def _metadata(path: str) -> str | None:
    client = MetadataClient(endpoint(os.environ))
    try:
        status, body = client.get(path)
    finally:
        client.close()
    return body.strip() if status == 200 else None
