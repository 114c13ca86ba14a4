"""The machines of a replayed job: what is rented now, what it costs, and every life from launch to end."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.recordings import ZoneView
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.node import EndCause

ON_DEMAND = -1
"""The zone of machines that are no spot machines."""

_HOUR = 3600.0
_FREE_S = Terms().free_when_interrupted_within.total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`nodes` machines of the zone with index `zone`, from launch to end, in seconds since the recording began."""

    zone: int
    nodes: int
    launched_s: float
    ended_s: float
    cause: EndCause


@dataclass(slots=True)
class Rented:
    """Machines that are paid for now; `joins` while they boot beside others.

    `usd` is what they have cost so far without what stands beside them, which is due for machines that are interrupted,
    too.
    """

    zone: int
    nodes: int
    launched_s: float
    joins: bool = False
    usd: float = 0.0


class Fleet:
    """At most one group of spot machines, and one on demand. `usd` is a running sum; the lives make the bill.

    `spot` are the group's machines by their launches, all in one zone: an elastic group grows. `held` is how many they
    are, and `working` how many of them work, or will once the group has booted. Of each price `extras_usd_per_hour` is
    for disk and address.
    """

    def __init__(self, task: Task, extras_usd_per_hour: float = 0.0) -> None:
        self._task, self._extras_usd_per_hour = task, extras_usd_per_hour
        self.spot: list[Rented] = []
        self.held = self.working = 0
        self.on_demand: Rented | None = None
        self.usd = 0.0
        self.interruptions = self.launches = 0
        self.lives: list[Life] = []

    @property
    def joining(self) -> bool:
        """Whether spot machines boot beside others of their group."""
        return self.working < self.held

    def rent_spot(self, zone: int | None, nodes: int, now_s: float) -> bool:
        """Have this group of spot machines and no other (none for None); return whether it is a new one.

        A group of fewer in the same zone grows, and one that was to grow gives up those that boot.
        """
        if self.spot and (self.spot[0].zone != zone or nodes < self.working):
            self._end_spot(now_s)
        elif nodes < self.held:
            self._end_spot(now_s, only_joining=True)
        if zone is None or nodes == self.held:
            return False
        self.spot.append(self._launched(zone, nodes - self.held, now_s))
        self.spot[-1].joins = self.held > 0
        self.held = nodes
        if not self.spot[-1].joins:
            self.working = nodes
            return True
        return False

    def join(self) -> None:
        """Let all machines of the group work."""
        for rented in self.spot:
            rented.joins = False
        self.working = self.held

    def rent_on_demand(self, now_s: float, *, wanted: bool) -> bool:
        """Have on-demand machines or none; return whether they are new."""
        if self.on_demand is not None and not wanted:
            self._end(self.on_demand, self.on_demand.nodes, now_s, EndCause.CHOICE)
            self.on_demand = None
        if not wanted or self.on_demand is not None:
            return False
        self.on_demand = self._launched(ON_DEMAND, self._task.nodes, now_s)
        return True

    def lose(self, views: tuple[ZoneView, ...], now_s: float) -> bool:
        """End the spot machines that their zone has no more, the youngest first; return whether any worked.

        Too few to go on with are ended by choice. What is interrupted early enough is not charged.
        """
        gone = self.held - views[self.spot[0].zone].nodes if self.spot else 0
        if gone <= 0:
            return False
        before = self.working
        self.interruptions += 1
        while gone > 0:
            gone -= self._take(gone, now_s)
        if self.working < (self._task.least_nodes or self._task.nodes):
            self._end_spot(now_s)
        return self.working < before

    def pay(self, seconds: float, views: tuple[ZoneView, ...]) -> None:
        """Count what the machines cost in so many seconds, over which no price changes."""
        for rented in self.spot:
            self._count(rented, views[rented.zone].usd_per_hour, seconds)
        if self.on_demand is not None:
            self._count(self.on_demand, self._task.on_demand_usd_per_hour, seconds)

    def end(self, now_s: float) -> None:
        """End every machine."""
        self.rent_spot(None, 0, now_s)
        self.rent_on_demand(now_s, wanted=False)

    def _take(self, most: int, now_s: float) -> int:
        """Take up to so many of the youngest machines; return how many."""
        rented = self.spot[-1]
        interrupted = min(most, rented.nodes)
        usd = rented.usd * interrupted / rented.nodes
        if now_s - rented.launched_s < _FREE_S:
            self.usd -= usd
        self._end(rented, interrupted, now_s, EndCause.INTERRUPTED)
        rented.nodes -= interrupted
        rented.usd -= usd
        self.held -= interrupted
        self.working -= 0 if rented.joins else interrupted
        if not rented.nodes:
            self.spot.pop()
        return interrupted

    def _end_spot(self, now_s: float, *, only_joining: bool = False) -> None:
        for rented in self.spot:
            if rented.joins or not only_joining:
                self._end(rented, rented.nodes, now_s, EndCause.CHOICE)
        self.spot = [rented for rented in self.spot if only_joining and not rented.joins]
        self.held = self.working = self.working if only_joining else 0

    def _launched(self, zone: int, nodes: int, now_s: float) -> Rented:
        self.launches += 1
        return Rented(zone=zone, nodes=nodes, launched_s=now_s)

    def _count(self, rented: Rented, usd_per_hour: float, seconds: float) -> None:
        node_hours = rented.nodes * seconds / _HOUR
        rented.usd += (usd_per_hour - self._extras_usd_per_hour) * node_hours
        self.usd += usd_per_hour * node_hours

    def _end(self, rented: Rented, nodes: int, now_s: float, cause: EndCause) -> None:
        if nodes:
            life = Life(zone=rented.zone, nodes=nodes, launched_s=rented.launched_s, ended_s=now_s, cause=cause)
            self.lives.append(life)
