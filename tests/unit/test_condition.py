"""What every line about a job says of how it stands: whether it trains, who sees to it, and how old the figures are."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest
from rich.console import Console

from gpucloud.cli.commands import reaching
from gpucloud.cli.commands.reaching import _look
from gpucloud.cli.render import live, onlookers
from gpucloud.cli.render.bills import money_json
from gpucloud.cli.render.onlookers import line_of, panel_state
from gpucloud.cli.render.reports import jobs_text, report_json, report_text
from gpucloud.cli.render.use import condition_word, headline, step_words, unsaved_words, use_rows
from gpucloud.cli.render.ways import going_on_line
from gpucloud.domain.checkpoint.manifest import CounterDrop, Counts
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, Market, OnNotice
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.status import UNTOLD, Outcome, Readings, Stop
from gpucloud.domain.state.order import CLOSED
from gpucloud.domain.state.state import (
    CheckpointRef,
    ExitReason,
    Interruption,
    InterruptionKind,
    JobStatus,
    MissingOutput,
    Owner,
    Quarantine,
    UsageInterval,
)
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Arm,
    CloseAttempt,
    Done,
    EndAttempt,
    NoteInterruptions,
    OpenAttempt,
    Prepare,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.budget import Resumption, rules_for
from gpucloud.domain.supervision.membership import time_left
from gpucloud.domain.supervision.self_driving import hands_over
from gpucloud.domain.supervision.snapshot import Limits, Readiness, Rules
from gpucloud.usecases.job.jobs import with_forecast, with_stored_outputs
from gpucloud.usecases.jobstore.condition import (
    USUAL,
    WORDS,
    Condition,
    ConditionKind,
    Left,
    NodeStanding,
    Saves,
    Silence,
    condition_of,
)
from gpucloud.usecases.jobstore.report import report, with_answers
from gpucloud.usecases.supervise.act import Announcements
from gpucloud.usecases.supervise.story import end_unheard, stage_of_end, tell_story
from tests import handbook
from tests.unit.worlds import LATER, NOW, POOL, cooldown, gone, opened, part, snapshot, state, up

HOUR = timedelta(hours=1)
LIMITS = Limits()
SPEND = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.011"), promised_usd=Decimal(0))


@pytest.mark.parametrize(
    ("ended", "open_attempt", "trained", "supervised", "machines", "condition"),
    [
        (False, True, False, True, 2, ConditionKind.TRAINING),
        (False, True, False, True, 0, ConditionKind.TRAINING),
        (False, True, False, False, 2, ConditionKind.UNSUPERVISED),
        (False, True, False, False, 0, ConditionKind.LEFT),  # all of them are off by now
        (False, True, True, False, 2, ConditionKind.TRAINED),
        (False, True, True, True, 2, ConditionKind.TRAINED),
        (False, True, True, False, 0, ConditionKind.TRAINED),  # though its results went with its machines
        (False, False, False, True, 2, ConditionKind.WAITING),
        (False, False, False, True, 0, ConditionKind.WAITING),
        (False, False, False, False, 2, ConditionKind.LEFT),
        (False, False, False, False, 0, ConditionKind.LEFT),
        (True, False, False, False, 2, ConditionKind.ENDING),
        (True, False, False, False, 0, ConditionKind.ENDING),  # its node group, or results in its store, are left
    ],
)
def test_a_job_stands_in_one_way(ended, open_attempt, trained, supervised, machines, condition):
    found = condition_of(
        ended=ended, open_attempt=open_attempt, trained=trained, supervised=supervised, machines=machines
    )
    assert found is condition


@pytest.mark.parametrize(
    ("left", "machines", "condition"),
    [
        (Left(torn_down=True), 0, ConditionKind.ENDED),
        (Left(torn_down=True), 1, ConditionKind.ENDING),  # the cloud lists one all the same
        (Left(held=True), 2, ConditionKind.HELD),
        (Left(kept=True), 2, ConditionKind.KEPT),
        (Left(held=True), 0, ConditionKind.ENDING),
        (Left(kept=True), 0, ConditionKind.ENDING),
    ],
)
def test_a_job_that_is_over_says_what_its_machines_are_there_for(left, machines, condition):
    stands = {"ended": True, "open_attempt": False, "trained": False, "supervised": False}
    assert condition_of(**stands, machines=machines, left=left) is condition


def test_a_job_that_one_of_its_machines_is_about_to_take_is_handed_over():
    trains = replace(told(*TRAINS), hands_over=True)
    assert trains.condition is Condition.HANDING_OVER
    assert replace(trains, attempts=()).condition is Condition.HANDING_OVER
    assert replace(trains, supervisor="its own node b").condition is Condition.TRAINING


@pytest.mark.parametrize(
    ("changes", "unattended", "quiet_s", "hands"),
    [
        ({}, HOUR, 59, True),
        ({}, HOUR, 60, False),  # none of them has come
        ({}, None, 1, False),  # the user took it back
        ({"drives_itself": False}, HOUR, 1, False),
        ({"nodes": ()}, HOUR, 1, False),
        ({"status": JobStatus.STOPPED}, HOUR, 1, False),
    ],
)
def test_machines_take_a_job_within_a_minute_or_not_at_all(changes, unattended, quiet_s, hands):
    known = replace(
        state(drives_itself=True, nodes=(UsageInterval(node_id="a", pool=POOL, launched_at=NOW),)), **changes
    )
    assert hands_over(known, unattended, timedelta(seconds=quiet_s)) is hands


def test_a_machine_that_still_makes_itself_fit_takes_the_job_once_it_is():
    handed = replace(told(*TRAINS), hands_over=True, drives_itself=True, fits_first=True)
    assert (
        "its own machines go on with it: one of them takes over once it has made itself fit, which takes 20 min at the"
        " most" in report_text(handed)
    )


def test_a_machine_in_place_of_the_only_one_makes_itself_fit_though_it_cannot_answer_yet():
    """Its driver is not there yet: it was said that nobody supervises, and that `train` prepares it."""
    came = UsageInterval(node_id="c", pool=POOL, launched_at=NOW - timedelta(seconds=30))
    bare = told(up("c"))
    over = replace(bare.attempts[-1], reason=ExitReason.LOST, ended_at=NOW)
    asked = {"intervals": (came,), "standing": (NodeStanding(node_id="c", status=None),), "drives_itself": True}
    comes = replace(bare, attempts=(over,), hands_over=True, fits_first=True, **asked)
    text = report_text(comes)
    assert text.startswith("live: handing over to its machines")
    until = "one of them takes over once it has made itself fit, until 12:19:30 UTC at the latest"
    assert f"its own machines go on with it: {until}" in text
    assert "gpucloud train" not in text
    assert "not prepared" not in text
    assert use_rows(comes)[-1][:2] == ("c", "makes itself fit")
    # After that time, and of one that was fit before and says nothing, it is no longer believed.
    late = report_text(replace(comes, hands_over=False, fits_first=False))
    assert "\nc is not prepared, since nobody supervises: gpucloud train live prepares it\n" in late
    dead = replace(comes, intervals=(replace(came, prepared=True),))
    assert report_text(dead).startswith("live: waiting, nobody supervises")


def test_a_job_that_is_handed_over_alarms_nobody():
    handed = replace(told(*TRAINS), hands_over=True, drives_itself=True)
    assert report_text(handed).split("\n\n")[:2] == [
        "live: handing over to its machines, step 605 of 768, 10 steps/s, 16.3 s to go",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "its own machines go on with it: one of them takes over within a minute",
    ]
    assert report_json(handed)["condition"] == "handing_over"
    ends = "its own machines see to its end: one of them takes over within a minute"
    assert ends in report_text(replace(handed, ends=True))
    assert "live  handing over to its machines  " in jobs_text([handed])
    late = replace(handed, deadline_at=NOW - timedelta(minutes=1))
    assert ends in report_text(late)
    assert "the job ends" in report_text(late)


@pytest.mark.parametrize("outputs", [("results/",), ()])
def test_a_job_that_has_trained_and_is_handed_over_is_wound_up_by_its_own_machines(outputs):
    done = (up("a", part(1, Outcome.DONE, 768, phase="done")), up("b", part(1, Outcome.DONE)))
    trained = replace(told(*done), drives_itself=True, outputs=outputs)
    handed = report_text(replace(trained, hands_over=True))
    assert "\nits own machines see to its end: one of them takes over within a minute\n\n" in handed
    assert "gpucloud train" not in handed
    assert "\ngpucloud train live " in report_text(trained)


def test_machines_that_were_asked_for_and_may_come_are_told_where_nobody_sees_to_the_job():
    known = report(state(job="live"), replace(SPEND, off_at=LATER), (), snapshot().group, None)
    may = "machines that were asked for may still come, paid until 12:30:00 UTC: gpucloud down live takes that back"
    known = replace(known, signed_by="own", looked_at=NOW)
    assert f"\n\nno machines are alive; {may}" in report_text(known)
    assert may in headline(known).splitlines()
    nothing = replace(known, spend=SPEND)
    waited = replace(known, supervisor="process 1 on vm")
    for one in (nothing, waited):
        assert "\n\nno machines are alive" in report_text(one)
        assert "asked for" not in report_text(one) + headline(one)


def test_a_job_that_is_to_end_and_that_nobody_supervises_says_what_ends_it():
    text = report_text(replace(told(*TRAINS), ends=True))
    assert "\nit is to end, and nobody sees to that: gpucloud down live does\n" in text
    assert "gpucloud train" not in text


def over(status, reason, *nodes, **changes):
    attempt = replace(opened("a", "b", first_step=1, last_step=5), reason=reason)
    known = state(job="live", attempts=(attempt,), status=status, exit_reason=reason, exit_code=reason.exit_code)
    world = snapshot(*nodes, state=known)
    spend = replace(SPEND, promised_usd=Decimal("0.15"))
    return replace(report(world.state, spend, (), world.group, None), signed_by="own", looked_at=NOW, **changes)


def test_machines_that_are_held_or_kept_say_until_when_what_they_cost_and_how_they_end():
    until = NOW + timedelta(minutes=5)
    held = over(JobStatus.FAILED, ExitReason.USER_ERROR, up("a"), up("b"), held_until=until)
    assert report_text(held).splitlines()[0] == "live: failed, machines held (user_error)"
    assert report_text(held).splitlines()[-1] == (
        "2 machines are ready for a mended script until 12:05:00 UTC, 0.15 USD more at the most;"
        " gpucloud down live ends them now"
    )
    assert "2 machines are ready for a mended setup until" in report_text(replace(held, setup_failed=True))
    kept = over(JobStatus.SUCCEEDED, ExitReason.SUCCEEDED, up("a"), kept_until=until)
    assert report_text(kept).splitlines()[0] == "live: succeeded, machines kept"
    assert report_text(kept).splitlines()[-1] == (
        "1 machine is kept, for a look, until 12:05:00 UTC, 0.15 USD more at the most; gpucloud down live ends it now"
    )
    again = over(JobStatus.SUCCEEDED, ExitReason.SUCCEEDED, up("new"), kept_until=until)
    (*_, last) = report_text(again).splitlines()
    assert last.endswith(
        "ends it now. The cloud started new since: nothing of the job ran there, and there is nothing to look at"
    )
    assert [report_json(one)["condition"] for one in (held, kept)] == ["held", "kept"]
    assert report_json(kept)["kept_until"] == "2026-03-01T12:05:00+00:00"
    assert headline(held).startswith("live: failed, machines held")


def test_a_job_that_is_over_and_not_torn_down_says_what_brings_its_results_home():
    driven = over(JobStatus.SUCCEEDED, ExitReason.SUCCEEDED)
    removes = "removes what is left on the cloud"
    assert report_text(driven).split("\n\n")[:2] == ["live: succeeded, not torn down", f"gpucloud down live {removes}"]
    named = replace(driven, outputs=("results/",))
    brings = f"gpucloud down live brings home what is in its store, and {removes}"
    assert report_text(named).split("\n\n")[1] == brings
    moved = replace(named, home=None)
    assert report_text(moved).split("\n\n")[1].splitlines() == [
        "gpucloud down live removes what is left on the cloud",
        "gpucloud cp -r live:@store/outputs FOLDER copies what is in its store: its job file is not here",
    ]
    tears_down = replace(driven, supervisor="process 1 on vm", nodes=(up("a").node,))
    assert report_text(tears_down).startswith("live: succeeded, ending its machines, supervised by process 1 on vm")
    assert "gpucloud down" not in report_text(tears_down)
    assert report_text(replace(driven, torn_down=True)).startswith("live: succeeded\n")


def test_a_job_whose_results_are_in_its_store_alone_is_not_over():
    over_here = replace(over(JobStatus.SUCCEEDED, ExitReason.SUCCEEDED), torn_down=True, outputs=("results/",))
    assert over_here.condition is Condition.ENDED
    stored = with_stored_outputs(over_here, frozenset({1}))
    assert stored.condition is Condition.IN_STORE
    why = "in the job's store: gpucloud down live brings it home"
    assert report_json(stored)["missing_outputs"] == [
        {"path": "results/", "why": why, "nearest": None, "attempt": None, "brought_by": None}
    ]
    assert report_text(stored).split("\n\n")[:2] == [
        "live: succeeded, its results are in its store",
        "gpucloud down live brings home what is in its store",
    ]
    assert "live  succeeded, its results are in its store" in jobs_text([stored])


def test_results_that_a_machine_stored_before_it_went_are_said_to_be_in_the_store_while_their_job_goes_on():
    lost = MissingOutput(path="results/", why="did not come home: it went with i-1", attempt=1)
    left = replace(told(), outputs=("results/", "m/"), missing_outputs=(lost,))
    copies = "gpucloud cp -r live:@store/outputs FOLDER copies it"
    kept = f"in the job's store: gpucloud down live brings it home once the job has ended, {copies} now"
    whole = MissingOutput(path="m/", why=kept)

    both = with_stored_outputs(left, frozenset({1}))
    before = replace(lost, why=f"{lost.why}; what was stored before that is {kept}")
    assert (both.missing_outputs, both.has_stored_outputs) == ((before, whole), False)
    other = with_stored_outputs(left, frozenset({2}))
    assert other.missing_outputs == (lost, MissingOutput(path="results/", why=kept), whole)
    nowhere = with_stored_outputs(replace(left, missing_outputs=(), home=None), frozenset({1}))
    assert {one.why for one in nowhere.missing_outputs} == {f"in the job's store: {copies}"}


@pytest.mark.parametrize(
    ("reason", "action", "phase"),
    [
        (ExitReason.USER_ERROR, Done(), "failed, machines held"),
        (ExitReason.USER_ERROR, Arm(until=NOW), "failed, machines held"),
        (ExitReason.SUCCEEDED, Done(), "succeeded, machines kept"),
        (ExitReason.USER_ERROR, TearDown(), "tearing down"),
    ],
)
def test_the_panel_says_that_machines_stay(reason, action, phase):
    status = JobStatus.FAILED if reason is ExitReason.USER_ERROR else JobStatus.SUCCEEDED
    world = snapshot(up("a"), state=state(status=status, exit_reason=reason))
    assert panel_state(world, action, SPEND).phase == phase


@pytest.mark.parametrize("held", [True, False])
def test_watch_leaves_a_job_whose_machines_stay(held):
    until = NOW + timedelta(minutes=5)
    changes = {"held_until": until} if held else {"kept_until": until}
    stays = over(JobStatus.FAILED, ExitReason.USER_ERROR, up("a"), **changes)
    shown = []
    asker = SimpleNamespace(report=lambda: stays, with_stored_checkpoint=lambda report: report)
    looks = SimpleNamespace(show=shown.append)
    last = _look(asker, SimpleNamespace(), lambda _: pytest.fail("it waits"), looks, every_s=1.0)
    assert (last.condition, len(shown)) == (Condition.HELD if held else Condition.KEPT, 1)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "none of its attempt is up"),
        ({"attempts": ()}, "no attempt is open"),
        ({"status": JobStatus.STOPPED}, "the job has ended"),
    ],
)
def test_who_watches_a_job_none_of_whose_machines_is_asked_hears_why(changes, why):
    assert live._nobody(replace(told(visited=False), **changes)) == f"no machine was asked: {why}"


def test_who_leaves_watching_hears_that_nothing_is_changed_and_not_that_the_job_goes_on(monkeypatch, capsys):
    def leave(*_, **__):
        raise KeyboardInterrupt

    cloud = SimpleNamespace(clock=SimpleNamespace(sleep=None))
    monkeypatch.setattr(reaching, "Gpucloud", lambda: cloud)
    monkeypatch.setattr(reaching, "known_job", lambda *_: SimpleNamespace(name="live"))
    monkeypatch.setattr(reaching, "visitor", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(reaching, "asker_of", lambda *_: None)
    monkeypatch.setattr(reaching, "_look", leave)
    assert reaching.watch("live", as_json=False) == 130
    assert capsys.readouterr().err == "the watching ends: nothing of live is changed by it\n"


def test_who_watches_a_job_that_nobody_supervises_is_told_the_newest_checkpoint_of_its_store():
    left = over(JobStatus.FAILED, ExitReason.USER_ERROR)
    found = replace(left, checkpoint=CheckpointRef(step=12, sha256="0" * 64))
    asker = SimpleNamespace(report=lambda: left, with_stored_checkpoint=lambda report: found)
    looks = SimpleNamespace(show=lambda _: None)
    assert _look(asker, SimpleNamespace(), lambda _: pytest.fail("it waits"), looks, every_s=1.0) == found


def test_when_a_machine_was_found_bad_and_until_when_a_pool_is_passed_over_have_their_day_where_it_is_not_today():
    bad = Quarantine(node_id="b", why="Xid 79", at=NOW - timedelta(days=1))
    late = replace(cooldown(), until=NOW + timedelta(hours=13))
    world = snapshot(up("a"), state=state(quarantined=(bad, replace(bad, node_id="c", at=NOW)), cooldowns=(late,)))
    lines = report_text(replace(report(world.state, SPEND, (), world.group, "here"), looked_at=NOW)).splitlines()
    assert "b         2026-02-28 12:00:00  Xid 79" in lines
    assert "c         12:00:00             Xid 79" in lines
    assert any("  2026-03-02 01:00:00  none there now" in line for line in lines)


def told(*nodes, supervisor=None, visited=True, **changes):
    attempt = replace(opened("a", "b", first_step=1, last_step=385), total_steps=768)
    world = snapshot(*nodes, state=state(job="live", attempts=(attempt,), **changes))
    known = replace(
        report(world.state, SPEND, (), world.group, supervisor),
        signed_by="own",
        last_supervisor="process 20984 on vm",
        written_at=NOW - timedelta(seconds=16),
        looked_at=NOW,
    )
    standing = tuple(NodeStanding(node_id=one.node.id, status=one.status) for one in nodes)
    return with_answers(known, standing) if visited else known


TRAINS = (up("a", part(1, step=605, total_steps=768)), up("b", part(1)))


def test_a_job_that_nobody_supervises_says_so_with_steps_of_now_and_what_to_do():
    assert report_text(told(*TRAINS)).split("\n\n")[:2] == [
        "live: TRAINING, NOBODY SUPERVISES, step 605 of 768, 10 steps/s, 16.3 s to go",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "nobody starts training again when a machine is interrupted now; all switch themselves off at 12:30:00 UTC\n"
        "go on: gpucloud train live · end it: gpucloud down live",
    ]
    assert "1        2      1–605  running" in report_text(told(*TRAINS))
    assert report_json(told(*TRAINS))["condition"] == "training_unsupervised"


@pytest.mark.parametrize(
    ("age_s", "changes", "words"),
    [
        (9.0, {}, ["step 605 of 768", "10 steps/s", "16.3 s to go"]),
        (11.0, {}, ["step 605 of 768", "no step for 11 s"]),
        (10800.0, {}, ["step 605 of 768", "no step for 3 h"]),
        (11.0, {"longest_s": 8.0}, ["step 605 of 768", "10 steps/s", "16.3 s to go"]),  # one took 8 s before
        (11.0, {"step_seconds": 3.0}, ["step 605 of 768", "0.333 steps/s", "8 min 9 s to go"]),
        (600.0, {"phase": "evaluate"}, ["step 605 of 768", "phase evaluate", "16.3 s to go"]),
        (59.0, {"phase": "start", "step": 0, "step_seconds": None}, ["step 0 of 768"]),
        (600.0, {"step": 768}, ["step 768 of 768", "10 steps/s"]),  # it made all that it will
        (9.0, {"step": 768, "phase": "done"}, ["step 768 of 768"]),
        (9.0, {"phase": "done"}, ["step 605 of 768, where its script called run.done()"]),
    ],
)
def test_a_script_that_makes_no_step_for_long_has_no_pace(age_s, changes, words):
    node = up("a", part(1, **{"step": 605, "total_steps": 768, "age_s": age_s, **changes}))
    assert step_words(told(node, up("b"))) == words
    world = snapshot(node, up("b", part(1)), state=state(attempts=(opened("a", "b"),)))
    shown = panel_state(world, Wait(why="running"), SPEND)
    (stands,) = [word for word in words if word.startswith("no step")] or [None]
    assert (f", {stands} (1 min is taken for a hang), spent " in line_of(shown)) is (stands is not None)
    watched = replace(told(node, up("b")), supervisor="process 1 on vm")
    assert (f"{stands} (1 min is taken for a hang)" in step_words(watched)) is (stands is not None)
    console = Console(file=io.StringIO(), width=100)
    console.print(live._panel(shown, (), 100))
    for text in (line_of(shown), console.file.getvalue()):
        assert ("to go" in text) is any("to go" in word for word in words)
        assert stands is None or stands in text


def test_an_attempt_that_runs_what_was_there_before_the_last_start_says_so_in_every_view():
    def outdated(known, **changes):
        return replace(known, attempts=(replace(known.attempts[0], outdated=True, **changes),))

    next_one = "attempt 1 runs as it was started: the next one runs what the last start changed"
    none = "attempt 1 runs as it was started: what the last start changed has not run"
    trained = "attempt 1 has trained as it was started: what the last start changed has not run"
    members = tuple(replace(one, outcome=Outcome.DONE) for one in told(*TRAINS).attempts[0].members)
    for known, line in (
        (outdated(told(*TRAINS)), next_one),
        (outdated(told(*TRAINS, supervisor="process 1 on vm")), next_one),
        (outdated(told(*TRAINS, supervisor="process 1 on vm"), ending_reason=ExitReason.BUDGET), none),
        (outdated(told(*TRAINS, supervisor="process 1 on vm"), members=members), trained),
        (outdated(told()), None),  # its machines are off: the next one runs it
        (told(*TRAINS), None),
    ):
        for text in (report_text(known), headline(known)):
            assert [one for one in text.splitlines() if "as it was started" in one] == ([line] if line else [])


def test_an_attempt_of_whose_machines_one_is_off_is_not_called_training():
    broken = told(up("a", part(1, step=605, total_steps=768, age_s=45.0)))
    assert report_text(broken).split("\n\n")[:2] == [
        "live: A MACHINE OF ITS ATTEMPT IS OFF, NOBODY SUPERVISES, step 605 of 768, no step for 45 s",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "a machine of its attempt is off, and nobody starts training again;"
        " all others switch themselves off at 12:30:00 UTC\n"
        "go on: gpucloud train live · end it: gpucloud down live",
    ]
    assert report_json(broken)["condition"] == "attempt_broken"
    assert going_on_line(broken).startswith("live goes on: attempt 1 has lost a machine (step 605); ")
    assert replace(broken, supervisor="process 1 on vm").condition is Condition.TRAINING


UNHEARD = (up("a"), up("b"))
"""Machines whose status nobody gets."""


def unheard(*nodes, **changes):
    known = told(*nodes, **changes)
    standing = tuple(replace(one, status=None) for one in known.standing)
    spend = replace(SPEND, usd_per_hour=Decimal("1.17"), promised_usd=Decimal("0.55"))
    return replace(known, standing=standing, spend=spend)


def test_a_job_of_whose_machines_none_answers_is_not_called_training():
    silent = unheard(*UNHEARD)
    assert report_text(silent).split("\n\n")[:2] == [
        "live: NO MACHINE ANSWERS, NOBODY SUPERVISES, step 385 of 768 as of 11:59:44 UTC",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "nobody can tell whether its attempt goes on; its 2 machines cost 1.17 USD an hour,"
        " until 12:30:00 UTC at the latest, 0.55 USD more at the most\n"
        "look after it: gpucloud train live · end it: gpucloud down live",
    ]
    assert report_json(silent)["condition"] == "silent"
    assert "live  NO MACHINE ANSWERS, NOBODY SUPERVISES  " in jobs_text([silent])
    assert headline(silent).startswith("live: NO MACHINE ANSWERS, NOBODY SUPERVISES, attempt 1, step 385 of 768 as of ")


def test_a_machine_that_answers_and_runs_nothing_of_the_attempt_is_not_said_to_be_silent():
    answers = NodeStanding(node_id="c", status=up("c").status)
    silent = unheard(*UNHEARD)
    assert condition_word(silent) == "NO MACHINE ANSWERS, NOBODY SUPERVISES"
    others = replace(silent, standing=(*silent.standing, answers))
    assert (others.condition, condition_word(others)) == (
        Condition.ATTEMPT_SILENT,
        "NO MACHINE OF ITS ATTEMPT ANSWERS, NOBODY SUPERVISES",
    )


def test_an_attempt_that_is_told_to_end_is_not_called_training():
    known = told(*TRAINS, supervisor="process 1 on vm")
    (attempt,) = known.attempts

    def ending(reason, **changes):
        return told_of(replace(known, attempts=(replace(attempt, ending_reason=reason),), **changes))

    assert ending(ExitReason.STOPPED) == ("ending_attempt", "ending its attempt (stopped)")
    assert ending(ExitReason.RESIZED) == ("training", "training")  # another attempt follows
    since = NOW - timedelta(minutes=5)
    silences = tuple(Silence(node_id=node_id, since=since) for node_id in ("a", "b"))
    unheard_of = ("ending_attempt_unheard", "ending its attempt, no machine answers (stopped)")
    assert ending(ExitReason.STOPPED, silences=silences) == unheard_of


def told_of(report):
    return report_json(report)["condition"], condition_word(report)


def test_a_supervised_attempt_that_nobody_hears_is_no_training_for_programs_either():
    known = told(*TRAINS, supervisor="process 1 on vm")
    one, other = (Silence(node_id=node_id, since=NOW - timedelta(minutes=5)) for node_id in ("a", "b"))
    assert told_of(replace(known, silences=(one,))) == ("training", "training, 1 of 2 silent")
    both = replace(known, silences=(one, other))
    assert told_of(both) == ("training_unheard", "training, no machine answers")
    assert [node["silent_since"] is None for node in report_json(both)["nodes"]] == [False, False]
    assert money_json(both)["condition"] == "training_unheard"


def test_words_and_programs_tell_conditions_apart_alike():
    assert list(WORDS) == list(Condition)
    assert len(set(WORDS.values())) == len(Condition)
    text = (handbook.FOLDER / "commands.md").read_text()
    _, _, section = text.partition("## A job as JSON")
    assert [one.value for one in Condition if f"`{one.value}`" not in section] == []


STEPS = CheckpointPolicy(every_steps=1000)
FOLDER = CheckpointPolicy(directory=CheckpointDirectory(path="ckpt"))
PRINTS = Readings(step=640, first_step=1, total_steps=768, loss=None, step_seconds=1.0, longest_s=None, age_s=0.0)
BY_OUTPUT = (up("a", replace(part(1), readings=PRINTS)), up("b", part(1)))
SILENT_SCRIPT = (up("a", part(1)), up("b", part(1)))


NOT_CALLED = ": the script has not called gpucloud.resume so far; an interruption starts it at the beginning"


@pytest.mark.parametrize("supervisor", ["process 1 on vm", None])
@pytest.mark.parametrize(
    ("policy", "nodes", "due"),
    [
        (CheckpointPolicy(), TRAINS, ""),
        (STEPS, TRAINS, ": the first save is due at step 1000"),
        (CheckpointPolicy(every_steps=600), TRAINS, ""),  # it may be under way
        (CheckpointPolicy(every=HOUR), TRAINS, ": the first save is due 1 h after its script's start"),
        (STEPS, BY_OUTPUT, NOT_CALLED),
        (STEPS, SILENT_SCRIPT, NOT_CALLED),
        (FOLDER, BY_OUTPUT, ": the first save is due once its script has a whole checkpoint in ckpt"),
        (FOLDER, SILENT_SCRIPT, ": the first save is due once its script has a whole checkpoint in ckpt"),
    ],
)
def test_a_job_that_trains_and_has_saved_nothing_says_so(policy, nodes, due, supervisor):
    known = told(*nodes, supervisor=supervisor)
    if nodes is SILENT_SCRIPT:
        known = replace(known, attempts=(opened("a", "b"),))
    known, said = replace(known, saves=policy), f"nothing is saved{'' if due == NOT_CALLED else ' yet'}"
    assert f"\n\n{said}{due}\n\n" in report_text(known)
    assert f", {said}{due}" in headline(known)
    assert f", {said}  " in jobs_text([known])
    assert report_json(known)["unsaved"] == f"{said}{due}"
    world = snapshot(*nodes, state=state(attempts=known.attempts))
    assert panel_state(world, Wait(why="running"), SPEND, LIMITS, Saves(policy=policy)).unsaved == f"{said}{due}"


def test_no_first_save_is_announced_that_another_order_has_or_whose_time_is_over():
    known = replace(told(*TRAINS, supervisor="process 1 on vm"), saves=CheckpointPolicy(every=HOUR))
    assert unsaved_words(replace(known, ordered_at=NOW)) == "nothing is saved yet"
    before = replace(known, ordered_at=NOW - HOUR)
    assert unsaved_words(before) == "nothing is saved yet: the first save is due 1 h after its script's start"
    late = (replace(known.attempts[0], started_at=NOW - 9 * HOUR),)
    assert unsaved_words(replace(known, attempts=late)) == "nothing is saved yet"
    assert unsaved_words(replace(known, saves=FOLDER, ordered_at=NOW)) == "nothing is saved yet"
    world = snapshot(*TRAINS, state=state(attempts=known.attempts))
    shown = panel_state(
        world, Wait(why="running"), SPEND, LIMITS, Saves(policy=CheckpointPolicy(every=HOUR), since=NOW)
    )
    assert shown.unsaved == "nothing is saved yet"


def test_no_first_save_is_announced_of_an_attempt_that_nobody_supervises_and_that_has_lost_a_part():
    broken = (up("a", part(1, step=605)), up("b", part(1, Outcome.FAILED)))
    for nodes in (broken, TRAINS[:1]):
        assert unsaved_words(replace(told(*nodes), saves=STEPS)) == "nothing is saved yet"
        known = replace(told(*nodes, supervisor="process 1 on vm"), saves=STEPS)
        assert unsaved_words(known) == "nothing is saved yet: the first save is due at step 1000"
    assert unsaved_words(replace(told(*SILENT_SCRIPT[:1]), attempts=(opened("a", "b"),), saves=STEPS)) == (
        "nothing is saved"
    )


def test_a_script_that_has_told_nothing_is_said_to_save_nothing_where_its_machine_is_heard():
    mute = replace(told(*SILENT_SCRIPT, supervisor="process 1 on vm"), attempts=(opened("a", "b"),), saves=STEPS)
    assert unsaved_words(mute) == f"nothing is saved{NOT_CALLED}"
    assert unsaved_words(replace(mute, standing=())) is None  # nobody knows whether it uses the library
    assert unsaved_words(replace(mute, looked_at=NOW - timedelta(seconds=30))) is None  # it only begins
    ending = replace(mute.attempts[0], ending_reason=ExitReason.STOPPED, ordered=Stop.KILL)
    assert unsaved_words(replace(mute, attempts=(ending,))) == "nothing is saved"


@pytest.mark.parametrize(
    ("stored", "step", "saved"),
    [
        (300, {"committed_step": None}, "step 300"),
        (300, {"committed_step": 600}, "step 600"),
        (600, {"committed_step": 300}, "step 600"),
        (None, {"committed_step": 600}, "step 600"),
        (300, {"committed_step": 100, "counter_drop": CounterDrop(saved=100, put_back=300)}, "step 100"),
    ],
)
def test_watch_and_the_panel_say_what_is_saved(stored, step, saved):
    checkpoint = CheckpointRef(step=stored, sha256="0" * 64) if stored is not None else None
    nodes = (up("a", part(1, step=605, **step)), up("b", part(1)))
    known = replace(told(*nodes, supervisor="process 1 on vm", checkpoint=checkpoint), saves=STEPS)
    assert f", {saved} is saved, " in headline(known)
    world = snapshot(*nodes, state=state(attempts=known.attempts, checkpoint=checkpoint))
    assert panel_state(world, Wait(why="running"), SPEND, LIMITS, Saves(policy=STEPS)).saved == f"{saved} is saved"


def test_a_script_that_tells_no_steps_has_a_line_of_progress_now_and_then(monkeypatch, capsys):
    now = [1000.0]
    monkeypatch.setattr(onlookers.time, "monotonic", lambda: now[0])
    plain = onlookers.PlainOnlooker(LIMITS, Saves(policy=CheckpointPolicy()))
    for second in range(0, 700, 10):
        now[0] = 1000.0 + second
        world = snapshot(*SILENT_SCRIPT, state=state(attempts=(opened("a", "b"),)))
        plain.tick(replace(world, now=NOW + timedelta(seconds=second)), Wait(why="running"), SPEND)
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines == [
        f"running for {span}, tells no steps, nothing is saved, spent 0.011 of 1.00 USD" for span in ("6 min", "11 min")
    ]


def test_what_a_list_says_of_saves_it_says_of_the_job_that_it_asked():
    listed = replace(told(*TRAINS, supervisor="process 1 on vm", visited=False), saves=STEPS)
    assert report_json(listed)["unsaved"] == "nothing is saved yet: the first save is due at step 1000"


@pytest.mark.parametrize(
    "changes",
    [
        {"saves": CheckpointPolicy(none=True)},
        {"saves": None},
        {"checkpoint": CheckpointRef(step=300, sha256="0" * 64)},
        {"attempts": (opened("a", "b", first_step=1, last_step=385, saved_step=300),)},
        {"attempts": (opened("a", "b"),)},
        {"attempts": (opened("a", "b"),), "saves": replace(FOLDER), "looked_at": NOW - timedelta(seconds=30)},
        {"attempts": ()},
        {"attempts": (opened("a", "b", first_step=1, last_step=385, reason=ExitReason.LOST),)},
        {"status": JobStatus.SUCCEEDED, "supervisor": None},
    ],
)
def test_no_other_job_is_said_to_have_saved_nothing(changes):
    known = told(*TRAINS, supervisor="process 1 on vm", visited=False)
    known = replace(known, **{"saves": STEPS, **changes})
    assert "nothing is saved" not in report_text(known) + headline(known) + jobs_text([known])
    assert report_json(known)["unsaved"] is None


@pytest.mark.parametrize("step", [{"committed_step": 600}, {"phase": "done"}])
def test_a_job_whose_machine_tells_of_a_save_or_of_its_end_is_not_said_to_have_saved_nothing(step):
    known = told(up("a", part(1, step=605, **step)), up("b", part(1)), supervisor="process 1 on vm")
    assert report_json(replace(known, saves=STEPS))["unsaved"] is None
    begins = told(up("a", part(1, step=0, phase="start")), up("b", part(1)), supervisor="process 1 on vm")
    assert report_json(replace(begins, saves=STEPS))["unsaved"] is None


def test_an_attempt_that_has_made_no_step_says_so():
    known = told(*TRAINS, supervisor="process 1 on vm", visited=False)
    attempt = replace(known.attempts[0], first_step=None, last_step=None, started_at=NOW - timedelta(seconds=40))

    def first(**changes):
        one = replace(known, attempts=(replace(attempt, **changes),), checkpoint=None)
        return report_text(one).splitlines()[0]

    assert first() == "live: training, running for 40 s, no step yet, supervised by process 1 on vm"
    hour = "live: training, running for 1 h, tells no steps, supervised by process 1 on vm"
    assert first(started_at=NOW - HOUR) == hour


def test_steps_that_a_later_attempt_makes_again_are_not_kept():
    known = told(*TRAINS, supervisor="process 1 on vm", visited=False)
    (attempt,) = known.attempts
    cells = ((1, 206), (None, None), (156, 300))
    attempts = tuple(
        replace(attempt, number=number, first_step=first, last_step=last, saved_step=155, reason=ExitReason.LOST)
        for number, (first, last) in enumerate(cells, 1)
    )
    known = replace(known, checkpoint=CheckpointRef(step=300, sha256="0" * 64))
    text = report_text(replace(known, attempts=attempts))
    assert "1–206, kept to 155  lost" in text
    assert "156–300             lost" in text
    ended = replace(known, attempts=attempts[:2], status=JobStatus.STOPPED, checkpoint=None)
    assert "1–206, none kept" in report_text(ended)
    assert "1–206, kept to 4 " in report_text(replace(ended, checkpoint=CheckpointRef(step=4, sha256="0" * 64)))
    assert "1–206  lost" in report_text(replace(ended, checkpoint=CheckpointRef(step=206, sha256="0" * 64)))
    again = (attempts[0], replace(attempts[2], first_step=1))
    assert "1–206, none kept  lost" in report_text(replace(known, attempts=again))
    printed = (attempts[0], replace(attempts[2], first_step=170))  # which step is printed first says nothing
    assert "1–206    lost" in report_text(replace(known, attempts=printed))
    older = replace(attempts[2], number=4, first_step=101, saved_step=100)
    farther = replace(known, attempts=(*attempts, older))
    assert "1–206, kept to 100" in report_text(farther)
    assert "156–300, none kept" in report_text(farther)
    assert [one["kept_to_step"] for one in report_json(farther)["attempts"]] == [100, None, 155, None]


def test_whether_a_job_trains_its_machines_have_to_say_where_nobody_supervises_it():
    silent = unheard(*UNHEARD)
    assert replace(silent, supervisor="process 1 on vm").condition is Condition.TRAINING
    assert replace(silent, nodes=()).kind is ConditionKind.LEFT
    members = tuple(replace(one, outcome=Outcome.DONE) for one in silent.attempts[0].members)
    assert replace(silent, attempts=(replace(silent.attempts[0], members=members),)).kind is ConditionKind.TRAINED


def test_a_job_of_whose_machines_some_answer_trains_and_says_which_do_not():
    some = told(TRAINS[0], up("b"))
    some = replace(some, standing=(some.standing[0], replace(some.standing[1], status=None)))
    assert report_text(some).split("\n\n")[:2] == [
        "live: TRAINING, NOBODY SUPERVISES, step 605 of 768, 10 steps/s, 16.3 s to go",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "nobody starts training again when a machine is interrupted now; all switch themselves off at 12:30:00 UTC\n"
        "b does not answer\n"
        "go on: gpucloud train live · end it: gpucloud down live",
    ]


SAVED = CheckpointRef(step=4, sha256="0" * 64)
FAILED = part(1, Outcome.FAILED, step=18, total_steps=768, age_s=40.0)


def test_an_attempt_of_which_nothing_runs_any_more_is_not_called_training():
    """Its other machine was killed; the node group has started one in its place, on which nothing of it runs."""
    over = told(up("b", FAILED), up("c"))
    saved = replace(over, checkpoint=SAVED, prepared=True)
    assert report_text(saved).split("\n\n")[:2] == [
        "live: waiting, nobody supervises, step 4 of 768 (checkpoint)",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "attempt 1 has ended; nothing trains on its 2 machines; all is off by itself at 12:30:00 UTC\n"
        "go on from step 4: gpucloud train live · end it: gpucloud down live",
    ]
    assert "go on from the beginning: gpucloud train live" in report_text(over)
    known = report_json(saved)
    assert (known["condition"], known["last_step"]) == ("waiting_unsupervised", 4)
    assert "live  waiting, nobody supervises  " in jobs_text([saved])
    assert going_on_line(saved) is None
    assert "  its ranks have ended  " in report_text(saved)
    assert "running" not in report_text(saved)


def test_an_attempt_that_lost_the_machine_of_rank_0_unheard_made_steps_that_nobody_knows():
    """Its supervisor died 25 s after its start and 1 s after step 31; that machine went 40 s after the start."""
    over = told(up("b", part(1, Outcome.FAILED)), up("c"))
    (attempt,) = over.attempts
    began = attempt.started_at
    heard = replace(attempt, first_step=1, last_step=31, last_step_at=began + timedelta(seconds=24), pace_s=0.8)
    lived = UsageInterval(node_id="a", pool=POOL, launched_at=began, ended_at=began + timedelta(seconds=40))
    known = replace(over, attempts=(heard,), intervals=(lived, replace(lived, node_id="b", ended_at=None)))
    assert "1        2      1–31 or more, none kept  its ranks have ended  40 s" in report_text(known)
    assert "1–31, none kept  its ranks have ended  40 s" in report_text(
        replace(known, attempts=(replace(heard, last_step_at=began + timedelta(seconds=39)),))
    )
    closed = replace(heard, reason=ExitReason.LOST, ended_at=began + timedelta(minutes=2))
    assert "1–31 or more, none kept  lost   40 s" in report_text(replace(known, attempts=(closed,)))


def test_an_attempt_that_ended_on_machines_that_all_live_has_failed_by_itself():
    both = told(up("a", FAILED), up("b", replace(FAILED, progress=None)))
    assert report_text(both).startswith("live: its script has failed, nobody supervises\n")
    assert (
        "attempt 1 has ended: its script has failed; nothing trains on its 2 machines;"
        " all is off by itself at 12:30:00 UTC\nsee why: gpucloud logs live\n"
        "gpucloud train live ends it as failed; given once more, it goes on from the beginning\n" in report_text(both)
    )
    assert "given once more, it goes on from step 4\n" in report_text(replace(both, checkpoint=SAVED))
    assert "1        2      1–385, none kept  its ranks have ended  20 s" in report_text(both)
    assert headline(both).splitlines()[0] == "live: its script has failed, nobody supervises, attempt 1"
    barred = told(up("a", FAILED), up("b", part(1, Outcome.BARRED)))
    assert report_text(barred).startswith("live: waiting, nobody supervises\n")
    assert "look after it: gpucloud train live · end it: gpucloud down live" in report_text(barred)


@pytest.mark.parametrize(
    ("nodes", "silent", "condition"),
    [
        ((up("a", FAILED), up("b", part(1))), (), ConditionKind.UNSUPERVISED),  # a rank runs there
        ((up("a", FAILED), up("b")), (), ConditionKind.UNSUPERVISED),  # where it is not begun yet
        ((up("a", FAILED), up("b", part(7, Outcome.FAILED))), (), ConditionKind.UNSUPERVISED),  # of another attempt
        ((up("a", FAILED), up("b", part(1))), ("b",), ConditionKind.LEFT),
        ((up("a", FAILED), up("b", part(1))), ("a", "b"), ConditionKind.SILENT),
        ((up("a", FAILED), up("b", part(1, Outcome.DONE))), (), ConditionKind.LEFT),
        ((up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT))), (), ConditionKind.LEFT),
        (
            (up("a", part(1, Outcome.DONE)), up("b")),
            ("b",),
            ConditionKind.UNSUPERVISED,
        ),  # it may bring its work to its end
        ((up("a", part(1, Outcome.DONE)),), (), ConditionKind.LEFT),
        ((up("a", part(1, Outcome.DONE)), up("b", part(1, Outcome.DONE))), (), ConditionKind.TRAINED),
    ],
)
def test_an_attempt_is_over_where_every_machine_that_answers_has_nothing_running(nodes, silent, condition):
    known = told(*nodes)
    standing = tuple(replace(one, status=None) if one.node_id in silent else one for one in known.standing)
    assert replace(known, standing=standing).kind is condition
    assert replace(known, standing=standing, supervisor="process 1 on vm").condition is Condition.TRAINING


def test_the_forecast_of_an_attempt_that_is_over_goes_by_no_pace_of_it():
    spend = replace(SPEND, usd_per_hour=Decimal(1), promised_usd=Decimal("0.5"))
    for node, foreseen in ((part(1, step=605, total_steps=768), True), (FAILED, False)):
        known = replace(told(up("a", node)), spend=spend)
        assert (with_forecast(known).spend.forecast_usd is not None) is foreseen


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"status": JobStatus.STOPPED, "reason": ExitReason.STOPPED}, 4),
        ({"status": JobStatus.FAILED, "reason": ExitReason.BUDGET}, 4),
        ({"status": JobStatus.FAILED, "reason": ExitReason.USER_ERROR, "checkpoint": None}, None),
        ({"status": JobStatus.SUCCEEDED, "reason": ExitReason.SUCCEEDED}, 5),
    ],
)
def test_of_a_job_that_has_ended_counts_what_is_saved_unless_it_succeeded(changes, step):
    ended = over(**{"checkpoint": SAVED, **changes})
    assert report_json(ended)["last_step"] == step
    assert f"  {step or '-'}  " in jobs_text([ended]).splitlines()[1]


@pytest.mark.parametrize("supervisor", [None, "process 1 on vm"])
def test_of_an_attempt_without_a_machine_counts_what_is_saved(supervisor):
    gone_all = replace(told(supervisor=supervisor), checkpoint=SAVED)
    known = report_json(gone_all)
    assert (known["last_step"], known["last_step_at"]) == (4, None)
    assert report_json(replace(gone_all, checkpoint=None))["last_step"] is None


def test_no_machine_takes_a_job_over_that_does_not_answer():
    silent = unheard(*UNHEARD, drives_itself=True)
    assert replace(silent, hands_over=True).condition is Condition.SILENT
    assert "takes over within a minute" not in report_text(replace(silent, hands_over=True))
    idle = replace(silent, hands_over=True, attempts=())
    assert idle.condition is Condition.LEFT
    assert "a, b do not answer" in report_text(idle)
    some = replace(silent, hands_over=True, standing=(replace(silent.standing[0], status=TRAINS[0].status),))
    assert some.condition is Condition.HANDING_OVER


def test_who_goes_on_with_machines_that_do_not_answer_hears_what_they_cost_and_not_that_they_train():
    cost = "cost 1.17 USD an hour, until 12:30:00 UTC at the latest, 0.55 USD more at the most"
    assert going_on_line(unheard(*UNHEARD)) == (
        f"live goes on: attempt 1 at step 385 (11:59:44 UTC); its 2 machines have not answered since, and {cost}"
    )
    one = unheard(up("a"))
    assert (told := going_on_line(one)) is not None
    assert told.startswith(
        "live goes on: attempt 1 at step 385 (11:59:44 UTC); its machine has not answered since, and costs 1.17 USD"
    )
    saved = replace(one, checkpoint=CheckpointRef(step=385, sha256="0" * 64))
    assert (told := going_on_line(saved)) is not None
    assert told.startswith("live goes on: attempt 1 at step 385; its machine does not answer, and costs")
    more = replace(one, nodes=unheard(*UNHEARD).nodes)
    assert "its machine has not answered since; its 2 machines cost" in (going_on_line(more) or "")


def test_figures_that_no_node_was_asked_for_say_how_old_they_are():
    first = report_text(told(*TRAINS, supervisor="process 1 on vm", visited=False)).splitlines()[0]
    assert first == "live: training, step 385 of 768 as of 11:59:44 UTC, supervised by process 1 on vm"


def test_a_job_whose_ranks_are_done_has_results_that_are_not_home():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    trained = replace(told(*done), outputs=("out/",))
    text = report_text(trained)
    assert text.startswith("live: trained, its results are not home yet, step 768")
    assert "gpucloud train live brings them home, and ends its machines" in text
    assert headline(trained).startswith("live: trained, its results are not home yet, attempt 1")


def test_a_job_that_brings_nothing_home_has_its_machines_left():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    text = report_text(told(*done))
    assert text.startswith("live: trained, not wound up, step 768")
    assert "gpucloud train live winds it up" in text
    members = tuple(replace(one, outcome=Outcome.DONE) for one in told(*done).attempts[0].members)
    ends = told(*done, supervisor="process 1 on vm")
    ends = replace(ends, attempts=(replace(ends.attempts[0], members=members),))
    assert condition_word(ends) == "trained, being wound up"


def test_a_script_that_is_done_ended_when_it_wrote_last_however_late_somebody_looks():
    first = part(1, Outcome.DONE, step=768, phase="done", age_s=40.0)
    done = told(up("a", first), up("b", replace(part(1, Outcome.DONE), over_s=40.0)))
    assert "1        2      1–768  trained  20 s\n" in report_text(done)
    assert told(up("a", first), up("b", part(1, Outcome.DONE))).over_at is None  # nobody saw b's end


def test_the_end_of_a_script_is_told_as_it_was_first_heard_whatever_clocks_say_since():
    over = replace(part(1, Outcome.DONE), over_s=20.0)
    heard = told(up("a", over), up("b", over))
    (attempt,) = heard.attempts
    later = replace(heard, looked_at=NOW + timedelta(seconds=0.3))
    assert later.over_at != heard.over_at
    ended = replace(attempt, over_at=NOW - timedelta(seconds=20))
    assert replace(later, attempts=(ended,)).over_at == ended.over_at


def test_a_script_that_is_done_took_as_long_at_each_look():
    first = part(1, Outcome.DONE, step=768, phase="done", age_s=40.0)
    later = first.later(timedelta(minutes=5))
    assert later.progress.age_s == 340.0
    assert later.shown == later.progress
    early, late = (
        replace(told(up("a", one), up("b", replace(one, progress=None))), looked_at=NOW + span)
        for one, span in ((first, timedelta(0)), (later, timedelta(minutes=5)))
    )
    assert early.over_at == late.over_at


def test_a_script_that_ended_while_nobody_looked_took_as_long_when_somebody_goes_on_with_it():
    """It tells no steps and ended 40 s after its start; whoever came four hours later closed its attempt."""
    over = replace(part(1, Outcome.DONE), over_s=20.0)
    done = told(up("a", over), up("b", over))
    assert "  trained  40 s\n" in report_text(done)
    begun = replace(opened("a", "b"), started_at=NOW - timedelta(minutes=1))
    later = snapshot(up("a", over), up("b", over), state=state(attempts=(begun,)))
    seen = transitions.since(transitions.record(later), later, 2)
    closed = transitions.close_attempt(seen, CloseAttempt(reason=ExitReason.SUCCEEDED), NOW + 4 * HOUR)
    ended = report(closed, SPEND, (), later.group, None)
    assert "  succeeded  40 s" in report_text(ended)
    (attempt,) = report_json(ended)["attempts"]
    assert attempt["ended_at"] == (NOW - timedelta(seconds=20)).isoformat()


def test_an_attempt_that_nobody_heard_to_its_end_took_as_long_at_most_before_and_after_it_is_gone_on_with():
    """Its supervisor heard it for 10 s, its machine went a minute after its start."""
    began = NOW - timedelta(minutes=10)
    word, off = began + timedelta(seconds=10), began + timedelta(minutes=1)
    lived = UsageInterval(node_id="a", pool=POOL, launched_at=began, last_word_at=word, ended_at=off)
    first = replace(opened("a"), started_at=began)
    known = state(attempts=(first,), nodes=(lived,), status=JobStatus.RUNNING)
    group = snapshot(state=known).group
    left = replace(report(known, SPEND, (), group, None), looked_at=NOW, written_at=word)
    assert "unheard since 11:50 UTC, its machines are off  at most 1 min\n" in report_text(left)
    lost = replace(known, attempts=(replace(first, reason=ExitReason.LOST, ended_at=NOW),))
    assert "  lost   at most 1 min\n" in report_text(report(lost, SPEND, (), group, None))
    heard = replace(lost, nodes=(replace(lived, last_word_at=off - timedelta(seconds=1)),))
    assert "  lost   1 min\n" in report_text(report(heard, SPEND, (), group, None))


def test_an_attempt_whose_machine_came_back_after_a_power_cut_worked_at_most_until_then():
    """It was heard for 10 s and was off for hours; its new agent knows that its script is over, not since when."""
    began, word = NOW - 3 * HOUR, NOW - 3 * HOUR + timedelta(seconds=10)
    lived = UsageInterval(node_id="a", pool=POOL, launched_at=began, last_word_at=word)
    begun = state(attempts=(replace(opened("a"), started_at=began),), nodes=(lived,), status=JobStatus.RUNNING)
    back = replace(up("a", part(1, Outcome.KILLED)), last_word_at=NOW)
    seen = snapshot(back, state=begun)
    known = replace(report(begun, SPEND, (), seen.group, None), looked_at=NOW, written_at=word)
    alone = with_answers(known, (NodeStanding(node_id="a", status=back.status),))
    assert "its ranks have ended  at most 3 h\n" in report_text(alone)

    def closed(seen):
        noted = transitions.since(transitions.record(seen), seen, 1)
        lost = transitions.close_attempt(noted, CloseAttempt(reason=ExitReason.LOST), NOW)
        return report_text(report(lost, SPEND, (), seen.group, None))

    assert "  lost   at most 3 h\n" in closed(seen)
    dated = snapshot(up("a", replace(part(1, Outcome.KILLED), over_s=60.0)), state=begun)
    assert "  lost   2 h 59 min\n" in closed(dated)


def test_results_that_a_supervisor_brings_home_ask_nobody_to_bring_them():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    brings = told(*done, supervisor="process 1 on vm")
    members = tuple(replace(one, outcome=Outcome.DONE) for one in brings.attempts[0].members)
    stepped = NOW - timedelta(seconds=25)
    attempt = replace(brings.attempts[0], members=members, done_at=stepped)
    text = report_text(replace(brings, standing=(), attempts=(attempt,), outputs=("out/",)))
    assert text.startswith("live: trained, its results are not home yet, step 768")
    assert "1        2      1–768  trained  35 s\n" in text
    assert "gpucloud train" not in text.split("\n\n", 2)[2]


def test_who_supervises_a_job_says_whether_it_has_trained_to_those_who_ask_its_nodes_too():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    asked, others = (told(*done, supervisor="process 1 on vm", visited=visited) for visited in (True, False))
    assert asked.condition is others.condition is Condition.TRAINING


def test_steps_that_nodes_tell_of_are_the_jobs_for_programs_too():
    told_json = report_json(told(*TRAINS))
    assert (told_json["last_step"], told_json["attempts"][-1]["last_step"]) == (605, 605)
    assert report_json(told(*TRAINS, visited=False))["last_step"] == 385


@pytest.mark.parametrize(
    "nodes",
    [
        (up("a", part(7, step=605)), up("b", part(7))),  # of another attempt, which is over
        (up("a", part(1)), up("b", part(1, step=605))),  # of another rank than the first
    ],
)
def test_what_is_no_step_of_the_first_rank_in_the_open_attempt_is_none_of_the_job(nodes):
    known = report_json(told(*nodes))
    assert (known["last_step"], known["attempts"][-1]["last_step"]) == (385, 385)


def test_an_open_attempt_has_taken_so_long_as_it_was_when_the_job_was_looked_at():
    (row,) = (line for line in report_text(told(*TRAINS)).splitlines() if line.startswith("1  "))
    assert row == "1        2      1–605  running  1 min"


def test_an_attempt_that_has_told_no_step_yet_is_running_all_the_same():
    world = snapshot(up("a", part(1)), up("b", part(1)), state=state(attempts=(opened("a", "b"),)))
    assert report(world.state, SPEND, (), world.group, None).status is JobStatus.RUNNING


def test_a_script_that_tells_no_steps_was_started_again_after_so_long():
    first = replace(opened("a", "b"), reason=ExitReason.LOST)
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=66))
    world = snapshot(up("a", part(2)), state=state(attempts=(first, opened("a", "c", number=2)), interruptions=(lost,)))
    text = report_text(report(world.state, SPEND, (), world.group, "process 1 on vm"))
    assert "b            lost  1           started after 6 s, tells no steps" in text, text


@pytest.mark.parametrize(
    ("later", "again"),
    [
        ({"started_at": NOW - timedelta(seconds=5)}, "running for 5 s, no step yet"),
        (
            {"started_at": NOW - timedelta(minutes=3)},
            "running for 3 min, no step yet",
        ),  # as its script told some before
        ({"reason": ExitReason.LOST}, "started after 6 s, told no step"),
    ],
)
def test_a_script_that_told_steps_before_tells_none_yet_while_its_next_attempt_is_open(later, again):
    first = replace(opened("a", "b"), reason=ExitReason.LOST, first_step=1, last_step=9)
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=66))
    attempts = (first, replace(opened("a", number=2), **later))
    world = snapshot(up("a", part(2)), state=state(attempts=attempts, interruptions=(lost,)))
    said = replace(report(world.state, SPEND, (), world.group, "process 1 on vm"), looked_at=NOW)
    row = next(line for line in report_text(said).splitlines() if line.startswith("b "))
    assert row.split("  ")[-1].strip() == again


def test_the_panel_waits_for_the_step_of_a_script_that_told_some_before():
    first = replace(opened("a"), reason=ExitReason.LOST, first_step=1, last_step=9)
    known = state(attempts=(first, opened("a", number=2)))
    assert panel_state(snapshot(up("a", part(2)), state=known), Wait(why="running"), SPEND).phase == (
        "running for 1 min, no step yet"
    )


def test_the_panel_says_since_when_a_script_runs_that_has_told_no_step_and_that_it_is_to_end():
    young = replace(opened("a"), started_at=NOW - timedelta(seconds=24))
    asked = {"ending_reason": ExitReason.STOPPED, "ending_at": NOW, "ordered": Stop.SAVE}
    phases = [
        panel_state(snapshot(up("a", part(1)), state=state(attempts=(one,))), Wait(why="running"), SPEND).phase
        for one in (young, opened("a"), replace(young, **asked), replace(young, **{**asked, "ordered": Stop.KILL}))
    ]
    assert phases == [
        "running for 24 s, no step yet",
        "running for 1 min, tells no steps",
        "asked to save and leave (stopped)",
        "ending (stopped)",
    ]


def test_a_restart_took_as_long_as_the_nodes_own_steps_say_whoever_looked_late():
    first = replace(opened("a"), reason=ExitReason.INTERRUPTED)
    second = replace(opened("a", number=2), started_at=NOW - timedelta(seconds=50))
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=56))
    # 400 steps of 0.1 s since the first one, told 0.1 s ago: it was made 40 s ago.
    nodes = (up("a", part(2, step=401, first_step=1)),)
    recorded = transitions.record(snapshot(*nodes, state=state(attempts=(first, second), interruptions=(lost,))))
    (again,) = recorded.interruptions
    assert again.resumed_at == NOW - timedelta(seconds=40.1)


@pytest.mark.parametrize(
    ("kind", "ended_ago", "again"),
    [
        (InterruptionKind.FROZEN, None, "1 min 10 s"),  # a minute was waited before it was given up
        (InterruptionKind.NOTICE, None, "1 min 10 s"),
        (InterruptionKind.LOST, 65, "1 min 5 s"),  # as the cloud says, whoever came back late to see it
        (InterruptionKind.LOST, None, "1 min 10 s"),
    ],
)
def test_training_goes_on_again_so_long_after_it_stopped_and_not_after_that_was_noticed(kind, ended_ago, again):
    """The last step was made 70 s ago, the machine given up 8 s ago, and the next attempt's first step is now."""
    noticed = Interruption(node_id="b", kind=kind, attempt=1, noticed_at=NOW - timedelta(seconds=8))
    end = NOW - timedelta(seconds=ended_ago) if ended_ago is not None else None
    intervals = (UsageInterval(node_id="b", pool=POOL, launched_at=NOW - HOUR, ended_at=end),)
    first = replace(opened("a", "b"), reason=ExitReason.LOST, last_step=9, last_step_at=NOW - timedelta(seconds=70))
    second = replace(opened("a", number=2), started_at=NOW)
    nodes = (up("a", part(2, step=10, first_step=10)),)
    known = state(attempts=(first, second), interruptions=(noticed,), nodes=intervals)
    recorded = transitions.record(snapshot(*nodes, state=known))
    said = report(recorded, SPEND, (), snapshot(*nodes).group, "here")
    row = next(line for line in report_text(said).splitlines() if line.startswith("b "))
    assert row.split("  ")[-1].strip() == again
    assert report_json(said)["interruptions"][0]["stopped_at"] is not None


