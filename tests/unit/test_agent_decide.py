from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.agent.attempt.decide import (
    Kill,
    PowerOff,
    Prepaid,
    PrepaidPhase,
    Rest,
    Save,
    Saving,
    Snapshot,
    Start,
    decide,
)
from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.status import Desired, Launch, Stop

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=timezone.utc)
LATER = NOW + timedelta(minutes=2)
NOTICE = Notice(action="terminate", at=LATER)


def launch(number):
    return Launch(attempt=number, argv=("true",), directory="/", env=())


def want(number, stop=Stop.NO):
    return Desired(epoch=1, launch=launch(number) if number else None, stop=stop, paid_until=None)


def lease(left_s, length_s=1800):
    until = NOW + timedelta(seconds=left_s)
    return Prepaid(until=until, heard_at=until - timedelta(seconds=length_s))


def see(desired, *, running=None, newest=0, notice=None, prepaid=None):
    newest = max(newest, running or 0)
    return Snapshot(desired=desired, running=running, newest=newest, notice=notice, prepaid=prepaid, now=NOW)


@pytest.mark.parametrize(
    ("snapshot", "action"),
    [
        (see(None), Rest()),
        (see(want(None)), Rest()),
        (see(want(1)), Start(launch=launch(1))),
        (see(want(5), newest=4), Start(launch=launch(5))),
        (see(want(4), newest=4), Rest()),
        (see(want(3), newest=4), Rest()),
        (see(want(1, Stop.SAVE)), Rest()),
        (see(want(1, Stop.KILL)), Rest()),
        (see(want(1), prepaid=lease(600)), Start(launch=launch(1))),
        (see(want(1), prepaid=lease(30)), Rest()),
        (see(want(1), prepaid=lease(0)), PowerOff()),
        (see(None, prepaid=lease(-5)), PowerOff()),
    ],
)
def test_an_idle_node_starts_what_is_new_wanted_and_paid_for(snapshot, action):
    assert decide(snapshot) == action


@pytest.mark.parametrize(
    ("snapshot", "action"),
    [
        (see(want(1), running=1), Rest()),
        (see(None, running=1), Rest()),
        (see(want(None), running=1), Kill()),
        (see(want(2), running=1), Kill()),
        (see(want(1, Stop.KILL), running=1), Kill()),
        (see(want(1, Stop.SAVE), running=1), Save(reason="stop", at=NOW)),
        (see(want(1), running=1, notice=NOTICE), Save(reason="notice", at=LATER)),
        (see(want(1, Stop.SAVE), running=1, notice=NOTICE), Save(reason="notice", at=LATER)),
        (see(want(1, Stop.KILL), running=1, notice=NOTICE), Kill()),
        (see(want(1), running=1, prepaid=lease(61)), Rest()),
        (see(want(1), running=1, prepaid=lease(60)), Save(reason="budget", at=NOW + timedelta(seconds=60))),
        (see(want(1), running=1, prepaid=lease(0)), Kill()),
    ],
)
def test_a_running_attempt_ends_when_it_is_unwanted_unpaid_or_asked_to_leave(snapshot, action):
    assert decide(snapshot) == action


@pytest.mark.parametrize(
    ("left_s", "running", "action"),
    [
        (30, 1, Save(reason="budget", at=NOW + timedelta(seconds=30))),
        (0, 1, Kill()),
        (0, None, Rest()),
        (-119.9, None, Rest()),
        (-120, None, PowerOff()),
    ],
)
def test_a_node_that_the_cloud_ends_on_time_ends_itself_only_later_and_saves_no_later(left_s, running, action):
    snapshot = replace(see(want(2), running=running, prepaid=lease(left_s)), power_off_after=timedelta(seconds=120))
    assert decide(snapshot if running is None else replace(snapshot, desired=want(1))) == action


@pytest.mark.parametrize(
    ("left_s", "length_s", "phase"),
    [
        (61, 300, PrepaidPhase.FAR),
        (60, 300, PrepaidPhase.NEAR),
        (7, 30, PrepaidPhase.FAR),
        (6, 30, PrepaidPhase.NEAR),
        (0.001, 30, PrepaidPhase.NEAR),
        (0, 30, PrepaidPhase.PASSED),
    ],
)
def test_saving_begins_60_s_before_the_end_or_at_the_last_fifth_of_a_short_lease(left_s, length_s, phase):
    assert lease(left_s, length_s).phase(NOW) is phase


@pytest.mark.parametrize(
    ("save_s", "step_s", "length_s", "ahead_s"),
    [
        (10, 2, 1800, 29),  # twice the save and the step under way, and 5 s
        (0.1, 0.05, 1800, 5.3),
        (0.1, 0.05, 20, 2.3),  # the margin is a tenth of a short lease
        (0.1, 0.05, 5, 1.3),  # and a second at the least
        (600, 1, 1800, 720),  # never more than two fifths: a supervisor renews at the half
    ],
)
def test_saving_begins_so_long_before_the_end_as_a_save_was_measured_to_take(save_s, step_s, length_s, ahead_s):
    saving = Saving(save=timedelta(seconds=save_s), step=timedelta(seconds=step_s))

    assert saving.ahead(timedelta(seconds=length_s)) == timedelta(seconds=ahead_s)
    assert lease(ahead_s + 0.01, length_s).phase(NOW, saving) is PrepaidPhase.FAR
    assert lease(ahead_s, length_s).phase(NOW, saving) is PrepaidPhase.NEAR
    assert lease(1.0, length_s).ahead(saving).total_seconds() == pytest.approx(ahead_s)


def test_the_measured_save_decides_when_a_running_attempt_is_asked_to_save():
    saving = Saving(save=timedelta(seconds=100), step=timedelta(0))
    snapshot = replace(see(want(1), running=1, prepaid=lease(205, 1800)), saving=saving)

    assert decide(snapshot) == Save(reason="budget", at=NOW + timedelta(seconds=205))
