"""AWS's own figures for what a job has cost: Cost Explorer, asked by the tag that everything of the job bears."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.billed import Billed, BilledLine

TAG = "gpucloud:job"
# Served from one region of each partition.
_REGIONS = {"aws": "us-east-1", "aws-cn": "cn-northwest-1"}
_MONTHS_KEPT = timedelta(days=365)


class CostExplorer:
    """Implements `BillingData`. AWS charges 0.01 USD for a request, and for each further page of its answer."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def of_job(self, job: str, first: datetime, now: datetime) -> Billed:
        """Return the unblended cost by day and usage type, from the first's day to the end of today (UTC).

        Empty where the tag is not active as a cost allocation tag, or the data has not come yet.
        """
        begin, end = max(first, now - _MONTHS_KEPT).date(), now.date() + timedelta(days=1)
        asked: dict[str, Any] = {
            "TimePeriod": {"Start": begin.isoformat(), "End": end.isoformat()},
            "Granularity": "DAILY",
            "Metrics": ["UnblendedCost"],
            "Filter": {"Tags": {"Key": TAG, "Values": [job], "MatchOptions": ["EQUALS"]}},
            "GroupBy": [{"Type": "DIMENSION", "Key": "USAGE_TYPE"}],
        }
        lines: list[BilledLine] = []
        requests, token = 0, ""
        region = _REGIONS.get(self._aws.partition, "us-east-1")
        with self._aws.calling("ce", "read AWS's bill from Cost Explorer", region) as explorer:
            while not requests or token:
                page = explorer.get_cost_and_usage(**asked, **({"NextPageToken": token} if token else {}))
                lines += _lines(page)
                requests, token = requests + 1, page.get("NextPageToken", "")
        return Billed(asked_at=now, first=begin.isoformat(), lines=tuple(lines), requests=requests)


def _lines(page: dict[str, Any]) -> list[BilledLine]:
    return [
        BilledLine(day=day["TimePeriod"]["Start"], usage=group["Keys"][0], usd=_usd(group))
        for day in page["ResultsByTime"]
        for group in day["Groups"]
    ]


def _usd(group: dict[str, Any]) -> Decimal:
    return Decimal(group["Metrics"]["UnblendedCost"]["Amount"])
