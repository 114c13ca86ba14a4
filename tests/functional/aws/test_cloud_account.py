"""What the run on a real account reads of it, read of the emulated one."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from tests.cloud.account import Account
from tests.cloud.figures import Resource
from tests.lab.aws import Lab

OURS = [{"Key": "gpucloud:managed", "Value": "true"}]
BASE = [*OURS, {"Key": "gpucloud:base", "Value": "us-east-1"}]
TRUST = '{"Version": "2012-10-17", "Statement": []}'


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab")) as made, pytest.MonkeyPatch.context() as environment:
        for name, value in made.settings.items():
            environment.setenv(name, value)
        yield made


def template(lab, name):
    data = {"ImageId": image(lab), "InstanceType": "g4dn.xlarge"}
    tags = [{"ResourceType": "launch-template", "Tags": OURS}]
    lab.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data, TagSpecifications=tags)


def image(lab):
    return lab.client("ec2").describe_images(Owners=["amazon"])["Images"][0]["ImageId"]


def group(lab, name, tags=OURS, size=0):
    template(lab, name)
    lab.client("autoscaling").create_auto_scaling_group(
        AutoScalingGroupName=name,
        LaunchTemplate={"LaunchTemplateName": name},
        MinSize=0,
        MaxSize=size,
        VPCZoneIdentifier=subnet(lab),
        Tags=[{**tag, "PropagateAtLaunch": False} for tag in tags],
    )


def subnet(lab):
    ec2 = lab.client("ec2")
    vpc = [{"ResourceType": "vpc", "Tags": [{"Key": "team", "Value": "vision"}]}]
    vpc_id = ec2.create_vpc(CidrBlock="10.43.0.0/16", TagSpecifications=vpc)["Vpc"]["VpcId"]
    return ec2.create_subnet(VpcId=vpc_id, CidrBlock="10.43.0.0/24")["Subnet"]["SubnetId"]


def machine(lab):
    tags = [{"ResourceType": "instance", "Tags": OURS}]
    answer = lab.client("ec2").run_instances(
        ImageId=image(lab), InstanceType="g4dn.xlarge", MinCount=1, MaxCount=1, TagSpecifications=tags
    )
    return answer["Instances"][0]["InstanceId"]


def test_everything_of_gpucloud_is_told_by_kind_and_the_base_is_told_apart(lab):
    before = Account("us-east-1").inventory()
    vpc = [{"ResourceType": "vpc", "Tags": BASE}]
    vpc_id = lab.client("ec2").create_vpc(CidrBlock="10.42.0.0/16", TagSpecifications=vpc)["Vpc"]["VpcId"]
    lab.client("iam").create_role(RoleName="gpucloud-base.drill-us-east-1", AssumeRolePolicyDocument=TRUST, Tags=BASE)
    lab.client("iam").create_role(RoleName="somebody-else", AssumeRolePolicyDocument=TRUST)
    group(lab, "gpucloud-lag")
    Account("us-east-1").bring_forward("gpucloud-lag", datetime.now(timezone.utc) + timedelta(hours=1))
    node = machine(lab)

    found = Account("us-east-1").inventory() - before

    assert {one for one in found if one.kind != "launch-template"} == {
        Resource("vpc", vpc_id, base=True),
        Resource("role", "gpucloud-base.drill-us-east-1", base=True),
        Resource("group", "gpucloud-lag"),
        Resource("schedule", "gpucloud-lag/gpucloud-auto-shutdown"),
        Resource("instance", node),
    }
    assert [one.base for one in found if one.kind == "launch-template"] == [False]


def test_a_machine_that_has_ended_is_charged_no_more_and_stands_no_more(lab):
    account = Account("us-east-1")
    node = machine(lab)
    assert node in account.alive()
    assert account.ending(node) is None

    lab.client("ec2").terminate_instances(InstanceIds=[node])

    assert node not in account.alive()
    assert Resource("instance", node) not in account.inventory()
    assert account.ending(node) is not None
    assert node in [one.id for one in account.machines() if one.ended_at is not None]


def test_the_shut_off_of_somebody_elses_group_is_never_moved(lab):
    group(lab, "gpucloud-others", tags=[{"Key": "team", "Value": "vision"}])

    with pytest.raises(ValueError, match="gpucloud-others is not gpucloud's"):
        Account("us-east-1").bring_forward("gpucloud-others", datetime.now(timezone.utc) + timedelta(hours=1))


def test_launch_instances_is_asked_only_where_it_can_start_nothing(lab):
    group(lab, "gpucloud-one", size=1)

    with pytest.raises(ValueError, match="gpucloud-one could start a machine"):
        Account("us-east-1").launch_instances_answers("gpucloud-one")


@pytest.mark.parametrize(("known", "answer"), [(True, "answers:"), (False, "absent:")])
def test_it_is_told_whether_the_account_has_launch_instances(lab, known, answer):
    name = f"gpucloud-{answer[:-1]}"
    group(lab, name)
    lab.has_launch_instances = known
    alive = Account("us-east-1").alive()

    assert Account("us-east-1").launch_instances_answers(name).startswith(answer)
    assert Account("us-east-1").alive() == alive


def test_the_caller_and_the_quota_are_read(lab):
    account = Account("us-east-1")

    assert account.caller()["Account"] == "123456789012"
    assert account.spot_quota() > 0
