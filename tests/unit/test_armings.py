"""What a job has cost while it drove itself: what its machines wrote may raise the sum, and never lower it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.ledger import Charge, Terms, joined, total
from gpucloud.domain.node.node import NO_GROUP, GroupView, NodeState
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.state import EndCause, Successor, UsageInterval
from gpucloud.domain.supervision.self_driving import arming, unproven_usd
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.money.spend import SpendTracker
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, POOL, node, put_job, state

HOUR = timedelta(hours=1)
ARMED = arming(state(), at=NOW, machines=2, until=NOW + 8 * HOUR)


def charge(node_id, begins, ends, usd):
    return Charge(
        node_id=node_id,
        attempt=1,
        start=NOW + begins * HOUR,
        end=NOW + ends * HOUR,
        usd_per_hour=Decimal("0.5"),
        usd=Decimal(usd),
    )


def span(begins, ends):
    return NOW + begins * HOUR, NOW + ends * HOUR


BOTH = (span(0, 4), span(0, 4))
COST = (charge("a", 0, 4, 2), charge("b", 0, 4, 2))
AT_FOUR = NOW + 4 * HOUR


@pytest.mark.parametrize(
    ("what", "intervals", "sums", "ledger", "now", "usd"),
    [
        ("honest books, and the list shows all", BOTH, COST, COST, AT_FOUR, "0"),
        ("an emptied ledger", BOTH, COST, (), AT_FOUR, "4"),
        ("lifetimes that were shortened", BOTH, COST, (charge("a", 0, 1, "0.5"),), AT_FOUR, "3.5"),
        ("a charge below zero", BOTH, COST, (*COST, charge("x", 0, 4, -9)), AT_FOUR, "0"),
        ("charges of another time", BOTH, COST, (charge("a", -9, -5, 4), charge("b", 5, 9, 4)), AT_FOUR, "4"),
        ("books that tell more", BOTH, COST, (*COST, charge("x", 0, 4, 9)), AT_FOUR, "0"),
        # 3.75 h of 2 machines at 0.9 an hour: of the last quarter every cloud still lists what ended.
        ("nothing listed, nothing told", (), (), (), AT_FOUR, "6.75"),
        ("one of two is listed", BOTH[:1], COST[:1], (), AT_FOUR, "5.375"),
        ("nothing listed, honest books", (), (), COST, AT_FOUR, "2.75"),
        ("long after the end", (), (), (), NOW + 100 * HOUR, "14.4"),
        ("before anything can be forgotten", (), (), (), NOW + HOUR / 5, "0"),
    ],
)
def test_the_larger_of_what_is_listed_and_what_is_told_counts(what, intervals, sums, ledger, now, usd):
    assert unproven_usd((ARMED,), intervals, sums, ledger, now) == Decimal(usd), what


def test_each_arming_counts_until_the_next_one():
    later = replace(ARMED, at=NOW + 2 * HOUR, machines=1, until=NOW + 3 * HOUR)
    assert unproven_usd((later, ARMED), (), (), (), NOW + 9 * HOUR) == Decimal("0.9") * (2 * 2 + 1)
    taken_back = replace(ARMED, at=NOW + HOUR, machines=0, until=NOW + HOUR)
    assert unproven_usd((ARMED, taken_back), (), (), (), NOW + 9 * HOUR) == Decimal("1.8")


def test_of_two_bills_of_a_machine_the_dearer_one_counts():
    users = (charge("a", 0, 1, 2), charge("b", 0, 1, 2), charge("", 0, 1, 1))
    machines = (charge("a", 0, 1, 1), charge("b", 0, 1, 5), charge("c", 0, 1, 3), charge("", 0, 1, 1))
    found = joined(users, (*machines, charge("a", 0, 1, -7), charge("", 0, 1, -7)))

    sums = {name: total(one for one in found if one.node_id == name) for name in ("a", "b", "c", "")}
    assert sums == {"a": 2, "b": 5, "c": 3, "": 2}


class OnePrice:
    """Implements `MarketData`: one machine costs half a dollar an hour."""

    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal("0.5")),)


def listed(*nodes):
    return GroupView(exists=True, size=2, armed_until=NOW + 8 * HOUR, nodes=nodes)


@pytest.fixture
def store():
    return MemoryStore(JumpingClock(NOW))


@pytest.mark.parametrize("rolled_back", [{}, {"nodes": ()}, {"attempts": (), "paid_until": None, "epoch": 0}])
def test_a_state_that_was_rolled_back_and_an_emptied_ledger_free_no_money(store, rolled_back):
    jobs = JobStore(store, "digits")
    put_job(jobs, state(**rolled_back))
    jobs.arm(ARMED)
    now = NOW + 4 * HOUR
    alive = (node("a", pool=POOL, launched_at=NOW), node("b", pool=POOL, launched_at=NOW))
    ended = tuple(replace(one, state=NodeState.TERMINATED, ended_at=now - HOUR / 6) for one in alive)

    def used(group):
        tracker, job = SpendTracker(jobs, OnePrice(), Terms()), jobs.load()[0]
        return tracker.spent_usd(job, now) + tracker.unproven_usd(job, group, now)

    assert used(listed(*alive)) == 4
    assert used(listed(*ended)) == pytest.approx(Decimal("3.8333"), abs=Decimal("0.0001"))
    assert used(NO_GROUP) == Decimal("6.75")


def interval(node_id, begins, ends=None, **more):
    at = None if ends is None else NOW + ends * HOUR
    return UsageInterval(node_id=node_id, pool=POOL, launched_at=NOW + begins * HOUR, ended_at=at, **more)


def test_a_machine_that_ended_costs_what_it_lived_once_the_user_has_taken_the_job_back(store):
    """Its own bill proves nothing; the cloud's list, as it stood at `down`, does when the group is long gone."""
    users, machines = JobStore(store, "digits"), JobStore(store, "digits", on_machine=True)
    lived = interval("a", 0, 0.1, charged=True)
    put_job(users, state(nodes=(lived,), drives_itself=True))
    users.arm(arming(state(), at=NOW, machines=1, until=NOW + 8 * HOUR))
    machines.bill("a", (charge("a", 0, 0.1, "0.05"),))
    down_at, later = NOW + HOUR / 5, NOW + 4 * HOUR

    def unproven(now):
        return SpendTracker(users, OnePrice(), Terms()).unproven_usd(users.believed()[0], NO_GROUP, now)

    assert unproven(later) == Decimal("3.325")  # 3.75 h of a machine at 0.9 USD an hour, less 0.05 told
    users.arm(arming(state(), at=down_at, machines=0, until=down_at, listed=(lived,)))
    assert unproven(later) == unproven(down_at) == 0


