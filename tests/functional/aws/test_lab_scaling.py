"""Auto Scaling in the emulated AWS: the level, what refuses it, what takes from it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest

from tests.lab.aws import Lab
from tests.lab.aws.tables import IMAGES, image_id

NAME = "gpucloud-digits"
OWNED = [{"Key": "gpucloud:managed", "Value": "true"}, {"Key": "gpucloud:cluster", "Value": NAME}]
POOL = "g4dn.xlarge/us-east-1a/spot"


@dataclass(frozen=True, slots=True)
class Group:
    """A group of size 0 over two zones, as terraform/aws/cluster makes it."""

    lab: Lab
    scaling: Any
    ec2: Any
    subnets: dict[str, str]

    def use(self, kind: str = "g4dn.xlarge", zone: str = "us-east-1a", on_demand: int = 0) -> None:
        self.scaling.update_auto_scaling_group(
            AutoScalingGroupName=NAME, MinSize=0, MaxSize=8, VPCZoneIdentifier=self.subnets[zone],
            MixedInstancesPolicy=_policy(kind, on_demand),
        )  # fmt: skip

    def level(self, size: int) -> None:
        self.scaling.set_desired_capacity(AutoScalingGroupName=NAME, DesiredCapacity=size, HonorCooldown=False)

    def launch(self, count: int, token: str | None = None) -> dict[str, Any]:
        said: dict[str, Any] = self.scaling.launch_instances(
            AutoScalingGroupName=NAME,
            RequestedCapacity=count,
            ClientToken=token or uuid.uuid4().hex,
            RetryStrategy="none",
        )
        return said

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[NAME])
        return dict(found["AutoScalingGroups"][0])

    def nodes(self, *states: str) -> list[dict[str, Any]]:
        wanted = [{"Name": "tag:gpucloud:cluster", "Values": [NAME]}]
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=wanted)
        found = [one for page in pages for part in page["Reservations"] for one in part["Instances"]]
        return [one for one in found if not states or one["State"]["Name"] in states]

    def activities(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = self.scaling.describe_scaling_activities(AutoScalingGroupName=NAME)["Activities"]
        return said


def _policy(kind: str, on_demand: int) -> dict[str, Any]:
    template = {"LaunchTemplateName": f"{NAME}-efa0", "Version": "$Latest"}
    return {
        "LaunchTemplate": {"LaunchTemplateSpecification": template, "Overrides": [{"InstanceType": kind}]},
        "InstancesDistribution": {"OnDemandBaseCapacity": 0, "OnDemandPercentageAboveBaseCapacity": on_demand},
    }


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with Lab(tmp_path / "lab") as made:
        yield made


@pytest.fixture
def group(lab: Lab) -> Group:
    ec2, scaling, iam = lab.client("ec2"), lab.client("autoscaling"), lab.client("iam")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16", TagSpecifications=[_spec("vpc")])["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(
            VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", AvailabilityZone=zone, TagSpecifications=[_spec("subnet")]
        )["Subnet"]["SubnetId"]
        for number, zone in enumerate(("us-east-1a", "us-east-1b"))
    }
    firewall = ec2.create_security_group(
        GroupName="ssh", Description="d", VpcId=vpc, TagSpecifications=[_spec("security-group")]
    )["GroupId"]
    iam.create_role(RoleName=NAME, AssumeRolePolicyDocument="{}", Tags=OWNED)
    iam.create_instance_profile(InstanceProfileName=NAME, Tags=OWNED)
    iam.add_role_to_instance_profile(InstanceProfileName=NAME, RoleName=NAME)
    ec2.create_launch_template(
        LaunchTemplateName=f"{NAME}-efa0",
        LaunchTemplateData=_template(firewall),
        TagSpecifications=[_spec("launch-template")],
    )
    scaling.create_auto_scaling_group(
        AutoScalingGroupName=NAME, MinSize=0, MaxSize=0, DesiredCapacity=0,
        VPCZoneIdentifier=",".join(subnets.values()),
        MixedInstancesPolicy=_policy("g4dn.xlarge", 0), Tags=[{**tag, "PropagateAtLaunch": False} for tag in OWNED],
    )  # fmt: skip
    return Group(lab, scaling, ec2, subnets)


def _spec(kind: str) -> dict[str, Any]:
    return {"ResourceType": kind, "Tags": OWNED}


def _template(firewall: str) -> dict[str, Any]:
    return {
        "ImageId": image_id("us-east-1", next(iter(IMAGES))),
        "InstanceType": "g4dn.xlarge",
        "IamInstanceProfile": {"Name": NAME},
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
        "NetworkInterfaces": [{"DeviceIndex": 0, "AssociatePublicIpAddress": True, "Groups": [firewall]}],
        "InstanceInitiatedShutdownBehavior": "terminate",
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 80, "VolumeType": "gp3"}}],
        "TagSpecifications": [_spec("instance"), _spec("volume"), _spec("network-interface")],
    }


def until(is_so: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Return what `is_so` says once it is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        said = is_so()
        if said:
            return said
        time.sleep(0.02)
    raise AssertionError(f"not so within {seconds} s")


def test_a_level_becomes_machines_with_all_that_their_template_says(group: Group) -> None:
    group.use()
    group.level(2)
    node = until(lambda: len(group.nodes("running")) == 2 and group.nodes("running")[0])
    assert (node["InstanceType"], node["Placement"]["AvailabilityZone"]) == ("g4dn.xlarge", "us-east-1a")
    assert node["InstanceLifecycle"] == "spot"
    assert node["SpotInstanceRequestId"].startswith("sir-")
    assert node["MetadataOptions"]["HttpTokens"] == "required"
    assert node["IamInstanceProfile"]["Arn"].endswith(f"instance-profile/{NAME}")
    assert [one["GroupName"] for one in node["SecurityGroups"]] == ["ssh"]
    assert {tag["Key"]: tag["Value"] for tag in node["Tags"]}["aws:autoscaling:groupName"] == NAME
    assert node["PublicIpAddress"]
    assert [one["LifecycleState"] for one in group.seen()["Instances"]] == ["InService", "InService"]
    assert group.lab.untagged == []


def test_on_demand_by_the_policys_share(group: Group) -> None:
    group.use(zone="us-east-1b", on_demand=100)
    group.level(1)
    node = until(lambda: group.nodes("running"))[0]
    assert "InstanceLifecycle" not in node
    assert node["Placement"]["AvailabilityZone"] == "us-east-1b"


def test_a_pool_without_capacity_refuses_in_a_failed_activity(group: Group) -> None:
    group.lab.capacity[POOL] = 1
    group.use()
    group.level(2)
    failed = until(lambda: [one for one in group.activities() if one["StatusCode"] == "Failed"])[0]
    assert failed["StatusMessage"] == (
        "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available that "
        "matches your request. Launching EC2 instance failed."
    )
    assert len(until(lambda: group.nodes("running"))) == 1


def test_a_quota_refuses_in_a_failed_activity(group: Group) -> None:
    group.lab.quotas["L-DB2E81BA"] = 4
    group.use(on_demand=100)
    group.level(2)
    failed = until(lambda: [one for one in group.activities() if one["StatusCode"] == "Failed"])[0]
    assert failed["StatusMessage"].startswith(
        "You have requested more vCPU capacity than your current vCPU limit of 4 "
    )
    assert len(group.nodes("pending", "running")) == 1


def test_launch_instances_says_at_once_what_it_got_and_raises_the_level(group: Group) -> None:
    group.lab.capacity[POOL] = 2
    group.use()
    said = group.launch(3)
    assert [len(part["InstanceIds"]) for part in said["Instances"]] == [2]
    assert [(one["ErrorCode"], one["AvailabilityZone"], one["MarketType"]) for one in said["Errors"]] == [
        ("InsufficientInstanceCapacity", "us-east-1a", "spot")
    ]
    assert group.seen()["DesiredCapacity"] == 2


def test_launch_instances_with_the_same_token_launches_once(group: Group) -> None:
    group.use()
    group.lab.faults.add("LaunchInstances", when="after")
    with pytest.raises(botocore.exceptions.ConnectionClosedError):
        group.launch(2, "token")
    said = group.launch(2, "token")
    assert len(said["Instances"][0]["InstanceIds"]) == 2
    assert len(group.nodes()) == 2


def test_an_aws_without_launch_instances_says_so(group: Group) -> None:
    group.use()
    group.lab.has_launch_instances = False
    with pytest.raises(botocore.exceptions.ClientError, match="InvalidAction"):
        group.launch(1)


def test_a_taken_node_says_who_ended_it_and_is_replaced(group: Group) -> None:
    group.use()
    group.level(1)
    first = until(lambda: group.nodes("running"))[0]["InstanceId"]
    group.lab.take(first)
    until(lambda: [one for one in group.nodes("running") if one["InstanceId"] != first])
    taken = until(lambda: [one for one in group.nodes("terminated") if one["InstanceId"] == first])[0]
    assert taken["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    assert len(group.nodes("pending", "running")) == 1


def test_a_notice_takes_the_node_when_its_time_is_up(group: Group) -> None:
    group.lab.notice_s = 0.5
    group.use()
    group.level(1)
    first = until(lambda: group.nodes("running"))[0]["InstanceId"]
    group.lab.notice(first)
    assert [one["InstanceId"] for one in group.nodes("running")] == [first]
    until(lambda: [one for one in group.nodes("terminated") if one["InstanceId"] == first])


def test_a_suspended_launch_leaves_the_level_unfilled(group: Group) -> None:
    group.use()
    group.level(1)
    first = until(lambda: group.nodes("running"))[0]["InstanceId"]
    group.scaling.suspend_processes(AutoScalingGroupName=NAME, ScalingProcesses=["Launch"])
    group.lab.take(first)
    until(lambda: group.nodes("terminated"))
    assert group.seen()["DesiredCapacity"] == 1
    assert group.nodes("pending", "running") == []
    group.scaling.resume_processes(AutoScalingGroupName=NAME, ScalingProcesses=["Launch"])
    until(lambda: group.nodes("running"))


def test_a_detached_node_runs_on_while_the_level_starts_another(group: Group) -> None:
    group.use()
    group.level(1)
    first = until(lambda: group.nodes("running"))[0]["InstanceId"]
    group.scaling.detach_instances(
        AutoScalingGroupName=NAME, InstanceIds=[first], ShouldDecrementDesiredCapacity=False
    )  # fmt: skip
    until(lambda: len(group.nodes("running")) == 2)
    detached = next(one for one in group.nodes() if one["InstanceId"] == first)
    assert "aws:autoscaling:groupName" not in {tag["Key"] for tag in detached["Tags"]}
    assert first not in {one["InstanceId"] for one in group.seen()["Instances"]}


def test_terminating_in_the_group_with_decrement_lowers_the_level(group: Group) -> None:
    group.use()
    group.level(2)
    first = until(lambda: len(group.nodes("running")) == 2 and group.nodes("running")[0])["InstanceId"]
    said = group.scaling.terminate_instance_in_auto_scaling_group(InstanceId=first, ShouldDecrementDesiredCapacity=True)
    assert said["Activity"]["AutoScalingGroupName"] == NAME
    assert group.seen()["DesiredCapacity"] == 1
    ended = until(lambda: group.nodes("terminated"))[0]
    assert ended["InstanceId"] == first
    assert ended["StateReason"]["Code"] == "Client.UserInitiatedShutdown"
    assert ended["StateTransitionReason"].startswith("User initiated (2")


def test_the_shut_off_fires_at_its_time_and_is_gone(group: Group) -> None:
    group.use()
    group.level(2)
    until(lambda: len(group.nodes("running")) == 2)
    at = datetime.now(timezone.utc) + timedelta(seconds=2)
    group.scaling.put_scheduled_update_group_action(
        AutoScalingGroupName=NAME, ScheduledActionName="gpucloud-auto-shutdown", StartTime=at, MinSize=0, MaxSize=0,
        DesiredCapacity=0,
    )  # fmt: skip
    planned = group.scaling.describe_scheduled_actions(AutoScalingGroupName=NAME)["ScheduledUpdateGroupActions"]
    assert [one["StartTime"] for one in planned] == [at.replace(microsecond=0)]
    until(lambda: len(group.nodes("terminated")) == 2)
    assert group.seen()["DesiredCapacity"] == 0
    assert group.scaling.describe_scheduled_actions(AutoScalingGroupName=NAME)["ScheduledUpdateGroupActions"] == []


def test_a_shut_off_in_the_past_is_refused(group: Group) -> None:
    with pytest.raises(botocore.exceptions.ClientError, match="Given start time is in the past"):
        group.scaling.put_scheduled_update_group_action(
            AutoScalingGroupName=NAME, ScheduledActionName="gpucloud-auto-shutdown",
            StartTime=datetime.now(timezone.utc) - timedelta(seconds=1), DesiredCapacity=0,
        )  # fmt: skip


def test_stale_reads_show_the_past_and_then_the_present(group: Group) -> None:
    group.use()
    group.lab.stale_s = 1.0
    group.launch(1)
    assert group.nodes() == []
    assert group.seen()["DesiredCapacity"] == 0
    until(lambda: group.nodes("running"))
    assert group.seen()["DesiredCapacity"] == 1


def test_a_death_at_launch_says_its_reason_on_the_instance_and_in_the_activity(group: Group) -> None:
    group.lab.die_at_launch(POOL)
    group.use()
    group.level(1)
    dead = until(lambda: group.nodes("terminated"))[0]
    assert dead["StateReason"] == {
        "Code": "Client.InternalError",
        "Message": "Client.InternalError: Client error on launch",
    }
    failed = next(one for one in group.activities() if one["StatusCode"] == "Failed")
    assert "Client.InternalError: Client error on launch" in failed["StatusMessage"]
    until(lambda: group.nodes("running"))


def test_an_experiment_interrupts_the_nodes_that_it_names(group: Group) -> None:
    group.lab.notice_s = 0.3
    group.use()
    group.level(1)
    first = until(lambda: group.nodes("running"))[0]["InstanceId"]
    role = group.lab.client("iam").get_role(RoleName=NAME)["Role"]["Arn"]
    fis = group.lab.client("fis")
    template = fis.create_experiment_template(
        clientToken="a", description="drill", stopConditions=[{"source": "none"}], roleArn=role,
        targets={"one": {"resourceType": "aws:ec2:spot-instance", "selectionMode": "ALL",
                         "resourceArns": [f"arn:aws:ec2:us-east-1:123456789012:instance/{first}"]}},
        actions={"take": {"actionId": "aws:ec2:send-spot-instance-interruptions",
                          "parameters": {"durationBeforeInterruption": "PT2M"}, "targets": {"SpotInstances": "one"}}},
        tags={"gpucloud:managed": "true"},
    )["experimentTemplate"]["id"]  # fmt: skip
    fis.start_experiment(clientToken="b", experimentTemplateId=template, tags={"gpucloud:managed": "true"})
    fis.delete_experiment_template(id=template)
    until(lambda: [one for one in group.nodes("terminated") if one["InstanceId"] == first])


def test_a_group_with_machines_is_not_deleted_and_an_empty_one_leaves_nothing(group: Group) -> None:
    before = [line for line in group.lab.inventory() if not line.startswith("auto-scaling-group")]
    group.use()
    group.level(1)
    until(lambda: group.nodes("running"))
    with pytest.raises(botocore.exceptions.ClientError, match="ResourceInUse"):
        group.scaling.delete_auto_scaling_group(AutoScalingGroupName=NAME)
    group.level(0)
    until(lambda: group.nodes("terminated"))
    group.scaling.delete_auto_scaling_group(AutoScalingGroupName=NAME)
    assert list(group.lab.inventory()) == before


def test_two_groups_keep_their_own_shut_offs(group: Group) -> None:
    other = {**group.scaling.describe_auto_scaling_groups()["AutoScalingGroups"][0]}
    group.scaling.create_auto_scaling_group(
        AutoScalingGroupName="other", MinSize=0, MaxSize=0, VPCZoneIdentifier=other["VPCZoneIdentifier"],
        MixedInstancesPolicy=_policy("g4dn.xlarge", 0),
    )  # fmt: skip
    for name, hours in ((NAME, 1), ("other", 2)):
        group.scaling.put_scheduled_update_group_action(
            AutoScalingGroupName=name, ScheduledActionName="gpucloud-auto-shutdown", DesiredCapacity=0,
            StartTime=datetime.now(timezone.utc) + timedelta(hours=hours),
        )  # fmt: skip
    for name in (NAME, "other"):
        found = group.scaling.describe_scheduled_actions(AutoScalingGroupName=name)["ScheduledUpdateGroupActions"]
        assert [one["AutoScalingGroupName"] for one in found] == [name]
    assert group.lab.untagged == ["CreateAutoScalingGroup other"]


def test_an_instance_that_ends_leaves_neither_volume_nor_interface(lab: Lab) -> None:
    ec2 = lab.client("ec2")
    image = image_id("us-east-1", next(iter(IMAGES)))
    made = ec2.run_instances(ImageId=image, InstanceType="t3.micro", MinCount=1, MaxCount=1)["Instances"][0]
    assert len(lab.inventory()) == 3
    ec2.terminate_instances(InstanceIds=[made["InstanceId"]])
    until(lambda: lab.inventory() == ())
