"""Whether a job's deadline is kept by a policy: where there is one, and two markets to choose from."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.domain.job.spec import Cloud, Job, MarketPolicy, Policy, Resources

JOB = Job(
    name="digits",
    run="train.py",
    budget_usd=Decimal(100),
    source=Path("/job.yaml"),
    code=Path("/"),
    resources=Resources(nodes=2, market=MarketPolicy.AUTO),
    deadline=timedelta(hours=12),
)


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, Policy.LEARNED),
        ({"policy": Policy.GREEDY}, Policy.GREEDY),
        ({"deadline": None}, None),
        ({"resources": Resources(market=MarketPolicy.ON_DEMAND)}, None),
        ({"cloud": Cloud.SSH}, None),
    ],
)
def test_a_policy_is_for_a_deadline_and_two_markets(changes, policy):
    assert replace(JOB, **changes).deadline_policy is policy
