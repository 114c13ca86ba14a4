"""The catalog's files, and what regions charge beside machines."""

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

from gpucloud.domain.errors import UsageError
from gpucloud.domain.market.catalog import Advice, Advisor, Band, Catalog, Machine, PriceList, Scores, SpotList
from gpucloud.domain.money.ledger import Rates

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


# What AWS's regions charge beside machines: gp3 disks, public IPv4 addresses, S3, the way out to the internet,
# drills.
#
# List prices in USD, as AWS's pages for EBS, VPC, S3, EC2 (data transfer) and FIS give them; set down in November 2026
# and asked of nobody. A region that is not listed counts as the dearest known. What is cheaper in truth (S3 above 50
# TB, the account's first 100 GB out in a month) is not taken off: `gpucloud cost --bill` sets AWS's own figures
# beside. gp3's own 3,000 IOPS and 125 MiB/s are free, and no disk of ours is given more.


_AS_IN_VIRGINIA = Rates(
    region="us-east-1",
    disk_usd_per_gib_month=Decimal("0.08"),
    address_usd_per_hour=Decimal("0.005"),  # in every region, since February 2024
    storage_usd_per_gib_month=Decimal("0.023"),
    puts_usd_per_1000=Decimal("0.005"),
    gets_usd_per_1000=Decimal("0.0004"),
    transfer_usd_per_gib=Decimal("0.09"),
    drill_usd=Decimal("0.20"),  # Fault Injection Service: 0.10 an action-minute, for the two minutes of the notice
)
_LISTED = {
    rates.region: rates
    for rates in (
        _AS_IN_VIRGINIA,
        replace(_AS_IN_VIRGINIA, region="us-east-2"),
        replace(_AS_IN_VIRGINIA, region="us-west-2"),
        replace(_AS_IN_VIRGINIA, region="eu-west-1", disk_usd_per_gib_month=Decimal("0.088")),
        replace(
            _AS_IN_VIRGINIA,
            region="eu-central-1",
            disk_usd_per_gib_month=Decimal("0.0952"),
            storage_usd_per_gib_month=Decimal("0.0245"),
            puts_usd_per_1000=Decimal("0.0054"),
            gets_usd_per_1000=Decimal("0.00043"),
        ),
        replace(
            _AS_IN_VIRGINIA,
            region="ap-northeast-1",
            disk_usd_per_gib_month=Decimal("0.096"),
            storage_usd_per_gib_month=Decimal("0.025"),
            puts_usd_per_1000=Decimal("0.0047"),
            gets_usd_per_1000=Decimal("0.00037"),
            transfer_usd_per_gib=Decimal("0.114"),
        ),
    )
}
_NOWHERE_DEARER = Rates(  # São Paulo; the way out: Cape Town
    region="",
    disk_usd_per_gib_month=Decimal("0.152"),
    address_usd_per_hour=Decimal("0.005"),
    storage_usd_per_gib_month=Decimal("0.0405"),
    puts_usd_per_1000=Decimal("0.007"),
    gets_usd_per_1000=Decimal("0.00056"),
    transfer_usd_per_gib=Decimal("0.154"),
    drill_usd=Decimal("0.20"),
)


def region_rates(region: str) -> Rates:
    """Return what the region charges."""
    return _LISTED.get(region) or replace(_NOWHERE_DEARER, region=region)
