"""What is said of an attempt that went on without a supervisor until its machines switched themselves off.

And of machines that are ended while their job goes on.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.cli.render.reports import jobs_text, report_json, report_text
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import (
    Attempt,
    CheckpointRef,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobState,
    Owner,
    Quarantine,
    UsageInterval,
)
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import CloseAttempt, NoteInterruptions, Replace
from gpucloud.domain.supervision.snapshot import NodeSnapshot, Readiness, Rules
from gpucloud.domain.supervision.strays import with_intervals
from gpucloud.domain.supervision.transitions import give_up
from gpucloud.store.checkpoints import Newest
from gpucloud.usecases.job import jobs
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.condition import NodeStanding
from gpucloud.usecases.jobstore.report import JobReport, report, with_answers, without_lost_outputs
from gpucloud.usecases.supervise import observe
from gpucloud.usecases.supervise.observe import Observer
from gpucloud.usecases.supervise.story import tell_story
from tests.unit.test_condition import told
from tests.unit.worlds import NOW, POOL, gone, opened, part, snapshot, state, up

LAST = CheckpointRef(step=400, sha256="a" * 64)
HEARD = replace(opened("a"), first_step=1, last_step=146, saved_step=100, total_steps=400)


def closed(*before: Attempt, unheard: Attempt = HEARD, checkpoint: CheckpointRef = LAST) -> JobState:
    """Return the state after the pass that finds its machines gone, and what is in the store."""
    world = snapshot(gone("a"), state=state(attempts=(*before, unheard)), checkpoint=checkpoint)
    return transitions.close_attempt(transitions.record(world), CloseAttempt(reason=ExitReason.LOST), NOW)


@pytest.mark.parametrize(
    ("kind", "went", "line"),
    [
        (
            InterruptionKind.NOTICE,
            -60,
            "a was interrupted at 11:59:00 UTC: it had a notice, and saved step 400",
        ),
        (InterruptionKind.LOST, -60, "a went at 11:59:00 UTC: nobody supervised then, and no word of a notice is left"),
        (InterruptionKind.LOST, -1, "a is gone without notice"),
    ],
)
def test_what_is_known_of_a_machine_that_went_is_told_and_its_end_is_that_of_training(
    kind: InterruptionKind, went: int, line: str
) -> None:
    """It went 60 s ago, or a second ago; whoever supervises came 10 s ago."""
    ended_at = NOW + timedelta(seconds=went)
    owner = Owner(id="o", host="vm", pid=1, started="1", since=NOW - timedelta(seconds=10))
    life = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - timedelta(hours=1), ended_at=ended_at)
    known = state(attempts=(HEARD,), owner=owner, nodes=(life,))
    noted = NoteInterruptions(interruptions=(Interruption(node_id="a", kind=kind, attempt=1, noticed_at=NOW),))
    assert tell_story(noted, snapshot(gone("a"), state=known, checkpoint=LAST)) == line
    (one,) = transitions.note_interruptions(known, noted).interruptions
    assert one.stopped_at == ended_at
    after = opened("c", number=2, first_step=401, last_step=402)
    trains = state(
        attempts=(replace(HEARD, reason=ExitReason.LOST, ended_at=NOW), after), nodes=(life,), interruptions=(one,)
    )
    steps = up("c", part(2, step=402, first_step=401))
    (resumed,) = transitions.record(snapshot(steps, state=trains)).interruptions
    assert resumed.stopped_at == ended_at


def test_an_attempt_that_died_unheard_ends_at_the_step_that_it_committed_last() -> None:
    assert (closed().attempts[-1].first_step, closed().attempts[-1].last_step) == (1, 400)


def test_an_attempt_that_was_heard_beyond_what_it_committed_keeps_its_last_step() -> None:
    assert closed(checkpoint=replace(LAST, step=100)).attempts[-1].last_step == 146


def test_an_attempt_that_was_never_heard_made_what_none_before_it_had_committed() -> None:
    first = replace(HEARD, reason=ExitReason.LOST, saved_step=140)
    second = opened("a", number=2)
    found = closed(first, unheard=second).attempts[-1]
    assert (found.first_step, found.last_step) == (141, 400)
    none_of_its_own = closed(replace(first, saved_step=400), unheard=second).attempts[-1]
    assert (none_of_its_own.first_step, none_of_its_own.last_step) == (None, None)


def test_the_story_of_its_end_names_the_step_that_was_committed() -> None:
    world = snapshot(gone("a"), state=state(attempts=(HEARD,)), checkpoint=LAST)
    line = tell_story(CloseAttempt(reason=ExitReason.LOST), world)
    assert line == "attempt 1 ended at step 400: lost, checkpoint at step 400"


SAVED_50 = part(1, step=50, committed_step=50)


@pytest.mark.parametrize(
    ("changes", "ends", "looks"),
    [
        ({}, False, [1, 1, 1, 1]),  # it says what it commits
        ({"silent": 2.0}, False, [1, 1, 1, 1]),  # a moment without a word
        ({"silent": 60.0}, False, [1, 1, 2, 2]),  # the network to its machine is down, that to the store is not
        ({"silent": 60.0}, True, [1, 2, 3, 4]),  # its end is waited for, and may be written down at any look
    ],
)
def test_what_a_script_commits_that_nobody_hears_is_looked_for_in_the_store(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ends: bool, looks: list[int]
) -> None:
    asked: list[int] = []

    def newest(*_: object) -> Newest:
        asked.append(1)
        return Newest(400, "a" * 64)

    monkeypatch.setattr(observe, "newest_commit", newest)
    services: Any = SimpleNamespace(rules=Rules(), store=None, jobs=SimpleNamespace(checkpoints=""))
    nothing: dict[str, Any] = dict.fromkeys(
        ("bootstrapper", "inspector", "home", "tracker", "logs", "pool", "history", "usage", "peer_reports", "learning")
    )
    observer = Observer(services=services, **nothing)
    attempt = replace(HEARD, started_at=NOW, ending_reason=ExitReason.STOPPED if ends else None)
    known = state(attempts=(attempt,), checkpoint=replace(LAST, step=50))
    found = []
    for second in (1, 20, 40, 50):
        world = replace(snapshot(up("a", SAVED_50, **changes), state=known), now=NOW + timedelta(seconds=second))
        newest_known = observer._newest(attempt, world, over=False)
        assert newest_known is not None
        assert newest_known.step == 400
        found.append(len(asked))
    assert found == looks


@pytest.mark.parametrize(
    ("checkpoint", "reason", "line"),
    [
        (replace(LAST, step=100), ExitReason.LOST, "ended: lost, last heard at step 146, checkpoint at step 100"),
        (None, ExitReason.LOST, "ended: lost, last heard at step 146, nothing saved"),
        (None, ExitReason.HUNG, "ended at step 146: hung, nothing saved"),
        (None, ExitReason.STOPPED, "ended at step 146: stopped, nothing saved"),
        (None, ExitReason.BUDGET, "ended at step 146: budget, nothing saved"),
        (None, ExitReason.USER_ERROR, "ended at step 146: user_error, nothing saved"),
        (None, ExitReason.SUCCEEDED, "ended at step 146: succeeded"),
    ],
)
def test_the_story_of_an_end_says_what_was_heard_last_and_what_is_kept(
    checkpoint: CheckpointRef | None, reason: ExitReason, line: str
) -> None:
    world = snapshot(gone("a"), state=state(attempts=(HEARD,)), checkpoint=checkpoint)
    assert tell_story(CloseAttempt(reason=reason), world) == f"attempt 1 {line}"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (ExitReason.LOST, "lost, nothing saved"),
        (ExitReason.DEADLINE, "deadline, nothing saved"),
        (ExitReason.USER_ERROR, "user_error"),
    ],
)
def test_so_of_a_script_that_tells_no_steps(reason: ExitReason, words: str) -> None:
    world = snapshot(gone("a"), state=state(attempts=(opened("a"),)))
    assert tell_story(CloseAttempt(reason=reason), world) == f"attempt 1 ended: {words}"


def left(monkeypatch: pytest.MonkeyPatch, checkpoint: CheckpointRef = LAST, **changes: Any) -> JobReport:
    """Return the report of a job whose machines are off, with what its store has."""
    monkeypatch.setattr(jobs, "newest_commit", lambda *_: Newest(checkpoint.step, checkpoint.sha256))
    asker: Any = SimpleNamespace(jobs=SimpleNamespace(store=None, checkpoints=""))
    return Asker.with_stored_checkpoint(asker, replace(told(**changes), attempts=(HEARD,)))


def test_an_attempt_whose_machines_are_off_does_not_run_and_has_the_step_that_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = report_text(left(monkeypatch))
    assert text.startswith("live: waiting, nobody supervises, step 400 of 400 (checkpoint)\n")
    assert "1        1      1–400  unheard since 11:59 UTC, its machines are off  at least 44 s" in text
    assert "running" not in text


def test_what_was_heard_beyond_the_checkpoint_went_with_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = report_text(left(monkeypatch, replace(LAST, step=100)))
    assert text.startswith("live: waiting, nobody supervises, step 100 of 400 (checkpoint)\n")


def test_the_list_of_jobs_has_the_step_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert " 400 " in jobs_text([left(monkeypatch)]).splitlines()[1]
    assert " 100 " in jobs_text([left(monkeypatch, replace(LAST, step=100))]).splitlines()[1]


def test_steps_that_went_with_machines_unsaved_are_not_told_as_kept() -> None:
    lost = told()
    assert "1–385, none kept  unheard since" in report_text(lost)
    assert "\ngo on from the beginning: gpucloud train live · " in report_text(lost)
    kept = replace(lost, checkpoint=CheckpointRef(step=300, sha256="0" * 64))
    assert "1–385, kept to 300  unheard since" in report_text(kept)
    assert "\ngo on from step 300: gpucloud train live · " in report_text(kept)
    assert report_json(kept)["attempts"][0]["kept_to_step"] == 300
    members = tuple(replace(one, outcome=Outcome.DONE) for one in lost.attempts[0].members)
    trained = replace(lost, attempts=(replace(lost.attempts[0], members=members),))
    assert "none kept" not in report_text(trained)


def test_a_machine_that_came_in_place_of_the_attempts_own_runs_nothing_of_it() -> None:
    text = report_text(replace(told(up("c")), outputs=("out/",)))
    assert text.startswith("live: waiting, nobody supervises\n")
    assert "nothing trains on its 1 machine; all is off by itself at 12:30:00 UTC" in text
    assert "1–385, none kept  unheard since 11:59 UTC, its machines are off" in text
    assert report_text(told(up("b"), up("c"))).startswith("live: A MACHINE OF ITS ATTEMPT IS OFF, NOBODY SUP")


TRAINED = (up("a", part(1, Outcome.DONE)), up("b", part(1, Outcome.DONE)))


@pytest.mark.parametrize(
    ("outputs", "line"),
    [
        (("out/",), "until 16:58:59 UTC: then its machines switch themselves off, and out/ is lost"),
        (("out/", "*.csv"), "until 16:58:59 UTC: then its machines switch themselves off, and out/, *.csv are lost"),
        ((), "until 16:58:59 UTC: then its machines switch themselves off"),
    ],
)
def test_results_that_nobody_brings_home_say_until_when_they_can_be_brought(
    outputs: tuple[str, ...], line: str
) -> None:
    until = NOW.replace(hour=16, minute=58, second=59)
    text = report_text(replace(told(*TRAINED), outputs=outputs, paid_until=until))
    does = "brings them home, and ends its machines" if outputs else "winds it up"
    assert f"gpucloud train live {does}\n{line}\n" in text


def test_machines_that_drive_their_job_lose_nothing_when_nobody_looks() -> None:
    text = report_text(replace(told(*TRAINED), outputs=("out/",), drives_itself=True))
    assert "is lost" not in text


def test_results_on_machines_that_are_off_are_lost() -> None:
    off = replace(told(), outputs=("out/",))
    unheard = (
        "out/ did not come home: whatever the script had written there by then went with the machines of attempt 1"
    )
    assert f"\n\noutputs: {unheard}\n\n" in report_text(without_lost_outputs(off))
    members = tuple(replace(member, outcome=Outcome.DONE) for member in off.attempts[-1].members)
    done = replace(off, attempts=(replace(off.attempts[-1], members=members),))
    assert "\n\noutputs: out/ lost with the machines of attempt 1\n\n" in report_text(without_lost_outputs(done))
    assert without_lost_outputs(without_lost_outputs(off)) == without_lost_outputs(off)  # told once
    own = without_lost_outputs(replace(off, owned=True))
    assert "out/ is not home yet: `gpucloud down live` brings it from a, if that answers\n" in report_text(own)
    assert [one.attempt for one in own.missing_outputs] == [None]
    for kept in (
        replace(off, supervisor="process 1 on vm"),  # it sees to them
        replace(off, drives_itself=True),  # they may be in the store
        replace(told(up("a"), up("b")), outputs=("out/",)),
        replace(off, attempts=()),
    ):
        assert without_lost_outputs(kept) == kept


@pytest.mark.parametrize("visited", [True, False])
def test_results_that_went_with_the_machine_of_rank_0_do_not_come_home_from_the_others(visited: bool) -> None:
    known = replace(told(visited=False), outputs=("out/",), nodes=(up("b").node,))
    members = tuple(replace(member, outcome=Outcome.DONE) for member in known.attempts[0].members)
    known = replace(known, attempts=(replace(known.attempts[0], members=members),))
    one = NodeStanding(node_id="b", status=TRAINED[1].status)
    said = with_answers(known, (one,)) if visited else without_lost_outputs(known)
    text = report_text(said)
    assert text.startswith("live: trained, not wound up")
    assert "\n\noutputs: out/ lost with a, the machine of rank 0\n\n" in text
    assert "gpucloud train live winds it up\nuntil 12:30:00 UTC: then its machines switch themselves off\n" in text
    driven = replace(known, drives_itself=True)  # it may be in the store
    assert without_lost_outputs(driven) == driven
    assert report_text(driven).startswith("live: trained, its results are not home yet")


def test_ranks_that_were_seen_to_be_done_on_machines_that_are_off_have_no_results_to_bring_home() -> None:
    done = tuple(replace(member, outcome=Outcome.DONE) for member in HEARD.members)
    over = replace(HEARD, members=done, last_step=400, last_step_at=NOW - timedelta(minutes=9))
    off = replace(told(), attempts=(over,), paid_until=NOW - timedelta(minutes=1), outputs=("out/",))
    off = replace(without_lost_outputs(off), checkpoint=replace(LAST, step=300))
    head, ways, *rest = report_text(off).split("\n\n")
    assert head == "live: trained, not wound up, step 400 of 400 as of 11:59:44 UTC"
    assert ways.splitlines()[1:] == ["gpucloud train live winds it up"]
    assert rest[0] == "outputs: out/ lost with the machines of attempt 1"
    assert "1        1      1–400  trained  " in report_text(off)
    assert (report_json(off)["condition"], report_json(off)["last_step"]) == ("not_wound_up", 400)


BAD = Quarantine(node_id="a", why="ECC errors", at=NOW)
FROZEN = Interruption(node_id="a", kind=InterruptionKind.FROZEN, attempt=1, noticed_at=NOW)


@pytest.mark.parametrize(
    ("node", "changes", "why"),
    [
        (up("a", readiness=Readiness.FAILED), {}, "it could not be made ready: no pip"),
        (up("a"), {"quarantined": (BAD,)}, "ECC errors"),
        (up("a", relieved=True), {}, "it had a notice, and nobody has taken it"),
        (up("a", silent=90), {}, "it has not answered for 1 min 30 s"),
        (up("a", readiness=Readiness.NO, host_key=None), {}, "it has shown no host key for 5 min"),
        (up("a"), {"interruptions": (FROZEN,)}, "nothing showed that it lives"),
        (up("a"), {}, "what runs there does not end"),
        (up("b"), {}, "it is listed no more"),
    ],
)
def test_a_machine_that_is_ended_while_its_job_goes_on_is_named_with_why(
    node: NodeSnapshot, changes: dict[str, Any], why: str
) -> None:
    told = tell_story(Replace(node_ids=("a",)), snapshot(node, state=state(**changes)))
    assert told == f"replacing a: {why}"


def test_machines_that_are_ended_together_have_each_its_own_reason() -> None:
    nodes = up("a", readiness=Readiness.FAILED), up("b", silent=90)
    told = tell_story(Replace(node_ids=("a", "b")), snapshot(*nodes))
    assert told == "replacing a: it could not be made ready: no pip; replacing b: it has not answered for 1 min 30 s"


def test_a_machine_that_was_given_up_stands_in_status_with_why_and_no_longer_than_once() -> None:
    silent, bad = up("a", silent=90), up("b")
    known = state(nodes=with_intervals((), (silent.node, bad.node)), quarantined=(replace(BAD, node_id="b"),))
    action = Replace(node_ids=("a", "b"))
    given_up = give_up(known, action, snapshot(silent, bad, state=known))
    later = snapshot(up("a", silent=200), state=given_up)
    assert give_up(given_up, action, later) == given_up  # the first reason stays
    ended = replace(given_up, nodes=tuple(replace(one, ended_at=NOW) for one in given_up.nodes))
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    found = report(ended, spend, (), later.group, None)
    assert report_json(found)["given_up"] == [
        {"node": "a", "until": NOW.isoformat(), "why": "it has not answered for 1 min 30 s"}
    ]
    text = report_text(found)
    assert "given up" in text
    assert "it has not answered for 1 min 30 s" in text
    assert text.count("ECC errors") == 1