def test_training_goes_on_again_with_the_first_step_that_a_self_saving_script_prints_and_not_with_its_next_save():
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=30))
    begun = replace(opened("a", number=2), started_at=NOW - timedelta(seconds=20))
    attempts = (replace(opened("a", "b"), reason=ExitReason.LOST), begun)
    saves = part(2, step=2, first_step=3, phase=UNTOLD, counts=Counts.SAVES)
    prints = Readings(step=120, first_step=101, total_steps=None, loss=None, step_seconds=0.5, longest_s=1.0, age_s=0.0)
    known = state(attempts=attempts, interruptions=(lost,))
    (silent,) = transitions.record(snapshot(up("a", saves), state=known)).interruptions
    assert silent.resumed_at is None
    (again,) = transitions.record(snapshot(up("a", replace(saves, readings=prints)), state=known)).interruptions
    assert again.resumed_at == NOW - timedelta(seconds=9.5)


def test_training_goes_on_again_with_a_step_that_a_script_prints_though_it_is_before_those_that_were_put_back():
    over = replace(opened("gone"), reason=ExitReason.LOST, ended_at=NOW - timedelta(seconds=20))
    gone = Interruption(node_id="gone", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=20))
    known = state(attempts=(over, opened("a", number=2)), interruptions=(gone,))
    put_back = part(2, step=60, phase=UNTOLD, first_step=61, committed_step=60)
    prints = Readings(step=4, first_step=1, total_steps=None, loss=None, step_seconds=0.5, longest_s=1.0, age_s=2.0)
    (again,) = transitions.record(snapshot(up("a", replace(put_back, readings=prints)), state=known)).interruptions
    assert again.resumed_at == NOW - timedelta(seconds=2)
    (silent,) = transitions.record(snapshot(up("a", put_back), state=known)).interruptions
    assert silent.resumed_at is None


