"""AWS's market over a double of EC2: what is asked, how often, and what counts when nobody answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.prices.market import AwsMarket
from gpucloud.adapters.home import Home
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.job.spec import Access, AwsChoices, Market, MarketPolicy, Resources
from gpucloud.domain.market.catalog import Catalog, PriceList
from gpucloud.domain.offer import EfaLayout, Offer, Pool, PricePoint
from gpucloud.wiring.aws import AwsCloud

T0 = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
SPOT = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
ON_DEMAND = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.ON_DEMAND)


class Ec2:
    """Answers price and offering calls from lists; `error` is raised instead while it is set."""

    def __init__(self) -> None:
        self.history = {T0 - 3 * timedelta(hours=1): "0.20", T0 - timedelta(hours=1): "0.25"}
        self.offerings = [
            ("g4dn.xlarge", "us-east-1a"),
            ("g4dn.xlarge", "us-east-1b"),
            ("g4dn.xlarge", "us-east-1-bos-1a"),
        ]
        self.error: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def get_paginator(self, name: str) -> Any:
        ec2 = self

        class Paginator:
            def paginate(self, **params: Any) -> list[dict[str, Any]]:
                ec2.calls.append({"": name, **params})
                if ec2.error:
                    raise ec2.error
                return getattr(ec2, name)(params)

        return Paginator()

    def describe_instance_type_offerings(self, _params: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"InstanceTypeOfferings": [{"InstanceType": kind, "Location": zone} for kind, zone in self.offerings]}]

    def describe_spot_price_history(self, params: dict[str, Any]) -> list[dict[str, Any]]:
        """As AWS: what began within the span, and the price in force at its start."""
        start, end = params["StartTime"], params["EndTime"]
        times = sorted(self.history)
        in_force = [since for since in times if since <= start][-1:]
        shown = in_force + [since for since in times if start < since <= end]
        rows = [
            {
                "Timestamp": since,
                "SpotPrice": self.history[since],
                "InstanceType": "g4dn.xlarge",
                "AvailabilityZone": "us-east-1a",
            }
            for since in reversed(shown)
        ]
        return [{"SpotPriceHistory": rows[:1]}, {"SpotPriceHistory": rows[1:]}]


class FakeAws:
    def __init__(self, *regions: str) -> None:
        self.ec2 = {region: Ec2() for region in regions or ("us-east-1",)}

    def client(self, _service: str, region: str, *, quick: bool = False) -> Ec2:
        return self.ec2[region]

    @contextmanager
    def calling(self, _service: str, _what: str, region: str) -> Iterator[Ec2]:
        yield self.ec2[region]


class Time:
    def __init__(self) -> None:
        self.at = T0

    def __call__(self) -> datetime:
        return self.at


@pytest.fixture
def aws() -> FakeAws:
    return FakeAws()


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def market(aws: FakeAws, time: Callable[[], datetime]) -> AwsMarket:
    return AwsMarket(aws, ("us-east-1",), now=time)


def small(policy: MarketPolicy) -> Resources:
    return Resources(types=("g4dn.xlarge",), market=policy)


def test_offers_are_the_zones_that_offer_the_type_at_their_price_now(market: AwsMarket):
    assert market.offers(small(MarketPolicy.SPOT)) == (
        Offer(
            pool=SPOT, usd_per_hour=Decimal("0.25"), cap_usd_per_hour=Decimal("0.526"), as_of=T0,
            gpus=1, gpu="T4", vram_gib=16, vcpus=4, efa=EfaLayout(),
        ),
        Offer(
            pool=Pool(instance_type="g4dn.xlarge", zone="us-east-1b", market=Market.SPOT),
            usd_per_hour=Decimal("0.526"), cap_usd_per_hour=Decimal("0.526"), as_of=T0,
            gpus=1, gpu="T4", vram_gib=16, vcpus=4, efa=EfaLayout(),
        ),
    )  # fmt: skip


def test_machines_of_a_gang_have_efa_and_one_alone_has_none(market: AwsMarket, aws: FakeAws):
    aws.ec2["us-east-1"].offerings = [("p4d.24xlarge", "us-east-1a")]
    wanted = Resources(types=("p4d.24xlarge",), market=MarketPolicy.ON_DEMAND)
    assert [offer.efa for offer in market.offers(wanted)] == [EfaLayout()]
    gang = replace(wanted, nodes=2)
    assert [offer.efa for offer in market.offers(gang)] == [EfaLayout(interfaces=4, cards=4)]


def listed(usd: str, as_of: str) -> Catalog:
    prices = PriceList(as_of=date.fromisoformat(as_of), usd_per_hour={"g4dn.xlarge": Decimal(usd)})
    return replace(load(), prices={"us-east-1": prices})


@pytest.mark.parametrize(
    ("as_of", "renewed", "usd"),
    [
        ("2026-11-01", None, "0.5"),  # read this month: it counts
        ("2026-07-20", "0.7", "0.7"),  # it has risen since
        ("2026-07-20", None, "0.625"),  # nobody can say: as much above it as a budget must bear
    ],
)
def test_machines_on_demand_never_count_for_less_than_they_cost_now(aws: FakeAws, as_of, renewed, usd):
    asked: list[str] = []

    def renew(region: str) -> Catalog:
        asked.append(region)
        if renewed is None:
            raise ProvisionError("not allowed: pricing:GetProducts")
        return listed(renewed, "2026-11-21")

    market = AwsMarket(aws, ("us-east-1",), catalog=listed("0.5", as_of), renew=renew, now=lambda: T0)
    (offer, *_) = market.offers(small(MarketPolicy.ON_DEMAND))
    assert (offer.usd_per_hour, offer.cap_usd_per_hour) == (Decimal(usd), Decimal(usd))
    assert market.prices(ON_DEMAND, T0, T0) == (PricePoint(since=T0, usd_per_hour=Decimal(usd)),)
    market.offers(small(MarketPolicy.AUTO))
    assert asked == ([] if as_of == "2026-11-01" else ["us-east-1"])
    assert bool(market.remarks) is (usd == "0.625")


def test_a_region_without_a_list_of_its_own_is_asked_before_its_machines_are_paid_on_demand(aws: FakeAws):
    aws.ec2["eu-west-3"] = Ec2()
    aws.ec2["eu-west-3"].offerings = [("g4dn.xlarge", "eu-west-3a")]
    news = PriceList(as_of=date(2026, 11, 21), usd_per_hour={"g4dn.xlarge": Decimal("0.61")})
    whole = listed("0.5", "2026-11-01")
    market = AwsMarket(
        aws,
        ("eu-west-3",),
        catalog=whole,
        renew=lambda region: replace(whole, prices={**whole.prices, region: news}),
        now=lambda: T0,
    )
    assert [offer.usd_per_hour for offer in market.offers(small(MarketPolicy.ON_DEMAND))] == [Decimal("0.61")]


def test_auto_offers_both_markets(market: AwsMarket):
    pools = [str(offer.pool) for offer in market.offers(small(MarketPolicy.AUTO))]
    assert pools == [
        "g4dn.xlarge spot in us-east-1a",
        "g4dn.xlarge on_demand in us-east-1a",
        "g4dn.xlarge spot in us-east-1b",
        "g4dn.xlarge on_demand in us-east-1b",
    ]


def test_on_demand_asks_for_no_spot_price(market: AwsMarket, aws: FakeAws):
    offers = market.offers(small(MarketPolicy.ON_DEMAND))
    assert {offer.usd_per_hour for offer in offers} == {Decimal("0.526")}
    assert [call[""] for call in aws.ec2["us-east-1"].calls] == ["describe_instance_type_offerings"]


def test_what_no_machine_can_do_asks_nobody(market: AwsMarket, aws: FakeAws):
    assert market.offers(Resources(gpu=("T4",), vram_gib=80)) == ()
    assert aws.ec2["us-east-1"].calls == []


def test_offers_are_asked_for_once_a_minute(market: AwsMarket, aws: FakeAws, time: Time):
    wanted = small(MarketPolicy.SPOT)
    for _ in range(5):
        market.offers(wanted)
    assert len(aws.ec2["us-east-1"].calls) == 2
    time.at += MINUTE
    market.offers(wanted)
    assert len(aws.ec2["us-east-1"].calls) == 4


def test_a_region_that_cannot_be_asked_is_left_out_with_a_remark(time: Time):
    aws = FakeAws("us-east-1", "us-west-2")
    aws.ec2["us-west-2"].error = ProvisionError("cannot list what us-west-2 offers: not opted in")
    market = AwsMarket(aws, ("us-east-1", "us-west-2"), now=time)
    assert {offer.pool.region for offer in market.offers(small(MarketPolicy.SPOT))} == {"us-east-1"}
    assert market.remarks == ("us-west-2 is left out: cannot list what us-west-2 offers: not opted in",)


def test_no_region_that_can_be_asked_is_an_error(market: AwsMarket, aws: FakeAws):
    aws.ec2["us-east-1"].error = CredentialsError("the credentials have expired")
    with pytest.raises(CredentialsError):
        market.offers(small(MarketPolicy.SPOT))


def test_prices_cover_the_span_from_the_one_in_force_at_its_start(market: AwsMarket):
    start = T0 - timedelta(hours=2)
    assert market.prices(SPOT, start, T0) == (
        PricePoint(since=start, usd_per_hour=Decimal("0.20")),
        PricePoint(since=T0 - timedelta(hours=1), usd_per_hour=Decimal("0.25")),
    )


def test_prices_are_asked_for_once_a_minute_however_often_they_are_read(market: AwsMarket, aws: FakeAws, time: Time):
    start = T0 - timedelta(hours=2)
    for _ in range(300):
        market.prices(SPOT, start, time.at)
        market.prices(SPOT, time.at, time.at)
        time.at += timedelta(seconds=1)
    assert len(aws.ec2["us-east-1"].calls) == 5


def test_prices_grow_with_time(market: AwsMarket, aws: FakeAws, time: Time):
    market.prices(SPOT, T0, T0)
    aws.ec2["us-east-1"].history[T0 + 2 * MINUTE] = "0.30"
    time.at += 5 * MINUTE
    assert market.prices(SPOT, T0, time.at) == (
        PricePoint(since=T0, usd_per_hour=Decimal("0.25")),
        PricePoint(since=T0 + 2 * MINUTE, usd_per_hour=Decimal("0.30")),
    )
    last = aws.ec2["us-east-1"].calls[-1]
    assert (last["StartTime"], last["EndTime"]) == (T0, T0 + 5 * MINUTE)


def test_a_price_that_is_listed_late_still_counts(market: AwsMarket, aws: FakeAws, time: Time):
    time.at = T0 + timedelta(hours=2)
    market.prices(SPOT, T0, time.at)
    aws.ec2["us-east-1"].history[time.at - 10 * MINUTE] = "0.40"
    time.at += 2 * MINUTE
    assert market.prices(SPOT, time.at, time.at)[0].usd_per_hour == Decimal("0.40")
    assert aws.ec2["us-east-1"].calls[-1]["StartTime"] == T0 + timedelta(hours=1, minutes=30)


def test_an_older_machine_reaches_farther_back(market: AwsMarket, aws: FakeAws):
    market.prices(SPOT, T0, T0)
    start = T0 - timedelta(hours=2)
    assert market.prices(SPOT, start, T0)[0] == PricePoint(since=start, usd_per_hour=Decimal("0.20"))
    assert len(aws.ec2["us-east-1"].calls) == 2


def test_before_the_first_known_price_the_on_demand_price_counts(market: AwsMarket):
    start = T0 - timedelta(hours=9)
    assert market.prices(SPOT, start, T0)[:2] == (
        PricePoint(since=start, usd_per_hour=Decimal("0.526")),
        PricePoint(since=T0 - timedelta(hours=3), usd_per_hour=Decimal("0.20")),
    )


def test_while_aws_does_not_answer_the_last_known_prices_count(market: AwsMarket, aws: FakeAws, time: Time):
    market.prices(SPOT, T0, T0)
    aws.ec2["us-east-1"].error = ProvisionError("cannot read the spot prices of g4dn.xlarge: AWS does not answer now")
    for _ in range(3):
        time.at += 2 * MINUTE
        assert market.prices(SPOT, T0, time.at) == (PricePoint(since=T0, usd_per_hour=Decimal("0.25")),)
    assert market.remarks == (
        "the last known prices count: cannot read the spot prices of g4dn.xlarge: AWS does not answer now",
    )
    aws.ec2["us-east-1"].error = None
    aws.ec2["us-east-1"].history[T0 + MINUTE] = "0.30"
    time.at += 2 * MINUTE
    assert market.prices(SPOT, time.at, time.at)[0].usd_per_hour == Decimal("0.30")


def test_when_aws_never_answered_the_on_demand_price_counts(market: AwsMarket, aws: FakeAws, time: Time):
    aws.ec2["us-east-1"].error = CredentialsError("the credentials have expired")
    for _ in range(10):
        assert market.prices(SPOT, T0 - MINUTE, T0) == (PricePoint(since=T0 - MINUTE, usd_per_hour=Decimal("0.526")),)
    assert len(aws.ec2["us-east-1"].calls) == 1


def test_on_demand_has_one_price_and_asks_nobody(market: AwsMarket, aws: FakeAws):
    assert market.prices(ON_DEMAND, T0, T0) == (PricePoint(since=T0, usd_per_hour=Decimal("0.526")),)
    assert aws.ec2["us-east-1"].calls == []


@pytest.mark.parametrize(
    ("choices", "regions", "usd"),
    [
        (AwsChoices(), ("us-east-1",), "0.016905"),  # in February: 0.08 × 100 / 672 + 0.005
        (AwsChoices(access=Access.PRIVATE), ("us-east-1",), "0.016905"),  # the way out of gpucloud's own network
        (AwsChoices(access=Access.PRIVATE, subnets=("subnet-1",)), ("us-east-1",), "0.011905"),
        (AwsChoices(disk_gib=500, access=Access.SESSION_MANAGER), ("eu-central-1",), "0.075834"),
        (AwsChoices(), ("sa-east-1",), "0.027620"),  # not listed: as the dearest known
        (AwsChoices(), ("us-east-1", "eu-central-1"), "0.019167"),  # the dearest of those that machines may come from
    ],
)
def test_a_machine_is_promised_with_the_most_that_its_disk_and_address_cost(choices, regions, usd, tmp_path):
    terms = AwsCloud(Home(tmp_path), choices, Resources(regions=regions)).cloud_profile.terms

    assert terms.extras_usd_per_hour == Decimal(usd)
