"""Which IAM actions an API call needs: what `policy` is compared with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_S3 = {
    "ListObjectsV2": ("ListBucket",),
    "ListObjects": ("ListBucket",),
    "HeadBucket": ("ListBucket",),
    "ListObjectVersions": ("ListBucketVersions",),
    "ListMultipartUploads": ("ListBucketMultipartUploads",),
    "ListBuckets": ("ListAllMyBuckets",),
    # It sets who owns the objects.
    "CreateBucket": ("CreateBucket", "PutBucketOwnershipControls"),
    "PutPublicAccessBlock": ("PutBucketPublicAccessBlock",),
    "PutBucketEncryption": ("PutEncryptionConfiguration",),
    "PutBucketLifecycleConfiguration": ("PutLifecycleConfiguration",),
    "GetBucketLifecycleConfiguration": ("GetLifecycleConfiguration",),
    "HeadObject": ("GetObject",),
    "DeleteObjects": ("DeleteObject", "DeleteObjectVersion"),
    "CreateMultipartUpload": ("PutObject",),
    "UploadPart": ("PutObject",),
    "CompleteMultipartUpload": ("PutObject",),
}
_BUDGETS = {
    "CreateBudget": "ModifyBudget",
    "UpdateBudget": "ModifyBudget",
    "DeleteBudget": "ModifyBudget",
    "CreateNotification": "ModifyBudget",
    "CreateSubscriber": "ModifyBudget",
    "DescribeBudget": "ViewBudget",
    "DescribeNotificationsForBudget": "ViewBudget",
    "DescribeSubscribersForNotification": "ViewBudget",
}
_FIS = (
    (r"POST /experimentTemplates", "CreateExperimentTemplate"),
    (r"DELETE /experimentTemplates/[^/]+", "DeleteExperimentTemplate"),
    (r"GET /experimentTemplates/[^/]+", "GetExperimentTemplate"),
    (r"POST /experiments", "StartExperiment"),
    (r"GET /experiments/[^/]+", "GetExperiment"),
    (r"POST /tags/.+", "TagResource"),
    (r"DELETE /tags/.+", "UntagResource"),
)
_ALSO = {
    # A launch template is checked as if the caller started machines from it, with its role.
    "autoscaling:CreateAutoScalingGroup": ("ec2:RunInstances", "iam:PassRole", "iam:CreateServiceLinkedRole"),
    "autoscaling:UpdateAutoScalingGroup": ("ec2:RunInstances", "iam:PassRole"),
    "autoscaling:LaunchInstances": ("ec2:CreateFleet", "ec2:DescribeLaunchTemplateVersions"),
    "iam:AddRoleToInstanceProfile": ("iam:PassRole",),
    "fis:CreateExperimentTemplate": ("iam:PassRole",),
    "fis:StartExperiment": ("iam:CreateServiceLinkedRole",),
}
_TAGGING = {
    "autoscaling:CreateAutoScalingGroup": "autoscaling:CreateOrUpdateTags",
    "iam:CreateRole": "iam:TagRole",
    "iam:CreateInstanceProfile": "iam:TagInstanceProfile",
    "fis:CreateExperimentTemplate": "fis:TagResource",
    "fis:StartExperiment": "fis:TagResource",
    "budgets:ModifyBudget": "budgets:TagResource",
}
_PREFIXES = {"service-quotas": "servicequotas", "api.pricing": "pricing"}


def action_of(service: str, operation: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the IAM actions that a recorded call needs (`ec2:RunInstances`); none for who-am-I, always allowed.

    `operation` is the API's name of it, or method and path where a service is REST (`POST /experiments`).
    """
    prefix = _PREFIXES.get(service, service)
    if prefix == "sts" and operation == "GetCallerIdentity":
        return ()
    actions = [f"{prefix}:{name}" for name in _names(prefix, operation, params)]
    for action in tuple(actions):
        actions += _ALSO.get(action, ()) if _sets_machines(action, params) else ()
        actions += _tagging(action, params)
    return tuple(dict.fromkeys(actions))


def _sets_machines(action: str, params: Mapping[str, Any]) -> bool:
    """Whether a changed group gets another template: sizes alone need no right to start machines from it."""
    told = ("LaunchTemplate", "MixedInstancesPolicy")
    return action != "autoscaling:UpdateAutoScalingGroup" or any(key.startswith(told) for key in params)


def _names(prefix: str, operation: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    match prefix:
        case "s3":
            version = "Version" if operation in {"GetObject", "DeleteObject"} and "versionId" in params else ""
            return _S3.get(operation, (operation + version,))
        case "budgets":
            return (_BUDGETS.get(operation, operation),)
        case "fis":
            return (next((name for path, name in _FIS if re.fullmatch(path, operation)), operation),)
        case _:
            return (operation,)


def _tagging(action: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the action that tagging at birth needs besides the making."""
    tagged = any(re.match(r"tag(s|specification)|resourcetags", key, re.IGNORECASE) for key in params)
    if not tagged:
        return ()
    if (
        action.startswith("ec2:")
        and re.match(r"ec2:(Create|Allocate|Authorize|Import|Run)", action)
        and action != "ec2:CreateTags"
    ):
        return ("ec2:CreateTags",)
    return (_TAGGING[action],) if action in _TAGGING else ()
