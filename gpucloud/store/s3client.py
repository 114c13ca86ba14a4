"""How S3 is spoken to: boto3's clients for AWS's and other servers of its protocol, through them any bucket's objects
(read only), and HTTP for large bodies.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gpucloud.domain.checkpoint.objects import Part, bytes_in
from gpucloud.domain.errors import DataStoreError, StoreError, ToolMissing, UsageError
from gpucloud.domain.job.data import DataFile
from gpucloud.store.parts import Pace

_BUSY = {
    "SlowDown", "RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestTimeout",
    "ConditionalRequestConflict", "409",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A bucket: `client` asks and `signer` signs URLs; `verifies`: the server checks the CRC32s that it is sent.

    `refusal` (status, code, message, operation) and `cut_off` make botocore's errors, so that all of a store's are
    told alike; `errors` are the ones that a client raises.
    """

    bucket: str
    client: Any
    signer: Any
    verifies: bool
    refusal: Callable[[int, str, str, str], Exception]
    cut_off: Callable[[BaseException], Exception]
    errors: tuple[type[Exception], ...]


def make_client(session: Any, config: Any, *, connections: int = 10, region: str | None = None) -> Any:
    """Return a client for AWS's S3 or another server's, which `connections` threads may share."""
    timing = config(connect_timeout=5, read_timeout=60, retries={"mode": "standard", "max_attempts": 5})
    timing = timing.merge(config(max_pool_connections=connections))
    client = session.client("s3", config=timing, region_name=region)
    if is_aws(client):
        return client
    client.close()
    return session.client("s3", config=timing.merge(_plain(config)), region_name=region)


def make_signer(session: Any, config: Any, client: Any, bucket: str) -> Any:
    """Return a client that signs URLs which the endpoint of `client` takes.

    Left alone, botocore signs them as no longer accepted everywhere (version 2), and for a host that sends buckets
    outside us-east-1 elsewhere.
    """
    signing = config(signature_version="s3v4")
    if not is_aws(client):
        return session.client("s3", config=_plain(config).merge(signing))
    if "." not in bucket:
        return session.client("s3", config=signing.merge(config(s3={"addressing_style": "virtual"})))
    # A certificate covers no bucket with a dot in its name; with the endpoint given, the URL has its region's host.
    return session.client("s3", config=signing, endpoint_url=client.meta.endpoint_url)


def authorities(settings: Any) -> str:
    """Return the file of CA certificates that botocore would trust; `settings` is its session."""
    import botocore.httpsession  # noqa: PLC0415 - late, as all of botocore

    named = settings.get_config_variable("ca_bundle")
    return str(named or botocore.httpsession.get_cert_path(verify=True))


def refusal(status: int, code: str, message: str, operation: str) -> tuple[dict[str, Any], str]:
    """Return what botocore's ClientError is made of."""
    told = {"Code": code or str(status), "Message": message}
    return {"Error": told, "ResponseMetadata": {"HTTPStatusCode": status}}, operation


def is_aws(client: Any) -> bool:
    """Whether the client talks to AWS itself."""
    return ".amazonaws." in client.meta.endpoint_url


def error_code(error: Any) -> str:
    """Return S3's own code of a refusal; empty for other errors."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def may_pass(error: Any) -> bool:
    """Whether the server was busy or could not be reached, rather than unwilling."""
    status = _status(error)
    if status is None:
        return any(word in type(error).__name__ for word in ("Connect", "Timeout", "Endpoint", "HTTPClient"))
    return status >= 500 or error_code(error) in _BUSY


def is_full(error: Any) -> bool:
    """Whether the server has no room, whatever it calls that."""
    return _status(error) == HTTPStatus.INSUFFICIENT_STORAGE


def _status(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0) if isinstance(response, dict) else None


def _plain(config: Any) -> Any:
    # Other servers answer 501 or MissingContentLength to botocore's default trailing checksums, and seldom have
    # a host name for each bucket.
    return config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )


# Objects of any bucket, read only: a prefix listed, and ranges of objects that must not have changed.


_CHUNK_BYTES = 1 << 20
_FROZEN = ("GLACIER", "DEEP_ARCHIVE")  # these answer no read before they are restored
_CHANGED = ("PreconditionFailed", "412", "NoSuchKey", "404")
_PERMISSION = {"list": "s3:ListBucket on the bucket", "read": "s3:GetObject on the objects"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What S3 said of an object beside its bytes: how it is encrypted, and whether its ETag is the bytes' MD5."""

    size: int
    etag_is_md5: bool


