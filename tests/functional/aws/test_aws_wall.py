"""The shut-off on the emulated AWS: against failures of ours, and against a machine that would outlive it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.domain.errors import ProvisionError
from tests.lab.aws import Lab
from tests.standins.aws_group import CLUSTER, GROUP, ON_DEMAND, SPOT, Rig, refusals, rented, runs, until


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with rented(tmp_path / "lab", notice_s=2.0) as made:
        yield made


def now() -> datetime:
    return datetime.now(timezone.utc)


def armed(lab: Lab, *, minutes: float = 10) -> AwsNodeGroup:
    nodes = Rig(lab).group()
    nodes.arm(GROUP, now() + timedelta(minutes=minutes))
    return nodes


def group_of(lab: Lab) -> dict[str, Any]:
    scaling = lab.client("autoscaling")
    (found,) = scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[CLUSTER])["AutoScalingGroups"]
    return dict(found)


def actions_of(lab: Lab) -> dict[str, dict[str, Any]]:
    said = lab.client("autoscaling").describe_scheduled_actions(AutoScalingGroupName=CLUSTER)
    return {one["ScheduledActionName"]: one for one in said["ScheduledUpdateGroupActions"]}


def pass_by(lab: Lab, seconds: float) -> None:
    """Have so much time pass for the schedules of the group."""
    with lab.world.lock:
        for backend in lab.world.scaling():
            for action in backend.scheduled_actions.values():
                action.start_time -= timedelta(seconds=seconds)
    lab.world.kick.set()


def change(lab: Lab, **changes: Any) -> None:
    lab.client("autoscaling").update_auto_scaling_group(AutoScalingGroupName=CLUSTER, **changes)


def change_template(lab: Lab, **changes: Any) -> None:
    """Make a new version of what Terraform made."""
    ec2, name = lab.client("ec2"), "gpucloud-digits-efa0"
    said = ec2.describe_launch_template_versions(LaunchTemplateName=name, Versions=["$Latest"])
    data = said["LaunchTemplateVersions"][0]["LaunchTemplateData"] | changes
    ec2.create_launch_template_version(LaunchTemplateName=name, LaunchTemplateData=data)


def test_a_level_that_is_raised_after_the_shut_off_has_fired_is_lowered_again_and_again(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))
    pass_by(lab, 601)
    until(nodes, lambda view: not view.alive)
    for _ in range(2):
        change(lab, MaxSize=2, DesiredCapacity=2)
        until(nodes, runs(2))
        pass_by(lab, 301)
        until(nodes, lambda view: not view.alive)
        assert group_of(lab)["DesiredCapacity"] == 0
    assert set(actions_of(lab)) == {"gpucloud-auto-shutdown-again"}


def test_a_shut_off_is_put_off_and_brought_forward_with_both_of_its_actions(lab: Lab) -> None:
    nodes = armed(lab, minutes=10)
    for minutes in (30, 20, 40):
        before = len(lab.calls)
        wanted = (now() + timedelta(minutes=minutes)).replace(microsecond=0)
        later = nodes.describe(GROUP).armed_until < wanted  # type: ignore[operator]
        nodes.arm(GROUP, wanted)
        found = actions_of(lab)
        assert found["gpucloud-auto-shutdown"]["StartTime"] == wanted
        assert found["gpucloud-auto-shutdown-again"]["StartTime"] == wanted + timedelta(minutes=5)
        put = [c.params["ScheduledActionName"] for c in lab.calls[before:] if c.action.startswith("PutScheduled")]
        assert put == ["gpucloud-auto-shutdown-again", "gpucloud-auto-shutdown"][:: 1 if later else -1]
        assert nodes.describe(GROUP).armed_until == wanted


def test_nothing_is_started_with_less_than_two_minutes_ahead(lab: Lab) -> None:
    nodes = armed(lab, minutes=1.9)
    with pytest.raises(ProvisionError, match="120 s ahead"):
        nodes.resize(GROUP, 1, SPOT)
    assert (group_of(lab)["MaxSize"], group_of(lab)["Instances"]) == (0, [])
    nodes.arm(GROUP, now() + timedelta(minutes=2.2))
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))


def test_what_lies_ahead_is_told_by_the_clock_that_shuts_off(lab: Lab) -> None:
    late = AwsNodeGroup(**{**Rig(lab).arguments(), "now": lambda: now() - timedelta(hours=1)})
    late.arm(GROUP, now() + timedelta(minutes=1))
    with pytest.raises(ProvisionError, match="120 s ahead"):
        late.resize(GROUP, 1, SPOT)


@pytest.mark.parametrize("launches", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["launch", "level"])
def test_machines_that_were_started_while_the_shut_off_fired_are_ended_at_once(lab: Lab, *, launches: bool) -> None:
    lab.has_launch_instances = launches
    nodes = armed(lab)
    slept = "LaunchInstances" if launches else "SetDesiredCapacity"

    def sleep_before(environ: dict[str, Any], body: bytes) -> None:
        del environ
        if f"Action={slept}".encode() in body:  # the lid was closed for ten minutes between the check and the call
            lab.hear(lambda _environ, _body: None)
            pass_by(lab, 601)
            until_fired(lab)
            change(lab, MaxSize=1)

    lab.hear(sleep_before)
    with pytest.raises(ProvisionError, match="the group is set to 0"):
        nodes.resize(GROUP, 1, SPOT)
    until(nodes, lambda view: not view.alive)
    assert (group_of(lab)["MaxSize"], nodes.describe(GROUP).size) == (0, 0)


def until_fired(lab: Lab) -> None:
    deadline = time.monotonic() + 5
    while "gpucloud-auto-shutdown" in actions_of(lab):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_shut_off_that_was_removed_during_a_launch_ends_it(lab: Lab) -> None:
    slept: list[float] = []
    nodes = AwsNodeGroup(**Rig(lab).arguments(), sleep=slept.append)
    nodes.arm(GROUP, now() + timedelta(minutes=10))

    def remove(environ: dict[str, Any], body: bytes) -> None:
        del environ
        if b"Action=LaunchInstances" in body:
            lab.hear(lambda _environ, _body: None)
            lab.client("autoscaling").delete_scheduled_action(
                AutoScalingGroupName=CLUSTER, ScheduledActionName="gpucloud-auto-shutdown-again"
            )

    lab.hear(remove)
    with pytest.raises(ProvisionError, match="the group is set to 0"):
        nodes.resize(GROUP, 1, SPOT)
    until(nodes, lambda view: not view.alive)
    assert 25 < sum(slept) < 40


def test_a_listing_that_lags_is_no_missing_shut_off(lab: Lab) -> None:
    lab.stale_s = 2.0
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))


def test_a_schedule_is_read_back_for_half_a_minute_and_the_call_may_be_repeated(lab: Lab) -> None:
    slept: list[float] = []
    nodes = AwsNodeGroup(**Rig(lab).arguments(), sleep=slept.append)
    nodes.arm(GROUP, now() + timedelta(minutes=5))
    lab.stale_s = 3600.0
    with pytest.raises(ProvisionError, match="AWS does not list it") as caught:
        nodes.arm(GROUP, now() + timedelta(minutes=10))
    assert caught.value.may_pass
    assert 25 < sum(slept) < 40


def test_machines_that_were_protected_from_their_end_are_not_any_more_once_the_group_is_armed(lab: Lab) -> None:
    nodes = armed(lab)
    change(lab, NewInstancesProtectedFromScaleIn=True, MaxSize=2, DesiredCapacity=2)
    until(nodes, runs(2))
    assert nodes.describe(GROUP).armed_until is None
    with pytest.raises(ProvisionError, match="NewInstancesProtectedFromScaleIn, protected i-"):
        nodes.resize(GROUP, 2, SPOT)
    nodes.arm(GROUP, now() + timedelta(minutes=10))
    group = group_of(lab)
    assert [member["ProtectedFromScaleIn"] for member in group["Instances"]] == [False, False]
    assert not group["NewInstancesProtectedFromScaleIn"]
    pass_by(lab, 601)
    until(nodes, lambda view: not view.alive)


@pytest.mark.parametrize("process", ["ScheduledActions", "Terminate"])
def test_a_suspended_process_leaves_a_group_unarmed_until_it_is_resumed(lab: Lab, process: str) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))
    lab.client("autoscaling").suspend_processes(AutoScalingGroupName=CLUSTER, ScalingProcesses=[process])
    assert nodes.describe(GROUP).armed_until is None
    with pytest.raises(ProvisionError, match=f"suspended {process}"):
        nodes.resize(GROUP, 2, SPOT)
    nodes.arm(GROUP, now() + timedelta(minutes=10))
    assert [one["ProcessName"] for one in group_of(lab)["SuspendedProcesses"]] == ["AZRebalance"]
    pass_by(lab, 601)
    until(nodes, lambda view: not view.alive)


def test_what_cannot_be_lifted_leaves_the_group_unarmed(lab: Lab) -> None:
    nodes = AwsNodeGroup(**Rig(lab).arguments(), sleep=lambda _seconds: None)
    lab.client("autoscaling").suspend_processes(AutoScalingGroupName=CLUSTER, ScalingProcesses=["Terminate"])
    lab.faults.add("ResumeProcesses", code="AccessDenied", status=403)
    with pytest.raises(ProvisionError, match="let the shut-off"):
        nodes.arm(GROUP, now() + timedelta(minutes=10))
    assert actions_of(lab) == {}


def test_the_machines_of_a_market_work_on_while_those_of_the_other_are_asked_for(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 2, SPOT)
    old = {node.id for node in until(nodes, runs(2)).alive}
    nodes.resize(GROUP, 3, ON_DEMAND)
    until(nodes, runs(3))
    time.sleep(0.5)
    view = nodes.describe(GROUP)
    assert old < {node.id for node in view.alive}
    assert [node.pool for node in view.alive] == [SPOT, SPOT, ON_DEMAND]


def test_a_group_starts_machines_by_the_number_of_a_plain_template_that_names_type_market_and_cap(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT, cap_usd_per_hour=Decimal("0.526"))
    until(nodes, runs(1))
    group, ec2 = group_of(lab), lab.client("ec2")
    assert group["LaunchTemplate"]["LaunchTemplateName"] == "gpucloud-digits-efa0.g4dn.xlarge.spot"
    assert group["LaunchTemplate"]["Version"] == "1"
    assert "MixedInstancesPolicy" not in group
    version = ec2.describe_launch_template_versions(
        LaunchTemplateName="gpucloud-digits-efa0.g4dn.xlarge.spot", Versions=["1"]
    )["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    assert version["InstanceType"] == "g4dn.xlarge"
    assert version["InstanceMarketOptions"]["SpotOptions"]["MaxPrice"] == "0.526"
    assert version["ImageId"] == "ami-12c6146b"


def test_a_version_is_made_when_cap_or_template_change_and_else_used_again(lab: Lab) -> None:
    nodes = armed(lab)

    def pinned(cap: str) -> str:
        nodes.resize(GROUP, 1, SPOT, cap_usd_per_hour=Decimal(cap))
        return str(group_of(lab)["LaunchTemplate"]["Version"])

    assert [pinned("0.5"), pinned("0.5"), pinned("0.6"), pinned("0.60")] == ["1", "1", "2", "2"]
    change_template(lab, EbsOptimized=True)
    assert pinned("0.6") == "3"


def test_a_capacity_block_is_a_market_of_its_own(lab: Lab) -> None:
    change_template(lab, InstanceMarketOptions={"MarketType": "capacity-block"})
    nodes = armed(lab)
    nodes.resize(GROUP, 1, ON_DEMAND)
    ec2, name = lab.client("ec2"), "gpucloud-digits-efa0.g5.xlarge.on_demand"
    (version,) = ec2.describe_launch_template_versions(LaunchTemplateName=name)["LaunchTemplateVersions"]
    assert version["LaunchTemplateData"]["InstanceMarketOptions"] == {"MarketType": "capacity-block"}


def test_a_spot_price_above_the_cap_is_a_refusal_of_awss_own(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT, cap_usd_per_hour=Decimal("0.0001"))
    assert refusals(until(nodes, lambda view: bool(view.refusals))) == [("capacity", "SpotMaxPriceTooLow")]


def test_a_right_that_only_the_launch_call_lacks_leaves_the_launch_to_the_group(lab: Lab) -> None:
    lab.world.launch_error = (
        "UnauthorizedOperation",
        "You are not authorized to perform this operation. Encoded authorization failure message: abc",
    )
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    assert until(nodes, runs(1)).refusals == ()
    nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2))
    assert sum(call.action == "LaunchInstances" for call in lab.calls) == 1


@pytest.mark.parametrize("launches", [True, False], ids=["launch", "level"])
def test_a_profile_that_is_not_known_everywhere_yet_is_asked_for_again(lab: Lab, *, launches: bool) -> None:
    lab.has_launch_instances = launches
    lab.client("iam").create_instance_profile(InstanceProfileName="gpucloud-digits-us-east-1")
    change_template(lab, IamInstanceProfile={"Name": "gpucloud-digits-us-east-1"})
    lab.world.profile_s = 3600.0
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    view = until(nodes, lambda view: bool(view.refusals))
    assert refusals(view) == [("transient", "InvalidParameterValue")]
    lab.world.profile_s = 0.0
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))


def test_a_profile_that_an_old_cluster_lacks_is_no_matter_of_time(lab: Lab) -> None:
    lab.client("iam").create_instance_profile(InstanceProfileName="gpucloud-digits-us-east-1")
    change_template(lab, IamInstanceProfile={"Name": "gpucloud-digits-us-east-1"})
    lab.world.profile_s = 3600.0
    for group in lab.world.groups():
        group.created_time = (now() - timedelta(minutes=3)).isoformat()
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    view = until(nodes, lambda view: bool(view.refusals))
    assert refusals(view) == [("parameter", "InvalidParameterValue")]
