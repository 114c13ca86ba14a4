"""The whole command line on the emulated AWS when things go wrong: the right end, the right line, no twin, no leak.

Real Terraform, real boto3. The account and the region's base are shared; every test has a job of its own and leaves
nothing but the base behind. Where SSH does not matter machines answer nothing: `up` is then ended by a signal.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from tests.commandline import until
from tests.iam.printed import let_as_printed
from tests.standins.aws import Account, account

LONG_AGO = datetime(2026, 1, 1, tzinfo=timezone.utc)
ZONES = ("us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d", "us-east-1f")  # those that have g4dn
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


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    """An account whose machines run and answer nothing."""
    with account(tmp_path_factory.mktemp("silent"), real=False) as aws:
        for number, zone in enumerate(ZONES):  # the order in which they are asked
            aws.lab.prices[f"g4dn.xlarge/{zone}"] = [(LONG_AGO, f"0.2{number}")]
        for zone in ("us-west-2a", "us-west-2b", "us-west-2c", "us-west-2d"):
            aws.lab.prices[f"g4dn.xlarge/{zone}"] = [(LONG_AGO, "0.40")]
        yield aws


@pytest.fixture
def aws(silent: Account) -> Iterator[Account]:
    let_as_printed(silent.lab)
    yield silent
    silent.recover()


def tells(aws: Account, line: str) -> None:
    """Wait until the story has it: of a try after a refusal it is told once machines of it are listed, a look later."""
    until(lambda: line in aws.story, line, 60)


def test_unknown_credentials_end_at_once_and_nothing_is_made(aws: Account) -> None:
    before, asked = aws.lab.inventory(), len(aws.lab.calls)
    aws.lab.faults.add("GetCallerIdentity", code="InvalidClientTokenId", status=403, times=9)
    answer = aws.line.run("up", aws.job("unknown"))
    assert answer.code == 3
    assert answer.stderr.splitlines() == [
        "error: cannot log in to AWS (no profile, region us-east-1): AWS does not know these credentials"
        " (InvalidClientTokenId)",
        "hint: correct the keys: `aws configure`, or name another profile under `aws: {profile: …}`",
    ]
    assert [call.action for call in aws.lab.calls[asked:]].count("GetCallerIdentity") == 1  # asked once
    assert aws.lab.inventory() == before


@pytest.mark.slow  # test_aws_group.py has each refusal alone
@pytest.mark.parametrize("has_launch_call", [True, False])
def test_three_pools_refuse_and_the_fourth_gives(aws: Account, has_launch_call: bool) -> None:
    aws.lab.has_launch_instances = has_launch_call
    for zone in ZONES[:3]:
        aws.lab.capacity[f"g4dn.xlarge/{zone}/spot"] = 0
    up = aws.line.start("up", aws.job(name := f"moving-{has_launch_call}".lower(), wishes="types: [g4dn.xlarge]"))
    until(lambda: len(aws.alive(name)) == 2, "two machines", LIMIT_S)
    assert {aws.zone_of(machine) for machine in aws.ever(name)} == {"us-east-1d"}
    refusal = "AWS has no such machine free in this zone now (InsufficientInstanceCapacity)"
    assert f"g4dn.xlarge spot in {ZONES[0]}: {refusal}; it is excluded for a while" in aws.story
    others = ", ".join(f"g4dn.xlarge spot in {zone}" for zone in ZONES[1:3])
    tells(aws, f"2 more refuse likewise (InsufficientInstanceCapacity), and are excluded too: {others}")
    tells(aws, "turning to g4dn.xlarge spot in us-east-1d, ")
    aws.interrupt(up)
    assert aws.line.run("down", name).code == 0
    assert len(aws.ever(name)) == 2
    assert aws.left == BASE


@pytest.mark.slow
def test_without_any_spot_machine_a_job_that_may_goes_on_demand(aws: Account) -> None:
    for zone in ZONES:
        aws.lab.capacity[f"g4dn.xlarge/{zone}/spot"] = 0
    up = aws.line.start("up", aws.job("either", wishes="types: [g4dn.xlarge], market: auto"))
    until(lambda: len(aws.alive("either")) == 2, "two machines", LIMIT_S)
    tells(aws, f"turning to g4dn.xlarge on_demand in {ZONES[0]}, ")
    aws.interrupt(up)
    assert aws.line.run("down", "either").code == 0
    assert len(aws.ever("either")) == 2
    assert aws.left == BASE


@pytest.mark.slow  # test_aws_group.py loses each reply alone
@pytest.mark.parametrize("has_launch_call", [True, False])
def test_lost_replies_start_nothing_twice(aws: Account, has_launch_call: bool) -> None:
    aws.lab.has_launch_instances = has_launch_call
    lost = ("UpdateAutoScalingGroup", "LaunchInstances" if has_launch_call else "SetDesiredCapacity")
    for action in lost:
        aws.lab.faults.add(action, when="after")
    up = aws.line.start("up", aws.job(name := f"lost-{has_launch_call}".lower()))
    until(lambda: len(aws.alive(name)) == 2, "two machines", LIMIT_S)
    until(lambda: aws.passes(name) >= 3, "some looks at them")
    assert {call.action for call in aws.lab.calls if call.code == "lost"} >= set(lost)
    aws.interrupt(up)
    assert aws.line.run("down", name).code == 0
    assert len(aws.ever(name)) == 2
    assert aws.left == BASE


@pytest.mark.slow  # each pool is tried before the job ends
def test_machines_that_die_for_their_disks_key_end_the_job_with_that_line(aws: Account) -> None:
    aws.lab.die_at_launch("g4dn.xlarge/us-east-1a/spot", times=20)
    answer = aws.line.run("up", aws.job("locked", wishes="types: [g4dn.xlarge]"))
    assert answer.code == 13
    line = "g4dn.xlarge spot in us-east-1a: AWS may not use the key that encrypts the disk (Client.InternalError)"
    assert f"the job ends: refused: {line}" in answer.stderr
    assert "kms:CreateGrant" in answer.stderr
    assert aws.left == BASE


@pytest.mark.slow  # waits for the shut-off
def test_credentials_that_expire_leave_the_machines_paid_for_and_say_so(aws: Account) -> None:
    up = aws.line.start("up", aws.job("expiring"))
    until(lambda: len(aws.alive("expiring")) == 2, "two machines", LIMIT_S)
    until(lambda: aws.passes("expiring") >= 2, "a look at them")
    machines = aws.alive("expiring")
    aws.lab.faults.expire_credentials()
    assert up.wait(60) == 3
    assert re.search(r"error: cannot .*expired", aws.story)
    said = next(line for line in aws.story.splitlines() if line.startswith("alive and paid until "))
    assert re.fullmatch(
        r"alive and paid until (?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d UTC, then off by themselves: .*", said
    )
    assert sorted(said.rpartition(": ")[2].split(", ")) == sorted(machines)
    assert "hint: log in " in aws.story
    assert sorted(aws.alive("expiring")) == sorted(machines)
    aws.lab.faults.clear()
    assert aws.line.run("down", "expiring").code == 0
    assert len(aws.ever("expiring")) == 2
    assert aws.left == BASE


@pytest.mark.slow  # a minute of waiting for listings that lag
def test_stale_listings_bring_no_twin_and_hide_no_leak(aws: Account) -> None:
    aws.lab.stale_s = 5.0
    up = aws.line.start("up", aws.job("stale"))
    until(lambda: len(aws.alive("stale")) == 2, "two machines", LIMIT_S)
    until(lambda: time.time() - aws.life(aws.ever("stale")[0])[0] > 12, "listings that show them")
    aws.interrupt(up)
    again = aws.line.start("up", aws.job("stale"))
    until(lambda: aws.passes("stale") >= 5, "some more looks")
    aws.interrupt(again)
    answer = aws.line.run("down", "stale")
    assert answer.code == 0, answer.stderr
    assert len(aws.ever("stale")) == 2
    assert aws.left == BASE


@pytest.mark.slow  # two regions' networks
def test_a_job_leaves_a_region_without_machines_for_the_next(aws: Account) -> None:
    for zone in ZONES:
        aws.lab.capacity[f"g4dn.xlarge/{zone}/spot"] = 0
    let_as_printed(aws.lab, regions=("us-east-1", "us-west-2"))
    wishes = "types: [g4dn.xlarge], regions: [us-east-1, us-west-2]"
    up = aws.line.start("up", aws.job("moved", wishes=wishes))
    until(lambda: len(aws.alive("moved")) == 2, "two machines in the other region", LIMIT_S)
    assert {aws.zone_of(one)[:-1] for one in aws.alive("moved")} == {"us-west-2"}
    aws.interrupt(up)
    elsewhere = [line for line in aws.lab.inventory() if "gpucloud-moved" in line and "us-east-1" in line]
    assert elsewhere == []
    assert aws.state("moved")["group"] == "us-west-2/gpucloud-moved"  # in the first region's bucket, as before
    assert aws.line.run("down", "moved").code == 0
    assert len(aws.ever("moved")) == 2
    assert aws.left == BASE
    assert not [line for line in aws.lab.inventory() if "gpucloud-moved" in line]


@pytest.mark.slow  # a gang is waited for
def test_half_a_gang_is_given_back_after_its_time(aws: Account) -> None:
    aws.lab.capacity["g4dn.xlarge/us-east-1a/spot"] = 1
    aws.line.limits = {"gang": 5}
    up = aws.line.start("up", aws.job("half", wishes="types: [g4dn.xlarge]"))
    until(
        lambda: [aws.zone_of(one) for one in aws.alive("half")] == ["us-east-1b"] * 2,
        "two machines in the next pool",
        LIMIT_S,
    )
    assert len(aws.ever("half")) == 3
    began, ended = aws.life(aws.ever("half")[0])
    assert 5 <= ended - began <= 15
    aws.interrupt(up)
    assert aws.line.run("down", "half").code == 0
    assert aws.left == BASE
