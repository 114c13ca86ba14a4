"""Where the NAT gateway of a region's base stands, and which subnets of the user's own machines can be in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from botocore.stub import Stubber

from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.aws.standing import own_network, zone_for_nat
from gpucloud.domain.errors import UsageError

ZONES = ("us-east-1a", "us-east-1b", "us-east-1c")


@pytest.mark.parametrize(
    ("stands", "desired", "without", "zone"),
    [
        (None, ("us-east-1b",), set(), "us-east-1b"),  # with the machines: what crosses zones is charged
        (None, ("us-east-1b",), {"us-east-1b"}, "us-east-1a"),  # some zones have none
        (None, ("us-east-1b",), {"us-east-1a", "us-east-1b"}, "us-east-1c"),
        (None, ("us-east-1e",), set(), "us-east-1a"),  # a zone that took no subnet takes no gateway
        (None, (), set(), "us-east-1a"),
        ("us-east-1c", ("us-east-1b",), set(), "us-east-1c"),  # another place would make it anew under those who use it
    ],
)
def test_the_gateway_stands_with_the_machines_or_where_it_can(stands, desired, without, zone):
    assert zone_for_nat(stands, desired, ZONES, without) == zone


def subnet(zone: str, vpc: str = "vpc-1") -> dict[str, str]:
    return {"AvailabilityZone": zone, "SubnetId": f"subnet-{zone[-1] * 17}", "VpcId": vpc}


@pytest.mark.parametrize(
    ("subnets", "said"),
    [
        ([subnet("us-east-1a"), subnet("us-east-1b", "vpc-2")], "they lie in vpc-1 and vpc-2"),
        ([subnet("us-east-1a"), subnet("us-east-1a")], "two of them lie in the same zone"),
        ([subnet(f"us-east-1{letter}") for letter in "abcdefgh"], "8 are more than a group's tag can name"),
    ],
)
def test_subnets_of_the_users_own_that_no_group_can_have_are_refused(
    monkeypatch: pytest.MonkeyPatch, subnets: list[dict[str, str]], said: str
):
    with stubbed(monkeypatch, subnets) as aws, pytest.raises(UsageError, match=said) as caught:
        own_network(aws, "us-east-1", tuple(one["SubnetId"] for one in subnets), public_address=True)
    assert caught.value.hint in {"name subnets of one VPC", "name one subnet a zone", "name 7 at the most"}


def test_as_many_subnets_as_a_group_can_name_are_taken(monkeypatch: pytest.MonkeyPatch):
    subnets = [subnet(f"us-east-1{letter}") for letter in "abcdefg"]
    with stubbed(monkeypatch, subnets) as aws:
        network = own_network(aws, "us-east-1", tuple(one["SubnetId"] for one in subnets), public_address=False)
    assert (len(network.subnets), network.vpc_id, network.cidr) == (7, "vpc-1", "10.0.0.0/16")


@contextmanager
def stubbed(monkeypatch: pytest.MonkeyPatch, subnets: list[dict[str, str]]) -> Iterator[Aws]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    aws = Aws(region="us-east-1")
    stub = Stubber(aws.client("ec2", "us-east-1"))
    stub.add_response("describe_subnets", {"Subnets": subnets})
    stub.add_response("describe_vpcs", {"Vpcs": [{"CidrBlock": "10.0.0.0/16"}]})
    with stub:
        yield aws
