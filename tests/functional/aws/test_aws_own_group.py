"""A group on the emulated AWS as one of its own machines has it: with the rights of its role, and no others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import botocore.exceptions
import pytest

from gpucloud.adapters.aws.account import role_id_of
from gpucloud.adapters.aws.machine import HostKeys
from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.adapters.aws.policy import actions, node_policy
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.home import Home
from gpucloud.domain.errors import GpucloudError, ProvisionError
from gpucloud.domain.job.spec import AwsChoices, Resources
from gpucloud.domain.node.node import EndCause, GroupView, Node, NodeState
from gpucloud.store import open_store
from gpucloud.store.directory import DirectoryStore
from gpucloud.wiring.aws import AwsCloud
from tests.iam.actions import action_of
from tests.lab.aws import Lab
from tests.standins.aws_group import CLUSTER, GROUP, SPOT, Rig, rented, runs, until

BUCKET = "gpucloud-machines"
POLICY = node_policy(
    partition="aws", account="123456789012", regions=("us-east-1",), cluster=CLUSTER, bucket=BUCKET, unattended=True
)
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILRhZ2dlZCBhbmQgZ29uZSBhcyBhIGtleSBmb3IgbGFi"

OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f"


class Machine:
    """One of two machines that somebody outside has started, and what it does with its role's keys."""

    def __init__(self, lab: Lab, patch: pytest.MonkeyPatch) -> None:
        self.lab = lab
        outside = Rig(lab).group()
        outside.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
        outside.resize(GROUP, 2, SPOT)
        self.key = _become_a_machine(lab, patch)
        self.aws = Aws(region="us-east-1")
        self.nodes: AwsNodeGroup = AwsNodeGroup(**{**Rig(lab).arguments(), "aws": self.aws, "own": True})
        self.until(lambda view: len(running(view)) == 2)

    def until(self, wanted: Callable[[GroupView], bool], limit_s: float = 20.0) -> GroupView:
        deadline = time.monotonic() + limit_s
        while not wanted(view := self.nodes.describe(GROUP)):
            assert time.monotonic() < deadline, f"never so; last seen: {view}"
            time.sleep(0.02)
        return view

    @property
    def needed(self) -> set[str]:
        """The rights that its calls needed so far."""
        own = [call for call in self.lab.calls if call.key == self.key]
        return {action for call in own for action in action_of(call.service, call.action, call.params)}


def running(view: GroupView) -> tuple[Node, ...]:
    return tuple(node for node in view.nodes if node.state is NodeState.RUNNING)


def _become_a_machine(lab: Lab, patch: pytest.MonkeyPatch) -> str:
    iam = lab.client("iam")
    iam.create_role(RoleName="machine", AssumeRolePolicyDocument="{}")
    iam.put_role_policy(RoleName="machine", PolicyName="job", PolicyDocument=json.dumps(POLICY))
    lab.client("s3").create_bucket(Bucket=BUCKET)
    arn = "arn:aws:iam::123456789012:role/machine"
    keys = lab.client("sts").assume_role(RoleArn=arn, RoleSessionName="i-0aaa")["Credentials"]
    patch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
    patch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
    patch.setenv("AWS_SESSION_TOKEN", keys["SessionToken"])
    return str(keys["AccessKeyId"])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with rented(tmp_path / "lab") as lab:
        yield Machine(lab, monkeypatch)


def test_machines_that_are_taken_all_at_once_come_back_by_themselves(machine: Machine) -> None:
    old = running(machine.nodes.describe(GROUP))
    for node in old:
        machine.lab.take(node.id)
    view = machine.until(lambda view: len(running(view)) == 2 and not {n.id for n in old} & {n.id for n in view.alive})
    assert view.size == 2
    assert {node.end_cause for node in view.nodes if node.state is NodeState.TERMINATED} == {EndCause.INTERRUPTED}


def test_a_peer_is_replaced_and_the_level_goes_down_and_up_again_within_its_limit(machine: Machine) -> None:
    bad = running(machine.nodes.describe(GROUP))[0]
    machine.nodes.terminate(GROUP, bad.id)
    machine.until(lambda view: len(running(view)) == 2 and bad.id not in {node.id for node in view.alive})
    machine.nodes.resize(GROUP, 1, SPOT)
    machine.until(lambda view: view.size == len(view.alive) == 1)
    machine.nodes.resize(GROUP, 2, SPOT)
    machine.until(lambda view: view.size == len(running(view)) == 2)
    assert machine.needed - {"autoscaling:DescribeScalingActivities"} == {  # asked while a machine is missing
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeScheduledActions",
        "autoscaling:SetDesiredCapacity",
        "autoscaling:TerminateInstanceInAutoScalingGroup",
        "ec2:DescribeInstances",
    }
    assert machine.needed <= actions(POLICY)


