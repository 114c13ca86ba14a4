"""What AWS says of machines and groups, and what it means."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from gpucloud.adapters.aws.nodes import watch
from gpucloud.adapters.aws.nodes.launching import settings
from gpucloud.adapters.aws.nodes.listing import (
    AutoShutdown,
    Listing,
    Place,
    Reach,
    end_cause,
    held_back,
    node_of,
    refusal_of,
)
from gpucloud.adapters.aws.nodes.watch import Recollection
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Access, Market
from gpucloud.domain.node.node import EndCause, Fault, NodeState
from gpucloud.domain.offer import Pool

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
REACH = Reach(region="us-east-1", user="ubuntu", port=22, access=Access.PUBLIC)
POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
HERE = Place.of("us-east-1/gpucloud-digits")
OURS = {"LaunchTemplateName": "gpucloud-digits-efa0.g4dn.xlarge.spot", "Version": "3"}
OTHER = Pool(instance_type="p4d.24xlarge", zone="us-east-1b", market=Market.ON_DEMAND)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def instance(state: str = "running", **more: Any) -> dict[str, Any]:
    return {
        "InstanceId": "i-1",
        "InstanceType": "g4dn.xlarge",
        "InstanceLifecycle": "spot",
        "LaunchTime": NOON,
        "State": {"Name": state},
        "Placement": {"AvailabilityZone": "us-east-1a"},
        "PrivateIpAddress": "10.0.0.7",
        "PublicIpAddress": "3.4.5.6",
        **more,
    }


def ended(code: str, message: str = "", told: str = "User initiated (2026-11-21 12:10:00 GMT)") -> dict[str, Any]:
    reason = {"Code": code, "Message": message}
    return instance("terminated", StateReason=reason, StateTransitionReason=told)


def group(desired: int = 1, members: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    return {
        "AutoScalingGroupName": "gpucloud-digits",
        "DesiredCapacity": desired,
        "MinSize": 0,
        "MaxSize": desired,
        "VPCZoneIdentifier": "subnet-a",
        "Instances": [{"InstanceId": i, "LifecycleState": "InService"} for i in members],
        "Tags": [{"Key": "gpucloud:subnets", "Value": "us-east-1a=subnet-a,us-east-1b=subnet-b"}],
        "LaunchTemplate": OURS,
        **more,
    }


def listing(*instances: dict[str, Any], **more: Any) -> Listing:
    return Listing(**{"group": group(), "instances": instances, **more})


def armed(shutdown_at: datetime) -> AutoShutdown:
    return AutoShutdown(at=shutdown_at, again=shutdown_at + timedelta(minutes=5))


@pytest.mark.parametrize(
    ("access", "address", "proxy"),
    [
        (Access.PUBLIC, "3.4.5.6", ()),
        (Access.PRIVATE, "10.0.0.7", ()),
        (
            Access.SESSION_MANAGER,
            "10.0.0.7",
            (
                *("aws", "ssm", "start-session", "--region", "us-east-1", "--target", "i-1"),
                *("--document-name", "AWS-StartSSHSession", "--parameters", "portNumber=22"),
            ),
        ),
    ],
)
def test_ssh_reaches_a_machine_as_the_job_chose(access: Access, address: str, proxy: tuple[str, ...]) -> None:
    reach = Reach(region="us-east-1", user="ubuntu", port=22, access=access)
    node = node_of(instance(), reach, None, NOON)
    assert (node.address, node.private_address, node.proxy) == (address, "10.0.0.7", proxy)
    assert (node.pool, node.state, node.launched_at, node.interface) == (POOL, NodeState.RUNNING, NOON, None)


@pytest.mark.parametrize(
    ("desired", "through"), [(Access.PUBLIC, True), (Access.SESSION_MANAGER, True), (Access.PRIVATE, False)]
)
def test_a_machine_whose_template_gave_it_no_address_is_reached_through_session_manager(
    desired: Access, *, through: bool
) -> None:
    tagged = instance(PublicIpAddress=None, Tags=[{"Key": "gpucloud:ssh", "Value": "session_manager"}])
    node = node_of(tagged, replace(REACH, access=desired), None, NOON)
    assert (node.address, bool(node.proxy)) == ("10.0.0.7", through)


def test_a_machine_without_a_public_address_is_reached_by_its_private_one() -> None:
    assert node_of(instance(PublicIpAddress=None), REACH, None, NOON).address == "10.0.0.7"


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ("pending", NodeState.PENDING),
        ("running", NodeState.RUNNING),
        ("shutting-down", NodeState.TERMINATED),
        ("stopping", NodeState.TERMINATED),
        ("stopped", NodeState.TERMINATED),
        ("terminated", NodeState.TERMINATED),
    ],
)
def test_a_machine_is_charged_until_it_begins_to_shut_down(state: str, wanted: NodeState) -> None:
    assert node_of(instance(state), REACH, None, NOON).state is wanted


def test_the_end_is_read_from_the_reason_else_it_is_when_it_was_seen() -> None:
    assert node_of(ended("Client.UserInitiatedShutdown"), REACH, None, at(900)).ended_at == at(600)
    assert node_of(ended("Server.SpotInstanceTermination", told=""), REACH, None, at(900)).ended_at == at(900)


@pytest.mark.parametrize(
    ("reason", "shutdown_at", "cause"),
    [
        ("Server.SpotInstanceTermination", None, EndCause.INTERRUPTED),
        ("Server.SpotInstanceTermination", at(0), EndCause.INTERRUPTED),
        ("Server.SpotInstanceShutdown", None, EndCause.INTERRUPTED),
        ("Server.InternalError", None, EndCause.INTERRUPTED),
        ("Client.VolumeLimitExceeded", None, EndCause.INTERRUPTED),
        ("Client.UserInitiatedShutdown", None, EndCause.CHOICE),
        ("Client.UserInitiatedShutdown", at(601), EndCause.SCHEDULE),  # two clocks
        ("Client.UserInitiatedShutdown", at(610), EndCause.CHOICE),
        ("Client.UserInitiatedShutdown", at(600), EndCause.SCHEDULE),
        ("Client.InstanceInitiatedShutdown", None, EndCause.CRASH),
        ("Client.InstanceInitiatedShutdown", at(599), EndCause.SCHEDULE),
        ("", None, EndCause.CRASH),
    ],
)
def test_why_a_machine_ended(reason: str, shutdown_at: datetime | None, cause: EndCause) -> None:
    assert end_cause(reason, at(600), shutdown_at) is cause


@pytest.mark.parametrize(
    ("reason", "message", "fault", "code"),
    [
        ("Client.InternalError", "Client error on launch", Fault.PERMISSION, "Client.InternalError"),
        ("Client.VolumeLimitExceeded", "Volume limit exceeded", Fault.QUOTA, "Client.VolumeLimitExceeded"),
        ("Server.InternalError", "Internal error on launch", Fault.TRANSIENT, "Server.InternalError"),
        (
            "Server.InsufficientInstanceCapacity",
            "Insufficient capacity to launch",
            Fault.CAPACITY,
            "Server.InsufficientInstanceCapacity",
        ),
    ],
)
def test_a_machine_that_died_at_launch_is_a_refusal(reason: str, message: str, fault: Fault, code: str) -> None:
    refusal = refusal_of(ended(reason, message), at(600))
    assert refusal is not None
    assert (refusal.pool, refusal.fault, refusal.code, refusal.at) == (POOL, fault, code, at(600))


@pytest.mark.parametrize(
    "reason",
    ["Server.SpotInstanceTermination", "Client.UserInitiatedShutdown", "Client.InstanceInitiatedShutdown"],
)
def test_a_machine_that_ran_is_no_refusal(reason: str) -> None:
    assert refusal_of(ended(reason), at(600)) is None


def activity(seconds: float, message: str, zone: str = "us-east-1a", **more: Any) -> dict[str, Any]:
    return {
        "StatusCode": "Failed",
        "Description": "Launching a new EC2 instance.  Status Reason: " + message,
        "StatusMessage": message,
        "StartTime": at(seconds),
        "Details": f'{{"Subnet ID":"subnet-a","Availability Zone":"{zone}"}}',
        **more,
    }


def test_failed_launches_of_the_group_are_refusals_of_the_pool_that_they_name() -> None:
    spot = "Could not launch Spot Instances. InsufficientInstanceCapacity - There is no Spot capacity available that "
    told = [
        activity(30, spot + "matches your request. Launching EC2 instance failed."),
        activity(20, spot + "matches your request. Launching EC2 instance failed."),
        activity(10, "We currently do not have sufficient p3.2xlarge capacity in the zone.", zone="us-east-1b"),
        activity(5, "ignored", StatusCode="Successful"),
        activity(6, "ignored", Description="Terminating EC2 instance: i-1"),
    ]
    found = [
        (r.pool.instance_type, r.pool.zone, r.fault, r.code, r.at)
        for r in watch.refusals_told(listing(activities=tuple(told)), POOL)
    ]
    assert found == [
        ("g4dn.xlarge", "us-east-1a", Fault.CAPACITY, "InsufficientInstanceCapacity", at(30)),
        ("p3.2xlarge", "us-east-1b", Fault.CAPACITY, "InsufficientInstanceCapacity", at(10)),
    ]


def test_a_shut_off_that_has_fired_is_found_in_the_groups_story() -> None:
    cause = (
        "At 2026-11-21T12:05:00Z a scheduled action update of AutoScalingGroup constraints to min: 0, max: 0, "
        "desired: 0 changing the desired capacity from 2 to 0.  At 2026-11-21T12:05:09Z an instance was taken out"
    )
    assert watch.fired_auto_shutdown([{"Cause": "At 2026-11-21T12:00:00Z a user request"}, {"Cause": cause}]) == at(300)
    assert watch.fired_auto_shutdown([{}]) is None


def test_a_group_that_is_as_wanted_is_left_alone() -> None:
    assert settings(listing(), 1, POOL, OURS) == {}


def test_another_pool_changes_subnet_and_template() -> None:
    template = {"LaunchTemplateName": "gpucloud-digits-efa4.p4d.24xlarge.on_demand", "Version": "1"}
    assert settings(listing(), 2, OTHER, template) == {
        "MaxSize": 2,
        "VPCZoneIdentifier": "subnet-b",
        "LaunchTemplate": template,
    }


def test_another_version_is_pinned_and_a_group_that_starts_nothing_keeps_its_own() -> None:
    assert settings(listing(), 1, POOL, {**OURS, "Version": "4"}) == {"LaunchTemplate": {**OURS, "Version": "4"}}
    assert settings(listing(), 0, POOL, None) == {"MaxSize": 0}


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ({"NewInstancesProtectedFromScaleIn": True}, {"NewInstancesProtectedFromScaleIn": False}),
        ({"TerminationPolicies": ["arn:aws:lambda:x"]}, {"TerminationPolicies": ["NewestInstance"]}),
        ({"DeletionProtection": "prevent-all-deletion"}, {"DeletionProtection": "none"}),
        (
            {"InstanceLifecyclePolicy": {"RetentionTriggers": {"TerminateHookAbandon": "retain"}}},
            {"InstanceLifecyclePolicy": {"RetentionTriggers": {"TerminateHookAbandon": "terminate"}}},
        ),
    ],
)
def test_what_would_keep_machines_from_their_end_is_set_back(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    held = listing(group=group(**found), schedule=armed(at(600)))
    assert settings(held, 1, POOL, OURS) == wanted
    assert (held_back(held), held.shutdown_at) == (tuple(wanted), None)
    assert listing(group=group(**wanted), schedule=armed(at(600))).shutdown_at == at(600)


@pytest.mark.parametrize(
    ("name", "pool"),
    [
        ("gpucloud-digits-efa0.g4dn.xlarge.spot", POOL),
        ("gpucloud-digits-efa16of17.p6-b300.48xlarge.on_demand", ("p6-b300.48xlarge", Market.ON_DEMAND)),
        ("gpucloud-digits-efa0", None),
    ],
)
def test_the_pool_of_a_group_is_told_by_its_templates_name(name: str, pool: Any) -> None:
    found = listing(group=group(LaunchTemplate={"LaunchTemplateName": name, "Version": "1"})).pool
    assert found == pool or (found is not None and (found.instance_type, found.market) == pool)


def test_a_shut_off_that_would_fire_once_only_is_none() -> None:
    assert listing(schedule=AutoShutdown(at=at(600))).shutdown_at is None


def test_a_zone_without_a_subnet_is_named() -> None:
    pool = Pool(instance_type="g5.xlarge", zone="us-east-1f", market=Market.SPOT)
    with pytest.raises(ProvisionError, match=r"no subnet in us-east-1f \(it has us-east-1a, us-east-1b\)"):
        settings(listing(), 1, pool, OURS)


@pytest.mark.parametrize("name", ["gpucloud-digits", "us-east-1/", "/gpucloud-digits", "a/b/c", ""])
def test_a_group_is_named_by_region_and_cluster(name: str) -> None:
    with pytest.raises(ProvisionError, match="no node group on AWS"):
        Place.of(name)


def test_a_machine_just_started_is_there_although_no_listing_shows_it() -> None:
    memory = Recollection(reach=REACH)
    memory.started(["i-1"], POOL, at(0))
    assert [(n.id, n.state, n.pool) for n in memory.view(listing(), at(5)).nodes] == [("i-1", NodeState.PENDING, POOL)]
    assert memory.view(listing(), at(59)).alive != ()
    (gone,) = memory.view(listing(), at(61)).nodes
    assert (gone.state, gone.ended_at, gone.end_cause) == (NodeState.TERMINATED, at(61), EndCause.CRASH)


def test_a_machine_that_only_the_group_lists_is_there() -> None:
    memory = Recollection(reach=REACH)
    view = memory.view(listing(group=group(members=("i-9",))), at(0))
    assert [(n.id, n.state, n.pool) for n in view.nodes] == [("i-9", NodeState.PENDING, POOL)]


def test_a_machine_that_ended_stays_ended_in_an_old_answer_and_stays_listed() -> None:
    memory = Recollection(reach=REACH)
    memory.view(listing(ended("Client.UserInitiatedShutdown")), at(600))
    assert memory.view(listing(instance()), at(605)).alive == ()
    (node,) = memory.view(listing(), at(9000)).nodes
    assert (node.ended_at, node.end_cause) == (at(600), EndCause.CHOICE)


def test_a_machine_that_answers_long_after_it_was_lost_costs_money_again() -> None:
    memory = Recollection(reach=REACH)
    memory.view(listing(instance()), at(0))
    assert memory.view(listing(), at(61)).alive == ()
    assert memory.view(listing(instance()), at(200)).alive != ()


def test_a_later_shut_off_does_not_change_why_a_machine_ended() -> None:
    memory = Recollection(reach=REACH)
    old, new = at(600), at(2000)
    memory.view(listing(instance(), schedule=armed(old)), at(0))
    gone = ended("Client.UserInitiatedShutdown")
    assert memory.view(listing(gone), at(601)).nodes[0].end_cause is EndCause.SCHEDULE
    assert memory.view(listing(gone, schedule=armed(new)), at(700)).nodes[0].end_cause is EndCause.SCHEDULE


def test_a_machine_that_was_relieved_is_a_member_that_the_level_does_not_count() -> None:
    marked = instance(Tags=[{"Key": "gpucloud:relieved", "Value": "true"}])
    cases = [(instance(), ("i-1",)), (marked, ("i-1",)), (marked, ())]
    views = [Recollection(reach=REACH).view(listing(one, group=group(2, members)), at(0)) for one, members in cases]
    assert [(view.nodes[0].relieved, view.size) for view in views] == [(False, 2), (True, 1), (True, 2)]


def test_a_machine_that_was_relieved_and_has_ended_holds_a_place_until_it_is_let_go() -> None:
    memory = Recollection(reach=REACH)
    gone = ended("Server.SpotInstanceTermination") | {"Tags": [{"Key": "gpucloud:relieved", "Value": "true"}]}
    listed = listing(gone, group=group(2, ("i-1",)))
    assert memory.view(listed, at(0)).size == 2
    assert (memory.beside(listed), memory.outlived(listed)) == ((), ("i-1",))
    memory.let_go("i-1", at(1))
    assert (memory.beside(listed), memory.outlived(listed)) == ((), ())


def test_our_own_level_is_believed_until_listings_can_show_it() -> None:
    memory = Recollection(reach=REACH)
    memory.set_level(3, at(0))
    assert memory.view(listing(), at(9)).size == 3
    assert memory.view(listing(), at(11)).size == 1


def test_a_shut_off_that_has_passed_is_stronger_than_our_own_level() -> None:
    memory = Recollection(reach=REACH)
    memory.shutdown_at = at(5)
    memory.set_level(3, at(0))
    view = memory.view(listing(group=group(desired=0)), at(6))
    assert (view.size, view.armed_until) == (0, at(5))


def test_a_level_from_before_a_shut_off_is_forgotten_when_the_group_is_armed_anew() -> None:
    memory = Recollection(reach=REACH)
    memory.shutdown_at = at(5)
    memory.set_level(3, at(4))
    memory.view(listing(group=group(desired=0)), at(6))
    assert memory.view(listing(group=group(desired=0), schedule=armed(at(600))), at(7)).size == 0


def test_the_token_of_a_launch_stays_until_it_is_answered_and_for_a_new_process() -> None:
    memory, another = Recollection(reach=REACH), Recollection(reach=REACH)
    first = memory.token(HERE, POOL, 2, 0, at(0))
    assert memory.token(HERE, POOL, 2, 0, at(400)) == first
    assert another.token(HERE, POOL, 2, 0, at(30)) == first
    assert memory.token(Place.of("us-east-1/gpucloud-other"), POOL, 2, 0, at(0)) != first
    assert memory.token(HERE, POOL, 3, 0, at(0)) != first
    memory.answered()
    assert memory.token(HERE, POOL, 2, 0, at(0)) != first


def test_the_token_of_a_launch_changes_once_machines_are_known() -> None:
    memory = Recollection(reach=REACH)
    first = memory.token(HERE, POOL, 1, 0, at(0))
    memory.view(listing(ended("Client.UserInitiatedShutdown")), at(0))
    assert memory.token(HERE, POOL, 1, 0, at(0)) != first
