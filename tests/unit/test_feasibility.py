"""What cannot keep its deadline or its budget is refused with the number that must move."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.domain.errors import PlanRefused
from gpucloud.domain.job.spec import Cloud, Job, Market, MarketPolicy, Model, Resources
from gpucloud.domain.market.feasibility import Needs, least_usd, needs_of, refuse_what_cannot_be_kept
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.offer import Offer, rank
from tests.fakes.market import A100, H100, NOW, V100, FakeMarket

HOUR = timedelta(hours=1)
CHANGEOVER = timedelta(minutes=12)
WALL = PrepaidRule()  # 210 s are kept aside


def job(market: MarketPolicy = MarketPolicy.AUTO, **changes: object) -> Job:
    plain = Job(
        name="gpt",
        run="train.py",
        budget_usd=Decimal(10_000),
        source=Path("gpt.yaml"),
        code=Path(),
        resources=Resources(nodes=2, gpus=8, market=market),
        work=48 * HOUR,
    )
    return replace(plain, **changes)


def offers(of: Job) -> tuple[Offer, ...]:
    return rank(FakeMarket(A100).offers(of.resources), of.resources)


def needs(of: Job) -> Needs:
    found = needs_of(of, offers(of), CHANGEOVER)
    assert found is not None
    return found


def refuse(of: Job) -> None:
    refuse_what_cannot_be_kept(of, offers(of), CHANGEOVER, WALL)


@pytest.mark.parametrize(
    ("market", "deadline", "refusal", "hint"),
    [
        # R0 ≥ C0 + 2d: 48 h and twice 12 min
        (MarketPolicy.AUTO, "48.4", None, None),
        (MarketPolicy.SPOT, "48.4", None, None),
        (
            MarketPolicy.AUTO,
            "48.3",
            "two changeovers (12 min each: a restart of 10 min, and 2 min of work done again) take",
            "deadline: 48h 29min (5 min of it for network and group), or more or faster machines; `market:",
        ),
        (
            MarketPolicy.SPOT,
            "40",
            "two changeovers (12 min each: a restart of 10 min, and 2 min of work done again) take",
            "deadline: 48h 29min (5 min of it for network and group), or more or faster machines",
        ),
        # R0 ≥ C0 + d
        (MarketPolicy.ON_DEMAND, "48.2", None, None),
        (
            MarketPolicy.ON_DEMAND,
            "48.1",
            "a changeover (12 min: a restart of 10 min, and 2 min of work done again) take",
            "deadline: 48h 12min, or more or faster machines",
        ),
    ],
)
def test_a_deadline_needs_the_work_and_its_starts(
    market: MarketPolicy, deadline: str, refusal: str | None, hint: str | None
) -> None:
    asked = job(market, deadline=float(deadline) * HOUR)
    if refusal is None:
        refuse(asked)
        return
    with pytest.raises(PlanRefused, match=re.escape(refusal)) as caught:
        refuse(asked)
    assert (caught.value.hint or "").startswith(hint or "?")


@pytest.mark.parametrize(
    ("market", "deadline", "usd"),
    [
        # k·(C0 + d) + p·d on 2 nodes, 2 · (33 · 48.2 + 11 · 0.2), and 210 s of 2 · 33 kept aside
        (MarketPolicy.AUTO, 60, "3189.45"),
        # nothing ends on demand: 2 · 11 · 48.2, and 210 s of what spot may cost at the most
        (MarketPolicy.AUTO, None, "1064.25"),
        (MarketPolicy.SPOT, 60, "1064.25"),
        # 2 · 33 · 48.2, and as much
        (MarketPolicy.ON_DEMAND, 60, "3185.05"),
    ],
)
def test_the_least_sum_pays_for_the_end_on_demand_where_a_deadline_asks_for_it(
    market: MarketPolicy, deadline: int | None, usd: str
) -> None:
    least = Decimal(usd)
    asked = job(market, deadline=None if deadline is None else deadline * HOUR, budget_usd=least)
    assert least_usd(asked, needs(asked), WALL) == pytest.approx(least)
    refuse(replace(asked, budget_usd=least + 1))
    with pytest.raises(PlanRefused, match="48 h of work") as caught:
        refuse(replace(asked, budget_usd=least - 1))
    assert caught.value.exit_code == 2


def test_a_budget_that_is_too_small_is_told_what_it_must_be() -> None:
    with pytest.raises(PlanRefused) as caught:
        refuse(job(deadline=60 * HOUR, budget_usd=Decimal(3000)))
    assert caught.value.message == (
        "48 h of work on 2 × p4d.24xlarge spot in us-east-1a may cost 3189.45 USD, when the deadline has it end on"
        " p4d.24xlarge on_demand in us-east-1a; the budget is 3000.00 USD"
    )
    assert caught.value.hint == "budget: 3189.45 USD, or `market: spot`, which may miss the deadline"


@pytest.mark.parametrize(
    ("params", "hint"),
    [(7e9, "gpus: 8, with"), (24e9, "gpus: 8, with"), (40e9, "nodes: 2, gpus: 8, with")],
)
def test_a_model_that_is_too_large_is_sent_to_whole_machines_for_they_are_rented_whole(
    params: float, hint: str
) -> None:
    """Six of a machine's eight GPUs cost as much as eight."""
    asked = job(cloud=Cloud.AWS, model=Model(params=int(params)), resources=Resources(market=MarketPolicy.SPOT))
    market = FakeMarket(V100, A100, H100)
    with pytest.raises(PlanRefused, match="over 1 GPU needs") as caught:
        make_plan(asked, market.offers(asked.resources), NOW, WALL, offered=lambda one: market.offers(one.resources))
    assert (caught.value.hint or "").startswith(hint)


