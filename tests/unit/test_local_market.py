"""The embedded cloud's market: recorded prices, replayed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal

import pytest

from gpucloud.adapters.local.market import Devices, LocalMarket, devices_here
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Market, Resources
from gpucloud.domain.offer import Pool, PricePoint, rank

ANCHOR = datetime(2026, 1, 1, tzinfo=timezone.utc)
SPOT = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)


def test_offers_are_the_recorded_types_in_their_zones_in_both_markets() -> None:
    offers = LocalMarket(now=lambda: ANCHOR).offers(Resources())
    slots = {offer.pool.instance_type: offer.gpus for offer in offers}
    assert slots == {"local.p2.xlarge": 1, "local.p3.2xlarge": 1, "local.p3.8xlarge": 4, "local.p3.16xlarge": 8}
    assert len(offers) == 22
    assert {offer.gpu for offer in offers} == {None}
    assert {offer.as_of for offer in offers} == {ANCHOR}


def test_on_demand_costs_the_list_price_which_caps_spot_at_all_times() -> None:
    market = LocalMarket(now=lambda: ANCHOR)
    listed = {
        "local.p2.xlarge": Decimal("0.90"),
        "local.p3.2xlarge": Decimal("3.06"),
        "local.p3.8xlarge": Decimal("12.24"),
        "local.p3.16xlarge": Decimal("24.48"),
    }
    for offer in market.offers(Resources()):
        assert offer.cap_usd_per_hour == listed[offer.pool.instance_type]
        if offer.pool.market is Market.ON_DEMAND:
            assert offer.usd_per_hour == offer.cap_usd_per_hour
        for point in market.prices(offer.pool, ANCHOR, ANCHOR + timedelta(days=90)):
            assert Decimal("0.2") < point.usd_per_hour <= offer.cap_usd_per_hour


def test_the_cheapest_offer_is_found_by_the_domain_rule() -> None:
    best = rank(LocalMarket(now=lambda: ANCHOR).offers(Resources()), Resources(gpus=4))[0]
    assert best.pool == Pool(instance_type="local.p3.8xlarge", zone="us-east-2a", market=Market.SPOT)
    assert best.usd_per_hour == Decimal("3.672")


def test_prices_start_at_or_before_the_start_and_rise_in_time() -> None:
    market = LocalMarket()
    start, end = ANCHOR + timedelta(days=3), ANCHOR + timedelta(days=200)
    points = market.prices(SPOT, start, end)
    assert points[0].since <= start < points[1].since
    assert points[-1].since <= end
    assert [p.since for p in points] == sorted({p.since for p in points})


def test_the_price_at_a_time_is_the_same_from_every_window() -> None:
    market = LocalMarket()
    long = market.prices(SPOT, ANCHOR - timedelta(days=100), ANCHOR + timedelta(days=100))
    for hours in range(-2300, 2300, 13):
        at = ANCHOR + timedelta(hours=hours)
        assert market.prices(SPOT, at, at) == (max((p for p in long if p.since <= at), key=lambda p: p.since),)


def test_the_series_starts_again_after_90_days() -> None:
    market = LocalMarket()
    for days in (-90, 90, 900):
        (then,) = market.prices(SPOT, ANCHOR + timedelta(days=40), ANCHOR + timedelta(days=40))
        again = market.prices(SPOT, ANCHOR + timedelta(days=40 + days), ANCHOR + timedelta(days=40 + days))
        assert again == (PricePoint(since=then.since + timedelta(days=days), usd_per_hour=then.usd_per_hour),)


def test_the_recorded_first_days_are_replayed_from_the_anchor() -> None:
    points = LocalMarket().prices(SPOT, ANCHOR, ANCHOR + timedelta(days=1))
    assert [(p.since - ANCHOR, p.usd_per_hour) for p in points[:3]] == [
        (timedelta(0), Decimal("1.014")),  # 2019-12-23T01:00:00Z
        (timedelta(seconds=10416), Decimal("1.0123")),  # 2019-12-23T03:53:36Z
        (timedelta(seconds=35957), Decimal("1.01")),  # 2019-12-23T10:59:17Z
    ]


def test_a_pool_that_was_not_recorded_is_an_error() -> None:
    for pool in (
        Pool(instance_type="p5.48xlarge", zone="us-east-2a", market=Market.SPOT),
        Pool(instance_type="local.p3.16xlarge", zone="us-east-2c", market=Market.ON_DEMAND),
    ):
        with pytest.raises(UsageError):
            LocalMarket().prices(pool, ANCHOR, ANCHOR)


FOUR = Devices(uuids=("GPU-0", "GPU-1", "GPU-2", "GPU-3"), model="H200", vram_gib=140)


def with_gpus() -> LocalMarket:
    return LocalMarket(now=lambda: ANCHOR, devices=lambda: FOUR)


def test_a_machine_with_gpus_enough_for_the_job_offers_them_and_nothing_else() -> None:
    offers = with_gpus().offers(Resources(nodes=2, gpus=2))
    assert {(offer.pool.instance_type, offer.gpus, offer.gpu, offer.vram_gib) for offer in offers} == {
        ("local.gpu2", 2, "H200", 140)
    }
    assert {offer.cap_usd_per_hour for offer in offers} == {Decimal("1.80")}  # twice the recorded price of one
    (point,) = with_gpus().prices(offers[0].pool, ANCHOR, ANCHOR)
    assert point.usd_per_hour == offers[0].usd_per_hour


def test_a_job_larger_than_the_machines_gpus_runs_on_the_cpu_unless_it_asks_for_gpus() -> None:
    wanted = Resources(nodes=3, gpus=2)
    offers = with_gpus().offers(wanted)
    assert {offer.gpu for offer in offers} == {None}
    assert rank(offers, wanted)
    assert rank(offers, Resources(nodes=3, gpus=2, gpu=("H200",))) == ()


def test_a_part_of_a_gpu_is_no_device_that_the_embedded_fleet_gives_to_a_node(monkeypatch):
    monkeypatch.setattr("gpucloud.system.smi.gpus", lambda: pytest.fail("asked for whole devices"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-00000002-0000-0000-0000-000000000002/3/0")
    assert devices_here() == Devices()
