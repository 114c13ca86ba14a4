"""Two homes and one store on the embedded fleet: machines of one home are told of in the other, and never claimed."""

from __future__ import annotations

import json
import shutil
import socket
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.domain.node.node import fleet_of
from tests.commandline import command_line, until


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine").mkdir()
    with command_line(tmp_path / "mine") as found:
        yield found


@pytest.fixture
def theirs(tmp_path):
    """A home whose job has two machines, and nobody who supervises them."""
    (tmp_path / "theirs").mkdir()
    with command_line(tmp_path / "theirs") as found:
        up = found.run("up", job_of(found), "--json")
        assert up.code == 0, up.stderr
        yield found


def job_of(line):
    return line.job(extra=f"store: {line.folder.parent / 'store'}\n")


def alive(line):
    return len(LocalNodeGroup(line.home / "cloud").describe("gpucloud-small").alive)


def state_file(line):
    return line.folder.parent / "store" / "jobs" / "small" / "state.json"


def test_machines_of_another_home_are_told_as_alive_and_ended_by_nobody_else(mine, theirs):
    before, job = state_file(theirs).read_bytes(), job_of(mine)
    fleet = fleet_of(json.loads(before)["group"])
    assert (fleet.home, alive(theirs)) == (str(theirs.home), 2)

    told = mine.run("status", job, "--json", limit_s=60)
    assert (told.code, len(told.json["nodes"]), told.json["paid_until"] is not None) == (0, 2, True), told.stderr
    assert f"embedded fleet of another home ({theirs.home} on " in told.json["message"]
    ways = f"end it: GPUCLOUD_HOME={theirs.home} gpucloud down small"
    assert ways in " ".join(mine.run("status", job).stdout.split())
    for command in ("down --adopt", "down --adopt --abandon", "train --adopt", "ssh", "budget 2USD"):
        refused = mine.run(command.split()[0], job, *command.split()[1:], limit_s=60)
        assert refused.code == 3, (command, refused.stdout, refused.stderr)
        assert f"GPUCLOUD_HOME={theirs.home}" in refused.stderr, command
    assert alive(theirs) == 2
    assert json.loads(state_file(theirs).read_bytes())["status"] == json.loads(before)["status"]
    assert not (mine.home / "cloud" / "groups").exists()

    ended = theirs.run("down", "small", "--json")
    assert (ended.code, ended.json["nodes"], alive(theirs)) == (0, [], 0), ended.stderr
    assert mine.run("down", job, "--adopt").code == 0


def test_a_job_goes_on_at_once_where_the_home_of_its_machines_is_gone(mine, theirs):
    job, before = job_of(mine), json.loads(state_file(theirs).read_bytes())
    gone = theirs.home.with_name("gone")
    theirs.home.rename(gone)
    try:
        told = mine.run("status", job, "--json", limit_s=60)
        assert (told.code, len(told.json["nodes"])) == (0, 2), told.stderr
        assert "and not seen from here; paid until " in told.json["message"]

        trained = mine.run("train", job, "--adopt")

        assert trained.code == 0, trained.stderr
        assert "USD for machines that could not be ended" in trained.stderr  # the plan reckons with them
        assert f"2 machines of the embedded fleet of {socket.gethostname()}:{theirs.home} are not seen from here" in (
            " ".join(trained.stderr.split())
        )
        state = json.loads(state_file(theirs).read_bytes())
        paid_until = datetime.fromisoformat(before["paid_until"])
        theirs_before = {node["node_id"] for node in before["nodes"]}
        left = [node for node in state["nodes"] if node["node_id"] in theirs_before]
        assert {datetime.fromisoformat(node["let_go_until"]) for node in left} == {paid_until}  # paid for as well
        assert {(node["ended_at"], node["charged"]) for node in left} == {(None, False)}
        assert "2 machines that could not be ended from here may be alive" in mine.run("status", job).stdout
    finally:
        gone.rename(theirs.home)

    until(lambda: alive(theirs) == 2, "its level is there again")
    back = " ".join(theirs.run("status", "small").stdout.split())
    assert "2 machines of this home, which the job went on without, are alive: `gpucloud gc --wait --yes` ends" in back
    for command in (("down",), ("rm", "--with-checkpoints", "--yes")):
        assert "hint: gpucloud gc --wait --yes" in theirs.run(command[0], "small", *command[1:]).stderr, command


def test_a_job_that_drives_itself_is_ended_from_another_home_and_its_budget_is_changed_there(mine, theirs):
    begun = theirs.run("train", theirs.job(steps=6000, extra=f"store: {theirs.folder.parent / 'store'}\n"), "--detach")
    assert begun.code == 0, begun.stderr
    job = mine.job(steps=6000, extra=f"store: {mine.folder.parent / 'store'}\n")

    shutil.copytree(theirs.home / "signing", mine.home / "signing", dirs_exist_ok=True)

    told = mine.run("status", job, "--json")
    assert "does what `gpucloud down` and `gpucloud budget` here ask" in told.json["message"]
    raised = mine.run("budget", job, "2 USD")
    assert raised.code == 0, raised.stderr
    ended = mine.run("down", job, "--adopt", "--json")

    assert (ended.code, ended.json["nodes"], alive(theirs)) == (0, [], 0), ended.stderr
    assert (ended.json["left_over"], "not seen from here" in ended.stderr) == (None, False)
    left = json.loads(state_file(theirs).read_bytes())
    assert (left["status"], left["group"]) == ("stopped", None)


def test_after_their_paid_time_they_are_gone_and_were_paid_until_then(mine, theirs):
    state = json.loads(state_file(theirs).read_bytes())
    over = datetime.now(timezone.utc) - timedelta(minutes=5)
    state["paid_until"] = over.isoformat()
    for node in state["nodes"]:
        node["launched_at"] = (over - timedelta(minutes=10)).isoformat()
    state_file(theirs).write_text(json.dumps(state))

    for command in ("ssh", "doctor"):
        assert "has no machine that is up" in mine.run(command, job_of(mine), limit_s=60).stderr
    ended = mine.run("down", job_of(mine), "--adopt", "--json")

    assert (ended.code, ended.json["nodes"]) == (0, []), ended.stderr
    left = json.loads(state_file(theirs).read_bytes())
    assert (left["group"], {datetime.fromisoformat(node["ended_at"]) for node in left["nodes"]}) == (None, {over})
    assert {node["charged"] for node in left["nodes"]} == {True}
