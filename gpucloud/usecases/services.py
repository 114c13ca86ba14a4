"""What supervising a job is given: its ports in one value, the learned policy's tables, and what a machine may."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Protocol

from gpucloud.domain.checkpoint.protection import Saving
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.code import WholeCode
from gpucloud.domain.job.spec import Job, Resources
from gpucloud.domain.market.learned import Lesson, Tables
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted
from gpucloud.domain.node.node import GroupView, is_same_group
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.supervision.action import Action
from gpucloud.domain.supervision.self_driving import DriveOrder
from gpucloud.domain.supervision.snapshot import Rules, Snapshot
from gpucloud.ports import Clock, ClusterSpec, DataSets, MarketData, NodeGroup, Outputs, Provisioner, Shell
from gpucloud.store import ObjectStore
from gpucloud.store.contract import Tally
from gpucloud.usecases.jobstore.jobstore import JobStore

MakeTables = Callable[[Lesson], Tables]
_SAME = 0.1  # tables hold for a task that differs by so little


@dataclass(slots=True)
class Learning:
    """Has tables made, a few seconds in a thread of `pool`; until there are some, there are none."""

    make: MakeTables | None
    pool: ThreadPoolExecutor
    _lesson: Lesson | None = None
    _making: Future[Tables] | None = None
    _tables: Tables | None = None

    def tables(self, lesson: Lesson | None) -> Tables | None:
        """Return the newest tables, and have others made where the job is not any more what they were made for."""
        if self._making is not None and self._making.done():
            self._tables, self._making = self._making.result(), None
        if self.make is not None and lesson is not None and self._making is None and not self._knows(lesson):
            self._lesson, self._making = lesson, self.pool.submit(self.make, lesson)
        return self._tables

    def _knows(self, lesson: Lesson) -> bool:
        known = self._lesson
        if known is None or (known.zones, known.gpus) != (lesson.zones, lesson.gpus):
            return False
        pairs = (
            (known.task.work_s, lesson.task.work_s),
            (known.task.span_s, lesson.task.span_s),
            (known.task.changeover_s, lesson.task.changeover_s),
            (known.task.on_demand_usd_per_hour, lesson.task.on_demand_usd_per_hour),
        )
        return all(math.isclose(old, new, rel_tol=_SAME) for old, new in pairs)


# The ports that supervising a job needs, in one value.


class PackCode(Protocol):
    """Makes a code folder one object for the store."""

    def __call__(self, root: Path, *, limit: int, apart: str = "") -> WholeCode:
        """Return the tree with the object, None for one with more than `limit` bytes. Raises UsageError.

        `apart` is the path in it of the job file, which is no code; empty where it lies elsewhere.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The zip that nodes run; `sha256` names it there."""

    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfBoot:
    """Machines that can make themselves fit: as which login, and how the code is put into the store for them."""

    login: str
    pack_code: PackCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything outside, for one job. `secrets` are the values of the job's secret names.

    `moved_to` tells this supervisor's address where that is another by now than the firewall lets in; it is None
    itself where there is no such firewall.
    `power_off` is the command by which a node ends itself after its paid time, empty for none. `key` is the cluster's
    private SSH key, from which the secrets of attempts are made. `self_boot` is None where machines have no first boot
    of ours. `order` is what the machines of a job that drives itself go by, as far as it is known before the group is,
    None for any other job; `controller` is where they find it. `tally` counts what is asked of the store. `make_tables`
    makes the learned policy's, None for none. `on_machine`: it is a machine of the job that supervises.
    """

    job: Job
    name: str
    clock: Clock
    store: ObjectStore
    provisioner: Provisioner
    group: NodeGroup
    market: MarketData
    shell: Shell
    outputs: Outputs
    public_key: str
    package: Package
    rules: Rules
    period_s: float
    flush_s: float = 1.0
    moved_to: Callable[[], str | None] | None = None
    terms: Terms = field(default_factory=Terms)
    power_off: tuple[str, ...] = ()
    key: bytes = field(default=b"", repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict)
    data_sets: DataSets | None = None
    self_boot: SelfBoot | None = None
    order: DriveOrder | None = None
    controller: ControllerWanted | None = None
    tally: Tally = field(default_factory=Tally)
    make_tables: MakeTables | None = None
    on_machine: bool = False
    saving: Saving = Saving.UNKNOWN
    """How the job's script saves, as far as its code and its job file tell."""
    stored_outputs: Outputs | None = None
    """Where outputs go that cannot be brought home, None where they go to the store anyway."""

    @property
    def cluster(self) -> str:
        """The name of the job's machines, and of what Terraform makes for them."""
        return cluster_of(self.name)

    @property
    def jobs(self) -> JobStore:
        """The job's objects."""
        return JobStore(self.store, self.name, on_machine=self.on_machine)


