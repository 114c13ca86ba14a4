"""A cloud in memory: the embedded cloud's own rule for a group, and how it is late, refuses and loses replies."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.adapters.local.node import settle
from gpucloud.adapters.local.records import GroupRecord, NodeRecord, noticed
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import Terms, meter, total
from gpucloud.domain.node.node import EndCause, Fault, GroupView, NodeState, Refusal
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state.state import UsageInterval
from gpucloud.ports import ClusterSpec
from tests.sim.loom import EPOCH, Loom, Process

NAME = "gpucloud-job"
POOLS = tuple(Pool(instance_type="p2.xlarge", zone=f"us-east-2{letter}", market=Market.SPOT) for letter in "abc")
DEAR_POOLS = tuple(replace(pool, market=Market.ON_DEMAND) for pool in POOLS)
CAP = Decimal("3.60")  # a tenth of a cent a second
LATEST_S = 120.0  # how late the shut-off may fire (Auto Scaling user guide)


class Prices:
    """Implements `MarketData`: in every zone a walk below the cap, and sometimes at it; one price a moment for ever.

    On demand, where that is offered, machines cost the cap.
    """

    def __init__(
        self, loom: Loom, seed: int, *, at_cap: bool = False, every_s: float = 180.0, on_demand: bool = False
    ) -> None:
        self._loom = loom
        self._every = timedelta(seconds=every_s)
        dice = random.Random(seed)
        self._walks = {pool: [CAP if at_cap else price for price in _walk(dice)] for pool in POOLS}
        if on_demand:
            self._walks.update({pool: [CAP] for pool in DEAR_POOLS})

    def offers(self, wanted: object) -> tuple[Offer, ...]:
        now = self._loom.time
        return tuple(
            Offer(pool=pool, usd_per_hour=self._price(pool, now), cap_usd_per_hour=CAP, as_of=now, gpus=1)
            for pool in self._walks
        )

    def _price(self, pool: Pool, now: datetime) -> Decimal:
        return self.prices(pool, now, now)[-1].usd_per_hour

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        walk = self._walks[pool]
        first, last = ((moment - EPOCH) // self._every for moment in (start, max(start, end)))
        return tuple(
            PricePoint(since=EPOCH + number * self._every, usd_per_hour=walk[number % len(walk)])
            for number in range(first, last + 1)
        )


def _walk(dice: random.Random) -> list[Decimal]:
    price, found = dice.uniform(0.5, 1.0), []
    for _ in range(200):
        price = min(1.0, max(0.3, price * (1 + dice.gauss(0, 0.05))))
        found.append((CAP * Decimal(price)).quantize(Decimal("0.0001")))
    return found


@dataclass(slots=True, kw_only=True)
class Weather:
    """How a cloud behaves: what is drawn once for a run."""

    boot_s: tuple[float, float] = (10.0, 40.0)
    notice_s: float = 120.0
    ends_within_s: float = 8.0
    stale_s: float = 0.0  # a list may be so old
    refused: float = 0.0
    reply_lost: float = 0.0
    forgets_after_s: float = 3600.0  # an ended machine is listed for so long


class Cloud:
    """What is so: one group, its machines, and what each really costs."""

    def __init__(self, loom: Loom, dice: random.Random, market: Prices, weather: Weather) -> None:
        self.loom = loom
        self.dice = dice
        self.market = market
        self.weather = weather
        self.group: GroupRecord | None = None
        self.nodes: dict[str, NodeRecord] = {}
        self.full_until: dict[Pool, float] = {}
        self.refusals: list[Refusal] = []
        self.started: Callable[[NodeRecord], None] = lambda _: None
        self.died: Callable[[str], None] = lambda _: None
        self.changed: Callable[[], None] = lambda: None
        self.history: list[tuple[float, GroupView]] = []
        self.late_s = 0.0
        self.calls = 0
        self.billed: dict[str, Decimal] = {}
        self.refunds: dict[str, Decimal] = {}
        self._dying: set[str] = set()

    @property
    def alive(self) -> list[NodeRecord]:
        return [node for node in self.nodes.values() if node.alive]

    def spent(self) -> Decimal:
        """What the cloud will really charge for everything up to now."""
        return sum(self.billed.values(), Decimal(0)) + sum((self._cost(node) for node in self.alive), Decimal(0))

    def make(self) -> None:
        if self.group is None:
            self.group = GroupRecord(
                name=NAME,
                region="us-east-2",
                zones=(),
                node_type="p2.xlarge",
                market=Market.SPOT,
                tags=(),
                public_key="",
                store="",
            )
            self._note()

    def remove(self) -> None:
        if self.alive:
            raise ProvisionError(f"{NAME} still has machines")
        self.group = None
        self._note()

    def change(self, change: Callable[[GroupRecord], GroupRecord]) -> None:
        if self.group is None:
            raise ProvisionError(f"there is no node group {NAME}")
        self.group = change(self.group)
        self.settle()

    def arm(self, until: datetime) -> None:
        self.late_s = self.dice.uniform(0, LATEST_S)
        self.change(lambda group: replace(group, armed_until=max(until, self.loom.time)))
        self.loom.at(self.loom.seconds(until) + self.late_s, self.settle)

    def change_node(self, node_id: str, change: Callable[[NodeRecord], NodeRecord]) -> None:
        if node_id not in self.nodes:
            raise ProvisionError(f"{NAME} has no node {node_id}")
        if self.nodes[node_id].alive:
            self.nodes[node_id] = change(self.nodes[node_id])
        self.settle()

    def give_notice(self, node_id: str) -> None:
        self.change_node(node_id, lambda node: noticed(node, self.loom.time, self.weather.notice_s))
        interrupted_at = self.nodes[node_id].interrupted_at
        if interrupted_at is not None:
            self.loom.at(self.loom.seconds(interrupted_at), self.settle)

    def strike(self, node_id: str, cause: EndCause) -> None:
        """The machine is gone at once."""
        node = self.nodes[node_id]
        if node.alive:
            self.nodes[node_id] = replace(node, ending=node.ending or cause)
            self.bury(node_id)
            self.settle()

    def settle(self) -> None:
        """What the embedded cloud's rule says now; the shut-off fires late."""
        if self.group is None:
            return
        armed = self.group.armed_until
        seen = replace(self.group, armed_until=armed + timedelta(seconds=self.late_s)) if armed else self.group
        step = settle(seen, tuple(self.nodes.values()), self.loom.time)
        self.group = replace(step.group, armed_until=armed)
        self.nodes.update({node.id: node for node in step.nodes})
        for node in step.nodes:
            if node.alive and node.ending is not None and node.id not in self._dying:
                self._dying.add(node.id)
                self.loom.after(self.dice.uniform(0.5, self.weather.ends_within_s), lambda i=node.id: self.bury(i))
        for _ in range(step.starts):
            if not self._launch():
                break
        self._note()

    def view(self) -> GroupView:
        if self.group is None:
            return GroupView(exists=False, size=0, armed_until=None, nodes=())
        now = self.loom.time
        listed = (
            node.listed()
            for node in self.nodes.values()
            if node.ended_at is None or (now - node.ended_at).total_seconds() < self.weather.forgets_after_s
        )
        return GroupView(
            exists=True,
            size=self.group.size,
            armed_until=self.group.armed_until,
            nodes=tuple(listed),
            refusals=tuple(self.refusals[-3:]),
        )

    def seen_before(self, age_s: float) -> GroupView:
        """Return the list as it was so long ago."""
        old = [view for at, view in self.history if at <= self.loom.now - age_s]
        return old[-1] if old and age_s > 0 else self.view()

    def _launch(self) -> bool:
        group = self.group
        assert group is not None
        assert group.pool is not None
        if self.full_until.get(group.pool, 0.0) > self.loom.now:
            code = "InsufficientInstanceCapacity"
            refusal = Refusal(pool=group.pool, fault=Fault.CAPACITY, code=code, message="none", at=self.loom.time)
            self.refusals.append(refusal)
            self.loom.after(20, self.settle)
            return False
        number = group.launched + 1
        node = NodeRecord(
            id=f"i-{number:04d}",
            number=number,
            pool=group.pool,
            launched_at=self.loom.time,
            address=f"10.0.0.{number % 250}",
            port=22,
            user="me",
            interface="eth0",
            host_key=f"ssh-ed25519 AAAA{number}",
        )
        self.group = replace(group, launched=number)
        self.nodes[node.id] = node
        self.started(node)
        self.loom.after(self.dice.uniform(*self.weather.boot_s), lambda: self._boot(node.id))
        return True

    def _boot(self, node_id: str) -> None:
        node = self.nodes[node_id]
        if node.alive and node.ending is None:
            self.nodes[node_id] = replace(node, state=NodeState.RUNNING)
            self._note()

    def bury(self, node_id: str) -> None:
        node = self.nodes[node_id]
        if not node.alive:
            return
        until_now = self._cost(node)
        self.nodes[node_id] = replace(node, state=NodeState.TERMINATED, ended_at=self.loom.time)
        self.billed[node_id] = self._cost(self.nodes[node_id])
        self.refunds[node_id] = until_now - self.billed[node_id]
        self.died(node_id)
        self.settle()

    def _cost(self, node: NodeRecord) -> Decimal:
        interval = UsageInterval(
            node_id=node.id,
            pool=node.pool,
            launched_at=node.launched_at,
            ended_at=node.ended_at,
            end_cause=node.ending if node.ended_at else None,
        )
        now = self.loom.time
        prices = self.market.prices(node.pool, node.launched_at, node.ended_at or now)
        return total(meter(interval, prices, (), now, Terms()))

    def _note(self) -> None:
        self.history = [(at, view) for at, view in self.history if at > self.loom.now - 60][-40:]
        self.history.append((self.loom.now, self.view()))
        self.changed()


