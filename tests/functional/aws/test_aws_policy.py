"""What this adapter's own calls need is in the printed policy."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.aws.account import AwsAccount
from gpucloud.adapters.aws.bucket import ensure_bucket, remove_bucket
from gpucloud.adapters.aws.machine import resolve
from gpucloud.adapters.aws.policy import actions, boundary_arn, user_policy
from gpucloud.adapters.aws.prices.market import AwsMarket
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.job.spec import AwsChoices, Resources
from gpucloud.store import open_store
from tests.iam.actions import action_of
from tests.lab.aws import Lab


def test_the_printed_policy_allows_every_call_before_and_after_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Lab(tmp_path / "lab") as lab:
        for key, value in lab.settings.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        aws = Aws(region="us-east-1")
        account, market = AwsAccount(aws), AwsMarket(aws, ("us-east-1",))
        account.caller()
        offer = market.offers(Resources(types=("g4dn.xlarge",)))[0]
        market.prices(offer.pool, datetime.now(timezone.utc), datetime.now(timezone.utc))
        headroom = account.headroom(offer)
        account.ask_for_more(headroom, (headroom.limit or 0) + 64)
        account.requests("us-east-1")
        resolve(aws, AwsChoices(), "us-east-1")
        store = open_store(f"s3://{ensure_bucket(aws, 'us-east-1')}")
        store.put("jobs/digits/state.json", b"{}", if_absent=True)
        store.delete("jobs/digits/state.json")
        remove_bucket(aws, "us-east-1", with_data=True)
        needed = {action for call in lab.calls for action in action_of(call.service, call.action, call.params)}
    allowed = actions(
        *user_policy(
            partition="aws",
            account="123456789012",
            regions=("us-east-1",),
            boundary=boundary_arn("aws", "123456789012"),
        ).values()
    )
    assert needed - allowed == set()
    assert needed == {
        "ec2:DescribeImages",
        "ec2:DescribeInstanceTypeOfferings",
        "ec2:DescribeInstances",
        "ec2:DescribeSpotPriceHistory",
        "s3:CreateBucket",
        "s3:DeleteBucket",
        "s3:DeleteObject",
        "s3:DeleteObjectVersion",
        "s3:GetBucketTagging",
        "s3:ListBucketMultipartUploads",
        "s3:ListBucketVersions",
        "s3:PutBucketOwnershipControls",
        "s3:PutBucketPolicy",
        "s3:PutBucketPublicAccessBlock",
        "s3:PutBucketTagging",
        "s3:PutBucketVersioning",
        "s3:PutEncryptionConfiguration",
        "s3:PutLifecycleConfiguration",
        "s3:PutObject",
        "servicequotas:GetServiceQuota",
        "servicequotas:ListRequestedServiceQuotaChangeHistory",
        "servicequotas:ListRequestedServiceQuotaChangeHistoryByQuota",
        "servicequotas:RequestServiceQuotaIncrease",
        "ssm:GetParameter",
    }
