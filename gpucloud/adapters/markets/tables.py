"""The learned policy's tables: what recorded markets show, and the dynamic program over it, in NumPy.

Backwards over the time left. A state is the slack (time left less work left), what the job holds, and the market: up
or down, by age bucket. Work done keeps the slack and everything else takes a tick of it, so that one step of time needs
the step before only. A slack below zero costs without end, which makes the deadline hard; costs are in ticks of
on-demand machines.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from gpucloud.domain.market.learned import (
    BUCKETS,
    EDGES_H,
    Act,
    Counts,
    Grid,
    Hazards,
    Tables,
    grid_of,
    learned_from,
    pooled,
)
from gpucloud.domain.market.policies import Task
from gpucloud.domain.money.ledger import Terms

_NEVER = np.float32(1e12)
_HOUR = 3600.0
_PIECE = 1024  # columns of a matrix that are multiplied at a time

Values = npt.NDArray[np.float32]
Acts = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the program weighs: spot as a part of on demand, and how young machines may be taken without a charge."""

    spot: float
    free_within_s: float


def solve(grid: Grid, hazards: Hazards, prices: Prices) -> Tables:
    """Return the best acts for every state; about a second for 48 h of work in 60 h, in ticks of 3 minutes."""
    program = _Program(grid, hazards, prices)
    rows = [np.zeros((2 * BUCKETS, (grid.stages + 3) // 4, grid.slack + 1), np.uint8)]
    rows.extend(_packed(program.step(left)) for left in range(1, grid.span + 1))
    return Tables(grid=grid, hazards=hazards, acts=np.concatenate(rows).tobytes())


class _Program:
    """The values of the last step, from which the next follows.

    Axes: market (up by age, then down by age), stage, slack. Slack is kept one place to the right: place 0 is a slack
    below zero. `waiting` is being idle; `steady` on-demand machines by their boot left; `young` spot machines by their
    age, the last of any age; `pairs` spot machines by their age beside on-demand ones that work.
    """

    def __init__(self, grid: Grid, hazards: Hazards, prices: Prices) -> None:
        self._grid = grid
        self._price = np.float32(prices.spot)
        self._market = _Market.of(hazards, grid.tick_s / _HOUR)
        self._ages = max(grid.changeover, -int(-prices.free_within_s // grid.tick_s)) + 1
        free = np.arange(self._ages) * grid.tick_s < prices.free_within_s
        self._refund = np.where(free, np.arange(self._ages) * prices.spot, 0).astype(np.float32)
        columns = grid.slack + 2
        self._waiting = self._blank(2 * BUCKETS, 1, columns)
        self._steady = self._blank(2 * BUCKETS, grid.changeover + 1, columns)
        self._young = self._blank(BUCKETS, self._ages, columns)
        self._pairs = self._blank(BUCKETS, grid.beside, columns)

    @staticmethod
    def _blank(*shape: int) -> Values:
        values = np.zeros(shape, np.float32)
        values[..., 0] = _NEVER
        return values

    def step(self, left: int) -> Acts:
        """Go one tick further from the deadline; return the acts by (market, stage, slack)."""
        waiting, steady, young, pairs = self._expected()
        d, up = self._grid.changeover, slice(0, BUCKETS)
        idle = waiting[:, 0, :-1]
        rented = self._price + self._booting(young[:, 1])
        bought = 1 + self._booting(steady[:, d - 1])
        going = 1 + np.concatenate([steady[:, :1, 1:], self._booting(steady[:, :-1])], axis=1)
        kept = self._kept(young)
        acts = np.empty((2 * BUCKETS, self._grid.stages, self._grid.slack + 1), np.uint8)
        waits = idle.copy()
        waits[up] = np.minimum(idle[up], rented)
        acts[:] = Act.IDLE
        acts[up] = np.where(rented < idle[up], Act.SPOT, Act.IDLE)[:, None]  # where the market is down, none are had
        self._waiting[:, 0, 1:] = np.minimum(waits, bought)
        acts[:, 0][bought < waits] = Act.ON_DEMAND
        self._steady[..., 1:] = np.minimum(waits[:, None], going)
        acts[:, 1 : d + 2][going <= waits[:, None]] = Act.ON_DEMAND
        if self._grid.beside:
            both = 1 + self._price + pairs[..., 1:]
            better = both[:, 0] < self._steady[up, 0, 1:]
            acts[up, 1][better] = Act.BOTH
            self._steady[up, 0, 1:][better] = both[:, 0][better]
            self._pair(kept[:, 1 : self._grid.beside + 1], going[up, :1], both[:, 1:], acts[:, d + 2 :])
        self._young[..., 1:] = kept
        for values in (self._waiting, self._steady, self._young, self._pairs):
            values[..., left + 1 :] = 0  # no work is left
        return acts

    def _pair(self, taken: Values, alone: Values, longer: Values, acts: Acts) -> None:
        """Spot machines beside on-demand ones: hand over, give them up, or go on with both, but for the oldest."""
        values = np.minimum(taken, alone)
        acts[:] = Act.ON_DEMAND
        acts[:BUCKETS][taken <= alone] = Act.SPOT
        better = longer < values[:, :-1]
        values[:, :-1][better] = longer[better]
        acts[:BUCKETS, :-1][better] = Act.BOTH
        self._pairs[..., 1:] = values

    def _kept(self, young: Values) -> Values:
        """The values of spot machines by age that go on: they work from the age of a changeover on."""
        d = self._grid.changeover
        values = np.empty((BUCKETS, self._ages, self._grid.slack + 1), np.float32)
        np.add(self._booting(young[:, 1 : d + 1]), self._price, out=values[:, :d])
        np.add(young[:, d + 1 :, 1:], self._price, out=values[:, d:-1])
        np.add(young[:, -1, 1:], self._price, out=values[:, -1])
        return values

    def _booting(self, values: Values) -> Values:
        """The values after a tick of a boot: it costs slack, and a boot shorter than a tick leaves some work done."""
        lost = self._grid.lost
        return values[..., :-1] if lost == 1 else lost * values[..., :-1] + (1 - lost) * values[..., 1:]

    def _expected(self) -> tuple[Values, Values, Values, Values]:
        """The values after the market's next move, before it is known; taken machines are refunded while young."""
        market, grid = self._market, self._grid
        waiting = _moved(market.moves, self._waiting)
        steady = _moved(market.moves, self._steady)
        lost = _moved(market.lost, self._waiting)
        refund = market.hazard[:, None, None] * self._refund[None, :, None]
        young = _moved(market.stays, self._young) + lost - refund
        alone = _moved(market.lost, self._steady[:, :1])
        pairs = _moved(market.stays, self._pairs) + alone - refund[:, 1 : grid.beside + 1]
        for values in (waiting, steady, young, pairs):
            values[..., 0] = _NEVER
        return waiting, steady, young, pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Market:
    """One tick of the market: `moves` from any state to any; of the up states `stays` within and `lost` to any.

    `hazard` is the probability to be lost, by age bucket.
    """

    moves: Values
    stays: Values
    lost: Values
    hazard: Values

    @classmethod
    def of(cls, hazards: Hazards, tick_h: float) -> _Market:
        n = BUCKETS
        ends = 1 - np.exp(-tick_h * np.array([*hazards.up_per_h, *hazards.down_per_h]))
        widths = np.diff(EDGES_H)
        older = np.append(np.minimum(tick_h / widths, 1), 0)
        ages = np.diag(1 - older) + np.diag(older[:-1], 1)
        stays = ages * (1 - ends[:n, None])
        lost = np.zeros((n, 2 * n))
        lost[:, :n] = ends[:n, None] * hazards.replaced * np.array(hazards.entered)
        lost[:, n] = ends[:n] * (1 - hazards.replaced)
        moves = np.zeros((2 * n, 2 * n))
        moves[:n] = lost
        moves[:n, :n] += stays
        moves[n:, 0] = ends[n:]
        moves[n:, n:] = ages * (1 - ends[n:, None])
        return cls(
            moves=moves.astype(np.float32),
            stays=stays.astype(np.float32),
            lost=lost.astype(np.float32),
            hazard=ends[:n].astype(np.float32),
        )


def _moved(probabilities: Values, values: Values) -> Values:
    """The expectation over the market's next state, for all stages and slacks.

    A piece at a time: of a whole product BLAS makes threads, which wait for each other longer than they compute.
    """
    _, stages, columns = values.shape
    flat = values.reshape(len(values), stages * columns)
    moved = np.empty((len(probabilities), stages * columns), np.float32)
    for start in range(0, stages * columns, _PIECE):
        piece = slice(start, start + _PIECE)
        np.matmul(probabilities, flat[:, piece], out=moved[:, piece])
    return moved.reshape(len(probabilities), stages, columns)


def _packed(acts: Acts) -> Acts:
    """Four stages to a byte."""
    market, stages, slacks = acts.shape
    padded = np.zeros((market, -(-stages // 4), 4, slacks), np.uint8)
    padded.reshape(market, -1, slacks)[:, :stages] = acts
    packed: Acts = padded[:, :, 0] | padded[:, :, 1] << 2 | padded[:, :, 2] << 4 | padded[:, :, 3] << 6
    return packed


# Makes the learned policy's tables for one job.


_FREE_WITHIN = Terms().free_when_interrupted_within


class TableMaker:
    """Implements `PolicyTables` with a dynamic program over what recorded markets show.

    Nothing is learned from the zones and markets in `without`: so that a replay is of no market that its policy has
    seen; `past` is what was counted on the market before. Machines that are taken within `free_within` are not charged.
    """

    def __init__(
        self, without: Collection[str] = (), past: Counts | None = None, free_within: timedelta = _FREE_WITHIN
    ) -> None:
        self._without = frozenset(without)
        self._past = past
        self._free_within_s = free_within.total_seconds()

    def tables(self, task: Task, zones: int, gpus: int, spot_usd_per_hour: float) -> Tables:
        """Return the best acts for the task, on machines with so many GPUs, spot in so many zones at that price."""
        prices = Prices(spot=spot_usd_per_hour / task.on_demand_usd_per_hour, free_within_s=self._free_within_s)
        return solve(grid_of(task), hazards(zones, gpus, self._without, self._past), prices)


# What the recorded markets show of how zones come and go: counts by age, made by `python -m tests.prior`.


_SMALL = 2  # GPUs of a machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The counts of one zone, or of several watched as one, in one recorded market of machines with so many GPUs."""

    market: str
    gpus: int
    zones: tuple[str, ...]
    counts: Counts


def hazards(zones: int, gpus: int, without: Collection[str] = (), past: Counts | None = None) -> Hazards:
    """Return how a job's market comes and goes that may go to so many zones for machines with so many GPUs.

    Learned from recorded zones, of which none of those in `without`, zones or markets, has a part; for big machines,
    which are scarce and come for a short time, above all from big ones; and from the market's own past where that is
    known, else with several zones from recorded sets of about as many.
    """
    rows = [row for row in recorded() if not {row.market, *row.zones} & set(without)]
    levels = [pooled(row.counts for row in rows if len(row.zones) == 1)]
    if gpus > _SMALL:
        rows = [row for row in rows if row.gpus > _SMALL]
        levels.append(pooled(row.counts for row in rows if len(row.zones) == 1))
    sets = [row for row in rows if len(row.zones) > 1]
    if past is not None:
        levels.append(past)
    elif zones > 1 and sets:
        nearest = min({len(row.zones) for row in sets}, key=lambda count: (abs(count - zones), count))
        levels.append(pooled(row.counts for row in sets if len(row.zones) == nearest))
    return learned_from(*levels)


@cache
def recorded() -> tuple[Recorded, ...]:
    """Return all counts that come with the package."""
    text = resources.files("gpucloud.adapters.markets").joinpath("prior.json").read_text(encoding="utf-8")
    return tuple(_row(raw) for raw in json.loads(text))


def _row(raw: Mapping[str, Any]) -> Recorded:
    found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in raw["counts"].items()}
    return Recorded(market=raw["market"], gpus=raw["gpus"], zones=tuple(raw["zones"]), counts=Counts(**found))
