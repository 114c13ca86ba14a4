"""Which offer is taken first: the cheapest work, whatever the market."""

from __future__ import annotations

from decimal import Decimal

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.prices.market import ListedMarket
from gpucloud.domain.job.spec import Market, MarketPolicy, Resources
from gpucloud.domain.offer import Offer, Pool, rank
from tests.fakes.market import NOW

AUTO = Resources(market=MarketPolicy.AUTO)


def offer(name: str, market: Market, usd: str) -> Offer:
    price = Decimal(usd)
    pool = Pool(instance_type=name, zone="us-east-1a", market=market)
    return Offer(pool=pool, usd_per_hour=price, cap_usd_per_hour=price, as_of=NOW, gpus=1)


def ranked(*offers: tuple[str, Market, str]) -> list[tuple[str, Market]]:
    found = rank(tuple(offer(*one) for one in offers), AUTO)
    return [(one.pool.instance_type, one.pool.market) for one in found]


@pytest.mark.parametrize(
    ("spot", "first"),
    [
        ("20.00", Market.SPOT),
        ("50.00", Market.SPOT),  # with a tenth for restarts, 55.00
        ("50.10", Market.ON_DEMAND),
        ("89.00", Market.ON_DEMAND),  # as after a cut of the list price
    ],
)
def test_spot_comes_first_where_it_saves_more_than_restarts_take(spot: str, first: Market) -> None:
    assert ranked(("p5", Market.SPOT, spot), ("p5", Market.ON_DEMAND, "55.04"))[0] == ("p5", first)


def test_dear_spot_machines_come_after_cheap_ones_on_demand() -> None:
    assert ranked(
        ("big", Market.SPOT, "4.72"), ("small", Market.ON_DEMAND, "0.53"), ("small", Market.SPOT, "0.20")
    ) == [("small", Market.SPOT), ("small", Market.ON_DEMAND), ("big", Market.SPOT)]


def test_no_spot_machine_of_the_catalog_before_the_first_on_demand_is_dearer_than_it() -> None:
    found = rank(ListedMarket(load(), ("us-east-1",)).offers(AUTO), AUTO)
    first = next(one for one in found if one.pool.market is Market.ON_DEMAND)
    before = found[: found.index(first)]
    assert (first.pool.instance_type, len(before) > 0) == ("g4dn.xlarge", True)
    assert max(one.usd_per_hour for one in before) < first.usd_per_hour
