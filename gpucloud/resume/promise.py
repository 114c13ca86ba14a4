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


def surroundings(world: int) -> dict[str, Any]:
    """Return what exactness depends on besides the checkpoint."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"world": world, "torch": str(torch.__version__), "device": device}


def promised(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Level, str]:
    """Return the level of a resume, and in words what lowered it."""
    changed = [f"{key} {before.get(key)} → {now[key]}" for key in now if before.get(key) != now[key]]
    if not changed:
        return Level.EXACT, ""
    only_world = changed[0].startswith("world ") and len(changed) == 1
    return (Level.SAME_SAMPLES if only_world else Level.BEST_EFFORT), ", ".join(changed)


def lower(one: Level, other: Level) -> Level:
    """Return the weaker promise of the two."""
    return max(one, other, key=list(Level).index)
