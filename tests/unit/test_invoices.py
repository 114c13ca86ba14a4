"""The meter against bills that were worked out by hand (`tests/data/invoices.yaml`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import GIB, ChargeKind, Rates, Terms, meter, total
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.state import UsageInterval
from tests.unit.worlds import opened

STORIES = yaml.safe_load((Path(__file__).parents[1] / "data" / "invoices.yaml").read_text())
RATES = (
    Rates(region="us-east-1", disk_usd_per_gib_month=Decimal("0.08"), address_usd_per_hour=Decimal("0.005")),
    Rates(region="eu-central-1", disk_usd_per_gib_month=Decimal("0.0952"), address_usd_per_hour=Decimal("0.005")),
)
S3 = Rates(
    region="us-east-1",
    storage_usd_per_gib_month=Decimal("0.023"),
    puts_usd_per_1000=Decimal("0.005"),
    gets_usd_per_1000=Decimal("0.0004"),
    transfer_usd_per_gib=Decimal("0.09"),
)


def worked_out(arithmetic):
    """Return the sum that is written as `60 * 0.36 / 3600 = 0.006`, having worked it out; rounded to 1e-8."""
    left, _, right = str(arithmetic).rpartition(" = ")
    exact = sum(map(product, left.split(" + ")), Fraction(0))
    assert abs(exact - Fraction(right)) <= Fraction(1, 2 * 10**8), arithmetic
    return Decimal(right)


def product(text):
    value, *rest = re.split(r" ([*/]) ", text)
    found = Fraction(value)
    for sign, factor in zip(rest[::2], rest[1::2], strict=True):
        found = found * Fraction(factor) if sign == "*" else found / Fraction(factor)
    return found


def moment(text):
    return datetime.fromisoformat(text if "T" in text else f"2026-11-10T{_six_places(text)}").replace(
        tzinfo=timezone.utc
    )


def _six_places(text):
    whole, _, part = text.partition(".")
    return f"{whole}.{part:0<6}" if part else whole


@dataclass(frozen=True)
class Story:
    told: dict

    def prices(self, zone):
        listed = self.told["prices"]
        listed = listed.get(zone, listed)
        return tuple(PricePoint(since=moment(at), usd_per_hour=Decimal(usd)) for at, usd in listed.items())

    def terms(self):
        least = timedelta(seconds=self.told.get("least_s", 60))
        if "disk" not in self.told:
            return Terms(minimum=least)
        address = self.told.get("address", True)
        return Terms(minimum=least, disk_gib=self.told["disk"], public_address=address, rates=RATES)

    def attempts(self):
        return tuple(
            opened("a", number=number, ended_at=moment(end) if end else None)
            for number, end in enumerate(self.told.get("ends", ()), 1)
        )

    def charges(self):
        now = moment(self.told.get("now", "00:00:00"))
        for number, (launched, ended, cause, *zone) in enumerate(self.told["nodes"]):
            pool = Pool(
                instance_type="p3.2xlarge",
                zone=zone[0] if zone else "us-east-1a",
                market=Market(self.told.get("market", "spot")),
            )
            interval = UsageInterval(
                node_id=f"i-{number}",
                pool=pool,
                launched_at=moment(launched),
                ended_at=moment(ended) if ended else None,
                end_cause=EndCause(cause) if cause else None,
            )
            yield from meter(interval, self.prices(pool.zone), self.attempts(), now, self.terms())


@pytest.mark.parametrize("told", STORIES, ids=[told["story"] for told in STORIES])
def test_the_bill_is_the_one_that_was_worked_out_by_hand(told):
    charges = list(Story(told).charges())
    sums = {kind: total(charge for charge in charges if charge.kind is kind) for kind in ChargeKind}

    assert sums[ChargeKind.COMPUTE] == worked_out(told["compute"])
    assert sums[ChargeKind.DISK] == worked_out(told.get("disk_usd", "0 = 0"))
    assert sums[ChargeKind.ADDRESS] == worked_out(told.get("address_usd", "0 = 0"))


@pytest.mark.parametrize("told", [t for t in STORIES if "attempts" in t], ids=lambda told: told["story"])
def test_each_attempt_has_its_part_of_the_bill_to_the_last_place(told):
    charges = list(Story(told).charges())
    wanted = {number: worked_out(sum_) for number, sum_ in told["attempts"].items()}
    found = {number: total(c for c in charges if c.attempt == number) for number in wanted}

    assert {c.attempt for c in charges} == set(wanted)
    assert all(abs(found[number] - wanted[number]) <= Decimal("0.00000003") for number in wanted)


def test_there_are_at_least_thirty_bills():
    assert len(STORIES) >= 30


T = datetime(2026, 11, 10, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("usd", "arithmetic"),
    [
        (S3.storage_usd(10 * GIB, T, T + timedelta(hours=36)), "10 * 0.023 * 36 / 720 = 0.0115"),
        (S3.storage_usd(GIB // 2, T, T + timedelta(seconds=90)), "0.5 * 0.023 * 90 / 2592000 = 0.0000004"),
        # November's last day and December's first.
        (
            S3.storage_usd(100 * GIB, T + timedelta(days=20), T + timedelta(days=22)),
            "100 * 0.023 * 24 / 720 + 100 * 0.023 * 24 / 744 = 0.15086022",
        ),
        (S3.storage_usd(GIB, T, T), "0 = 0"),
        (S3.requests_usd(34_560, 1_000), "34560 * 0.005 / 1000 + 1000 * 0.0004 / 1000 = 0.1732"),
        (S3.requests_usd(1, 0), "0.005 / 1000 = 0.000005"),
        (S3.transfer_usd(7 * GIB // 2), "3.5 * 0.09 = 0.315"),
        # A log of 50 MiB that was followed for an hour: a list and a look at the state every 2.5 s, and 720 pieces.
        (
            S3.requests_usd(1440, 1440 + 720) + S3.transfer_usd(50 * GIB // 1024),
            "1440 * 0.005 / 1000 + 2160 * 0.0004 / 1000 + 50 * 0.09 / 1024 = 0.01245853",
        ),
    ],
)
def test_what_is_stored_asked_for_and_sent_out_costs_what_was_worked_out_by_hand(usd, arithmetic):
    assert usd.quantize(Decimal("0.00000001")) == worked_out(arithmetic)