class Objects:
    """The objects below `s3://bucket/prefix`, for as many threads as `connections`; `region` None: as the bucket says.

    Raises StoreError (which permission is missing, which object changed), ToolMissing without boto3.
    """

    def __init__(
        self, url: str, *, profile: str | None = None, region: str | None = None, connections: int = 10
    ) -> None:
        try:
            import boto3.session  # noqa: PLC0415 - late: who stages nothing from S3 does not have it
            import botocore.config  # noqa: PLC0415
            import botocore.exceptions  # noqa: PLC0415
            import urllib3.exceptions  # noqa: PLC0415
        except ImportError as error:
            raise ToolMissing(f"{url} needs boto3", hint="pip install boto3") from error
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._errors = (
            botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError, urllib3.exceptions.HTTPError,
        )  # fmt: skip
        with self._explained("open", url):
            session = boto3.session.Session(profile_name=profile, region_name=os.environ.get("AWS_REGION"))
            self._client = make_client(session, botocore.config.Config, connections=connections, region=region)

    def region(self) -> str | None:
        """Return the bucket's region; None where the server does not say."""
        with self._explained("list", "the bucket"):
            reply = self._client.head_bucket(Bucket=self._bucket)
        found = reply.get("BucketRegion") or reply["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")
        return str(found) if found else None

    def listed(self) -> tuple[DataFile, ...]:
        """Return every object below the prefix with its path below it; one that is named exactly so is a set of one.

        Raises UsageError for objects in an archive.
        """
        found: list[DataFile] = []
        with self._explained("list", "objects"):
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for page in pages:
                found += [file for entry in page.get("Contents", ()) if (file := self._file(entry))]
        return tuple(found)

    def head(self, key: str, etag: str) -> Head:
        """Return what is to be known before a large object is read."""
        with self._explained("read", key):
            return _head(self._client.head_object(Bucket=self._bucket, Key=key, IfMatch=f'"{etag}"'))

    def part_bytes(self, key: str) -> int:
        """Return the size of the first part of an object that was uploaded in parts."""
        with self._explained("read", key):
            reply = self._client.head_object(Bucket=self._bucket, Key=key, PartNumber=1)
        return int(reply["ContentLength"])

    def read(self, file: DataFile, first: int, length: int) -> Iterator[Head | bytes]:
        """Yield what S3 says of the object, then `length` of its bytes from `first` on, in pieces of at most 1 MiB."""
        ranged = {"Range": f"bytes={first}-{first + length - 1}"} if length != file.size else {}
        with self._explained("read", file.key):
            reply = self._client.get_object(Bucket=self._bucket, Key=file.key, IfMatch=f'"{file.etag}"', **ranged)
            yield _head(reply)
            with contextlib.closing(reply["Body"]) as body:
                while chunk := body.read(_CHUNK_BYTES):
                    yield chunk

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _file(self, entry: dict[str, Any]) -> DataFile | None:
        key, size = str(entry["Key"]), int(entry["Size"])
        below = key == self._prefix or not self._prefix or key.startswith(f"{self._prefix}/")
        if not below or (key.endswith("/") and size == 0):  # a neighbour's name, or what consoles make for a folder
            return None
        if entry.get("StorageClass") in _FROZEN:
            raise UsageError(
                f"data: s3://{self._bucket}/{key} is archived ({entry['StorageClass']})",
                hint=f"aws s3api restore-object --bucket {self._bucket} --key {key} --restore-request Days=7",
            )
        path = key.rpartition("/")[2] if key == self._prefix else key[len(self._prefix) :].lstrip("/")
        return DataFile(path=path, size=size, etag=str(entry["ETag"]).strip('"'), key=key)

    @contextlib.contextmanager
    def _explained(self, verb: str, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            code = error_code(error)
            message = f"cannot {verb} {what} in s3://{self._bucket}: {error}"
            if code in ("AccessDenied", "403") and verb in _PERMISSION:
                raise StoreError(
                    f"{_PERMISSION[verb]} is missing for {self.url}: {error}",
                    hint=f"let this identity have s3:ListBucket on {self._bucket} and s3:GetObject on what is in it",
                ) from error
            if code in _CHANGED and verb == "read":
                message = f"s3://{self._bucket}/{what} is not the object that was listed when the job began: {error}"
                raise StoreError(message, hint="put it back, or give the job another `name:`") from error
            unreached = f"s3://{self._bucket}" if _status(error) is None else None
            hint = "check the name of the bucket and the network, then try again"
            raise DataStoreError(message, hint=hint, may_pass=may_pass(error), unreached=unreached) from error


def _head(reply: dict[str, Any]) -> Head:
    # "Objects encrypted by SSE-C or SSE-KMS have ETags that are not an MD5 digest" (S3 API reference, Object).
    encrypted = str(reply.get("ServerSideEncryption") or "").startswith("aws:kms") or "SSECustomerAlgorithm" in reply
    return Head(size=int(reply["ContentLength"]), etag_is_md5=not encrypted)


# HTTP for large bodies: memory is sent and filled where it lies, over connections that are kept.


FAILURES = (OSError, http.client.HTTPException)
"""What an exchange raises when it broke off: nobody knows whether the server did what it was asked."""

_CONNECT_S, _SILENT_S = 5.0, 60.0
_SLICE_BYTES = 1 << 20  # sent at once: a socket's time limit is for the whole of what it is given
_SAID_BYTES = 1 << 16  # of a refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back: `filled` bytes in the memory that was given, or (None) a body of another length, its start."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes = b""
    filled: int | None = None


class Wire:
    """Connections to servers, for as many threads as use them. `authorities` is a file of CA certificates.

    A connection is for the process that opened it: a forked child opens its own.
    """

    def __init__(self, *, authorities: str | None, pace: Pace) -> None:
        self._tls = ssl.create_default_context(cafile=authorities)
        self._pace = pace
        self._idle: list[tuple[str, http.client.HTTPConnection]] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def put(self, url: str, headers: Mapping[str, str], part: Part) -> Reply:
        """Send the part as the body of a PUT. Raises FAILURES."""
        parts = urlsplit(url)
        sent = {**headers, "Content-Length": str(bytes_in(part))}
        connection = self._connection(parts)
        done = False
        try:
            whole = self._send(connection, parts, sent, part)
            answer = connection.getresponse()
            reply = Reply(status=answer.status, headers=answer.headers, body=answer.read(_SAID_BYTES))
            done = whole and answer.isclosed() and not answer.will_close
            return reply
        finally:
            self._done_with(parts, connection, keep=done)

    def get(self, url: str, headers: Mapping[str, str], into: memoryview) -> Reply:
        """Fill the memory with the body of the answer to a GET, if it fits exactly and is no refusal.

        Raises FAILURES. `filled` is less than promised by `Content-Length` when the connection was cut.
        """
        parts = urlsplit(url)
        connection = self._connection(parts)
        done = False
        try:
            _begin(connection, "GET", parts, headers)
            connection.endheaders()
            answer = connection.getresponse()
            fits = answer.status in (200, 206) and answer.length == into.nbytes
            filled = _fill(answer, into) if fits else None
            body = answer.read(_SAID_BYTES) if not fits else b""
            done = answer.isclosed() and not answer.will_close
            return Reply(status=answer.status, headers=answer.headers, body=body, filled=filled)
        finally:
            self._done_with(parts, connection, keep=done)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _send(
        self, connection: http.client.HTTPConnection, parts: SplitResult, headers: Mapping[str, str], part: Part
    ) -> bool:
        """Return whether all was sent; a server that refuses may say so and close before it has read the body."""
        _begin(connection, "PUT", parts, headers)
        try:
            connection.endheaders()
            for view in part:
                for at in range(0, len(view), _SLICE_BYTES):
                    piece = view[at : at + _SLICE_BYTES]
                    self._pace.wait_for(len(piece))
                    connection.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _connection(self, parts: SplitResult) -> http.client.HTTPConnection:
        place = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            if self._pid != os.getpid():
                self._idle, self._pid = [], os.getpid()
            kept = next((one for one in self._idle if one[0] == place), None)
            if kept is not None:
                self._idle.remove(kept)
        if kept is not None and not _closed_by_peer(kept[1]):
            return kept[1]
        if kept is not None:
            kept[1].close()
        made = (
            http.client.HTTPSConnection(parts.netloc, timeout=_CONNECT_S, context=self._tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(parts.netloc, timeout=_CONNECT_S)
        )
        made.connect()
        made.sock.settimeout(_SILENT_S)
        return made

    def _done_with(self, parts: SplitResult, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        if not keep:
            connection.close()
            return
        with self._lock:
            self._idle.append((f"{parts.scheme}://{parts.netloc}", connection))


def behind_a_proxy(url: str) -> bool:
    """Whether the environment names a proxy for this URL."""
    parts = urlsplit(url)
    if parts.scheme not in urllib.request.getproxies():
        return False
    return not urllib.request.proxy_bypass(parts.hostname or "")


def _begin(connection: http.client.HTTPConnection, method: str, parts: SplitResult, headers: Mapping[str, str]) -> None:
    connection.putrequest(method, f"{parts.path}?{parts.query}", skip_accept_encoding=True)
    for name, value in headers.items():
        connection.putheader(name, value)


def _fill(answer: http.client.HTTPResponse, into: memoryview) -> int:
    filled = 0
    while filled < len(into):
        count = answer.readinto(into[filled:])
        if count == 0:
            break
        filled += count
    return filled


def _closed_by_peer(connection: http.client.HTTPConnection) -> bool:
    """An idle connection has nothing to say but that it ends."""
    if connection.sock is None:
        return True
    with contextlib.suppress(OSError, ValueError):
        waiting = select.poll()
        waiting.register(connection.sock, select.POLLIN)
        return bool(waiting.poll(0))
    return True
