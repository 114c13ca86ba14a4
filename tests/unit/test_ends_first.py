"""What is said of how long a job goes on is true: what ends it before its last step stands beside its pace."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from rich.console import Console

from gpucloud.cli.render.live import _panel
from gpucloud.cli.render.onlookers import line_of, panel_state
from gpucloud.cli.render.reports import report_text
from gpucloud.cli.render.use import headline, use_json, use_rows
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.state.state import ExitReason
from gpucloud.domain.supervision.action import Wait
from gpucloud.usecases.job.jobs import with_forecast
from gpucloud.usecases.jobstore.report import JobReport
from tests.unit.test_condition import LIMITS, told
from tests.unit.worlds import LATER, NOW, part, snapshot, state, up

LONG = (up("a", part(1, step=10, total_steps=100_000, step_seconds=1.0)), up("b", part(1)))
MONEY = Spend(
    budget_usd=Decimal("1.5"),
    spent_usd=Decimal("0.05"),
    promised_usd=Decimal("0.9"),
    usd_per_hour=Decimal("0.15"),
    as_of=NOW,
    off_at=LATER,
)


def panel_of(now: object) -> str:
    written = io.StringIO()
    Console(file=written, width=160).print(_panel(now, (), 160))  # type: ignore[arg-type]
    return written.getvalue()


def paid(report: JobReport, spend: Spend = MONEY, **changes: object) -> JobReport:
    """With paid time until LATER."""
    return with_forecast(replace(report, spend=spend, paid_until=LATER, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("deadline", [None, timedelta(minutes=20)])
def test_what_nobody_supervises_ends_with_its_machines_and_at_no_budget_or_deadline(deadline: timedelta | None) -> None:
    due = NOW + deadline if deadline is not None else None
    alone = paid(told(*LONG), deadline_at=due)
    for view in (report_text(alone), headline(alone)):
        assert "27 h 46 min to go, its machines switch themselves off first, in 30 min" in view
        assert "budget ends" not in view
    hosts = paid(told(*LONG), replace(MONEY, off_at=None, usd_per_hour=Decimal(0)), owned=True)
    assert "to go, its hosts are free again first, in 30 min" in headline(hosts)


def test_a_step_that_comes_before_its_machines_switch_themselves_off_is_not_said_to_be_cut_off() -> None:
    soon = paid(told(up("a", part(1, step=10, total_steps=400, step_seconds=1.0)), up("b", part(1))))
    assert headline(soon).splitlines()[0].endswith("6 min 30 s to go, loss 0.5000")


def ending(ordered: Stop, **changes: object) -> JobReport:
    known = told(*LONG, supervisor="process 1 on vm")
    ends = replace(known.attempts[-1], ending_reason=ExitReason.BUDGET, ending_at=NOW, ordered=ordered)
    return paid(replace(known, attempts=(ends,), ends=True, **changes))  # type: ignore[arg-type]


def test_an_attempt_that_is_ended_says_why_and_until_when_its_script_has_and_no_time_to_its_last_step() -> None:
    asked = ending(Stop.SAVE)
    awaited = "its script is waited for until 12:01:00 UTC at the latest, then killed"
    first = f"live: ending its attempt (budget), step 10 of 100000, {awaited}, supervised by process 1 on vm"
    assert report_text(asked).splitlines()[0] == first
    now = panel_state(
        snapshot(*LONG, state=state(attempts=(replace(asked.attempts[-1]),))), Wait(why="running"), MONEY, LIMITS
    )
    for view in (headline(asked), line_of(now), panel_of(now)):
        assert awaited in view
    assert line_of(now).startswith("asked to save and leave (budget): step 10 of 100000, ")
    for view in (report_text(asked), headline(asked), line_of(now), panel_of(now)):
        assert not [word for word in ("to go", "steps/s", "forecast", "ends first") if word in view]


def test_an_attempt_that_is_killed_says_why_and_waits_for_nothing() -> None:
    killed = ending(Stop.KILL)
    first = "live: ending its attempt (budget), step 10 of 100000, supervised by process 1 on vm"
    assert report_text(killed).splitlines()[0] == first
    handed = ending(Stop.SAVE, supervisor=None, hands_over=True)
    assert report_text(handed).splitlines()[0] == "live: handing over to its machines, step 10 of 100000"
    assert "forecast" not in report_text(handed)


@pytest.mark.parametrize(("phase", "step"), [("start", 0), ("train", 0), ("start", 385), ("train", 386)])
def test_a_script_without_a_pace_says_for_how_long_no_step_came_and_when_that_is_taken_for_a_hang(
    phase: str, step: int
) -> None:
    node = up("a", part(1, step=step, total_steps=768, phase=phase, step_seconds=None, age_s=1500.0))
    report = told(node, up("b", part(1)), supervisor="process 1 on vm")
    now = panel_state(snapshot(node, up("b"), state=state(attempts=report.attempts)), Wait(why="running"), MONEY)
    for view in (report_text(report), headline(report), line_of(now), panel_of(now)):
        assert f"step {step} of 768" in view
        assert "no step for 25 min (30 min is taken for a hang)" in view


@pytest.mark.parametrize("phase", ["evaluate", "save", "generate samples"])
def test_what_a_script_does_between_its_steps_is_said_in_place_of_its_pace(phase: str) -> None:
    node = up("a", part(1, step=385, total_steps=768, phase=phase, age_s=400.0))
    report = told(node, up("b", part(1)), supervisor="process 1 on vm")
    for view in (report_text(report), headline(report)):
        assert f"step 385 of 768, phase {phase}, 38.3 s to go" in view
        assert "steps/s" not in view


def test_a_machine_with_a_notice_says_when_it_goes_and_what_nobody_supervises_ends_then() -> None:
    alone = paid(told(LONG[0], up("b", part(1), notice=True)))
    text = report_text(alone)
    assert "27 h 46 min to go, its machine b goes first, in 2 min\n" in f"{text.splitlines()[0]}\n"
    assert "\nb goes at 12:02:00 UTC: its attempt ends then\n" in text
    seen = paid(told(LONG[0], up("b", part(1), notice=True), supervisor="process 1 on vm"))
    for report in (alone, seen):
        assert [row[:2] for row in use_rows(report)[1:]] == [("b", "notice: goes at 12:02:00 UTC")]
        assert [node["goes_at"] for node in use_json(report)] == [None, "2026-03-01T12:02:00+00:00"]
    assert "its attempt ends then" not in report_text(seen)
    beside = told(*LONG, up("c", notice=True))
    assert "its attempt ends then" not in report_text(beside)


def test_an_attempt_of_which_a_part_has_failed_has_no_time_to_its_last_step() -> None:
    for supervisor in (None, "process 1 on vm"):
        broken = told(LONG[0], up("b", part(1, Outcome.FAILED)), supervisor=supervisor)
        for view in (report_text(broken), headline(broken)):
            assert "step 10 of 100000, attempt 1 has ended on b" in view
            assert "to go" not in view
    done = told(LONG[0], up("b", part(1, Outcome.DONE)))
    assert "has ended on" not in report_text(done)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"supervisor": "process 1 on vm"}, "then it ends, done or not, and saves first if its script does"),
        ({"supervisor": "its own node a", "buys_time": False}, "its machines are off before, at 12:30:00 UTC"),
        ({"hands_over": True, "buys_time": False}, "its machines are off before, at 12:30:00 UTC"),
        ({}, "its machines are off before, at 12:30:00 UTC"),
        ({"owned": True}, "its hosts are free before, at 12:30:00 UTC"),
        ({"deadline_at": LATER - timedelta(minutes=1)}, "nobody is there who ends it then"),
        ({"nodes": ()}, "nobody is there who ends it then"),
    ],
)
def test_a_deadline_that_its_machines_do_not_live_to_says_so(changes: dict[str, object], said: str) -> None:
    known = paid(told(*LONG), **{"deadline_at": NOW + timedelta(hours=10), **changes})
    assert said in next(line for line in report_text(known).splitlines() if line.startswith("deadline "))


@pytest.mark.parametrize(("passed", "does"), [(-5, "go on with it"), (5, "see to its end")])
def test_own_machines_that_take_over_after_the_deadline_see_to_its_end(passed: int, does: str) -> None:
    due = NOW - timedelta(minutes=passed)
    handed = paid(told(*LONG), hands_over=True, buys_time=False, deadline_at=due)
    assert f"its own machines {does}: one of them takes over" in report_text(handed)
