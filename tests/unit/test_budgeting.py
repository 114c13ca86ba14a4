"""A budget that is lowered from any terminal: the cloud has the closer shut-off, whoever drives the job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.adapters.home import Home
from gpucloud.cli.commands.machines import shortage_line
from gpucloud.cli.commands.passes import budget
from gpucloud.cli.faults import meant, moved_on_the_line, require_job
from gpucloud.cli.render.bills import left_amount, prepaid_line
from gpucloud.cli.render.plans import driven_line, leaving_line
from gpucloud.domain.errors import BudgetRefused, BudgetTooSmall, PlanRefused, ProvisionError, UsageError
from gpucloud.domain.job.quantities import in_cents
from gpucloud.domain.job.spec import CheckpointPolicy, Market, MarketPolicy, Resources
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule, Spend, Used, most_prepaid, paid_until
from gpucloud.domain.money.ledger import Terms, usd_for
from gpucloud.domain.node.node import NO_GROUP, Fault, Refusal
from gpucloud.domain.offer import Offer, PricePoint
from gpucloud.domain.state.state import ExitReason, JobStatus, Owner, Successor, UsageInterval
from gpucloud.domain.supervision.budget import Resumption, least_to_lower_to, overdue, resumption, rules_for
from gpucloud.domain.supervision.capacity import cool_down, cooled
from gpucloud.domain.supervision.self_driving import arming
from gpucloud.domain.supervision.snapshot import DriveTrial, Limits, Rules, Supervising, goal_of
from gpucloud.store import open_store
from gpucloud.usecases.job.jobs import Asker, Prepaid, Unsupervised
from gpucloud.usecases.job.passes import BudgetChanger, bring_closer, budget_standing, obey_here
from gpucloud.usecases.job.start import Asked, Starter
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.clouds import LocalCloud
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.fakes.node_group import FakeNodeGroup
from tests.unit.worlds import NOW, OTHER_POOL, POOL, cooldown, goal, job, opened, order, put_job, state

HOURS = timedelta(hours=8)
GROUP = "gpucloud-digits"
RULES = rules_for(CheckpointPolicy(), HOURS, Rules())
NODES = (UsageInterval(node_id="a", launched_at=NOW, pool=POOL),)
TAKES_OVER = Successor(pool=POOL, cap_usd_per_hour=Decimal("0.9"), at=NOW)


class OnePrice:
    """Implements `MarketData`: one machine costs 0.9 USD an hour."""

    def offers(self, wanted):
        return ()

    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal("0.9")),)


@pytest.fixture
def asker():
    """A job of one machine that drives itself, paid for eight hours of its 8 USD."""
    clock = JumpingClock(NOW)
    group = FakeNodeGroup(clock)
    group.create(GROUP)
    group.arm(GROUP, NOW + HOURS)
    group.resize(GROUP, 1, POOL)
    jobs = JobStore(MemoryStore(clock), "digits")
    driven = state(drives_itself=True, order_number=1, paid_until=NOW + HOURS)
    alone = job(resources=Resources(nodes=1))
    put_job(jobs, driven, unattended=HOURS, budget_usd=Decimal(8), resolved=alone)
    return Asker(jobs=jobs, market=OnePrice(), group=group, clock=clock, terms=Terms())


def lowered(usd="0.5"):
    return order("memory://", budget_usd=Decimal(usd), number=2)


def armed(asker):
    return asker.group.describe(GROUP).armed_until


@pytest.mark.parametrize("promised", [NOW + HOURS, NOW + timedelta(minutes=28, seconds=50), NOW, None])
def test_the_cloud_is_asked_what_is_armed_and_no_state_that_a_machine_wrote(asker, promised):
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, paid_until=promised), stored.version)

    assert bring_closer(asker, lowered(), RULES)
    assert armed(asker) == NOW + timedelta(
        seconds=1730
    )  # 0.5 USD less 210 s of reserve and a least charge of 60 s, at 0.9 an hour
    assert not bring_closer(asker, lowered(), RULES)


@pytest.mark.parametrize("faster", [1, 60])
def test_a_start_and_the_budget_command_ask_for_the_same_least_sum(asker, faster):
    """Both count what the cloud lists and no book knows, by the rules of the job's cloud."""
    asker.group.resize(GROUP, 3, POOL)
    known = asker.group.describe(GROUP).alive[0].id
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, attempts=(opened(known),)), stored.version)
    asker.jobs.keep_spec(b"name: digits\n")
    asker.clock.sleep(600)
    rules = Rules(
        prepaid_rule=PrepaidRule(reserve=PrepaidRule().reserve / faster), limits=Limits(save=Limits().save / faster)
    )
    starter = Starter(
        store=asker.jobs.store,
        market=asker.market,
        account=None,
        clock=asker.clock,
        rules=rules,
        terms=asker.terms,
        group=asker.group,
    )
    standing = budget_standing(asker, asker.state(), asker.order())
    least = Decimal(in_cents(least_to_lower_to(asker.state(), standing, rules)))
    file = job(budget_usd=Decimal(8))

    assert (len(asker.state().alive), standing.alive) == (0, 3)
    assert starter.start(file, b"name: digits\n", Asked(budget_usd=least)).order.budget_usd == least
    with pytest.raises(BudgetRefused, match=f"at least {least:.2f} USD"):
        starter.start(file, b"name: digits\n", Asked(budget_usd=least - Decimal("0.01")))


