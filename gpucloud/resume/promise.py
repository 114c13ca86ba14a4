"""How exactly a resumed run continues, and why it may be less than exact."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch


class Level(str, Enum):
    """What a resume promises; the order is from the most to the least."""

    EXACT = "exact"  # bit for bit, given deterministic algorithms
    SAME_SAMPLES = "same_samples"  # the same global batches; sums are rounded in another order
    BEST_EFFORT = "best_effort"


_SUMS = ("world", "arrangement")
"""What changes the order of sums, and nothing else."""


def surroundings(world: int, arrangement: str) -> dict[str, Any]:
    """Return what exactness depends on besides the checkpoint; `arrangement` says how ranks hold the state."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"world": world, "arrangement": arrangement, "torch": str(torch.__version__), "device": device}


def promised(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Level, str]:
    """Return the level of a resume, and in words what lowered it."""
    changed = [key for key in now if before.get(key) != now[key]]
    if not changed:
        return Level.EXACT, ""
    level = Level.SAME_SAMPLES if set(changed) <= set(_SUMS) else Level.BEST_EFFORT
    # The arrangement names the world too, where that is what changed.
    told = [key for key in changed if key != "arrangement" or "world" not in changed]
    return level, ", ".join(f"{key} {before.get(key)} → {now[key]}" for key in told)


def lower(one: Level, other: Level) -> Level:
    """Return the weaker promise of the two."""
    return max(one, other, key=list(Level).index)
