"""The account's bucket in a region: where Terraform's state and the jobs of `cloud: aws` are kept by default."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions

from gpucloud.adapters.aws.account import account_of
from gpucloud.adapters.aws.faults import code_of, explained
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import GpucloudError, ProvisionError, UsageError
from gpucloud.domain.untrusted import brief

_LEVEL = "1"
"""Counts up when `_harden` changes, so that buckets of an older gpucloud are brought up to it."""
_ABSENT = {"NoSuchBucket", "404"}
_UNTAGGED = {"NoSuchTagSet", "NoSuchTagSetError"}
_OUR_FOLDERS = {"jobs/", "clusters/", "terraform/"}
_BROKEN = ("what came of uploads that broke off",)
_SHOWN = 8
_BATCH = 1000  # what one DeleteObjects takes


def bucket_name(account: str, region: str) -> str:
    """Return the name that the account's bucket in the region has or will have."""
    return f"gpucloud-{account}-{region}"


def bucket_exists(aws: Aws, region: str) -> bool:
    """Whether the account's bucket is there. Raises CredentialsError, ProvisionError."""
    account = account_of(aws)
    name = bucket_name(account, region)
    with aws.calling("s3", f"look for the bucket {name}", region) as s3:
        return _tags(s3, name, account) is not None


def ensure_bucket(aws: Aws, region: str, *, kms_key: str | None = None) -> str:
    """Make the bucket, hardened and tagged, and return its name; two calls when it is there already.

    Every step may be repeated; the tag that says "done" is written last. Raises CredentialsError, ProvisionError.
    """
    account = account_of(aws)
    name = bucket_name(account, region)
    mark = f"{_LEVEL}:{kms_key or 'AES256'}"
    with aws.calling("s3", f"make the bucket {name}", region) as s3:
        tags = _tags(s3, name, account)
        if tags is None:
            _create(s3, name, region)
        if (tags or {}).get("gpucloud:hardened") != mark:
            _harden(s3, name, account, aws.partition, kms_key)
            done = {
                **(tags or {}),
                "gpucloud:managed": "true",
                "gpucloud:base": region,
                "gpucloud:hardened": mark,
            }
            tagging = {"TagSet": [{"Key": key, "Value": value} for key, value in done.items()]}
            s3.put_bucket_tagging(Bucket=name, ExpectedBucketOwner=account, Tagging=tagging)
    return name


def remove_bucket(aws: Aws, region: str, *, with_data: bool) -> bool:
    """Delete the bucket with every version and part in it; return False when there was none.

    UsageError when anything of its user lies in it, unless `with_data`. CredentialsError, ProvisionError.
    """
    account = account_of(aws)
    name = bucket_name(account, region)
    with aws.calling("s3", f"remove the bucket {name}", region) as s3:
        if _tags(s3, name, account) is None:
            return False
        held = () if with_data else _held(s3, name, account)
        if held:
            raise UsageError(
                f"the bucket {name} holds {' and '.join(held)}",
                hint="keep what you need (`aws s3 sync`), then the same command with --with-data deletes it",
            )
        _empty(s3, name, account)
        s3.delete_bucket(Bucket=name, ExpectedBucketOwner=account)
    return True


def what_stays(aws: Aws, store: str) -> str | None:
    """Return what stays of checkpoints, and costs on, in a bucket of the user's own; None where nobody may ask."""
    where = urlsplit(store)
    try:
        with explained(f"ask how {where.netloc} keeps versions"):
            s3 = aws.client("s3", quick=True)
            versioned = s3.get_bucket_versioning(Bucket=where.netloc).get("Status") == "Enabled"
            rules = _rules(s3, where.netloc)
    except GpucloudError:  # not allowed, or an S3 of somebody else that has no such question
        return None
    below = "/".join(filter(None, (where.path.strip("/"), "jobs/")))
    lacking = lacking_rules(rules, below, versioned=versioned)
    if not lacking:
        return None
    deleted = "NoncurrentVersionExpiration" in lacking[0]
    kept = (*(("each checkpoint that is deleted",) if deleted else ()), *(_BROKEN if len(lacking) > deleted else ()))
    return (
        f"warning: the bucket {where.netloc} keeps {' and '.join(kept)} for ever, and it is charged: give it a"
        f" lifecycle rule for {below} with {' and '.join(lacking)} (gpucloud docs money)"
    )


