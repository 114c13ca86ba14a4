"""Large objects between memory and S3: boto3 signs, the parts go over our own connections, several at once.

boto3's own transfers copy each byte several times (measured beside these: `python -m tests.bench transport`). It still
does all that is small, and everything where only it can: behind a proxy, and where a policy forbids signatures in URLs.
"""

from __future__ import annotations

import base64
import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import md5
from typing import Any

from gpucloud.domain.errors import StoreError
from gpucloud.domain.parts import PART_BYTES, Part, Sums, count_of, cut, size_of
from gpucloud.store.pace import Pace
from gpucloud.store.s3client import Door, error_code
from gpucloud.store.s3moves import NOT_THERE, S3Moves, Sent
from gpucloud.store.together import THREADS, all_done
from gpucloud.store.wire import Wire

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

    def write(self, name: str, pieces: Sequence[memoryview]) -> tuple[str, Sums]:
        """Write the pieces, one after the other, as one object; return its ETag and its sums."""
        size = size_of(pieces)
        if count_of(size) > MOST_PARTS:
            raise StoreError(
                f"{name} has {size} bytes: S3 takes {MOST_PARTS * PART_BYTES} in {MOST_PARTS} parts",
                hint="save it as several objects",
            )
        parts = tuple(cut(pieces))
        if len(parts) < 2:
            sent = self.moves.send("put_object", {"Key": name}, parts[0] if parts else ())
            return sent.etag, Sums(size=size, crc32=tuple(sent.crc32 for _ in parts))
        etag, all_sent = self._in_parts(name, parts, again=True)
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

    def _in_parts(self, name: str, parts: tuple[Part, ...], *, again: bool) -> tuple[str, list[Sent]]:
        verified = {"ChecksumAlgorithm": "CRC32"} if self.door.verifies else {}
        made = self.door.client.create_multipart_upload(Bucket=self.door.bucket, Key=name, **verified)
        upload = {"Key": name, "UploadId": made["UploadId"]}

        def send(number: int) -> Sent:
            return self.moves.send("upload_part", {**upload, "PartNumber": number + 1}, parts[number])

        try:
            sent = all_done(send, range(len(parts)), threads=self.threads)
            etag = self._completed(upload, sent, lost_is_none=again)
        except BaseException:
            # What this cannot remove, the bucket's lifecycle does.
            with contextlib.suppress(*self.door.errors):
                self.door.client.abort_multipart_upload(Bucket=self.door.bucket, **upload)
            raise
        return (etag, sent) if etag is not None else self._in_parts(name, parts, again=False)

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
