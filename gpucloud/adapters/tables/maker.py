"""Makes the learned policy's tables for one job."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from gpucloud.adapters.tables.prior import hazards
from gpucloud.adapters.tables.program import Prices, solve
from gpucloud.domain.ledger import Terms
from gpucloud.domain.policy.grid import grid_of
from gpucloud.domain.policy.hazards import Counts
from gpucloud.domain.policy.learned import Tables
from gpucloud.domain.policy.observation import Task

_FREE_WITHIN = Terms().free_when_taken_within


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
