"""That every state of a job has a time limit, that none is set on what may rightly last, and that processes agree."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import LandingRefused, NodeError, ProvisionError, StoreError, ToolMissing
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.node.hardware import GpuSample
from gpucloud.domain.node.node import NO_GROUP, EndCause, Fault, NodeState
from gpucloud.domain.node.status import UNTOLD, Outcome, Status, Stop
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.order import begins_anew, is_closed
from gpucloud.domain.state.state import (
    ExitReason,
    FailedBootstrap,
    Interruption,
    InterruptionKind,
    JobStatus,
    MissingOutput,
    Owner,
    UsageInterval,
)
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Appoint,
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    EndAttempt,
    Finish,
    Provision,
    Replace,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.capacity import cooled
from gpucloud.domain.supervision.membership import hang_limit, hung
from gpucloud.domain.supervision.quarantine import failures
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.renewal import lost_outputs, to_bring
from gpucloud.domain.supervision.snapshot import (
    Goal,
    Homecoming,
    Limits,
    NodeSnapshot,
    Readiness,
    Rules,
    asked_of,
    left_on_hosts,
    missing_outputs,
)
from gpucloud.ports import Brought
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.act import Actor, Announcements
from gpucloud.usecases.supervise.closing import Closing, OutputsHome
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.provision import MachineProvisioner
from gpucloud.usecases.supervise.story import missing_line
from gpucloud.usecases.supervise.usage import UsageMeter
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.faults.process import InlinePool
from tests.unit.worlds import (
    LATER,
    NOW,
    POOL,
    cooldown,
    gone,
    job,
    node,
    offer,
    opened,
    order,
    part,
    progress,
    snapshot,
    state,
    up,
)

GOAL, RULES = Goal(nodes=2, budget_usd=Decimal(1)), Rules()
AWAY = timedelta(seconds=9)
CLOSING = SimpleNamespace(home=SimpleNamespace(give_up=lambda: None, with_rescued=lambda state: state))
MISSING = (MissingOutput(path="results/", why="is not there", nearest="result"),)


def world(*nodes, attempt=None, **changes):
    """Attempt 1 is open on a and b; what has lasted is written down as an observer does."""
    one = snapshot(*nodes, state=state(attempts=(attempt or opened("a", "b"),)), **changes)
    return replace(one, state=transitions.since(one.state, one, 2))


def lasted(one, span):
    """The same world later, with the times that are in the books."""
    now = one.now + span
    attempt = one.state.attempts[-1]

    def ago(since):
        return now - since if since is not None else None

    return replace(one, now=now, failed_for=ago(attempt.failed_at), uneven_for=ago(attempt.broken_at))


def test_what_lasts_is_counted_from_when_it_was_first_seen():
    failed, works = up("a", part(1, Outcome.FAILED)), up("b", part(1, step=30))
    one = snapshot(failed, works, state=state(attempts=(opened("a", "b"),)), homecoming=Homecoming.FAILED)
    short, bare = snapshot(up("a")), snapshot()
    later = NOW + timedelta(minutes=5)
    for world in (one, short, bare):
        first = transitions.since(world.state, world, 2)
        again = transitions.since(first, replace(world, state=first, now=later), 2)
        assert (again.short_at, again.bare_at) == (first.short_at, first.bare_at)
        if first.attempt is not None and again.attempt is not None:
            assert again.attempt == first.attempt
            assert (again.attempt.failed_at, again.attempt.broken_at, again.attempt.unbrought_at) == (NOW, NOW, NOW)
    assert transitions.since(short.state, short, 2).short_at == transitions.since(bare.state, bare, 2).bare_at == NOW


# What may rightly last


@pytest.mark.parametrize("minutes", [2, 10, 600])
def test_a_member_that_is_done_is_no_reason_to_end_one_that_still_evaluates(minutes):
    one = world(up("a", part(1, step=100, phase="evaluate")), up("b", part(1, Outcome.DONE)))
    later = lasted(one, timedelta(minutes=minutes))
    assert not isinstance(decide(GOAL, replace(later, group=replace(later.group, armed_until=None)), RULES), EndAttempt)
    assert one.state.attempts[-1].broken_at is None


@pytest.mark.parametrize("how", [Outcome.LEFT])
def test_members_that_left_are_followed_by_the_others_within_a_minute(how):
    one = world(up("a", part(1, step=100)), up("b", part(1, how)))
    assert isinstance(decide(GOAL, lasted(one, timedelta(seconds=59)), RULES), Wait)
    assert decide(GOAL, lasted(one, timedelta(seconds=60)), RULES) == EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)


def test_a_machine_that_goes_after_its_part_was_done_interrupts_nobody():
    before = world(up("a", part(1, step=100)), up("b", part(1, Outcome.DONE)))
    after = replace(world(up("a", part(1, step=100)), gone("b")), state=before.state)
    assert decide(GOAL, after, RULES) == Wait(why="running")
    over = replace(world(up("a", part(1, Outcome.DONE)), gone("b")), state=before.state)
    over = replace(over, state=transitions.since(over.state, over, 2))
    assert decide(GOAL, over, RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)


def test_nothing_after_done_is_a_hang_nor_is_the_last_word_of_a_part_that_is_over():
    after_done = snapshot(up("a", part(1, step=40, phase="done", age_s=4000.0)), state=state(attempts=(opened("a"),)))
    assert hung(opened("a"), after_done, RULES.limits) is None
    over = snapshot(up("a", part(1, Outcome.DONE, step=40, age_s=4000.0)), state=state(attempts=(opened("a", "b"),)))
    assert hung(opened("a", "b"), over, RULES.limits) is None


def test_a_step_may_take_again_as_long_as_one_took_that_came_whatever_ended_its_attempt():
    before = (
        opened("a", number=1, reason=ExitReason.HUNG, ended_at=NOW),
        opened("a", number=2, reason=ExitReason.INTERRUPTED, ended_at=NOW, longest_step_s=200.0),
    )
    assert hang_limit(0.4, before, Limits()) == timedelta(seconds=300)
    assert hang_limit(0.4, (*before, replace(before[0], number=3)), Limits()) == timedelta(seconds=600)


def test_the_longest_step_is_in_the_books_and_stays_there():
    one = world(up("a", part(1, step=9, longest_s=70.0)), up("b", part(1)))
    kept = transitions.record(one)
    assert kept.attempts[-1].longest_step_s == 70.0
    again = replace(world(up("a", part(1, step=10)), up("b", part(1))), state=kept)
    assert transitions.record(again).attempts[-1].longest_step_s == 70.0


def test_the_longest_time_between_two_saves_that_were_seen_is_in_the_books():
    def saved(step, state, minutes, phase=UNTOLD):
        now = NOW + timedelta(minutes=minutes)
        seen = replace(world(up("a", part(1, step=step, phase=phase)), up("b", part(1))), state=state, now=now)
        return transitions.record(seen)

    state = world(up("a", part(1)), up("b", part(1))).state
    for step, minutes, apart_s in ((9, 30, 31 * 60.0), (9, 60, 31 * 60.0), (10, 90, 3600.0), (11, 95, 3600.0)):
        state = saved(step, state, minutes)
        assert state.attempts[-1].apart_s == apart_s
    owner = Owner(id="x", host="vm", pid=1, started="s", since=NOW + timedelta(minutes=190))
    assert saved(12, replace(state, owner=owner), 200).attempts[-1].apart_s == 3600.0  # nobody looked in between
    assert saved(12, state, 200, phase="train").attempts[-1].apart_s == 3600.0  # steps are no saves of the library's


def test_the_line_of_a_hang_says_what_to_do_about_a_long_evaluation():
    one = snapshot(up("a", part(1, step=9, age_s=99.0)), state=state(attempts=(opened("a"),)))
    assert "what takes longer belongs in `with run.phase(...)`" in (hung(opened("a"), one, RULES.limits) or "")


# The user's wish


def ending_reason(reason, how=Stop.SAVE, ago=25.0):
    return opened("a", "b", ending_reason=reason, ending_at=NOW - timedelta(minutes=ago), ordered=how)


@pytest.mark.parametrize("reason", [ExitReason.RESCHEDULED, ExitReason.RESIZED, ExitReason.LOST, ExitReason.HUNG])
@pytest.mark.parametrize("how", [Stop.SAVE, Stop.KILL])
def test_who_asks_for_the_end_of_an_attempt_that_is_ending_is_not_kept_waiting_where_nobody_answers(reason, how):
    attempt = ending_reason(reason, how)
    silent = [up(i, part(1, step=5), silent=1500.0) for i in "ab"]
    one = world(*silent, attempt=attempt, wanted_end=ExitReason.STOPPED)
    action = decide(GOAL, one, RULES)
    assert isinstance(action, EndAttempt)
    ordered = transitions.order_end(one.state, action, NOW)
    assert ordered.attempts[-1].ending_at is not None
    for _ in range(3):  # firmer and firmer, and then it is over
        later = replace(one, now=one.now + timedelta(minutes=1), state=ordered)
        one, action = later, decide(GOAL, later, RULES)
        if isinstance(action, EndAttempt):
            ordered = transitions.order_end(ordered, action, later.now)
    assert action == CloseAttempt(reason=ExitReason.STOPPED)


def test_the_first_wish_to_end_stays():
    attempt = ending_reason(ExitReason.DEADLINE)
    again = transitions.order_end(
        state(attempts=(attempt,)), EndAttempt(how=Stop.KILL, reason=ExitReason.STOPPED), NOW
    ).attempts[-1]
    assert (again.ending_reason, again.ending_at) == (attempt.ending_reason, attempt.ending_at)


# Counters and flags


def refused_at(now, before):
    action = CoolDown(
        pool=POOL,
        fault=Fault.CAPACITY,
        code="x",
        message="y",
        length=timedelta(minutes=5),
        longest=timedelta(minutes=30),
    )
    return cooled(state(cooldowns=before), action, now)[-1]


def test_refusals_of_last_week_do_not_lengthen_the_cooldown_of_today():
    old = cooldown(left=-7 * 24 * 3600, tries=6)
    fresh = refused_at(NOW, (old,))
    assert (fresh.tries, fresh.first_at, fresh.until) == (1, NOW, NOW + timedelta(minutes=5))
    lately = refused_at(NOW, (cooldown(left=-60, tries=2),))
    assert (lately.tries, lately.until) == (3, NOW + timedelta(minutes=20))


def test_a_job_that_ended_because_machines_could_not_be_prepared_goes_on_from_its_checkpoint():
    failed = transitions.finish(state(), Finish(reason=ExitReason.UNPREPARED, message="no pip"), NOW)
    assert failed.exit_code == 14
    assert not is_closed(order(), replace(failed, torn_down=True))
    setup = transitions.finish(state(), Finish(reason=ExitReason.USER_ERROR), NOW)
    assert setup.exit_code == 20
    assert not is_closed(order(), replace(setup, torn_down=True))
    trained = state(attempts=(opened("a", reason=ExitReason.USER_ERROR),))
    script = transitions.finish(trained, Finish(reason=ExitReason.USER_ERROR), NOW)
    assert not is_closed(order(), replace(script, torn_down=True))
    assert begins_anew(order(), replace(script, torn_down=True), again=True)
    assert not begins_anew(order(), script, again=True)  # its machines end first
    stopped = transitions.finish(trained, Finish(reason=ExitReason.STOPPED), NOW)
    assert not begins_anew(order(), replace(stopped, torn_down=True), again=True)


@pytest.mark.parametrize("silent", [False, True])
def test_a_start_after_an_end_because_machines_could_not_be_prepared_prepares_others(silent):
    rounds = range(2 if not silent else 6)
    tries = tuple(
        FailedBootstrap(
            node_id=f"i-{n}",
            begun_at=NOW + timedelta(minutes=5 * n),
            over_at=NOW + timedelta(minutes=5 * n + 1),
            silent=silent,
        )
        for n in rounds
    )
    failed = state(group=None, failed_bootstraps=tries)
    assert failures(failed) == 2
    over = Finish(reason=ExitReason.UNPREPARED, message="no pip")
    again = transitions.reopen(replace(transitions.finish(failed, over, NOW), torn_down=True))
    assert decide(GOAL, nothing_yet(again), RULES) == Provision()


@pytest.mark.parametrize("fault", [Fault.CAPACITY, Fault.QUOTA])
def test_a_start_after_an_end_because_no_pool_had_machines_asks_them_again(fault):
    refused = state(group=None, cooldowns=(cooldown(fault=fault, ago=4000, left=1500, tries=5),))
    over = decide(GOAL, nothing_yet(refused), RULES)
    assert isinstance(over, Finish)
    again = transitions.reopen(replace(transitions.finish(refused, over, NOW), torn_down=True))
    assert decide(GOAL, nothing_yet(again), RULES) == Provision()


def test_no_machines_take_over_in_a_job_that_goes_on_after_its_end():
    one = transitions.appoint(state(group=None), Appoint(offer=offer()), NOW)
    again = transitions.reopen(transitions.finish(one, Finish(reason=ExitReason.BUDGET), NOW))
    assert (one.successor is None, again.successor) == (False, None)


def nothing_yet(job):
    """The job as its next start finds it: without machines, and without a group."""
    return snapshot(state=job, exists=False, group_size=0, armed=None, failed_bootstraps=failures(job))


# Idle


@pytest.mark.parametrize("phase", [UNTOLD, "train", "done"])
def test_a_script_that_tells_of_nothing_but_its_saves_is_judged_idle_too(phase):
    meter = UsageMeter(lasting=timedelta(minutes=15))
    attempt = opened("a")
    for second in range(0, 3600, 5):
        at = NOW + timedelta(seconds=second)
        sample = GpuSample(at=at, index=0, use=2, memory_used_mib=1, memory_mib=9, temperature=40, power=50.0)
        node = up("a", replace(part(1), progress=progress(step=9, phase=phase)))
        status = node.status
        assert isinstance(status, Status)
        node = replace(node, status=replace(status, gpus=(sample,)))
        use = meter.take(attempt, snapshot(node, state=state(attempts=(attempt,)), now=at))
    assert use is not None
    assert use.covered >= timedelta(minutes=15)


# What the cloud lists no longer


class OneUsdAnHour:
    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal(1)),)


def forgotten(**changes):
    """A job whose machine ran for 35 minutes, up to the time that was armed; asked after ten hours."""
    interval = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - timedelta(hours=10), **changes)
    return state(nodes=(interval,), paid_until=NOW - timedelta(hours=10) + timedelta(minutes=35))


def test_a_machine_that_the_cloud_has_forgotten_costs_what_was_paid_for_and_no_more():
    stored = forgotten()
    tracker = SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), OneUsdAnHour())
    one = snapshot(group_size=0, armed=None, state=stored)
    prepaid_rule = RULES.prepaid_rule
    assert round(tracker.payable(stored, one.group, 2, NOW, Decimal(5), prepaid_rule).used.usd, 3) == Decimal("0.583")
    kept = tracker.settle(transitions.record(one), NOW)
    assert (kept.nodes[0].ended_at, kept.nodes[0].charged) == (stored.paid_until, True)
    assert round(tracker.spend(kept, one.group, NOW, Decimal(5), PrepaidRule()).spent_usd, 3) == Decimal("0.583")


@pytest.mark.parametrize(("age_s", "ahead"), [(0, "0.0333"), (15, "0.0250"), (60, "0"), (90, "0")])
def test_what_a_young_machine_is_charged_for_beforehand_is_known_to_be_of_time_to_come(age_s, ahead):
    """Two machines at 1 USD an hour, the least time of each a minute."""
    launched = NOW - timedelta(seconds=age_s)
    nodes = tuple(UsageInterval(node_id=one, pool=POOL, launched_at=launched) for one in "ab")
    tracker = SpendTracker(JobStore(MemoryStore(JumpingClock(NOW)), "digits"), OneUsdAnHour())
    spend = tracker.spend(state(nodes=nodes), NO_GROUP, NOW, Decimal(5), PrepaidRule())
    assert spend.ahead_usd.quantize(Decimal("0.0001")) == Decimal(ahead)
    assert spend.spent_usd - spend.ahead_usd == pytest.approx(Decimal(2 * age_s) / 3600, abs=Decimal("0.00001"))


def test_a_machine_that_is_listed_late_lives_on_in_the_books_and_one_that_stays_away_ended_when_it_was_missed():
    stored = replace(forgotten(), paid_until=NOW + timedelta(hours=5))
    missed = transitions.record(snapshot(group_size=1, state=stored, armed=stored.paid_until))
    assert (missed.nodes[0].ended_at, missed.nodes[0].missing_at) == (None, NOW)
    back = transitions.record(snapshot(up("a"), group_size=1, state=missed, now=NOW + timedelta(seconds=59)))
    assert (back.nodes[0].ended_at, back.nodes[0].missing_at) == (None, None)
    away = transitions.record(snapshot(group_size=1, state=missed, now=NOW + timedelta(seconds=60)))
    assert away.nodes[0].ended_at == NOW


# Members that cannot be prepared


def taken_over(b, minutes, **changes):
    """A supervisor took the job over, and b cannot be prepared: for so many minutes now."""
    since = NOW - timedelta(minutes=minutes)
    intervals = (
        UsageInterval(node_id="a", pool=POOL, launched_at=NOW - timedelta(hours=1)),
        UsageInterval(node_id="b", pool=POOL, launched_at=NOW - timedelta(hours=1), unprepared_at=since),
    )
    attempt = opened("a", "b", **changes)
    return snapshot(up("a", part(1, step=9)), b, state=state(attempts=(attempt,), nodes=intervals))


def unready(status_of):
    return replace(status_of, readiness=Readiness.FAILED, error="no pip", told=False)


def test_a_job_ends_when_its_ranks_do_though_a_machine_could_not_be_prepared():
    one = taken_over(unready(up("b", part(1, Outcome.DONE))), 3)
    one = replace(one, nodes=(up("a", part(1, Outcome.DONE)), one.nodes[1]))
    assert decide(GOAL, one, RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)


def test_an_attempt_of_which_a_member_cannot_be_prepared_has_ten_minutes():
    working = unready(up("b", part(1)))
    assert decide(GOAL, taken_over(working, 9), RULES) == Wait(why="running")
    ordered = decide(GOAL, taken_over(working, 10), RULES)
    assert isinstance(ordered, EndAttempt)
    assert (ordered.how, ordered.reason) == (Stop.SAVE, ExitReason.LOST)
    assert ordered.message == "b could not be prepared for 10 min: no pip"
    since = NOW - timedelta(minutes=2)
    deaf = taken_over(working, 12, ending_reason=ExitReason.LOST, ending_at=since, ordered=Stop.KILL)
    assert decide(GOAL, deaf, RULES) == Replace(node_ids=("b",))


# Outputs


def over(home, minutes=0, armed=LATER, **changes):
    since = NOW - timedelta(minutes=minutes) if minutes else None
    attempt = opened("a", "b", unbrought_at=since)
    nodes = [up(i, part(1, Outcome.DONE)) for i in "ab"]
    return snapshot(*nodes, state=state(attempts=(attempt,)), homecoming=home, armed=armed, **changes)


def test_nothing_is_closed_before_the_outputs_are_home():
    assert decide(GOAL, over(Homecoming.NO), RULES) == BringHome()
    assert isinstance(decide(GOAL, over(Homecoming.ON_THE_WAY), RULES), Wait)
    assert isinstance(decide(GOAL, over(Homecoming.FAILED, 9), RULES), Wait)
    assert decide(GOAL, over(Homecoming.DONE), RULES) == CloseAttempt(reason=ExitReason.SUCCEEDED)


def test_the_machines_are_paid_while_outputs_are_on_their_way_and_for_ten_minutes_where_none_can_be_brought():
    soon = NOW + timedelta(minutes=3)
    for home, minutes in ((Homecoming.NO, 0), (Homecoming.ON_THE_WAY, 0), (Homecoming.FAILED, 9)):
        assert decide(GOAL, over(home, minutes, armed=soon), RULES) == Arm(until=LATER)
    assert isinstance(decide(GOAL, over(Homecoming.FAILED, 10, armed=soon), RULES), Wait)
    assert decide(GOAL, over(Homecoming.NO, 10, armed=soon), RULES) == BringHome()


def test_who_asks_for_the_end_waits_ten_minutes_for_outputs_that_can_be_brought_nowhere():
    asked = {"wanted_end": ExitReason.STOPPED}
    assert isinstance(decide(GOAL, over(Homecoming.FAILED, 9, **asked), RULES), Wait)
    assert isinstance(decide(GOAL, over(Homecoming.FAILED, 10, **asked), RULES), CloseAttempt)


class Outputs:
    """Fails so many times, then brings."""

    def __init__(self, fails):
        self.fails = fails

    def bring_home(self, host, code, attempt, moves, paths):
        if self.fails:
            self.fails -= 1
            raise NodeError("a: connection reset")
        return Brought(paths=("/home/me/outputs/model.pt",), missing=MISSING)

    def note(self, *_):
        pass

    def came(self, *_):
        return None


def bringing(bring_home):
    return SimpleNamespace(bring_home=bring_home, note=lambda *_: None, came=lambda *_: None)


class Prepared(Bootstrapper):
    """All machines are ready; those of `nodes` were listed."""

    def __init__(self, *nodes):
        self._nodes = {node.id: node for node in nodes}
        self.code_on = lambda _: "/code"

    def readiness(self, node_id):
        return Readiness.READY


@pytest.mark.parametrize("ends", [True, False])
def test_a_machine_that_cannot_be_told_of_the_end_is_said_to_be_waited_for_and_what_then_is(ends):
    one, told = Prepared(), []
    one.watcher, one.error, one.forget = (
        SimpleNamespace(story=told.append),
        lambda _: "the disk is full",
        lambda _: None,
    )
    one.services = SimpleNamespace(rules=RULES, name="digits")
    one.try_again("a", ends=ends)
    limit = format_span(RULES.limits.overdue)
    until = f" for {limit} at the most, then its outputs come home and it is ended" if ends else ""
    assert told == [f"a could not be prepared: the disk is full; it works on, trying again{until}"]


def homecoming(fails, stored=None):
    told = []
    job = SimpleNamespace(outputs=("results/",))
    shell = SimpleNamespace(host=lambda node: None)
    parts = {"job": job, "shell": shell, "outputs": Outputs(fails), "stored_outputs": stored}
    free = SimpleNamespace(rates_in=lambda _: SimpleNamespace(storage_usd_per_gib_month=0))
    clock = SimpleNamespace(now=lambda: NOW)
    world = SimpleNamespace(name="digits", rules=RULES, terms=free, clock=clock, on_machine=False, **parts)
    bootstrapper = Prepared()
    watcher = SimpleNamespace(story=told.append)
    return OutputsHome(services=world, bootstrapper=bootstrapper, pool=InlinePool(), watcher=watcher), told


def test_outputs_whose_way_is_cut_off_are_tried_again_half_a_minute_later():
    home, told = homecoming(1)
    one = over(Homecoming.NO)
    assert home.stands(one.state, one.group, NOW) is Homecoming.NO
    home.start(one)
    assert home.stands(one.state, one.group, NOW) is Homecoming.FAILED
    assert told == ["the outputs could not be brought home: a: connection reset"]
    assert home.stands(one.state, one.group, NOW + timedelta(seconds=30)) is Homecoming.NO
    home.start(one)
    assert home.stands(one.state, one.group, NOW) is Homecoming.DONE
    assert home.brought(ExitReason.SUCCEEDED, one).paths == ("/home/me/outputs/model.pt",)


@pytest.mark.parametrize(
    ("tree", "looked_in"),
    [("a" * 64, f"/node/code/{'a' * 64}"), ("", "/node/code/now"), ("../../etc", "/node/code/now")],
)
def test_outputs_are_looked_for_in_the_tree_that_the_attempt_runs(tree, looked_in):
    home, _ = homecoming(0)
    asked = []
    home.services.outputs = bringing(lambda host, code, attempt, moves, paths: asked.append(code) or Brought())
    home.bootstrapper.code_on = lambda _: "/node/code/now"
    one = over(Homecoming.NO)
    attempt = replace(one.state.attempts[-1], tree=tree)
    home.start(replace(one, state=replace(one.state, attempts=(attempt,))))

    assert asked == [looked_in]


@pytest.mark.parametrize(
    ("outdated", "not_there"),
    [(True, ["first.pt"]), (False, ["first.pt", "results/"])],
)
def test_an_attempt_brings_the_outputs_of_the_job_file_that_it_was_started_under(outdated, not_there):
    """The file has `results/` by now, which a script of before may not make; the next attempt is asked for it alone."""
    home, _ = homecoming(0)
    one, asked = over(Homecoming.NO), []

    def nothing_there(host, code, attempt, moves, paths):
        asked.append(paths)
        return Brought(missing=tuple(MissingOutput(path=path, why="is not there") for path in paths))

    home.services.outputs = bringing(nothing_there)
    attempt = replace(one.state.attempts[-1], outputs=("first.pt",), outdated=outdated)
    home.start(replace(one, state=replace(one.state, attempts=(attempt,))))
    ended = replace(one, state=replace(one.state, attempts=(attempt,)))

    assert asked == [("first.pt", "results/")]
    assert [missing.path for missing in home.brought(ExitReason.SUCCEEDED, ended).missing] == not_there


def test_outputs_that_the_job_file_has_no_more_are_waited_for_and_told_to_be_lost():
    home, told = homecoming(0)
    home.services.job.outputs = ()
    one = over(Homecoming.NO)
    attempt = replace(one.state.attempts[-1], outputs=("first.pt",), outdated=True)
    before = replace(one, state=replace(one.state, attempts=(attempt,)))
    assert home.stands(before.state, one.group, NOW) is Homecoming.NO
    assert [missing.path for missing in home.lose((attempt,))] == ["first.pt"]
    assert told == [LOST.replace("results/", "first.pt")]
    assert home.brought(ExitReason.SUCCEEDED, before).missing[0].path == "first.pt"
    ended = transitions.abandon(before.state, NOW)
    assert [missing.path for missing in ended.missing_outputs] == ["first.pt"]


def test_what_earlier_attempts_wrote_beside_the_last_one_under_another_job_file_comes_with_it():
    first = replace(opened("a", outputs=("first.pt",), tree="t"), reason=ExitReason.LOST)
    last = replace(opened("a", outputs=("results/",), tree="t"), number=2)
    assert to_bring((first, last), ("results/",), lambda _: None) == ("first.pt", "results/")
    assert asked_of((first, last), ("results/",)) == ("results/",)
    lost = lost_outputs((first, last), ("results/",), lambda _: None)
    assert [one.path for one in lost] == ["first.pt", "results/"]


def test_ranks_of_one_attempt_run_one_code_and_a_change_is_said():
    told = []
    work = {
        name: SimpleNamespace(result=lambda tree=tree: SimpleNamespace(code=f"/node/code/{tree}"))
        for name, tree in (("a", "1"), ("b", "1"), ("c", "2"))
    }
    parts = dict.fromkeys(("services", "pool", "syncs", "data", "records"))
    bootstrapper = Bootstrapper(
        **parts, agent_writer=SimpleNamespace(forget=lambda _: None), watcher=SimpleNamespace(story=told.append)
    )
    bootstrapper._work.update(work)

    assert bootstrapper.one_tree(("a", "b")) == "1"
    assert told == []
    assert bootstrapper.one_tree(("a", "c")) is None
    assert "the code was changed" in told[0]
    assert set(bootstrapper._work) == {"b"}


def test_outputs_that_find_no_room_at_home_are_put_into_the_store():
    home, told = homecoming(9, stored=Outputs(0))
    one = over(Homecoming.NO)
    home.start(one)
    assert home.stands(one.state, one.group, NOW) is Homecoming.DONE
    assert told[-2:] == [
        "1 outputs are in the store instead, and come home when the job has ended;"
        " where they cannot yet, `gpucloud down digits` tries again",
        "outputs: results/ is not there; nearest: result",
    ]
    assert home.brought(ExitReason.SUCCEEDED, one) == Brought(missing=MISSING)


def test_outputs_of_a_machine_that_is_gone_are_not_waited_for():
    home, _ = homecoming(1)
    one = over(Homecoming.NO)
    away = replace(one.group, nodes=(gone("a").node, one.group.nodes[1]))
    assert home.stands(one.state, away, NOW) is Homecoming.DONE


def test_outputs_that_are_lost_with_their_machine_are_missing_unless_another_attempt_follows():
    home, told = homecoming(1)
    one = over(Homecoming.NO)
    assert home.brought(ExitReason.INTERRUPTED, one) == Brought()
    assert told == []
    lost = MissingOutput(path="results/", why="could not be brought home")
    assert home.brought(ExitReason.SUCCEEDED, one) == Brought(missing=(lost,))
    assert told == ["the outputs of attempt 1 could not be brought home"]


def test_what_stayed_on_machines_is_written_down_when_the_job_ends_between_two_attempts():
    before = state(attempts=(replace(opened("a"), reason=ExitReason.INTERRUPTED, ended_at=NOW),))
    written = []
    lease = SimpleNamespace(state=before, write=written.append)
    world = SimpleNamespace(job=job(outputs=("results/",)), rules=RULES)
    parts = {**dict.fromkeys(("bootstrapper", "inspector", "machine_provisioner")), "closing": CLOSING}
    actor = Actor(services=world, lease=lease, watcher=SimpleNamespace(story=lambda _: None), **parts)
    actor.act(Finish(reason=ExitReason.NO_CAPACITY), snapshot(state=before), GOAL)

    assert [(one.exit_reason, len(one.missing_outputs)) for one in written] == [(ExitReason.NO_CAPACITY, 1)]


def test_a_time_is_told_as_paid_once_the_cloud_has_it_and_not_where_it_refuses():
    told, refuses = [], [True, False]

    def arm(action):
        if refuses.pop(0):
            raise ProvisionError("no answer")
        told.append("armed")

    actor = Actor(
        services=SimpleNamespace(job=job(), rules=RULES),
        lease=None,
        watcher=SimpleNamespace(story=told.append),
        machine_provisioner=SimpleNamespace(act=arm),
        **dict.fromkeys(("bootstrapper", "inspector", "closing")),
    )
    arming = Arm(until=NOW + timedelta(hours=2))
    with pytest.raises(ProvisionError):
        actor.act(arming, snapshot(), GOAL)
    assert told == []
    actor.act(arming, snapshot(), GOAL)
    assert told == ["armed", "paid until 14:00:00 UTC: then the machines shut themselves off"]


@pytest.mark.parametrize(("is_own_fault", "kept"), [(True, [(0, b"log")]), (False, [])])
def test_a_setup_that_failed_on_a_machine_given_up_since_is_not_told_when_the_script_fails(is_own_fault, kept):
    attempts = () if is_own_fault else (replace(opened("b"), reason=ExitReason.USER_ERROR, ended_at=NOW),)
    failed = replace(up("a", readiness=Readiness.FAILED), setup_failed="setup: no")
    ended = snapshot(failed if is_own_fault else gone("a"), state=state(attempts=attempts))
    told, logs = [], []
    records = SimpleNamespace(
        log_end=lambda *_: (0, 0), append_log=lambda attempt, rank, at, piece: logs.append((attempt, piece.data))
    )
    world = SimpleNamespace(job=job(), rules=RULES, jobs=SimpleNamespace(records=records))
    lease = SimpleNamespace(state=ended.state, write=lambda _: None)
    bootstrapper = SimpleNamespace(failed_setup=lambda: ("setup failed twice on a", b"log"))
    parts = {**dict.fromkeys(("inspector", "machine_provisioner")), "closing": CLOSING}
    actor = Actor(
        services=world, lease=lease, bootstrapper=bootstrapper, watcher=SimpleNamespace(story=told.append), **parts
    )
    actor.act(Finish(reason=ExitReason.USER_ERROR), ended, GOAL)

    assert logs == kept
    assert ("setup failed twice on a" in told) == is_own_fault


@pytest.mark.parametrize("error", [ProvisionError("no answer"), StoreError("no answer"), ToolMissing("no answer")])
def test_where_no_machine_answers_a_supervisor_with_another_address_is_let_in_again(error):
    told, asked, refuses, ensured = [], [], [True, False], []
    address = ["203.0.113.9/32"]

    def moved_to():
        asked.append("asked")
        return address.pop() if address else None  # what it is asked for to be let in counts as let in

    def ensure(spec, *, story):
        ensured.append(spec.image)
        if refuses.pop(0):
            raise error

    silent = RULES.limits.silent.total_seconds()
    group = state(attempts=(opened("a"),), group="g", images=((POOL.region, "ami-1"),))
    services = SimpleNamespace(
        job=job(),
        name="small",
        rules=RULES,
        cluster="gpucloud-small",
        public_key="ssh-ed25519 AAAA",
        store=SimpleNamespace(url="s3://b"),
        order=None,
        moved_to=moved_to,
        provisioner=SimpleNamespace(ensure=ensure),
    )
    lease, watcher = SimpleNamespace(state=group, confirm=lambda: None), SimpleNamespace(story=told.append)
    parts = {"services": services, "lease": lease, "watcher": watcher, "bootstrapper": None}
    provisioner = MachineProvisioner(**parts, tracker=None)
    actor = Actor(**parts, machine_provisioner=provisioner, inspector=None, closing=None)

    def look(seconds, node):
        now = NOW + timedelta(seconds=seconds)
        actor.act(Wait(why="no machine answers"), replace(snapshot(node, state=group), now=now), GOAL)
        moved = [line for line in told if "203.0.113.9" in line]
        told.clear()
        return moved, len(asked)

    moved = "this machine's address is 203.0.113.9/32 by now: its SSH is let in from there"
    refused = "203.0.113.9/32, which this machine has by now, could not be let in (tried again): no answer"
    assert look(0, up("a", part(1))) == ([], 0)
    assert look(20, up("a", part(1), silent=silent)) == ([refused], 1)
    assert look(79, up("a", part(1), silent=silent)) == ([], 1)
    assert look(80, up("a", part(1), silent=silent)) == ([moved], 2)
    assert ensured == ["ami-1", "ami-1"]
    assert look(140, up("a", part(1), silent=silent)) == ([], 3)
    assert len(ensured) == 2


@pytest.mark.parametrize(("action", "lets_in"), [(Wait(why="its results come home"), 1), (TearDown(), 0)])
def test_nobody_is_let_in_to_end_machines(action, lets_in):
    asked, done = [], []
    services, provisioner = (
        SimpleNamespace(job=job(), rules=RULES),
        SimpleNamespace(come_back=asked.append, act=done.append),
    )
    ended = state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED, group="g")
    parts = {"lease": SimpleNamespace(state=ended), "watcher": SimpleNamespace(story=lambda _: None)}
    nothing = dict.fromkeys(("bootstrapper", "inspector", "closing"))
    actor = Actor(services=services, machine_provisioner=provisioner, **parts, **nothing)
    actor.act(action, snapshot(up("a", silent=3600.0), state=ended), GOAL)
    assert (len(asked), done) == (lets_in, [action] if isinstance(action, TearDown) else [])


class Stalling:
    """A connection over which a little comes, and then nothing, with no error either; then it comes to life again."""

    def __init__(self):
        self.on_the_way = []

    def bring_home(self, host, code, attempt, moves, paths):
        self.on_the_way.append(moves)
        moves()
        return Brought(paths=("/home/me/outputs/model.pt",), missing=MISSING)

    def note(self, *_):
        pass

    def came(self, *_):
        return None


class Begun:
    """A pool whose work has begun, and does not end before it is told to."""

    def __init__(self):
        self.futures = []

    def submit(self, do, *arguments):
        done = Future()
        self.futures.append((done, lambda: do(*arguments)))
        return done


def test_outputs_of_which_nothing_comes_for_ten_minutes_have_failed_and_that_is_said_once():
    home, told = homecoming(0)
    home.services.outputs, home.pool = Stalling(), Begun()
    one = over(Homecoming.NO)
    home.start(one)
    assert home.stands(one.state, one.group, NOW) is Homecoming.ON_THE_WAY
    home.pool.futures[0][1]()  # some bytes, and the copy still goes on
    later = NOW + timedelta(minutes=8)
    assert home.stands(one.state, one.group, later) is Homecoming.ON_THE_WAY
    assert home.stands(one.state, one.group, later + timedelta(minutes=9)) is Homecoming.ON_THE_WAY
    assert home.busy
    for seconds in (600, 601):
        assert home.stands(one.state, one.group, later + timedelta(seconds=seconds)) is Homecoming.FAILED
    assert not home.busy
    (line,) = [line for line in told if "stand still" in line]
    assert "gpucloud cp -r digits:results/ ." in line
    assert home.stands(one.state, one.group, later + timedelta(minutes=11)) is Homecoming.NO


def ticks(copies, *, minutes, apart=0):
    """Supervise each for so many minutes, one after the other, as a schedule does that ends them; return the last."""
    now, one = NOW, over(Homecoming.NO, wanted_end=ExitReason.STOPPED)
    for home in copies:
        for second in range(0, 60 * minutes + 1, 10):
            at = now + timedelta(seconds=second)
            stands = home.stands(one.state, one.group, at)
            one = replace(one, now=at, homecoming=stands, outputs_still_at=home.still_at)
            one = replace(one, state=transitions.since(one.state, one, 2))
            action = decide(GOAL, one, RULES)
            if isinstance(action, BringHome):
                home.start(one)
        now = at + timedelta(minutes=apart)
    return one, action


def stalling():
    home, told = homecoming(0)
    home.services.outputs, home.pool = Stalling(), Begun()
    return home, told


def test_outputs_that_stand_still_have_failed_though_each_supervisor_looks_for_nine_minutes():
    copies = [stalling() for _ in range(4)]
    one, action = ticks([home for home, _ in copies], minutes=9)
    begun = NOW + timedelta(seconds=10)
    assert one.state.attempts[-1].unbrought_at == begun + timedelta(minutes=10)
    assert [len([line for line in told if "stand still" in line]) for _, told in copies[:2]] == [0, 1]
    assert isinstance(action, CloseAttempt)


def test_what_stood_still_for_a_supervisor_of_long_ago_is_brought_by_the_next_one():
    one, action = ticks([stalling()[0], stalling()[0]], minutes=9, apart=11)
    assert one.state.attempts[-1].unbrought_at is None
    assert isinstance(action, Wait)


def test_what_comes_for_the_next_supervisor_stands_still_no_longer():
    first, (second, told) = stalling()[0], stalling()

    def begun(do, *arguments):
        at_work = Begun.submit(second.pool, do, *arguments)
        second.pool.futures[-1][1]()
        return at_work

    second.pool.submit = begun
    ticks([first, second], minutes=9)
    assert not [line for line in told if "stand still" in line]


def test_a_copy_that_comes_to_life_beside_the_next_try_ends():
    home, _ = homecoming(0)
    home.services.outputs, home.pool = Stalling(), Begun()
    one = over(Homecoming.NO)
    home.start(one)
    home.pool.futures[0][1]()
    home.stands(one.state, one.group, NOW)
    home.stands(one.state, one.group, NOW + timedelta(minutes=10))
    home.start(one)
    with pytest.raises(NodeError, match="another try"):
        home.services.outputs.on_the_way[0]()
    home.pool.futures[1][1]()


def test_a_shut_off_that_somebody_removed_is_armed_anew_by_whoever_may():
    working = [up(i, part(1)) for i in "ab"]
    bare = snapshot(*working, state=state(attempts=(opened("a", "b"),)), armed=None)
    assert decide(GOAL, bare, RULES) == Arm(until=LATER)
    assert decide(GOAL, replace(bare, payable_until=None, lasts_until=NOW + timedelta(minutes=2)), RULES) == Arm(
        until=NOW + timedelta(minutes=2)
    )
    assert decide(replace(GOAL, self_driving=True), bare, RULES) == Wait(why="running")
    ended = over(Homecoming.ON_THE_WAY, armed=None)
    assert decide(GOAL, ended, RULES) == Arm(until=LATER)


def test_outputs_wait_for_a_node_that_is_being_prepared_and_come_as_soon_as_it_is():
    """At a take-over when the script is done: a try before would fail, and the next one be half a minute away."""
    home, _ = homecoming(0)
    one = over(Homecoming.NO)
    home.bootstrapper.readiness = lambda _: Readiness.PREPARING
    assert home.stands(one.state, one.group, NOW) is Homecoming.ON_THE_WAY
    home.bootstrapper.readiness = lambda _: Readiness.READY
    assert home.stands(one.state, one.group, NOW) is Homecoming.NO


@pytest.mark.parametrize(("tree", "looked_in"), [("a" * 64, f"~/.gpucloud/code/{'a' * 64}"), ("", None)])
def test_outputs_of_a_machine_that_nobody_prepares_again_are_brought_all_the_same(tree, looked_in):
    """One with a notice, or relieved, after a take-over: there is no time to wait for what does not come."""
    home, _ = homecoming(0)
    asked = []
    home.services.outputs = bringing(lambda host, code, attempt, moves, paths: asked.append(code) or Brought())
    home.bootstrapper.code_on = lambda _: None
    one = over(Homecoming.NO)
    attempt = replace(one.state.attempts[-1], tree=tree)
    home.start(replace(one, state=replace(one.state, attempts=(attempt,))))

    assert asked == ([looked_in] if looked_in else [])
    assert home.stands(one.state, one.group, NOW) is (Homecoming.DONE if looked_in else Homecoming.FAILED)


# Ranks that no signal reaches


def outlived(reason, seconds, *nodes):
    """Both were ordered to be killed so long ago, and these are what is seen of them."""
    since = NOW - timedelta(seconds=seconds)
    attempt = opened("a", "b", ending_reason=reason, ending_at=since, ordered=Stop.KILL, killed_at=since)
    return world(*nodes, attempt=attempt)


@pytest.mark.parametrize("reason", [reason for reason in ExitReason if reason.retried])
def test_machines_whose_ranks_outlive_their_end_are_ended_themselves(reason):
    nodes = (up("a", part(1, step=30)), up("b", part(1, Outcome.KILLED)))
    assert not isinstance(decide(GOAL, outlived(reason, 119, *nodes), RULES), Replace)
    assert decide(GOAL, outlived(reason, 120, *nodes), RULES) == Replace(node_ids=("a",))


def test_silence_is_no_sign_that_ranks_outlive_their_end():
    nodes = [up(i, part(1, step=30), silent=60.0) for i in "ab"]
    assert decide(GOAL, outlived(ExitReason.LOST, 400, *nodes), RULES) == Wait(why="no machine answers")


def test_an_end_counts_from_the_first_order_to_kill():
    kill = EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)
    before = state(attempts=(opened("a", "b"),))
    saving = transitions.order_end(before, replace(kill, how=Stop.SAVE), NOW)
    assert saving.attempts[-1].killed_at is None
    killed = transitions.order_end(saving, kill, NOW + timedelta(hours=6))
    again = transitions.order_end(killed, replace(kill, reason=ExitReason.STOPPED), NOW + timedelta(hours=7))
    assert again.attempts[-1].killed_at == killed.attempts[-1].killed_at == NOW + timedelta(hours=6)


def interrupted_at(node_id, *attempts):
    """Attempts of which the last is open, and that machine has a notice."""
    noticed = Interruption(node_id=node_id, kind=InterruptionKind.NOTICE, attempt=len(attempts), noticed_at=NOW)
    nodes = [up(i, part(1, Outcome.LEFT)) for i in "ab"]
    return snapshot(*nodes, state=state(attempts=attempts, interruptions=(noticed,)), homecoming=Homecoming.NO)


@pytest.mark.parametrize(
    ("world", "whose"),
    [
        (interrupted_at("a", opened("a", "b")), "attempt 1"),
        (interrupted_at("b", opened("a", "b")), None),  # the next attempt goes on beside what this one wrote
        (
            interrupted_at(
                "a",
                replace(opened("a", "b"), reason=ExitReason.INTERRUPTED),
                replace(opened("a", "b"), number=2),
            ),
            "attempts 1 to 2",
        ),
        (
            interrupted_at(
                "a", replace(opened("a", "b"), reason=ExitReason.STOPPED), replace(opened("a", "b"), number=2)
            ),
            "attempt 2",
        ),
    ],
)
def test_outputs_of_an_attempt_go_with_the_machine_of_its_rank_0_and_that_is_said(world, whose):
    home, told = homecoming(0)
    unheard = replace(world, nodes=tuple(replace(node, silent_for=timedelta(seconds=9)) for node in world.nodes))
    brought = home.brought(ExitReason.INTERRUPTED, unheard)
    why = f"of {whose} did not come home: whatever was written there goes with a, the machine of rank 0"
    assert [one.why for one in brought.missing] == ([why] if whose else [])
    assert told == ([f"outputs: results/ {why}"] if whose else [])


@pytest.mark.parametrize(("node_id", "tree", "lost"), [("a", "", 0), ("b", "", 1), ("a", "other", 1)])
def test_outputs_that_the_next_attempt_does_not_run_beside_are_said_to_be_lost_once(node_id, tree, lost):
    home, told = homecoming(0)
    closing = Closing(services=home.services, home=home, logs=None, history=None, watcher=None)
    before = state(attempts=(replace(opened("a", "b"), reason=ExitReason.RESCHEDULED),))
    after = closing.move_on(before, node_id, tree)
    assert (len(after.missing_outputs), len(told)) == (lost, lost)
    assert closing.move_on(after, node_id, tree) == after
    assert len(told) == lost


def test_what_is_lost_for_good_counts_whatever_a_later_attempt_brings_home():
    lost = MissingOutput(path="results/", why="gone", attempt=1)
    not_there = MissingOutput(path="metrics/", why="is not there")
    first = replace(opened("a"), reason=ExitReason.INTERRUPTED, missing_outputs=(lost, not_there))
    assert state(attempts=(first, replace(opened("b"), number=2))).missing_outputs == (lost,)


class LaterPool:
    """Does nothing before it is told to."""

    def __init__(self):
        self.works = []

    def submit(self, work, *given):
        self.works.append((future := Future(), work, given))
        return future

    def do(self, number=0):
        future, work, given = self.works[number]
        try:
            future.set_result(work(*given))
        except NodeError as error:
            future.set_exception(error)


def rescuing(fails=0):
    """The outputs of an attempt that a notice ended, on their way; and its state, as it is closed."""
    home, told = homecoming(fails)
    home.pool = LaterPool()
    home.services.stored_outputs = None
    world = interrupted_at("a", replace(opened("a", "b"), tree="t" * 64))
    brought = home.brought(ExitReason.INTERRUPTED, world)
    closed = replace(world.state.attempts[-1], reason=ExitReason.INTERRUPTED, missing_outputs=brought.missing)
    return home, told, replace(world.state, attempts=(closed,))


LOST = "outputs: results/ of attempt 1 did not come home: whatever was written there goes with a, the machine of rank 0"


ON_THE_WAY = "outputs: results/ of attempt 1 is being brought from a"


def shown(known, supervised):
    return [missing_line(one) for one in missing_outputs(known, supervised=supervised)]


def test_outputs_of_a_machine_with_a_notice_are_brought_beside_what_follows_and_are_on_their_way_until_they_are_there():
    home, told, closed = rescuing()
    assert [missing_line(one) for one in closed.missing_outputs] == [LOST]
    coming = home.with_rescued(closed)
    assert (shown(coming, True), shown(coming, False)) == ([ON_THE_WAY], [LOST])  # nobody else goes on with it
    assert homecoming(0)[0].with_rescued(coming) == closed
    home.pool.do()
    assert [one.missing_outputs for one in home.with_rescued(coming).attempts] == [MISSING]
    assert shown(home.with_rescued(coming), True) == [missing_line(one) for one in MISSING]
    again = replace(closed, attempts=(*closed.attempts, replace(opened("b"), number=2)))
    again = home.with_rescued(again)  # as often as it takes to be written down
    assert again.missing_outputs == ()
    closing = Closing(services=home.services, home=home, logs=None, history=None, watcher=None)
    came = replace(again, attempts=again.attempts[:1])
    assert closing.move_on(came, "b", "") == came
    assert transitions.left_behind(came, ("results/",)) == came
    assert told == [
        "bringing home what attempt 1 wrote, before a goes",
        "brought home: /home/me/outputs/model.pt",
        "outputs: results/ is not there; nearest: result",
    ]


def test_outputs_that_do_not_come_before_their_machine_goes_are_told_to_be_lost_once():
    home, told, closed = rescuing(fails=1)
    coming = home.with_rescued(closed)
    home.pool.do()
    assert home.with_rescued(home.with_rescued(coming)) == closed
    assert shown(home.with_rescued(coming), True) == [LOST]
    assert told[1:] == ["the outputs could not be brought home: a: connection reset", LOST]


def test_outputs_of_a_machine_that_goes_make_way_for_those_of_the_next_attempt():
    home, told, closed = rescuing()
    attempt = replace(opened("b"), number=2)
    home.start(snapshot(up("b", part(2, Outcome.DONE)), state=replace(closed, attempts=(*closed.attempts, attempt))))
    assert told[1:] == [LOST]
    moved = home.services.outputs.bring_home
    home.services.outputs.bring_home = lambda host, code, attempt, moves, paths: (
        moves() or moved(host, code, attempt, moves, paths)
    )
    home.pool.do(0)
    assert told[2:] == ["the outputs could not be brought home: a: another try brings the outputs"] or told[2:] == []
    home.pool.do(1)
    assert home.stands(replace(closed, attempts=(*closed.attempts, attempt)), NO_GROUP, NOW) is Homecoming.DONE
    assert home.with_rescued(closed) == closed


def test_what_comes_of_an_attempt_before_is_waited_for_when_the_next_one_is_over_at_once():
    """It was given up, and told as lost, while its machine was up, paid and sending."""
    home, told, closed = rescuing()
    both = replace(closed, attempts=(*closed.attempts, replace(opened("b"), number=2)))
    there = snapshot(up("a"), up("b", part(2, Outcome.FAILED)), state=both)
    away = replace(there.group, nodes=(gone("a").node, there.group.nodes[1]))
    assert home.stands(both, there.group, NOW) is Homecoming.ON_THE_WAY
    assert home.stands(both, away, NOW) is Homecoming.NO
    home.pool.do()
    assert home.stands(both, there.group, NOW) is Homecoming.NO
    home.start(there)
    assert [one.missing_outputs for one in home.with_rescued(both).attempts] == [MISSING, ()]
    assert LOST not in told


def test_what_stands_still_of_an_attempt_before_holds_nobody_up():
    home, told, closed = rescuing()
    home._rescue = replace(home._rescue, until=None)
    both = replace(closed, attempts=(*closed.attempts, replace(opened("b"), number=2)))
    there = snapshot(up("a"), up("b", part(2, Outcome.FAILED)), state=both)
    assert home.stands(both, there.group, NOW) is Homecoming.ON_THE_WAY
    assert home.stands(both, there.group, NOW + timedelta(minutes=10)) is Homecoming.NO
    assert told[-1] == LOST


def test_outputs_that_came_a_moment_before_they_would_be_given_up_have_come():
    home, told, closed = rescuing()
    home.pool.do()
    home.give_up()
    assert [one.missing_outputs for one in home.with_rescued(closed).attempts] == [MISSING]
    assert LOST not in told


def test_the_end_of_an_attempt_that_is_made_once_more_brings_its_outputs_once():
    home, told, closed = rescuing()
    world = interrupted_at("a", replace(opened("a", "b"), tree="t" * 64))
    assert home.brought(ExitReason.INTERRUPTED, world).missing == closed.missing_outputs
    home.pool.do()
    assert home.brought(ExitReason.INTERRUPTED, world).missing == closed.missing_outputs
    assert len(home.pool.works) == 1
    assert told.count("bringing home what attempt 1 wrote, before a goes") == 1
    assert LOST not in told


def test_where_rank_0_starts_on_the_machine_that_was_to_go_its_next_attempt_brings_what_was_written_there():
    home, told, closed = rescuing()
    closing = Closing(services=home.services, home=home, logs=None, history=None, watcher=None)
    stays = closing.move_on(closed, "a", "t" * 64)
    assert stays.attempts[-1].missing_outputs == ()
    home.pool.do()
    assert home.with_rescued(stays) == stays
    assert LOST not in told


# Results of an attempt that no other follows after all


OWN = Pool(instance_type="host", zone="ssh", market=Market.OWNED)
TREE = "c" * 64
LIES = (
    "outputs: results/ of attempt 1 did not come home: whatever was written there lies on me@127.0.0.10:2222, in"
    f" ~/.gpucloud/jobs/d/h/code/{TREE}"
)


def host(node_id="h-1", *, remains=True, **changes):
    """A host of the user's own whose time is over."""
    changes = {"pool": OWN, "root": ".gpucloud/jobs/d/h", "state": NodeState.TERMINATED, **changes}
    return NodeSnapshot(node=node(node_id, end_cause=EndCause.SCHEDULE, remains=remains, **changes))