BY_POLICY = {"deadline": HOURS, "work": timedelta(hours=2)}
AT_HAND = replace(OTHER_POOL, market=Market.ON_DEMAND)


class ThreePools(OnePrice):
    """Implements `MarketData`: the job's own pool has become dearer than others."""

    def offers(self, wanted):
        prices = ((POOL, "0.9"), (OTHER_POOL, "0.3"), (AT_HAND, "0.5"))
        return tuple(
            Offer(pool=pool, usd_per_hour=Decimal(usd), cap_usd_per_hour=Decimal("0.9"), as_of=NOW, gpus=1)
            for pool, usd in prices
        )


def starter_of(asker):
    return Starter(
        store=asker.jobs.store,
        market=ThreePools(),
        account=None,
        clock=asker.clock,
        rules=Rules(),
        terms=asker.terms,
        group=asker.group,
    )


@pytest.mark.parametrize(
    ("of_state", "alive", "of_job", "usd_per_hour"),
    [
        ({}, 1, {}, "0.9"),
        ({}, 0, {}, "0.9"),  # its group asks in its pool again
        ({}, 1, BY_POLICY, "0.9"),
        ({}, 0, BY_POLICY, "0.3"),  # its policy chooses anew
        ({}, 0, {**BY_POLICY, "work": None}, "0.9"),  # nobody knows how much work it is: none chooses yet
        ({}, 0, {**BY_POLICY, "resources": Resources(nodes=1, market=MarketPolicy.SPOT)}, "0.9"),  # nor of one market
        ({"cooldowns": (cooldown(),)}, 1, {}, "0.3"),  # it refuses, and the job turns to the best of the others
        ({"group": None}, 0, {}, "0.3"),
    ],
)
def test_a_run_that_goes_on_is_planned_on_the_machines_that_it_goes_on_with(
    asker, of_state, alive, of_job, usd_per_hour
):
    asker.group.resize(GROUP, alive, POOL)
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, **of_state), stored.version)
    asker.jobs.keep_spec(b"name: digits\n")
    starter = starter_of(asker)
    alone = replace(job(budget_usd=Decimal(8), resources=Resources(nodes=1, market=MarketPolicy.AUTO)), **of_job)
    plan = starter.start(alone, b"name: digits\n", Asked()).plan
    assert plan.usd_per_hour == Decimal(usd_per_hour)
    of_both = {AT_HAND} if alone.resources.market is MarketPolicy.AUTO else set()
    assert {offer.pool for offer in plan.offers} == {POOL, OTHER_POOL} | of_both


@pytest.mark.parametrize(("of_state", "of_job"), [({"cooldowns": (cooldown(),)}, {}), ({}, BY_POLICY)])
def test_a_run_that_its_supervisor_would_end_at_once_by_its_budget_is_refused_though_others_would_do(
    asker, of_state, of_job
):
    """It counts by the pool that the run still has, at 9 USD an hour, before it turns to another one."""
    asker.group.resize(GROUP, 0, POOL)
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, cap_usd_per_hour=Decimal(9), **of_state), stored.version)
    starter = starter_of(asker)
    alone = replace(job(budget_usd=Decimal(8), resources=Resources(nodes=1, market=MarketPolicy.AUTO)), **of_job)
    with pytest.raises(BudgetTooSmall, match=r"has 0\.78 USD left of 0\.8 USD, too little to go on") as refused:
        starter.start(alone, b"name: digits\n", Asked(budget_usd=Decimal("0.8")))
    assert refused.value.hint == "gpucloud train digits --budget '0.84 USD' is the least"
    starter.start(alone, b"name: digits\n", Asked(budget_usd=Decimal("0.84")))

    tracker, listed = SpendTracker(asker.jobs, asker.market, asker.terms), asker.group.describe(GROUP)
    kept = asker.state()
    first_look = [tracker.payable(kept, listed, 1, NOW, Decimal(usd), PrepaidRule()).until for usd in ("0.80", "0.84")]
    assert [until is not None for until in first_look] == [False, True]


def test_a_run_whose_own_machines_cost_more_than_is_left_is_refused_though_others_would_do():
    dear, cheap = (
        Offer(pool=pool, usd_per_hour=Decimal(usd), cap_usd_per_hour=Decimal(usd), as_of=NOW, gpus=1)
        for pool, usd in ((POOL, "90"), (OTHER_POOL, "0.3"))
    )
    alone = job(resources=Resources(nodes=1, market=MarketPolicy.AUTO))
    assert make_plan(alone, (dear, cheap), NOW, PrepaidRule()).offer is cheap
    with pytest.raises(PlanRefused, match=r"the least that works is 8\.25 USD"):
        make_plan(alone, (dear, cheap), NOW, PrepaidRule(), pool=POOL)


