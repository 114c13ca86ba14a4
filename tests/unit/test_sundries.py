"""What the budget does not count, against sums done by hand; and who counts the requests."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.checkpoint.objects import PART_BYTES
from gpucloud.domain.money.costs import Sundries, charges_of, drill_charges, saves_made
from gpucloud.domain.money.ledger import GIB, Rates
from gpucloud.store import open_store
from gpucloud.store.contract import CountingStore, Tally, puts_of
from tests.unit.worlds import NOW  # March: 744 hours

S3 = Rates(
    region="us-east-1",
    storage_usd_per_gib_month=Decimal("0.0744"),
    puts_usd_per_1000=Decimal("0.005"),
    gets_usd_per_1000=Decimal("0.0004"),
    transfer_usd_per_gib=Decimal("0.09"),
)


def used(**changes):
    return Sundries(**{"attempt": 2, "start": NOW, "end": NOW + timedelta(hours=10), **changes})


def sums(sundries, rates=S3):
    return {charge.kind.value: charge.usd for charge in charges_of(sundries, rates)}


def test_what_is_stored_costs_its_time_and_what_was_collected_a_day_and_a_half():
    # 30 GiB × 10 h + (10 saves × 10 GiB − 30 GiB) × 36 h, at 0.0001 USD a GiB and hour.
    told = used(stored=30 * GIB, saves=10, save_bytes=10 * GIB)
    assert sums(told) == {"storage": Decimal("0.282")}


def test_requests_that_were_counted_and_those_of_saves_are_one_charge():
    (charge,) = charges_of(used(puts=1000, gets=500, saves=10, save_puts=102), S3)
    assert (charge.usd, charge.note, charge.estimated) == (Decimal("0.0103"), "2020 PUT, 500 GET", True)
    (counted,) = charges_of(used(puts=1000), S3)
    assert (counted.usd, counted.estimated) == (Decimal("0.005"), False)


def test_what_comes_home_costs_its_way_out():
    (charge,) = charges_of(used(sent=GIB // 2), S3)
    assert (charge.kind.value, charge.usd, charge.note) == ("transfer", Decimal("0.045"), "512 MiB brought home")
    assert (charge.node_id, charge.pool, charge.attempt) == ("", None, 2)


def test_data_of_another_region_costs_what_was_reckoned():
    (charge,) = charges_of(used(read=3 * GIB, read_usd=Decimal("0.06")), S3)
    assert (charge.kind.value, charge.usd, charge.estimated) == ("data", Decimal("0.06"), True)
    assert charge.note == "3 GiB of data from another region"


def test_a_drill_is_charged_where_it_costs_something():
    assert drill_charges(1, NOW, S3) == ()
    (charge,) = drill_charges(2, NOW, replace(S3, drill_usd=Decimal("0.2")))
    assert (charge.kind.value, charge.usd, charge.attempt, charge.node_id) == ("drill", Decimal("0.2"), 2, "")
    assert not charge.kind.in_budget


def test_where_nothing_is_charged_nothing_is_written():
    assert charges_of(used(stored=GIB, puts=9, sent=9), Rates(region="us-east-1")) == ()


@pytest.mark.parametrize(
    ("first", "last", "committed", "saves"),
    [
        (1, 1000, (800, 900, 1000), 10),
        (901, 1000, (800, 900, 1000), 1),
        (1, 1000, (1000,), 1),
        (1, 50, (), 0),
        (None, None, (10, 20), 0),
        (1, 100, (50, 50, 100), 2),  # one step saved by two attempts
    ],
)
def test_saves_are_told_from_the_distance_of_those_that_are_left(first, last, committed, saves):
    assert saves_made(first, last, committed) == saves


@pytest.mark.parametrize(
    ("size", "requests"), [(0, 1), (1, 1), (PART_BYTES, 1), (PART_BYTES + 1, 4), (10 * PART_BYTES, 12)]
)
def test_an_object_of_several_parts_is_begun_and_ended_too(size, requests):
    assert puts_of(size) == requests


def test_a_store_counts_what_it_is_asked_for(tmp_path):
    tally = Tally()
    store = CountingStore(open_store(str(tmp_path)), tally)
    store.put("a/1", b"x")
    store.write("a/2", (memoryview(b"yy"),))
    store.get("a/1")
    store.get("a/3")
    store.read_into("a/2", 0, memoryview(bytearray(2)))
    assert store.list("a/") == ("a/1", "a/2")
    store.delete("a/1")
    assert tally.take() == (3, 3)
    assert tally.take() == (0, 0)
