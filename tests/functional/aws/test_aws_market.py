"""Prices and quotas as the emulated AWS gives them over its API."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal

import pytest

from gpucloud.adapters.aws.account import AwsAccount
from gpucloud.adapters.aws.prices.market import AwsMarket
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError
from gpucloud.domain.job.spec import Market, MarketPolicy, Resources
from gpucloud.domain.offer import Pool, rank
from tests.lab.aws import Lab

T4 = Resources(types=("g4dn.xlarge",), market=MarketPolicy.AUTO)
POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)


def test_offers_have_the_zones_own_price_below_the_list_price(lab: Lab):
    offers = AwsMarket(Aws(region="us-east-1"), ("us-east-1",)).offers(T4)
    spot = {offer.pool.zone: offer for offer in offers if offer.pool.market is Market.SPOT}
    assert {"us-east-1a", "us-east-1b"} <= set(spot)
    assert all(Decimal(0) < offer.usd_per_hour < Decimal("0.526") for offer in spot.values())
    assert {offer.cap_usd_per_hour for offer in offers} == {Decimal("0.526")}
    assert rank(offers, T4)[0].pool.market is Market.SPOT


def test_spot_prices_of_many_machines_come_by_region_and_zone(lab: Lab):
    market = AwsMarket(Aws(region="us-east-1"), ("us-east-1",))
    lists = market.spot_lists(("us-east-1", "us-west-2"), ("g4dn.xlarge", "g5.xlarge"))
    assert set(lists) == {"us-east-1", "us-west-2"}
    assert set(lists["us-east-1"].usd_per_hour) == {"g4dn.xlarge", "g5.xlarge"}
    assert {"us-east-1a", "us-east-1b"} <= set(lists["us-east-1"].usd_per_hour["g4dn.xlarge"])
    assert all(usd < Decimal("0.526") for usd in lists["us-west-2"].usd_per_hour["g4dn.xlarge"].values())


def test_offers_of_two_regions_come_together(lab: Lab):
    offers = AwsMarket(Aws(region="us-east-1"), ("us-east-1", "us-west-2")).offers(T4)
    assert {offer.pool.region for offer in offers} == {"us-east-1", "us-west-2"}


def test_prices_are_ascending_and_in_utc_and_begin_at_the_start(lab: Lab):
    now = datetime.now(timezone.utc)
    points = AwsMarket(Aws(region="us-east-1"), ("us-east-1",)).prices(POOL, now - timedelta(hours=24), now)
    assert points[0].since == now - timedelta(hours=24)
    assert [point.since for point in points] == sorted(point.since for point in points)
    assert {point.since.tzinfo for point in points} == {timezone.utc}


def test_a_hundred_readings_a_second_ask_aws_once(lab: Lab):
    market = AwsMarket(Aws(region="us-east-1"), ("us-east-1",))
    now, before = datetime.now(timezone.utc), len(lab.calls)
    for _ in range(100):
        market.prices(POOL, now - timedelta(hours=1), now)
    assert [call.action for call in lab.calls[before:]] == ["DescribeSpotPriceHistory"]


def test_expired_credentials_stop_a_plan_but_no_running_job(lab: Lab):
    market = AwsMarket(Aws(region="us-east-1"), ("us-east-1",))
    now = datetime.now(timezone.utc)
    known = market.prices(POOL, now - timedelta(hours=1), now)
    lab.faults.add(service="ec2", code="RequestExpired", status=400, times=99)
    with pytest.raises(CredentialsError):
        market.offers(T4)
    assert market.prices(POOL, now - timedelta(hours=1), now) == known


def test_a_throttled_price_is_not_waited_for(lab: Lab):
    lab.faults.add(action="DescribeSpotPriceHistory", code="RequestLimitExceeded", status=503, times=99)
    market = AwsMarket(Aws(region="us-east-1"), ("us-east-1",))
    now, before = datetime.now(timezone.utc), len(lab.calls)
    assert market.prices(POOL, now, now)[0].usd_per_hour == Decimal("0.526")
    assert len(lab.calls) == before + 1
    assert market.remarks == (
        "the last known prices count: cannot read the spot prices of g4dn.xlarge: AWS asks for fewer calls "
        "(RequestLimitExceeded)",
    )


def test_the_quota_of_an_offer_is_read_and_raised(lab: Lab):
    aws = Aws(region="us-east-1")
    account = AwsAccount(aws)
    (offer,) = [offer for offer in AwsMarket(aws, ("us-east-1",)).offers(T4) if offer.pool == POOL]
    headroom = account.headroom(offer)
    assert (headroom.code, headroom.used) == ("L-3819A6DF", 0)
    wanted = (headroom.limit or 0) + 64
    asked = account.ask_for_more(headroom, wanted)
    assert (asked.wanted, asked.status) == (wanted, "PENDING")
    assert account.ask_for_more(headroom, wanted - 32) == asked
    assert account.requests("us-east-1") == (asked,)