def test_machines_that_the_level_asks_for_are_paid_for_though_they_are_not_there_yet(asker):
    """One of two was taken, and the market has none for a moment: soon both cost again."""
    asker.group.resize(GROUP, 2, POOL)
    asker.group.capacity = 1
    asker.group.interrupt(GROUP, asker.group.describe(GROUP).nodes[0].id, notice=False)
    listed = asker.group.describe(GROUP)
    assert (len(listed.alive), listed.size) == (1, 2)

    assert bring_closer(asker, lowered("1"), RULES)
    hours = Decimal((armed(asker) - NOW).total_seconds()) / 3600
    assert hours * 2 * Decimal("0.9") <= 1
    assert asker.jobs.armings() == ()


def test_a_raised_budget_moves_nothing(asker):
    assert not bring_closer(asker, lowered("20"), RULES)
    assert armed(asker) == NOW + HOURS


def test_a_budget_that_is_used_up_shuts_the_machines_off_at_once(asker):
    asker.clock.sleep(3600)
    assert bring_closer(asker, lowered("0.01"), RULES)
    assert armed(asker) <= asker.clock.now()


def test_whoever_has_the_lease_writes_down_the_order_once_the_cloud_has_its_shut_off(asker):
    with take(asker.jobs, asker.clock) as lease:
        assert obey_here(asker, lease, lowered(), RULES)
    found = asker.state()

    assert found.order_number == 2
    assert found.paid_until == armed(asker) == NOW + timedelta(seconds=1730)


@pytest.mark.parametrize("stored", [NOW, NOW + timedelta(hours=9), None])
def test_what_is_paid_and_until_when_is_told_by_what_the_cloud_has_armed(asker, stored):
    """Whoever armed another time may have died before that was written down, or have no right to write it."""
    current, found = asker.jobs.load()
    asker.jobs.replace(replace(current, paid_until=stored), found.version)
    bring_closer(asker, lowered("1"), RULES)

    told = asker.report()
    assert told.paid_until == told.spend.off_at == armed(asker) == NOW + timedelta(seconds=3730)
    assert asker.left_job().state.paid_until == armed(asker)


@pytest.mark.parametrize(
    ("minutes", "launched_s", "tried", "comes"),
    [
        (0.5, 5, False, (True, True)),
        (15, 5, False, (True, True)),  # longer than a minute, as long as it may make itself fit
        (21, 5, False, (False, False)),
        (0.5, 5, True, (True, False)),
        (15, 5, True, (False, False)),  # it could long have come
        (15, -5, False, (False, False)),  # it was there before: nobody has it make itself fit
        (0.5, -5, False, (True, False)),
    ],
)
def test_a_job_whose_supervisor_died_is_taken_over_once_a_new_machine_has_made_itself_fit(
    asker, minutes, launched_s, tried, comes
):
    there = asker.group.describe(GROUP).alive[0]
    current, stored = asker.jobs.load()
    lives = UsageInterval(node_id=there.id, pool=POOL, launched_at=NOW + timedelta(seconds=launched_s))
    asker.jobs.replace(replace(current, nodes=(lives,)), stored.version)
    if tried:
        asker.jobs.keep_trial(there.id, DriveTrial(number=1, refused=None))
    asker.clock.sleep(minutes * 60)

    told = asker.report()
    assert (told.hands_over, told.fits_first) == comes


def test_a_process_that_dies_at_the_cloud_has_not_said_that_the_order_is_in_force(asker, monkeypatch):
    class Killed(BaseException):
        pass

    def struck(group, until):
        raise Killed

    monkeypatch.setattr(asker.group, "arm", struck)
    lease = take(asker.jobs, asker.clock)
    with pytest.raises(Killed):
        obey_here(asker, lease, lowered(), RULES)
    found = asker.state()
    assert (found.order_number, found.paid_until) == (1, NOW + HOURS)


@pytest.mark.parametrize(
    "lie", [{"cap_usd_per_hour": Decimal("0.01")}, {"cap_usd_per_hour": Decimal(0)}, {"group": None}]
)
def test_no_price_and_no_group_that_a_machine_wrote_keeps_a_budget_from_being_lowered(asker, lie):
    asker.jobs.arm(arming(asker.state(), at=NOW, machines=1, until=NOW + HOURS))
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, **lie), stored.version)

    assert bring_closer(asker, lowered(), RULES)
    assert armed(asker) == NOW + timedelta(seconds=1730)


