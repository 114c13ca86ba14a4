"""Machines that nobody here can end live on in the books until their paid time is over: they were let go."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.aws.prices.catalog import load
from gpucloud.adapters.aws.prices.market import ListedMarket
from gpucloud.adapters.hosts.cloud import SshMarket
from gpucloud.cli.commands.supervising import say_what_is_left
from gpucloud.cli.render.bills import left_amount
from gpucloud.cli.render.reports import jobs_text, report_json, report_text
from gpucloud.domain.errors import FleetElsewhere, ProvisionError
from gpucloud.domain.job.spec import Cloud as CloudName
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule, Used
from gpucloud.domain.node.node import NO_GROUP, EndCause, Fleet, GroupView, NodeState
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.state import (
    ExitReason,
    Interruption,
    InterruptionKind,
    JobState,
    JobStatus,
    Owner,
    UsageInterval,
)
from gpucloud.domain.supervision.action import Finish, Move
from gpucloud.domain.supervision.capacity import other_pool
from gpucloud.domain.supervision.self_driving import arming
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.domain.supervision.strays import as_listed, as_taken_over, let_go, list_group, stopped_at, unseen_words
from gpucloud.domain.supervision.transitions import move, record
from gpucloud.store.contract import Stored
from gpucloud.usecases.job.jobs import LeftJob
from gpucloud.usecases.job.ordered import Access
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.provision import MachineProvisioner
from gpucloud.usecases.supervise.session import Session
from gpucloud.wiring import jobs
from gpucloud.wiring.clouds import market_of
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, POOL, cooldown, goal, node, offer, opened, order, snapshot, state

HOUR = timedelta(hours=1)
UNTIL = NOW + 12 * HOUR
FLEET = Fleet(identity="0" * 32, host="vm", home="/home/me/.gpucloud")


class OneUsdAnHour:
    """Implements `MarketData`."""

    def offers(self, wanted: Any) -> tuple[()]:
        return ()

    def prices(self, pool: Pool, start: Any, end: Any) -> tuple[PricePoint, ...]:
        return (PricePoint(since=start, usd_per_hour=Decimal(1)),)


def left(**changes: Any) -> JobState:
    """Return the state of a job whose one machine, an hour old and paid for twelve more, was let go now."""
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    return let_go(state(cap_usd_per_hour=Decimal(2), nodes=(life,), paid_until=UNTIL, **changes), NOW)


def tracker() -> SpendTracker:
    return SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), OneUsdAnHour())


def at(hours: float, tracked: SpendTracker, known: JobState, group: GroupView = NO_GROUP) -> JobState:
    now = NOW + hours * HOUR
    return tracked.settle(as_listed(known, group, now), now)


def unseen(known: JobState) -> list[str]:
    return [one.node_id for one in known.nodes if one.is_let_go]


def test_what_was_let_go_is_billed_to_the_end_of_its_paid_time_once_that_is_over() -> None:
    tracked, known = tracker(), left()
    for hours, spent in ((0, 1), (6, 7), (11.9, Decimal("12.9")), (12, 13), (20, 13)):
        known = at(hours, tracked, known)
        assert tracked.spent_usd(known, NOW + hours * HOUR) == spent
        assert known.nodes[0].charged is (hours >= 12)
    assert (known.nodes[0].ended_at, known.nodes[0].end_cause) == (UNTIL, EndCause.SCHEDULE)
    assert tracked.spent_usd(known, NOW + 20 * HOUR) == 13


@pytest.mark.parametrize(("hours", "spent", "may_cost"), [(0, 1, 12), (6, 7, 6), (12, 13, 0)])
def test_what_it_may_still_cost_is_promised_and_not_spent(hours: int, spent: int, may_cost: int) -> None:
    tracked, now = tracker(), NOW + hours * HOUR
    known = at(hours, tracked, left())
    used = tracked.used(known, NO_GROUP, now)
    assert (used.spent_usd, used.usd) == (spent, spent + may_cost)
    spend = tracked.spend(known, NO_GROUP, now, Decimal(50), PrepaidRule())
    assert (spend.spent_usd, spend.let_go_usd, spend.off_usd) == (spent, may_cost, spent + may_cost)
    assert (spend.left_usd, spend.free_usd) == (50 - used.usd, 50 - used.usd - spend.kept_usd)


def test_no_other_machine_is_paid_for_with_what_it_may_still_cost() -> None:
    tracked, wall = tracker(), PrepaidRule(horizon=timedelta(hours=100), reserve=timedelta(0), least=timedelta(0))
    payable = tracked.payable(left(), NO_GROUP, 1, NOW, Decimal(17), wall)
    assert payable.until is not None
    assert NOW + 1.9 * HOUR < payable.until <= NOW + 2 * HOUR  # of 17 USD, 1 is spent and 12 may be: 2 USD an hour


def test_it_is_none_of_the_machines_that_the_job_has() -> None:
    known = at(6, tracker(), left())
    assert (known.alive, unseen(known)) == ((), ["a"])
    assert unseen(at(12, tracker(), known)) == []


def test_who_lists_it_again_goes_on_with_it_as_with_any_machine() -> None:
    tracked, group = tracker(), GroupView(exists=True, size=1, armed_until=UNTIL, nodes=(node("a"),))
    back = at(3, tracked, left(), group)
    assert ([one.node_id for one in back.alive], unseen(back)) == (["a"], [])
    assert tracked.spent_usd(back, NOW + 5 * HOUR) == 6
    gone = node("a", state=NodeState.TERMINATED, ended_at=NOW + 4 * HOUR, end_cause=EndCause.CHOICE)
    over = at(5, tracked, left(), replace(group, nodes=(gone,)))
    assert (over.nodes[0].ended_at, tracked.spent_usd(over, NOW + 5 * HOUR), unseen(over)) == (NOW + 4 * HOUR, 5, [])


def test_without_a_time_that_was_paid_it_is_over_at_once() -> None:
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    for paid, end in ((None, NOW), (NOW - HOUR / 2, NOW - HOUR / 2), (NOW - 2 * HOUR, NOW - HOUR)):
        known = at(0, tracker(), let_go(state(nodes=(life,), paid_until=paid), NOW))
        assert (known.nodes[0].ended_at, unseen(known), known.alive) == (end, [], ())


def test_training_stopped_for_it_when_it_was_last_heard_and_not_in_the_time_to_come() -> None:
    last = NOW - timedelta(minutes=3)
    known = left(attempts=(replace(opened("a"), last_step=5, last_step_at=last),))
    lost = Interruption(node_id="a", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW)
    assert stopped_at(lost, known) == last


@pytest.mark.parametrize("hours", [1, 13])
def test_a_wait_for_capacity_counts_from_the_first_refusal_whenever_it_ends(hours: int) -> None:
    now, limits = NOW + hours * HOUR, Limits(patience=2 * HOUR)
    refused = replace(cooldown(), until=now + HOUR, first_at=now - 2 * HOUR)
    known = replace(at(hours, tracker(), left()), cooldowns=(refused,))
    end = other_pool(goal(), snapshot(state=known, now=now, exists=False, group_size=0), limits)
    assert isinstance(end, Finish), end
    assert (end.reason, "for 2.0 h" in (end.message or "")) == (ExitReason.NO_CAPACITY, True)


def test_status_and_list_tell_of_it_and_what_it_may_still_cost() -> None:
    tracked, known = tracker(), at(0, tracker(), left())
    spend = tracked.spend(known, NO_GROUP, NOW, Decimal(50), PrepaidRule())
    told = replace(report(known, spend, (), NO_GROUP, None), looked_at=NOW)
    text = report_text(told)
    assert "1.00 of 50.00 USD · off by 2026-03-02 00:00 UTC at the latest, at 13.00 USD" in text
    assert text.endswith(
        "1 machine that could not be ended from here may be alive until 2026-03-02 00:00:00 UTC, and cost"
        " 12.00 USD more at the most"
    )
    assert "0 (+1 unseen)" in jobs_text([told])
    found = report_json(told)
    assert found["let_go"] == [{"node": "a", "until": UNTIL.isoformat()}]
    money = {key: found["spend"][f"{key}_usd"] for key in ("spent", "let_go", "promised", "left")}
    assert money == {"spent": "1", "let_go": "12", "promised": "0", "left": "37"}
    assert "let go  12.00 USD for machines that could not be ended from here\n" in text
    assert left_amount(spend) == "37.00"


def test_a_damaged_record_of_the_own_fleet_hides_no_books(monkeypatch: pytest.MonkeyPatch) -> None:
    def describe(group: str) -> GroupView:
        raise ProvisionError(f"{group}/group.json is damaged")

    asker = SimpleNamespace(group=SimpleNamespace(describe=describe))
    monkeypatch.setattr(jobs, "asker_of", lambda *_: asker)
    known, spend = left(), tracker().spend(left(), NO_GROUP, NOW, Decimal(50), PrepaidRule())
    told = report(known, spend, (), NO_GROUP, None)
    assert jobs.with_seen_again(SimpleNamespace(), SimpleNamespace(cloud=CloudName.LOCAL, name="digits"), told) == told  # type: ignore[arg-type]


def test_who_leaves_the_job_is_told_of_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(LeftJob(state=replace(left(), paid_until=None)), NOW)
    unseen = "1 machine that could not be ended from here may be alive until 2026-03-02 00:00:00 UTC"
    assert capsys.readouterr().err.splitlines() == ["left digits as it is", unseen]
    say_what_is_left(LeftJob(state=replace(left(), paid_until=None)), UNTIL)
    assert capsys.readouterr().err.splitlines() == ["left digits as it is", "no machines are alive"]


def test_what_it_may_still_cost_is_no_part_of_what_lasts_for_the_jobs_own_machines() -> None:
    tracked, own = tracker(), UsageInterval(node_id="b", pool=POOL, launched_at=NOW - HOUR)
    known, group = left(), GroupView(exists=True, size=1, armed_until=NOW + HOUR, nodes=(node("b"),))
    known = replace(known, nodes=(*known.nodes, own), group="gpucloud-digits", paid_until=NOW + HOUR)
    plain = tracked.spend(replace(known, nodes=(own,)), group, NOW, Decimal(49), PrepaidRule())
    spend = tracked.spend(known, group, NOW, Decimal(49 + 12 + 1), PrepaidRule())  # the hour that is spent on it, too
    assert (spend.lasts, spend.free_usd, spend.off_at) == (plain.lasts, plain.free_usd, plain.off_at)
    left_s, plain_s = (one.for_job_of(100 * HOUR) for one in (spend, plain))
    assert (left_s.is_short, left_s.forecast_usd) == (True, (plain_s.forecast_usd or 0) + 13)


def test_its_price_is_that_of_its_own_pool_wherever_the_job_turns_to() -> None:
    moved = move(left(), Move(offer=replace(offer(), cap_usd_per_hour=Decimal("0.5"))), None, NOW)
    seen = record(snapshot(state=replace(moved, group="gpucloud-digits"), group_size=0))
    assert (seen.dearest_usd_per_hour, tracker().used(seen, NO_GROUP, NOW).let_go_usd) == (Decimal("0.5"), 12)


@pytest.mark.parametrize(
    "cloud",
    [
        (CloudName.AWS, ListedMarket(load(), ("us-east-1",))),
        (CloudName.SSH, SshMarket(Decimal(0), JumpingClock(NOW), lambda: None)),
    ],
    ids=["aws", "ssh"],
)
def test_it_is_billed_at_the_price_of_its_own_cloud_wherever_the_job_goes_on(cloud: tuple[CloudName, Any]) -> None:
    name, there = cloud
    own = Pool(instance_type="local.p2.xlarge", zone="us-east-2a", market=Market.ON_DEMAND)
    known = replace(left(), torn_down=True, paid_until=None)
    known = replace(known, nodes=(replace(known.nodes[0], pool=own),))
    market: Any = SimpleNamespace(market=lambda: there)
    tracked = SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), market_of(market, name))
    assert tracked.used(known, NO_GROUP, NOW) == Used(spent_usd=Decimal("0.9"), let_go_usd=Decimal("10.8"))
    over = at(13, tracked, known)
    assert (over.nodes[0].charged, tracked.spent_usd(over, NOW + 13 * HOUR)) == (True, Decimal("11.7"))


def test_a_time_that_a_machine_wrote_is_promised_for_no_longer_than_anything_can_be_paid() -> None:
    known = left()
    known = replace(known, nodes=(replace(known.nodes[0], let_go_until=NOW + 900 * 365 * 24 * HOUR),))
    assert tracker().used(known, NO_GROUP, NOW).let_go_usd == 366 * 24


@pytest.mark.parametrize("is_here", [True, False])
def test_who_is_about_to_take_the_job_over_reckons_with_what_he_will_let_go(is_here: bool) -> None:
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    known = state(nodes=(life,), paid_until=UNTIL, group=FLEET.named("gpucloud-digits"))

    def describe(group: str) -> GroupView:
        raise FLEET.elsewhere(group, is_here=is_here)

    taken = as_taken_over(describe, known, lambda: None, NOW)
    assert (taken.group, unseen(taken)) == (known.group, [] if is_here else ["a"])
    used = tracker().used(taken, NO_GROUP, NOW)
    assert str(used) == (
        "1.00 USD spent" if is_here else "1.00 USD spent, 12.00 USD for machines that could not be ended"
    )


@pytest.mark.parametrize(
    "told",
    [{}, {"paid_until": NOW - HOUR / 4}, {"paid_until": None}, {"nodes": ()}, {"nodes": (), "paid_until": None}],
)
def test_the_word_of_machines_that_drive_the_job_lowers_nothing_of_what_is_promised(told: dict[str, Any]) -> None:
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    armed = state(nodes=(life,), paid_until=UNTIL, group=FLEET.named("gpucloud-digits"), drives_itself=True)
    newest = arming(armed, at=NOW - HOUR / 2, machines=1, until=UNTIL)

    def describe(group: str) -> GroupView:
        raise FLEET.elsewhere(group, is_here=False)

    taken = as_taken_over(describe, replace(armed, **told), lambda: newest, NOW)
    assert str(tracker().used(taken, NO_GROUP, NOW)) == "1.00 USD spent, 12.00 USD for machines that could not be ended"
    later = as_taken_over(describe, replace(armed, paid_until=UNTIL + HOUR), lambda: newest, NOW)
    assert tracker().used(later, NO_GROUP, NOW).let_go_usd == 13
    given_back = as_taken_over(describe, replace(armed, **told), lambda: replace(newest, machines=0), NOW)
    assert given_back == as_taken_over(describe, replace(armed, **told), lambda: None, NOW)


@pytest.mark.parametrize("is_here", [True, False])
def test_who_takes_over_from_machines_that_say_they_are_off_goes_by_what_was_armed(is_here: bool) -> None:
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    armed = state(nodes=(life,), paid_until=UNTIL, group=FLEET.named("gpucloud-digits"), drives_itself=True)
    newest, written, told = arming(armed, at=NOW - HOUR / 2, machines=1, until=UNTIL), [], []

    def describe(group: str) -> GroupView:
        raise FLEET.elsewhere(group, is_here=is_here)

    services: Any = SimpleNamespace(
        clock=JumpingClock(NOW),
        group=SimpleNamespace(describe=describe),
        jobs=SimpleNamespace(last_armed=lambda: newest),
    )
    lease: Any = SimpleNamespace(state=replace(armed, nodes=(), paid_until=None), write=written.append)
    orders: Any = None
    watcher: Any = SimpleNamespace(story=told.append)
    with pytest.raises(FleetElsewhere) if is_here else nullcontext():
        Session(services=services, orders=orders, watcher=watcher)._let_go_elsewhere(services, lease)
    assert [unseen(one) for one in written] == ([] if is_here else [["a"]])
    assert len(told) == (0 if is_here else 1)


@pytest.mark.parametrize(
    ("group", "until", "said"),
    [
        (None, UNTIL, "listed again here alone: no machines, no node group"),
        (None, NOW, None),
        (FLEET.named("gpucloud-digits"), UNTIL, "not listed again: the embedded fleet of another home"),
    ],
)
def test_who_ends_the_job_a_second_time_is_not_told_that_no_machine_is_left(group: Any, until: Any, said: Any) -> None:
    known = left()
    known = replace(known, group=group, nodes=(replace(known.nodes[0], let_go_until=until),))

    def elsewhere(group: str | None) -> FleetElsewhere | None:
        return FLEET.elsewhere(group, is_here=False) if group is not None else None

    asker = SimpleNamespace(stored_state=lambda: known, clock=JumpingClock(NOW))
    ender: Any = SimpleNamespace(asker=asker, access=SimpleNamespace(fleet_elsewhere=elsewhere))
    told = jobs.unlisted_fleet(ender)
    assert told is None if said is None else (told or "").startswith(said)


def test_a_teardown_waits_for_no_word_of_it() -> None:
    clock = JumpingClock(NOW)
    jobs = JobStore(MemoryStore(clock), "digits")
    jobs.create(left())
    services = SimpleNamespace(clock=clock, group=SimpleNamespace(describe=lambda _: NO_GROUP))
    tracked = SpendTracker(jobs, OneUsdAnHour())
    held = SimpleNamespace(state=left(), write=lambda _: None)
    provisioner = MachineProvisioner(
        services=services,
        lease=held,
        bootstrapper=None,
        tracker=tracked,
        watcher=None,  # type: ignore[arg-type]
    )
    assert unseen(replace(left(), nodes=provisioner._last_intervals("gpucloud-digits"))) == ["a"]
    assert clock.now() == NOW
    provisioner._bill("gpucloud-digits")
    assert jobs.charges() == ()


@pytest.mark.parametrize("supervisor", [None, "its own node a"])
def test_another_home_is_told_the_commands_that_reach_machines_of_this_one(supervisor: str | None) -> None:
    attempts = (replace(opened("a", first_step=1, last_step=385), total_steps=768),)
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    known = state(nodes=(life,), paid_until=UNTIL, group=FLEET.named("gpucloud-digits"), attempts=attempts)

    def describe(group: str) -> GroupView:
        raise FLEET.elsewhere(group, is_here=True)

    view = list_group(describe, known, lambda: NOW)
    spend = tracker().spend(known, view, NOW, Decimal(50), PrepaidRule())
    text = report_text(replace(report(known, spend, (), view, supervisor), looked_at=NOW, signed_by="own"))
    there = "GPUCLOUD_HOME=/home/me/.gpucloud gpucloud"
    assert (f"go on: {there} train digits · end it: {there} down digits" in text) is (supervisor is None)
    said = unseen_words(view, supervisor) or ""
    assert "(/home/me/.gpucloud on vm), which alone sees them; paid until" in said
    assert said.endswith("does what `gpucloud down` and `gpucloud budget` here ask") is (supervisor is not None)


class Jobs:
    """Implements of `JobStore` what tells who has a job: one of its machines does from the third look on."""

    def __init__(self, known: JobState, *, quiet_s: float, taken: bool) -> None:
        self.known, self.quiet_s, self.taken, self.looks = known, quiet_s, taken, 0

    def believed(self) -> tuple[JobState, Stored]:
        self.looks += 1
        held = self.taken and self.looks >= 3
        owner = Owner(id="a", host="elsewhere", pid=1, started="1", since=NOW, node="a") if held else None
        at = NOW + timedelta(seconds=self.quiet_s)
        written = at if held else NOW
        return replace(self.known, owner=owner), Stored(data=b"", version="1", modified=written, store_time=at)


@pytest.mark.parametrize(
    ("of_state", "ordered", "quiet_s", "taken", "refused", "waits_s"),
    [
        ({}, {"unattended": HOUR}, 5, True, False, 2),  # between two drivers: one of them has it, and obeys
        ({}, {"unattended": HOUR}, 5, False, True, 55),
        ({}, {"unattended": HOUR}, 300, False, True, 0),  # none of them took it
        ({}, {}, 5, False, True, 0),  # they were taken back
        ({"drives_itself": False}, {"unattended": HOUR}, 5, False, True, 0),
        ({"status": JobStatus.SUCCEEDED}, {"unattended": HOUR}, 5, False, True, 30),  # they end with it
        ({"status": JobStatus.SUCCEEDED}, {"unattended": HOUR, "keep": True}, 5, False, True, 0),  # they stay
    ],
)
def test_machines_of_another_home_that_drive_the_job_are_waited_for_while_they_take_it_or_end_with_it(
    of_state: Any, ordered: Any, quiet_s: float, taken: bool, refused: bool, waits_s: int
) -> None:
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR)
    ended = {"exit_reason": ExitReason.SUCCEEDED} if of_state.get("status") else {}
    known = state(**{"nodes": (life,), "paid_until": UNTIL, "drives_itself": True, **of_state, **ended})
    clock = JumpingClock(NOW)
    given = SimpleNamespace(order=order(**ordered))
    jobs = Jobs(known, quiet_s=quiet_s, taken=taken)
    orders = SimpleNamespace(clock=clock, jobs=jobs, newest=lambda: given)
    away = FLEET.elsewhere("digits", is_here=True)
    made: Any = SimpleNamespace(orders=orders)
    access = Access(ordered=made, key=lambda: None, services=made, fleet_elsewhere=lambda _: away)
    with pytest.raises(FleetElsewhere) if refused else nullcontext():
        access.require_fleet(known)
    assert (clock.now() - NOW).total_seconds() == waits_s
