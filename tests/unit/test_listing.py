"""Listings: prices on either market, what matches a query, what comes first."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timezone
from decimal import Decimal

import pytest

from gpucloud.domain.job.spec import MarketPolicy
from gpucloud.domain.market.catalog import (
    Advice,
    Advisor,
    Band,
    Catalog,
    ListPrice,
    Machine,
    PriceList,
    Scores,
    SpotList,
)
from gpucloud.domain.market.listing import Listing, Order, Query, SpotRange, listings, matches, rank

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
LISTED, ADVISED = date(2026, 7, 20), date(2025, 6, 28)
SMALL = Machine(name="g5.xlarge", gpu="A10G", gpus=1, vram_gib=24, vcpus=4, memory_gib=16, efa=0, network_gbps=2.5,
                burst_gbps=10, nvme_gb=250)  # fmt: skip
LARGE = Machine(name="p5.48xlarge", gpu="H100", gpus=8, vram_gib=80, vcpus=192, memory_gib=2048, efa=32,
                network_gbps=3200, nvme_gb=30400)  # fmt: skip
NEW = Machine(name="g7.12xlarge", gpu="RTX PRO 4500", gpus=2, vram_gib=32, vcpus=48, memory_gib=192, efa=1,
              network_gbps=175)  # fmt: skip
PART = Machine(name="g6f.xlarge", gpu="L4", gpus=0, gpu_part=0.125, vram_gib=2, vcpus=4, memory_gib=16, efa=0)
CATALOG = Catalog(
    machines={machine.name: machine for machine in (SMALL, LARGE, NEW, PART)},
    prices={
        "us-east-1": PriceList(
            as_of=LISTED,
            usd_per_hour={
                "g5.xlarge": Decimal("1.006"),
                "p5.48xlarge": Decimal("55.04"),
                "g7.12xlarge": Decimal("7.12832"),
                "g6f.xlarge": Decimal("0.2375"),
            },
        )
    },
    zones={
        "us-east-1": {"g5.xlarge": 5, "p5.48xlarge": 6, "g7.12xlarge": 4, "g6f.xlarge": 2},
        "eu-west-1": {"g5.xlarge": 3},
    },
    advisor=Advisor(
        as_of=ADVISED,
        advice={
            "us-east-1": {
                "g5.xlarge": Advice(saving=59, band=Band.OVER_20),
                "p5.48xlarge": Advice(saving=52, band=Band.UNDER_10),
            },
            "eu-west-1": {"g5.xlarge": Advice(saving=60, band=Band.UNDER_5)},
        },
    ),
)
ASKED = replace(
    CATALOG,
    spot={
        "us-east-1": SpotList(
            as_of=NOW,
            usd_per_hour={
                "g5.xlarge": {"us-east-1a": Decimal("0.40"), "us-east-1b": Decimal("0.52")},
                "g7.12xlarge": {"us-east-1a": Decimal("7.50")},
            },
        )
    },
)


def found(catalog: Catalog, name: str, region: str = "us-east-1") -> Listing:
    return next(one for one in listings(catalog, (region,)) if one.machine.name == name)


def test_a_listing_has_the_spot_prices_of_its_regions_zones():
    assert found(ASKED, "g5.xlarge") == Listing(
        machine=SMALL,
        region="us-east-1",
        on_demand=ListPrice(usd_per_hour=Decimal("1.006"), as_of=LISTED),
        spot=SpotRange(
            low_usd_per_hour=Decimal("0.40"), high_usd_per_hour=Decimal("0.52"), zones=2, as_of=date(2026, 11, 21)
        ),
        spot_asked=True,
        zones=5,
        advice=Advice(saving=59, band=Band.OVER_20),
    )


def test_without_prices_spot_is_estimated_from_the_advisors_saving():
    assert found(CATALOG, "g5.xlarge").spot == SpotRange(
        low_usd_per_hour=Decimal("0.412460"),
        high_usd_per_hour=Decimal("0.412460"),
        zones=0,
        as_of=ADVISED,
        estimated=True,
    )


def test_of_a_type_that_the_advisor_does_not_name_nothing_is_estimated():
    listing = found(CATALOG, "g7.12xlarge")
    assert (listing.spot, listing.spot_asked, listing.band) == (None, False, None)


def test_nothing_is_estimated_from_a_bound():
    listing = found(CATALOG, "g5.xlarge", "eu-west-1")
    assert listing.on_demand == ListPrice(usd_per_hour=Decimal("2.012"), as_of=LISTED, bound=True)
    assert (listing.spot, listing.band) == (None, Band.UNDER_5)


def test_where_aws_was_asked_a_type_without_a_price_is_not_offered():
    listing = found(ASKED, "p5.48xlarge")
    assert (listing.spot, listing.spot_asked) == (None, True)
    assert not matches(listing, Query(market=MarketPolicy.SPOT))
    assert matches(listing, Query(market=MarketPolicy.AUTO))


def test_spot_above_on_demand_is_not_the_price_that_counts():
    listing = found(ASKED, "g7.12xlarge")
    assert listing.usd_per_hour(MarketPolicy.AUTO) == Decimal("7.12832")
    assert listing.usd_per_hour(MarketPolicy.SPOT) == Decimal("7.50")


@pytest.mark.parametrize(
    ("name", "market", "machine", "gpu", "pflop"),
    [
        ("g5.xlarge", MarketPolicy.AUTO, "0.40", "0.400000", "5.714286"),
        ("g5.xlarge", MarketPolicy.ON_DEMAND, "1.006", "1.006000", "14.371429"),
        ("p5.48xlarge", MarketPolicy.AUTO, "55.04", "6.880000", "6.953007"),
        ("p5.48xlarge", MarketPolicy.SPOT, None, None, None),
        ("g7.12xlarge", MarketPolicy.ON_DEMAND, "7.12832", "3.564160", None),
        ("g6f.xlarge", MarketPolicy.ON_DEMAND, "0.2375", "1.900000", "15.702479"),
    ],
)
def test_prices_by_machine_by_gpu_and_by_what_it_computes(
    name: str, market: MarketPolicy, machine: str | None, gpu: str | None, pflop: str | None
):
    listing = found(ASKED, name)
    prices = (
        listing.usd_per_hour(market),
        listing.usd_per_gpu_hour(market),
        listing.usd_per_pflop_hour(market),
    )
    assert prices == tuple(None if usd is None else Decimal(usd) for usd in (machine, gpu, pflop))


@pytest.mark.parametrize(
    ("catalog", "name", "region", "saving"),
    [
        (ASKED, "g5.xlarge", "us-east-1", 60),  # the cheapest zone's
        (ASKED, "g7.12xlarge", "us-east-1", -5),  # dearer than on demand
        (ASKED, "p5.48xlarge", "us-east-1", None),  # not offered now
        (CATALOG, "p5.48xlarge", "us-east-1", 52),  # the advisor's
        (CATALOG, "g5.xlarge", "eu-west-1", 60),  # the advisor's: there is only a bound of the list price
        (CATALOG, "g7.12xlarge", "us-east-1", None),
    ],
)
def test_the_saving(catalog: Catalog, name: str, region: str, saving: int | None):
    assert found(catalog, name, region).saving_percent == saving


def test_the_score_is_that_of_the_best_zone():
    scores = {"us-east-1": {"A10G": Scores(as_of=NOW, by_zone={"use1-az1": 3, "use1-az4": 7})}}
    catalog = replace(CATALOG, scores=scores)
    assert (found(catalog, "g5.xlarge").score, found(catalog, "p5.48xlarge").score) == (7, None)


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(), ["g6f.xlarge", "g5.xlarge", "g7.12xlarge", "p5.48xlarge"]),
        (Query(gpu=("H100", "A10G")), ["g5.xlarge", "p5.48xlarge"]),
        (Query(gpus=1), ["g5.xlarge", "g7.12xlarge", "p5.48xlarge"]),
        (Query(gpus=2), ["g7.12xlarge", "p5.48xlarge"]),
        (Query(vram_gib=25), ["g7.12xlarge", "p5.48xlarge"]),
        (Query(network_gbps=10), ["g7.12xlarge", "p5.48xlarge"]),
        (Query(efa=True), ["g7.12xlarge", "p5.48xlarge"]),
        (Query(nvlink=True), ["p5.48xlarge"]),
        (Query(types=("g5.xlarge",)), ["g5.xlarge"]),
        (Query(regions=("eu-west-1",)), []),
        (Query(usd_per_hour=Decimal("0.50")), ["g6f.xlarge", "g5.xlarge"]),
        (Query(usd_per_hour=Decimal("0.50"), market=MarketPolicy.ON_DEMAND), ["g6f.xlarge"]),
        (Query(market=MarketPolicy.SPOT), ["g5.xlarge", "g7.12xlarge"]),
    ],
)
def test_what_matches(query: Query, names: list[str]):
    matching = [one for one in listings(ASKED, ("us-east-1",)) if matches(one, query)]
    assert sorted(one.machine.name for one in matching) == sorted(names)


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (Order.PRICE, ["g5.xlarge", "g7.12xlarge", "p5.48xlarge", "g6f.xlarge"]),
        (Order.GPU_PRICE, ["g5.xlarge", "g7.12xlarge", "p5.48xlarge", "g6f.xlarge"]),
        (Order.TFLOPS_PRICE, ["g5.xlarge", "p5.48xlarge", "g7.12xlarge", "g6f.xlarge"]),
        (Order.INTERRUPTION, ["p5.48xlarge", "g5.xlarge", "g7.12xlarge", "g6f.xlarge"]),
    ],
)
def test_what_comes_first(order: Order, names: list[str]):
    """What is not known comes last of those that jobs run on, and a part of a GPU after them."""
    assert [one.machine.name for one in rank(listings(ASKED, ("us-east-1",)), Query(), order)] == names


LENT = replace(
    CATALOG, prices={**CATALOG.prices, "us-west-2": replace(CATALOG.prices["us-east-1"], taken_from="us-east-1")}
)


def test_it_is_said_whose_list_a_region_without_its_own_is_taken_to_have():
    assert LENT.assumed(["us-west-2", "us-east-1", "us-west-2"]) == "us-west-2 taken to be priced as us-east-1"
    assert LENT.assumed(["us-east-1"]) == ""
