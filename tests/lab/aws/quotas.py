"""Service Quotas for EC2: limits that launches are held to, and requests for more."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply
from tests.lab.aws.pools import DEFAULT_QUOTA, QUOTAS
from tests.lab.aws.world import ACCOUNT, World


class ServiceQuotas:
    """Answers the service's calls; a granted request is `world.quotas[code] = value` by the test."""

    def __init__(self, world: World) -> None:
        self.requests: list[dict[str, Any]] = []
        self._world = world

    def answer(self, call: Call) -> Reply | None:
        """Return the reply; None: not one of ours."""
        method = {
            "GetServiceQuota": self._get,
            "GetAWSDefaultServiceQuota": self._get,
            "ListServiceQuotas": self._list,
            "ListAWSDefaultServiceQuotas": self._list,
            "RequestServiceQuotaIncrease": self._request,
            "ListRequestedServiceQuotaChangeHistory": self._history,
            "ListRequestedServiceQuotaChangeHistoryByQuota": self._history,
        }.get(call.action)
        if call.service != "servicequotas" or method is None or call.params.get("ServiceCode", "ec2") != "ec2":
            return None
        code = call.params.get("QuotaCode")
        if code is not None and code not in QUOTAS:
            return faults.error(call.service, "NoSuchResourceException", f"The quota {code} does not exist", 400)
        return method(call)

    def _get(self, call: Call) -> Reply:
        return _json({"Quota": self._quota(call.params["QuotaCode"], call.region)})

    def _list(self, call: Call) -> Reply:
        return _json({"Quotas": [self._quota(code, call.region) for code in QUOTAS]})

    def _request(self, call: Call) -> Reply:
        code, wanted = call.params["QuotaCode"], float(call.params["DesiredValue"])
        if any(one["QuotaCode"] == code and one["Status"] in {"PENDING", "CASE_OPENED"} for one in self.requests):
            return faults.error(
                call.service, "ResourceAlreadyExistsException", "Only one open request for a quota is allowed", 400
            )
        if wanted <= self._world.quotas.get(code, DEFAULT_QUOTA):
            message = "You must provide a quota value greater than the current quota value"
            return faults.error(call.service, "IllegalArgumentException", message, 400)
        request = {
            "Id": uuid.uuid4().hex,
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaCode": code,
            "QuotaName": QUOTAS[code],
            "DesiredValue": wanted,
            "Status": "PENDING",
            "Created": time.time(),
            "LastUpdated": time.time(),
        }
        self.requests.append(request)
        return _json({"RequestedQuota": request})

    def _history(self, call: Call) -> Reply:
        code, status = call.params.get("QuotaCode"), call.params.get("Status")
        found = [
            one for one in self.requests if code in {None, one["QuotaCode"]} and status in {None, one["Status"]}
        ]  # fmt: skip
        return _json({"RequestedQuotas": found})

    def _quota(self, code: str, region: str) -> dict[str, Any]:
        return {
            "ServiceCode": "ec2",
            "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
            "QuotaArn": f"arn:aws:servicequotas:{region}:{ACCOUNT}:ec2/{code}",
            "QuotaCode": code,
            "QuotaName": QUOTAS[code],
            "Value": float(self._world.quotas.get(code, DEFAULT_QUOTA)),
            "Unit": "None",
            "Adjustable": True,
            "GlobalQuota": False,
        }


def _json(said: dict[str, Any]) -> Reply:
    return 200, "application/x-amz-json-1.1", json.dumps(said).encode()
