"""What the keys of an instance's role may do: its policies, kept. Everybody else may do everything.

Kinder than AWS in one point: a role without any policy, as a test makes one in a line, is not judged.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator
from typing import Any

from moto.autoscaling.models import autoscaling_backends
from moto.iam.models import iam_backends
from moto.s3.models import s3_backends
from moto.sts.models import sts_backends

from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply
from tests.lab.aws.world import ACCOUNT

_S3 = {
    "HeadObject": "GetObject",
    "UploadPart": "PutObject",
    "CreateMultipartUpload": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListParts": "ListMultipartUploadParts",
    "ListObjectsV2": "ListBucket",
    "HeadBucket": "ListBucket",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListObjectVersions": "ListBucketVersions",
}
_Need = tuple[str, str, dict[str, str]]  # action, resource, what conditions may look at


def denied(call: Call, body: bytes) -> Reply | None:
    """Return AccessDenied if a role signed the call and none of its policies allows it."""
    session = sts_backends[ACCOUNT]["aws"].get_assumed_role_from_access_key(call.key)
    if session is None or (call.service, call.action) == ("sts", "GetCallerIdentity"):
        return None
    statements = list(_statements(session.role_arn))
    for action, resource, context in _needs(call, body) if statements else ():
        context |= {"aws:userid": session.user_id, "aws:RequestedRegion": call.region}
        if not any(_meets(statement, action, resource, context) for statement in statements):
            code = "UnauthorizedOperation" if call.service == "ec2" else "AccessDenied"
            message = f"User: {session.arn} is not authorized to perform: {action} on resource: {resource}"
            return faults.error(call.service, code, message, 403)
    return None


def _statements(role_arn: str) -> Iterator[dict[str, Any]]:
    role = next((one for one in iam_backends[ACCOUNT]["aws"].roles.values() if one.arn == role_arn), None)
    if role is None:
        return
    managed = [policy.default_version.document for policy in role.managed_policies.values()]
    for document in [*role.policies.values(), *managed]:
        said = json.loads(document)["Statement"]
        yield from said if isinstance(said, list) else [said]


def _needs(call: Call, body: bytes) -> Iterator[_Need]:
    if call.service == "s3":
        yield from _needs_in_s3(call, body)
    elif call.service == "autoscaling" and not call.action.startswith("Describe"):  # AWS describes all, or nothing
        group = _group(call)
        context = {f"aws:ResourceTag/{tag['Key']}": tag["Value"] for tag in group.tags} if group else {}
        context |= {f"autoscaling:{key}": call.params[key] for key in ("MinSize", "MaxSize") if key in call.params}
        yield f"autoscaling:{call.action}", group.arn if group else "*", context
    else:
        yield f"{call.service}:{call.action}", "*", {}


def _group(call: Call) -> Any:
    """The group that a call is about, by its name or by a machine of it; None for one that is not there."""
    groups = autoscaling_backends[ACCOUNT][call.region].autoscaling_groups
    if "AutoScalingGroupName" in call.params:
        return groups.get(call.params["AutoScalingGroupName"])
    of = call.params.get("InstanceId")
    return next((group for group in groups.values() if of in [one.instance_id for one in group.instance_states]), None)


def _needs_in_s3(call: Call, body: bytes) -> Iterator[_Need]:
    bucket, key = call.params.get("Bucket", ""), call.params.get("Key", "")
    arn, action = f"arn:aws:s3:::{bucket}", f"s3:{_S3.get(call.action, call.action)}"
    if call.action == "DeleteObjects":
        for found in re.findall(rb"<Key>([^<]+)</Key>", body):
            yield "s3:DeleteObject", f"{arn}/{found.decode()}", {}
    elif not key:
        yield action, arn, {"s3:prefix": call.params["prefix"]} if "prefix" in call.params else {}
    else:
        yield action, f"{arn}/{key}", {}
        held = s3_backends[ACCOUNT]["aws"].buckets.get(bucket)
        if action == "s3:GetObject" and (held is None or key not in held.keys):
            # S3 says 404 only to who may list; to others a missing key is as forbidden as a key of others.
            yield "s3:ListBucket", arn, {"s3:prefix": key}


def _meets(statement: dict[str, Any], action: str, resource: str, context: dict[str, str]) -> bool:
    if statement["Effect"] != "Allow":
        return False
    if not any(fnmatch.fnmatchcase(action.lower(), one.lower()) for one in _list(statement.get("Action", []))):
        return False
    wanted = [one.replace("${aws:userid}", context["aws:userid"]) for one in _list(statement.get("Resource", "*"))]
    if not any(fnmatch.fnmatchcase(resource, one) for one in wanted):
        return False
    return all(
        key in context and _holds(operator, context[key], [str(one) for one in _list(value)])
        for operator, pairs in statement.get("Condition", {}).items()
        for key, value in pairs.items()
    )


def _holds(operator: str, said: str, wanted: list[str]) -> bool:
    if operator in {"StringEquals", "Bool"}:
        return said in wanted
    if operator in {"StringLike", "ArnLike"}:
        return any(fnmatch.fnmatchcase(said, one) for one in wanted)
    if operator == "NumericLessThanEquals":
        return any(float(said) <= float(one) for one in wanted)
    if operator == "NumericEquals":
        return any(float(said) == float(one) for one in wanted)
    raise NotImplementedError(f"the lab does not know the condition {operator}")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
