"""Node groups on the emulated AWS: refusals, lost replies, old answers, throttling; and never a machine too many."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.aws.nodes.group import AwsNodeGroup
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.node.node import EndCause, NodeState
from tests.lab.aws import Lab
from tests.standins.aws_group import GROUP, ON_DEMAND, SPOT, Rig, refusals, rented, runs, until

READS = {"DescribeAutoScalingGroups", "DescribeInstances", "DescribeScheduledActions"}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with rented(tmp_path / "lab", notice_s=2.0) as made:
        yield made


@pytest.fixture(params=["launch", "level"])
def either(request: pytest.FixtureRequest, lab: Lab) -> Lab:
    """The emulated AWS with `LaunchInstances`, and without."""
    lab.has_launch_instances = request.param == "launch"
    return lab


def armed(lab: Lab, **choices: float) -> AwsNodeGroup:
    nodes = Rig(lab, **choices).group()
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    return nodes


def made(lab: Lab) -> int:
    """How many machines AWS has ever started."""
    pages = lab.client("ec2").get_paginator("describe_instances").paginate()
    return sum(len(reservation["Instances"]) for page in pages for reservation in page["Reservations"])


def count(lab: Lab, action: str) -> int:
    return sum(call.action == action for call in lab.calls)


def test_no_capacity_is_a_refusal_with_its_pool_until_there_is_some(either: Lab) -> None:
    either.capacity["g4dn.xlarge/us-east-1a/spot"] = 0
    nodes = armed(either)
    nodes.resize(GROUP, 2, SPOT)
    view = until(nodes, lambda view: bool(view.refusals))
    assert refusals(view) == [("capacity", "InsufficientInstanceCapacity")]
    assert view.refusals[0].pool == SPOT
    assert view.nodes == ()
    del either.capacity["g4dn.xlarge/us-east-1a/spot"]
    nodes.resize(GROUP, 2, SPOT)
    assert until(nodes, runs(2)).refusals == ()


def test_another_pool_is_taken_after_a_refusal(either: Lab) -> None:
    either.capacity["g4dn.xlarge/us-east-1a/spot"] = 0
    nodes = armed(either)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, lambda view: bool(view.refusals))
    nodes.resize(GROUP, 1, ON_DEMAND)
    assert [node.pool for node in until(nodes, runs(1)).alive] == [ON_DEMAND]


def test_a_machine_that_its_pool_cannot_replace_comes_from_another_pool_at_once(lab: Lab) -> None:
    lab.capacity["g4dn.xlarge/us-east-1a/spot"] = 2
    nodes = armed(lab)
    nodes.resize(GROUP, 2, SPOT)
    old, taken = until(nodes, runs(2)).alive
    lab.take(taken.id)
    until(nodes, lambda view: refusals(view) == [("capacity", "InsufficientInstanceCapacity")])
    nodes.resize(GROUP, 2, ON_DEMAND)
    view = until(nodes, runs(2))
    assert [node.pool for node in view.alive] == [SPOT, ON_DEMAND]
    assert (view.size, view.alive[0].id, count(lab, "LaunchInstances")) == (2, old.id, 2)


def test_a_quota_is_a_refusal(either: Lab) -> None:
    either.quotas["L-3819A6DF"] = 4
    nodes = armed(either)
    nodes.resize(GROUP, 2, SPOT)
    view = until(nodes, lambda view: bool(view.refusals) and runs(1)(view))
    assert refusals(view) == [("quota", "MaxSpotInstanceCountExceeded")]


def test_what_was_started_of_a_gang_is_listed_beside_the_refusal(lab: Lab) -> None:
    lab.capacity["g4dn.xlarge/us-east-1a/spot"] = 1
    nodes = armed(lab)
    nodes.resize(GROUP, 3, SPOT)
    view = until(nodes, runs(1))
    assert (view.size, refusals(view)) == (1, [("capacity", "InsufficientInstanceCapacity")])


def test_a_pool_that_was_refused_is_not_asked_for_ten_times_a_second(lab: Lab) -> None:
    lab.capacity["g4dn.xlarge/us-east-1a/spot"] = 0
    nodes = armed(lab, interval_s=60.0)
    for _ in range(20):
        nodes.resize(GROUP, 1, SPOT)
    assert count(lab, "LaunchInstances") == 1


@pytest.mark.parametrize("action", ["LaunchInstances", "SetDesiredCapacity", "UpdateAutoScalingGroup"])
def test_a_lost_reply_starts_nothing_twice(lab: Lab, action: str) -> None:
    lab.has_launch_instances = action != "SetDesiredCapacity"
    nodes = armed(lab)
    lab.faults.add(action, when="after")
    nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2))
    nodes.resize(GROUP, 2, SPOT)
    assert (made(lab), count(lab, action) >= 2) == (2, True)


def test_a_launch_whose_answer_never_came_is_repeated_as_the_same_one(lab: Lab) -> None:
    nodes = armed(lab)
    lab.faults.add("LaunchInstances", when="after", times=5)  # as often as boto3 asks
    with pytest.raises(ProvisionError, match="set the size of us-east-1/gpucloud-digits to 2"):
        nodes.resize(GROUP, 2, SPOT)
    nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2))
    assert made(lab) == 2


def test_a_process_that_was_killed_before_the_answer_makes_no_twin(lab: Lab) -> None:
    nodes = armed(lab)
    lab.faults.add("LaunchInstances", when="after", times=5)
    with pytest.raises(ProvisionError):
        nodes.resize(GROUP, 2, SPOT)
    another = Rig(lab).group()
    another.resize(GROUP, 2, SPOT)
    until(another, runs(2))
    assert made(lab) == 2


def test_old_answers_start_no_twin_and_lose_no_machine(either: Lab) -> None:
    nodes = armed(either)
    nodes.describe(GROUP)
    either.stale_s = 5.0
    nodes.resize(GROUP, 2, SPOT)
    for _ in range(5):
        assert nodes.describe(GROUP).size == 2
        nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2))
    assert made(either) == 2


def test_a_machine_is_listed_as_soon_as_its_launch_is_answered(lab: Lab) -> None:
    nodes = armed(lab)
    lab.stale_s = 5.0
    nodes.resize(GROUP, 2, SPOT)
    assert [(node.state, node.pool) for node in nodes.describe(GROUP).nodes] == [(NodeState.PENDING, SPOT)] * 2


def test_a_group_is_run_although_a_third_of_the_calls_is_throttled(either: Lab) -> None:
    nodes = armed(either)
    either.faults.add("*", code="Throttling", status=400, share=0.3, seconds=60, seed=7)
    nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2), limit_s=40)
    nodes.purge(GROUP)
    either.faults.clear()
    assert nodes.describe(GROUP).alive == ()
    assert made(either) == 2


def test_a_view_that_cannot_be_renewed_is_believed_for_a_minute(lab: Lab) -> None:
    now = datetime.now(timezone.utc)
    nodes = AwsNodeGroup(**Rig(lab).arguments(), now=lambda: now)
    before = nodes.describe(GROUP)
    lab.faults.add("DescribeInstances", code="Unavailable", share=1.0, times=1000)
    now += timedelta(seconds=59)
    assert nodes.describe(GROUP) == before
    now += timedelta(seconds=2)
    with pytest.raises(ProvisionError, match="cannot list the node group us-east-1/gpucloud-digits"):
        nodes.describe(GROUP)


def test_a_key_that_nobody_may_use_kills_the_machine_at_launch_and_is_a_refusal(lab: Lab) -> None:
    lab.die_at_launch("g4dn.xlarge/us-east-1a/spot")
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    view = until(nodes, lambda view: bool(view.refusals))
    assert set(refusals(view)) == {("permission", "Client.InternalError")}  # the group tries again, and again
    assert view.nodes[0].state is NodeState.TERMINATED


def test_credentials_that_end_in_the_middle_are_said_to_have_ended(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.describe(GROUP)
    lab.faults.expire_credentials()
    for act in (
        lambda: nodes.describe(GROUP),
        lambda: nodes.resize(GROUP, 1, SPOT),
        lambda: nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=5)),
        lambda: nodes.purge(GROUP),
    ):
        with pytest.raises(CredentialsError) as caught:
            act()
        assert caught.value.exit_code == 3
    lab.faults.clear()


def test_hundreds_of_views_cost_one_set_of_calls(lab: Lab) -> None:
    nodes = Rig(lab, interval_s=60.0).group()
    before = len(lab.calls)
    threads = [threading.Thread(target=lambda: [nodes.describe(GROUP) for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(call.action for call in lab.calls[before:]) == sorted(READS)


def test_our_own_change_is_seen_at_once(lab: Lab) -> None:
    nodes = armed(lab, interval_s=60.0)
    assert nodes.describe(GROUP).size == 0
    nodes.resize(GROUP, 1, SPOT)
    assert nodes.describe(GROUP).size == 1


def test_a_shut_off_that_cannot_be_read_back_is_an_error(lab: Lab) -> None:
    nodes = Rig(lab).group()
    lab.faults.add("PutScheduledUpdateGroupAction", code="AccessDenied", status=403)
    with pytest.raises(ProvisionError, match="arm the shut-off"):
        nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=5))
    with pytest.raises(ProvisionError, match="without a shut-off"):
        nodes.resize(GROUP, 1, SPOT)


def test_a_shut_off_that_somebody_removed_lets_nothing_start(lab: Lab) -> None:
    nodes = armed(lab)
    lab.client("autoscaling").delete_scheduled_action(
        AutoScalingGroupName="gpucloud-digits", ScheduledActionName="gpucloud-auto-shutdown"
    )
    with pytest.raises(ProvisionError, match="without a shut-off"):
        nodes.resize(GROUP, 1, SPOT)


def test_a_new_process_knows_relieved_machines_and_ends_them_too(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    (old,) = until(nodes, runs(1)).alive
    nodes.relieve(GROUP, old.id)
    another = Rig(lab).group()
    view = until(another, runs(2))
    assert [(node.id == old.id, node.relieved) for node in view.alive] == [(True, True), (False, False)]
    another.purge(GROUP)
    assert another.describe(GROUP).alive == ()


def test_a_machine_is_relieved_by_one_look_at_its_group(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    (old,) = until(nodes, runs(1)).alive
    before = count(lab, "DescribeInstances")
    nodes.relieve(GROUP, old.id)
    assert count(lab, "DescribeInstances") - before == 1
    until(nodes, runs(2))


def test_machines_without_a_group_are_listed_and_ended(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    (old,) = until(nodes, runs(1)).alive
    scaling = lab.client("autoscaling")
    scaling.detach_instances(
        AutoScalingGroupName="gpucloud-digits", InstanceIds=[old.id], ShouldDecrementDesiredCapacity=True
    )
    scaling.delete_auto_scaling_group(AutoScalingGroupName="gpucloud-digits", ForceDelete=True)
    view = Rig(lab).group().describe(GROUP)
    assert (view.exists, view.size, [node.id for node in view.alive]) == (False, 0, [old.id])
    Rig(lab).group().purge(GROUP)
    assert Rig(lab).group().describe(GROUP).alive == ()


def test_a_purge_ends_what_ended_in_the_meantime_and_what_appears_late(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 3, SPOT)
    first, *_ = until(nodes, runs(3)).alive
    lab.take(first.id)
    lab.stale_s = 2.0
    nodes.purge(GROUP)
    lab.stale_s = 0.0
    view = nodes.describe(GROUP)
    assert (view.size, view.alive, len(view.nodes)) == (0, (), made(lab))


def test_a_drill_is_one_experiment_of_the_fault_injection_service_and_leaves_no_template(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    (old,) = until(nodes, runs(1)).alive
    nodes.interrupt(GROUP, old.id, notice=True)
    service = lab.client("fis")
    assert len(service.list_experiments()["experiments"]) == 1
    assert service.list_experiment_templates()["experimentTemplates"] == []
    # The one in its place may be listed before it is over.
    view = until(nodes, lambda view: len(view.nodes) == 2 and len(view.alive) == 1)
    assert next(node for node in view.nodes if node.id == old.id).end_cause is EndCause.INTERRUPTED


def test_a_drill_whose_role_is_missing_leaves_the_machine_alone(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    (old,) = until(nodes, runs(1)).alive
    lab.client("iam").delete_role(RoleName="gpucloud-base.drill-us-east-1")
    with pytest.raises(ProvisionError, match=f"cannot interrupt {old.id} for a drill"):
        nodes.interrupt(GROUP, old.id, notice=True)
    assert [node.id for node in nodes.describe(GROUP).alive] == [old.id]


def test_an_on_demand_machine_cannot_be_drilled(lab: Lab) -> None:
    nodes = armed(lab)
    nodes.resize(GROUP, 1, ON_DEMAND)
    (old,) = until(nodes, runs(1)).alive
    with pytest.raises(ProvisionError, match="is not a spot machine"):
        nodes.interrupt(GROUP, old.id, notice=True)


def test_an_older_endpoint_is_asked_once_for_the_launch_that_it_lacks(lab: Lab) -> None:
    lab.has_launch_instances = False
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))
    nodes.resize(GROUP, 2, SPOT)
    until(nodes, runs(2))
    assert (count(lab, "LaunchInstances"), count(lab, "SetDesiredCapacity")) == (1, 2)


def test_a_caller_who_may_not_launch_sets_the_level(lab: Lab) -> None:
    lab.faults.add("LaunchInstances", code="AccessDenied", status=403)
    nodes = armed(lab)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))
    assert count(lab, "SetDesiredCapacity") == 1


def test_a_busy_group_is_asked_again_with_the_same_token(lab: Lab) -> None:
    nodes = armed(lab)
    lab.faults.add("LaunchInstances", code="ResourceContention", status=400, times=2)
    nodes.resize(GROUP, 1, SPOT)
    until(nodes, runs(1))
    tokens = {call.params["ClientToken"] for call in lab.calls if call.action == "LaunchInstances"}
    assert (count(lab, "LaunchInstances"), len(tokens)) == (3, 1)


def test_a_host_key_is_asked_for_until_it_is_known_and_then_no_more(lab: Lab) -> None:
    asked: list[str] = []

    def key(_region: str, _cluster: str, instance_id: str) -> str | None:
        asked.append(instance_id)
        return "ssh-ed25519 AAAA" if len(asked) == 2 else None

    nodes = Rig(lab, host_key=key).group()
    nodes.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    nodes.resize(GROUP, 1, SPOT)
    assert until(nodes, runs(1)).nodes[0].host_key is None
    assert until(nodes, lambda view: view.nodes[0].host_key is not None).nodes[0].host_key == "ssh-ed25519 AAAA"
    nodes.describe(GROUP)
    assert len(asked) == 2
