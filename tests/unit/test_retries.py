"""A policy of trying again, by a clock that only waiting moves."""

from __future__ import annotations

import random

import pytest

from gpucloud.system.retries import Retry


class Clock:
    def __init__(self) -> None:
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def now(self) -> float:
        return sum(self.waits)


def waits_of(policy: Retry, most: int = 20) -> list[float]:
    clock = Clock()
    tries = policy.begin(clock.sleep, now=clock.now, dice=random.Random(1))
    while len(clock.waits) < most and tries.again():
        pass
    return clock.waits


@pytest.mark.parametrize(
    ("policy", "waits"),
    [
        (Retry(first_s=0.05, tries=6), [0.05, 0.1, 0.2, 0.4, 0.8]),
        (Retry(first_s=0.5, longest_s=15.0, tries=7), [0.5, 1.0, 2.0, 4.0, 8.0, 15.0]),
        (Retry(first_s=2.0, factor=1.0, tries=3), [2.0, 2.0]),
        (Retry(first_s=2.0, tries=1), []),
        (Retry(first_s=2.0, factor=1.0, within_s=6.0), [2.0, 2.0, 2.0]),
        (Retry(first_s=2.0, within_s=7.0), [2.0, 4.0]),
        (Retry(first_s=9.0, longest_s=3.0, tries=2), [3.0]),
    ],
)
def test_waits_grow_to_the_longest_and_end_with_the_tries_or_the_time(policy: Retry, waits: list[float]) -> None:
    assert waits_of(policy) == waits


def test_a_policy_without_an_end_goes_on_for_ever() -> None:
    assert waits_of(Retry(first_s=30.0, factor=1.0), most=2000) == [30.0] * 2000


def test_drawn_waits_are_at_most_what_they_would_be() -> None:
    drawn, whole = waits_of(Retry(first_s=0.2, tries=8, jitter=True)), waits_of(Retry(first_s=0.2, tries=8))
    assert len(drawn) == len(whole) == 7
    assert all(0 <= one <= most for one, most in zip(drawn, whole, strict=True))
    assert drawn != whole


def test_a_try_at_once_waits_for_nothing_and_is_counted() -> None:
    clock = Clock()
    tries = Retry(first_s=1.0, tries=3).begin(clock.sleep, now=clock.now)
    assert (tries.again(at_once=True), tries.again(), tries.again()) == (True, True, False)
    assert clock.waits == [2.0]
