"""Orders for jobs: numbered, given over the one that was known, sealed, and what they mean to who supervises."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.domain.codec import Malformed, to_json
from gpucloud.domain.errors import OrderChanged, StoreError, UsageError
from gpucloud.domain.job.spec import CheckpointPolicy, Cloud, IdlePolicy, Market, MarketPolicy, Resources
from gpucloud.domain.state.order import (
    OWN,
    Envelope,
    Until,
    is_closed,
    is_of_another_file,
    keeps,
    opened,
    sealed,
    undrilled,
    with_budget,
)
from gpucloud.domain.state.state import Attempt, ExitReason, JobStatus, UsageInterval
from gpucloud.domain.supervision.action import Done, Finish, TearDown
from gpucloud.domain.supervision.budget import rules_for
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import OUTSIDE, DriveTrial, Rules, Supervising, goal_of
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.orders import Orders, Reader
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import LATER, NOW, POOL, job, order, put_job, snapshot, state, up

RULES = Rules()


@pytest.fixture
def orders():
    clock = JumpingClock(NOW)
    jobs = JobStore(MemoryStore(clock), "digits")
    put_job(jobs)
    return Orders(jobs=jobs, clock=clock)


class Signs:
    """A signer whose signature tells what it is of."""

    key_id = "SHA256:me"

    def sign(self, data):
        return b"signed " + data


def test_an_order_travels_as_one_string_whose_bytes_are_signed(orders):
    orders = replace(orders, signer=Signs())
    given = orders.end()
    found, _ = orders.jobs.order()

    assert found == given.envelope
    assert (found.key, found.signature_bytes) == ("SHA256:me", b"signed " + found.signed)
    assert opened(found) == given.order
    assert replace(found, signature="no base64").signature_bytes == b""


def test_an_end_counts_where_its_mark_cannot_be_kept_here_and_nothing_else_does(orders):
    def full(*_):
        raise StoreError("cannot write orders/1.json: No space left on device")

    marks = SimpleNamespace(seen=lambda *_: None, raise_to=full)
    trust = SimpleNamespace(verify=lambda *_: OWN)
    orders = replace(orders, signer=Signs(), reader=Reader(trust=trust, marks=marks))
    with pytest.raises(StoreError, match="No space left"):
        orders.acted_on()
    with pytest.raises(StoreError, match="No space left"):
        orders.change(lambda newest: with_budget(newest, Decimal(7)))
    assert orders.end().order.end is ExitReason.STOPPED
    assert orders.acted_on().order.end is ExitReason.STOPPED


def test_every_order_has_the_next_number_and_says_who_gave_it_when(orders):
    orders.clock.sleep(60)
    given = orders.change(lambda newest: with_budget(newest, Decimal(7)))

    assert (given.order.number, given.order.budget_usd, given.order.at) == (2, 7, NOW + timedelta(seconds=60))
    (change,) = given.order.budget_changes
    assert (change.number, change.by, change.old_usd, change.new_usd) == (2, given.order.by, 1, 7)
    assert orders.newest().order == given.order


def test_the_same_wish_is_no_new_order(orders):
    first = orders.newest()

    assert orders.change(lambda newest: with_budget(newest, Decimal(1))).order == first.order
    assert orders.give(replace(first.order, by="you@there"), first).order == first.order
    ended = orders.end()
    assert orders.end(ExitReason.DEADLINE).order == ended.order


def test_a_start_does_not_go_over_an_end_that_was_ordered_since_it_looked(orders):
    looked = orders.newest()
    orders.end()

    with pytest.raises(OrderChanged, match=r"order 2 for digits, by .*@.* has it end"):
        orders.give(replace(looked.order, drill=True), looked)
    with pytest.raises(OrderChanged):
        orders.give(looked.order, looked)  # also where it wants nothing new: that it goes on is what it wants
    assert orders.newest().order.end is ExitReason.STOPPED
    again = orders.newest()
    assert orders.give(replace(again.order, end=None), again).order.number == 3


def test_an_end_and_budgets_that_are_ordered_at_once_are_all_there_in_the_end(orders):
    sums = [Decimal(number) for number in range(2, 18)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda usd: orders.change(lambda newest: with_budget(newest, usd)), sums))
        list(pool.map(lambda _: orders.end(), range(4)))
    newest = orders.newest().order

    assert newest.end is ExitReason.STOPPED
    assert sorted(change.new_usd for change in newest.budget_changes) == sums
    assert newest.number == 1 + len(sums) + 1


def test_an_order_whose_reply_was_lost_is_known_again(orders, monkeypatch):
    real = JobStore.put_order

    def lost(self, envelope, over):
        real(self, envelope, over)
        return real(self, envelope, over)  # the retry of a write that had been done

    monkeypatch.setattr(JobStore, "put_order", lost)
    assert orders.end().order.number == 2


def test_an_order_for_another_job_or_another_store_counts_for_nothing(orders):
    for changes in ({"job": "digits-2"}, {"store": "s3://another"}):
        put_over(orders, sealed(replace(orders.newest().order, **changes)))
        with pytest.raises(StoreError, match="is an order for digits"):
            orders.newest()
        put_over(orders, sealed(order(orders.jobs.store.url)))


@pytest.mark.parametrize(
    ("envelope", "said"),
    [
        (Envelope(order="[]"), "cannot be read: Order: expected an object"),
        (Envelope(order=to_json(order(version=2))), "order.json is of version 2, and this gpucloud knows version 1"),
    ],
)
def test_an_order_that_cannot_be_read_is_said_in_one_line(orders, envelope, said):
    put_over(orders, envelope)
    with pytest.raises(StoreError, match=said):
        orders.newest()
    with pytest.raises(Malformed):
        opened(envelope)


def test_a_run_without_an_order_is_no_job(orders):
    orders = replace(orders, jobs=JobStore(orders.jobs.store, "other"))
    assert orders.given() is None
    with pytest.raises(UsageError, match="there is no job 'other'"):
        orders.newest()


def put_over(orders, envelope):
    orders.jobs.put_order(envelope, orders.jobs.order()[1])


# What an order means


@pytest.mark.parametrize(
    ("changes", "spec", "is_there", "other"),
    [
        ({}, "1", True, False),  # the same file, edited
        ({"source": Path("/home/me/b/digits.yaml")}, "0", True, True),  # a copy beside the first
        ({"source": Path("/home/me/b/digits.yaml")}, "0", False, False),  # moved
        ({"source": Path("/home/me/b/digits.yaml")}, "1", False, False),  # moved and edited, or on another machine
        ({"source": Path("/ci/digits.yaml"), "run": "other.py"}, "1", False, True),
    ],
)
def test_a_run_belongs_to_the_job_file_that_began_it(changes, spec, is_there, other):
    assert is_of_another_file(order(), job(**changes), spec * 64, is_there=is_there) is other


def part_of(first_step):
    return Attempt(number=1, members=(), port=1, started_at=NOW, first_step=first_step)


def lived(market):
    return UsageInterval(node_id="a", pool=replace(POOL, market=Market(market)), launched_at=NOW)


@pytest.mark.parametrize(
    ("drill", "drilled", "attempts", "why"),
    [
        (True, None, (None,), "the drill did not take place: the script was over before it told a step"),
        (True, None, (1,), "the drill did not take place: the script came to its end too soon"),
        (True, 1, (1, 20), None),
        (
            True,
            2,
            (1, 20),
            "the drill did not take place: the script came to its end as a machine was being taken, "
            "and no attempt went on after it",
        ),
        (False, None, (1,), None),
    ],
)
def test_a_drill_that_did_not_take_place_is_said(drill, drilled, attempts, why):
    done = state(
        status=JobStatus.SUCCEEDED,
        exit_reason=ExitReason.SUCCEEDED,
        exit_code=0,
        drilled=drilled,
        attempts=tuple(replace(part_of(first), number=number) for number, first in enumerate(attempts, 1)),
    )
    assert undrilled(order(drill=drill), done) == why
    assert undrilled(order(drill=True), state()) is None


def test_a_drill_that_machines_on_aws_may_not_make_is_no_scripts_fault():
    done = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, exit_code=0, attempts=(part_of(1),))
    driven = order(drill=True, unattended=timedelta(hours=8), resolved=replace(order().resolved, cloud=Cloud.AWS))
    assert undrilled(driven, done) == (
        "the drill did not take place: on AWS, machines that drive their job have no right to take one"
    )
    of_a_profile = replace(driven.resolved, aws=replace(driven.resolved.aws, instance_profile="nodes"))
    profiled = replace(driven, unattended=None, resolved=of_a_profile)
    assert undrilled(profiled, replace(done, nodes=(lived("spot"),))) == (
        "the drill did not take place: the script came to its end too soon"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drill_refused": "no such role"}, "no such role"),
        ({"nodes": (lived("on_demand"),)}, "AWS takes spot machines alone, and the job had none"),
        ({"nodes": (lived("spot"), lived("on_demand"))}, "the script came to its end too soon"),
    ],
)
def test_a_drill_without_a_machine_that_the_cloud_takes_is_no_scripts_fault(changes, why):
    done = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, attempts=(part_of(1),), **changes)
    wanted = order(drill=True, resolved=replace(order().resolved, cloud=Cloud.AWS))
    assert undrilled(wanted, done) == f"the drill did not take place: {why}"


def test_a_goal_says_what_the_order_says():
    wanted = job(
        resources=Resources(nodes=4, least_nodes=2, market=MarketPolicy.AUTO),
        deadline=timedelta(hours=3),
        work=timedelta(hours=2),
        idle=IdlePolicy(below=30, lasting=timedelta(minutes=15)),
    )
    given = order(resolved=wanted, number=3, budget_usd=Decimal(7), keep=True, drill=True, deadline_at=LATER)
    goal = goal_of(given, OUTSIDE)

    assert (goal.nodes, goal.least_nodes, goal.budget_usd, goal.number) == (4, 2, 7, 3)
    assert (goal.keep, goal.drill, goal.until, goal.deadline_at) == (True, True, Until.FINISHED, LATER)
    assert (goal.policy, goal.work, goal.idle) == (wanted.deadline_policy, wanted.work, wanted.idle)
    assert (goal.self_driving, goal.within_rights) == (False, False)


@pytest.mark.parametrize(("cloud", "within_rights", "drill"), [(Cloud.LOCAL, False, True), (Cloud.AWS, True, False)])
def test_a_machine_has_no_policy_and_only_the_rights_that_its_cloud_gives_it(cloud, within_rights, drill):
    wanted = job(cloud=cloud, deadline=timedelta(hours=3), resources=Resources(nodes=2, market=MarketPolicy.AUTO))
    goal = goal_of(order(resolved=wanted, drill=True), Supervising(node="i-1"))

    assert (goal.self_driving, goal.within_rights, goal.drill) == (True, within_rights, drill)
    assert goal.policy is None


def test_a_process_that_leaves_stays_until_the_machines_drive():
    goal = goal_of(order(unattended=timedelta(hours=8)), Supervising(leaves=True, began_at=NOW))

    assert (goal.until, goal.began_at) == (Until.LAUNCHED, NOW)


def test_machines_that_nobody_looks_after_are_paid_for_the_whole_time_at_once():
    assert rules_for(CheckpointPolicy(), timedelta(hours=8), RULES).prepaid_rule.horizon == timedelta(hours=8)
    assert rules_for(CheckpointPolicy(), None, RULES) == RULES


def test_an_end_that_is_wanted_comes_before_leaving_the_job_to_its_machines():
    leaves = goal_of(order(unattended=timedelta(hours=8), end=ExitReason.STOPPED), Supervising(leaves=True))
    able = DriveTrial(number=1, refused=None)
    there = snapshot(up("a", trial=able), up("b", trial=able), state=state(order_number=1))

    assert decide(leaves, there, RULES) == Done()
    assert decide(leaves, replace(there, wanted_end=ExitReason.STOPPED), RULES) == Finish(reason=ExitReason.STOPPED)


# Machines that are kept

ENDED = {"status": ExitReason.SUCCEEDED.status, "exit_reason": ExitReason.SUCCEEDED, "order_number": 9}


def after_the_end(*nodes, wanted=None, armed=LATER, **changes):
    ended = state(**{**ENDED, **changes})
    return decide(goal_of(wanted or order(keep=True), OUTSIDE), snapshot(*nodes, state=ended, armed=armed), RULES)


def test_whoever_comes_leaves_machines_up_that_are_to_be_kept():
    assert after_the_end(up("a"), up("b")) == Done()
    assert after_the_end(up("a"), wanted=order()) == TearDown()


def test_machines_are_kept_for_as_long_as_they_are_paid_and_what_is_left_of_them_is_removed_then():
    assert after_the_end(armed=NOW) == TearDown()
    assert after_the_end(armed=None) == TearDown()
    assert after_the_end(armed=LATER) == Done()


def test_machines_of_a_job_that_failed_or_was_ended_since_are_not_kept():
    failed = {"status": ExitReason.LOST.status, "exit_reason": ExitReason.LOST}
    assert after_the_end(up("a"), **failed) == TearDown()
    assert after_the_end(up("a"), wanted=order(keep=True, end=ExitReason.STOPPED)) == TearDown()


@pytest.mark.parametrize(
    ("changes", "keep", "closed"),
    [
        ({"exit_reason": ExitReason.SUCCEEDED, "exit_code": 0, "torn_down": True}, False, True),
        ({"exit_reason": ExitReason.SUCCEEDED, "exit_code": 0}, True, True),
        ({"exit_reason": ExitReason.SUCCEEDED, "exit_code": 0}, False, False),
        ({"exit_reason": ExitReason.USER_ERROR, "exit_code": 20}, True, False),
        ({"exit_reason": ExitReason.UNPREPARED, "exit_code": 14, "torn_down": True}, True, False),
        ({"exit_reason": ExitReason.BUDGET, "exit_code": 10, "torn_down": True}, True, False),
        ({}, True, False),
    ],
)
def test_a_new_run_follows_one_that_is_over_for_good(changes, keep, closed):
    assert is_closed(order(keep=keep), state(**changes)) is closed


def test_a_job_that_failed_once_and_went_on_keeps_nothing_of_its_first_end():
    assert not keeps(order(keep=True), state(exit_reason=ExitReason.BUDGET))
    assert keeps(order(keep=True), state(exit_reason=ExitReason.SUCCEEDED))
