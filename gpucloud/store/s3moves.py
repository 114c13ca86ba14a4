"""One part of an object between memory and S3: tried until it is there, as far as patience goes."""

from __future__ import annotations

import base64
import contextlib
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpucloud.domain.errors import StoreError
from gpucloud.domain.parts import Part
from gpucloud.store.crc import crc32_of
from gpucloud.store.partfile import PartFile
from gpucloud.store.patience import Meaning, meaning, said, waits
from gpucloud.store.s3client import Door, error_code
from gpucloud.store.wire import FAILURES, Reply, Wire, behind_a_proxy

NOT_THERE = {"NoSuchKey", "404", "InvalidRange", "416"}
_SIGNED_FOR_S = 900  # from the moment of sending; a laptop's clock may be minutes wrong
_AVOIDED_S = 600.0  # how long boto3 does everything, once only it could
_CHUNK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A part that S3 has: its ETag, and the CRC32 of what was sent."""

    etag: str
    crc32: int


@dataclass(slots=True, kw_only=True)
class S3Moves:
    """Sends and receives parts. Raises botocore's errors, and StoreError where the server knows no ranges."""

    door: Door
    wire: Wire
    sleep: Callable[[float], None] = time.sleep
    dice: random.Random = field(default_factory=random.Random)
    avoided_until: float = 0.0

    def __post_init__(self) -> None:
        """Leave a proxy to boto3."""
        if behind_a_proxy(self.door.client.meta.endpoint_url):
            self.avoided_until = float("inf")

    def send(self, operation: str, params: dict[str, Any], part: Part) -> Sent:
        """Send the part as the body of `upload_part` or `put_object`."""
        crc32 = crc32_of(part)
        checked = self.checked(crc32)
        headers = {"x-amz-checksum-crc32": checked["ChecksumCRC32"]} if checked else {}
        reply = self._tried(operation, {**params, **checked}, lambda url: self.wire.put(url, headers, part))
        if reply is not None:
            return Sent(etag=str(reply.headers["ETag"]), crc32=crc32)
        call = getattr(self.door.client, operation)
        done = call(Bucket=self.door.bucket, Body=PartFile(part), **params, **checked)
        self._avoid()
        return Sent(etag=str(done["ETag"]), crc32=crc32)

    def receive(self, name: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        headers = {"Range": _range(at, into)}
        reply = self._tried("get_object", {"Key": name}, lambda url: _got(self.wire.get(url, headers, into), at, into))
        if reply is None:
            found = self._receive_by_boto3(name, at, into)
            self._avoid()
            return found
        if reply.status == 200 and (at > 0 or int(reply.headers.get("Content-Length", 0)) > into.nbytes):
            raise StoreError(
                f"the server gave all of {name} when asked for a range", hint="use an endpoint that knows ranges"
            )
        return reply.filled is not None

    def checked(self, crc32: int) -> dict[str, str]:
        """Return the parameter that has the server compare what it received; none where it would not."""
        return {"ChecksumCRC32": base64.b64encode(crc32.to_bytes(4, "big")).decode()} if self.door.verifies else {}

    def _receive_by_boto3(self, name: str, at: int, into: memoryview) -> bool:
        for wait_s in waits(self.dice):
            try:
                reply = self.door.client.get_object(Bucket=self.door.bucket, Key=name, Range=_range(at, into))
                with contextlib.closing(reply["Body"]) as body:
                    return reply["ContentLength"] == into.nbytes and _copied(body, into)
            except self.door.errors as error:
                if error_code(error) in NOT_THERE:
                    return False
                if hasattr(error, "response") or wait_s is None:  # boto3 has tried refused requests again itself
                    raise
                self.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _tried(self, operation: str, params: dict[str, Any], exchange: Callable[[str], Reply]) -> Reply | None:
        """Return the answer, which says also what is not there; None where only boto3 can ask."""
        if time.monotonic() < self.avoided_until:
            return None
        refused_before = False
        for wait_s in waits(self.dice):
            # Signed just before it is sent: credentials are renewed by boto3 as they come to their end.
            url = self.door.signer.generate_presigned_url(
                operation, Params={"Bucket": self.door.bucket, **params}, ExpiresIn=_SIGNED_FOR_S
            )
            try:
                reply = exchange(url)
            except FAILURES as error:
                failure, what = self.door.cut_off(error), Meaning.BUSY
            else:
                what = meaning(reply.status, reply.body, refused_before=refused_before)
                if what is Meaning.DONE or (what is Meaning.REFUSED and _names(reply) & NOT_THERE):
                    return reply
                failure = self.door.refusal(reply.status, *said(reply.body), operation)
            if what is Meaning.BY_BOTO3:
                return None
            if what is Meaning.REFUSED or wait_s is None:
                raise failure
            refused_before = what is Meaning.UNSIGNED
            if not refused_before:
                self.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _avoid(self) -> None:
        self.avoided_until = max(self.avoided_until, time.monotonic() + _AVOIDED_S)


def _range(at: int, into: memoryview) -> str:
    return f"bytes={at}-{at + into.nbytes - 1}"


def _got(reply: Reply, at: int, into: memoryview) -> Reply:
    """The reply; ConnectionResetError when it ended before its time, or is of another range than the object has."""
    if reply.filled is not None and reply.filled < into.nbytes:
        raise ConnectionResetError("the answer was cut off")
    if reply.status == 206:
        given = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", reply.headers.get("Content-Range", ""))
        if given is None or int(given[1]) != at or int(given[2]) + 1 != min(at + into.nbytes, int(given[3])):
            raise ConnectionResetError("the answer is of another range")
    return reply


def _copied(body: Any, into: memoryview) -> bool:
    at = 0
    for chunk in body.iter_chunks(_CHUNK_BYTES):
        into[at : at + len(chunk)] = chunk
        at += len(chunk)
    return at == into.nbytes


def _names(reply: Reply) -> set[str]:
    code, _ = said(reply.body)
    return {code or str(reply.status)}
