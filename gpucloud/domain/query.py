"""What is asked of the catalog, and what its answers are ranked by."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

from gpucloud.domain.job import MarketPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a machine must be and have; what is None or empty is all the same. `gpus` and `network_gbps` are at least.

    `usd_per_hour` is the most that a machine may cost on the market.
    """

    gpu: tuple[str, ...] = ()
    gpus: int | None = None
    vram_gib: int | None = None
    network_gbps: float | None = None
    efa: bool = False
    nvlink: bool = False
    types: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    market: MarketPolicy = MarketPolicy.AUTO
    usd_per_hour: Decimal | None = None


class Order(str, Enum):
    """What listings are ranked by, the best first."""

    PRICE = "price"
    GPU_PRICE = "gpu-price"
    TFLOPS_PRICE = "tflops-price"
    INTERRUPTION = "interruption"
