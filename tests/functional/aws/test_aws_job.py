"""One whole job on the emulated AWS: real Terraform and provider, real boto3, every machine a real SSH server.

The job is run once, with a drill and a second interruption without notice; every test looks at another side of it.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.aws.policy import actions, boundary_arn, node_policy, user_policy
from tests.commandline import Answer, command_line, until, weights
from tests.iam.actions import action_of
from tests.lab.aws import Call
from tests.lab.aws.lab import ACCESS_KEY, OWN_AGENT, SECRET_KEY
from tests.standins.aws import Account, account, when

SECRET = "canary-Zm9vYmFyYmF6-secret"
STEPS = 120
BUCKET = "gpucloud-123456789012-us-east-1"

# Allowed, and not called here. A node may lower its own group: nobody needs to be there.
LOWERING = {"autoscaling:SetDesiredCapacity", "autoscaling:UpdateAutoScalingGroup"}
NOT_IN_THIS_RUN = {
    # a frozen machine ended by its id, a purge of detached ones, an endpoint without LaunchInstances, a lost key
    *("autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup", "ec2:TerminateInstances"),
    *("autoscaling:DeleteScheduledAction", "ec2:GetConsoleOutput", "autoscaling:DescribeScalingActivities"),
    # machines without public addresses, several EFA interfaces, Session Manager
    *("ec2:AllocateAddress", "ec2:CreateNatGateway", "ec2:DeleteNatGateway", "ec2:DescribeAddressesAttribute"),
    *("ec2:DisassociateAddress", "ec2:ReleaseAddress", "ec2:CreatePlacementGroup", "ec2:DeletePlacementGroup"),
    *("ssm:StartSession", "ssm:ResumeSession", "ssm:TerminateSession", "ssmmessages:OpenDataChannel"),
    # protection that somebody set, a boundary for a role that stands, a dependency of the warning
    *(
        "autoscaling:DeleteTags",
        "autoscaling:SetInstanceProtection",
        "iam:PutRolePermissionsBoundary",
        "billing:GetBillingViewData",
    ),
    # AWS's own warning: `aws: {alert_email: …}`
    *("budgets:ListTagsForResource", "budgets:ModifyBudget", "budgets:TagResource", "budgets:UntagResource"),
    "budgets:ViewBudget",
    "ce:GetCostAndUsage",  # gpucloud cost --bill
    # changed settings of what stands: tags, image, addresses
    *("autoscaling:ResumeProcesses", "ec2:CreateLaunchTemplateVersion", "ec2:ModifyLaunchTemplate", "ec2:DeleteTags"),
    *("ec2:ModifySecurityGroupRules", "iam:UntagInstanceProfile", "iam:UntagRole"),
    # large checkpoints, a damaged state of Terraform
    *("s3:AbortMultipartUpload", "s3:GetObjectVersion"),
    # gpucloud quota, gpucloud catalog refresh
    *("servicequotas:GetAWSDefaultServiceQuota", "servicequotas:ListRequestedServiceQuotaChangeHistory"),
    *("servicequotas:ListRequestedServiceQuotaChangeHistoryByQuota", "servicequotas:RequestServiceQuotaIncrease"),
    "servicequotas:ListServiceQuotas",
    *("ec2:DescribeInstanceTypes", "ec2:GetSpotPlacementScores", "pricing:GetProducts"),
    # gpucloud gc, gpucloud down
    *("ec2:DescribeVolumes", "ec2:DeleteVolume", "ec2:DeleteNetworkInterface"),
    *("iam:ListInstanceProfiles", "iam:ListRoles"),
}


@dataclass
class Whole:
    """What was seen of the job."""

    aws: Account
    answer: Answer
    before: tuple[str, ...]
    after: tuple[str, ...]
    alive_at_once: int
    command_lines: str
    taken: list[str]
    calls: list[Call]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whole]:
    with account(tmp_path_factory.mktemp("aws")) as aws:
        file = aws.job(steps=STEPS, step_s=0.05, extra="cloud: aws\nsecrets: [CANARY]\noutputs: [results]\n")
        aws.line.env["CANARY"] = SECRET
        before, stop = aws.lab.inventory(), threading.Event()
        seen: dict[str, set[str]] = {"lines": set()}
        taken: list[str] = []
        most = [0]

        def look() -> None:
            while not stop.wait(0.2):
                most[0] = max(most[0], len(aws.running))
                for path in Path("/proc").glob("[0-9]*/cmdline"):
                    try:
                        seen["lines"].add(path.read_text().replace("\0", " "))
                    except OSError:
                        continue

        def take() -> None:
            machine = sorted(aws.running)[0]
            taken.append(machine)
            aws.lab.take(machine)

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        when(lambda: _resumed_and_on(aws), take, stop=stop)
        answer = aws.line.run("train", file, "--drill", "--json", limit_s=500)
        stop.set()
        watcher.join()
        calls = aws.lab.calls
        yield Whole(aws, answer, before, aws.lab.inventory(), most[0], "\n".join(sorted(seen["lines"])), taken, calls)


def _resumed_and_on(aws: Account) -> bool:
    """Whether the second attempt has made some steps."""
    state = _state(aws)
    attempts = state["attempts"] if state else []
    return len(attempts) == 2 and (attempts[1].get("last_step") or 0) > (attempts[1].get("first_step") or 0) + 5


def _state(aws: Account) -> dict | None:
    s3 = aws.lab.client("s3")
    try:
        body = s3.get_object(Bucket=BUCKET, Key="jobs/small/state.json")["Body"]
    except (s3.exceptions.NoSuchBucket, s3.exceptions.NoSuchKey):
        return None
    return json.loads(body.read())


def test_the_job_succeeds_over_a_notice_and_a_loss_without_one(whole: Whole) -> None:
    assert whole.answer.code == 0, whole.answer.stderr
    report = whole.answer.json
    assert report["status"] == "succeeded"
    assert [i["kind"] for i in report["interruptions"]] == ["notice", "lost"]
    assert [a["reason"] for a in report["attempts"]] == ["interrupted", "lost", "succeeded"]
    assert report["last_step"] == STEPS
    assert whole.taken[0] == report["interruptions"][1]["node"]


def test_the_weights_equal_those_of_a_run_that_nobody_disturbed(whole: Whole, tmp_path: Path) -> None:
    with command_line(tmp_path) as line:
        assert line.run("train", line.job(steps=STEPS, step_s=0.0)).code == 0
        undisturbed = weights(line)
    assert weights(whole.aws.line) == undisturbed


def test_never_a_machine_more_than_the_replacement_of_a_noticed_one(whole: Whole) -> None:
    assert whole.alive_at_once == 3
    assert whole.aws.running == []


def test_after_the_job_the_base_alone_is_left(whole: Whole) -> None:
    kinds = {line.split()[0] for line in set(whole.after) - set(whole.before)}
    assert kinds == {
        "bucket",
        "internet-gateway",
        "role",
        "route-table",
        "security-group",
        "subnet",
        "vpc",
        "vpc-endpoint",
    }
    assert not [line for line in whole.after if "gpucloud-small" in line]


def test_everything_bore_its_owners_tags_from_birth(whole: Whole) -> None:
    assert whole.aws.lab.untagged == []


def test_machines_start_only_behind_a_shut_off(whole: Whole) -> None:
    acts = [call.action for call in whole.calls if call.status == 200]
    first_growth = min(acts.index(a) for a in ("LaunchInstances", "SetDesiredCapacity") if a in acts)
    assert acts.index("PutScheduledUpdateGroupAction") < first_growth


def test_the_money_is_the_meters_and_within_the_budget(whole: Whole) -> None:
    spend = whole.answer.json["spend"]
    cost = whole.aws.line.run("cost", "small", "--json").json
    assert Decimal(spend["spent_usd"]) == sum(Decimal(charge["usd"]) for charge in cost["charges"])
    assert Decimal(spend["spent_usd"]) + Decimal(spend["left_usd"]) == Decimal(spend["budget_usd"]) == 20
    taken = [charge for charge in cost["charges"] if charge["node"] == whole.taken[0]]
    assert {charge["note"] for charge in taken if charge["kind"] == "compute"} == {
        "interrupted in its first hour: not charged"
    }
    assert all(Decimal(charge["usd"]) > 0 for charge in taken if charge["kind"] in {"disk", "address"})
    assert {charge["kind"] for charge in cost["outside_budget"]} >= {"requests", "storage"}


def test_the_outputs_came_home(whole: Whole) -> None:
    home = whole.aws.line.folder / "outputs" / "small"
    assert (home / "results" / "deep" / "rank").read_text() == "0"


def test_no_secret_is_where_others_could_read_it(whole: Whole) -> None:
    canaries = (SECRET, SECRET_KEY)
    said = whole.answer.stdout + whole.answer.stderr
    assert not any(canary in said for canary in canaries)
    assert not any(canary in whole.command_lines for canary in canaries)
    asked = "\n".join(json.dumps(call.params, default=str) for call in whole.calls)
    assert not any(canary in asked for canary in canaries)
    home = Path(whole.aws.line.env["GPUCLOUD_HOME"])
    for path in (p for p in home.rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert not any(canary.encode() in data for canary in canaries), path
    s3 = whole.aws.lab.client("s3")
    for page in s3.get_paginator("list_object_versions").paginate(Bucket=BUCKET):
        for version in page.get("Versions", ()):
            body = s3.get_object(Bucket=BUCKET, Key=version["Key"], VersionId=version["VersionId"])["Body"].read()
            assert not any(canary.encode() in body for canary in canaries), version["Key"]


def test_host_keys_were_published_by_the_machines_themselves(whole: Whole) -> None:
    published = {
        call.params.get("Key") or call.params.get("key")
        for call in whole.calls
        if call.action == "PutObject" and "/hosts/" in json.dumps(call.params)
    }
    named = {re.search(r"i-[0-9a-f]+$", str(key))[0] for key in published}
    charges = whole.aws.line.run("cost", "small", "--json").json["charges"]
    assert named <= {charge["node"] for charge in charges}
    # One that the group started in place of a machine that was relieved and is gone may be ended before it boots: it
    # is charged, by its time, and was a member of no attempt.
    members = {m["node_id"] for attempt in _state(whole.aws)["attempts"] for m in attempt["members"]}
    assert members <= named


def test_ending_the_base_leaves_what_was_there_before(whole: Whole) -> None:
    kept = whole.aws.line.run("down", "--base")
    assert (kept.code, "holds the checkpoints, results and records of small" in kept.stderr) == (30, True), kept.stderr
    assert {line.split()[0] for line in set(whole.aws.lab.inventory()) - set(whole.before)} == {"bucket"}
    assert whole.aws.line.run("down", "--base", "--with-data", "--yes").code == 0
    assert whole.aws.lab.inventory() == whole.before
    until(lambda: not whole.aws.running, "no machine", 1)


def test_calls_and_policies_are_the_same(whole: Whole) -> None:
    """Stands last: looks at the job, and at the end of the base too."""
    calls = [call for call in whole.aws.lab.calls if OWN_AGENT not in call.agent]
    mine = {action for call in calls if call.key == ACCESS_KEY for action in _actions(call)}
    theirs = {action for call in calls if call.key != ACCESS_KEY for action in _actions(call)}
    who = {"partition": "aws", "account": "123456789012", "regions": ("us-east-1",)}
    allowed = actions(*user_policy(**who, boundary=boundary_arn("aws", who["account"])).values())
    machine = actions(node_policy(**who, cluster="gpucloud-small", bucket=BUCKET))
    assert sorted(mine - allowed) == []
    assert sorted(theirs - machine) == []
    assert sorted(allowed - mine - NOT_IN_THIS_RUN) == []
    assert sorted(machine - theirs - {*LOWERING, "s3:AbortMultipartUpload"}) == []


def _actions(call: Call) -> tuple[str, ...]:
    return action_of(call.service, call.action, call.params)
