"""`gc` and `reconcile --all` through the real command line, over the embedded fleet."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime, timedelta

import pytest

from tests.commandline import command_line, until


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def abandoned(line, *, steps=2000):
    """A job whose supervisor was killed while it trained."""
    train = line.start("train", line.job(steps=steps, step_s=0.05))
    until(lambda: line.step() >= 1, "step 1")
    os.kill(train.pid, signal.SIGKILL)
    train.wait()


def kinds(answer):
    return sorted(one["kind"] for one in answer.json["strays"])


@pytest.mark.slow  # the two looks are a minute apart
def test_machines_of_a_job_whose_state_is_lost_are_removed_after_two_looks_and_not_before(line):
    abandoned(line)
    assert line.run("gc", "--json").json["strays"] == []  # a living job's
    (line.home / "store" / "jobs" / "small" / "state.json").unlink()

    first = line.run("gc", "--yes", "--json")
    assert (first.code, kinds(first)) == (30, ["instance", "instance", "node-group"])
    assert {one["cluster"] for one in first.json["strays"]} == {"gpucloud-small"}
    assert len(line.nodes()) == 2
    shown = line.run("gc")
    assert shown.code == 30
    assert "gpucloud-small" in shown.stdout
    assert "gpucloud gc --yes" in shown.stderr
    _age(line, seconds=61)
    second = line.run("gc", "--yes", "--json")

    assert (second.code, second.json["strays"]) == (0, []), second.stderr
    assert line.nodes() == []
    assert not line.group.describe("gpucloud-small").exists
    until(lambda: not line.processes(), "processes are gone", 15)


def _age(line, *, seconds):
    """Let the first sighting have been so long ago."""
    path = line.home / "sightings.json"
    kept = json.loads(path.read_text())
    for owner in kept.values():
        for key, at in owner.items():
            owner[key] = (datetime.fromisoformat(at) - timedelta(seconds=seconds)).isoformat()
    path.write_text(json.dumps(kept))


def in_another_home(line):
    """A home that trusts who gave the order, on the computer where the job's machines are of the first home's fleet."""
    own = line.run("keys", "--json").json["own"]["key"]
    line.env |= {"GPUCLOUD_HOME": str(line.folder / "elsewhere"), "GPUCLOUD_TRUSTED_KEYS": f"{own} own"}
    answer = line.run("reconcile", "--all", "--store", str(line.home / "store"), "--json")
    line.env["GPUCLOUD_HOME"] = str(line.home)
    del line.env["GPUCLOUD_TRUSTED_KEYS"]

    assert answer.code == 3, answer.stderr
    (found,) = answer.json["jobs"]
    assert f"on the embedded fleet of another home ({line.home} on " in found["message"]
    assert f"GPUCLOUD_HOME={line.home}" in found["hint"]


@pytest.mark.slow  # a pass of one job is made in every run
def test_one_pass_for_all_takes_up_every_job_and_tells_which_of_them_failed(line):
    abandoned(line, steps=40)
    in_another_home(line)
    broken = line.home / "index" / "other.json"
    broken.write_text(json.dumps({"store": str(line.folder / "nowhere"), "file": str(line.folder / "other.yaml")}))

    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        answer = line.run("reconcile", "--all", "--json")
        found = {one["job"]: one for one in answer.json["jobs"]}
        assert found["other"]["exit_code"] == answer.code == 2
        assert "there is no job 'other'" in found["other"]["message"]
        if "small" not in found:
            break
    assert (line.state()["status"], line.state()["torn_down"]) == ("succeeded", True)
    assert line.nodes() == []
    text = line.run("reconcile", "--all").stdout
    assert text.splitlines()[0].split() == ["job", "status", "exit"]
