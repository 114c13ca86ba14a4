"""The stories of commands see what they are there to see: each here is told over a gpucloud with one fault put in."""

from __future__ import annotations

from typing import Any
from unittest import mock

from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.session import Supervisor
from tests.prove import commands


def wrong(*seeds: int) -> str:
    return "\n".join(line for seed in seeds for line in commands.story(seed).wrong)


def test_stories_are_the_same_at_every_run_and_nothing_is_wrong_with_them() -> None:
    first, again = commands.story(7), commands.story(7)
    assert first.happened == again.happened
    assert first.wrong == []


def unpaid(_: Any, state: Any, __: Any) -> Any:
    return state


def test_a_machine_that_nobody_bills_is_seen() -> None:
    with mock.patch.object(SpendTracker, "settle", unpaid):
        assert "was paid for and is in no bill" in wrong(1, 2, 3)


def endless(own: Supervisor) -> None:
    while True:
        own.services.clock.sleep(60)


def test_a_command_that_waits_for_ever_is_seen() -> None:
    a_minute_of_it = mock.patch.multiple(commands, _HOURS=0.02, _end=lambda *_: None)
    with a_minute_of_it, mock.patch.object(Supervisor, "run", endless):
        assert "still waits after" in wrong(1)
