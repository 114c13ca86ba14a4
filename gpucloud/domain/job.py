"""The job: what the user asked for, as one frozen value (DESIGN §4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path


class Cloud(str, Enum):
    """Where machines come from."""

    LOCAL = "local"
    AWS = "aws"
    SSH = "ssh"


class Market(str, Enum):
    """How machines are paid: interruptible, or not."""

    SPOT = "spot"
    ON_DEMAND = "on_demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Machines wanted: `nodes` machines with `gpus` GPUs (one worker process each)."""

    nodes: int = 1
    gpus: int = 1
    gpu: tuple[str, ...] = ()
    vram_gib: int | None = None
    market: Market = Market.SPOT
    regions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """When to save: at most one of `every` and `every_steps`; neither means auto."""

    every: timedelta | None = None
    every_steps: int | None = None
    keep: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job file. Paths are absolute; `source` is the file it was read from."""

    name: str
    run: str
    budget_usd: Decimal
    source: Path
    code: Path
    cloud: Cloud = Cloud.LOCAL
    resources: Resources = field(default_factory=Resources)
    setup: str | None = None
    store: str | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    deadline: timedelta | None = None
    data: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    tags: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
