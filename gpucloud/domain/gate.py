"""The gate: whether a machine's GPUs are known good."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class GateWanted:
    """What a machine must show: `gpus` devices, of `model` if one was paid for, and whether compute is tried too."""

    gpus: int
    model: str | None
    full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFact:
    """What the last check on this boot said: the digest of the `GateWanted` that was met, when, and its figures."""

    digest: str
    at: datetime
    figures: tuple[tuple[str, str], ...] = ()