@pytest.mark.parametrize("counts", [Counts.SAVES, Counts.STEPS])
def test_training_did_not_go_on_again_with_the_first_save_of_a_script_that_tells_no_steps(counts):
    """It was started again after a minute, and saves once an hour."""
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(minutes=63))
    first = replace(opened("a", "b"), reason=ExitReason.LOST, first_step=1, last_step=2, saved_step=2, counts=counts)
    attempts = (first, replace(opened("a", number=2), started_at=NOW - timedelta(minutes=62)))
    for step, told in ((2, "tells no steps"), (3, "its saves alone tell how far it is")):
        saves = part(
            2, step=step, first_step=3, phase=UNTOLD, counts=counts, committed_step=step, step_seconds=None, age_s=1.0
        )
        there = snapshot(up("a", saves), state=state(job="live", attempts=attempts, interruptions=(lost,)))
        known = transitions.record(there)
        assert known.interruptions[0].resumed_at is None
        said = replace(report(known, SPEND, (), there.group, "here"), looked_at=NOW)
        row = next(line for line in report_text(said).splitlines() if line.startswith("b "))
        assert row.endswith(f"started after 1 min, {told}")


def interrupted(*nodes, **changes):
    lost = Interruption(node_id="c", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(minutes=14))
    first = replace(opened("a", "c"), reason=ExitReason.LOST, first_step=1, last_step=385, step_seconds=0.1)
    second = replace(opened("a", "b", number=2), started_at=NOW - timedelta(minutes=12))
    return replace(told(*nodes, **changes), attempts=(first, second), interruptions=(lost,))