def test_an_order_that_machines_claim_to_have_acted_on_is_acted_on_by_the_user(asker):
    asker.jobs.arm(arming(asker.state(), at=NOW, machines=1, until=NOW + HOURS))
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, order_number=1_000_000), stored.version)
    assert asker.state().order_number == 1

    assert bring_closer(asker, replace(lowered(), unattended=HOURS), RULES)
    assert asker.state().order_number == 2
    with take(asker.jobs, asker.clock) as lease:
        assert lease.state.order_number == 2


@pytest.mark.parametrize("claimed", [1_000_000, 2, 1])
@pytest.mark.parametrize("node", ["i-1", ""])
def test_the_command_moves_the_shut_off_whatever_machines_say_and_waits_for_none_of_them(asker, claimed, node):
    asker.jobs.arm(arming(asker.state(), at=NOW, machines=1, until=NOW + HOURS))
    current, stored = asker.jobs.load()
    owner = Owner(id="x", host="elsewhere", pid=1, started="", since=NOW, node=node)
    asker.jobs.replace(replace(current, order_number=claimed, owner=owner, lease_s=1e9), stored.version)

    changer = BudgetChanger(
        asker=asker, orders=None, file=Path("digits.yaml"), rules=RULES, settle=lambda: None, tell=lambda _: None
    )
    changer.await_order(replace(lowered(), unattended=HOURS), RULES)
    assert armed(asker) == NOW + timedelta(seconds=1730)


HAS_FAILED = {"status": JobStatus.FAILED, "exit_reason": ExitReason.USER_ERROR, "exit_code": 20, "ended_at": NOW}


@pytest.mark.parametrize(
    ("of_state", "why", "hint"),
    [
        ({}, "saving and ending costs: at least 0.09 USD", "0.09 USD, or gpucloud down digits ends it now"),
        (
            {**HAS_FAILED, "drives_itself": False},
            "ending its machines costs: at least 0.07 USD",
            "0.07 USD, or gpucloud down digits ends its machines now",
        ),
        (  # its own machines may say that it has ended, and go on
            HAS_FAILED,
            "ending its machines costs: at least 0.09 USD",
            "0.09 USD, or gpucloud down digits ends its machines now",
        ),
    ],
)
def test_a_budget_below_what_an_end_costs_is_refused_and_held_machines_save_nothing_more(asker, of_state, why, hint):
    """One machine's first minute is 0.015 USD, its last save as much, and 210 s of it are kept for its end."""
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, **of_state), stored.version)
    orders = Orders(jobs=asker.jobs, clock=asker.clock)
    changer = BudgetChanger(
        asker=asker, orders=orders, file=Path("digits.yaml"), rules=RULES, settle=lambda: None, tell=lambda _: None
    )
    with pytest.raises(BudgetRefused) as refused:
        changer.make(Decimal("0.02"))
    assert refused.value.message == f"digits: 0.02 USD is less than what is spent and what {why}"
    assert refused.value.hint == f"gpucloud budget digits {hint}"


@pytest.mark.parametrize(("of_state", "machines"), [({}, 2), ({"successor": TAKES_OVER}, 4)])
def test_the_closer_shut_off_is_told_of_for_as_many_machines_as_may_live_until_then(asker, of_state, machines):
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, **of_state), stored.version)
    assert bring_closer(asker, replace(lowered(), unattended=HOURS), RULES)
    assert [one.machines for one in asker.jobs.armings()] == [machines]


