"""How the agent reckons the paid time that its last save must fit into, when that time is prolonged."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.agent import reconcile
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.reconcile import Agent
from gpucloud.domain.agentstatus import AttemptStatus, Desired, Launch, RunState, Stop, desired_to_json
from tests.unit.worlds import NOW


class Folder:
    number = 1
    path = None

    def __init__(self):
        self.asked = []

    def saving(self):
        return None

    def ask_to_stop(self, reason, at):
        self.asked.append((reason, at))


class Running:
    """An attempt that goes on for ever."""

    def __init__(self, launch, folder):
        self.folder = Folder()

    def advance(self, spared):
        return AttemptStatus(
            attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, progress=None, failed_rank=None
        )


class Bench:
    """An agent whose clock is set by hand, in seconds from the beginning."""

    def __init__(self, folder, monkeypatch):
        self.now = NOW
        (folder / "agent").mkdir()
        self.desired = folder / "agent" / "desired.json"
        monkeypatch.setattr(reconcile, "datetime", SimpleNamespace(now=lambda _: self.now))
        monkeypatch.setattr(reconcile, "RunningAttempt", Running)
        station = SimpleNamespace(gpus=(), ill=None, host=None, spared=frozenset(), look=lambda *_: None)
        self.agent = Agent(folder, notice=lambda: None, own_end=OwnEnd(), rest=lambda _: None, station=station)

    def told(self, at_s, paid_s, *, launch=False):
        started = Launch(attempt=1, argv=("true",), directory="/", env=()) if launch else None
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
