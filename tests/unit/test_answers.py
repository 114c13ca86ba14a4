"""Readers of answers: what a user reads out of the words, and what the proof of `views` calls different."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from tests.prove.answers import (
    Said,
    Stands,
    at_odds,
    impossible,
    is_said,
    objects,
    read_cell,
    read_going_on,
    read_line,
    read_money,
    read_rows,
    read_step,
    read_steps,
    read_supervisor,
    strangely_written,
)
from tests.prove.asking import Held

NOW = datetime(2026, 3, 1, 23, 50, 30, tzinfo=timezone.utc)
STATUS = """\
small: TRAINING, NOBODY SUPERVISES, step 31 of 60, 3 steps/s, 9.6 s to go

attempt  nodes  steps  ended        took
1        2      1–28   interrupted  16.2 s
2        1      none   lost         4 s
3        2      29–31  running      12 s

checkpoint at step 30, manifest 065678fa24fdbdfb

spent     0.019 of 1.00 USD · 1.17 USD/h in all · off by 2026-03-02 00:00 UTC at the latest, at 0.568 USD
unproven  0.25 USD: counted as used: more may have been paid while its machines drove it than their own ledger tells
left      0.731 USD: 0.549 for the machines until then
"""
SPEND = {
    "spent_usd": "0.01941666",
    "promised_usd": "0.29856118",
    "let_go_usd": "0",
    "unproven_usd": "0.25",
    "left_usd": "0.73058334",
    "kept_usd": "0.105",
    "usd_per_hour": "1.165",
    "budget_usd": "1",
    "forecast_usd": None,
    "outside_budget_usd": "0",
}
TOLD = {
    "status": "running",
    "condition": "training_unsupervised",
    "supervisor": None,
    "last_step": 31,
    "last_save": None,
    "attempts": [{"last_step": last, "last_save": None} for last in (28, None, 31)],
    "checkpoint": {"step": 30},
    "spend": SPEND,
    "paid_until": "2026-03-01T23:59:38+00:00",
    "nodes": [{"id": "a"}],
}


def stands(held=Held.DIED, **changes):
    return Stands(told={**TOLD, **changes}, held=held, now=NOW, exit_code=0)


@pytest.mark.parametrize(
    ("line", "phrase", "condition"),
    [
        ("small: training, attempt 2", "training", "training"),
        ("small: TRAINING, NOBODY SUPERVISES (lost)", "TRAINING, NOBODY SUPERVISES", "training_unsupervised"),
        ("small: NO MACHINE ANSWERS, NOBODY SUPERVISES", "NO MACHINE ANSWERS, NOBODY SUPERVISES", "silent"),
        ("small: trained, its results are not home yet", "trained, its results are not home yet", "trained"),
        ("small: failed (budget)", "failed", "ended"),
        ("small: failed, machines held (user_error)", "failed, machines held", "held"),
        ("small: stopped, not torn down", "stopped, not torn down", "not_torn_down"),
        ("small: on its way", "small: on its way", "unknown"),
    ],
)
def test_how_a_job_stands_is_read_by_the_longest_phrase(line, phrase, condition):
    assert read_line(line, "small: ") == Said(phrase=phrase, condition=condition)


def test_where_no_line_is_about_the_job_nothing_is_read():
    assert read_line("error: it is over", "small: ") == Said()


def test_money_is_read_with_its_rate_and_when_all_is_off():
    assert read_money(STATUS) == {
        "spent": "0.019",
        "budget": "1.00",
        "rate": "1.17",
        "off": "2026-03-02 00:00",
        "off_usd": "0.568",
    }
    short = "spent <0.001 of 2.00 USD · 1.17 USD/h in all · off by 12:30 UTC (≤0.20 USD)"
    assert (read_money(short)["spent"], read_money(short)["off"], read_money(short)["off_usd"]) == (
        "<0.001",
        "12:30",
        "0.20",
    )
    assert read_money("small  training  0.02 of 1.00 USD")["rate"] == "0"
    assert read_money("no jobs yet") == {}


def test_rows_of_money_are_read_and_nothing_is_unproven_where_no_row_says_so():
    assert read_rows(STATUS) == {"unproven": "0.25", "left": "0.731"}
    assert read_rows("spent  1.00 of 2.00 USD\nunused  1.00 USD") == {"unproven": "0", "left": "1.00"}


@pytest.mark.parametrize(
    ("row", "step"),
    [
        ("small  training  11-22 23:40    -      28    2         0.019 of 1.00 USD", 28),
        ("small  training  11-22 23:40    -      28 (23:41:21)  2         0.019 of 1.00 USD", 28),
        ("small  training  11-22 23:40    -      save 3  2         0.019 of 1.00 USD", 3),
        ("small  waiting, nobody supervises  11-22 23:40    -      -  0         0.00 of 1.00 USD", 0),
        ("no jobs yet", None),
    ],
)
def test_the_step_of_a_row_is_read_however_it_is_written(row, step):
    assert read_cell(row) == step


def test_the_step_of_a_headline_is_read():
    assert read_step(STATUS.splitlines()[0]) == 31
    assert read_step("small: training, attempt 2, script, save 7 as of 12:00:00 UTC") == 7
    assert read_step("small: succeeded") is None


def test_steps_are_read_from_the_table_of_attempts():
    assert read_steps(STATUS) == {"trained": 31, "saved": 30}
    assert read_steps("no machines are alive") == {"trained": None, "saved": None}
    assert read_going_on("small goes on: attempt 3 trains on 2 machines (step 31)") == 31
    assert read_going_on("small goes on: attempt 3 at step 31 (12:00:00 UTC); its machine has not answered") == 31


@pytest.mark.parametrize(
    ("text", "who"),
    [
        ("small: training, supervised by process 71 on far-away", "process 71 on far-away"),
        ("small is supervised by its own node i-0a since 23:40:55 UTC", "its own node i-0a"),
        ("small has failed, and process 71 on far-away winds it up (last sign 0 s ago)", "process 71 on far-away"),
        ("small: waiting, nobody supervises", None),
    ],
)
def test_who_supervises_is_read(text, who):
    assert read_supervisor(text) == who


@pytest.mark.parametrize(
    ("written", "usd", "is_it"),
    [
        ("0.02", "0.015", True),
        ("0.02", "0.0249", True),
        ("0.02", "0.026", False),
        ("<0.001", "0.0004", True),
        ("<0.001", "0", False),
        ("-0.37", "-0.369416", True),
        ("0", "0.00000001", False),
    ],
)
def test_a_written_sum_is_that_one_within_its_own_places(written, usd, is_it):
    assert is_said(written, usd) is is_it


@pytest.mark.parametrize(
    ("written", "usd", "is_it"),
    [("2.36", "2.3549", True), ("2.35", "2.3549", False), ("2.36", "2.35", False), ("2.35", "2.35", True)],
)
def test_a_written_sum_that_is_the_most_is_rounded_up(written, usd, is_it):
    assert is_said(written, usd, is_most=True) is is_it


def test_sums_for_programs_have_eight_places_at_the_most():
    strange = {"spend": {"left_usd": "0.123456789", "kept_usd": None}, "rows": [{"usd": "1E-7"}, {"usd": "-1.5"}]}
    assert list(strangely_written(strange)) == ["left_usd is 0.123456789", "usd is 1E-7"]


def test_only_lines_that_are_objects_are_read_as_such():
    assert list(objects('told\n{"a": 1}\n')) == [{"a": 1}]


def test_an_answer_that_says_the_same_in_rounded_words_is_not_at_odds():
    same = Said(
        phrase="TRAINING, NOBODY SUPERVISES",
        condition="training_unsupervised",
        supervisor="",
        trained=31,
        saved=30,
        **read_money(STATUS),
        **read_rows(STATUS),
    )
    assert list(at_odds(same, stands())) == []


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (Said(phrase="training", condition="training"), "it is 'training', and the reference has training_unsup"),
        (Said(supervisor="process 1 on vm"), "it is supervised by 'process 1 on vm', and the reference has None"),
        (Said(left="0.72"), "left is 0.72, and the reference has 0.73058334"),
        (Said(rate="1.17", off="23:59", off_usd="0.568"), "it is off by 23:59, and it is paid until 2026-03-01T23"),
        (Said(rate="1.17", off="2026-03-02 00:00", off_usd="0.58"), "it costs 0.58 by then, and the reference has 0.5"),
        (Said(trained=28), "step 28 is trained, and the reference has 31"),
        (Said(reached=30), "step 30 is reached, and the reference has 31"),
        (Said(saved=31), "step 31 is saved, and the reference has 30"),
    ],
)
def test_an_answer_that_says_another_thing_is_at_odds(said, line):
    found = list(at_odds(said, stands()))
    assert len(found) == 1
    assert found[0].startswith(line)


def test_when_nothing_is_on_nothing_is_off_later():
    said = Said(rate="0", off="12:30", off_usd="0.27")
    still = {**SPEND, "usd_per_hour": "0", "promised_usd": "0"}
    assert list(at_odds(said, stands(nodes=[], spend=still))) == ["it is off by 12:30, and nothing is on"]


@pytest.mark.parametrize(
    ("changes", "held", "line"),
    [
        ({}, Held.DIED, None),
        ({"spend": {**SPEND, "left_usd": "0.8"}}, Held.DIED, "left is 0.8, of "),
        ({}, Held.ELSEWHERE, "it is supervised by None, and its lease is held: elsewhere"),
        ({"status": "failed", "last_step": 30}, Held.DIED, "it is failed, and training_unsupervised"),
        ({"status": "stopped", "condition": "ended"}, Held.DIED, "it is stopped with step 30 saved, and 31 is said"),
        ({"condition": "training"}, Held.DIED, "it is training without a supervisor"),
        (
            {"condition": "silent", "use": [{"answers": True}]},
            Held.DIED,
            "it is silent, and all of its machines answer",
        ),
        ({"condition": "silent", "use": [{"answers": False}]}, Held.DIED, None),
        ({"spend": {**SPEND, "forecast_usd": "1.2"}}, Held.DIED, "it is to cost 1.2, of "),
        ({"checkpoint": {"step": 40}}, Held.DIED, "step 40 is saved, and 31 the last one trained"),
    ],
)
def test_what_cannot_be_is_wrong_whoever_says_it(changes, held, line):
    found = list(impossible(stands(held, **changes)))
    assert len(found) == (0 if line is None else 1), found
    assert line is None or found[0].startswith(line)
