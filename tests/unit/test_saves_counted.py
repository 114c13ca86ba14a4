"""The number of a save is called a step only where the script's checkpoint tells its own."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpucloud.agent.attempt.files import _progress
from gpucloud.cli.render.reports import jobs_text, report_json, report_text
from gpucloud.cli.render.use import headline, step_words
from gpucloud.domain.checkpoint.layouts import Additions
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    CounterDrop,
    Counts,
    Level,
    Manifest,
    Promise,
    commit_key,
    generation_bytes,
    generation_key,
    manifest_bytes,
    read_manifest,
    seal,
    unseal,
)
from gpucloud.domain.checkpoint.standing import Found, Standing
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.errors import UsageError
from gpucloud.domain.node.status import UNTOLD, Readings
from gpucloud.domain.state.state import Attempt, CheckpointRef, ExitReason, JobState, JobStatus
from gpucloud.domain.supervision.action import CloseAttempt, OpenAttempt
from gpucloud.domain.supervision.budget import overdue
from gpucloud.domain.supervision.membership import since_anew, unit_of
from gpucloud.domain.supervision.transitions import record, with_commit
from gpucloud.store import newest_commit
from gpucloud.usecases.checkpoint.checkpoints import of_step
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.jobstore.runs import _at_step
from gpucloud.usecases.supervise.story import tell_story
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.test_condition import told
from tests.unit.worlds import NOW, opened, part, snapshot, state, up

READ = Readings(
    step=640, first_step=1, total_steps=768, loss=None, step_seconds=1.0, longest_s=None, age_s=0.0
)  # fmt: skip
TWELFTH = CheckpointRef(step=12, sha256="0" * 64, counts=Counts.SAVES)
STEP = replace(TWELFTH, counts=Counts.STEPS)
SAVED = Manifest(commit=Commit(1, 12), world=1, promise=Promise(Level.BEST_EFFORT), pieces=(), counts=Counts.SAVES)


def test_what_a_checkpoints_number_counts_is_stored_with_it_and_known_from_the_store() -> None:
    assert read_manifest(manifest_bytes(SAVED)) == SAVED
    assert str(SAVED) == "save 12"
    with pytest.raises(ValueError, match="epochs"):
        read_manifest(seal({**unseal(manifest_bytes(SAVED)), "counts": "epochs"}))
    store = MemoryStore(JumpingClock(NOW))
    store.put(f"j/{generation_key(1)}", generation_bytes(base=None, owner="a"))
    store.put(f"j/{commit_key(SAVED.commit)}", manifest_bytes(SAVED))
    newest = newest_commit(store, "j")
    assert newest is not None
    assert (newest.step, newest.counts, newest.saved_at) == (12, Counts.SAVES, NOW)


def test_a_save_that_is_not_there_is_called_what_it_is() -> None:
    there = Standing(commit=SAVED.commit, found=Found(manifest=SAVED, committed_at=NOW), marks=frozenset())
    with pytest.raises(UsageError, match="there is no checkpoint of save 7: the nearest is 12"):
        of_step(7, (there,))


def test_a_script_that_reports_through_the_library_counts_steps() -> None:
    said = '{"step": 3, "first_step": 1, "phase": "train", "written_at": 0}'
    assert _progress(said)[0].counts is Counts.STEPS
    assert _progress(said.replace("{", '{"counts": "saves", ', 1))[0].counts is Counts.SAVES


def test_steps_that_were_told_before_the_first_save_are_no_saves() -> None:
    told_steps = replace(opened("a"), first_step=1, last_step=120)
    first = part(1, step=1, phase=UNTOLD, first_step=1, committed_step=1, counts=Counts.SAVES)
    attempt = record(snapshot(up("a", first), state=state(attempts=(told_steps,)))).attempts[0]
    assert (attempt.first_step, attempt.last_step) == (1, 1)
    none = part(1, step=0, phase=UNTOLD, first_step=1, counts=Counts.SAVES)
    assert record(snapshot(up("a", none), state=state(attempts=(told_steps,)))).attempts[0].last_step is None


@pytest.mark.parametrize(("checkpoint", "called"), [(TWELFTH, "save 12"), (STEP, "step 12")])
def test_the_story_calls_a_save_what_it_is(checkpoint: CheckpointRef, called: str) -> None:
    attempt = replace(opened("a"), first_step=1, last_step=12)
    there = snapshot(up("a"), state=state(attempts=(attempt,), checkpoint=checkpoint))
    ended = tell_story(CloseAttempt(reason=ExitReason.INTERRUPTED), there)
    assert ended == f"attempt 1 ended at {called}: interrupted, checkpoint at {called}"
    over = replace(attempt, reason=ExitReason.INTERRUPTED, ended_at=NOW)
    again = snapshot(up("a"), state=state(attempts=(over,), checkpoint=checkpoint))
    assert tell_story(OpenAttempt(number=2, node_ids=("a",)), again) == f"attempt 2 starts after {called} on a"
    assert f"the deadline is over, {called} is saved" in overdue(again.state).told


def test_reports_and_lists_call_a_save_what_it_is() -> None:
    known = replace(told(up("a"), up("b"), visited=False), checkpoint=TWELFTH)
    text = report_text(known)
    assert "checkpoint at save 12, manifest 0000000000000000" in text
    assert "attempt  nodes  saves  ended    took" in text
    assert step_words(known)[0].startswith("save 385 of 768 as of")
    assert "save 385 (11:59:44)" in jobs_text([known])


def test_a_number_of_a_save_is_no_step_for_programs() -> None:
    known = replace(told(up("a"), up("b"), visited=False), checkpoint=TWELFTH)
    saves, steps = report_json(known), report_json(replace(known, checkpoint=STEP))
    assert (saves["last_step"], saves["last_save"]) == (None, 385)
    assert (steps["last_step"], steps["last_save"]) == (385, None)
    assert (saves["checkpoint"]["counts"], steps["checkpoint"]["counts"]) == ("saves", "steps")
    numbers = ("first_step", "last_step", "first_save", "last_save", "kept_to_step", "kept_to_save")
    assert [saves["attempts"][0][name] for name in numbers] == [None, None, 1, 385, None, None]
    assert [steps["attempts"][0][name] for name in numbers] == [1, 385, None, None, None, None]


def test_the_last_save_gives_way_to_the_last_step_where_the_output_tells_that() -> None:
    """The script keeps a file of its own, whose saves are counted, and then prints the first of its steps."""
    saved = part(1, step=400, phase=UNTOLD, first_step=1, committed_step=400, counts=Counts.SAVES)
    printed = replace(saved, readings=READ)
    before, after = (report_json(replace(told(up("a", one), up("b")), checkpoint=None)) for one in (saved, printed))
    assert (before["last_step"], before["last_save"]) == (None, 400)
    assert (after["last_step"], after["last_save"]) == (640, None)
    for told_json in (before, after):  # as it is reckoned with, whatever is shown
        assert (told_json["attempts"][-1]["last_step"], told_json["attempts"][-1]["last_save"]) == (None, 400)


def lost(number: int, first: int | None, last: int | None, **changes: Any) -> Attempt:
    return opened("a", number=number, first_step=first, last_step=last, reason=ExitReason.LOST, **changes)


def of_attempts(*attempts: Attempt, **changes: Any) -> JobReport:
    return replace(told(up("a"), up("b"), visited=False), attempts=attempts, **changes)


def test_steps_of_an_attempt_that_saved_nothing_are_no_saves_once_a_later_one_saves() -> None:
    steps = lost(1, 1, 40, counts=Counts.STEPS)
    saves = lost(2, 1, 2, counts=Counts.SAVES, saved_step=2)
    known = of_attempts(steps, saves, checkpoint=replace(TWELFTH, step=2))
    text = report_text(known)
    assert "1        1      steps 1–40, none kept  lost" in text
    assert "2        1      1–2                    lost" in text
    first = report_json(known)["attempts"][0]
    numbers = ("first_step", "last_step", "kept_to_step", "first_save", "last_save", "kept_to_save")
    assert [first[name] for name in numbers] == [1, 40, 0, None, None, None]
    assert tell_story(CloseAttempt(reason=ExitReason.LOST), snapshot(state=state(attempts=(steps,)))).startswith(
        "attempt 1 ended: lost, last heard at step 40"
    )


def test_what_an_attempts_numbers_are_is_stored_with_it() -> None:
    printed = replace(part(1), readings=READ)
    (attempt,) = record(snapshot(up("a", printed), state=state(attempts=(opened("a"),)))).attempts
    assert (attempt.last_step, attempt.counts) == (640, Counts.STEPS)
    first = part(1, step=1, phase=UNTOLD, first_step=1, committed_step=1, counts=Counts.SAVES)
    (attempt,) = record(snapshot(up("a", first), state=state(attempts=(attempt,)))).attempts
    assert (attempt.last_step, attempt.counts) == (1, Counts.SAVES)


def test_a_save_that_nobody_heard_takes_the_place_of_the_steps_told_before_it() -> None:
    steps = opened("a", first_step=1, last_step=40, counts=Counts.STEPS, saved_step=1)
    (unheard,) = with_commit((steps,), 1, Counts.SAVES)
    assert (unheard.first_step, unheard.last_step, unheard.counts) == (1, 1, Counts.SAVES)
    assert with_commit((steps,), 20, Counts.STEPS) == (steps,)


def test_an_attempt_whose_script_began_anew_has_its_own_steps_and_keeps_none_of_those_before() -> None:
    before = lost(1, 1, 68, counts=Counts.STEPS, saved_step=60)
    running = opened("a", number=2, counts=Counts.STEPS, first_step=61, saved_step=60)
    drop = CounterDrop(saved=20, put_back=60)
    anew = part(2, step=20, phase=UNTOLD, first_step=1, committed_step=20, counter_drop=drop)
    printed = replace(anew, readings=replace(READ, step=33))
    world = snapshot(up("a", printed), state=state(attempts=(before, running), checkpoint=replace(STEP, step=20)))
    attempt = record(world).attempts[1]
    assert (attempt.first_step, attempt.last_step, attempt.saved_step, attempt.begun_anew) == (1, 33, 20, True)
    known = of_attempts(before, attempt, checkpoint=replace(STEP, step=20))
    text = report_text(known)
    assert "1–68, none kept  lost" in text
    assert "1–33             running" in text
    assert (
        "attempt 2 began anew: the script did not take the checkpoint that was put back; "
        "tell it to resume by `checkpoint: {resume_args: …}`" in text
    )
    given = replace(known, additions=Additions(words=("--resume",)))
    for ordered_at, tried in ((attempt.started_at, True), (attempt.started_at + timedelta(seconds=1), False)):
        said = report_text(replace(given, ordered_at=ordered_at))  # the order that is in force gives it to the next one
        assert ("put back; --resume did not have it resume" in said) is tried
        assert "attempt 2 began anew" in said
    goes_on = of_attempts(before, replace(attempt, reason=ExitReason.STOPPED), lost(3, 21, 50, saved_step=20))
    assert "did not have it" not in report_text(replace(goes_on, additions=given.additions))
    told_json = report_json(known)["attempts"]
    assert [(one["kept_to_step"], one["began_anew"]) for one in told_json] == [(0, False), (None, True)]
    third = lost(3, 21, 50, counts=Counts.STEPS, saved_step=20)
    after = of_attempts(before, replace(attempt, reason=ExitReason.LOST), third, checkpoint=replace(STEP, step=20))
    assert [one["kept_to_step"] for one in report_json(after)["attempts"]] == [0, 20, 20]


def test_saves_of_before_a_script_began_anew_are_not_kept_either() -> None:
    anew = lost(2, 3, 6, counts=Counts.SAVES, saved_step=6, begun_anew=True)
    known = of_attempts(lost(1, 1, 2, counts=Counts.SAVES, saved_step=2), anew, checkpoint=replace(TWELFTH, step=6))
    assert [one["kept_to_save"] for one in report_json(known)["attempts"]] == [0, None]


def test_a_script_that_saves_nothing_keeps_none_of_a_lost_attempt_however_far_a_later_one_came() -> None:
    lost_one, done = lost(1, 5, 40), replace(lost(2, 5, 200), reason=ExitReason.SUCCEEDED)
    known = of_attempts(lost_one, done, checkpoint=None, status=JobStatus.SUCCEEDED)
    assert [one["kept_to_step"] for one in report_json(known)["attempts"]] == [4, None]
    text = report_text(known)
    assert "5–40, none kept  lost" in text
    assert "5–200            succeeded" in text
    running = of_attempts(lost_one, replace(done, reason=None), checkpoint=None)
    assert "5–40, none kept  lost" in report_text(running)


def test_what_is_done_of_a_job_does_not_count_what_was_saved_before_its_script_began_anew() -> None:
    before, anew = lost(1, 1, 68, saved_step=60), lost(2, 1, 33, saved_step=20, begun_anew=True)
    assert since_anew((before, anew)) == (anew,)
    assert since_anew((before,)) == (before,)
    assert since_anew(()) == ()


def test_a_state_of_before_attempts_told_what_they_count_is_read_by_its_checkpoint() -> None:
    stored = to_json(state(attempts=(lost(1, 1, 12),), checkpoint=TWELFTH))
    plain = json.loads(stored)
    del plain["attempts"][0]["counts"], plain["attempts"][0]["begun_anew"]
    old = from_json(JobState, json.dumps(plain))
    assert (unit_of(old.attempts[0], old.checkpoint), unit_of(old.attempts[0], None)) == (Counts.SAVES, Counts.STEPS)
    assert not old.attempts[0].begun_anew


def test_how_far_another_files_run_came_is_told_in_what_its_attempts_count() -> None:
    steps, saves = lost(1, 1, 40, counts=Counts.STEPS), lost(2, 1, 2, counts=Counts.SAVES)
    anew = lost(2, 1, 33, counts=Counts.STEPS, begun_anew=True)
    assert _at_step(state(attempts=(steps, saves))) == " at save 2"
    assert _at_step(state(attempts=(lost(1, 1, 68), anew))) == " at step 33"
    assert _at_step(state(attempts=(lost(1, None, None),))) == ""


def test_a_list_tells_the_step_that_the_output_of_a_supervised_job_told_as_its_status_does() -> None:
    first = part(1, step=2, phase=UNTOLD, first_step=1, committed_step=2, counts=Counts.SAVES)
    printed = up("a", replace(first, readings=replace(READ, step=135)))
    (attempt,) = record(snapshot(printed, state=state(attempts=(opened("a"),)))).attempts
    assert (attempt.last_step, attempt.printed_step) == (2, 135)
    listed = of_attempts(attempt, checkpoint=replace(TWELFTH, step=2), supervisor="process 1 on vm", heard_at=NOW)
    told_json = report_json(listed)
    assert (told_json["last_step"], told_json["last_save"]) == (135, None)
    assert "135 (11:59:44)" in jobs_text([listed])
    alone = report_json(replace(listed, supervisor=None))  # what is saved may be newer than what was heard
    assert (alone["last_step"], alone["last_save"]) == (None, 2)


def test_a_script_that_began_anew_is_at_the_step_that_it_prints_and_not_at_the_checkpoint_it_did_not_take() -> None:
    before, second = lost(1, 1, 100, saved_step=100), opened("a", "b", number=2)
    put_back = part(2, step=100, phase=UNTOLD, first_step=101, committed_step=None)
    printed = up("a", replace(put_back, readings=replace(READ, step=30, total_steps=1000, step_seconds=0.5)))
    saved = replace(STEP, step=100)
    there = snapshot(printed, up("b"), state=state(job="live", attempts=(before, second), checkpoint=saved))
    asked = replace(told(printed, up("b")), attempts=record(there).attempts, checkpoint=saved)
    assert step_words(asked) == ["step 30 of 1000", "2 steps/s", "8 min 5 s to go"]
    assert report_json(asked)["last_step"] == 30
    listed = replace(asked, standing=(), supervisor="process 1 on vm")
    assert report_json(listed)["last_step"] == 30
    assert "30 (11:59:44)" in jobs_text([listed])
    later = replace(put_back, readings=replace(READ, step=101, total_steps=1000))
    behind = replace(saved, step=103)  # its node's word is older than what is saved by now
    goes_on = replace(told(up("a", later), up("b")), attempts=asked.attempts, checkpoint=behind)
    assert report_json(goes_on)["last_step"] == 103


@pytest.mark.parametrize(
    ("counts", "step", "words"),
    [
        (Counts.SAVES, 3, "save 3, saved 2 h ago"),
        (Counts.STEPS, 300, "step 300, saved 2 h ago"),
    ],
)
def test_of_a_script_whose_saves_alone_are_known_it_is_said_when_it_saved(
    counts: Counts, step: int, words: str
) -> None:
    one = part(
        1,
        step=step,
        phase=UNTOLD,
        first_step=1,
        committed_step=step,
        counts=counts,
        total_steps=None,
        step_seconds=None,
    )
    saved = CheckpointRef(step=step, sha256="0" * 64, counts=counts, saved_at=NOW - timedelta(hours=2))
    known = told(up("a", one), up("b", part(1)), supervisor="process 1 on vm", checkpoint=saved)
    attempt = replace(known.attempts[0], last_step=step, total_steps=None, counts=counts)
    known = replace(known, attempts=(attempt,))
    assert step_words(known)[0] == words
    assert "is saved" not in headline(known)
    assert f"checkpoint at {saved}, saved at 10:00:00 UTC, manifest 0000000000000000" in report_text(known)
    alone = replace(known, supervisor=None)
    assert step_words(alone)[0] == words.replace(", saved 2 h ago", " (checkpoint, saved 2 h ago)")
    older = replace(known, checkpoint=replace(saved, step=step - 1))  # the machine tells of a newer one
    assert step_words(older)[0] == words.partition(",")[0]
