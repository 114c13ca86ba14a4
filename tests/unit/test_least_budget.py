"""A budget that is accepted trains: no job is charged for a start that its budget ends before the first step."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.cli.render.plans import plan_rows
from gpucloud.domain.errors import BudgetTooSmall, PlanRefused
from gpucloud.domain.job.spec import Job, Market, MarketPolicy, Resources
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule, Used, paid_until
from gpucloud.domain.money.ledger import usd_for
from gpucloud.domain.node.status import LEAVES_AHEAD, LEAVES_SHARE
from gpucloud.domain.offer import Offer, Pool
from tests.unit.worlds import NOW

WALLS = (
    PrepaidRule(),
    PrepaidRule(start=timedelta(minutes=10), least=timedelta(minutes=15), reserve=timedelta(seconds=300)),
)
SHORTEST_CHARGE_S = 60
SPENT = Decimal("0.3")


def offer(usd="0.9", cap="0.9"):
    pool = Pool(instance_type="p2", zone="us-east-2a", market=Market.ON_DEMAND)
    return Offer(pool=pool, usd_per_hour=Decimal(usd), cap_usd_per_hour=Decimal(cap), as_of=NOW, gpus=1)


def planned(budget, one, nodes=1, prepaid_rule=WALLS[0], spent=Decimal(0), *, saves=True):
    job = Job(
        name="j",
        run="t.py",
        budget_usd=Decimal(budget),
        resources=Resources(nodes=nodes, market=MarketPolicy.ON_DEMAND),
        source=None,
        code=None,
    )
    return make_plan(job, (one,), NOW, prepaid_rule, used=Used(spent_usd=spent), saves=saves)


def unused(prepaid_rule, *, saves):
    """What of the least time may be left after the last step: for the save, and a prolongation that is not worth it."""
    return prepaid_rule.least_gain + (min(LEAVES_AHEAD, LEAVES_SHARE * prepaid_rule.least) if saves else timedelta(0))


def least_of(one, nodes=1, prepaid_rule=WALLS[0]):
    with pytest.raises(PlanRefused) as refused:
        planned("0.001", one, nodes, prepaid_rule)
    return Decimal(refused.value.hint.split()[1])


def trained_s(budget, one, nodes, prepaid_rule, boot_s):
    """For how long such machines train, second by second, by the rule that ends them; less than 0 if never begun."""

    def promised(at_s, *, launched):
        spent = usd_for(one.usd_per_hour * nodes, timedelta(seconds=max(at_s, SHORTEST_CHARGE_S))) if launched else 0
        least = prepaid_rule if at_s <= boot_s else PrepaidRule(reserve=prepaid_rule.reserve, least=timedelta(0))
        cap = one.cap_usd_per_hour
        return paid_until(
            NOW, left_usd=budget - spent, nodes=nodes, cap_usd_per_hour=cap, prepaid_rule=least, launched=launched
        )

    if promised(0, launched=False) is None:
        return -1
    at_s = 0
    while promised(at_s, launched=True) is not None and at_s < boot_s + prepaid_rule.least.total_seconds():
        at_s += 1
    return at_s - boot_s


@given(
    cents=st.integers(10, 10_000),
    share=st.integers(1, 100),
    nodes=st.integers(1, 16),
    prepaid_rule=st.sampled_from(WALLS),
    above=st.integers(0, 3),
    soon=st.integers(0, 100),
)
def test_no_accepted_budget_ends_before_its_machines_could_train_for_the_stated_least_time(
    cents, share, nodes, prepaid_rule, above, soon
):
    cap = Decimal(cents) / 100
    one = offer(cap * share / 100, cap)
    budget = least_of(one, nodes, prepaid_rule) + Decimal(above) / 100
    boot_s = int(prepaid_rule.start.total_seconds() * soon / 100)

    for saves in (False, True):
        trains = planned(budget, one, nodes, prepaid_rule, saves=saves).trains
        assert trains + unused(prepaid_rule, saves=saves) >= prepaid_rule.least - timedelta(milliseconds=1)
    assert trained_s(budget, one, nodes, prepaid_rule, boot_s) >= prepaid_rule.least.total_seconds()


def test_a_cent_below_the_least_is_refused_and_the_least_is_not():
    assert least_of(offer()) == Decimal("0.09")  # 60 s to start, 60 s to train, 210 s kept aside, at 0.9 USD an hour
    # 150 s are paid for less 60 s for a start; of the rest 16 s are for the last save, and 10 s may go unused
    assert planned("0.09", offer()).trains == timedelta(seconds=64)
    with pytest.raises(PlanRefused) as refused:
        planned("0.08", offer())

    assert refused.value.message == (
        "0.08 USD would end before 1 × p2 on_demand in us-east-2a could train; the least that works is 0.09 USD: 1 min"
        " to start and 1 min to train and save at 0.90 USD an hour, and 0.0525 USD kept aside for the last save and the"
        " machines' end"
    )
    assert refused.value.hint == "budget: 0.09 USD"


def test_machines_that_are_there_are_planned_with_no_word_of_a_start():
    there = PrepaidRule(start=timedelta(0))
    assert "of time after its last step: trains" in plan_rows(planned("0.09", offer(), prepaid_rule=there))["budget"]
    with pytest.raises(PlanRefused, match=r"is 0\.07 USD: 1 min to train and save at 0\.90 USD an hour, and"):
        planned("0.05", offer(), prepaid_rule=there)


def test_what_is_left_of_a_budget_is_refused_with_the_whole_sum_that_goes_on():
    with pytest.raises(BudgetTooSmall) as refused:
        planned("0.35", offer(), spent=SPENT)

    assert "what is left of 0.35 USD would end before" in refused.value.message
    assert "the least that works is 0.39 USD: 0.30 USD spent, 1 min to start" in refused.value.message
    assert refused.value.hint == "budget: 0.39 USD"
    assert planned("0.39", offer(), spent=SPENT).trains == timedelta(seconds=64)
