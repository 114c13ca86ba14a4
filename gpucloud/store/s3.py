"""The object store in S3, or in anything that speaks its protocol with conditional writes."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from gpucloud.domain.errors import CredentialsError, StoreError, ToolMissing
from gpucloud.domain.parts import Sums, sums_of
from gpucloud.store.contract import Conflict, Stored, checked

_CONDITION_FAILED = {"PreconditionFailed", "412"}
# Another write of the object is under way: nothing is decided, and S3 asks to try again (PutObject, 409).
_COLLIDED = {"ConditionalRequestConflict", "409"}
_COLLISION_WAITS_S = (0.05, 0.1, 0.2, 0.4, 0.8)
_MISSING = {"NoSuchKey", "404"}
_UNKNOWN_CALLER = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
}
_BUSY = {"SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestTimeout", *_COLLIDED}
_HINTS = {
    "NoSuchBucket": "make the bucket, or correct the store's URL",
    "AccessDenied": "let this identity get, put, list and delete objects below the store's prefix",
    "403": "let this identity get, put, list and delete objects below the store's prefix",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "NotImplemented": "this endpoint lacks conditional writes: use one that has If-None-Match and If-Match",
}
_AT_ONCE = 64 * 2**20  # larger objects go up in parts, several at a time


class S3Store:
    """Objects below `s3://bucket/prefix`. Versions are ETags; store time is the `Date` of the reply.

    `AWS_ENDPOINT_URL` and everything else of the AWS environment is honoured. Raises CredentialsError when the
    caller is unknown, ToolMissing without boto3, StoreError for all else.
    """

    def __init__(self, url: str, *, profile: str | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
        try:
            import boto3.exceptions  # noqa: PLC0415 - late: nodes and scripts without S3 do not have it
            import boto3.session  # noqa: PLC0415
            import botocore.config  # noqa: PLC0415
            import botocore.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise ToolMissing(f"{url} needs boto3", hint="pip install boto3") from error
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._sleep = sleep
        self._bucket = parts.netloc
        self._prefix = checked(parts.path.strip("/")) + "/" if parts.path.strip("/") else ""
        self._client_error = botocore.exceptions.ClientError
        self._errors = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, boto3.exceptions.Boto3Error)
        with self._explained("open", url):
            session = boto3.session.Session(profile_name=profile, region_name=os.environ.get("AWS_REGION"))
            self._client = make_client(session, botocore.config.Config)

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none."""
        name = self._name(key)
        with self._explained("read", key):
            try:
                reply = self._client.get_object(Bucket=self._bucket, Key=name)
            except self._client_error as error:
                if error_code(error) in _MISSING:
                    return None
                raise
            with contextlib.closing(reply["Body"]) as body:
                data = body.read()
        return Stored(data=data, version=reply["ETag"], modified=reply["LastModified"], store_time=_date(reply))

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,  # noqa: ARG002  the bucket is
    ) -> str:
        """Write the object whole and durably, and return its version; a condition that fails raises `Conflict`."""
        name = self._name(key)
        if not if_absent and if_version is None:
            with self._explained("write", key):
                return self._put_whole(name, data)
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_version}
        body = bytes(data)
        collided = False
        with self._explained("write", key):
            for wait_s in (*_COLLISION_WAITS_S, None):
                try:
                    return str(self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **condition)["ETag"])
                except self._errors as error:
                    if error_code(error) not in _COLLIDED or wait_s is None:
                        return self._version_after(error, key, body, repeated=collided)
                    collided = True
                    self._sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def write(self, key: str, pieces: Sequence[memoryview]) -> Sums:
        """Write the pieces, one after the other, as one object, whole and durably, whatever is there."""
        self.put(key, b"".join(pieces))
        return sums_of(pieces)

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        stored = self.get(key)
        if stored is None or len(stored.data) < at + into.nbytes:
            return False
        into.cast("B")[:] = stored.data[at : at + into.nbytes]
        return True

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted."""
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            names = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return tuple(sorted(name[len(self._prefix) :] for name in names))

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        with self._explained("remove", key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    def _put_whole(self, name: str, data: bytes | memoryview) -> str:
        if len(data) <= _AT_ONCE:
            return str(self._client.put_object(Bucket=self._bucket, Key=name, Body=bytes(data))["ETag"])
        self._client.upload_fileobj(io.BytesIO(data), self._bucket, name)
        return str(self._client.head_object(Bucket=self._bucket, Key=name)["ETag"])

    def _version_after(self, error: Exception, key: str, body: bytes, *, repeated: bool) -> str:
        """Return the version of a conditional write that failed only by its reply; raise Conflict, or the error."""
        failed = error_code(error) in _CONDITION_FAILED | _MISSING
        if failed and not (repeated or _retried(error)):
            raise Conflict(key) from error
        # The reply to an earlier try may have been lost: then what is there is what we wrote.
        version = self._version_if_equal(self._name(key), body)
        if version is not None:
            return version
        if failed:
            raise Conflict(key) from error
        raise error

    def _version_if_equal(self, name: str, data: bytes) -> str | None:
        try:
            reply = self._client.get_object(Bucket=self._bucket, Key=name)
        except self._client_error as error:
            if error_code(error) in _MISSING:
                return None
            raise
        with contextlib.closing(reply["Body"]) as body:
            return str(reply["ETag"]) if body.read() == data else None

    @contextlib.contextmanager
    def _explained(self, verb: str, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            code = error_code(error)
            # botocore's own classes for credentials that it cannot find or refresh, SSO included.
            if code in _UNKNOWN_CALLER or any(
                word in type(error).__name__ for word in ("Credential", "Profile", "SSO", "Token")
            ):
                message = f"cannot {verb} {what} in {self.url}: {error}"
                raise CredentialsError(message, hint="log in to AWS: `aws configure` or `aws sso login`") from error
            hint = _HINTS.get(code, "check the network and the store's URL, then try again")
            message = f"cannot {verb} {what} in {self.url}: {error}"
            raise StoreError(message, hint=hint, may_pass=may_pass(error)) from error


def make_client(session: Any, config: Any, *, connections: int = 10, region: str | None = None) -> Any:
    """Return a client for AWS's S3 or another server's, which `connections` threads may share."""
    timing = config(connect_timeout=5, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})
    timing = timing.merge(config(max_pool_connections=connections))
    client = session.client("s3", config=timing, region_name=region)
    if ".amazonaws." in client.meta.endpoint_url:
        return client
    client.close()
    # Other servers answer 501 or MissingContentLength to botocore's default trailing checksums, and seldom have
    # a host name for each bucket.
    plain = config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    return session.client("s3", config=timing.merge(plain), region_name=region)


def error_code(error: Any) -> str:
    """Return S3's own code of a refusal; empty for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def may_pass(error: Any) -> bool:
    """Whether the server was busy or could not be reached, rather than unwilling."""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return any(word in type(error).__name__ for word in ("Connect", "Timeout", "Endpoint", "HTTPClient"))
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) >= 500 or error_code(error) in _BUSY


def _retried(error: Any) -> bool:
    return bool(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _date(reply: Any) -> datetime:
    header = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(header) if header else datetime.now(timezone.utc)
