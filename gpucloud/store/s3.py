"""The object store in S3, or in anything that speaks its protocol with conditional writes."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums
from gpucloud.domain.errors import CredentialsError, StoreError, ToolMissing
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.untrusted import OBJECT_BYTES, most_of
from gpucloud.store.contract import Conflict, Heard, NoBucket, Stored, TooLarge, checked, unheard, within
from gpucloud.store.parts import Pace
from gpucloud.store.s3client import Door, authorities, error_code, is_aws, make_client, make_signer, may_pass, refusal
from gpucloud.system.retries import Retry

if TYPE_CHECKING:
    from gpucloud.store.s3parts import S3Parts

_CONDITION_FAILED = {"PreconditionFailed", "412"}
# Another write of the object is under way: nothing is decided, and S3 asks to try again (PutObject, 409).
_COLLIDED = {"ConditionalRequestConflict", "409"}
_COLLISION = Retry(first_s=0.05, tries=6)
_MISSING = {"NoSuchKey", "404"}
# What a script calls `state.json`. The bucket's policy cannot tell it from the job's own, which itself is never written
# blindly: IAM's star passes slashes.
_NAMED_AS_A_STATE = re.compile(r"jobs/[^/]+/.+/state\.json$", re.DOTALL)
_UNKNOWN_CALLER = {
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "UnrecognizedClientException",
}
_HINTS = {
    "NoSuchBucket": "make the bucket, or correct the store's URL",
    "AccessDenied": "let this identity get, put, list and delete objects below the store's prefix",
    "403": "let this identity get, put, list and delete objects below the store's prefix",
    "RequestTimeTooSkewed": "set this machine's clock: it differs from the store's by more than 15 minutes",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "NotImplemented": "this endpoint lacks conditional writes: use one that has If-None-Match and If-Match",
}


class S3Store:
    """Objects below `s3://bucket/prefix`. Versions are ETags; store time is the `Date` of the reply.

    `AWS_ENDPOINT_URL` and everything else of the AWS environment is honoured. Raises CredentialsError when the
    caller is unknown, ToolMissing without boto3, StoreError for all else.
    """

    def __init__(
        self,
        url: str,
        *,
        profile: str | None = None,
        bytes_per_s: float | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            import boto3.session  # noqa: PLC0415 - late: nodes and scripts without S3 do not have it
            import botocore.config  # noqa: PLC0415
            import botocore.exceptions  # noqa: PLC0415
            import botocore.session  # noqa: PLC0415
        except ImportError as error:
            raise ToolMissing(f"{url} needs boto3", hint="pip install boto3") from error
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._sleep = sleep
        self._bucket = parts.netloc
        self._prefix = checked(parts.path.strip("/")) + "/" if parts.path.strip("/") else ""
        self._client_error = botocore.exceptions.ClientError
        self._errors = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
        self._cut_off = botocore.exceptions.ConnectionClosedError
        self._config = botocore.config.Config
        self._pace = Pace(bytes_per_s)
        self._made: S3Parts | None = None
        self._making = threading.Lock()
        with self._explained("open", url):
            self._settings = botocore.session.Session(profile=profile)
            region = os.environ.get("AWS_REGION")
            self._session = boto3.session.Session(botocore_session=self._settings, region_name=region)
            self._client = make_client(self._session, self._config)

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store."""
        return self.url

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
                about = Stored(data=b"", version=reply["ETag"], modified=reply["LastModified"], store_time=_date(reply))
                if reply["ContentLength"] > most_of(key):
                    raise TooLarge(key, reply["ContentLength"], about)
                return replace(about, data=body.read())

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
                return self._put_compared(name, data) if _NAMED_AS_A_STATE.match(name) else self._put_whole(name, data)
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_version}
        body = bytes(data)
        collided, tries = False, _COLLISION.begin(self._sleep)
        with self._explained("write", key):
            while True:
                try:
                    return str(self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **condition)["ETag"])
                except self._errors as error:
                    if error_code(error) not in _COLLIDED or not tries.again():
                        return self._version_after(error, key, body, repeated=collided)
                    collided = True

    def write(self, key: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
        """Write the pieces, one after the other, as one object, whole and durably, whatever is there."""
        name = self._name(key)
        with self._explained("write", key):
            return self._parts().write(name, pieces, heard)[1]

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        name = self._name(key)
        with self._explained("read", key):
            return self._parts().read_into(name, at, into)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted; TooMany for more than `LISTED_KEYS`."""
        with self._explained("list", prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            names = (entry["Key"] for page in pages for entry in page.get("Contents", ()))
            return within((name[len(self._prefix) :] for name in names), prefix)

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        with self._explained("remove", key):
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()
        if self._made is not None:
            self._made.close()

    def _name(self, key: str) -> str:
        return self._prefix + checked(key)

    def _put_compared(self, name: str, data: bytes | memoryview) -> str:
        """Write the object whatever is there, by a condition that holds: gpucloud's own bucket takes no other write."""
        if len(data) > OBJECT_BYTES:
            why = f"{name} has {format_size(len(data))}: of that name, {format_size(OBJECT_BYTES)} is the most"
            raise StoreError(why, hint="have the script give it another name")
        body, tries = bytes(data), _COLLISION.begin(self._sleep)
        while True:
            try:
                version = self._client.head_object(Bucket=self._bucket, Key=name)["ETag"]
            except self._client_error as error:
                if error_code(error) not in _MISSING:
                    raise
                version = None
            condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
            try:
                return str(self._client.put_object(Bucket=self._bucket, Key=name, Body=body, **condition)["ETag"])
            except self._client_error as error:
                if error_code(error) not in _CONDITION_FAILED | _MISSING | _COLLIDED or not tries.again():
                    raise

    def _put_whole(self, name: str, data: bytes | memoryview) -> str:
        if len(data) > PART_BYTES:
            return self._parts().write(name, (memoryview(data),))[0]
        return str(self._client.put_object(Bucket=self._bucket, Key=name, Body=bytes(data))["ETag"])

    def _parts(self) -> S3Parts:
        """What moves large objects; made when the first one comes, for it takes a moment."""
        # Late: HTTP and TLS take longer to import than all else here, and most processes move nothing large.
        from gpucloud.store.s3parts import opened  # noqa: PLC0415

        with self._making:
            if self._made is None:
                trusted = authorities(self._settings)
                self._made = opened(self._door(), authorities=trusted, pace=self._pace, sleep=self._sleep)
            return self._made

    def _door(self) -> Door:
        return Door(
            bucket=self._bucket,
            client=self._client,
            signer=make_signer(self._session, self._config, self._client, self._bucket),
            verifies=is_aws(self._client),
            refusal=lambda *answer: self._client_error(*refusal(*answer)),
            cut_off=lambda error: self._cut_off(endpoint_url=self._client.meta.endpoint_url, error=error),
            errors=self._errors,
        )

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
            same = reply["ContentLength"] == len(data) and body.read() == data
            return str(reply["ETag"]) if same else None

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
            kind = NoBucket if code == "NoSuchBucket" else StoreError
            raise kind(message, hint=hint, may_pass=may_pass(error)) from error


def _retried(error: Any) -> bool:
    return bool(error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


def _date(reply: Any) -> datetime:
    header = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
    return parsedate_to_datetime(header) if header else datetime.now(timezone.utc)