def unbrought(node_snapshot, *, fails=0, **changes):
    """A job that was stopped after an attempt that others were to follow; nothing came home of that."""
    home, told = homecoming(fails)
    home.services.stored_outputs, home.pool = None, LaterPool()
    home.bootstrapper = Prepared(node_snapshot.node)
    home.bootstrapper.code_on = lambda _: None
    last = replace(opened(node_snapshot.node.id, tree=TREE), reason=ExitReason.LOST)
    open_state = state(pool=node_snapshot.node.pool, attempts=(last,), **changes)
    ended = transitions.finish(open_state, Finish(reason=ExitReason.STOPPED), NOW)
    return home, told, snapshot(node_snapshot, state=transitions.left_behind(ended, ("results/",)))


@pytest.mark.parametrize("where", [host(), up("a"), host(state=NodeState.RUNNING, remains=False)])
def test_outputs_that_were_to_come_with_a_next_attempt_come_before_their_machine_ends(where):
    home, told, world = unbrought(where)
    assert world.state.missing_outputs
    assert home.stands(world.state, world.group, NOW) is Homecoming.NO
    home.start(world)
    assert home.stands(world.state, world.group, NOW) is Homecoming.ON_THE_WAY
    home.pool.do()
    after = home.with_rescued(world.state)
    assert (after.missing_outputs, after.attempts[-1].outputs_came) == (MISSING, True)
    assert home.stands(after, world.group, NOW) is Homecoming.DONE
    assert left_on_hosts(after) == ()
    assert told[:2] == [
        f"bringing home what attempt 1 wrote on {where.node.id}",
        "brought home: /home/me/outputs/model.pt",
    ]