class CloudLine:
    """Implements `NodeGroup` and `Provisioner` for one process."""

    def __init__(self, cloud: Cloud, process: Process) -> None:
        self._cloud = cloud
        self._process = process

    def group(self, name: str, region: str) -> str:
        return name

    def image(self, region: str) -> None:
        return None

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:
        self._call(self._cloud.make)
        return NAME

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:
        self._call(self._cloud.remove)

    def describe(self, group: str) -> GroupView:
        dice, weather = self._cloud.dice, self._cloud.weather
        age = dice.uniform(0, weather.stale_s) if weather.stale_s and dice.random() < 0.3 else 0.0
        found: list[GroupView] = []
        self._call(lambda: found.append(self._cloud.seen_before(age)))
        return found[-1]

    def arm(self, group: str, until: datetime) -> None:
        self._call(lambda: self._cloud.arm(until))

    def resize(
        self,
        group: str,
        size: int,
        pool: Pool,
        *,
        cap_usd_per_hour: Decimal | None = None,
    ) -> None:
        def change(record: GroupRecord) -> GroupRecord:
            if size > 0 and (record.armed_until is None or record.armed_until <= self._cloud.loom.time):
                raise ProvisionError("no node starts without a shut-off time ahead", may_pass=True)
            return replace(record, size=size, pool=pool)

        self._call(lambda: self._cloud.change(change))

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        self._call(lambda: self._cloud.change_node(node_id, lambda node: replace(node, relieved=True)))

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        self._call(lambda: self._cloud.change_node(node_id, _chosen))

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:
        self._call(self._end_all)
        while self._cloud.alive:
            self._process.sleep(2.0)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> None:
        self._call(lambda: self._cloud.give_notice(node_id))

    def _end_all(self) -> None:
        if self._cloud.group is None:
            return
        for node in self._cloud.alive:
            self._cloud.nodes[node.id] = replace(node, ending=node.ending or EndCause.CHOICE)
        self._cloud.change(lambda record: replace(record, size=0))

    def _call(self, work: Callable[[], None]) -> None:
        """Throttling and a line that is cut come before anything is done, a lost reply after it."""
        dice, weather = self._cloud.dice, self._cloud.weather
        self._cloud.calls += 1
        self._process.call(dice.uniform(0.02, 0.2))
        if not self._process.online:
            self._process.sleep(3.0)
            raise ProvisionError("the cloud does not answer", may_pass=True)
        if dice.random() < weather.refused:
            raise ProvisionError("Throttling: rate exceeded", may_pass=True)
        work()
        self._process.call(dice.uniform(0.02, 0.2))
        if dice.random() < weather.reply_lost or not self._process.online:
            raise ProvisionError("the reply was lost", may_pass=True)


def _chosen(node: NodeRecord) -> NodeRecord:
    return replace(node, relieved=True, ending=node.ending or EndCause.CHOICE)