def test_a_machine_that_lives_when_the_job_is_taken_back_is_known_up_to_then(store):
    users = JobStore(store, "digits")
    put_job(users, state(drives_itself=True))
    users.arm(arming(state(), at=NOW, machines=1, until=NOW + 8 * HOUR))
    users.arm(arming(state(), at=NOW + HOUR, machines=0, until=NOW + HOUR, listed=(interval("a", 0),)))

    tracker = SpendTracker(users, OnePrice(), Terms())
    assert tracker.unproven_usd(state(), NO_GROUP, NOW + 9 * HOUR) == Decimal("0.5")  # its own books are empty


def test_a_machine_that_its_interruption_made_free_stays_free_when_its_group_is_gone(store):
    """It lived when the job was left to itself, was taken in its first hour, and the list told so at `down`."""
    users, armed_at, down_at = JobStore(store, "digits"), NOW + HOUR / 32, NOW + HOUR / 4
    free = interval("a", 0, 0.1, end_cause=EndCause.INTERRUPTED)
    put_job(users, state(nodes=(replace(free, charged=True),), drives_itself=True))
    users.arm(arming(state(nodes=(interval("a", 0),)), at=armed_at, machines=1, until=NOW + 8 * HOUR))
    users.bill("a", ())

    def unproven():
        return SpendTracker(users, OnePrice(), Terms()).unproven_usd(users.believed()[0], NO_GROUP, NOW + HOUR)

    assert unproven() > 0  # its own word alone
    users.arm(arming(state(), at=down_at, machines=0, until=down_at, listed=(free,)))
    assert unproven() == 0