def test_outputs_that_do_not_come_from_a_host_of_the_users_own_stay_there_and_it_is_said_where():
    home, told, world = unbrought(host(), fails=1)
    home.start(world)
    home.pool.do()
    after = home.with_rescued(world.state)
    assert told[1:] == ["the outputs could not be brought home: a: connection reset", LIES]
    assert [missing_line(one) for one in after.missing_outputs] == [LIES]
    assert home.stands(after, world.group, NOW) is Homecoming.DONE
    assert left_on_hosts(after) == (("h-1", f"code/{TREE}"),)
    assert left_on_hosts(replace(after, pool=world.state.pool, attempts=())) == ()


@pytest.mark.parametrize(("fails", "missing"), [(0, list(map(missing_line, MISSING))), (1, [LOST])])
def test_results_of_a_driven_job_count_as_lost_until_they_are_in_its_store(fails, missing):
    home, _, world = unbrought(up("a"), fails=fails)
    home.services.on_machine = True
    waiting = replace(world.state, attempts=(replace(world.state.attempts[-1], missing_outputs=()),))
    waiting = replace(waiting, status=JobStatus.WAITING, exit_reason=None, ended_at=None, drives_itself=True)
    lease = SimpleNamespace(state=waiting)
    lease.write = lambda new: setattr(lease, "state", new)
    drives = replace(GOAL, self_driving=True)
    parts = {**dict.fromkeys(("bootstrapper", "inspector", "machine_provisioner")), "lease": lease}
    services = SimpleNamespace(job=job(outputs=("results/",)), rules=RULES)
    parts |= {"services": services, "closing": SimpleNamespace(home=home), "watcher": SimpleNamespace(story=print)}

    def tick():
        seen = home.with_rescued(lease.state)
        at_end = replace(world, state=seen, group=replace(world.group, armed_until=NOW + timedelta(seconds=50)))
        at_end = replace(at_end, homecoming=home.stands(seen, world.group, NOW))
        lease.state = transitions.record(at_end)
        at_end = replace(at_end, state=lease.state)
        Actor(**parts).act(decide(drives, at_end, RULES), at_end, drives)
        return lease.state.message, [missing_line(one) for one in lease.state.missing_outputs]

    over = "unattended time is over; `gpucloud train digits` or `reconcile` goes on"
    assert [tick(), tick()] == [(over, [LOST])] * 2
    home.pool.do()
    kept = "; its results so far are in its store, and come home when it ends" if not fails else ""
    assert tick() == (f"{over}{kept}", missing)