def test_a_script_whose_saves_tell_how_far_it_is_is_not_said_to_tell_no_steps_beside_them():
    runs = interrupted(up("a", part(2)), up("b", part(2)))
    first, second = runs.attempts
    saved = replace(second, first_step=6, last_step=12, saved_step=12, counts=Counts.STEPS, reason=ExitReason.SUCCEEDED)
    told = report_text(replace(runs, attempts=(replace(first, step_seconds=None, saved_step=385), saved)))
    assert "started after 2 min, its saves alone tell how far it is\n" in told
    told = report_text(replace(runs, attempts=(replace(first, step_seconds=0.1, saved_step=385), saved)))
    assert "started after 2 min\n" in told  # it was gone after its first save: the script tells steps


def test_an_attempt_that_has_failed_is_not_said_to_run_and_to_tell_its_steps_yet():
    failed = interrupted(up("a", part(2, Outcome.FAILED)), up("b", part(2, Outcome.FAILED)))
    assert failed.ran_out
    assert "started after 2 min, told no step\n" in report_text(failed)
    runs = interrupted(up("a", part(2)), up("b", part(2)))
    assert "running for 12 min, no step yet\n" in report_text(runs)


def test_a_script_that_ended_unsaved_for_a_full_store_is_not_said_to_have_failed():
    why = "cannot write /s/x: No space left on device (free some space there, or name another store)"
    over = told(*(up(i, part(1, Outcome.FAILED, step=605, total_steps=768, unsaved=why)) for i in ("a", "b")))
    said = report_text(over)
    assert said.startswith("live: its store was full, nobody supervises")
    assert "attempt 1 has ended: its store was full; nothing trains" in said
    assert "free some space in its store, then: gpucloud train live ends it as failed; given once more" in said
    assert report_json(over)["condition"] == "failed_unsupervised"
    other = report_text(told(*(up(i, part(1, Outcome.FAILED, step=605, total_steps=768)) for i in ("a", "b"))))
    assert other.startswith("live: its script has failed, nobody supervises")


