"""The catalog's files: the one in the package, and what `gpucloud catalog refresh` wrote over it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, replace
from datetime import date, datetime
from decimal import Decimal
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpucloud.domain.catalog import Advice, Advisor, Band, Catalog, Machine, PriceList, Scores, SpotList
from gpucloud.domain.errors import UsageError

_BANDS = tuple(Band)
_NONE: Mapping[str, Machine] = MappingProxyType({})


def load(refreshed: Path | None = None) -> Catalog:
    """Return the package's catalog with what `refresh` wrote to that file over it. UsageError: the file is damaged."""
    text = resources.files("gpucloud.adapters.aws.prices").joinpath("catalog.json").read_text(encoding="utf-8")
    catalog = read(text)
    if refreshed is None or not refreshed.exists():
        return catalog
    try:
        return catalog.with_news(read(refreshed.read_text(encoding="utf-8"), catalog.machines))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        raise UsageError(f"{refreshed} is damaged: {error}", hint="gpucloud catalog refresh") from error


def read(text: str, known: Mapping[str, Machine] = _NONE) -> Catalog:
    """Return the catalog that the text is. ValueError, KeyError, TypeError: it is none.

    What a file does not say of a machine, as those of old, is taken from the `known` one of that name.
    """
    raw = json.loads(text)
    lists = raw["prices"]
    return Catalog(
        machines={name: _machine(name, said, known.get(name)) for name, said in raw["types"].items()},
        prices={region: _price_list(said, lists) for region, said in lists.items()},
        zones=raw.get("zones", {}),
        spot={region: _spot_list(said) for region, said in raw.get("spot", {}).items()},
        advisor=_advisor(raw["advisor"]) if "advisor" in raw else None,
        scores={
            region: {gpu: _scores(said) for gpu, said in models.items()}
            for region, models in raw.get("scores", {}).items()
        },
    )


def written(catalog: Catalog) -> str:
    """Return the text that `read` reads: one line for each machine and each region."""
    sections: dict[str, Mapping[str, Any]] = {
        "types": {name: _told(machine) for name, machine in catalog.machines.items()},
        "prices": {region: _listed(prices) for region, prices in catalog.prices.items()},
        "zones": catalog.zones,
        "spot": {region: _asked(prices) for region, prices in catalog.spot.items()},
        "scores": {
            region: {gpu: {"as_of": one.as_of.isoformat(), "by_zone": one.by_zone} for gpu, one in models.items()}
            for region, models in catalog.scores.items()
        },
    }
    parts = [f"{json.dumps(name)}: {_lines(section)}" for name, section in sections.items()]
    if catalog.advisor is not None:
        advice = {
            region: {name: [one.saving, _BANDS.index(one.band)] for name, one in types.items()}
            for region, types in catalog.advisor.advice.items()
        }
        parts.append(f'"advisor": {{"as_of": "{catalog.advisor.as_of}", "advice": {_lines(advice)}}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(section: Mapping[str, Any]) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(section[name], sort_keys=True)}" for name in sorted(section)]
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _machine(name: str, said: dict[str, Any], known: Machine | None) -> Machine:
    return replace(known, **said) if known is not None else Machine(name=name, **said)


def _told(machine: Machine) -> dict[str, Any]:
    return dict(_said(machine))


def _said(machine: Machine) -> Iterator[tuple[str, Any]]:
    """Yield what has no default, and what is not as by default."""
    for one in fields(machine):
        value = getattr(machine, one.name)
        if one.name != "name" and (one.default is MISSING or value != one.default):
            yield one.name, value


def _price_list(said: dict[str, Any], lists: dict[str, Any]) -> PriceList:
    base = said.get("taken_from")
    raw = lists[base] if base else said
    return PriceList(
        as_of=date.fromisoformat(raw["as_of"]),
        bounds=frozenset(raw.get("bounds", ())),
        usd_per_hour={name: Decimal(usd) for name, usd in raw["usd_per_hour"].items()},
        taken_from=base,
    )


def _listed(prices: PriceList) -> dict[str, Any]:
    if prices.taken_from is not None:
        return {"taken_from": prices.taken_from}
    usd = {name: str(usd) for name, usd in prices.usd_per_hour.items()}
    return {"as_of": prices.as_of.isoformat(), "bounds": sorted(prices.bounds), "usd_per_hour": usd}


def _spot_list(said: dict[str, Any]) -> SpotList:
    return SpotList(
        as_of=datetime.fromisoformat(said["as_of"]),
        usd_per_hour={
            name: {zone: Decimal(usd) for zone, usd in zones.items()} for name, zones in said["usd_per_hour"].items()
        },
    )


def _asked(prices: SpotList) -> dict[str, Any]:
    usd = {name: {zone: str(usd) for zone, usd in zones.items()} for name, zones in prices.usd_per_hour.items()}
    return {"as_of": prices.as_of.isoformat(), "usd_per_hour": usd}


def _advisor(said: dict[str, Any]) -> Advisor:
    return Advisor(
        as_of=date.fromisoformat(said["as_of"]),
        advice={
            region: {name: Advice(saving=saving, band=_BANDS[band]) for name, (saving, band) in types.items()}
            for region, types in said["advice"].items()
        },
    )


def _scores(said: dict[str, Any]) -> Scores:
    return Scores(as_of=datetime.fromisoformat(said["as_of"]), by_zone=said["by_zone"])