def over_again(home, world, minutes):
    """How far the outputs are so many minutes after NOW, and what is done."""
    at = NOW + timedelta(minutes=minutes)
    state = home.with_rescued(world.state)
    stands = home.stands(state, world.group, at)
    return stands, decide(GOAL, replace(world, state=state, now=at, homecoming=stands), RULES)


@pytest.mark.parametrize(
    ("where", "until", "lies"),
    [
        (host(), "", LIES),
        (up("a"), ", and no later than 12:30:00 UTC, when the machines shut themselves off", LOST),
    ],
)
def test_an_end_waits_for_outputs_while_they_come_and_not_for_those_that_stand_still(where, until, lies):
    home, told, world = unbrought(where)
    home.services.outputs, home.pool = Stalling(), Begun()
    why = "waiting for the outputs while they come, no longer than 10 min without any of them"
    wait = Wait(why=f"{why}{until}")
    announcements = Announcements()
    assert [announcements.news(wait, world, RULES.limits) for _ in range(2)] == [(wait.why,), ()]
    home.start(world)
    assert over_again(home, world, 0) == (Homecoming.ON_THE_WAY, wait)
    home.pool.futures[0][1]()
    assert over_again(home, world, 9) == (Homecoming.ON_THE_WAY, wait)
    assert over_again(home, world, 18) == (Homecoming.ON_THE_WAY, wait)
    assert over_again(home, world, 19) == (Homecoming.DONE, TearDown())
    assert told[-1] == lies
    after = home.with_rescued(world.state)
    assert left_on_hosts(after) == ((("h-1", f"code/{TREE}"),) if lies == LIES else ())
    with pytest.raises(NodeError, match="another try"):
        home.services.outputs.on_the_way[0]()


