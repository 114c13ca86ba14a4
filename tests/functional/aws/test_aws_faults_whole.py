"""The whole command line on the emulated AWS when things go wrong, each test in an account of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.commandline import until
from tests.standins.aws import Account, account
from tests.standins.gate import Gate

# A job takes half a minute, a provider of 650 MB and Terraform's plans a machine of their own.
LIMIT_S = 400.0
BASE = {
    "bucket",
    "internet-gateway",
    "role",
    "route-table",
    "security-group",
    "subnet",
    "vpc",
    "vpc-endpoint",
}


def test_a_quota_of_nothing_ends_before_anything_is_made(tmp_path: Path) -> None:
    with account(tmp_path, real=False) as aws:
        before = aws.lab.inventory()
        aws.lab.quotas["L-3819A6DF"] = 0
        file = aws.job("poor", wishes="types: [g4dn.xlarge]")
        answer = aws.line.run("up", file)
        assert answer.code == 11
        assert "the quota 'All G and VT Spot Instance Requests' in us-east-1 is 0, of which 0 are used" in answer.stderr
        assert "hint: gpucloud quota request asks AWS for more" in answer.stderr
        assert aws.lab.inventory() == before  # not even a bucket
        asked = aws.line.run("quota", "request", file)
        assert (asked.code, asked.stdout) == (
            0,
            "asked for 8 vCPUs of 'All G and VT Spot Instance Requests' in us-east-1: PENDING\n",
        )
        rows = aws.line.run("quota", "status", file).stdout.splitlines()
        assert rows[1].split()[-2:] == ["8", "PENDING"]


@pytest.mark.slow  # a whole job, its machines real
def test_a_job_goes_on_when_expired_credentials_are_renewed(tmp_path: Path) -> None:
    with account(tmp_path) as aws:
        file = aws.job(steps=200, step_s=0.05)
        first = aws.line.start("train", file)
        until(lambda: aws.step("small") >= 20, "some steps", LIMIT_S)
        machines = aws.alive("small")
        aws.lab.faults.expire_credentials()
        assert first.wait(60) == 3
        assert "alive and paid until " in aws.story
        aws.lab.faults.clear()
        answer = aws.line.run("train", file, "--json", limit_s=LIMIT_S)
        assert answer.code == 0, answer.stderr
        assert answer.json["last_step"] == 200
        assert sorted(aws.ever("small")) == sorted(machines)
        assert aws.left == BASE


@pytest.mark.slow  # the minute itself
def test_a_minute_without_aws_is_waited_for_while_the_machines_go_on(tmp_path: Path) -> None:
    with account(tmp_path) as aws, Gate(urlsplit(aws.lab.url).port or 0) as gate:
        aws.line.env["AWS_ENDPOINT_URL"] = gate.url
        train = aws.line.start("train", aws.job(steps=700, step_s=0.1))
        until(lambda: aws.step("small") >= 20, "some steps", LIMIT_S)
        before, asked = aws.commits("small"), aws.asked()
        gate.shut()
        began = time.monotonic()
        until(lambda: time.monotonic() - began >= 60, "a minute")
        assert aws.asked() == asked
        assert aws.commits("small") > before
        gate.open()
        assert train.wait(LIMIT_S) == 0, aws.story
        assert "trying again for 120 s" in aws.story
        assert aws.state("small")["attempts"][-1]["last_step"] == 700
        assert len(aws.ever("small")) == 2
        assert aws.left == BASE


@pytest.mark.slow  # two whole starts, one of them throttled
def test_a_throttled_start_and_end_take_few_calls_more(tmp_path: Path) -> None:
    calls = []
    for throttled in (False, True):
        (folder := tmp_path / str(throttled)).mkdir()
        with account(folder) as aws:
            if throttled:
                aws.throttle(share=0.3, seconds=60)
            up = aws.line.run("up", aws.job(), limit_s=LIMIT_S)
            assert up.code == 0, up.stderr
            down = aws.line.run("down", "small", limit_s=LIMIT_S)
            assert down.code == 0, down.stderr
            assert len(aws.ever("small")) == 2
            assert aws.left == BASE
            calls.append(aws.asked())
    print(f"{calls[0]} calls undisturbed, {calls[1]} when 30 % of them were refused for a minute")
    assert calls[1] <= 1.5 * calls[0]


@dataclass(frozen=True)
class Point:
    """A moment in the life of `up` between its first launch and its end."""

    name: str
    reached: Callable[[Account], object]
    slow_launch_s: float = 0.0


POINTS = (
    Point("the launch is under way", lambda aws: aws.has_asked("UpdateAutoScalingGroup"), slow_launch_s=2.0),
    Point("the launch was answered", lambda aws: aws.has_asked("LaunchInstances")),
    Point("the machines run", lambda aws: [one.state for one in aws.instances("small")] == ["running"] * 2),
    Point("a machine has said its key", lambda aws: "preparing " in aws.story),
    Point("an agent lives", lambda aws: any((aws.lab.folder / "machines").rglob("agent/status.json"))),
)


@pytest.mark.slow  # a start and a half for each
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_up_may_be_killed_anywhere_and_repeated(tmp_path: Path, point: Point) -> None:
    with account(tmp_path) as aws:
        aws.lab.delays["LaunchInstances"] = point.slow_launch_s
        file = aws.job()
        up = aws.line.start("up", file)
        until(lambda: point.reached(aws), point.name, LIMIT_S)
        assert up.poll() is None
        up.kill()
        up.wait()
        again = aws.line.run("up", file, limit_s=LIMIT_S)
        assert again.code == 0, again.stderr
        assert len(aws.ever("small")) == len(aws.alive("small")) == 2
        assert aws.line.run("down", "small").code == 0
        assert aws.left == BASE


@pytest.mark.slow  # a whole job over three attempts
def test_what_others_end_by_hand_is_made_again(tmp_path: Path) -> None:
    with account(tmp_path) as aws:
        train = aws.line.start("train", aws.job(steps=300, step_s=0.05))
        until(lambda: aws.step("small") >= 20, "some steps", LIMIT_S)
        aws.lab.client("ec2").terminate_instances(InstanceIds=aws.alive("small")[:1])
        until(lambda: len(aws.state("small")["attempts"]) == 2, "a second attempt", LIMIT_S)
        until(lambda: aws.step("small") >= 60, "more steps", LIMIT_S)
        aws.lab.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName="gpucloud-small", ForceDelete=True)
        assert train.wait(LIMIT_S) == 0, aws.story
        attempts = aws.state("small")["attempts"]
        assert [attempt["reason"] for attempt in attempts] == ["lost", "lost", "succeeded"]
        assert attempts[-1]["last_step"] == 300
        assert aws.left == BASE
