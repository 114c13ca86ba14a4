"""What a job with a deadline runs on, and that it will be late, is told once, and stands in its report."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.domain.market.policies import Mode
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.offer import Offer
from gpucloud.domain.state.state import CapacityDecision, ExitReason, JobStatus, Shortfall, Successor
from gpucloud.domain.supervision.action import Appoint, Dismiss, Resize, TakeOver, Wait
from gpucloud.domain.supervision.snapshot import CapacityChoice, Limits
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.supervise.act import Announcements
from gpucloud.usecases.supervise.story import tell_story
from tests.unit.worlds import NOW, OTHER_POOL, opened, snapshot, state, up

WHY = "6 h of work, 6 h 20 min left: no time is left for another interruption"
DEAR = CapacityDecision(mode="on demand", since=NOW, why=WHY)
LATE = replace(DEAR, shortfall=Shortfall.TIME, warning="the deadline will be missed")
OFFER = Offer(pool=OTHER_POOL, usd_per_hour=Decimal("0.3"), cap_usd_per_hour=Decimal("0.9"), as_of=NOW, gpus=1)
SUCCESSOR = Successor(pool=OTHER_POOL, cap_usd_per_hour=Decimal("0.9"), at=NOW)
SPEND = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))


def told(before, now):
    capacity_choice = (
        CapacityChoice(mode=Mode.ON_DEMAND, offer=None, capacity_decision=now) if now is not None else None
    )
    world = snapshot(state=state(capacity_decision=before), capacity_choice=capacity_choice)
    return Announcements().news(Wait(why="running"), world, Limits())


def test_a_change_is_told_with_its_reason_and_what_stays_is_not():
    assert told(None, DEAR) == (f"on demand from 12:00:00 UTC, decided then on {WHY}",)
    assert told(DEAR, DEAR) == ()
    assert told(DEAR, None) == ()


def test_that_the_deadline_will_be_missed_is_told_when_it_turns_out():
    assert told(DEAR, LATE) == ("the deadline will be missed",)
    assert told(LATE, LATE) == ()
    later = replace(LATE, mode="idle", since=NOW + timedelta(minutes=5))
    assert told(LATE, later) == (f"waiting from 12:05:00 UTC, decided then on {WHY}", "the deadline will be missed")


def test_that_the_deadline_will_be_missed_is_taken_back_once_when_it_is_no_longer_so():
    again = replace(DEAR, at=NOW + timedelta(minutes=5), why="20 s of work, 3 min left")
    assert told(LATE, again) == ("the deadline can be kept after all: 20 s of work, 3 min left",)
    assert told(again, again) == ()
    moved = replace(again, mode="idle", since=NOW + timedelta(minutes=5))
    assert told(LATE, moved)[1:] == ("the deadline can be kept after all: 20 s of work, 3 min left",)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"attempts": (opened("a", reason=ExitReason.INTERRUPTED),)},
            "what was said of the deadline holds no longer: how much work is left is not known until the script tells"
            " its steps",
        ),
        ({"attempts": (opened("a", total_steps=9),)}, "what was said of the deadline holds no longer"),
        (
            {"status": JobStatus.SUCCEEDED, "exit_reason": ExitReason.SUCCEEDED},
            "the job is done, and what was said of the deadline holds no longer",
        ),
        ({"status": JobStatus.FAILED, "exit_reason": ExitReason.DEADLINE}, None),
    ],
)
def test_a_forecast_that_nobody_can_make_any_more_is_taken_back(changes, line):
    world = snapshot(state=state(capacity_decision=LATE, **changes), capacity_choice=None)
    assert Announcements().news(Wait(why="running"), world, Limits()) == ((line,) if line is not None else ())


def test_the_report_says_it_until_the_job_has_ended():
    goes_on = report(state(capacity_decision=LATE), SPEND, (), snapshot().group, None)
    assert f"on demand from 12:00:00 UTC, decided then on {WHY}\nthe deadline will be missed" in report_text(goes_on)
    assert report_json(goes_on)["capacity_decision"] == {
        "mode": "on demand",
        "since": "2026-03-01T12:00:00+00:00",
        "decided_at": "2026-03-01T12:00:00+00:00",
        "why": WHY,
        "warning": "the deadline will be missed",
    }
    since_then = state(capacity_decision=replace(LATE, at=NOW + timedelta(minutes=9)))
    turned_out = report(since_then, SPEND, (), snapshot().group, None)
    assert f"on demand from 12:00:00 UTC, decided at 12:09:00 UTC on {WHY}\n" in report_text(turned_out)
    assert report_json(turned_out)["capacity_decision"]["decided_at"] == "2026-03-01T12:09:00+00:00"
    later = report_text(replace(turned_out, looked_at=NOW + timedelta(hours=5)))
    assert "\nthe deadline will be missed (as of 12:09:00 UTC)\n" in later
    assert "the deadline will be missed\n" in report_text(replace(turned_out, looked_at=NOW + timedelta(minutes=9)))
    over = state(capacity_decision=LATE, status=JobStatus.FAILED, exit_reason=ExitReason.DEADLINE)
    assert report_json(report(over, SPEND, (), snapshot().group, None))["capacity_decision"] is None


def test_the_story_of_machines_that_take_over():
    asking = snapshot(up("a"), state=state(successor=SUCCESSOR), group_size=1)
    assert tell_story(Appoint(offer=OFFER), asking) == (
        "asking for local.p2.xlarge spot in us-east-2b as well, 0.30 USD an hour a node; the attempt goes on meanwhile"
    )
    assert tell_story(Resize(size=2), asking) == "asking for 1 × local.p2.xlarge spot in us-east-2b"
    more = snapshot(up("a"), up("b"), state=state(), group_size=2)
    assert tell_story(Resize(size=8), more) == "asking for 6 × local.p2.xlarge spot in us-east-2a"
    assert tell_story(TakeOver(), asking) == "local.p2.xlarge spot in us-east-2b takes over"
    assert tell_story(Dismiss(), asking) == "giving back the machines asked for as well"
    assert tell_story(Resize(size=1), snapshot(up("a"))) == "keeping 1 × local.p2.xlarge spot in us-east-2a"
    assert tell_story(Resize(size=0), snapshot(up("a"))) == "asking for no machine now: giving back a"
    assert tell_story(Resize(size=0), snapshot(group_size=1)) == "asking for no machine now"
