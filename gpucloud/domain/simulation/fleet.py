"""The machines of a replayed job: what is rented now, what it costs, and every life from launch to end."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.ledger import Terms
from gpucloud.domain.node import EndCause
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.timeline import ZoneView

ON_DEMAND = -1
"""The zone of machines that are no spot machines."""

_HOUR = 3600.0
_FREE_S = Terms().free_when_taken_within.total_seconds()


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
    """Machines that are paid for now, and what they have cost so far."""

    zone: int
    nodes: int
    launched_s: float
    usd: float = 0.0


class Fleet:
    """At most one group of spot machines, and one on demand. `usd` is a running sum; the lives make the bill."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self.spot: Rented | None = None
        self.on_demand: Rented | None = None
        self.usd = 0.0
        self.interruptions = self.launches = 0
        self.lives: list[Life] = []

    def rent_spot(self, zone: int | None, nodes: int, now_s: float) -> bool:
        """Have these spot machines and no others (none for None); return whether they are new."""
        if self.spot is not None and (self.spot.zone, self.spot.nodes) != (zone, nodes):
            self._end(self.spot, self.spot.nodes, now_s, EndCause.CHOICE)
            self.spot = None
        if zone is None or self.spot is not None:
            return False
        self.spot = self._launched(zone, nodes, now_s)
        return True

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
        """End the spot machines if their zone has too few of them now; return whether it had.

        Those that the zone still has are ended by choice. What is taken early enough is not charged.
        """
        spot = self.spot
        gone = 0 if spot is None else spot.nodes - views[spot.zone].nodes
        if spot is None or gone <= 0:
            return False
        self.interruptions += 1
        if now_s - spot.launched_s < _FREE_S:
            self.usd -= spot.usd * gone / spot.nodes
        self._end(spot, gone, now_s, EndCause.INTERRUPTED)
        self._end(spot, spot.nodes - gone, now_s, EndCause.CHOICE)
        self.spot = None
        return True

    def pay(self, seconds: float, views: tuple[ZoneView, ...]) -> None:
        """Count what the machines cost in so many seconds, over which no price changes."""
        if self.spot is not None:
            self._count(self.spot, views[self.spot.zone].usd_per_hour, seconds)
        if self.on_demand is not None:
            self._count(self.on_demand, self._task.on_demand_usd_per_hour, seconds)

    def end(self, now_s: float) -> None:
        """End every machine."""
        self.rent_spot(None, 0, now_s)
        self.rent_on_demand(now_s, wanted=False)

    def _launched(self, zone: int, nodes: int, now_s: float) -> Rented:
        self.launches += 1
        return Rented(zone=zone, nodes=nodes, launched_s=now_s)

    def _count(self, rented: Rented, usd_per_hour: float, seconds: float) -> None:
        usd = rented.nodes * usd_per_hour * seconds / _HOUR
        rented.usd += usd
        self.usd += usd

    def _end(self, rented: Rented, nodes: int, now_s: float, cause: EndCause) -> None:
        if nodes:
            life = Life(zone=rented.zone, nodes=nodes, launched_s=rented.launched_s, ended_s=now_s, cause=cause)
            self.lives.append(life)