def test_whoever_looks_hears_that_training_goes_on_again_before_a_supervisor_has_written_it_down():
    """Its machines made 400 steps of 0.1 s since the first one; nobody supervises."""
    over = replace(
        opened("a", "c"), reason=ExitReason.LOST, first_step=1, last_step=385, last_step_at=NOW - timedelta(seconds=60)
    )
    lost = Interruption(node_id="c", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=NOW - timedelta(seconds=56))
    begun = replace(opened("a", "b", number=2), started_at=NOW - timedelta(seconds=50))

    def looked_at(*nodes):
        there = snapshot(*nodes, state=state(job="live", attempts=(over, begun), interruptions=(lost,)))
        standing = tuple(NodeStanding(node_id=one.node.id, status=one.status) for one in nodes)
        made = replace(report(there.state, SPEND, (), there.group, None), looked_at=NOW)
        recorded = transitions.record(there)
        return with_answers(made, standing), recorded.interruptions

    said, recorded = looked_at(up("a", part(2, step=401, first_step=1)), up("b", part(2)))
    assert said.interruptions == recorded
    assert report_json(said)["interruptions"][0]["resumed_at"] is not None
    assert "no step yet" not in report_text(said)
    untold, _ = looked_at(up("a", part(2)), up("b", part(2)))
    assert "running for 50 s, no step yet\n" in report_text(untold)