def cluster_of(job: str) -> str:
    """Return the name of a job's cluster."""
    return f"gpucloud-{job}"


class Watcher(Protocol):
    """Who looks on while a job is supervised."""

    def story(self, line: str) -> None:
        """Something happened, in one line."""
        ...

    def tick(self, snapshot: Snapshot, action: Action, spend: Spend) -> None:
        """One pass was made."""
        ...

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        ...


# What a machine that drives its own job may do to its cloud: its group's level and nodes, and no later shut-off.


_OUTSIDE = "run `gpucloud train` outside"


class OwnGroup:
    """Implements `NodeGroup` for one group only, its shut-off never later than it is. Raises ProvisionError."""

    def __init__(self, groups: NodeGroup, own: str) -> None:
        self._groups = groups
        self._own = own

    def describe(self, group: str) -> GroupView:
        """Return the group as the cloud lists it now."""
        return self._groups.describe(self._checked(group))

    def arm(self, group: str, until: datetime) -> None:
        """Move the shut-off closer."""
        armed = self._groups.describe(self._checked(group)).armed_until
        if armed is None or until > armed:
            raise ProvisionError(f"{group}: a machine may not move its shut-off from {armed} to {until}", hint=_OUTSIDE)
        self._groups.arm(group, until)

    def resize(self, group: str, size: int, pool: Pool, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Set the level."""
        self._groups.resize(self._checked(group), size, pool, cap_usd_per_hour=cap_usd_per_hour)

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Count a node that is being interrupted no more."""
        self._groups.relieve(self._checked(group), node_id, cap_usd_per_hour=cap_usd_per_hour)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        """End one node by choice."""
        self._groups.terminate(self._checked(group), node_id, bad=bad)

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:  # noqa: ARG002
        """Refused: whoever ends all machines and waits for it is none of them."""
        raise ProvisionError(f"{group}: a machine cannot see its own group end", hint=_OUTSIDE)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> str | None:
        """Ask the cloud to take a node, as a drill."""
        return self._groups.interrupt(self._checked(group), node_id, notice=notice)

    def _checked(self, group: str) -> str:
        if not is_same_group(group, self._own):
            raise ProvisionError(f"{group}: a machine of {self._own} may not touch it", hint=_OUTSIDE)
        return group


class OwnMarket:
    """Implements `MarketData` where nothing is bought: what machines cost, and no offer of others."""

    def __init__(self, market: MarketData) -> None:
        self._market = market

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:  # noqa: ARG002
        """Return none."""
        return ()

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's price points that cover start..end, in order."""
        return self._market.prices(pool, start, end)


class OwnProvisioner:
    """Implements `Provisioner` where nothing can be made or removed: machines have no Terraform."""

    def __init__(self, own: str) -> None:
        self._own = own

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  there is only one
        """Return the machine's own group."""
        return self._own

    def image(self, region: str) -> None:
        """Return None: what there is was chosen outside."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{spec.name}: a machine cannot make its own group", hint=_OUTSIDE)

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{group}: a machine cannot remove its own group", hint=_OUTSIDE)
