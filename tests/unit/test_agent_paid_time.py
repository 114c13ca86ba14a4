"""How the agent reckons the paid time that its last save must fit into, when that time is prolonged."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest

from gpucloud.agent import daemon
from gpucloud.agent.attempt.decide import OwnEnd, Saving
from gpucloud.agent.attempt.files import AttemptFolder
from gpucloud.agent.daemon import Agent
from gpucloud.domain.codec import to_json
from gpucloud.domain.node.status import (
    AttemptStatus,
    Desired,
    Launch,
    Outcome,
    Readings,
    RunState,
    Stop,
    desired_to_json,
    status_from_json,
)
from tests.unit.worlds import NOW


class Folder:
    path = None

    def __init__(self, number):
        self.number = number
        self.asked = []
        self.measured = None

    def saving(self):
        return self.measured

    def ask_to_stop(self, reason, at):
        self.asked.append((reason, at))


class Running:
    """An attempt that goes on for ever."""

    def __init__(self, launch, folder):
        self.folder = Folder(launch.attempt)

    def advance(self, spared):
        return AttemptStatus(
            attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, progress=None, failed_rank=None
        )


EXITED = AttemptStatus(
    attempt=1, state=RunState.EXITED, outcome=Outcome.LEFT, exit_code=75, progress=None, failed_rank=None
)


class Bench:
    """An agent whose clock is set by hand, in seconds from the beginning."""

    def __init__(self, folder, monkeypatch):
        self.now = NOW
        (folder / "agent").mkdir()
        self.attempts = folder / "attempts"
        self.desired = folder / "agent" / "desired.json"
        monkeypatch.setattr(daemon, "datetime", SimpleNamespace(now=lambda _: self.now))
        monkeypatch.setattr(daemon, "RunningAttempt", Running)
        node_metrics = SimpleNamespace(gpus=(), unhealthy=None, host=None, spared=frozenset(), look=lambda *_: None)
        self.begin = partial(
            Agent, folder, notice=lambda: None, own_end=OwnEnd(), rest=lambda _: None, node_metrics=node_metrics
        )
        self.agent = self.begin()

    def measured(self, attempt, text):
        """An earlier attempt, and what it wrote of its saves."""
        folder = self.attempts / f"{attempt:04d}"
        folder.mkdir(parents=True)
        (folder / "exit.json").write_text(to_json(replace(EXITED, attempt=attempt)))
        if text is not None:
            (folder / "saving.json").write_text(text)

    def told(self, at_s, paid_s, *, launch=False, attempt=1):
        started = Launch(attempt=attempt, argv=("true",), directory="/", env=()) if launch else None
        until = NOW + timedelta(seconds=paid_s)
        wanted = Desired(epoch=1, launch=started, stop=Stop.NO, paid_until=until)
        self.desired.write_text(desired_to_json(wanted) + " " * at_s)
        self.at(at_s)

    def at(self, at_s):
        self.now = NOW + timedelta(seconds=at_s)
        self.agent.tick()

    @property
    def asked(self):
        return self.agent._running.folder.asked


@pytest.fixture
def bench(tmp_path, monkeypatch):
    return Bench(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_full", [False, True])
def test_how_long_an_attempt_has_been_over_is_told_where_its_end_could_be_written(bench, is_full):
    folder = AttemptFolder(bench.attempts, 1)
    if not is_full:
        folder.path.mkdir(parents=True)
    bench.agent._attempt = bench.agent._close(folder, replace(EXITED, over_s=0.0))
    told = bench.agent._as_old_as_it_is()
    assert (told.outcome, told.over_s is None) == (Outcome.LEFT, is_full)


def test_a_short_renewal_leaves_a_running_attempt_as_long_to_save_as_a_long_one(bench):
    bench.told(0, 900, launch=True)
    bench.told(890, 950, launch=True)  # for saving a lease of a minute would leave 12 s

    assert bench.asked == [("budget", NOW + timedelta(seconds=950))]


def test_a_lower_budget_leaves_as_long_to_save(bench):
    bench.told(0, 1800, launch=True)
    bench.told(600, 661, launch=True)
    assert bench.asked == []
    bench.at(601)
    assert bench.asked == [("budget", NOW + timedelta(seconds=661))]


# An attempt that begins shortly before the end of what is paid, 100 s here, and has not saved yet


def begun_late(bench, attempt):
    bench.agent = bench.begin()
    bench.told(0, 900)
    bench.told(800, 900, launch=True, attempt=attempt)
    return bench


@pytest.mark.parametrize(
    ("earlier", "asked_at_s"),
    [
        ({}, 880),  # the last fifth
        ({1: None}, 880),
        ({1: '{"seconds": 12.0, "step": 0.5}'}, 870),  # twice as long as it took, and 5 s
        ({1: '{"seconds": 12.0, "step": 0.5}', 2: None}, 870),  # attempt 2 ended before it saved
        ({1: '{"seconds": 1.0, "step": 0.5}', 2: '{"seconds": 12.0, "step": 0.5}'}, 870),
        ({1: '{"seconds": 2.0, "step": null}', 2: "{"}, 891),
        ({1: '{"seconds": 60.0, "step": 5.0}'}, 860),  # no more than two fifths
    ],
)
def test_an_attempt_that_begins_late_has_as_long_to_save_as_an_earlier_one_of_this_node_took(
    bench, earlier, asked_at_s
):
    for attempt, text in earlier.items():
        bench.measured(attempt, text)
    begun_late(bench, attempt=3)
    bench.at(asked_at_s - 1)
    assert bench.asked == []
    bench.at(asked_at_s)
    assert bench.asked == [("budget", NOW + timedelta(seconds=900))]


def test_what_the_attempt_itself_measured_comes_before_what_an_earlier_one_did(bench):
    bench.measured(1, '{"seconds": 12.0, "step": 0.5}')
    begun_late(bench, attempt=2)
    bench.agent._running.folder.measured = Saving(save=timedelta(seconds=1), step=timedelta(seconds=1))
    bench.at(890)
    assert bench.asked == []
    bench.at(891)
    assert bench.asked == [("budget", NOW + timedelta(seconds=900))]


def test_a_late_start_is_refused_no_earlier_for_what_an_earlier_attempt_measured(bench):
    bench.measured(1, '{"seconds": 300.0, "step": 5.0}')
    assert begun_late(bench, attempt=2).agent._running is not None


# What is told of when the attempt leaves: as its paid time is now, and at the most.


def told_by(bench):
    status = status_from_json(bench.desired.with_name("status.json").read_text())
    return status.leaves_s, status.leaves_at_most_s, status.leaves_share


def test_an_attempt_that_has_not_saved_leaves_at_the_last_fifth_of_its_time_and_a_minute_before_at_the_most(bench):
    bench.told(0, 120, launch=True)
    assert told_by(bench) == (24, 60, 0.2)
    bench.agent._running.folder.measured = Saving(save=timedelta(seconds=2), step=timedelta(seconds=1))
    bench.told(1, 160, launch=True)
    assert told_by(bench) == (11, 11, 0.4)


@pytest.mark.parametrize(("leaves_early", "told"), [(False, (0, 0, 0)), (True, (24, 60, 0.2))])
def test_a_script_that_prints_its_steps_alone_leaves_early_for_its_saves_or_outputs(
    bench, monkeypatch, leaves_early, told
):
    readings = Readings(
        step=3, first_step=1, total_steps=9, loss=None, step_seconds=1.0, longest_s=None, age_s=0.0, values=()
    )
    printed = replace(Running.advance(None, None), readings=readings)
    monkeypatch.setattr(Running, "advance", lambda *_: printed)
    monkeypatch.setattr(Running, "leaves_early", leaves_early, raising=False)
    bench.told(0, 120, launch=True)
    assert told_by(bench) == told
