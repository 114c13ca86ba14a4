"""What the recorded markets show of how zones come and go: counts by age, made by `python -m tests.prior`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from gpucloud.domain.policy.hazards import Counts, Hazards, learned_from, pooled

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
    text = resources.files("gpucloud.adapters.tables").joinpath("prior.json").read_text(encoding="utf-8")
    return tuple(_row(raw) for raw in json.loads(text))


def _row(raw: Mapping[str, Any]) -> Recorded:
    found: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in raw["counts"].items()}
    return Recorded(market=raw["market"], gpus=raw["gpus"], zones=tuple(raw["zones"]), counts=Counts(**found))