@pytest.mark.parametrize(
    ("words", "job", "usd"),
    [
        ([], None, None),
        (["digits"], "digits", None),
        (["digits", "40", "USD"], "digits", Decimal(40)),
        (["a/b.yaml", "40USD"], "a/b.yaml", Decimal(40)),
        (["40", "USD"], None, Decimal(40)),
        (["40 USD"], None, Decimal(40)),
        (["$40"], None, Decimal(40)),
    ],
)
def test_a_sum_without_a_job_is_for_the_file_here(words, job, usd):
    assert meant(words) == (job, usd)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["0.2"], "did you mean gpucloud budget 0.2 USD?"),
        (["digits", "3"], "did you mean gpucloud budget digits 3 USD?"),
        (["digits", "10 EUR"], "gpucloud budget digits 10 USD"),
        (["digits", "€10"], "gpucloud budget digits 10 USD"),
        (["digits", "1,5", "EUR"], "gpucloud budget digits SUM USD"),
        (["digits", "much"], "gpucloud budget digits SUM USD"),
    ],
)
def test_a_sum_without_its_unit_is_answered_with_what_is_to_be_typed(words, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpucloud.yaml").touch()
    with pytest.raises(UsageError, match="is not a sum of money") as refused:
        meant(words)
    assert refused.value.hint == hint


def test_where_there_is_no_job_file_a_sum_alone_is_answered_with_a_command_that_names_a_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        meant(["0.2"])
    assert refused.value.hint == "did you mean gpucloud budget JOB 0.2 USD?"
    with pytest.raises(UsageError, match="no job is named") as refused:
        require_job(*meant(["40", "USD"]))
    assert refused.value.hint == "gpucloud budget JOB 40 USD; gpucloud status lists jobs"
    require_job(*meant(["digits", "40", "USD"]))
    (tmp_path / "gpucloud.yaml").touch()
    require_job(*meant(["40", "USD"]))


@pytest.mark.parametrize(
    ("given", "hint", "said"),
    [
        ({"budget": "2 USD"}, "budget: 5.46 USD, or no `work:`", "--budget '5.46 USD', or no `work:`"),
        ({"budget": None}, "budget: 5.46 USD", "budget: 5.46 USD"),
        ({"budget": "1 USD", "deadline": None}, "deadline: 10h 24min, or more", "deadline: 10h 24min, or more"),
        ({"deadline": "5h"}, "deadline: 10h 24min (5 min of it", "--deadline '10h 24min' (5 min of it"),
        ({"shared_by": 2, "budget": None}, "budget: 5.46 USD, or no `work:`", "budget: 10.92 USD, or no `work:`"),
        ({"shared_by": 2, "budget": "2 USD"}, "budget: 5.46 USD", "--budget '10.92 USD'"),
        ({"deadline": "5h"}, "deadline: 12min, and the time", "--deadline '12min', and the time"),
    ],
)
def test_the_number_that_must_move_is_named_where_it_was_given(given, hint, said):
    with pytest.raises(PlanRefused) as refused, moved_on_the_line(**given):
        raise PlanRefused("it cannot be", hint=hint)
    assert refused.value.hint == said


def test_a_job_that_is_over_takes_no_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    cloud = Gpucloud()
    jobs = JobStore(open_store(cloud.home.store), "digits")
    put_job(jobs, state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, exit_code=0, torn_down=True))
    cloud.home.remember(KnownJob(name="digits", store=jobs.store.url, file=tmp_path / "gpucloud.yaml"))
    with pytest.raises(UsageError, match="digits is over: no budget limits it any more") as refused:
        budget("digits", Decimal(40), as_json=False)
    assert refused.value.hint == ("the next run takes `budget:` of gpucloud.yaml, or gpucloud train --budget '40 USD'")
    assert cloud.orders(cloud.home.find("digits")).newest().order.number == 1


@pytest.mark.parametrize(
    ("spent", "left"),
    [("0", "2.00"), ("0.005", "1.995"), ("0.0045", "1.995"), ("0.01", "1.99"), ("1.2345", "0.77"), ("2", "0.00")],
)
def test_what_is_left_and_what_is_spent_make_up_the_budget(spent, left):
    assert left_amount(Spend(budget_usd=Decimal(2), spent_usd=Decimal(spent), promised_usd=Decimal(0))) == left


def test_machines_that_are_left_alone_are_prepaid_for_so_long_or_for_as_long_as_the_budget_lasts(asker):
    """One machine at 0.9 USD an hour, its first minute spent, and 8 USD, of which 210 s are kept aside.

    Two minutes more may pass before the answer is obeyed.
    """
    two_hours = asker.prepaid_for(timedelta(hours=2))
    assert (two_hours.until, two_hours.usd) == (NOW + timedelta(hours=2, minutes=2), Decimal("1.845"))
    assert (two_hours.budget_usd, two_hours.asked_for) == (8, 0)
    found = asker.prepaid_for(timedelta(hours=24))
    assert found.until == NOW + timedelta(hours=8, minutes=50, seconds=50)
    assert found.usd == Decimal("7.9475")
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, cap_usd_per_hour=Decimal(5000)), stored.version)
    assert replace(asker, jobs=asker.jobs).prepaid_for(timedelta(hours=2)) is None


@pytest.mark.parametrize(("node", "leaves", "buys"), [("", False, True), ("", True, False), ("i-1", False, False)])
def test_whoever_supervises_a_job_from_outside_and_stays_buys_time_though_its_machines_could_drive_it(
    asker, node, leaves, buys
):
    with take(asker.jobs, asker.clock, node=node, leaves=leaves):
        assert asker.report().buys_time is buys
    assert not asker.report().buys_time  # nobody holds it: its machines take it
    assert goal_of(asker.order(), Supervising(node=node, leaves=leaves)).buys_time is buys


ROUNDED = Decimal("0.000001")


class Prices(OnePrice):
    """Implements `MarketData`: machines that cost so much an hour at the most."""

    def __init__(self, *caps):
        self.caps = caps

    def offers(self, wanted):
        return tuple(
            Offer(pool=POOL, usd_per_hour=Decimal("0.1"), cap_usd_per_hour=cap, as_of=NOW, gpus=1) for cap in self.caps
        )


class NoMarket(OnePrice):
    """Implements `MarketData`: it does not answer."""

    def offers(self, wanted):
        raise ProvisionError("no answer")


