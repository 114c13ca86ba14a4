"""A script that saves by itself and is asked to stop: what time it has, and what is left for its upload."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.domain.checkpoint.layouts import KeepOrder, Leaving, Rule
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, OnNotice
from gpucloud.domain.supervision.budget import rules_for
from gpucloud.domain.supervision.snapshot import Rules

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
ORDER = KeepOrder(
    code="/c",
    directory="/c/out",
    rule=Rule(),
    on_notice=OnNotice.SIGTERM,
    settle=timedelta(seconds=1),
    store="s3://b",
    prefix="jobs/x/checkpoints",
    attempt=1,
    keep=3,
    rank=0,
    folder="/a",
    first_rank=0,
    save=timedelta(seconds=90),
    upload=timedelta(seconds=120),
)


def told(at_s: float, uploads_s: float, *, alone: bool = False) -> Leaving:
    return ORDER.leaving(NOW, NOW + timedelta(seconds=at_s), timedelta(seconds=uploads_s), alone=alone)


def spans(leaving: Leaving) -> tuple[float, float, bool]:
    return (leaving.script - NOW).total_seconds(), (leaving.upload - NOW).total_seconds(), leaving.is_short


@pytest.mark.parametrize("uploads_s", [0.0, 20.0, 34.0, 40.0, 300.0])
def test_who_is_asked_by_the_user_has_all_the_time_that_the_supervisor_gives_and_its_upload_comes_after_that(uploads_s):
    assert spans(told(0.0, uploads_s)) == (90.0, 209.0, False)


@pytest.mark.parametrize(
    ("at_s", "uploads_s", "script_s", "is_short"),
    [
        (120, 0.1, 118.0, False),
        (120, 20, 89.0, False),
        (120, 40, 59.5, True),
        (120, 300, 59.5, True),
        (4, 9, 1.5, True),
    ],
)
def test_what_a_notice_leaves_is_for_the_upload_too_but_half_of_it_is_the_scripts(at_s, uploads_s, script_s, is_short):
    assert spans(told(at_s, uploads_s)) == (script_s, at_s - 1.0, is_short)


def test_a_node_that_uploads_nothing_leaves_in_the_time_for_saving():
    assert spans(told(0.0, 0.0, alone=True)) == (89.0, 89.0, False)
    assert spans(told(30.0, 0.0, alone=True)) == (29.0, 29.0, False)
    assert spans(told(120.0, 0.0, alone=True)) == (89.0, 89.0, False)


def test_a_supervisor_waits_for_the_upload_of_a_script_that_saves_by_itself():
    limits = Rules().limits
    own = rules_for(CheckpointPolicy(directory=CheckpointDirectory(path="out")), None, Rules()).limits
    assert (limits.leave, limits.overdue) == (timedelta(minutes=1), timedelta(minutes=2))
    assert (own.save, own.leave, own.overdue) == (timedelta(minutes=1), timedelta(minutes=3), timedelta(minutes=6))