@pytest.mark.parametrize("supervisor", [None, "process 1 on vm"])
def test_an_attempt_of_which_no_machine_answers_is_not_said_to_run_in_the_table_either(supervisor):
    silent = unheard(*UNHEARD, supervisor=supervisor)
    since = tuple(Silence(node_id=one, since=NOW - timedelta(seconds=30)) for one in ("a", "b"))
    silent = replace(silent, silences=since if supervisor is not None else ())
    text = report_text(silent)
    assert silent.is_unheard
    assert "1        2      1–385  unheard since 11:59 UTC  at least 44 s\n" in text
    assert "running" not in text
    again = interrupted(*UNHEARD, supervisor=supervisor)
    again = replace(again, standing=silent.standing, silences=silent.silences)
    assert "running" not in report_text(again)


def test_training_did_not_stop_with_the_last_save_of_a_script_whose_saves_are_counted():
    saved, left = NOW - timedelta(minutes=9), NOW - timedelta(seconds=12)
    noticed = Interruption(node_id="b", kind=InterruptionKind.NOTICE, attempt=1, noticed_at=NOW - timedelta(seconds=20))
    first = replace(opened("a", "b"), reason=ExitReason.INTERRUPTED, last_step=2, last_step_at=saved, ended_at=left)
    attempts = (first, replace(opened("a", number=2), started_at=NOW - timedelta(seconds=8)))
    saves = CheckpointRef(step=2, sha256="0" * 64, counts=Counts.SAVES)
    for checkpoint, stopped in ((saves, left), (replace(saves, counts=Counts.STEPS), saved)):
        known = state(attempts=attempts, interruptions=(noticed,), checkpoint=checkpoint)
        there = snapshot(up("a", part(2, step=3, first_step=3)), state=known)
        assert transitions.record(there).interruptions[0].stopped_at == stopped


@pytest.mark.parametrize("kind", [InterruptionKind.FROZEN, InterruptionKind.LOST])
def test_a_script_that_tells_no_steps_was_stopped_with_its_machines_last_word(kind):
    """The machine was heard last 67 s before it was given up; the next attempt starts 7 s after that."""
    word, given_up = NOW - timedelta(seconds=74), NOW - timedelta(seconds=7)
    intervals = (UsageInterval(node_id="b", pool=POOL, launched_at=NOW - HOUR, last_word_at=word, silent_at=word),)
    noted = Interruption(node_id="b", kind=kind, attempt=1, noticed_at=given_up)
    begun = replace(opened("a", "b"), started_at=NOW - timedelta(seconds=84))
    known = transitions.note_interruptions(
        state(attempts=(begun,), nodes=intervals), NoteInterruptions(interruptions=(noted,))
    )
    first = replace(begun, reason=ExitReason.LOST, ended_at=given_up)
    attempts = (first, replace(opened("a", number=2), started_at=NOW - timedelta(seconds=6)))
    said = report(replace(known, attempts=attempts), SPEND, (), snapshot(up("a")).group, "here")
    later = report_text(replace(said, looked_at=NOW + timedelta(minutes=2)))
    assert "started after 1 min 8 s, tells no steps" in later
    again = tell_story(OpenAttempt(number=2, node_ids=("a",)), snapshot(state=replace(known, attempts=(first,))))
    assert again == "attempt 2 starts from the beginning on a (no checkpoint): 10 s of work lost"


@pytest.mark.parametrize(
    ("silent", "machines", "said"),
    [
        ("a", "ab", "it is given up as soon as it is known to be dead, or after 10 min in which nothing shows"),
        ("ab", "abc", "each is given up as soon as it is known to be dead, or after 10 min in which nothing shows"),
        ("a", "a", "it is given up as soon as it is known to be dead, or after 10 min in which nothing shows"),
        ("ab", "ab", "they may train all the same, and are waited for until 12:30:00 UTC; one of which the cloud says"),
        ("", "ab", None),
    ],
)
def test_status_says_for_how_long_silent_machines_are_waited_for(silent, machines, said):
    since = NOW - timedelta(seconds=40)
    intervals = tuple(
        UsageInterval(node_id=i, pool=POOL, launched_at=NOW - HOUR, silent_at=since if i in silent else None)
        for i in machines
    )
    open_one = opened(*machines)
    there = snapshot(*map(up, machines), state=state(attempts=(open_one,), nodes=intervals, paid_until=LATER))
    told_of = replace(report(there.state, SPEND, (), there.group, "process 1 on vm"), looked_at=NOW)
    text = report_text(told_of)
    assert ("given up" in text or "waited for" in text) is (said is not None)
    assert said is None or said in text
    ends = replace(told_of, attempts=(replace(open_one, ending_reason=ExitReason.STOPPED),))
    assert "given up" not in report_text(ends)
    assert "waited for" not in report_text(ends)


def test_down_says_which_machines_keep_it_waiting_and_until_when():
    ending = opened("a", "b", ending_reason=ExitReason.STOPPED, ending_at=NOW - timedelta(seconds=30))
    quiet = NOW - timedelta(seconds=50)

    def told_of(attempt, *silent):
        nodes = tuple(
            UsageInterval(node_id=i, pool=POOL, launched_at=NOW - HOUR, silent_at=quiet if i in silent else None)
            for i in ("a", "b", "c")
        )
        return end_unheard(state(attempts=(attempt,), nodes=nodes), LIMITS, NOW)

    assert told_of(ending, "a") == "a does not hear of the end: waited for until 12:01:30 UTC at the latest"
    assert told_of(ending, "a", "b") == "a, b do not hear of the end: waited for until 12:01:30 UTC at the latest"
    assert told_of(ending, "c") is None  # it has no part in the attempt
    quiet = NOW - timedelta(seconds=0.25)  # a late answer
    assert told_of(ending, "a") is None
    assert told_of(replace(ending, ending_at=None), "a") is None


def test_whoever_ends_a_job_whose_machines_are_silent_says_once_until_when_they_are_waited_for():
    ending = opened("a", ending_reason=ExitReason.STOPPED, ending_at=NOW - timedelta(seconds=30))
    quiet = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR, silent_at=NOW - timedelta(seconds=50))
    world = snapshot(up("a", silent=50), state=state(attempts=(ending,), nodes=(quiet,)))
    waits = "a does not hear of the end: waited for until 12:01:30 UTC at the latest"
    order = EndAttempt(how=Stop.SAVE, reason=ExitReason.STOPPED)

    told = Announcements()
    heard = replace(world, nodes=(up("a"),), state=state(attempts=(opened("a"),)))
    assert waits not in told.news(order, heard, LIMITS)  # it is not known yet
    assert waits in told.news(Wait(why="a save"), world, LIMITS)
    killing = EndAttempt(how=Stop.KILL, reason=ExitReason.LOST)
    assert all(waits not in told.news(action, world, LIMITS) for action in (killing, Wait(why="the end")))

    told = Announcements()
    ordered = replace(world, state=state(attempts=(opened("a"),), nodes=(quiet,)))
    assert waits not in told.news(order, ordered, LIMITS)  # the order says so in its own line
    assert waits not in told.news(Wait(why="a save"), world, LIMITS)


@pytest.mark.parametrize(
    ("outcome", "left"), [(None, timedelta(seconds=7)), (Outcome.DONE, None), (Outcome.LEFT, None)]
)
def test_nothing_is_left_to_go_of_an_attempt_whose_first_rank_has_ended(outcome, left):
    world = snapshot(up("a", part(step=30, outcome=outcome)), state=state(attempts=(opened("a"),)))
    assert time_left(world) == left


def test_machines_that_are_ready_and_have_no_attempt_are_prepared():
    ready = replace(told(up("a"), up("b")), attempts=(), prepared=True)
    assert condition_word(ready) == "prepared, nothing trains on it"
    assert condition_word(replace(ready, prepared=False)) == "waiting, nobody supervises"
    waits = replace(ready, supervisor="process 1 on vm")
    assert condition_word(replace(waits, least_nodes=2)) == "starting"
    assert condition_word(replace(waits, least_nodes=3)) == "waiting for more machines"
    assert condition_word(replace(waits, nodes=())) == "waiting for machines"


def test_an_attempt_took_no_longer_than_its_machines_lived_whenever_its_end_was_seen():
    """Its one machine switched itself off after 10 min; four hours later somebody ended the job."""
    began = NOW - 4 * HOUR
    first = replace(opened("a"), started_at=began, ended_at=NOW, reason=ExitReason.LOST, first_step=1, last_step=5)
    lived = UsageInterval(node_id="a", pool=POOL, launched_at=began, ended_at=began + timedelta(minutes=10))
    saved = CheckpointRef(step=5, sha256="0" * 64)
    known = state(job="live", attempts=(first,), status=JobStatus.STOPPED, checkpoint=saved, nodes=(lived,))
    group = snapshot(state=known).group
    assert "1        1      1–5    lost   10 min\n" in report_text(report(known, SPEND, (), group, None))
    unknown = replace(known, nodes=())
    assert "1        1      1–5    lost   4 h\n" in report_text(report(unknown, SPEND, (), group, None))
    silent = Interruption(
        node_id="a",
        kind=InterruptionKind.FROZEN,
        attempt=1,
        noticed_at=NOW,
        stopped_at=began + timedelta(minutes=7),
    )
    frozen = replace(unknown, interruptions=(silent,))
    assert "1        1      1–5    lost   7 min\n" in report_text(report(frozen, SPEND, (), group, None))