def test_a_pass_over_all_jobs_does_not_wait_for_outputs_of_an_earlier_attempt_that_stand_still():
    home, told, world = unbrought(host())
    home.pool = Begun()
    home.start(world)
    on = state(pool=OWN, attempts=(*world.state.attempts, replace(opened("h-2"), number=2)))
    home.stands(on, world.group, NOW)
    assert (home.busy, home.still_at) == (True, None)
    home.stands(on, world.group, NOW + timedelta(minutes=10))
    assert not home.busy
    assert told[-1] == LIES


def refuse(home):
    def bring_home(*_):
        raise LandingRefused("'A' and 'a' are one name here")

    home.services.outputs = bringing(bring_home)


REFUSED = f"{LIES}; it was refused here: 'A' and 'a' are one name here"


def test_outputs_of_an_earlier_attempt_that_are_refused_here_stay_on_their_host():
    home, told, world = unbrought(host())
    refuse(home)
    home.start(world)
    home.pool.do()
    after = home.with_rescued(world.state)
    assert home.stands(after, world.group, NOW) is Homecoming.DONE
    assert told[1:] == ["the outputs could not be brought home: 'A' and 'a' are one name here", REFUSED]
    assert [missing_line(one) for one in after.missing_outputs] == [REFUSED]
    assert left_on_hosts(after) == (("h-1", f"code/{TREE}"),)


