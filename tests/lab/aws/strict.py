"""Where AWS is stricter than moto: client tokens are remembered, births carry owner tags, bucket policies are kept."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

from moto.iam.access_control import PermissionResult
from moto.s3.models import FakeBucket, s3_backends

from tests.iam.actions import action_of
from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply
from tests.lab.aws.repairs import Patches
from tests.lab.aws.world import ACCOUNT

_OWNED = (b"gpucloud%3Amanaged", b"gpucloud:managed")
_TAGGED_AT_BIRTH = {
    "ec2": {
        "CreateVpc", "CreateSubnet", "CreateInternetGateway", "CreateRouteTable", "CreateSecurityGroup",
        "CreateVpcEndpoint", "CreateNatGateway", "AllocateAddress", "CreateKeyPair", "ImportKeyPair",
        "CreateLaunchTemplate", "CreateVolume",
        "CreatePlacementGroup", "CreateNetworkInterface", "CreateFleet", "RequestSpotInstances", "CreateNetworkAcl",
        "CreateSnapshot", "CreateImage", "CreateFlowLogs",
    },
    "iam": {"CreateRole", "CreateInstanceProfile", "CreatePolicy"},
    "autoscaling": {"CreateAutoScalingGroup"},
    "budgets": {"CreateBudget"},
    "fis": {"POST /experimentTemplates", "POST /experiments"},
    "ssm": {"PutParameter"},
    "monitoring": {"PutMetricAlarm"},
}  # fmt: skip


class Tokens:
    """Replies by client token: a repeat is answered like the first call and does nothing."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str, str, str], tuple[dict[str, Any], Reply]] = {}

    def reply(self, call: Call) -> Reply | None:
        """Return what a repeat is answered; None for a first call."""
        token = _token(call)
        if token is None or (call.region, call.service, call.action, token) not in self._said:
            return None
        params, reply = self._said[(call.region, call.service, call.action, token)]
        if params != call.params:
            return faults.error(
                call.service, "IdempotentParameterMismatch", "The client token was used with other parameters.", 400
            )
        return reply

    def remember(self, call: Call, said: bytes) -> None:
        """Keep the reply of a call that was applied."""
        token = _token(call)
        if token is not None:
            kind = "application/json" if said[:1] == b"{" else "text/xml"
            self._said[(call.region, call.service, call.action, token)] = (call.params, (200, kind, said))


def _token(call: Call) -> str | None:
    token = call.params.get("ClientToken") or call.params.get("clientToken")
    return str(token) if token and call.service in {"ec2", "autoscaling", "fis"} else None


def untagged(call: Call, body: bytes) -> str | None:
    """Return the call as a line if it made something without the owner tag that it could have had from birth."""
    if call.action not in _TAGGED_AT_BIRTH.get(call.service, set()) or any(mark in body for mark in _OWNED):
        return None
    named = [str(value) for key, value in call.params.items() if key.endswith(("Name", "CidrBlock")) and "." not in key]
    return " ".join([call.action, *named])


def install(patches: Patches) -> None:
    """Let moto permit everything in buckets: it takes a condition that does not hold for a denial."""
    patches.set(FakeBucket, "get_permission", lambda _self, _action, _resource: PermissionResult.NEUTRAL)


def denied(call: Call, environ: dict[str, Any]) -> Reply | None:
    """Return AccessDenied if a Deny statement of the bucket's policy meets the call. Everything comes by TLS here."""
    bucket = s3_backends[ACCOUNT]["aws"].buckets.get(call.params.get("Bucket", "")) if call.service == "s3" else None
    if bucket is None or not bucket.policy:
        return None
    statements = json.loads(bucket.policy)["Statement"]
    resource = f"arn:aws:s3:::{call.params['Bucket']}" + (f"/{call.params['Key']}" if call.params.get("Key") else "")
    for statement in statements if isinstance(statements, list) else [statements]:
        asked = action_of("s3", call.action, call.params)
        if statement["Effect"] == "Deny" and any(_meets(statement, one, resource, environ) for one in asked):
            return faults.error("s3", "AccessDenied", "explicit deny in a resource-based policy", 403)
    return None


def _meets(statement: dict[str, Any], action: str, resource: str, environ: dict[str, Any]) -> bool:
    actions, resources = _list(statement.get("Action", [])), _list(statement.get("Resource", "*"))
    if not any(fnmatch.fnmatchcase(action, pattern) for pattern in actions):
        return False
    if not any(fnmatch.fnmatchcase(resource, pattern) for pattern in resources):
        return False
    return all(
        _holds(operator, key, value, environ)
        for operator, pairs in statement.get("Condition", {}).items()
        for key, value in pairs.items()
    )


def _holds(operator: str, key: str, value: Any, environ: dict[str, Any]) -> bool:
    said = {
        "s3:if-match": environ.get("HTTP_IF_MATCH"),
        "s3:if-none-match": environ.get("HTTP_IF_NONE_MATCH"),
        "aws:securetransport": "true",
    }.get(key.lower())
    wanted = [str(one).lower() for one in _list(value)]
    if operator == "Null":
        return str(said is None).lower() in wanted
    return operator == "Bool" and str(said).lower() in wanted


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
