"""Which run a start means: a new one, or the one that is not over yet."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.clock import SystemClock
from gpucloud.adapters.local.market import LocalMarket
from gpucloud.domain.errors import BudgetTooSmall, NoCapacity, PlanRefused
from gpucloud.domain.job import Access, AwsChoices, Cloud, Job, Market, MarketPolicy, Resources
from gpucloud.domain.ledger import Terms
from gpucloud.domain.model import Model
from gpucloud.domain.state import ExitReason, JobStatus
from gpucloud.domain.supervision.prepaid import Wall
from gpucloud.store import open_store
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.start import Starter, adopt, budget_wish
from tests.fakes.account import FakeAccount
from tests.unit.worlds import NOW

SPEC = b"name: digits\n"
JOB = Job(
    name="digits",
    run="train.py",
    budget_usd=Decimal(1),
    source=Path("digits.yaml"),
    code=Path(),
    resources=Resources(nodes=2),
)


@pytest.fixture
def starter(tmp_path):
    return Starter(
        store=open_store(str(tmp_path)),
        market=LocalMarket(),
        account=None,
        clock=SystemClock(),
        wall=Wall(),
        terms=Terms(),
    )


def put(starter, name, **changes):
    jobs = JobStore(starter.store, name)
    state, stored = jobs.load()
    jobs.replace(replace(state, **changes), stored.version)


def ended(reason, **changes):
    return {"status": reason.status, "exit_reason": reason, **changes}


def test_the_first_start_makes_the_run(starter):
    start = starter.start(JOB, SPEC)

    assert (start.name, start.continues, start.changed) == ("digits", False, ())
    assert start.plan.worst_usd == 1


@pytest.mark.parametrize(
    ("reason", "changes", "name"),
    [
        (ExitReason.SUCCEEDED, {"torn_down": True}, "digits-2"),
        (ExitReason.USER_ERROR, {"torn_down": True}, "digits-2"),
        (ExitReason.SUCCEEDED, {"kept": True}, "digits-2"),
        (ExitReason.SUCCEEDED, {}, "digits"),
        (ExitReason.STOPPED, {"torn_down": True}, "digits"),
        (ExitReason.BUDGET, {"torn_down": True}, "digits"),
        (ExitReason.LOST, {"torn_down": True}, "digits"),
    ],
)
def test_a_run_that_is_over_for_good_is_followed_by_a_new_one(starter, reason, changes, name):
    starter.start(JOB, SPEC)
    put(starter, "digits", **ended(reason, **changes))

    assert starter.start(JOB, SPEC).name == name


def test_a_run_that_only_lacks_its_teardown_stays_succeeded(starter):
    start = starter.start(JOB, SPEC)
    put(starter, "digits", **ended(ExitReason.SUCCEEDED))
    state = JobStore(starter.store, "digits").load()[0]

    assert adopt(state, SPEC, start.plan) == state


def test_a_stopped_run_goes_on_and_wishes_for_the_budget_of_now(starter):
    start = starter.start(JOB, SPEC)
    put(starter, "digits", **ended(ExitReason.STOPPED, torn_down=True))
    state = JobStore(starter.store, "digits").load()[0]
    job = replace(JOB, budget_usd=Decimal(7))
    going_on = adopt(state, SPEC, start.plan)
    wish = budget_wish(state, job, "me@here", NOW)

    assert (going_on.status, going_on.exit_reason, going_on.budget_usd) == (JobStatus.WAITING, None, 1)
    assert (wish.usd, wish.by) == (7, "me@here")
    assert budget_wish(state, JOB, "me@here", NOW) is None


def test_what_changed_since_the_last_start_is_said(starter):
    starter.start(JOB, SPEC)
    again = starter.start(replace(JOB, budget_usd=Decimal(3)), b"name: digits\nbudget: 3 USD\n")

    assert again.continues
    assert again.changed[1] == "budget: 1 → 3 USD"
    assert "best effort" in again.changed[0]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"budget_usd": Decimal("0.1")}, BudgetTooSmall),
        ({"cloud": Cloud.SSH}, PlanRefused),
        ({"cloud": Cloud.AWS, "store": "/here"}, PlanRefused),
        ({"resources": Resources(gpu=("A100",))}, PlanRefused),
        ({"resources": Resources(gpus=16)}, NoCapacity),
        ({"resources": Resources(regions=("eu-west-1",))}, NoCapacity),
    ],
)
def test_a_hopeless_plan_is_refused_before_anything_is_written(starter, changes, error):
    with pytest.raises(error):
        starter.start(replace(JOB, **changes), SPEC)
    assert starter.store.list("") == ()


class VcpuMarket(LocalMarket):
    """The embedded cloud's prices, for machines whose vCPUs count."""

    def offers(self, wanted):
        return tuple(replace(offer, vcpus=4) for offer in super().offers(wanted))


