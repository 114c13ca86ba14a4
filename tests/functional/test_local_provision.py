"""Making and removing node groups, by call and by command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.home import Home
from gpucloud.adapters.local.group import LocalNodeGroup, fleet_elsewhere
from gpucloud.adapters.local.provision import EmbeddedProvisioner, LocalProvisioner, ensure_group
from gpucloud.adapters.local.records import Folder, NodeRecord
from gpucloud.domain.errors import FleetElsewhere, ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import NO_GROUP, NodeState, fleet_of
from gpucloud.domain.offer import Pool
from gpucloud.ports import ClusterSpec

SPEC = ClusterSpec(
    name="gpucloud-digits",
    region="us-east-2",
    zones=("us-east-2a", "us-east-2b"),
    node_type="local.p3.2xlarge",
    market=Market.SPOT,
    tags=(("gpucloud:job", "digits"),),
    public_key="ssh-ed25519 AAAA",
    store="/store",
)
CLUSTER = {
    "name": "gpucloud-digits",
    "region": "us-east-2",
    "zones": ["us-east-2a", "us-east-2b"],
    "node_type": "local.p3.2xlarge",
    "market": "spot",
    "tags": {"gpucloud:job": "digits"},
    "access": "ssh-ed25519 AAAA",
    "store": "/store",
}

NODE = NodeRecord(
    id="i-00000000000000001",
    number=1,
    pool=Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT),
    launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
    address="127.0.0.11",
    port=2201,
    user="me",
    interface="lo",
    host_key="ssh-ed25519 AAAA",
    state=NodeState.RUNNING,
)


def provision(action: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "gpucloud.adapters.local.provision", action]
    return subprocess.run(argv, env=env, capture_output=True, text=True)


def test_the_command_line_makes_the_same_group_as_the_call_and_removes_it(tmp_path: Path) -> None:
    env = {"GPUCLOUD_HOME": str(tmp_path / "home"), "GPUCLOUD_CLUSTER": json.dumps(CLUSTER)}
    ensure_group(tmp_path / "cloud", SPEC)
    for _ in range(2):
        made = provision("ensure", env)
        assert (made.returncode, json.loads(made.stdout)) == (0, {"group_name": "gpucloud-digits"}), made.stderr
    ours = Folder(tmp_path / "home" / "cloud").group("gpucloud-digits")
    assert ours == Folder(tmp_path / "cloud").group("gpucloud-digits")
    for _ in range(2):
        removed = provision("destroy", env)
        assert (removed.returncode, json.loads(removed.stdout)) == (0, {"group_name": "gpucloud-digits"})
    assert Folder(tmp_path / "home" / "cloud").groups() == ()


@pytest.mark.parametrize(
    ("change", "exit_code"),
    [
        ({"GPUCLOUD_HOME": ""}, 2),
        ({"GPUCLOUD_CLUSTER": ""}, 2),
        ({"GPUCLOUD_CLUSTER": "{"}, 2),
        ({"GPUCLOUD_CLUSTER": "[]"}, 2),
        ({"GPUCLOUD_CLUSTER": json.dumps({**CLUSTER, "market": "bazaar"})}, 2),
        ({"GPUCLOUD_CLUSTER": json.dumps({**CLUSTER, "name": "../out"})}, 13),
        ({"GPUCLOUD_HOME": "/proc/nowhere"}, 13),
    ],
)
def test_what_cannot_be_done_is_said_with_a_hint_and_without_a_traceback(
    tmp_path: Path, change: dict[str, str], exit_code: int
) -> None:
    env = {"GPUCLOUD_HOME": str(tmp_path / "home"), "GPUCLOUD_CLUSTER": json.dumps(CLUSTER), **change}
    failed = provision("ensure", env)
    assert (failed.returncode, failed.stdout) == (exit_code, "")
    assert "hint: " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_ensuring_again_changes_the_settings_and_keeps_the_level(tmp_path: Path) -> None:
    told: list[str] = []
    provisioner = LocalProvisioner(tmp_path)
    assert provisioner.ensure(SPEC, story=told.append) == "gpucloud-digits"
    until = datetime.now(timezone.utc) + timedelta(hours=1)
    LocalNodeGroup(tmp_path).arm("gpucloud-digits", until)
    changed = replace(SPEC, public_key="ssh-ed25519 BBBB")
    assert provisioner.ensure(changed, story=told.append) == "gpucloud-digits"
    group = Folder(tmp_path).group("gpucloud-digits")
    assert group is not None
    assert (group.public_key, group.armed_until) == ("ssh-ed25519 BBBB", until)
    provisioner.destroy("gpucloud-digits", story=told.append)
    provisioner.destroy("gpucloud-digits", story=told.append)
    assert not LocalNodeGroup(tmp_path).describe("gpucloud-digits").exists
    assert len(told) == 3


def test_no_call_for_a_group_of_another_home_reaches_the_own_one_of_that_name(tmp_path: Path) -> None:
    homes, told = [Home(tmp_path / name) for name in ("mine", "a folder")], list[str]()
    mine, theirs = (LocalNodeGroup(home.cloud, fleet=home.fleet) for home in homes)
    makers = [EmbeddedProvisioner(home.fleet, LocalProvisioner(home.cloud), None, home.terraform) for home in homes]
    own, other = (maker.ensure(SPEC, story=told.append) for maker in makers)
    assert fleet_of(other) == homes[1].fleet()
    assert own == makers[0].group(SPEC.name, SPEC.region)
    assert mine.describe(own).exists
    assert mine.describe(SPEC.name).exists  # of states that were written before
    assert mine.describe(other) == NO_GROUP  # no machine of it lives there
    records = Folder(homes[1].cloud)
    records.save_node(SPEC.name, NODE)
    until = datetime.now(timezone.utc) + timedelta(hours=1)
    for call in (
        lambda: mine.describe(other),
        lambda: mine.arm(other, until),
        lambda: mine.purge(other),
        lambda: mine.interrupt(other, "i-1", notice=True),
        lambda: makers[0].destroy(other, story=told.append),
    ):
        with pytest.raises(FleetElsewhere, match=r"fleet of another home \(.*/a folder on ") as refused:
            call()
        assert str(refused.value.message).startswith("the machines of digits are ")
        assert str(refused.value.hint).endswith(f"GPUCLOUD_HOME='{homes[1].root}'")
    for away in (replace(homes[1].fleet(), host="another"), replace(homes[1].fleet(), home=str(tmp_path / "gone"))):
        with pytest.raises(FleetElsewhere) as unseen:
            mine.describe(away.named(SPEC.name))
        assert not unseen.value.is_here
        mine.purge(away.named(SPEC.name))
        makers[0].destroy(away.named(SPEC.name), story=told.append)
    records.save_node(SPEC.name, replace(NODE, state=NodeState.TERMINATED, ended_at=until))
    assert (mine.describe(other).exists, mine.describe(other).nodes[0].ended_at) == (False, until)
    makers[0].destroy(other, story=told.append)
    assert theirs.describe(other).exists
    makers[0].destroy(own, story=told.append)
    assert (mine.describe(own).exists, theirs.describe(other).exists) == (False, True)


@pytest.mark.parametrize("group", [None, "", "gpucloud-digits", "us-west-2/gpucloud-digits", f"{'a' * 32}/gpucloud-x"])
def test_groups_of_clouds_are_named_after_no_fleet(group: str | None) -> None:
    assert fleet_of(group) is None


@pytest.mark.parametrize("name", ["", "..", "a/b", "Upper", "x" * 64])
def test_a_name_that_no_group_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProvisionError):
        ensure_group(tmp_path, replace(SPEC, name=name))
    assert list((tmp_path / "groups").iterdir()) == []


def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    ensure_group(tmp_path, SPEC)
    path = tmp_path / "groups" / "gpucloud-digits" / "group.json"
    for text in ("", "{}", "[1]", '{"name": "x"'):
        path.write_text(text)
        with pytest.raises(ProvisionError, match=str(path)):
            LocalNodeGroup(tmp_path).describe("gpucloud-digits")


def test_the_settings_of_the_cloud_are_kept_for_those_who_do_not_give_them(tmp_path: Path) -> None:
    assert LocalNodeGroup(tmp_path / "cloud").notice_seconds == 4.0
    assert not (tmp_path / "cloud").exists()
    LocalNodeGroup(tmp_path / "cloud", clock_factor=60.0)
    assert LocalNodeGroup(tmp_path / "cloud").notice_seconds == 2.0


@pytest.mark.parametrize("changes", [{"size": 1}, {}, PermissionError, ProvisionError("damaged")])
def test_another_homes_group_is_here_while_its_level_may_start_machines_and_where_its_records_are_damaged(
    tmp_path, monkeypatch, changes
):
    """All its machines may be taken at the moment; of another user's home that cannot be read nothing is known."""
    theirs, mine = Home(tmp_path / "theirs"), Home(tmp_path / "mine")
    provisioner = EmbeddedProvisioner(theirs.fleet, LocalProvisioner(theirs.cloud), None, theirs.terraform)
    group = provisioner.ensure(SPEC, story=print)
    if not isinstance(changes, dict):
        monkeypatch.setattr(Folder, "group", lambda *_: (_ for _ in ()).throw(changes))
    else:
        folder = Folder(theirs.cloud)
        folder.save_group(replace(folder.group(SPEC.name), **changes))
    found = fleet_elsewhere(group, mine.fleet)
    assert found is not None
    assert found.is_here is (changes not in ({}, PermissionError))
    if not found.is_here and changes:
        with pytest.raises(FleetElsewhere, match="not seen from here"):
            LocalNodeGroup(mine.cloud, fleet=mine.fleet).describe(group)
