"""The learned policy: looks up what a dynamic program over recorded markets found best."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gpucloud.domain.policy.choice import Choice, Reason
from gpucloud.domain.policy.grid import Grid
from gpucloud.domain.policy.hazards import BUCKETS, Hazards, bucket, remaining_h
from gpucloud.domain.policy.observation import Mode, Observation, Task, ZoneState
from gpucloud.domain.policy.uniform import uniform

_HOUR = 3600.0


class Act(IntEnum):
    """What the program found best, in two bits."""

    IDLE = 0
    SPOT = 1
    ON_DEMAND = 2
    BOTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The best acts for one task on one market: `acts`, four stages to a byte, by (ticks left, market, stage, slack).

    The market is up or down by age bucket. `hazards` is what the program was told of it.
    """

    grid: Grid
    hazards: Hazards
    acts: bytes

    def act(self, left: int, market: int, slack: int, stage: int) -> Act:
        """Return the best act; `left` is the time left in ticks."""
        grid = self.grid
        row = (left * 2 * BUCKETS + market) * ((grid.stages + 3) // 4) + stage // 4
        return _ACTS[self.acts[row * (grid.slack + 1) + slack] >> 2 * (stage % 4) & 3]


_ACTS = tuple(Act)


def learned(tables: Tables, task: Task, seen: Observation) -> Choice:
    """Return what the tables say; spot machines that cost less than on demand are kept until they are taken.

    Where there is time for one more try that the tables' ticks are too long to show, as uniform progress.
    """
    holding = seen.holding
    if holding.mode is Mode.SPOT:
        return Choice(mode=Mode.SPOT, zone=holding.zone)
    grid = tables.grid
    slack_s = seen.time_left_s - seen.work_left_s
    if grid.hides_a_try(task, slack_s):
        return uniform(task, seen)
    work, slack = grid.up(seen.work_left_s), grid.down(slack_s)
    if slack < 0:
        return Choice(mode=Mode.ON_DEMAND, reason=Reason.DEADLINE)
    zone = preferred(seen.zones, tables.hazards, task)
    if holding.mode is Mode.BOTH:
        zone = next((one for one in seen.zones if one.zone == holding.zone), zone)
    slack = min(slack, grid.slack)
    act = tables.act(min(work + slack, grid.span), _market(seen.zones, zone), slack, grid.stage(holding))
    return _chosen(act, zone, grid.tick_s)


def preferred(zones: tuple[ZoneState, ...], hazards: Hazards, task: Task) -> ZoneState | None:
    """Return the zone whose hour of progress costs least, of those that are up and cheaper than on demand.

    With L hours to live, p·L / (L − d): the price of what remains after the changeover.
    """
    up = [zone for zone in zones if zone.up and zone.usd_per_hour < task.on_demand_usd_per_hour]
    if len(up) < 2:
        return up[0] if up else None
    lives = remaining_h(hazards)
    d = task.changeover_s / _HOUR
    return min(up, key=lambda zone: _per_progress(zone.usd_per_hour, lives[bucket(zone.age_s / _HOUR)], d))


def _per_progress(price: float, life_h: float, changeover_h: float) -> float:
    return price * life_h / max(life_h - changeover_h, life_h / 100)


def _market(zones: tuple[ZoneState, ...], zone: ZoneState | None) -> int:
    """The market's state: up by the age of the preferred zone, down by the time since any zone was up."""
    if zone is not None:
        return bucket(zone.age_s / _HOUR)
    return BUCKETS + bucket(min((one.age_s for one in zones if not one.up), default=0.0) / _HOUR)


def _chosen(act: Act, zone: ZoneState | None, tick_s: float) -> Choice:
    if zone is None or act is Act.ON_DEMAND or act is Act.IDLE:
        idle = act is Act.IDLE
        return Choice(
            mode=Mode.IDLE if idle else Mode.ON_DEMAND,
            reason=Reason.WAIT if idle else Reason.EXPECTED,
            holds_s=tick_s,
        )
    if act is Act.SPOT:
        return Choice(mode=Mode.SPOT, zone=zone.zone, reason=Reason.EXPECTED)
    return Choice(mode=Mode.BOTH, zone=zone.zone, reason=Reason.EXPECTED, holds_s=tick_s)
