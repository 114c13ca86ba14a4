"""Processes struck at calls of theirs, over fakes: what the proofs do everywhere, and that they would see a fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.usecases.supervise.provision import MachineProvisioner
from tests.faults.points import STORIES, Point, judge, undisturbed
from tests.faults.process import run
from tests.faults.rig import GROUP, Outside
from tests.faults.strikes import Blow, Strikes

BY_NAME = {story.name: story for story in STORIES}


def calls(outside: Outside, *arguments: str) -> Strikes:
    strikes = Strikes()
    assert run(arguments, outside.over(strikes), strikes).code == 0
    return strikes


def test_a_job_over_fakes_runs_whole_with_an_interruption_and_leaves_nothing(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    strikes = calls(outside, "train", str(outside.file), "--drill")
    assert outside.fleet.resumed == [(1, 1, 0), (2, 6, 5)]
    assert len(outside.cloud.launched) == 3
    assert not outside.cloud.describe(GROUP).exists
    assert outside.breaches == []
    assert strikes.calls.index(f"group.arm {GROUP}") < strikes.calls.index(f"group.resize {GROUP}")


@pytest.mark.parametrize("blow", [Blow.INT, Blow.TERM])
def test_a_down_that_is_interrupted_says_what_lives_until_when(blow: Blow) -> None:
    at = undisturbed(BY_NAME["down"]).calls.index(f"group.purge {GROUP}") + 1
    assert judge(Point(story=BY_NAME["down"], blow=blow, at=at)).wrong == []


def test_a_shut_off_that_the_cloud_lowers_first_would_be_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cloud_first(self: MachineProvisioner, group: str, until: object) -> None:
        self.services.group.arm(group, until)  # type: ignore[arg-type]
        self.lease.write(replace(self.lease.state, paid_until=until))  # type: ignore[arg-type]

    monkeypatch.setattr(MachineProvisioner, "_arm", cloud_first)
    outside = Outside(tmp_path)
    calls(outside, "train", str(outside.file), "--drill")
    assert any("is promised, and the cloud ends them at" in breach for breach in outside.breaches)


def test_a_bill_that_is_forgotten_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineProvisioner, "_bill", lambda self, name: None)
    wrong = judge(Point(story=BY_NAME["up"], blow=Blow.KILL, at=1)).wrong
    assert any("is in the books as" in line for line in wrong)


def test_a_group_that_is_forgotten_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MachineProvisioner, "_end_group", lambda self, name: None)
    wrong = judge(Point(story=BY_NAME["up"], blow=Blow.KILL, at=1)).wrong
    assert f"left over: group {GROUP}, 2 machines" in "; ".join(wrong)