def lacking_rules(rules: Iterable[Mapping[str, Any]], below: str, *, versioned: bool) -> tuple[str, ...]:
    """Return what no lifecycle rule of a bucket does for all that lies below: what is to be written into one."""
    ruling = [rule for rule in rules if rule.get("Status") == "Enabled" and _covers(rule, below)]
    old = any("NoncurrentDays" in rule.get("NoncurrentVersionExpiration", {}) for rule in ruling)
    parts = any("AbortIncompleteMultipartUpload" in rule for rule in ruling)
    return (
        *(("NoncurrentVersionExpiration {NoncurrentDays: 1}",) if versioned and not old else ()),
        *(("AbortIncompleteMultipartUpload {DaysAfterInitiation: 1}",) if not parts else ()),
    )


def _covers(rule: Mapping[str, Any], below: str) -> bool:
    """Whether the rule is for everything there; one for tags or sizes is for some of it."""
    chosen = rule.get("Filter", {"Prefix": rule.get("Prefix", "")})
    return set(chosen) <= {"Prefix"} and below.startswith(str(chosen.get("Prefix", "")))


def _rules(s3: Any, bucket: str) -> list[Mapping[str, Any]]:
    try:
        return list(s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"])
    except botocore.exceptions.ClientError as error:
        if code_of(error) == "NoSuchLifecycleConfiguration":
            return []
        raise


def _tags(s3: Any, name: str, account: str) -> dict[str, str] | None:
    """Return the bucket's tags; None when there is no such bucket."""
    try:
        reply = s3.get_bucket_tagging(Bucket=name, ExpectedBucketOwner=account)
    except botocore.exceptions.ClientError as error:
        code = code_of(error)
        if code in _ABSENT:
            return None
        if code in _UNTAGGED:
            return {}
        if code in {"AccessDenied", "403"}:
            raise _not_ours(name, account) from error
        raise
    return {tag["Key"]: tag["Value"] for tag in reply["TagSet"]}


def _not_ours(name: str, account: str) -> ProvisionError:
    return ProvisionError(
        f"the bucket {name} belongs to another account than {account}, or this identity may not read its tags",
        hint="attach the policy that `gpucloud iam policy` prints, or name a bucket of your own: `store: s3://…`",
    )


def _create(s3: Any, name: str, region: str) -> None:
    # us-east-1 is S3's default place and is refused as a constraint.
    where = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        s3.create_bucket(Bucket=name, ObjectOwnership="BucketOwnerEnforced", **where)
    except s3.exceptions.BucketAlreadyOwnedByYou:
        return  # another of our runs was faster
    except s3.exceptions.BucketAlreadyExists as error:
        raise ProvisionError(
            f"the name {name} is taken by a bucket of another account",
            hint="name a bucket of your own in the job file: `store: s3://…`",
        ) from error


def _harden(s3: Any, name: str, account: str, partition: str, kms_key: str | None) -> None:
    ours = {"Bucket": name, "ExpectedBucketOwner": account}
    everything = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    s3.put_public_access_block(**ours, PublicAccessBlockConfiguration=dict.fromkeys(everything, True))
    s3.put_bucket_versioning(**ours, VersioningConfiguration={"Status": "Enabled"})
    by_default: dict[str, Any] = {"SSEAlgorithm": "AES256"}
    if kms_key:
        by_default = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": kms_key}
    rule = {"ApplyServerSideEncryptionByDefault": by_default, "BucketKeyEnabled": bool(kms_key)}
    s3.put_bucket_encryption(**ours, ServerSideEncryptionConfiguration={"Rules": [rule]})
    s3.put_bucket_lifecycle_configuration(**ours, LifecycleConfiguration={"Rules": _lifecycle()})
    s3.put_bucket_policy(**ours, Policy=json.dumps(_policy(f"arn:{partition}:s3:::{name}")))


def _lifecycle() -> list[dict[str, Any]]:
    """Return the rules. Old versions of Terraform's state can be fetched back for 30 days.

    Those of a job cannot: its state is written every few seconds, and a collected checkpoint must stop costing money.
    """
    return [
        {
            "ID": "parts of uploads that broke off",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
        },
        *(
            {
                "ID": f"old versions below {prefix}",
                "Status": "Enabled",
                "Filter": {"Prefix": prefix},
                "NoncurrentVersionExpiration": {"NoncurrentDays": days},
                "Expiration": {"ExpiredObjectDeleteMarker": True},
            }
            for prefix, days in (("terraform/", 30), ("jobs/", 1), ("clusters/", 1))
        ),
    ]


def _policy(arn: str) -> dict[str, Any]:
    """Return the bucket policy: TLS only; a job's state, its lock too, is never written without a condition.

    Nor is any other `state.json` below a job: a pattern's star passes slashes, and `S3Store.put` knows of it.
    """
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [arn, f"{arn}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            },
            {
                "Sid": "StateByCompareAndSwap",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:PutObject",
                "Resource": f"{arn}/jobs/*/state.json",
                "Condition": {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}},
            },
        ],
    }