def test_outputs_of_the_last_attempt_that_are_refused_here_stay_on_their_host_and_are_asked_for_once():
    where = host(state=NodeState.RUNNING, remains=False)
    home, told, world = unbrought(where)
    home.services.stored_outputs, home.pool = Outputs(0), InlinePool()
    refuse(home)
    running = replace(world.state.attempts[-1], reason=None)
    world = replace(world, state=state(pool=OWN, attempts=(running,)))
    home.start(world)
    assert home.stands(world.state, world.group, NOW) is Homecoming.DONE
    missing = home.brought(ExitReason.SUCCEEDED, world).missing
    assert [missing_line(one) for one in missing] == [REFUSED]
    assert told[-1] == REFUSED
    closed = transitions.close_attempt(world.state, CloseAttempt(reason=ExitReason.SUCCEEDED), NOW, missing)
    assert home.stands(closed, world.group, NOW) is Homecoming.DONE
    assert left_on_hosts(closed) == (("h-1", f"code/{TREE}"),)


@pytest.mark.parametrize("where", [gone("a"), host(remains=False)])
def test_outputs_are_not_asked_for_where_nobody_can_answer(where):
    home, _, world = unbrought(where)
    assert home.stands(world.state, world.group, NOW) is Homecoming.DONE


def test_a_host_that_did_not_answer_at_the_end_of_its_job_is_asked_again_by_the_next_command():
    for pool, again in ((OWN, Homecoming.NO), (POOL, Homecoming.DONE)):
        home, _, world = unbrought(host(pool=pool))
        lost = MissingOutput(path="results/", why="gone", attempt=1)
        last = replace(world.state.attempts[-1], reason=ExitReason.STOPPED, missing_outputs=(lost,))
        assert home.stands(replace(world.state, attempts=(last,)), world.group, NOW) is again