def test_a_deadline_is_not_promised_where_nothing_can_be_had_on_demand() -> None:
    asked = job(deadline=60 * HOUR, work=None)
    spot = tuple(offer for offer in offers(asked) if offer.pool.market is Market.SPOT)
    with pytest.raises(PlanRefused, match="needs machines on demand") as caught:
        refuse_what_cannot_be_kept(asked, spot, CHANGEOVER, WALL)
    assert "`market: spot`" in (caught.value.hint or "")
    owned = tuple(replace(offer, pool=replace(offer.pool, market=Market.OWNED)) for offer in spot)
    refuse_what_cannot_be_kept(asked, owned, CHANGEOVER, WALL)  # nobody takes them


def test_the_work_is_that_of_the_machines_where_tokens_say_it() -> None:
    asked = job(work=None, model=Model(params=7 * 10**9, tokens=10**11))
    found = needs_of(asked, FakeMarket(H100).offers(asked.resources), CHANGEOVER)
    # 6 · 7e9 · 1e11 / (16 · 989.5e12 · 0.35) = 757,958 s
    assert found is not None
    assert found.work.total_seconds() == pytest.approx(757_958, rel=1e-3)


@pytest.mark.parametrize(("minutes", "refused"), [(11, True), (12, False)])
def test_a_deadline_that_leaves_no_time_for_a_start_is_refused_whatever_the_work_is(
    minutes: int, refused: bool
) -> None:
    asked = job(work=None, deadline=timedelta(minutes=minutes))
    if not refused:
        refuse(asked)
        return
    with pytest.raises(
        PlanRefused, match=r"a changeover, .*, takes 12 min, and the deadline is after 11 min"
    ) as caught:
        refuse(asked)
    assert caught.value.hint == "deadline: 12min, and the time that the work takes"


def test_nothing_is_said_of_a_job_whose_work_nobody_knows() -> None:
    asked = job(work=None, deadline=HOUR)
    assert needs_of(asked, offers(asked), CHANGEOVER) is None
    refuse(asked)
