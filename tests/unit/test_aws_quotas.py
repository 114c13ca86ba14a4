"""Quotas: which one counts, what of it is in use, and asking for more; over botocore's own stub."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from botocore.stub import Stubber

from gpucloud.adapters.aws.account import AwsAccount
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError, ProvisionError, UsageError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.catalog import Headroom, QuotaRequest
from gpucloud.domain.offer import Offer, Pool

T0 = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)
G_SPOT = Headroom(region="us-east-1", code="L-3819A6DF", name="All G and VT Spot Instance Requests", limit=16, used=8)
EC2_QUOTA = {"ServiceCode": "ec2", "QuotaCode": "L-3819A6DF"}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return Aws(region="us-east-1")


def offer(instance_type: str, market: Market = Market.SPOT) -> Offer:
    pool = Pool(instance_type=instance_type, zone="us-east-1a", market=market)
    return Offer(pool=pool, usd_per_hour=Decimal(1), cap_usd_per_hour=Decimal(1), as_of=T0, gpus=1)


def machine(instance_type: str, lifecycle: str | None = None, cores: int = 2) -> dict[str, Any]:
    options = {"CpuOptions": {"CoreCount": cores, "ThreadsPerCore": 2}}
    return {"InstanceType": instance_type, **options, **({"InstanceLifecycle": lifecycle} if lifecycle else {})}


def asked(wanted: float, status: str, day: int = 20, code: str = "L-3819A6DF") -> dict[str, Any]:
    created = datetime(2026, 11, day, tzinfo=timezone.utc)
    return {"QuotaCode": code, "QuotaName": "G spot", "DesiredValue": wanted, "Status": status, "Created": created}


def stubs(aws: Aws) -> tuple[Stubber, Stubber]:
    return Stubber(aws.client("service-quotas", "us-east-1")), Stubber(aws.client("ec2", "us-east-1"))


@pytest.mark.parametrize(
    ("instance_type", "market", "code"),
    [
        ("g4dn.xlarge", Market.SPOT, "L-3819A6DF"),
        ("g5.xlarge", Market.ON_DEMAND, "L-DB2E81BA"),
        ("p4d.24xlarge", Market.SPOT, "L-7212CCBC"),
        ("p4d.24xlarge", Market.ON_DEMAND, "L-417A185B"),
        ("p5.48xlarge", Market.SPOT, "L-C4BD4855"),
        ("p5.48xlarge", Market.ON_DEMAND, "L-417A185B"),
        ("m5.large", Market.SPOT, "L-34B43A08"),
        ("m5.large", Market.ON_DEMAND, "L-1216C47A"),
    ],
)
def test_each_family_and_market_has_its_quota(aws: Aws, instance_type: str, market: Market, code: str):
    quotas, ec2 = stubs(aws)
    quotas.add_response("get_service_quota", {"Quota": {"Value": 96.0}}, {"ServiceCode": "ec2", "QuotaCode": code})
    ec2.add_response("describe_instances", {"Reservations": []})
    with quotas, ec2:
        headroom = AwsAccount(aws).headroom(offer(instance_type, market))
    assert (headroom.code, headroom.limit, headroom.used) == (code, 96, 0)


def test_machines_of_the_family_and_market_count_with_their_vcpus(aws: Aws):
    machines = [
        machine("g4dn.xlarge", "spot", cores=1),  # 4 by its type, whatever its options
        machine("g5.2xlarge", "spot"),  # 8
        machine("vt1.3xlarge", "spot", cores=6),  # 12, not in the catalog
        machine("g5.2xlarge"),
        machine("g5.2xlarge", "capacity-block"),
        machine("p5.48xlarge", "spot"),
        machine("m5.large", "spot"),
    ]
    quotas, ec2 = stubs(aws)
    quotas.add_response("get_service_quota", {"Quota": {"Value": 64.0}})
    ec2.add_response("describe_instances", {"Reservations": [{"Instances": machines[:3]}, {"Instances": machines[3:]}]})
    with quotas, ec2:
        headroom = AwsAccount(aws).headroom(offer("g5.xlarge"))
    assert (headroom.limit, headroom.used, headroom.left) == (64, 24, 40)


def test_a_plan_with_many_offers_asks_once(aws: Aws):
    quotas, ec2 = stubs(aws)
    quotas.add_response("get_service_quota", {"Quota": {"Value": 64.0}})
    ec2.add_response("describe_instances", {"Reservations": []})
    with quotas, ec2:
        account = AwsAccount(aws)
        for name in ("g5.xlarge", "g5.2xlarge", "g4dn.xlarge", "g6.xlarge"):
            assert account.headroom(offer(name)).limit == 64


def test_a_quota_that_was_never_changed_has_awss_default(aws: Aws):
    quotas, ec2 = stubs(aws)
    quotas.add_client_error("get_service_quota", "NoSuchResourceException")
    quotas.add_response("get_aws_default_service_quota", {"Quota": {"Value": 0.0}}, EC2_QUOTA)
    ec2.add_response("describe_instances", {"Reservations": []})
    with quotas, ec2:
        assert AwsAccount(aws).headroom(offer("g5.xlarge")).limit == 0


def test_what_may_not_be_read_is_not_known_and_stops_nothing(aws: Aws):
    quotas, ec2 = stubs(aws)
    quotas.add_client_error("get_service_quota", "AccessDeniedException")
    ec2.add_client_error("describe_instances", "UnauthorizedOperation")
    with quotas, ec2:
        headroom = AwsAccount(aws).headroom(offer("g5.xlarge"))
    assert (headroom.limit, headroom.used) == (None, None)
    assert headroom.holds(1000)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (
            ["All G and VT Spot Instance Requests", "All P Spot Instance Requests", "All P6 Spot Instance Requests"],
            "L-2",
        ),
        (["All P5 Spot Instance Requests", "All P Spot Instance Requests", "Running On-Demand P instances"], "L-1"),
        (["All P5 Spot Instance Requests", "All P4, P3 and P2 Spot Instance Requests"], ""),
        (["All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"], ""),
    ],
)
def test_a_quota_whose_code_is_not_known_is_found_by_its_name(aws: Aws, names: list[str], code: str):
    quotas, ec2 = stubs(aws)
    listed = [{"QuotaCode": f"L-{number}", "QuotaName": name} for number, name in enumerate(names)]
    quotas.add_response("list_service_quotas", {"Quotas": listed}, {"ServiceCode": "ec2"})
    quotas.add_response("get_service_quota", {"Quota": {"Value": 192.0}})
    ec2.add_response(
        "describe_instances",
        {"Reservations": [{"Instances": [machine("p6-b200.48xlarge", "spot"), machine("g5.xlarge")]}]},
    )
    with quotas, ec2:
        headroom = AwsAccount(aws).headroom(offer("p6-b200.48xlarge"))
    assert headroom.code == code
    assert (headroom.limit, headroom.used) == ((192, 192) if code else (None, None))


def test_a_family_whose_quota_has_no_known_code_stops_nothing(aws: Aws):
    quotas, _ = stubs(aws)
    quotas.add_client_error("list_service_quotas", "AccessDeniedException")
    with quotas:
        headroom = AwsAccount(aws).headroom(offer("p6-b200.48xlarge"))
    assert (headroom.code, headroom.limit, headroom.holds(192)) == ("", None, True)


def test_expired_credentials_are_an_error_all_the_same(aws: Aws):
    quotas, ec2 = stubs(aws)
    quotas.add_client_error("get_service_quota", "ExpiredTokenException")
    with quotas, ec2, pytest.raises(CredentialsError):
        AwsAccount(aws).headroom(offer("g5.xlarge"))


def test_more_is_asked_for_in_vcpus(aws: Aws):
    quotas, _ = stubs(aws)
    quotas.add_response(
        "list_requested_service_quota_change_history_by_quota", {"RequestedQuotas": [asked(64, "DENIED")]}, EC2_QUOTA
    )
    quotas.add_response(
        "request_service_quota_increase",
        {"RequestedQuota": asked(32, "PENDING", day=21)},
        {**EC2_QUOTA, "DesiredValue": 32.0},
    )
    with quotas:
        request = AwsAccount(aws).ask_for_more(G_SPOT, 32)
    assert request == QuotaRequest(
        region="us-east-1", code="L-3819A6DF", name="G spot", wanted=32, status="PENDING",
        asked_at=datetime(2026, 11, 21, tzinfo=timezone.utc),
    )  # fmt: skip


def test_an_open_request_for_as_much_is_returned_as_it_stands(aws: Aws):
    quotas, _ = stubs(aws)
    quotas.add_response(
        "list_requested_service_quota_change_history_by_quota",
        {"RequestedQuotas": [asked(24, "PENDING"), asked(64, "CASE_OPENED")]},
    )
    with quotas:
        assert AwsAccount(aws).ask_for_more(G_SPOT, 32).wanted == 64


def test_an_open_request_for_less_has_to_be_answered_first(aws: Aws):
    quotas, _ = stubs(aws)
    quotas.add_response(
        "list_requested_service_quota_change_history_by_quota", {"RequestedQuotas": [asked(24, "PENDING")]}
    )
    quotas.add_client_error("request_service_quota_increase", "ResourceAlreadyExistsException")
    with quotas, pytest.raises(ProvisionError, match="an earlier request for this quota is still open"):
        AwsAccount(aws).ask_for_more(G_SPOT, 32)


def test_a_quota_that_is_as_high_already_is_not_asked_for(aws: Aws):
    with pytest.raises(UsageError, match="is 16 vCPUs already"):
        AwsAccount(aws).ask_for_more(G_SPOT, 16)


def test_a_quota_without_a_known_code_names_the_console(aws: Aws):
    headroom = Headroom(region="us-east-1", code="", name="?", limit=None, used=None)
    with pytest.raises(UsageError) as caught:
        AwsAccount(aws).ask_for_more(headroom, 16)
    assert caught.value.hint == "https://us-east-1.console.aws.amazon.com/servicequotas/home/services/ec2/quotas"


def test_requests_come_newest_first(aws: Aws):
    quotas, _ = stubs(aws)
    page = {"RequestedQuotas": [asked(1, "DENIED", 1), asked(3, "PENDING", 3), asked(2, "APPROVED", 2)]}
    quotas.add_response("list_requested_service_quota_change_history", page, {"ServiceCode": "ec2"})
    with quotas:
        found = AwsAccount(aws).requests("us-east-1")
    assert [(request.wanted, request.status) for request in found] == [(3, "PENDING"), (2, "APPROVED"), (1, "DENIED")]