@pytest.mark.parametrize("wrote", [(), (interval("a", 0, 0.1, charged=True),), (interval("a", 0),)])
@pytest.mark.parametrize("later", [(), ((8, 0),)])
def test_hours_beside_a_supervisor_stay_spent_when_the_job_is_left_to_itself_again(store, wrote, later):
    """Detached after an hour, taken back after two, detached again after six: its machine lives all that time."""
    users, alive = JobStore(store, "digits"), state(nodes=(interval("a", 0),))
    put_job(users, state(nodes=wrote, drives_itself=True))
    for at, machines in ((1, 1), (2, 0), (6, 1), *later):
        when = NOW + at * HOUR
        listed = (interval("a", 0),) if at == 2 else () if at == 8 else None
        until = when + 8 * HOUR if machines else when
        users.arm(arming(alive if at < 8 else state(), at=when, machines=machines, until=until, listed=listed))
    tracker, job, now = SpendTracker(users, OnePrice(), Terms()), users.believed()[0], NOW + 8 * HOUR
    assert tracker.spent_usd(job, now) + tracker.unproven_usd(job, NO_GROUP, now) >= 4  # 8 h at half a dollar


def test_what_was_forgotten_before_the_job_was_taken_back_stays_unproven(store):
    users = JobStore(store, "digits")
    put_job(users, state(drives_itself=True))
    users.arm(arming(state(), at=NOW, machines=1, until=NOW + 8 * HOUR))
    users.arm(arming(state(), at=NOW + 2 * HOUR, machines=0, until=NOW + 2 * HOUR, listed=()))

    tracker = SpendTracker(users, OnePrice(), Terms())
    assert tracker.unproven_usd(state(), NO_GROUP, NOW + 9 * HOUR) == Decimal("1.575")  # 1.75 h at the cap


def test_a_sum_that_comes_of_rounding_alone_is_not_called_unproven(store):
    """The books cut a machine's time where its attempt ended, the armings do not: each piece is rounded by itself."""
    users, now = JobStore(store, "digits"), NOW + HOUR
    known = state(nodes=(interval("a", 0, 0.25),), drives_itself=True)
    put_job(users, known)
    users.arm(arming(known, at=NOW + HOUR / 12, machines=1, until=NOW + HOUR / 6))
    users.bill("a", (charge("a", 0, 0.25, "0.12499999"),))
    group = listed(node("a", pool=POOL, launched_at=NOW, state=NodeState.TERMINATED, ended_at=NOW + HOUR / 4))
    assert SpendTracker(users, OnePrice(), Terms()).unproven_usd(known, group, now) == 0


LEFT_AT_FOUR = state(nodes=(interval("a", 0, 4, charged=True), interval("b", 0)))
"""Four hours of two machines beside a supervisor, 4 USD; then the one that is left drives the job for two more."""


@pytest.mark.parametrize(
    ("what", "wrote", "bills"),
    [
        ("nothing but its work", LEFT_AT_FOUR.nodes, {}),
        ("no machine was ever there", (), {}),
        ("only the one that lives", (interval("b", 0),), {}),
        ("it came an hour ago", (interval("a", 0, 4, charged=True), interval("b", 5)), {}),
        ("its end, long ago", (interval("a", 0, 4, charged=True), interval("b", 0, 0.1)), {}),
        ("its end before it began", (interval("a", 0, 4, charged=True), interval("b", 0, -90)), {}),
        ("all is charged already", (interval("a", 0, charged=True), interval("b", 0, charged=True)), {}),
        ("a small bill for it", (interval("a", 0, 4, charged=True), interval("b", 0, 6, charged=True)), {"b": "0.01"}),
        ("a bill, and no machine", (), {"b": "3"}),
        ("a bill of a machine that only came now", (interval("b", 6),), {"b": "3"}),
        ("a bill of nobody, and no machine", (), {"x": "4"}),
    ],
)
def test_what_was_spent_before_the_machines_drove_stays_spent(store, what, wrote, bills):
    users, machines = JobStore(store, "digits"), JobStore(store, "digits", on_machine=True)
    users.bill("a", (charge("a", 0, 4, 2),))
    put_job(users, replace(LEFT_AT_FOUR, nodes=wrote, drives_itself=True))
    users.arm(arming(LEFT_AT_FOUR, at=AT_FOUR, machines=1, until=NOW + 8 * HOUR))
    for node_id, usd in bills.items():
        machines.bill(node_id, (charge(node_id, 0, 6, usd),))
    tracker, job, now = SpendTracker(users, OnePrice(), Terms()), users.believed()[0], NOW + 6 * HOUR
    group = GroupView(exists=True, size=1, armed_until=NOW + 8 * HOUR, nodes=(node("b", pool=POOL, launched_at=NOW),))

    used = tracker.spent_usd(job, now) + tracker.unproven_usd(job, group, now)
    long_gone = SpendTracker(users, OnePrice(), Terms()).unproven_usd(replace(job, paid_until=NOW), NO_GROUP, now)
    assert used >= 5, what
    assert tracker.spent_usd(replace(job, paid_until=NOW), now) + long_gone >= 5, what
    if not bills and job.nodes == LEFT_AT_FOUR.nodes:
        assert used == 5


