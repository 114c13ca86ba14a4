"""Composes a machine that drives its own job: the same supervisor, with what a machine may reach."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.domain.errors import NodeError, UsageError
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.supervision.self_driving import DriveOrder, parse_order
from gpucloud.store import open_store
from gpucloud.store.contract import CountingStore, Tally
from gpucloud.system.processes import last_line
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.supervise.provision import OwnGroup, OwnProvisioner

if TYPE_CHECKING:
    from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
    from gpucloud.domain.state.state import JobState
    from gpucloud.ports import Clock, DataSets, MarketData, NodeGroup, Outputs
    from gpucloud.store import ObjectStore
    from gpucloud.usecases.services import Services

_PERIODS_S = {Cloud.LOCAL: 0.5}
_PERIOD_S = 5.0
"""How often a driver looks whether somebody else drives: in S3 each look is a paid request (0.0000004 USD)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """This node as one that can drive; `root` is the agent's folder, `wanted` says where its order is."""

    root: Path
    wanted: ControllerWanted

    @property
    def clock(self) -> Clock:
        """This machine's clock."""
        return SystemClock()

    @property
    def store(self) -> ObjectStore:
        """The job's store."""
        return open_store(self.wanted.store)

    def order(self) -> DriveOrder | None:
        """Return what is to be driven, None when that was withdrawn. Raises StoreError, Malformed."""
        stored = self.store.get(self.wanted.order)
        return parse_order(stored.data) if stored is not None else None

    def period_s(self, order: DriveOrder) -> float:
        """Return how many seconds may lie between two looks at who drives."""
        return _PERIODS_S.get(order.job.cloud, _PERIOD_S)

    def services(self, order: DriveOrder) -> Services:
        """Return everything that supervising the job from here needs. Raises NodeError, StoreError."""
        from dataclasses import replace

        from gpucloud.adapters.scripts import how_it_saves
        from gpucloud.adapters.ssh.keys import generate_key
        from gpucloud.adapters.ssh.shell import SshShell
        from gpucloud.usecases.services import Package, Services

        key, tally = self._key(order), Tally()
        package = Path(sys.argv[0]).read_bytes()
        job = replace(order.job, code=self._code(order))
        return Services(
            job=job,
            name=order.name,
            clock=SystemClock(),
            store=CountingStore(self.store, tally),
            tally=tally,
            provisioner=OwnProvisioner(order.group),
            group=self.group(order),
            market=self._market(order),
            shell=SshShell(key, python=order.node_python, cache=self._folder / "cache"),
            outputs=self._outputs(order),
            data_sets=self._data_sets(order),
            public_key=generate_key(key),
            package=Package(data=package, sha256=order.package_sha256),
            rules=order.rules,
            terms=order.terms,
            period_s=order.period_s,
            flush_s=order.flush_s,
            power_off=order.power_off,
            key=order.key,
            controller=self.wanted,
            on_machine=True,
            saving=how_it_saves(job).saving,
        )

    def group(self, order: DriveOrder) -> NodeGroup:
        """Return the job's own group, as far as its machines may do anything about it."""
        match order.job.cloud:
            case Cloud.LOCAL:
                from gpucloud.adapters.local.group import LocalNodeGroup

                return OwnGroup(LocalNodeGroup(Path(order.records)), order.group)
            case Cloud.AWS:
                from gpucloud.wiring.aws import own_nodes

                return OwnGroup(own_nodes(order, self.store), order.group)
            case Cloud.SSH:
                raise _cannot(order)

    def end_group(self, order: DriveOrder, state: JobState) -> None:
        """Have every machine of the group end, this one too; the free parts stay for a command from outside."""
        self.group(order).resize(order.group, 0, state.pool)

    @property
    def _folder(self) -> Path:
        return self.root / "drive"

    def _market(self, order: DriveOrder) -> MarketData:
        match order.job.cloud:
            case Cloud.LOCAL:
                from gpucloud.adapters.local.market import LocalMarket

                return LocalMarket()
            case Cloud.AWS:
                from gpucloud.wiring.aws import own_market

                return own_market(order)
            case Cloud.SSH:
                raise _cannot(order)

    def _outputs(self, order: DriveOrder) -> Outputs:
        from gpucloud.adapters.transfer.outputs import OutputsFolder, StoredOutputs

        def fetching(target: Path) -> Outputs:
            return OutputsFolder(order.job.outputs, target, python=order.node_python)

        return StoredOutputs(self.store, order.name, self._folder / "outputs", fetching)

    def _data_sets(self, order: DriveOrder) -> DataSets | None:
        if not order.job.data:
            return None
        from gpucloud.adapters.transfer.datasets import Sources

        return Sources(profile=None, python=order.node_python, cache=self._folder / "cache")

    def _key(self, order: DriveOrder) -> Path:
        path = self._folder / "key"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(order.key)
        return path

    def _code(self, order: DriveOrder) -> Path:
        """Return the job's code as it was started: what runs on this node writes into a copy of its own."""
        stored = self.store.get(order.tree)
        if stored is None:
            raise NodeError(f"{order.tree} is not in the store", hint=f"gpucloud train {order.name}")
        target = self._folder / "code"
        argv = (sys.executable, "-I", sys.argv[0], "code", str(target), order.tree_name)
        done = subprocess.run(argv, input=stored.data, capture_output=True, check=False)
        if done.returncode != 0:
            why = last_line(done.stderr)
            raise NodeError(f"the code in the store is not whole: {why}", hint=f"gpucloud train {order.name}")
        return target / order.tree_name


def _cannot(order: DriveOrder) -> UsageError:
    return UsageError(f"machines on {order.job.cloud.value} do not drive their jobs", hint="gpucloud train goes on")
