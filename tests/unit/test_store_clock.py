"""The time by which a job is supervised is the store's, however wrong the machine's own clock is."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpucloud.domain.errors import StoreError
from gpucloud.usecases.jobstore.lease import StoreClock
from tests.unit.worlds import NOW


class Wrong:
    """A clock that is so far ahead of the store's."""

    def __init__(self, ahead_s):
        self.ahead = timedelta(seconds=ahead_s)
        self.true = NOW

    def now(self):
        return self.true + self.ahead

    def sleep(self, seconds):
        self.true += timedelta(seconds=seconds)


class Jobs:
    def __init__(self, clock):
        self.clock = clock
        self.asked = 0
        self.down = False

    def time(self):
        self.asked += 1
        if self.down:
            raise StoreError("down")
        return self.clock.true


def clock_that_is(ahead_s):
    wrong, said = Wrong(ahead_s), []
    jobs = Jobs(wrong)
    return StoreClock(wrong, jobs, said.append), wrong, jobs, said


@pytest.mark.parametrize(
    ("ahead_s", "line"),
    [
        (3600, "this machine's clock is 3600 s ahead of the store's, which counts"),
        (-3600, "this machine's clock is 3600 s behind the store's, which counts"),
    ],
)
def test_a_clock_that_is_an_hour_off_is_put_right_and_told_of_once(ahead_s, line):
    clock, wrong, _, said = clock_that_is(ahead_s)

    assert clock.now() == NOW
    wrong.sleep(100)
    assert clock.now() == NOW + timedelta(seconds=100)
    assert said == [line]


def test_a_difference_within_the_stores_own_precision_is_none():
    clock, _, _, said = clock_that_is(1.5)

    assert clock.now() == NOW + timedelta(seconds=1.5)
    assert said == []


def test_the_store_is_asked_once_a_minute():
    clock, wrong, jobs, _ = clock_that_is(0)

    for _ in range(120):
        clock.now()
        wrong.sleep(1)

    assert jobs.asked == 2


def test_a_clock_that_is_put_right_meanwhile_is_noticed_at_once():
    clock, wrong, _, _ = clock_that_is(3600)
    clock.now()
    wrong.ahead = timedelta(0)

    assert clock.now() == NOW


def test_the_last_difference_stands_while_the_store_does_not_answer():
    clock, wrong, jobs, _ = clock_that_is(3600)
    clock.now()
    jobs.down = True
    wrong.sleep(300)

    assert clock.now() == NOW + timedelta(seconds=300)
