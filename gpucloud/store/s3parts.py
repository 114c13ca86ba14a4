"""Large objects between memory and S3: boto3 signs, parts go over our own connections, each tried until it is there.

boto3's own transfers copy each byte several times (measured beside these: `python -m tests.bench transport`). It still
does all that is small, and everything where only it can: behind a proxy, and where a policy forbids signatures in URLs.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import md5
from typing import TYPE_CHECKING, Any

from gpucloud.domain.checkpoint.objects import PART_BYTES, Part, Sums, bytes_in, count_of, cut
from gpucloud.domain.errors import StoreError
from gpucloud.store.contract import Heard, unheard
from gpucloud.store.parts import THREADS, Pace, all_done, crc32_of
from gpucloud.store.s3client import FAILURES, Door, Reply, Wire, behind_a_proxy, error_code
from gpucloud.system.retries import Retry

if TYPE_CHECKING:
    from typing_extensions import Buffer


MOST_PARTS = 10_000  # S3's limit
_MOST_THREADS = 16


def opened(door: Door, *, authorities: str, pace: Pace, sleep: Callable[[float], None]) -> S3Parts:
    """Return what moves the bucket's large objects; StoreError when the CA certificates cannot be read."""
    try:
        wire = Wire(authorities=authorities, pace=pace)
    except OSError as error:
        raise StoreError(
            f"cannot read the CA certificates in {authorities}: {error}", hint="correct AWS_CA_BUNDLE or `ca_bundle`"
        ) from error
    # One connection to S3 gives some 90 MB/s (S3 user guide, "performance design patterns").
    threads = min(_MOST_THREADS, max(THREADS, os.cpu_count() or THREADS))
    return S3Parts(door=door, moves=S3Moves(door=door, wire=wire, sleep=sleep), threads=threads)