def test_a_machine_that_came_while_nobody_supervised_is_not_prepared_and_not_silent():
    """The cloud started it in place of another: it has no agent that could answer."""
    came = UsageInterval(node_id="c", pool=POOL, launched_at=NOW - timedelta(seconds=30))
    known = replace(told(TRAINS[0], up("c")), intervals=(came,))
    known = replace(known, standing=(known.standing[0], NodeStanding(node_id="c", status=None)))
    text = report_text(known)
    assert "\nc is not prepared, since nobody supervises: gpucloud train live prepares it\n" in text
    assert "does not answer" not in text
    assert use_rows(known)[-1][:2] == ("c", "not prepared: nobody supervises")
    assert [one["prepared"] for one in report_json(known)["nodes"]] == [True, False]
    assert "; c is not prepared, since nobody supervises; " in (going_on_line(known) or "")
    supervised = replace(known, supervisor="process 1 on vm")
    assert use_rows(supervised)[-1][:2] == ("c", "is being prepared")
    once = replace(known, intervals=(replace(came, prepared=True),))
    assert "\nc does not answer\n" in report_text(once)
    assert use_rows(once)[-1][:2] == ("c", "does not answer")


def test_machines_that_are_there_are_prepared_and_not_waited_for():
    there = replace(told(up("a"), supervisor="process 1 on vm"), attempts=())
    assert condition_word(there) == "preparing its machines"
    assert report_json(there)["condition"] == "preparing"
    assert report_json(replace(there, least_nodes=2))["condition"] == "waiting_for_more"
    assert report_json(replace(there, prepared=True))["condition"] == "starting"
    assert condition_word(replace(there, nodes=())) == "waiting for machines"
    prepared = replace(there, prepared=True, supervisor="its own node a")
    assert report_text(prepared).splitlines()[0] == "live: starting, supervised by its own node a"


GO_ON = (
    ExitReason.STOPPED,
    ExitReason.IDLE,
    ExitReason.LOST,
    ExitReason.HUNG,
    ExitReason.INTERRUPTED,
    ExitReason.NO_CAPACITY,
    ExitReason.REFUSED,
    ExitReason.UNPREPARED,
)


@pytest.mark.parametrize("reason", GO_ON)
def test_a_job_that_ended_within_its_limits_says_last_how_it_goes_on_and_with_what(reason):
    assert reason.exit_code not in CLOSED
    stopped = over(reason.status, reason, torn_down=True, checkpoint=CheckpointRef(step=5, sha256="0" * 64))
    assert report_text(stopped).splitlines()[-1] == (
        "gpucloud train live goes on in the same run, from step 5, with the 0.989 USD left of its budget"
    )
    assert (
        report_text(replace(stopped, checkpoint=None))
        .splitlines()[-1]
        .startswith("gpucloud train live goes on in the same run, from the beginning, with ")
    )


@pytest.mark.parametrize(
    ("needs", "stopped", "mended"),
    [
        (
            Resumption(budget_usd=Decimal("5.291")),
            "gpucloud train live --budget '5.30 USD' goes on in the same run, from step 5:"
            " the 0.989 USD left of its budget are too little for a start",
            "mend it and run the same command with --budget '5.30 USD': this run goes on from step 5:"
            " the 0.989 USD left of its budget are too little for a start (--again begins a new run)",
        ),
        (
            Resumption(budget_usd=Decimal("5.291"), as_last=POOL),
            "gpucloud train live goes on in the same run, from step 5, if machines are offered that the 0.989 USD left"
            " of its budget start; on local.p2.xlarge spot in us-east-2a, as last, it takes --budget '5.30 USD'",
            "mend it and run the same command: this run goes on from step 5, if machines are offered that the 0.989 USD"
            " left of its budget start; on local.p2.xlarge spot in us-east-2a, as last, it takes --budget '5.30 USD'"
            " (--again begins a new run)",
        ),
        (
            Resumption(is_late=True),
            "with a later `deadline:`, gpucloud train live goes on in the same run, from step 5,"
            " with the 0.989 USD left of its budget",
            "mend it and run the same command with a later `deadline:`: this run goes on from step 5,"
            " with the 0.989 USD left of its budget (--again begins a new run)",
        ),
    ],
)
def test_a_way_on_that_would_be_refused_names_what_has_to_be_given(needs, stopped, mended):
    saved = {"torn_down": True, "checkpoint": CheckpointRef(step=5, sha256="0" * 64), "resumption": needs}
    assert report_text(over(JobStatus.STOPPED, ExitReason.STOPPED, **saved)).splitlines()[-1] == stopped
    failed = report_text(over(JobStatus.FAILED, ExitReason.USER_ERROR, **saved)).splitlines()[-1]
    assert failed.endswith(f" · {mended}")
    held = over(JobStatus.FAILED, ExitReason.USER_ERROR, up("a"), held_until=NOW + timedelta(minutes=5), **saved)
    given = f" with {' and '.join(needs.conditions)}" if needs.conditions else ""
    on = f"mend it and run the same command{given}: this run goes on from step 5, on the 1 machine held for it"
    assert on in report_text(held)


def test_the_list_says_why_a_job_ended_where_its_status_does_not():
    used_up = over(JobStatus.FAILED, ExitReason.BUDGET, torn_down=True)
    assert "live  failed (budget)  " in jobs_text([used_up])
    assert "live  succeeded  " in jobs_text([over(JobStatus.SUCCEEDED, ExitReason.SUCCEEDED, torn_down=True)])


def test_a_process_that_goes_on_says_what_trains_and_who_saw_to_it_last():
    left = told(up("a"), up("b"), visited=False)
    assert going_on_line(left) == (
        "live goes on: attempt 1 trains on 2 machines (step 385);"
        " its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC"
    )
    assert going_on_line(replace(left, last_supervisor=None)) == (
        "live goes on: attempt 1 trains on 2 machines (step 385)"
    )
    assert going_on_line(replace(left, supervisor="process 1 on vm")) is None
    assert going_on_line(replace(left, nodes=())) is None


def test_a_process_that_goes_on_finds_the_step_that_status_has():
    """More may be saved than its nodes told of, and of ranks that have ended nothing but that counts."""
    left = replace(told(up("a"), up("b"), visited=False), last_supervisor=None)
    saved = replace(left, checkpoint=CheckpointRef(step=400, sha256="0" * 64))
    assert report_json(saved)["last_step"] == 400
    assert going_on_line(saved) == "live goes on: attempt 1 trains on 2 machines (step 400)"


def test_machines_of_an_attempt_that_another_supervisor_began_are_not_prepared():
    later = Owner(id="x", host="vm", pid=1, started="s", since=NOW + timedelta(minutes=9))
    there = snapshot(up("a"), up("b"), state=state(attempts=(opened("a", "b"),), owner=later))
    assert tell_story(Prepare(node_ids=("a", "b")), there) == "checking a, b: what still trains there is not disturbed"
    assert (
        tell_story(Prepare(node_ids=("b", "c")), there)
        == "preparing c; checking b: what still trains there is not disturbed"
    )
    own = replace(there.state, owner=replace(later, since=NOW - timedelta(days=1)))
    assert tell_story(Prepare(node_ids=("b",)), replace(there, state=own)) == "preparing b"
    assert tell_story(Prepare(node_ids=("b", "c")), replace(there, state=state(owner=later))) == "preparing b, c"


def test_of_a_machine_that_is_given_up_or_silent_nothing_is_said_when_it_is_tried_again():
    later = Owner(id="x", host="vm", pid=1, started="s", since=NOW + timedelta(minutes=9))
    ends = opened("a", "b", ending_reason=ExitReason.LOST, ending_at=NOW)
    there = snapshot(up("a"), up("b"), state=state(attempts=(ends,), owner=later))
    assert not tell_story(Prepare(node_ids=("a",)), there)
    silent = snapshot(up("a", silent=9), up("b"), state=state(attempts=(opened("a", "b"),), owner=later))
    assert tell_story(Prepare(node_ids=("a", "b")), silent) == "checking b: what still trains there is not disturbed"


def test_a_machine_that_cannot_hear_of_an_end_is_named_with_how_long_it_is_waited_for():
    world = snapshot(up("a", silent=30), up("b", silent=1), state=state(job="live", attempts=(opened("a", "b"),)))

    def line(how, reason, limits=LIMITS):
        return tell_story(EndAttempt(how=how, reason=reason), world, limits=limits)

    asks = "asking the script to save and leave: "
    killed = "; waiting 1 min for that at the most, then it is killed"
    assert (
        line(Stop.SAVE, ExitReason.STOPPED)
        == f"{asks}stopped{killed}; a does not hear it: waiting 2 min for that at the most"
    )
    assert line(Stop.SAVE, ExitReason.INTERRUPTED) == f"{asks}interrupted; a does not hear it"
    slower = Limits(save=timedelta(seconds=90))
    assert line(Stop.SAVE, ExitReason.STOPPED, slower).endswith(
        "a does not hear it: waiting 3 min for that at the most"
    )
    assert line(Stop.SAVE, ExitReason.RESIZED) == f"{asks}resized{killed}; a does not hear it"
    assert line(Stop.KILL, ExitReason.STOPPED) == "ending the attempt: stopped"
    action = EndAttempt(how=Stop.SAVE, reason=ExitReason.STOPPED)
    there = snapshot(up("a"), state=state(attempts=(opened("a"),)))
    uploads = "what it saved 2 min more to reach the store"
    own = rules_for(CheckpointPolicy(directory=CheckpointDirectory(path="out")), None, Rules()).limits
    assert tell_story(action, there, limits=own) == (
        f"asking the script to save and leave: stopped; the script has 1 min for that, then it is killed, and {uploads}"
    )
    unasked, then = CheckpointDirectory(path="out"), "stopped; waiting 1 min for that at the most, then it is killed"
    assert tell_story(action, there, unasked) == f"ending the attempt once what its script has saved is kept: {then}"
    asked = replace(unasked, on_notice=OnNotice.SIGTERM)
    assert tell_story(action, there, asked) == f"asking the script to save and leave: {then}"


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        ({}, " 385 (11:59:44) "),
        ({"attempts": ()}, " - "),
    ],
)
def test_the_list_of_jobs_says_how_old_a_step_is(changes, cell):
    listed = jobs_text([replace(told(up("a"), up("b"), visited=False), **changes)]).splitlines()[1]
    assert cell in listed


def test_a_step_is_as_old_as_the_word_of_the_node_that_tells_it():
    """The supervisor writes every few seconds, whether anything is heard or not."""
    attempt = replace(opened("a", "b", first_step=1, last_step=385), total_steps=768)
    intervals = tuple(UsageInterval(node_id=one, pool=POOL, launched_at=NOW - HOUR) for one in ("a", "b"))
    for frozen, at in ((None, "11:59:58"), ("a", "11:59:20"), ("b", "11:59:58")):
        words = {one: NOW - timedelta(seconds=40 if one == frozen else 2) for one in ("a", "b")}
        nodes = tuple(replace(one, last_word_at=words[one.node_id]) for one in intervals)
        known = state(job="live", attempts=(attempt,), nodes=nodes, looked_at=NOW)
        world = snapshot(up("a"), up("b"), state=known)
        said = report(world.state, SPEND, (), world.group, "process 1 on vm")
        said = replace(said, written_at=NOW - timedelta(seconds=1), looked_at=NOW)
        assert step_words(said) == [f"step 385 of 768 as of {at} UTC"]
        assert f" 385 ({at}) " in jobs_text([said])
        assert report_json(said)["last_step_at"] == f"2026-03-01T{at}+00:00"


def test_a_supervisor_that_has_heard_nothing_makes_no_step_newer():
    """The machine said its last word 153 s ago, to another one; this one listens for 3 s."""
    attempt = replace(opened("a", first_step=1, last_step=286), total_steps=500)
    word = NOW - timedelta(seconds=153)
    interval = UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR, last_word_at=word)
    known = state(job="live", attempts=(attempt,), nodes=(interval,), looked_at=word)
    for silent in (0, 3):  # nothing was tried yet, or in vain
        node = replace(up("a", silent=silent), status=None)
        taken = transitions.record(
            replace(snapshot(node), state=transitions.since(known, snapshot(node, state=known), 1))
        )
        said = report(taken, SPEND, (), snapshot(node).group, "process 1 on vm")
        said = replace(said, written_at=NOW, looked_at=NOW)
        assert report_json(said)["last_step_at"] == "2026-03-01T11:57:27+00:00"
    heard = replace(up("a"), last_word_at=NOW)
    (interval,) = transitions.since(known, snapshot(heard, state=known), 1).nodes
    assert interval.last_word_at == NOW