def _held(s3: Any, name: str, account: str) -> tuple[str, ...]:
    """Return what the bucket holds of its user's: jobs, and all that lies outside the folders that gpucloud makes.

    Old versions count there, too: who deleted a data set by mistake gets it back by them.
    """
    ours = {"Bucket": name, "ExpectedBucketOwner": account, "Delimiter": "/"}
    listed = s3.get_paginator("list_objects_v2").paginate(**ours, Prefix="jobs/")
    jobs = [entry["Prefix"].split("/")[1] for page in listed for entry in page.get("CommonPrefixes", ())]
    others: dict[str, None] = {}
    for page in s3.get_paginator("list_object_versions").paginate(**ours):
        folders = (entry["Prefix"] for entry in page.get("CommonPrefixes", ()))
        others |= dict.fromkeys(folder for folder in folders if folder not in _OUR_FOLDERS)
        others |= dict.fromkeys(entry["Key"] for entry in page.get("Versions", ()))
    told = [f"the checkpoints, results and records of {_some(jobs)}"] if jobs else []
    return (*told, *([f"what is not gpucloud's own: {_some(tuple(others))}"] if others else ()))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(brief, names[:_SHOWN])) + more


def _empty(s3: Any, name: str, account: str) -> None:
    ours = {"Bucket": name, "ExpectedBucketOwner": account}
    for batch in _batches(s3, name, account):
        reply = s3.delete_objects(**ours, Delete={"Objects": batch, "Quiet": True})
        for problem in reply.get("Errors", ()):
            raise botocore.exceptions.ClientError({"Error": problem}, "DeleteObjects")
    for page in s3.get_paginator("list_multipart_uploads").paginate(**ours):
        for part in page.get("Uploads", ()):
            s3.abort_multipart_upload(**ours, Key=part["Key"], UploadId=part["UploadId"])


def _batches(s3: Any, name: str, account: str) -> Iterator[list[dict[str, str]]]:
    """Yield every version and delete marker, up to a thousand at a time."""
    pages = s3.get_paginator("list_object_versions").paginate(
        Bucket=name, ExpectedBucketOwner=account, PaginationConfig={"PageSize": _BATCH}
    )
    for page in pages:
        found = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
        if found:
            yield [{"Key": entry["Key"], "VersionId": entry["VersionId"]} for entry in found]
