"""A job on the emulated AWS that drives itself: the command is killed, and every machine is lost at once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.aws.policy import actions, node_policy
from tests.commandline import command_line, until, weights
from tests.iam.actions import action_of
from tests.lab.aws import Call
from tests.lab.aws.lab import OWN_AGENT
from tests.lab.aws.world import ACCESS_KEY
from tests.standins.aws import Account, account

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 60
# Rights that this job had no use for: small checkpoints, prices of machines that were charged by the minute's least.
NOT_IN_THIS_RUN = {
    "s3:AbortMultipartUpload", "autoscaling:SetDesiredCapacity", "autoscaling:DescribeScalingActivities",
    "autoscaling:TerminateInstanceInAutoScalingGroup",
}  # fmt: skip


@dataclass
class Alone:
    """What was seen of a job whose command was killed as soon as it had machines."""

    aws: Account
    asked_meanwhile: int
    lost: list[str]
    replaced_by: list[str]
    most: int
    state: dict[str, Any]
    group: dict[str, Any]
    calls: list[Call]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    with account(tmp_path_factory.mktemp("aws")) as aws:
        aws.lab.world.node_env["GPUCLOUD_AWS_POLL_S"] = "0.3"
        file = aws.job(steps=STEPS, step_s=0.1)
        command = aws.line.start("train", file, "--unattended", "1h")
        until(lambda: len(aws.alive("small")) == 2, "machines", 400)
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()
        asked = _asked(aws)
        most: list[int] = []
        until(lambda: most.append(len(aws.alive("small"))) or aws.commits("small") > 0, "a machine drives", 400)
        lost = aws.alive("small")
        for machine in lost:
            aws.lab.take(machine)
        until(lambda: most.append(len(aws.alive("small"))) or _ended(aws), "the job's own end", 400)
        asked_meanwhile = _asked(aws) - asked
        group = aws.lab.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"][0]
        replaced_by = [one for one in aws.ever("small") if one not in lost]
        yield Alone(
            aws, asked_meanwhile, lost, replaced_by, max(most), aws.state("small"), group, list(aws.lab.calls)
        )  # fmt: skip


def _asked(aws: Account) -> int:
    """How many calls were made with the user's key, those of this test left out."""
    return sum(call.key == ACCESS_KEY and OWN_AGENT not in call.agent for call in list(aws.lab.calls))


def _ended(aws: Account) -> bool:
    return aws.state("small").get("status") == "succeeded" and not aws.alive("small")


def test_it_ended_well_and_nobody_outside_did_anything(alone: Alone) -> None:
    assert alone.asked_meanwhile == 0
    assert alone.state["status"] == "succeeded"
    assert [attempt["reason"] for attempt in alone.state["attempts"]] == ["lost", "succeeded"]
    assert alone.state["attempts"][1]["first_step"] > 1
    assert (len(alone.lost), len(alone.replaced_by), alone.most) == (2, 2, 2)


def test_the_group_is_at_nothing_and_no_machine_is_left(alone: Alone) -> None:
    assert [alone.group[name] for name in ("MinSize", "DesiredCapacity")] == [0, 0]  # the limit is the user's side's
    assert alone.aws.running == []


def test_machines_asked_aws_only_for_what_their_role_may_do(alone: Alone) -> None:
    own = [call for call in alone.calls if call.key != ACCESS_KEY and OWN_AGENT not in call.agent]
    needed = {action for call in own for action in action_of(call.service, call.action, call.params)}
    allowed = actions(
        node_policy(
            partition="aws", account="123456789012", regions=("us-east-1",), cluster="gpucloud-small",
            bucket=alone.aws.bucket, unattended=True,
        )
    )  # fmt: skip
    assert sorted(needed - allowed) == []
    assert sorted(allowed - needed - NOT_IN_THIS_RUN) == []
    refused = [call for call in own if call.status in (401, 403) and call.action != "GetObject"]
    assert refused == []


def test_its_machines_put_each_of_its_events_once(alone: Alone) -> None:
    told = [json.loads(line) for line in alone.aws.line.run("events", "small", "--json").stdout.splitlines()]
    counts = Counter(one["kind"] for one in told)
    assert (counts["attempt"], counts["attempt_ended"], counts["resumed"], counts["ended"]) == (2, 2, 1, 1)
    came = [node for one in told if one["kind"] == "machines" for node in one["nodes"]]
    went = [node for one in told if one["kind"] == "machines_ended" for node in one["nodes"]]
    assert sorted(came) == sorted({*alone.lost, *alone.replaced_by})
    assert sorted(went) == sorted(set(went))
    assert set(went) >= set(alone.lost)


def test_the_next_command_counts_the_money_and_removes_what_is_free(alone: Alone, tmp_path: Path) -> None:
    """Stands last: it ends the job."""
    charges = alone.aws.line.run("cost", "small", "--json").json["charges"]
    assert {charge["node"] for charge in charges} == {*alone.lost, *alone.replaced_by}
    assert 0 < sum(Decimal(charge["usd"]) for charge in charges) < Decimal("0.1")
    with command_line(tmp_path) as line:
        assert line.run("train", line.job(steps=STEPS, step_s=0.0)).code == 0
        undisturbed = weights(line)
    assert weights(alone.aws.line) == undisturbed
    down = alone.aws.line.run("down", "small")
    assert down.code == 0, down.stderr
    assert not [line for line in alone.aws.lab.inventory() if "gpucloud-small" in line]