@pytest.mark.parametrize(
    ("changes", "last_s", "word"),
    [
        ({"silent_for": timedelta(seconds=3)}, 153, "silent for 2 min 33 s"),
        ({"silent_for": timedelta(seconds=3.4)}, 2, "silent for 3 s"),
        ({"mute_for": timedelta(seconds=30)}, 90, "answers, and its agent says nothing for 1 min 30 s"),
    ],
)
def test_the_panel_counts_the_silence_of_a_machine_from_its_last_word_to_anybody(changes, last_s, word):
    interval = UsageInterval(
        node_id="a", pool=POOL, launched_at=NOW - HOUR, last_word_at=NOW - timedelta(seconds=last_s)
    )
    world = snapshot(replace(up("a"), **changes), state=state(attempts=(opened("a"),), nodes=(interval,)))
    assert panel_state(world, Wait(why="running"), SPEND).nodes[0].word == word


def test_of_a_job_that_trains_no_view_tells_a_step_of_a_silent_machine_as_if_it_were_of_now():
    attempt = replace(opened("a", "b", first_step=1, last_step=286), total_steps=500)
    word = NOW - timedelta(seconds=153)
    intervals = (
        UsageInterval(node_id="a", pool=POOL, launched_at=NOW - HOUR, last_word_at=word, silent_at=NOW - HOUR / 60),
        UsageInterval(node_id="b", pool=POOL, launched_at=NOW - HOUR, last_word_at=NOW),
    )
    silent = up("a", part(step=286, total_steps=500), silent=60)
    world = snapshot(silent, up("b"), state=state(job="live", attempts=(attempt,), nodes=intervals, looked_at=NOW))
    said = report(world.state, SPEND, (), world.group, "process 1 on vm")
    said = replace(said, written_at=NOW, looked_at=NOW, signed_by="own")
    head, lacks, *_ = report_text(said).split("\n\n")
    assert head == "live: training, 1 of 2 silent, step 286 of 500 as of 11:57:27 UTC, supervised by process 1 on vm"
    assert lacks == (
        "a has told its supervisor nothing since 11:57:27 UTC\n"
        "it is given up as soon as it is known to be dead, or after 10 min in which nothing shows that it lives"
    )
    assert "live  training, 1 of 2 silent" in jobs_text([said])
    assert [one["silent_since"] for one in report_json(said)["nodes"]] == ["2026-03-01T11:57:27+00:00", None]
    line = line_of(panel_state(world, Wait(why="running"), SPEND))
    assert line.startswith("train: step 286 of 500, nothing heard of a since 11:57:27 UTC, loss 0.5000, spent ")
    console = Console(file=io.StringIO(), width=100)
    console.print(live._panel(panel_state(world, Wait(why="running"), SPEND), (), 100))
    assert "step 286 of 500  as of 11:57:27 UTC" in console.file.getvalue()

    moment = replace(said, silences=(replace(said.silences[0], since=NOW - timedelta(seconds=1)),))
    assert "silent" not in report_text(moment)
    alone = replace(said, supervisor=None, last_supervisor="process 1 on vm")  # its word is of an earlier time
    assert "has told its supervisor nothing" not in report_text(alone)


def silences(*worlds):
    told = Announcements()
    return [told.news(Wait(why="running"), world, Limits()) for world in worlds]


def frozen_one(now_s, node, *others, **changes):
    known = state(attempts=(opened("a", **changes),))
    return replace(snapshot(node, *others, state=known), now=NOW + timedelta(seconds=now_s))


def test_of_machines_that_do_not_answer_it_is_said_that_their_attempt_may_go_on_and_of_one_when_it_is_given_up():
    silent, other = up("a", silent=9), up("b", silent=9)
    assert silences(frozen_one(0, silent, other), frozen_one(1, silent, other)) == [
        ("no machine answers: a, b; the attempt there may go on until 12:30:00 UTC at the latest",),
        (),
    ]
    assert silences(frozen_one(0, silent)) == [
        (
            "no machine answers: a; it is given up as soon as it is known to be dead, or after 10 min in which nothing"
            " shows that it lives",
        )
    ]
    (late,) = silences(frozen_one(21 * 60, silent))  # its time is over before the ten minutes are
    assert late == ("no machine answers: a; the attempt there may go on until 12:30:00 UTC at the latest",)
    ends = frozen_one(0, silent, ending_reason=ExitReason.LOST)
    assert silences(ends) == [("no machine answers: a; paid until 12:30:00 UTC",)]


def test_only_a_machine_that_was_silent_and_speaks_answers_again():
    silent = frozen_one(0, up("a", silent=9))
    heard = replace(up("a"), last_word_at=NOW + timedelta(seconds=5))
    assert silences(silent, frozen_one(5, heard))[1] == ("a answers again",)
    unheard = replace(up("a"), last_word_at=NOW - timedelta(seconds=9))  # it has not told anything since
    assert silences(silent, frozen_one(5, unheard), frozen_one(6, heard))[1:] == [(), ("a answers again",)]
    boots = replace(up("b", readiness=Readiness.NO), status=None)
    assert silences(silent, frozen_one(5, gone("a"), boots))[1] == ()
    assert silences(silent, frozen_one(5, up("a", silent=14), boots))[1] == ()


def test_steps_that_were_lost_are_in_no_view_the_step_where_a_job_stands():
    """The first attempt came to 300 and saved 200; the second has come to 210, then none goes on."""
    first = replace(opened("a", first_step=1, last_step=300), reason=ExitReason.LOST)
    second = opened("a", number=2, first_step=201, last_step=210)
    saved = CheckpointRef(step=200, sha256="0" * 64)
    for attempts, step in (((first, second), 210), ((first, opened("a", number=2)), 200), ((first,), 200)):
        world = snapshot(up("a"), state=state(job="live", attempts=attempts, checkpoint=saved))
        said = report(world.state, SPEND, (), world.group, "process 1 on vm")
        assert report_json(said)["last_step"] == step
        assert f"  {step}  " in jobs_text([said])
        assert "300" not in report_text(said).splitlines()[0]
    nothing = report(state(job="live", attempts=(first,)), SPEND, (), world.group, "process 1 on vm")
    assert report_json(nothing)["last_step"] is None


def test_the_list_of_jobs_has_the_step_that_nodes_say_now():
    assert " 412 " in jobs_text([told(up("a", part(step=412)), up("b"))]).splitlines()[1]


def test_a_job_with_a_deadline_says_until_when_it_trains_at_the_most() -> None:
    known = replace(told(up("a"), up("b")), deadline_at=NOW + timedelta(hours=1))
    assert "\n\ndeadline 13:00:00 UTC: its machines are off before, at 12:30:00 UTC\n\n" in report_text(known)
    supervised = replace(known, supervisor="process 1 on vm")
    then = "then it ends, done or not, and saves first if its script does"
    assert f"\n\ndeadline 13:00:00 UTC: {then}\n\n" in report_text(supervised)
    passed = NOW - timedelta(minutes=5)
    assert "\n\ndeadline 11:55:00 UTC: it is over, and the job ends\n\n" in report_text(
        replace(supervised, deadline_at=passed)
    )
    assert (
        "\n\nits deadline was at 11:55:00 UTC: without a later one, whoever supervises it next ends it\n\n"
        in report_text(replace(known, deadline_at=passed))
    )
    assert report_json(known)["deadline_at"] == "2026-03-01T13:00:00+00:00"
    assert "deadline" not in report_text(replace(known, status=JobStatus.SUCCEEDED, torn_down=True))


def test_a_step_that_is_saved_is_reached_though_its_node_told_of_an_earlier_one_last() -> None:
    known = replace(told(up("a", part(step=41)), up("b")), checkpoint=CheckpointRef(step=43, sha256="0" * 64))
    assert known.reached is not None
    assert known.reached.step == 43


def test_an_attempt_whose_results_come_home_has_ended_in_json_when_its_script_had():
    attempt = opened("a", "b", first_step=1, last_step=500)
    done = (up("a", part(outcome=Outcome.DONE)), up("b", part(outcome=Outcome.DONE)))
    known = transitions.since(state(attempts=(attempt,)), snapshot(*done, state=state(attempts=(attempt,))), 2)
    later = replace(snapshot(*done, state=known), now=NOW + timedelta(minutes=3))
    known = transitions.since(known, later, 2)
    said = report(known, SPEND, (), later.group, "process 1 on vm")
    assert said.kind is ConditionKind.TRAINED
    assert [one["ended_at"] for one in report_json(said)["attempts"]] == ["2026-03-01T12:00:00+00:00"]
    half = (up("a", part(outcome=Outcome.DONE)), up("b", part(step=3)))
    working = transitions.since(state(attempts=(attempt,)), snapshot(*half, state=state(attempts=(attempt,))), 2)
    said = report(working, SPEND, (), later.group, "process 1 on vm")
    assert [one["ended_at"] for one in report_json(said)["attempts"]] == [None]


def test_every_kind_of_condition_is_told_by_one_and_every_condition_has_words():
    assert list(USUAL) == list(ConditionKind)
    assert len(set(USUAL.values())) == len(ConditionKind)
    assert list(WORDS) == list(Condition)


def test_who_waits_for_an_end_elsewhere_is_told_how_far_it_is():
    attempt = opened("a", number=3)
    ends = replace(attempt, ending_reason=ExitReason.STOPPED, ending_at=NOW)
    stages = [
        state(attempts=(attempt,)),
        state(attempts=(replace(ends, ordered=Stop.SAVE),)),
        state(attempts=(replace(ends, ordered=Stop.KILL),)),
        state(attempts=(replace(ends, reason=ExitReason.STOPPED),), status=JobStatus.STOPPED),
    ]
    latest = format_moment(NOW + timedelta(seconds=60), NOW)
    assert [stage_of_end(one, LIMITS, NOW) for one in stages] == [
        "",
        f"attempt 3 is being ended: its script is waited for until {latest} at the latest, then killed",
        "attempt 3 is being ended",
        "digits has ended: its machines are being ended",
    ]
    assert [stage_of_end(one, LIMITS, NOW, has_outputs=True) for one in stages] == [
        "",
        f"attempt 3 is being ended: its script is waited for until {latest} at the latest, then killed;"
        " then its outputs are brought",
        "attempt 3 is being ended; then its outputs are brought",
        "digits has ended: its machines are being ended",
    ]
    stored = format_moment(NOW + timedelta(minutes=3), NOW)
    assert stage_of_end(stages[1], replace(LIMITS, upload=timedelta(minutes=2)), NOW) == (
        f"attempt 3 is being ended: its script is waited for until {latest} at the latest, then killed;"
        f" what it saved has until {stored} to reach the store"
    )


def test_who_waits_for_an_end_elsewhere_is_told_that_machines_are_paid_for_results_and_how_long():
    last = opened("a", number=3, reason=ExitReason.INTERRUPTED)
    over = {"status": JobStatus.STOPPED, "paid_until": NOW + timedelta(minutes=25)}
    machine = UsageInterval(node_id="a", pool=POOL, launched_at=NOW, ended_at=None)
    ended = state(attempts=(last,), nodes=(machine,), **over)
    ends, at_most = "digits has ended: its machines are being ended", "no longer than 10 min without any of them"
    waits = f"{ends}, its outputs brought first: {at_most}"
    off = ", and no later than 12:25:00 UTC, when the machines shut themselves off"

    def told(one, *, has_outputs=True):
        return stage_of_end(one, LIMITS, NOW, has_outputs=has_outputs)

    assert told(ended) == f"{waits}{off}"
    assert told(replace(ended, pool=replace(POOL, market=Market.OWNED))) == waits
    assert told(ended, has_outputs=False) == ends
    assert told(replace(ended, attempts=(replace(last, outputs_came=True),))) == ends
    assert told(replace(ended, nodes=(replace(machine, ended_at=NOW),))) == ends
    assert told(replace(ended, attempts=())) == ends


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, True),
        ({"last_step": 9}, False),
        ({"printed_step": 9}, False),
        ({"reason": ExitReason.USER_ERROR}, False),
    ],
)
def test_a_script_that_told_no_step_is_not_called_succeeded_alone(changes, says):
    attempt = opened("a", **{"reason": ExitReason.SUCCEEDED, "ended_at": NOW, **changes})
    status = JobStatus.SUCCEEDED if attempt.reason is ExitReason.SUCCEEDED else JobStatus.FAILED
    ended = state(job="live", attempts=(attempt,), status=status, exit_reason=attempt.reason, torn_down=True)
    text = report_text(report(ended, SPEND, (), snapshot(state=ended).group, None))
    line = "its script ended with 0 and told no step: nothing else shows that it trained; "
    assert (f"\n\n{line}" in text) is says