def waiting(market, wanted=None, cap="3.06"):
    """Return who answers for a job of 1 USD without machines, which asked for some at that price last."""
    clock = JumpingClock(NOW)
    jobs = JobStore(MemoryStore(clock), "digits")
    asked = state(order_number=1, cap_usd_per_hour=Decimal(cap), group=None)
    put_job(jobs, asked, budget_usd=Decimal(1), resolved=job(resources=wanted or Resources(nodes=2)))
    return Asker(jobs=jobs, market=market, group=None, clock=clock, terms=Terms())


def test_output_that_is_followed_asks_once_a_minute_whether_a_machine_takes_a_job_that_nobody_holds(
    asker, monkeypatch: pytest.MonkeyPatch
):
    orders, looks = [], []
    current, stored = asker.jobs.load()
    lives = UsageInterval(node_id="a", pool=POOL, launched_at=NOW + timedelta(seconds=5))
    asker.jobs.replace(replace(current, nodes=(lives,)), stored.version)
    newest = type(asker).order
    monkeypatch.setattr(type(asker), "order", lambda one: orders.append(one.clock.now()) or newest(one))

    def caught_up(left: Unsupervised | None) -> None:
        looks.append(left)
        if asker.clock.now() > NOW + timedelta(minutes=25):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        list(asker.output(attempt=None, rank=None, follow=True, caught_up=caught_up))
    assert len(looks) > 1000
    assert 20 < len(orders) <= 27
    assert (looks[0], looks[-1] is not None) == (None, True)


def test_what_waits_for_machines_is_told_the_most_that_any_may_be_paid_for():
    """Of the cheapest least is kept aside: 210 s of two machines at 0.9 USD an hour."""
    found = waiting(Prices(Decimal("0.9"), Decimal("3.06"))).prepaid_for(HOURS)
    assert (found.lasts, found.usd, found.asked_for) == (timedelta(minutes=29, seconds=50), Decimal("0.895"), 2)


def test_what_waits_for_machines_while_the_market_does_not_answer_is_told_the_whole_budget():
    found = waiting(NoMarket()).prepaid_for(HOURS)
    assert (found.lasts, found.usd) == (HOURS, 1)


@given(
    caps=st.lists(st.decimals("0.01", "9", places=2), min_size=1, max_size=4),
    pick=st.integers(0, 3),
    least=st.integers(1, 3),
    more=st.integers(0, 2),
    gone=st.integers(0, 2),
    paid=st.integers(0, 100),
    waited=st.integers(0, 86400),
    hours=st.integers(1, 24),
)
def test_no_machine_that_comes_is_paid_for_longer_or_for_more_than_was_told(
    caps, pick, least, more, gone, paid, waited, hours
):
    """Whichever of the prices, in whichever number, whenever: until when the rule arms, and what that costs."""
    cap, nodes, span = caps[pick % len(caps)], least + more - min(gone, more), timedelta(hours=hours)
    asker = waiting(Prices(*caps), Resources(nodes=least + more, least_nodes=least), cap="9")
    there, rule = NOW + timedelta(seconds=waited), replace(PrepaidRule(), horizon=span)
    usd = usd_for(cap * nodes, timedelta(seconds=60)) * paid / 100
    armed = paid_until(there, left_usd=1 - usd, nodes=nodes, cap_usd_per_hour=cap, prepaid_rule=rule, launched=False)
    told = asker.prepaid_for(span)
    if armed is not None:
        assert armed - there <= told.lasts
        assert usd + usd_for(cap * nodes, armed - there) <= told.usd + ROUNDED


@given(
    cap=st.decimals("0.01", "9", places=2),
    nodes=st.integers(1, 3),
    used=st.integers(0, 100),
    rate=st.integers(0, 100),
    seconds=st.integers(0, 120),
    hours=st.integers(1, 24),
)
def test_machines_that_are_there_are_paid_no_longer_than_was_told_however_late_the_answer(
    cap, nodes, used, rate, seconds, hours
):
    """Until it is obeyed they cost some percent of their highest price."""
    rule, within, used_usd = (
        replace(PrepaidRule(), horizon=timedelta(hours=hours)),
        timedelta(minutes=2),
        Decimal(used) / 100,
    )
    told = most_prepaid(
        {cap}, {nodes}, used_usd=used_usd, budget_usd=Decimal(1), prepaid_rule=rule, launched=True, within=within
    )
    passed = timedelta(seconds=seconds)
    later_usd = used_usd + usd_for(cap * nodes, passed) * rate / 100
    there = NOW + passed
    armed = paid_until(there, left_usd=1 - later_usd, nodes=nodes, cap_usd_per_hour=cap, prepaid_rule=rule)
    if armed is not None:
        assert armed <= NOW + told.lasts
        assert later_usd + usd_for(cap * nodes, armed - there) <= told.usd + ROUNDED


