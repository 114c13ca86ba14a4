"""What happens to a job is told by its states, stored once whatever a store does, and read by whoever comes."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

import gpucloud
from gpucloud.domain import codec
from gpucloud.domain.checkpoint.manifest import Counts, Why
from gpucloud.domain.errors import CredentialsError, LeaseHeld, StoreError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, Fault
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.event import MOST_PENDING, MOST_PENDING_BYTES, Event, EventKind, event_json, in_order
from gpucloud.domain.state.state import (
    Attempt,
    CapacityDecision,
    CheckpointRef,
    Cooldown,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobState,
    JobStatus,
    Member,
    Quarantine,
    Shortfall,
    UsageInterval,
)
from gpucloud.domain.supervision import happened as happened_module
from gpucloud.domain.supervision.happened import happened, submitted, with_budget_reached
from gpucloud.domain.supervision.transitions import reopen
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore import events as events_module
from gpucloud.usecases.jobstore import lease as lease_module
from gpucloud.usecases.jobstore.events import EventLog, Outbox, told
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import StoreClock, take
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW

POOL = Pool(instance_type="p5.48xlarge", zone="us-east-2a", market=Market.SPOT)
ANOTHER = replace(POOL, zone="us-east-2b")
BARE = JobState(job="job", pool=POOL, cap_usd_per_hour=Decimal(12))


def later(seconds):
    return NOW + timedelta(seconds=seconds)


def attempt(number=1, *nodes, **told):
    members = tuple(Member(node_id=node_id, rank=rank) for rank, node_id in enumerate(nodes or ("i-1",)))
    return Attempt(**{"number": number, "members": members, "port": 1, "started_at": NOW, **told})


def machine(node_id, **told):
    return UsageInterval(**{"node_id": node_id, "pool": POOL, "launched_at": NOW, **told})


def taken(node_id, number=1, **told):
    kind = told.pop("kind", InterruptionKind.NOTICE)
    return Interruption(node_id=node_id, kind=kind, attempt=number, noticed_at=NOW, **told)


def cooldown(pool=POOL, **told):
    fields = {"first_at": NOW, "until": later(60), "tries": 1, "fault": Fault.CAPACITY, "code": "NoCapacity"}
    return Cooldown(pool=pool, message="there is none", **{**fields, **told})


def decision(**told):
    return CapacityDecision(**{"mode": "spot", "since": NOW, "why": "it is cheaper", **told})


SAVED = CheckpointRef(step=20, sha256="0" * 64)
RUNNING = replace(BARE, attempts=(attempt(first_step=1, last_step=24, stepped_at=NOW),), checkpoint=SAVED)

# A name, the state before and after, and of each event its name and what it says.
TOLD = (
    ("nothing", RUNNING, RUNNING, []),
    ("a step", RUNNING, replace(RUNNING, attempts=(replace(RUNNING.attempts[0], last_step=25),)), []),
    ("another pool", BARE, replace(BARE, pool=ANOTHER), [
        ("planned.20260301t120100-p5.48xlarge-spot-in-us-east-2b",
         "p5.48xlarge spot in us-east-2b, at most 12.00 USD an hour each"),
    ]),
    ("machines", BARE, replace(BARE, nodes=(machine("i-1"), machine("i-2"))), [
        ("machines.i-1", "i-1, i-2 came: p5.48xlarge spot in us-east-2a"),
    ]),
    ("six machines", BARE, replace(BARE, nodes=tuple(machine(f"i-{n}") for n in range(6))), [
        ("machines.i-0", "i-0, i-1, i-2, i-3 and 2 machines more came: p5.48xlarge spot in us-east-2a"),
    ]),
    ("ends of two causes", replace(BARE, nodes=(machine("i-1"), machine("i-2"))), replace(BARE, nodes=(
        machine("i-1", ended_at=later(9), end_cause=EndCause.INTERRUPTED),
        machine("i-2", ended_at=later(9), end_cause=EndCause.CHOICE),
    )), [
        ("machines_ended.i-2", "i-2 ended by gpucloud"),
        ("machines_ended.i-1", "i-1 ended, taken by the cloud"),
    ]),
    ("a quarantine", BARE, replace(BARE, quarantined=(Quarantine(node_id="i-1", why="its GPU 3 fell off", at=NOW),)), [
        ("unhealthy.i-1", "i-1 takes no part any more: its GPU 3 fell off"),
    ]),
    ("one given up", replace(BARE, nodes=(machine("i-1"),)), replace(BARE, nodes=(machine("i-1", given_up="slow"),)), [
        ("unhealthy.i-1", "i-1 is given up: slow"),
    ]),
    ("an attempt", BARE, replace(BARE, attempts=(attempt(),)), [("attempt.1", "attempt 1 begins on i-1")]),
    ("a first step", replace(BARE, nodes=(machine("i-1", launched_at=later(-90)),), attempts=(attempt(),)),
     replace(BARE, nodes=(machine("i-1", launched_at=later(-90)),),
             attempts=(attempt(first_step=1, last_step=1, stepped_at=later(30)),)), [
        ("started.1", "step 1 is made after 2 min: preparation 1 min 30 s, first step 30 s"),
        ("milestone.step-1", "step 1"),
    ]),
    ("a notice to two", RUNNING, replace(RUNNING, interruptions=(taken("i-1"), taken("i-2"))), [
        ("interrupted.1-i-1", "i-1, i-2 have a notice of their interruption at step 24, step 20 is saved"),
    ]),
    ("one beside an attempt", BARE, replace(BARE, interruptions=(taken("i-9", None, kind=InterruptionKind.LOST),)), [
        ("interrupted.1-i-9", "i-9 is gone without notice, with no part in an attempt"),
    ]),
    ("a hang", RUNNING, replace(RUNNING, message="no step for 2 min", attempts=(
        replace(RUNNING.attempts[0], ending_reason=ExitReason.HUNG, ending_at=later(5)),
    )), [("hung.1", "attempt 1 makes no step any more at step 24: no step for 2 min")]),
    ("idle GPUs", RUNNING, replace(RUNNING, attempts=(replace(RUNNING.attempts[0], ending_reason=ExitReason.IDLE),)), [
        ("idle.1", "attempt 1 uses its GPUs too little at step 24"),
    ]),
    ("an end after an order to end", replace(RUNNING, attempts=(
        replace(RUNNING.attempts[0], ending_reason=ExitReason.HUNG),
    )), replace(RUNNING, attempts=(
        replace(RUNNING.attempts[0], ending_reason=ExitReason.HUNG, reason=ExitReason.HUNG, ended_at=later(9)),
    )), [("attempt_ended.1", "attempt 1 ended at step 24: hung, step 20 is saved")]),
    ("a refusal", BARE, replace(BARE, cooldowns=(cooldown(),)), [
        ("waiting.20260301t120000-p5.48xlarge-spot-in-us-east-2a",
         "p5.48xlarge spot in us-east-2a refused: there is none (NoCapacity)"),
    ]),
    ("the same refusal", replace(BARE, cooldowns=(cooldown(),)), replace(BARE, cooldowns=(cooldown(tries=2),)), []),
    ("no machine for a minute", replace(BARE, bare_at=NOW, looked_at=later(59)),
     replace(BARE, bare_at=NOW, looked_at=later(60)), [
        ("waiting.20260301t120000-no-machine", "p5.48xlarge spot in us-east-2a gives no machine for 1 min"),
    ]),
    ("still none", replace(BARE, bare_at=NOW, looked_at=later(60)), replace(BARE, bare_at=NOW, looked_at=later(9e3)),
     []),
    ("a wait for less", replace(BARE, capacity_decision=decision()),
     replace(BARE, capacity_decision=decision(mode="idle", why="spot is dear now")), [
        ("waiting.20260301t120000", "spot is dear now"),
    ]),
    ("a deadline at risk", replace(BARE, capacity_decision=decision()), replace(BARE, capacity_decision=decision(
        shortfall=Shortfall.TIME, warning="it will be 2 h late"
    )), [("deadline.0", "it will be 2 h late")]),
    ("another deadline at risk", replace(BARE, capacity_decision=decision()), replace(BARE, capacity_decision=decision(
        shortfall=Shortfall.TIME, warning="it will be 9 h late", deadline_at=later(3600)
    )), [("deadline.0-of-20260301t130000", "it will be 9 h late")]),
    ("a first checkpoint", replace(RUNNING, checkpoint=None), RUNNING, [
        ("checkpoint.1-first", "the checkpoint of step 20 is saved, as was due"),
    ]),
    ("the next one", RUNNING, replace(RUNNING, checkpoint=replace(SAVED, step=22)), []),
    ("one for a notice", RUNNING, replace(RUNNING, checkpoint=replace(SAVED, step=24, why=Why.NOTICE)), [
        ("checkpoint.1-24", "the checkpoint of step 24 is saved, for a machine is to be interrupted"),
    ]),
    ("half of a budget", replace(BARE, budget_mark_of=Decimal(40)),
     replace(BARE, budget_mark=50, budget_mark_of=Decimal(40)), [
        ("budget.50-of-40", "50 % of 40.00 USD are spent"),
    ]),
    ("a raised budget", replace(BARE, budget_mark=80, budget_mark_of=Decimal(40)),
     replace(BARE, budget_mark=50, budget_mark_of=Decimal(60)), [
        ("budget.50-of-60", "50 % of 60.00 USD are spent"),
    ]),
    ("an end at the budget", replace(RUNNING, budget_mark=80, budget_mark_of=Decimal(40)),
     replace(RUNNING, budget_mark=80, budget_mark_of=Decimal(40), attempts=(
         replace(RUNNING.attempts[0], ending_reason=ExitReason.BUDGET),
     )), [("budget.100-of-40", "the budget of 40.00 USD pays for no more")]),
    ("the end", BARE, replace(
        BARE, status=JobStatus.FAILED, exit_reason=ExitReason.USER_ERROR, exit_code=20, ended_at=later(7), message="No!"
    ), [("ended.20260301t120007", "failed (user_error): No!")]),
)  # fmt: skip


@pytest.mark.parametrize(("before", "after", "wanted"), [case[1:] for case in TOLD], ids=[case[0] for case in TOLD])
def test_what_is_told_between_two_states(before, after, wanted):
    found = happened(before, after, later(60))

    assert [(one.name, one.shown) for one in found] == wanted
    assert happened(after, after, later(61)) == ()
    assert all(one.job == "job" and one.about is not None for one in map(_kind_of, found))


def _kind_of(event):
    class Named:
        job, about = event.job, EventKind(event.kind).about

    return Named


def test_a_job_begins_with_what_was_ordered_and_what_it_is_to_run_on():
    assert [one.kind for one in submitted(BARE, NOW).pending_events] == ["submitted", "planned"]


def test_a_run_that_goes_on_after_its_end_is_told_again_and_so_is_its_next_end():
    ended = replace(BARE, status=JobStatus.STOPPED, ended_at=NOW)
    again = happened(ended, reopen(ended), later(5))
    end = happened(reopen(ended), replace(ended, ended_at=later(9)), later(9))

    assert [one.kind for one in again] == ["submitted", "planned"]
    assert [one.name for one in end] == ["ended.20260301t120009"] != [one.name for one in happened(BARE, ended, NOW)]


def test_an_interruption_says_at_which_step_and_its_end_how_long_there_was_none():
    before = replace(RUNNING, interruptions=(taken("i-1", stopped_at=later(2)),), attempts=(
        replace(RUNNING.attempts[0], reason=ExitReason.INTERRUPTED, ended_at=later(3)), attempt(2, "i-2")
    ))  # fmt: skip
    resumed = replace(before.interruptions[0], resumed_at=later(95))
    stepped = attempt(2, "i-2", first_step=21, last_step=21, stepped_at=later(95))
    after = replace(before, interruptions=(resumed,), attempts=(before.attempts[0], stepped))

    (interrupted,) = happened(RUNNING, replace(RUNNING, interruptions=before.interruptions), NOW)
    found = {one.kind: one for one in happened(before, after, later(95))}

    assert (interrupted.step, interrupted.saved, interrupted.reason) == (24, 20, "notice")
    again = found["resumed"]
    assert (again.attempt, again.step, again.seconds, again.nodes) == (2, 21, 93.0, ("i-1",))
    assert again.message == "training goes on with step 21, 1 min 33 s after it stopped"


def test_an_interruption_of_an_attempt_that_went_on_unheard_names_the_save_alone():
    saved = replace(RUNNING, checkpoint=replace(RUNNING.checkpoint, step=67))
    (interrupted,) = happened(saved, replace(saved, interruptions=(taken("i-1", stopped_at=later(2)),)), NOW)
    assert (interrupted.step, interrupted.saved) == (None, 67)
    assert interrupted.message.endswith("a notice of its interruption, step 67 is saved")


def test_a_milestone_of_a_step_that_was_found_later_is_of_the_time_when_it_was_found():
    before = replace(BARE, attempts=(attempt(first_step=1, last_step=9, stepped_at=NOW, total_steps=100),))
    after = replace(before, attempts=(replace(before.attempts[0], last_step=30),))
    (told,) = happened(before, after, later(60))
    assert told.at == later(60)


def test_the_parts_of_a_start_add_up_and_begin_where_the_attempt_before_ended():
    first = attempt(reason=ExitReason.LOST, ended_at=later(10))
    second = attempt(2, "i-2", started_at=later(100))
    before = replace(BARE, attempts=(first, second), nodes=(machine("i-1"), machine("i-2", launched_at=later(40))))
    after = replace(before, attempts=(first, replace(second, first_step=1, last_step=1, stepped_at=later(130))))

    (started, _) = happened(before, after, later(130))

    assert started.parts == (("machines", 30.0), ("preparation", 60.0), ("first_step", 30.0))
    assert started.seconds == 120.0


DAYS = 3 * 86400


def started_after(before, seconds):
    stepped = replace(before.attempts[-1], first_step=1, last_step=1, stepped_at=later(seconds))
    found = happened(before, replace(before, attempts=(*before.attempts[:-1], stepped)), later(seconds))
    (one,) = (one for one in found if one.kind == "started")
    return dict(one.parts)


def test_a_start_of_a_run_that_goes_on_begins_where_it_was_ordered_to():
    first = attempt(reason=ExitReason.USER_ERROR, ended_at=later(600))
    nodes = (machine("i-1", ended_at=later(610)), machine("i-2", launched_at=later(DAYS + 60)))
    going_on = (first, attempt(2, "i-2", started_at=later(DAYS + 120)))
    before = replace(BARE, nodes=nodes, attempts=going_on, began_at=later(DAYS))
    assert started_after(before, DAYS + 150) == {"machines": 60.0, "preparation": 60.0, "first_step": 30.0}


def test_machines_that_stood_ready_before_a_first_start_count_from_when_it_was_ordered():
    before = replace(BARE, nodes=(machine("i-1"),), attempts=(attempt(started_at=later(DAYS + 5)),))
    assert started_after(replace(before, began_at=later(DAYS)), DAYS + 9) == {"preparation": 5.0, "first_step": 4.0}


def test_an_end_after_the_last_start_is_where_the_next_attempt_begins():
    first = attempt(reason=ExitReason.LOST, ended_at=later(10))
    nodes = (machine("i-1"), machine("i-2", launched_at=later(40)))
    before = replace(BARE, nodes=nodes, attempts=(first, attempt(2, "i-2", started_at=later(100))), began_at=NOW)
    assert started_after(before, 130) == {"machines": 30.0, "preparation": 60.0, "first_step": 30.0}


def milestones(before, after):
    return [one.message for one in happened(before, after, later(999)) if one.kind == "milestone"]


def test_the_end_of_an_attempt_that_is_outdated_is_no_milestone():
    going = attempt(first_step=1, last_step=420, total_steps=1000, stepped_at=NOW, outdated=True)
    before = replace(BARE, attempts=(going,))
    ended = replace(going, total_steps=None, reason=ExitReason.INTERRUPTED, ended_at=later(5))
    assert milestones(before, replace(before, attempts=(ended,))) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_script_that_begins_anew_has_its_own_milestones(known):
    first = attempt(first_step=1, last_step=900, total_steps=1000, stepped_at=NOW, reason=ExitReason.HUNG)
    second = attempt(2, "i-2", started_at=later(700), begun_anew=known)
    stepped = replace(second, first_step=1, last_step=1, total_steps=500, stepped_at=later(710))
    later_on = replace(stepped, last_step=450)
    before, after, much_later = (replace(BARE, attempts=(first, one)) for one in (second, stepped, later_on))
    assert milestones(before, after) == []
    assert milestones(after, much_later) == (["step 450 of 500: 90 %"] if known else [])
    anew = replace(BARE, attempts=(first, replace(later_on, last_step=460, begun_anew=True)))
    assert milestones(much_later, anew) == []


@pytest.mark.parametrize(
    ("step", "total", "name"),
    [
        (9, 100, None),
        (10, 100, "milestone.10-of-100"),
        (57, 100, "milestone.50-of-100"),
        (100, 100, "milestone.100-of-100"),
        (130, 100, "milestone.100-of-100"),
        (99, None, "milestone.step-10"),
        (1000, None, "milestone.step-1000"),
    ],
)
def test_of_steps_the_newest_mark_alone_is_told(step, total, name):
    before = replace(BARE, attempts=(attempt(first_step=1, last_step=1, stepped_at=NOW, total_steps=100),))
    after = replace(before, attempts=(replace(before.attempts[0], last_step=step, total_steps=total),))
    assert [one.name for one in happened(before, after, NOW)] == ([name] if name else [])


def test_steps_that_are_made_again_are_no_milestones():
    first = attempt(first_step=1, last_step=60, total_steps=100, reason=ExitReason.LOST)
    second = attempt(2, first_step=1, last_step=30, stepped_at=NOW, total_steps=100)
    before = replace(BARE, attempts=(first, second))
    again = replace(before, attempts=(first, replace(second, last_step=60)))
    assert happened(before, again, NOW) == ()


def test_saves_that_are_counted_are_no_steps():
    before = replace(BARE, attempts=(attempt(counts=Counts.SAVES, first_step=1, last_step=1, stepped_at=NOW),))
    assert happened(before, replace(before, attempts=(replace(before.attempts[0], last_step=10),)), NOW) == ()


@pytest.mark.parametrize(("spent", "mark"), [("19.99", 0), ("20", 50), ("31.9", 50), ("32", 80), ("41", 100)])
def test_the_mark_of_a_budget_is_the_last_one_that_is_passed(spent, mark):
    found = with_budget_reached(BARE, Decimal(spent), Decimal(40))
    assert (found.budget_mark, found.budget_mark_of) == (mark, Decimal(40))


def test_a_budget_of_nothing_has_no_marks():
    assert with_budget_reached(BARE, Decimal(0), Decimal(0)).budget_mark == 0


# What an event is


def event(which="1", kind="attempt", **told):
    return Event(**{"kind": kind, "at": NOW, "job": "job", "which": which, "message": "attempt 1 begins", **told})


@pytest.mark.parametrize(
    ("kind", "which", "name"),
    [
        ("attempt_ended", "3", "attempt_ended.3"),
        ("planned", "p5 spot in us-east-2a", "planned.p5-spot-in-us-east-2a"),
        ("../../control", "../order.json", "control.order.json"),
        (".gpucloud-x", "", "gpucloud-x.-"),
        ("x" * 500, "1", "x" * 150),
    ],
)
def test_an_event_s_name_is_fit_for_a_key_whoever_wrote_it(kind, which, name):
    assert event(which, kind).name == name


def test_as_json_an_event_has_what_is_known_of_it_alone():
    told = event_json(event(attempt=1, nodes=("i-1",), parts=(("preparation", 1.5),), seconds=1.5, usd=Decimal("0.90")))
    assert told == {
        "kind": "attempt",
        "at": "2026-03-01T12:00:00+00:00",
        "job": "job",
        "id": "attempt.1",
        "message": "attempt 1 begins",
        "attempt": 1,
        "nodes": ["i-1"],
        "seconds": 1.5,
        "parts": {"preparation": 1.5},
        "usd": "0.90",
    }


def test_events_stand_by_time_then_kind_then_name_and_unknown_kinds_last():
    first, second = event(kind="submitted"), event(kind="planned")
    other, next_one = event(kind="teleported"), event(kind="ended", at=later(1))
    assert sorted([next_one, other, second, first], key=in_order) == [first, second, other, next_one]


def test_every_cause_of_an_end_and_of_a_save_has_its_words():
    assert set(happened_module._ENDED) == {None, *EndCause}
    assert set(happened_module._SAVED_FOR) == set(Why)


def test_every_kind_has_its_row_in_the_handbook():
    page = (Path(gpucloud.__file__).parent / "docs" / "operations-and-security.md").read_text()
    assert [kind for kind in EventKind if f"| `{kind.value}` | {kind.about} |" not in page] == []


# How it comes into the store


class Refusing(MemoryStore):
    """A store that counts what is put, and refuses while `error` says why."""

    def __init__(self):
        super().__init__(JumpingClock())
        self.error, self.puts, self.lists = None, 0, 0

    def put(self, key, data, **conditions):
        if "/events/" in key:
            self.puts += 1
            if self.error is not None:
                raise self.error
        return super().put(key, data, **conditions)

    def list(self, prefix):
        self.lists += prefix.endswith("/events/")
        return super().list(prefix)


def stored(box):
    box.store()
    box.wait(5)


@pytest.mark.parametrize("error", [StoreError("full"), CredentialsError("expired")])
def test_what_a_store_does_not_take_waits_and_is_tried_again_in_a_while(error):
    store, at = Refusing(), [0.0]
    box = Outbox(log=EventLog(store, "job"), uptime=lambda: at[0])
    store.error = error
    assert [one.which for one in box.add([event("1"), event("2")])] == ["1", "2"]
    stored(box)
    stored(box)
    assert (store.puts, len(box.pending)) == (2, 2)

    store.error, at[0] = None, 11.0
    stored(box)

    assert box.pending == ()
    assert [one.which for one in EventLog(store, "job").read()] == ["1", "2"]


def test_one_event_that_a_store_refuses_holds_none_behind_it_back():
    class OneRefused(MemoryStore):
        def put(self, key, data, **conditions):
            if key.endswith("attempt.1.json"):
                raise StoreError("no")
            return super().put(key, data, **conditions)

    log = EventLog(OneRefused(JumpingClock()), "job")
    box = Outbox(log=log, uptime=lambda: 0.0, pending=tuple(event(which) for which in "123"))
    stored(box)
    assert [one.which for one in log.read()] == ["2", "3"]
    assert [one.which for one in box.pending] == ["1"]


def test_a_store_that_takes_nothing_is_not_asked_for_every_event_that_waits():
    store = Refusing()
    store.error = StoreError("full")
    at = [0.0]
    box = Outbox(log=EventLog(store, "job"), uptime=lambda: at[0], pending=tuple(event(str(n)) for n in range(9)))
    stored(box)
    assert store.puts == 3
    at[0] = 11.0
    stored(box)
    assert store.puts == 6


def test_a_put_that_hangs_for_longer_than_the_lease_takes_it_from_nobody_and_stops_no_write(monkeypatch):
    goes_on = threading.Event()

    class Hanging(MemoryStore):
        def put(self, key, data, **conditions):
            if "/events/" in key:
                goes_on.wait(20)
            return super().put(key, data, **conditions)

    monkeypatch.setattr(lease_module, "_PUTS_S", 0.2)
    jobs = JobStore(Hanging(SystemClock()), "job")
    jobs.create(replace(BARE, lease_s=0.5))
    try:
        with take(jobs, SystemClock(), tells=True) as lease:
            lease.write(replace(lease.state, pool=ANOTHER))
            began, seq = time.monotonic(), jobs.load()[0].seq
            while time.monotonic() - began < 1.5:
                with pytest.raises(LeaseHeld):
                    take(jobs, SystemClock())
                lease.confirm()
                time.sleep(0.05)
            lease.write(replace(lease.state, pool=POOL))
            assert jobs.load()[0].seq >= seq + 5
        left = jobs.load()[0]
        assert (left.owner, [one.kind for one in left.pending_events]) == (None, ["planned", "planned"])
    finally:
        goes_on.set()
    with take(jobs, SystemClock(), tells=True) as lease:
        lease.write(lease.state)
    assert jobs.load()[0].pending_events == ()
    assert len(jobs.events.read()) == 2


def test_no_write_of_a_state_asks_the_store_for_its_time():
    class Asked(MemoryStore):
        asked = 0

        def get(self, key):
            self.asked += key.endswith("/order.json")
            return super().get(key)

    clock = JumpingClock(NOW)
    store = Asked(clock)
    jobs = JobStore(store, "job")
    jobs.create(BARE)
    with take(jobs, StoreClock(clock, jobs, print), tells=True) as lease:
        asked = store.asked
        clock.sleep(3600)
        lease.write(replace(lease.state, pool=ANOTHER))
        assert store.asked == asked
    assert [one.at for one in jobs.events.read()] == [later(3600)]


def test_what_was_put_is_put_no_more():
    store = Refusing()
    box = Outbox(log=EventLog(store, "job"), uptime=lambda: 0.0)
    for _ in range(3):
        box.add([event()])
        stored(box)
    assert store.puts == 1


def test_an_event_that_is_there_stays_as_it_is():
    log = EventLog(MemoryStore(JumpingClock()), "job")
    log.put(event(message="the first"))
    log.put(event(message="the second"))
    assert [one.message for one in log.read()] == ["the first"]


def test_no_more_events_wait_than_a_state_may_have():
    box = Outbox(log=None, uptime=lambda: 0.0)
    assert len(box.add(event(str(number)) for number in range(MOST_PENDING + 5))) == MOST_PENDING


def test_of_more_events_than_may_wait_milestones_go_first_and_the_end_never():
    box = Outbox(log=None, uptime=lambda: 0.0)
    box.add(event(str(number), "milestone") for number in range(MOST_PENDING))
    told = ["interrupted", "attempt", "budget", "ended"]
    waiting = box.add(event("1", kind) for kind in told)
    assert len(waiting) == MOST_PENDING
    assert [one.kind for one in waiting[-4:]] == told
    waiting = box.add(event(str(number)) for number in range(2 * MOST_PENDING))
    assert {one.kind for one in waiting} == {"interrupted", "attempt", "budget", "ended"}


def test_events_of_many_machines_that_wait_make_no_state_too_large():
    nodes = tuple(f"i-{number:017x}" for number in range(800))
    box = Outbox(log=None, uptime=lambda: 0.0)
    box.add(event(str(number), nodes=nodes) for number in range(100))
    waiting = box.add([event("z", "ended")])
    assert waiting[-1].kind == "ended"
    assert sum(len(codec.to_json(one)) for one in waiting) <= MOST_PENDING_BYTES


def test_junk_among_the_events_hides_none_and_is_fetched_once(monkeypatch):
    fetched = []

    class Counting(MemoryStore):
        def get(self, key):
            fetched.append(key)
            return super().get(key)

    monkeypatch.setattr(events_module, "MOST_READ", 20)
    store = Counting(JumpingClock())
    for number in range(50):
        store.put(f"jobs/job/events/a{number:03}.json", b"{}")
    log = EventLog(store, "job")
    log.put(event("1", "ended"))
    fetched.clear()
    (found,) = log.read()
    assert found.kind == "ended"
    for _ in range(9):
        log.read(frozenset({found.name}))
    assert len(fetched) == len(set(fetched)) == 51


def test_a_state_that_is_written_has_its_events_until_they_are_put():
    store = Refusing()
    jobs = JobStore(store, "job")
    jobs.create(submitted(BARE, NOW))
    store.error = StoreError("full")

    with take(jobs, JumpingClock(), tells=True) as lease:
        lease.write(replace(lease.state, attempts=(attempt(),)))

    assert [one.kind for one in jobs.load()[0].pending_events] == ["submitted", "planned", "attempt"]
    store.error = None
    with take(jobs, JumpingClock(), tells=True) as lease:
        lease.write(lease.state)
    assert jobs.load()[0].pending_events == ()
    assert [one.kind for one in jobs.events.read()] == ["submitted", "planned", "attempt"]


def test_a_caller_s_older_state_loses_no_event():
    store = Refusing()
    jobs = JobStore(store, "job")
    jobs.create(BARE)
    store.error = StoreError("full")
    with take(jobs, JumpingClock(), tells=True) as lease:
        older = lease.state
        lease.write(replace(older, nodes=(machine("i-1"),)))
        lease.write(replace(older, nodes=(machine("i-1"),), message="hello"))
    assert [one.name for one in jobs.load()[0].pending_events] == ["machines.i-1"]


def test_who_deletes_a_job_or_changes_its_budget_puts_no_event():
    store = Refusing()
    jobs = JobStore(store, "job")
    jobs.create(submitted(BARE, NOW))
    with take(jobs, JumpingClock()) as lease:
        lease.write(replace(lease.state, order_number=3))
    assert (store.puts, len(jobs.load()[0].pending_events)) == (0, 2)


# How it is read


def test_what_is_no_event_is_passed_over_and_a_newer_one_is_shown_as_it_is():
    store = MemoryStore(JumpingClock())
    log = EventLog(store, "job")
    newer = {**json.loads(codec.to_json(event(kind="teleported", message="it was\n\x1b[2Jmoved"))), "warp": 9}
    store.put("jobs/job/events/teleported.1.json", json.dumps(newer).encode())
    store.put("jobs/job/events/attempt.2.json", codec.to_json(event("1")).encode())  # under another's name
    store.put("jobs/job/events/attempt.3.json", b"{")
    store.put("jobs/job/events/attempt.4.json", b" " * (2 << 20))

    (found,) = log.read()

    assert (found.kind, found.shown_kind) == ("teleported", "teleported")
    assert "\x1b" not in found.shown
    assert "\n" not in found.shown


def test_a_follower_lists_again_only_what_was_written_since_and_tells_what_waits_too():
    store = Refusing()
    jobs = JobStore(store, "job")
    jobs.create(submitted(BARE, NOW))
    looks = []

    def pause():
        looks.append(store.lists)
        if len(looks) == 3:
            with take(jobs, JumpingClock(), tells=True) as lease:
                lease.write(replace(lease.state, attempts=(attempt(),)))

    found = list(told(jobs.events, jobs.load, lambda *_: len(looks) < 5, pause))

    assert [[one.kind for one in some] for some in found] == [["submitted", "planned"], ["attempt"]]
    assert looks[:3] == [1, 1, 1]
    assert store.lists == 2
