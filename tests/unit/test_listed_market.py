"""Planning without AWS: the catalog's prices, one offer for each machine, region and market."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal

import pytest

from gpucloud.adapters.aws.prices.market import ListedMarket
from gpucloud.domain.job.spec import Market, MarketPolicy, Resources
from gpucloud.domain.market.catalog import Advice, Advisor, Band, Catalog, Machine, PriceList, SpotList
from gpucloud.domain.offer import Pool

LISTED = date(2026, 7, 20)
READ_AT = datetime(2026, 11, 1, 9, tzinfo=timezone.utc)
AUTO = Resources(market=MarketPolicy.AUTO)


def machine(name: str, gpu: str, gpus: int) -> Machine:
    return Machine(name=name, gpu=gpu, gpus=gpus, vram_gib=24, vcpus=8, memory_gib=32, efa=1)


CATALOG = Catalog(
    machines={"g6.xlarge": machine("g6.xlarge", "L4", 1), "g5.xlarge": machine("g5.xlarge", "A10G", 1)},
    prices={
        "us-east-1": PriceList(as_of=LISTED, usd_per_hour={"g6.xlarge": Decimal("0.80"), "g5.xlarge": Decimal("1.00")}),
        "us-west-2": PriceList(as_of=LISTED, usd_per_hour={"g6.xlarge": Decimal("0.90")}),
    },
    spot={"us-west-2": SpotList(as_of=READ_AT, usd_per_hour={"g6.xlarge": {"us-west-2a": Decimal("0.30")}})},
    advisor=Advisor(
        as_of=date(2025, 6, 28),
        advice={"us-east-1": {"g6.xlarge": Advice(saving=60, band=Band.OVER_20)}},
    ),
)


def offered(wanted: Resources, *regions: str) -> list[tuple[str, Decimal, date]]:
    found = ListedMarket(CATALOG, regions).offers(wanted)
    return [(str(offer.pool), offer.usd_per_hour, offer.as_of.date()) for offer in found]


def test_a_spot_price_that_was_never_read_is_what_the_advisor_leaves_of_the_list_price() -> None:
    assert offered(AUTO, "us-east-1") == [
        ("g5.xlarge on_demand in us-east-1", Decimal("1.00"), LISTED),
        ("g6.xlarge spot in us-east-1", Decimal("0.32"), date(2025, 6, 28)),
        ("g6.xlarge on_demand in us-east-1", Decimal("0.80"), LISTED),
    ]


def test_a_spot_price_that_was_read_counts() -> None:
    assert offered(AUTO, "us-west-2")[0] == ("g6.xlarge spot in us-west-2", Decimal("0.30"), LISTED)


@pytest.mark.parametrize(
    ("wanted", "pools"),
    [
        (Resources(regions=("us-west-2",)), ["g6.xlarge spot in us-west-2"]),
        (Resources(market=MarketPolicy.ON_DEMAND, gpu=("A10G",)), ["g5.xlarge on_demand in us-east-1"]),
        (Resources(gpus=8), []),
    ],
)
def test_only_what_the_job_asks_for_is_offered(wanted: Resources, pools: list[str]) -> None:
    assert [pool for pool, _, _ in offered(wanted, "us-east-1")] == pools


def test_the_price_of_a_pool_is_the_list_price() -> None:
    pool = Pool(instance_type="g6.xlarge", zone="us-east-1", market=Market.SPOT)
    (point,) = ListedMarket(CATALOG, ()).prices(pool, READ_AT, READ_AT)
    assert (point.since, point.usd_per_hour) == (READ_AT, Decimal("0.80"))
