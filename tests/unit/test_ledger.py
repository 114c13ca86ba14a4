"""What nodes cost, against sums done by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.cli.render.bills import money_line
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule, Spend, least_budget_usd, paid_until
from gpucloud.domain.money.ledger import Rates, Terms, meter, total, usd_for
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import PricePoint
from gpucloud.domain.state.state import ExitReason, UsageInterval
from tests.unit.worlds import NOW, POOL, opened

PRICES = (PricePoint(since=NOW - timedelta(days=1), usd_per_hour=Decimal("0.36")),)


def interval(seconds, cause=None, **changes):
    plain = {"node_id": "a", "pool": POOL, "launched_at": NOW}
    if cause is not None:
        plain |= {"ended_at": NOW + timedelta(seconds=seconds), "end_cause": cause}
    return UsageInterval(**{**plain, **changes})


def cost(node, prices=PRICES, attempts=(), after=0):
    return total(meter(node, prices, attempts, NOW + timedelta(seconds=after)))


def test_a_node_costs_its_seconds_at_the_price():
    assert cost(interval(100, EndCause.CHOICE)) == Decimal("0.01")
    assert cost(interval(None), after=250) == Decimal("0.025")


def test_parts_of_a_second_are_paid_whole_and_a_minute_at_the_least():
    assert cost(interval(100.2, EndCause.CHOICE)) == Decimal("0.0101")
    assert cost(interval(5, EndCause.CHOICE)) == Decimal("0.006")
    assert cost(interval(None), after=0) == Decimal("0.006")


def test_a_node_that_the_cloud_takes_in_its_first_hour_is_free():
    assert cost(interval(3599, EndCause.INTERRUPTED)) == 0
    assert cost(interval(3600, EndCause.INTERRUPTED)) == Decimal("0.36")
    assert cost(interval(3599, EndCause.SCHEDULE)) == Decimal("0.3599")


@pytest.mark.parametrize(
    ("cause", "unfit", "members", "note"),
    [
        (EndCause.CHOICE, True, ("b",), "could not be made ready: given up"),
        (EndCause.CHOICE, True, ("a", "b"), ""),  # it was silent at the end of a job that it worked for
        (EndCause.CHOICE, False, ("b",), ""),
        (EndCause.SCHEDULE, True, ("b",), ""),
    ],
)
def test_a_machine_that_was_paid_for_nothing_says_why_beside_its_price(cause, unfit, members, note):
    given_up = interval(4, cause, unprepared_at=NOW if unfit else None)
    (charge,) = meter(given_up, PRICES, (opened(*members),), NOW + timedelta(hours=1))
    assert (charge.usd, charge.note) == (Decimal("0.006"), note)


def test_on_demand_is_never_free():
    on_demand = replace(POOL, market=Market.ON_DEMAND)

    assert cost(interval(100, EndCause.INTERRUPTED, pool=on_demand)) == Decimal("0.01")


def test_each_second_has_the_price_of_its_time():
    prices = (*PRICES, PricePoint(since=NOW + timedelta(seconds=60), usd_per_hour=Decimal("0.72")))

    assert cost(interval(100, EndCause.CHOICE), prices) == Decimal("0.006") + Decimal("0.008")


def test_seconds_belong_to_the_attempt_that_they_were_spent_for():
    first = opened("a", reason=ExitReason.INTERRUPTED, ended_at=NOW + timedelta(seconds=30))
    second = opened("a", number=2, reason=ExitReason.SUCCEEDED, ended_at=NOW + timedelta(seconds=80))
    charges = meter(interval(100, EndCause.CHOICE), PRICES, (first, second), NOW)

    assert [(c.attempt, c.usd) for c in charges] == [(1, Decimal("0.003")), (2, Decimal("0.007"))]


@given(
    seconds=st.integers(0, 10**6),
    cuts=st.lists(st.integers(-100, 10**6), max_size=6, unique=True),
    ends=st.lists(st.integers(0, 10**6), max_size=4, unique=True),
)
def test_however_it_is_cut_no_second_is_lost_or_charged_twice(seconds, cuts, ends):
    odd = Decimal("0.31373")  # no second of it is a whole 1e-8 USD
    prices = tuple(PricePoint(since=NOW + timedelta(seconds=c), usd_per_hour=odd) for c in sorted({-86400, *cuts}))
    attempts = tuple(
        opened("a", number=n, reason=ExitReason.LOST, ended_at=NOW + timedelta(seconds=end))
        for n, end in enumerate(sorted(ends), 1)
    )
    charges = meter(interval(seconds, EndCause.CHOICE), prices, attempts, NOW)

    assert charges[0].start == NOW
    assert all(a.end == b.start for a, b in itertools.pairwise(charges))
    assert sum((c.end - c.start).total_seconds() for c in charges) == max(seconds, 60)
    assert total(charges) == usd_for(odd, timedelta(seconds=max(seconds, 60)))


def test_terms_go_to_a_job_that_drives_itself_and_come_back_whole():
    rates = Rates(region="us-east-1", disk_usd_per_gib_month=Decimal("0.08"), address_usd_per_hour=Decimal("0.005"))
    terms = Terms(disk_gib=100, public_address=True, rates=(rates,))

    assert from_json(Terms, to_json(terms)) == terms


def test_what_is_not_spent_is_left_whatever_is_promised_of_it():
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.3"), promised_usd=Decimal("0.25"))
    assert (spend.left_usd, spend.off_usd) == (Decimal("0.7"), Decimal("0.55"))

    unproven = Spend(
        budget_usd=Decimal(1), spent_usd=Decimal("0.3"), promised_usd=Decimal(0), unproven_usd=Decimal("0.1")
    )
    assert unproven.left_usd == Decimal("0.6")


OFF = "off by 12:30 UTC at the latest, at"


@pytest.mark.parametrize(
    ("budget", "spent", "promised", "rate", "off", "line"),
    [
        ("1", "0.009", "0.886", "0.54", True, f"0.009 of 1.00 USD · 0.54 USD/h in all · {OFF} 0.895 USD"),
        ("1", "0.009", "0", "0", False, "0.009 of 1.00 USD"),
        ("400", "174.7712", "20", "14.52", True, f"174.77 of 400.00 USD · 14.52 USD/h in all · {OFF} 194.78 USD"),
        ("1", "0.0045", "0", "0", False, "0.005 of 1.00 USD"),
        ("0.105", "0.0001", "0", "0", False, "<0.001 of 0.105 USD"),
        ("1", "0", "0", "0", False, "0.00 of 1.00 USD"),
    ],
)
def test_the_money_line_says_spent_of_the_budget_the_rate_and_when_all_is_off(budget, spent, promised, rate, off, line):
    spend = Spend(
        budget_usd=Decimal(budget),
        spent_usd=Decimal(spent),
        promised_usd=Decimal(promised),
        usd_per_hour=Decimal(rate),
        off_at=NOW + timedelta(minutes=30) if off else None,
        as_of=NOW,
    )
    assert money_line(spend) == line


def test_a_time_of_another_day_says_the_day():
    off_at = NOW + timedelta(hours=13, minutes=10)
    spend = Spend(budget_usd=Decimal(9), spent_usd=Decimal(1), promised_usd=Decimal(7), off_at=off_at, as_of=NOW)
    assert money_line(spend) == "1.00 of 9.00 USD · off by 2026-03-02 01:10 UTC at the latest, at 8.00 USD"
    assert format_moment(NOW + timedelta(minutes=30), NOW) == "12:30:00 UTC"
    assert format_moment(off_at, NOW) == "2026-03-02 01:10:00 UTC"


def test_the_reserve_pays_for_a_late_shut_off_and_for_a_machine_that_came_in_place_of_one_lost_meanwhile():
    late, ending, shortest_charge = timedelta(seconds=120), timedelta(seconds=8), Terms().minimum

    assert PrepaidRule().reserve >= late + ending + shortest_charge


MONEY = st.decimals("0.01", "1000", places=2)


@given(left=MONEY, nodes=st.integers(1, 64), cap=st.decimals("0.01", "100", places=2))
def test_what_is_promised_until_the_shut_off_and_the_reserve_never_exceed_what_is_left(left, nodes, cap):
    prepaid_rule = PrepaidRule()
    until = paid_until(NOW, left_usd=left, nodes=nodes, cap_usd_per_hour=cap, prepaid_rule=prepaid_rule)

    if until is None:  # of machines that are there; the least budget pays for their start, too
        assert left < least_budget_usd(nodes, cap, prepaid_rule) + Decimal("0.000001")
        return
    assert prepaid_rule.least <= until - NOW <= prepaid_rule.horizon
    promised = usd_for(cap * nodes, until - NOW) + usd_for(cap * nodes, prepaid_rule.reserve)
    assert promised <= left + Decimal("0.000001")