def test_the_question_says_a_bound_of_machines_to_come_by_their_time_and_of_others_by_the_clock():
    found = Prepaid(
        until=NOW + timedelta(minutes=40, seconds=1),
        lasts=timedelta(minutes=40, seconds=1),
        usd=Decimal("0.9411"),
        budget_usd=Decimal(1),
    )
    assert prepaid_line(found, NOW) == (
        "a detach prepays the machines until 12:41 UTC at the latest, when 0.95 of 1.00 USD are spent at the most;"
        " they end sooner with the job"
    )
    assert prepaid_line(replace(found, asked_for=2), NOW) == (
        "a detach prepays the 2 machines that the job asks for, at any price, for 41 min at the most from when they are"
        " there, when 0.95 of 1.00 USD are spent at the most; they end sooner with the job"
    )


def test_machines_that_stay_after_a_success_are_not_said_to_end_with_the_job_that_is_left_to_them():
    asker = waiting(NoMarket())
    assert not asker.prepaid_for(HOURS).keep
    stored = asker.jobs.store
    newest = Orders(jobs=asker.jobs, clock=asker.clock)
    newest.change(lambda order: replace(order, keep=True))
    found = replace(asker, jobs=JobStore(stored, "digits")).prepaid_for(HOURS)
    assert prepaid_line(found, NOW).endswith("at the most; they end sooner with the job, unless it succeeds (`--keep`)")
    assert driven_line("tm", NOW, keep=True) == (
        "tm drives itself until 2026-03-01 12:00 UTC at the latest, and its machines stay until then when it has"
        " succeeded"
    )
    assert driven_line("tm", NOW, keep=False) == "tm drives itself until 2026-03-01 12:00 UTC at the latest"


def test_a_detach_says_at_once_when_the_process_leaves_and_what_leaving_sooner_means():
    assert leaving_line("tm", 0) == (
        "detaching: tm is left to its machines as soon as one is there that can drive it; until then this process"
        " stays. Ctrl-C twice leaves at once, and then only a machine that was asked for before goes on with it"
    )
    assert leaving_line("tm", 2) == (
        "detaching: tm is left to its machines once one of them has shown that it can drive it; until then this process"
        " stays. Ctrl-C twice leaves at once"
    )


def test_a_raise_that_is_too_small_to_go_on_with_says_so_and_what_the_least_is():
    """Of two machines at 0.9 USD an hour: a start, a minute of training, and 210 s kept aside."""
    jobs, told = JobStore(MemoryStore(JumpingClock(NOW)), "digits"), []
    put_job(jobs, state(order_number=1, cap_usd_per_hour=Decimal("0.9"), group=None), budget_usd=Decimal("0.01"))
    waits = Asker(jobs=jobs, market=OnePrice(), group=None, clock=JumpingClock(NOW), terms=Terms())
    orders = Orders(jobs=jobs, clock=JumpingClock(NOW))
    changer = BudgetChanger(
        asker=waits, orders=orders, file=Path("digits.yaml"), rules=Rules(), settle=lambda: None, tell=told.append
    )
    changer.make(Decimal("0.05"))
    assert told[-1] == (
        "that is too little to go on with: on local.p2.xlarge spot in us-east-2a, as last, the least is 0.17 USD"
    )
    changer.make(Decimal("0.17"))
    assert told[-1].startswith("budget: 0.05 USD → 0.17 USD, by ")


def changer_of(wanted, *, tell=lambda _: None, **of_state):
    """Return what changes the budget of 10 USD of a job that asks for such machines at 1 USD an hour and has none."""
    asker = waiting(OnePrice(), wanted, cap="1")
    current, stored = asker.jobs.load()
    asker.jobs.replace(replace(current, **of_state), stored.version)
    orders = Orders(jobs=asker.jobs, clock=asker.clock)
    orders.change(lambda newest: replace(newest, budget_usd=Decimal(10)))
    return BudgetChanger(
        asker=asker, orders=orders, file=Path("digits.yaml"), rules=Rules(), settle=lambda: None, tell=tell
    )