@dataclass(slots=True, kw_only=True)
class S3Parts:
    """Moves objects of one bucket. Raises botocore's errors, and StoreError for what S3 cannot do."""

    door: Door
    moves: S3Moves
    threads: int = THREADS

    def write(self, name: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> tuple[str, Sums]:
        """Write the pieces, one after the other, as one object; return its ETag and its sums."""
        size = bytes_in(pieces)
        if count_of(size) > MOST_PARTS:
            raise StoreError(
                f"{name} has {size} bytes: S3 takes {MOST_PARTS * PART_BYTES} in {MOST_PARTS} parts",
                hint="save it as several objects",
            )
        parts = tuple(cut(pieces))
        if len(parts) < 2:
            sent = self.moves.send("put_object", {"Key": name}, parts[0] if parts else ())
            heard()
            return sent.etag, Sums(size=size, crc32=tuple(sent.crc32 for _ in parts))
        etag, all_sent = self._in_parts(name, parts, heard, again=True)
        return etag, Sums(size=size, crc32=tuple(sent.crc32 for sent in all_sent))

    def read_into(self, name: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        if not into.nbytes:
            return self._is_there(name, at)
        parts = tuple(cut((into,)))

        def read(number: int) -> bool:
            return self.moves.receive(name, at + number * PART_BYTES, parts[number][0])

        return all(all_done(read, range(len(parts)), threads=self.threads))

    def close(self) -> None:
        """Close the connections."""
        self.moves.wire.close()
        self.door.signer.close()

    def _in_parts(self, name: str, parts: tuple[Part, ...], heard: Heard, *, again: bool) -> tuple[str, list[Sent]]:
        verified = {"ChecksumAlgorithm": "CRC32"} if self.door.verifies else {}
        made = self.door.client.create_multipart_upload(Bucket=self.door.bucket, Key=name, **verified)
        upload = {"Key": name, "UploadId": made["UploadId"]}

        def send(number: int) -> Sent:
            sent = self.moves.send("upload_part", {**upload, "PartNumber": number + 1}, parts[number])
            heard()
            return sent

        try:
            sent = all_done(send, range(len(parts)), threads=self.threads)
            etag = self._completed(upload, sent, lost_is_none=again)
        except BaseException:
            # What this cannot remove, the bucket's lifecycle does.
            with contextlib.suppress(*self.door.errors):
                self.door.client.abort_multipart_upload(Bucket=self.door.bucket, **upload)
            raise
        return (etag, sent) if etag is not None else self._in_parts(name, parts, heard, again=False)

    def _completed(self, upload: dict[str, Any], sent: list[Sent], *, lost_is_none: bool) -> str | None:
        """Return the ETag of the object; None when the upload is gone and nobody can tell what became of it."""
        listed = [
            {"PartNumber": number, "ETag": one.etag, **self.moves.checked(one.crc32)}
            for number, one in enumerate(sent, 1)
        ]
        try:
            reply = self.door.client.complete_multipart_upload(
                Bucket=self.door.bucket, MultipartUpload={"Parts": listed}, **upload
            )
        except self.door.errors as error:
            # The reply may have been lost, and botocore's own second try then meets no such upload.
            found = self._etag_if_ours(upload["Key"], sent)
            if found is not None:
                return found
            if error_code(error) == "NoSuchUpload" and lost_is_none:
                return None
            raise
        return str(reply["ETag"])

    def _etag_if_ours(self, name: str, sent: list[Sent]) -> str | None:
        asked = {"ChecksumMode": "ENABLED"} if self.door.verifies else {}
        try:
            head = self.door.client.head_object(Bucket=self.door.bucket, Key=name, **asked)
        except self.door.errors:
            return None
        etag = str(head["ETag"])
        return etag if etag == _etag_of(sent) or head.get("ChecksumCRC32") == _composite(sent) else None

    def _is_there(self, name: str, size: int) -> bool:
        try:
            head = self.door.client.head_object(Bucket=self.door.bucket, Key=name)
        except self.door.errors as error:
            if error_code(error) in NOT_THERE:
                return False
            raise
        return int(head["ContentLength"]) >= size


def _etag_of(sent: list[Sent]) -> str | None:
    """The ETag of an object in parts, where those of the parts are their MD5s (S3 user guide, "object integrity")."""
    try:
        sums = b"".join(bytes.fromhex(one.etag.strip('"')) for one in sent)
    except ValueError:
        return None
    return f'"{md5(sums, usedforsecurity=False).hexdigest()}-{len(sent)}"'


def _composite(sent: list[Sent]) -> str:
    value = zlib.crc32(b"".join(one.crc32.to_bytes(4, "big") for one in sent))
    return f"{base64.b64encode(value.to_bytes(4, 'big')).decode()}-{len(sent)}"


# One part of an object between memory and S3: tried until it is there, as far as patience goes.


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
        tries = EACH_PART.begin(self.sleep, dice=self.dice)
        while True:
            try:
                reply = self.door.client.get_object(Bucket=self.door.bucket, Key=name, Range=_range(at, into))
                with contextlib.closing(reply["Body"]) as body:
                    return reply["ContentLength"] == into.nbytes and _copied(body, into)
            except self.door.errors as error:
                if error_code(error) in NOT_THERE:
                    return False
                if hasattr(error, "response") or not tries.again():  # boto3 has tried refused requests again itself
                    raise

    def _tried(self, operation: str, params: dict[str, Any], exchange: Callable[[str], Reply]) -> Reply | None:
        """Return the answer, which says also what is not there; None where only boto3 can ask."""
        if time.monotonic() < self.avoided_until:
            return None
        refused_before, tries = False, EACH_PART.begin(self.sleep, dice=self.dice)
        while True:
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
            refused_before = what is Meaning.UNSIGNED
            if what is Meaning.REFUSED or not tries.again(at_once=refused_before):
                raise failure

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


# Memory as the file that boto3 wants to read a body from.


class PartFile(io.RawIOBase):
    """The bytes of a part, to be read and gone back in; copied as they are read, a little at a time."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part
        self._size = bytes_in(part)
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill the buffer as far as one stretch of memory goes; 0 at the end."""
        into = memoryview(buffer).cast("B")
        start = 0
        for view in self._part:
            if self._at < start + len(view):
                found = view[self._at - start :][: len(into)]
                into[: len(found)] = found
                self._at += len(found)
                return len(found)
            start += len(view)
        return 0


# What an answer of S3 to a part means, and how long to wait before the next try.


EACH_PART = Retry(first_s=0.2, longest_s=10.0, tries=8, jitter=True)
"""The waits are 11 s together on average and 22 s at most; a save on a notice has 90 s."""

_BUSY_STATUS = (429, 500, 502, 503, 504)
# RequestTimeout and BadDigest: the connection stalled, or changed a byte on the way.
_BUSY = {"SlowDown", "InternalError", "ServiceUnavailable", "Throttling", "RequestTimeout", "BadDigest"}
_SIGNATURE = {"ExpiredToken", "RequestExpired", "TokenRefreshRequired"}
_ELSEWHERE = {"AuthorizationQueryParametersError", "AuthorizationHeaderMalformed"}


class Meaning(Enum):
    """DONE; BUSY: again after a wait; UNSIGNED: again with a new signature; BY_BOTO3: only boto3 can; REFUSED."""

    DONE = "done"
    BUSY = "busy"
    UNSIGNED = "unsigned"
    BY_BOTO3 = "by boto3"
    REFUSED = "refused"


def meaning(status: int, body: bytes, *, refused_before: bool) -> Meaning:
    """Return what to do about an answer. `refused_before`: the try before this one was UNSIGNED.

    A new signature that is refused as well is the work of a policy that forbids signatures in URLs, or of one that
    forbids the object: boto3's own request tells which. It also follows buckets to their region.
    """
    code, _ = said(body)
    if 200 <= status < 300:
        return Meaning.DONE
    if status in _BUSY_STATUS or code in _BUSY:
        return Meaning.BUSY
    if 300 <= status < 400 or code in _ELSEWHERE:
        return Meaning.BY_BOTO3
    if status == 403 or code in _SIGNATURE:
        return Meaning.BY_BOTO3 if refused_before else Meaning.UNSIGNED
    return Meaning.REFUSED


def said(body: bytes) -> tuple[str, str]:
    """Return the code and the message of a refusal; empty where the body has none."""
    found = [re.search(rb"<%s>([^<]*)</%s>" % (name, name), body) for name in (b"Code", b"Message")]
    code, message = (match[1].decode(errors="replace") if match else "" for match in found)
    return code, message
