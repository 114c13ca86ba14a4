"""When a node's paid time ends is told by the clock that its agent goes by."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.node.bootstrap.steps import clock_reading, surest
from gpucloud.domain.node.status import desired_from_json
from gpucloud.usecases.supervise.prepare import desired_for
from tests.unit.worlds import LATER, state

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("cloud", "ahead", "told"),
    [
        (Cloud.SSH, HOUR, LATER + HOUR),
        (Cloud.SSH, -HOUR, LATER - HOUR),
        (Cloud.SSH, timedelta(0), LATER),
        (Cloud.AWS, HOUR, LATER),  # its schedule ends the machine by the clock that the machine has: ours is wrong
        (Cloud.LOCAL, HOUR, LATER),
    ],
)
def test_the_end_of_the_paid_time_is_told_by_the_clock_of_whoever_ends_the_machine(cloud, ahead, told):
    world = SimpleNamespace(job=SimpleNamespace(cloud=cloud))
    desired = desired_for("a", state(paid_until=LATER), world, lambda *_: None, ahead)
    assert desired_from_json(desired.decode()).paid_until == told


def test_nobody_is_told_of_a_paid_time_that_is_not_there():
    world = SimpleNamespace(job=SimpleNamespace(cloud=Cloud.SSH))
    desired = desired_for("a", state(paid_until=None), world, lambda *_: None, HOUR)
    assert desired_from_json(desired.decode()).paid_until is None


@pytest.mark.parametrize(
    ("questions", "wrong_by_s"),
    [
        ([(0.0, 2.0)], 0),
        ([(0.0, 2.1)], 2.1),
        ([(0.0, -3600.0)], -3600),
        ([(4.5, 2.25)], 0),  # a busy node answered after 4.5 s, and had read its clock at the end
        ([(4.5, 60.0)], 60),
        ([(9.0, 4.5), (0.2, 0.1)], 0),  # of several, the shortest counts
        ([(9.0, 60.0), (0.2, 56.0), (8.0, 59.0)], 56),
    ],
)
def test_a_clock_is_wrong_by_more_than_the_question_leaves_unsure(questions, wrong_by_s):
    half = [(timedelta(seconds=took_s) / 2, timedelta(seconds=ahead_s)) for took_s, ahead_s in questions]
    readings = [clock_reading(LATER - wait, LATER + ahead, LATER + wait) for wait, ahead in half]
    assert surest(*readings).wrong_by == timedelta(seconds=wrong_by_s)