@pytest.mark.parametrize(
    ("node_id", "tree", "story"),
    [("h-2", TREE, []), ("h-2", "d" * 64, ["h-1"]), ("other-2", TREE, ["h-1"])],
)
def test_outputs_on_a_host_whose_time_was_over_wait_there_or_come_beside_the_next_attempt(node_id, tree, story):
    home, told, world = unbrought(host())
    again = host("h-2", state=NodeState.RUNNING, remains=False), host("other-2", root=".gpucloud/jobs/d/other")
    home.bootstrapper._nodes |= {one.node.id: one.node for one in again}
    closing = Closing(services=home.services, home=home, logs=None, history=None, watcher=None)
    waiting = replace(world.state, attempts=(replace(world.state.attempts[0], missing_outputs=()),))
    after = closing.move_on(waiting, node_id, tree)
    assert told == [f"bringing home what attempt 1 wrote on {one}" for one in story]
    assert [missing_line(one) for one in after.missing_outputs] == [LIES] * len(story)


def test_the_end_of_a_job_waits_for_what_comes_from_a_machine_with_a_notice_until_that_is_gone():
    home, told, closed = rescuing()
    ended = transitions.finish(closed, Finish(reason=ExitReason.STOPPED), NOW)
    leaves = snapshot(up("a", notice=True), up("b"), state=ended)
    assert home.stands(ended, leaves.group, NOW) is Homecoming.ON_THE_WAY
    assert home.stands(ended, snapshot(gone("a"), up("b")).group, NOW) is Homecoming.DONE
    assert told[1:] == [LOST]


def test_one_pass_waits_for_what_comes_from_a_machine_with_a_notice_no_longer_than_that_can_live():
    home, _, _ = rescuing()
    assert home.busy
    home.services.clock = SimpleNamespace(now=lambda: NOW + timedelta(minutes=3))
    assert not home.busy


def test_a_pause_is_in_the_books_with_what_its_machines_may_take_with_them():
    job = state(attempts=(opened("a"), replace(opened("b"), number=2)))
    lost = (MissingOutput(path="results/", why="its machine may go"),)
    assert transitions.pause(job, "why") == replace(job, message="why")
    paused = transitions.pause(job, "why", lost)
    assert (paused.message, [one.missing_outputs for one in paused.attempts]) == ("why", [(), lost])
