"""The catalog of NVIDIA GPU machines on AWS: what they are, and what they cost on demand as of a date."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from importlib import resources
from pathlib import Path
from typing import Any

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Resources

_NOWHERE_DEARER = Decimal(2)
"""No region's list price of a GPU machine is further above us-east-1's (São Paulo is the dearest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One instance type. `vram_gib` is one GPU's, as it is sold; `efa` counts its EFA interfaces."""

    name: str
    gpu: str
    gpus: int
    vram_gib: int
    vcpus: int
    memory_gib: int
    efa: int

    def fits(self, wanted: Resources) -> bool:
        """Whether such a machine does what the job asked for."""
        return (
            (not wanted.types or self.name in wanted.types)
            and self.gpus >= wanted.gpus
            and (not wanted.gpu or self.gpu in wanted.gpu)
            and (wanted.vram_gib is None or self.vram_gib >= wanted.vram_gib)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPrice:
    """An on-demand price; `bound`: none is listed for the region, and this is what it is at most."""

    usd_per_hour: Decimal
    as_of: date
    bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """One region's on-demand prices by instance type; those in `bounds` are estimates from above."""

    as_of: date
    usd_per_hour: Mapping[str, Decimal]
    bounds: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Machines by name, and price lists by region."""

    machines: Mapping[str, Machine]
    prices: Mapping[str, PriceList]

    def fitting(self, wanted: Resources) -> tuple[Machine, ...]:
        """Return the machines that do what the job asked for, by name."""
        return tuple(self.machines[name] for name in sorted(self.machines) if self.machines[name].fits(wanted))

    def machine(self, name: str) -> Machine:
        """Return the instance type; UsageError when the catalog has none of that name."""
        if name not in self.machines:
            raise UsageError(
                f"{name} is not in the catalog of GPU machines",
                hint="correct `resources: {types: […]}`, or `gpucloud catalog refresh` if AWS has it",
            )
        return self.machines[name]

    def price(self, name: str, region: str) -> ListPrice:
        """Return the on-demand price; where none is listed, the highest listed one × 2. UsageError: no such type."""
        prices = self.prices.get(region)
        if prices and name in prices.usd_per_hour:
            bound = name in prices.bounds
            return ListPrice(usd_per_hour=prices.usd_per_hour[name], as_of=prices.as_of, bound=bound)
        known = [
            ListPrice(usd_per_hour=prices.usd_per_hour[name] * _NOWHERE_DEARER, as_of=prices.as_of, bound=True)
            for prices in self.prices.values()
            if name in prices.usd_per_hour
        ]
        if not known:
            self.machine(name)
            raise UsageError(f"no price of {name} is known", hint="gpucloud catalog refresh")
        return max(known, key=lambda price: price.usd_per_hour)

    def age(self, now: datetime, region: str | None = None) -> timedelta:
        """Return how old the region's prices are; of a region without prices, or of none, the oldest ones."""
        dates = [prices.as_of for name, prices in self.prices.items() if name == region]
        return now - _midnight(min(dates or [prices.as_of for prices in self.prices.values()]), now)

    def with_news(self, news: Catalog) -> Catalog:
        """Return this catalog with the machines and the regions of a newer one over it."""
        newer = {
            region: prices
            for region, prices in news.prices.items()
            if region not in self.prices or prices.as_of >= self.prices[region].as_of
        }
        return replace(self, machines={**self.machines, **news.machines}, prices={**self.prices, **newer})


def load(refreshed: Path | None = None) -> Catalog:
    """Return the package's catalog with what `refresh` wrote to that file over it. UsageError: the file is damaged."""
    text = resources.files("gpucloud.adapters.aws.prices").joinpath("catalog.json").read_text(encoding="utf-8")
    catalog = read(text)
    if refreshed is None or not refreshed.exists():
        return catalog
    try:
        return catalog.with_news(read(refreshed.read_text(encoding="utf-8")))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{refreshed} is damaged: {error}", hint="gpucloud catalog refresh") from error


def read(text: str) -> Catalog:
    """Return the catalog that the text is. ValueError, KeyError, TypeError: it is none."""
    raw = json.loads(text)
    return Catalog(
        machines={name: Machine(name=name, **fields) for name, fields in raw["types"].items()},
        prices={region: _price_list(fields) for region, fields in raw["prices"].items()},
    )


def written(catalog: Catalog) -> str:
    """Return the text that `read` reads."""
    types = {
        name: {field: getattr(machine, field) for field in ("gpu", "gpus", "vram_gib", "vcpus", "memory_gib", "efa")}
        for name, machine in sorted(catalog.machines.items())
    }
    prices = {
        region: {
            "as_of": prices.as_of.isoformat(),
            "bounds": sorted(prices.bounds),
            "usd_per_hour": {name: str(usd) for name, usd in sorted(prices.usd_per_hour.items())},
        }
        for region, prices in sorted(catalog.prices.items())
    }
    return json.dumps({"types": types, "prices": prices}, indent=1) + "\n"


def _price_list(raw: dict[str, Any]) -> PriceList:
    return PriceList(
        as_of=date.fromisoformat(raw["as_of"]),
        bounds=frozenset(raw.get("bounds", ())),
        usd_per_hour={name: Decimal(usd) for name, usd in raw["usd_per_hour"].items()},
    )


def _midnight(day: date, now: datetime) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=now.tzinfo)
