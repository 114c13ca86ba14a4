"""Where the Terraform state of a stack on AWS is kept, and what runs Terraform sees of the caller's environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial

import botocore.exceptions

from gpucloud.adapters.aws.faults import known
from gpucloud.adapters.aws.session import Aws
from gpucloud.adapters.terraform.statehome import StateHome, in_bucket, in_directory
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError
from gpucloud.domain.node import Fault
from gpucloud.store import ObjectStore
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.s3 import S3Store

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def terraform_environment(profile: str | None, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for Terraform: with a named profile that profile counts, as it does in boto3."""
    kept = dict(os.environ if env is None else env)
    if profile is None:
        return kept
    return {name: value for name, value in kept.items() if name not in _KEYS} | {"AWS_PROFILE": profile}


def state_home(aws: Aws, store: ObjectStore, name: str) -> StateHome:
    """Return the home of a stack's state in the store."""
    if isinstance(store, DirectoryStore):
        return in_directory(store, name)
    if not isinstance(store, S3Store):
        raise ProvisionError(f"Terraform's state cannot be kept in {store.url}", hint="store: s3://bucket/prefix")
    bucket = store.url.removeprefix("s3://").partition("/")[0]
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    home = in_bucket(store, name, region=bucket_region(aws, bucket), endpoint=endpoint)
    earlier = partial(_earlier, aws, bucket, str(home.backend["s3"]["key"]))
    return in_bucket(store, name, region=home.backend["s3"]["region"], endpoint=endpoint, earlier=earlier)


def bucket_region(aws: Aws, bucket: str) -> str:
    """Return the region that the bucket lies in."""
    client = aws.client("s3")
    try:
        headers = client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"]
    except botocore.exceptions.ClientError as error:
        headers = error.response["ResponseMetadata"].get("HTTPHeaders", {})  # a refusal names the region too
    return str(headers.get("x-amz-bucket-region") or aws.region)


def explain(code: str, words: str) -> GpucloudError | None:
    """Return what the code means, in one line with its next step; None for a code that is not in the table."""
    meaning = known(code)
    if meaning.fault is Fault.UNKNOWN:
        return None
    kind = CredentialsError if meaning.fault is Fault.CREDENTIALS else ProvisionError
    return kind(f"{meaning.line} ({code}: {words})", hint=meaning.step)


def _earlier(aws: Aws, bucket: str, key: str) -> Iterator[bytes]:
    """Give the object's versions, newest first; none where the bucket keeps none."""
    with aws.calling("s3", f"list the versions of {key}") as s3:
        for page in s3.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=key):
            for version in page.get("Versions", ()):
                if version["Key"] == key and version["VersionId"] != "null":
                    reply = s3.get_object(Bucket=bucket, Key=key, VersionId=version["VersionId"])
                    yield reply["Body"].read()
