"""Two homes and one store on the embedded fleet: machines of one home are told of in the other, and never claimed."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.domain.node.node import fleet_of
from tests.commandline import command_line


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
    for command in (("down", "--adopt"), ("train", "--adopt"), ("ssh",), ("budget", "2 USD")):
        refused = mine.run(command[0], job, *command[1:], limit_s=60)
        assert refused.code == 3, (command, refused.stdout, refused.stderr)
        assert f"GPUCLOUD_HOME={theirs.home}" in refused.stderr, command
    assert alive(theirs) == 2
    assert json.loads(state_file(theirs).read_bytes())["status"] == json.loads(before)["status"]
    assert not (mine.home / "cloud" / "groups").exists()

    theirs.home.rename(theirs.home.with_name("away"))
    gone = mine.run("status", job, "--json", limit_s=60)
    assert (gone.code, len(gone.json["nodes"])) == (0, 2)
    assert mine.run("down", job, "--adopt", limit_s=60).code == 3
    theirs.home.with_name("away").rename(theirs.home)

    ended = theirs.run("down", "small", "--json")
    assert (ended.code, ended.json["nodes"], alive(theirs)) == (0, [], 0), ended.stderr
    assert mine.run("down", job, "--adopt").code == 0


def test_who_abandons_them_is_told_that_they_go_on_and_they_cost_until_then(mine, theirs):
    job = job_of(mine)

    given_up = mine.run("down", job, "--adopt", "--abandon", "--json")

    assert (given_up.code, given_up.json["error"]["code"]) == (30, "cleanup_incomplete"), given_up.stderr
    assert alive(theirs) == 2
    assert (
        "2 machines that could not be ended from here may be alive, and cost, until"
        in mine.run("status", "small").stdout
    )
    assert [node["ended_at"] for node in json.loads(state_file(theirs).read_bytes())["nodes"]] == [None, None]
    assert theirs.run("train", job_of(theirs)).code == 0
    assert alive(theirs) == 0


def test_after_their_paid_time_they_are_gone_and_were_paid_until_then(mine, theirs):
    state = json.loads(state_file(theirs).read_bytes())
    over = datetime.now(timezone.utc) - timedelta(minutes=5)
    state["paid_until"] = over.isoformat()
    for node in state["nodes"]:
        node["launched_at"] = (over - timedelta(minutes=10)).isoformat()
    state_file(theirs).write_text(json.dumps(state))

    ended = mine.run("down", job_of(mine), "--adopt", "--json")

    assert (ended.code, ended.json["nodes"]) == (0, []), ended.stderr
    left = json.loads(state_file(theirs).read_bytes())
    assert (left["group"], {datetime.fromisoformat(node["ended_at"]) for node in left["nodes"]}) == (None, {over})
    assert {node["charged"] for node in left["nodes"]} == {True}