def test_what_machines_wrote_into_the_ledger_that_nobody_can_read_keeps_nobody_from_the_job(store):
    users, machines = JobStore(store, "digits"), JobStore(store, "digits", on_machine=True)
    users.bill("a", (charge("a", 0, 4, 2),))
    machines.bill("c", (charge("c", 0, 4, 1),))
    for name, data in (("b", b"{"), ("d", b'{"version":99}'), ("pages/000000", b"[]")):
        store.put(f"jobs/digits/ledger/{name}.json", data)
    assert total(users.charges()) == 3
    store.put("jobs/digits/control/ledger/e.json", b"{")
    with pytest.raises(StoreError, match=r"control/ledger/e\.json is damaged"):
        users.charges()


def test_a_job_that_nobody_left_to_itself_has_nothing_unproven(store):
    jobs = JobStore(store, "digits")
    put_job(jobs)
    assert SpendTracker(jobs, OnePrice(), Terms()).unproven_usd(state(), NO_GROUP, NOW + HOUR) == 0


def test_a_machine_writes_into_a_ledger_of_its_own(store):
    users, machines = JobStore(store, "digits"), JobStore(store, "digits", on_machine=True)
    assert users.bill("a", (charge("a", 0, 1, 2),))
    assert machines.bill("a", (charge("a", 0, 1, 1),))
    assert machines.bill("b", (charge("b", 0, 1, 4),))

    assert store.list("jobs/digits/control/ledger/") == ("jobs/digits/control/ledger/a.json",)
    assert store.list("jobs/digits/ledger/") == ("jobs/digits/ledger/a.json", "jobs/digits/ledger/b.json")
    assert total(users.charges()) == total(machines.charges()) == 6


DEAR = Pool(instance_type="local.p2.16xlarge", zone="us-east-2a", market=Market.ON_DEMAND)


@pytest.mark.parametrize(
    "lie",
    [
        {"cap_usd_per_hour": Decimal(0)},
        {"pool": DEAR},
        {"group": None},
        {"torn_down": True},
        {"drives_itself": False},
        {"images": (("us-east-2", "ami-of-somebody"),)},
        {"gpu": "H200"},
        {"efa": ()},
        {"left_usd_per_hour": Decimal(-9)},
        {"successor": Successor(pool=DEAR, cap_usd_per_hour=Decimal(0), at=NOW)},
        {"lease_s": float("inf")},
        {"lease_s": 0.0},
        {"order_number": 1_000_000},
    ],
    ids=lambda lie: next(iter(lie)),
)
def test_what_machines_rent_and_that_they_live_is_as_it_was_armed_whatever_they_wrote(store, lie):
    users, machines = JobStore(store, "digits"), JobStore(store, "digits", on_machine=True)
    honest = state(drives_itself=True)
    put_job(users, replace(honest, **lie))
    users.arm(arming(honest, at=NOW, machines=2, until=NOW + 8 * HOUR))

    assert users.believed()[0] == honest
    assert machines.believed()[0] == replace(honest, **lie)


def test_the_user_takes_the_state_over_as_it_was_armed_and_then_it_is_his_again(store):
    jobs = JobStore(store, "digits")
    put_job(jobs, state(pool=DEAR))
    jobs.arm(ARMED)
    with take(jobs, JumpingClock(NOW)) as lease:
        assert lease.state.pool == POOL
    jobs.arm(replace(ARMED, machines=0))
    assert jobs.believed()[0] == replace(lease.state, owner=None)


def test_of_two_armings_of_one_moment_the_later_one_counts(store):
    jobs = JobStore(store, "digits")
    put_job(jobs, state(pool=DEAR))
    for one in (ARMED, replace(ARMED, machines=0)):
        jobs.arm(one)
    assert jobs.believed()[0].pool == DEAR