def test_a_quota_that_does_not_hold_the_machines_is_named_before_anything_is_written(starter):
    account = FakeAccount({Market.SPOT: 4, Market.ON_DEMAND: 64})
    small = replace(starter, market=VcpuMarket(), account=account)

    with pytest.raises(NoCapacity, match=r"need 8 vCPUs; the quota 'All spot' in us-east-2 is 4, of which 0") as caught:
        small.start(JOB, SPEC)

    assert "gpucloud quota request" in caught.value.hint
    assert JobStore(starter.store, "digits").load() is None


def test_what_is_used_of_a_quota_counts(starter):
    account = FakeAccount({Market.SPOT: 12, Market.ON_DEMAND: 0}, used=5)
    with pytest.raises(NoCapacity):
        replace(starter, market=VcpuMarket(), account=account).start(JOB, SPEC)


def test_a_quota_that_cannot_be_read_stops_nobody(starter):
    account = FakeAccount({Market.SPOT: None, Market.ON_DEMAND: None})
    assert replace(starter, market=VcpuMarket(), account=account).start(JOB, SPEC).plan.nodes == 2


def test_without_spot_quota_auto_takes_machines_on_demand(starter):
    account = FakeAccount({Market.SPOT: 0, Market.ON_DEMAND: 64})
    job = replace(JOB, budget_usd=Decimal(20), resources=Resources(nodes=2, market=MarketPolicy.AUTO))
    plan = replace(starter, market=VcpuMarket(), account=account).start(job, SPEC).plan
    assert plan.offer.pool.market is Market.ON_DEMAND


class EfaMarket(LocalMarket):
    """The embedded cloud's prices, for machines with several EFA interfaces."""

    def offers(self, wanted):
        return tuple(replace(offer, efa=32) for offer in super().offers(wanted))


def test_machines_without_a_public_address_are_refused_unless_they_are_reached_in_another_way(starter):
    many = replace(starter, market=EfaMarket())
    with pytest.raises(PlanRefused, match="32 EFA interfaces and so no public address") as caught:
        many.plan(JOB)
    assert "session_manager" in caught.value.hint
    reached = replace(JOB, aws=AwsChoices(access=Access.SESSION_MANAGER))
    assert many.plan(reached).offer.efa == 32


class GpuMarket(LocalMarket):
    """The embedded cloud's prices, for machines with GPUs: 24 GB in the cheapest type, 80 GB in the others."""

    def offers(self, wanted):
        large = {False: {"gpu": "A10G", "vram_gib": 24}, True: {"gpu": "A100", "vram_gib": 80}}
        offers = super().offers(wanted)
        return tuple(replace(o, gpus=8, **large[o.pool.instance_type != "local.p2.xlarge"]) for o in offers)


def sized(model, nodes=1, gpus=8):
    return replace(JOB, budget_usd=Decimal(99), model=model, resources=Resources(nodes=nodes, gpus=gpus))


def test_gpus_that_do_not_hold_the_model_are_passed_over(starter):
    gpus = replace(starter, market=GpuMarket())
    small = gpus.plan(sized(Model(params=800_000_000))).offer
    large = gpus.plan(sized(Model(params=3_000_000_000))).offer

    assert (small.vram_gib, large.vram_gib) == (24, 80)
    assert small.usd_per_hour < large.usd_per_hour


def test_a_model_that_no_gpu_holds_is_refused_with_the_number_that_must_move(starter):
    with pytest.raises(PlanRefused) as caught:
        replace(starter, market=GpuMarket()).plan(sized(Model(params=7_000_000_000)))

    assert caught.value.message.startswith(
        "7.0B bf16 adamw ddp over 8 GPUs needs 112.0 GB states + 42.0 GB working + 17.4 GB margin = 171.4 GB of each;"
        " the most that is offered is 80 GB ("
    )
    assert caught.value.hint == "model: {strategy: fsdp} needs 18.8 GB a GPU"


def test_a_model_on_nodes_without_gpus_is_not_refused(starter):
    assert starter.plan(replace(JOB, model=Model(params=7_000_000_000))).offer.gpu is None
