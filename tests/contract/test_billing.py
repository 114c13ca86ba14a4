"""What Cost Explorer is asked, and what its answers mean; against botocore's own stand-in."""

from __future__ import annotations

from datetime import datetime, timezone
from decimal import Decimal

import boto3
import pytest
from botocore.stub import Stubber

from gpucloud.adapters.aws.census import CostExplorer
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.money.costs import BilledLine
from gpucloud.domain.money.ledger import ChargeKind

FIRST = datetime(2026, 11, 20, 22, tzinfo=timezone.utc)
NOW = datetime(2026, 11, 22, 10, tzinfo=timezone.utc)
ASKED = {
    "TimePeriod": {"Start": "2026-11-20", "End": "2026-11-23"},
    "Granularity": "DAILY",
    "Metrics": ["UnblendedCost"],
    "Filter": {"Tags": {"Key": "gpucloud:job", "Values": ["digits-2"], "MatchOptions": ["EQUALS"]}},
    "GroupBy": [{"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
}


@pytest.fixture
def explorer(monkeypatch):
    """Cost Explorer behind a stubbed client; every answer must have been asked for as it was announced."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    client = boto3.client("ce", region_name="us-east-1")
    aws = Aws(region="eu-west-1")
    monkeypatch.setattr(
        aws, "client", lambda service, region: client if (service, region) == ("ce", "us-east-1") else 0
    )
    with Stubber(client) as stub:
        yield CostExplorer(aws), stub
        stub.assert_no_pending_responses()


def day(start, **usd):
    groups = [
        {"Keys": [usage.replace("__", ":")], "Metrics": {"UnblendedCost": {"Amount": amount, "Unit": "USD"}}}
        for usage, amount in usd.items()
    ]
    return {"TimePeriod": {"Start": start, "End": "x"}, "Total": {}, "Groups": groups, "Estimated": True}


def test_the_cost_of_a_jobs_tag_comes_by_day_and_usage_type(explorer):
    billing, stub = explorer
    days = [
        day("2026-11-20", SpotUsage__p3="0.918"),
        day("2026-11-21", SpotUsage__p3="22.0319999999"),
        day("2026-11-22"),
    ]
    stub.add_response("get_cost_and_usage", {"ResultsByTime": days}, ASKED)

    billed = billing.of_job("digits-2", FIRST, NOW)

    assert billed.lines == (
        BilledLine(day="2026-11-20", usage="SpotUsage:p3", usd=Decimal("0.918")),
        BilledLine(day="2026-11-21", usage="SpotUsage:p3", usd=Decimal("22.0319999999")),
    )
    assert (billed.first, billed.asked_at, billed.requests) == ("2026-11-20", NOW, 1)


def test_every_page_is_read_and_counted(explorer):
    billing, stub = explorer
    stub.add_response(
        "get_cost_and_usage", {"ResultsByTime": [day("2026-11-20", A="1")], "NextPageToken": "more"}, ASKED
    )
    stub.add_response(
        "get_cost_and_usage", {"ResultsByTime": [day("2026-11-21", B="2")]}, {**ASKED, "NextPageToken": "more"}
    )

    billed = billing.of_job("digits-2", FIRST, NOW)

    assert ([line.usage for line in billed.lines], billed.requests) == (["A", "B"], 2)


def test_no_more_is_asked_for_than_aws_keeps(explorer):
    billing, stub = explorer
    asked = {**ASKED, "TimePeriod": {"Start": "2025-11-22", "End": "2026-11-23"}}
    stub.add_response("get_cost_and_usage", {"ResultsByTime": []}, asked)

    assert billing.of_job("digits-2", FIRST.replace(year=2024), NOW).lines == ()


def test_a_refusal_is_told_in_our_words(explorer):
    billing, stub = explorer
    stub.add_client_error(
        "get_cost_and_usage", "AccessDeniedException", "not authorized to perform: ce:GetCostAndUsage"
    )

    with pytest.raises(ProvisionError, match="cannot read AWS's bill from Cost Explorer") as caught:
        billing.of_job("digits-2", FIRST, NOW)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("usage", "kind"),
    [
        ("SpotUsage:p3.2xlarge", ChargeKind.COMPUTE),
        ("USW2-SpotUsage:g5.xlarge", ChargeKind.COMPUTE),
        ("BoxUsage:p4d.24xlarge", ChargeKind.COMPUTE),
        ("EUC1-EBS:VolumeUsage.gp3", ChargeKind.DISK),
        ("EBS:VolumeP-Throughput.gp3", ChargeKind.DISK),
        ("USE2-PublicIPv4:InUseAddress", ChargeKind.ADDRESS),
        ("TimedStorage-ByteHrs", ChargeKind.STORAGE),
        ("USW2-Requests-Tier1", ChargeKind.REQUESTS),
        ("DataTransfer-Out-Bytes", ChargeKind.TRANSFER),
        ("USW2-DataTransfer-Regional-Bytes", ChargeKind.TRANSFER),
        ("USW2-USE1-AWS-Out-Bytes", ChargeKind.TRANSFER),
        ("USW2-NatGateway-Bytes", ChargeKind.TRANSFER),
        ("USW2-NatGateway-Hours", ChargeKind.GATEWAY),
        ("NoSuchUsage", None),
    ],
)
def test_a_usage_type_is_of_a_kind(usage, kind):
    assert BilledLine(day="2026-11-20", usage=usage, usd=Decimal(1)).kind is kind