def test_the_end_takes_every_machine_and_none_can_raise_the_group_above_its_limit(machine: Machine) -> None:
    for _ in range(2):  # whoever is left after the first one says it again
        machine.nodes.resize(GROUP, 0, SPOT)
    view = machine.until(lambda view: not view.alive)
    assert view.size == 0
    assert {node.end_cause for node in view.nodes} == {EndCause.CHOICE}
    with pytest.raises(ProvisionError, match="may not raise its limit from 2 to 3"):
        machine.nodes.resize(GROUP, 3, SPOT)


def test_it_cannot_have_later_machines_outlive_the_shut_off(machine: Machine) -> None:
    with machine.aws.calling("autoscaling", "protect what comes", "us-east-1") as scaling:
        group = {"AutoScalingGroupName": CLUSTER}
        ids = [node.id for node in running(machine.nodes.describe(GROUP))]
        forbidden: list[Callable[[], object]] = [
            lambda: scaling.update_auto_scaling_group(**group, MaxSize=0, NewInstancesProtectedFromScaleIn=True),
            lambda: scaling.set_instance_protection(**group, InstanceIds=ids, ProtectedFromScaleIn=True),
            lambda: scaling.suspend_processes(**group, ScalingProcesses=["Terminate"]),
            lambda: scaling.delete_scheduled_action(**group, ScheduledActionName="gpucloud-auto-shutdown"),
            lambda: scaling.enter_standby(**group, InstanceIds=ids, ShouldDecrementDesiredCapacity=True),
        ]
        for act in forbidden:
            with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
                act()


def test_it_buys_neither_machines_nor_time(machine: Machine) -> None:
    node, before = running(machine.nodes.describe(GROUP))[0], machine.nodes.describe(GROUP)
    forbidden: list[Callable[[], None]] = [
        lambda: machine.nodes.resize(GROUP, 3, SPOT),
        lambda: machine.nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(hours=3)),
        lambda: machine.nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=3)),
        lambda: machine.nodes.relieve(GROUP, node.id),
        lambda: machine.nodes.interrupt(GROUP, node.id, notice=True),
    ]
    for act in forbidden:
        with pytest.raises(GpucloudError):
            act()
    after = machine.nodes.describe(GROUP)
    assert (after.size, after.armed_until, after.alive) == (before.size, before.armed_until, before.alive)


def test_the_host_keys_of_its_peers_are_those_that_its_own_role_published(machine: Machine) -> None:
    outside = machine.lab.client("s3")
    role_id = role_id_of(machine.aws)
    outside.put_object(Bucket=BUCKET, Key=f"clusters/{CLUSTER}/hosts/{role_id}:i-0bbb", Body=KEY.encode())
    outside.put_object(Bucket=BUCKET, Key=f"clusters/{CLUSTER}/hosts/AROAOTHER:i-0ccc", Body=KEY.encode())
    keys = HostKeys(open_store(f"s3://{BUCKET}"), CLUSTER, role_id=role_id)
    assert keys.of("i-0bbb") == KEY
    with pytest.raises(GpucloudError):  # S3 says that there is none only to who may list
        keys.of("i-0ccc")


def test_with_a_profile_of_the_users_own_only_its_role_tells_host_keys(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("GPUCLOUD_AWS_POLL_S", "0")
    with rented(tmp_path / "lab") as lab:
        iam, store = lab.client("iam"), DirectoryStore(tmp_path / "store")
        role = iam.create_role(RoleName="research", AssumeRolePolicyDocument="{}")["Role"]
        iam.create_instance_profile(InstanceProfileName="own")
        iam.add_role_to_instance_profile(InstanceProfileName="own", RoleName="research")
        cloud = AwsCloud(Home(tmp_path / "home"), AwsChoices(instance_profile="own"), Resources())
        nodes = cloud.group(store)
        nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
        nodes.resize(GROUP, 1, SPOT)
        (node,) = until(nodes, runs(1)).alive
        store.put(f"clusters/{CLUSTER}/hosts/AROAOTHER:{node.id}", OTHER.encode())  # before the machine itself
        assert [one.host_key for one in nodes.describe(GROUP).alive] == [None]
        store.put(f"clusters/{CLUSTER}/hosts/{role['RoleId']}:{node.id}", KEY.encode())
        assert [one.host_key for one in until(nodes, lambda view: view.alive[0].host_key is not None).alive] == [KEY]


def test_somebody_who_is_no_roles_session_has_no_role(tmp_path: Path) -> None:
    with rented(tmp_path / "lab"):
        assert role_id_of(Aws(region="us-east-1")) is None