@pytest.mark.parametrize("attempts", [(), (replace(opened("a", "b"), reason=ExitReason.INTERRUPTED, ended_at=NOW),)])
@pytest.mark.parametrize("wanted", [Resources(nodes=8, least_nodes=2), Resources(nodes=8)])
def test_a_job_without_machines_keeps_the_budget_that_its_supervisor_starts_all_of_them_with(wanted, attempts):
    """Before its first attempt too, and after one on a part of them: 330 s of 8 machines at 1 USD an hour."""
    changer = changer_of(wanted, attempts=attempts)
    with pytest.raises(BudgetRefused) as refused:
        changer.make(Decimal("0.73"))
    assert refused.value.message == (
        "digits: 0.73 USD is less than what is spent and what a start costs: at least 0.74 USD"
    )
    changer.make(Decimal("0.74"))
    tracker, kept = SpendTracker(changer.asker.jobs, OnePrice(), Terms()), changer.asker.state()
    starts = [tracker.payable(kept, NO_GROUP, 8, NOW, Decimal(usd), PrepaidRule()).until for usd in ("0.74", "0.73")]
    assert [until is not None for until in starts] == [True, False]


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("held", [False, True])
def test_what_a_run_is_said_to_go_on_with_is_what_its_start_takes(nodes, held):
    """Of machines that are held, none is started: they train for a minute, and 210 s of them are kept aside."""
    over = state(group=None, cap_usd_per_hour=Decimal(1), nodes=NODES if held else ())
    wanted, used = order(resolved=job(resources=Resources(nodes=nodes))), Used(spent_usd=Decimal("0.3"))
    given, least = (
        resumption(over, wanted, used, PrepaidRule(), NOW),
        Decimal("0.3") + nodes * Decimal(330 - 60 * held) / 3600,
    )

    assert not given.is_late
    assert given.budget_usd is None if least <= 1 else in_cents(given.budget_usd) == in_cents(least)
    enough = replace(wanted, budget_usd=given.budget_usd or wanted.budget_usd)
    assert resumption(over, enough, used, PrepaidRule(), NOW) == Resumption()
    assert resumption(over, replace(enough, deadline_at=NOW), used, PrepaidRule(), NOW) == Resumption(is_late=True)


def test_a_run_whose_machines_are_gone_may_start_on_cheaper_ones_than_its_last():
    wanted, used = order(resolved=job(resources=Resources(nodes=1))), Used(spent_usd=Decimal("0.9"))
    kept = resumption(state(cap_usd_per_hour=Decimal(3)), wanted, used, PrepaidRule(), NOW)
    gone = resumption(state(cap_usd_per_hour=Decimal(3), group=None), wanted, used, PrepaidRule(), NOW)
    assert kept.command("tm") == "gpucloud train tm --budget '1.18 USD'"
    assert gone.command("tm") == "gpucloud train tm"
    assert gone.conditions == ()
    assert overdue(state(), replace(gone, is_late=True)).said() == (
        "the deadline is over, nothing is saved: with a later one in the job file, gpucloud train digits goes on from"
        " the beginning; on local.p2.xlarge spot in us-east-2a, as last, it takes --budget '1.18 USD'"
    )


def test_a_run_that_stopped_with_too_little_names_the_budget_that_its_start_accepts():
    """Of 0.50 USD, two machines at 0.9 USD an hour train once more for 0.17 USD."""
    asker = waiting(Prices(Decimal("0.9")), cap="0.9")
    current, stored = asker.jobs.load()
    over = {"status": JobStatus.STOPPED, "exit_reason": ExitReason.STOPPED, "exit_code": 10, "torn_down": True}
    asker.jobs.replace(replace(current, **over), stored.version)
    asker.jobs.keep_spec(b"name: digits\n")
    Orders(jobs=asker.jobs, clock=asker.clock).change(lambda newest: replace(newest, budget_usd=Decimal("0.16")))
    starter = Starter(
        store=asker.jobs.store,
        market=asker.market,
        account=None,
        clock=asker.clock,
        rules=Rules(),
        terms=asker.terms,
    )
    said = asker.report().resumption.otherwise
    with pytest.raises(PlanRefused):
        starter.start(job(), b"name: digits\n", Asked())
    assert said == f"; on {asker.state().pool}, as last, it takes --budget '0.17 USD'"
    assert starter.start(job(), b"name: digits\n", Asked(budget_usd=Decimal("0.17"))).plan is not None


def test_a_job_that_has_ended_hears_that_its_raised_budget_starts_too_few_of_its_machines():
    told = []
    over = {"status": JobStatus.FAILED, "exit_reason": ExitReason.BUDGET, "exit_code": 10, "ended_at": NOW}
    changer_of(Resources(nodes=8), tell=told.append, **over).make(Decimal("0.73"))
    assert told[-1] == (
        "that is too little to go on with: on local.p2.xlarge spot in us-east-2a, as last, the least is 0.74 USD"
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "spot machines start again"),
        (300, "no spot machines start until 12:05:00 UTC; those that run stay"),
        (86400, "no spot machines start until 2026-03-02 12:00:00 UTC; those that run stay"),
    ],
)
def test_a_shortage_that_is_ended_is_no_shortage_until_now(seconds, said):
    assert shortage_line(timedelta(seconds=seconds), NOW) == said


def test_a_job_of_the_embedded_fleet_that_was_refused_asks_again_within_a_minute_however_often(tmp_path):
    limits = LocalCloud(Home(tmp_path)).cloud_profile.rules.limits
    refusal = Refusal(pool=POOL, fault=Fault.CAPACITY, code="InsufficientInstanceCapacity", message="none", at=NOW)
    known = state()
    for waits_s in (30, 60, 60):
        cools = cool_down(goal(), refusal, limits)
        known = replace(known, cooldowns=cooled(known, cools, NOW))
        assert known.cooldowns[0].until == NOW + timedelta(seconds=waits_s)
