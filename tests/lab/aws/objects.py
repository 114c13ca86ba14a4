"""Where S3 is stricter than moto: sums of what was sent are checked, conditions hold for parts too, writers collide."""

from __future__ import annotations

import base64
import binascii
import hashlib
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moto.s3.models import s3_backends

from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply
from tests.lab.aws.world import ACCOUNT

_CONDITIONAL = ("PutObject", "CompleteMultipartUpload")
_SUMS: dict[str, Callable[[bytes], bytes]] = {
    "crc32": lambda data: zlib.crc32(data).to_bytes(4, "big"),
    "sha1": lambda data: hashlib.sha1(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


@dataclass(slots=True)
class Collisions:
    """A share of all conditional writes that another writer's is under way with: 409, and nothing is written."""

    share: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def refused(self, call: Call, environ: dict[str, Any]) -> Reply | None:
        """Return ConditionalRequestConflict for this write, or None."""
        conditional = environ.get("HTTP_IF_MATCH") or environ.get("HTTP_IF_NONE_MATCH")
        if call.service != "s3" or call.action not in _CONDITIONAL or not conditional:
            return None
        if self.random.random() >= self.share:
            return None
        message = "The conditional request cannot succeed due to a conflicting operation against this resource."
        return faults.error("s3", "ConditionalRequestConflict", message, 409)


def refused(call: Call, environ: dict[str, Any], body: bytes) -> Reply | None:
    """Return the refusal of an upload whose sums differ from its bytes, or whose condition moto would not look at."""
    if call.service != "s3" or not call.params.get("Key"):
        return None
    if call.action in ("PutObject", "UploadPart"):
        return _spoiled(environ, body)
    return _unmet(call, environ) if call.action == "CompleteMultipartUpload" else None


def _spoiled(environ: dict[str, Any], body: bytes) -> Reply | None:
    data, trailer = _decoded(environ, body)
    said = {**_headers(environ), **trailer}
    md5 = environ.get("HTTP_CONTENT_MD5")
    if md5 is not None and _bytes(md5) is None:
        return _bad("InvalidDigest", "The Content-MD5 you specified was invalid.")
    if md5 is not None and _bytes(md5) != hashlib.md5(data).digest():
        return _bad("BadDigest", "The Content-MD5 you specified did not match what we received.")
    for name, sum_of in _SUMS.items():
        if name in said and _bytes(said[name]) != sum_of(data):
            return _bad("BadDigest", f"The {name.upper()} you specified did not match the calculated checksum.")
    signed = environ.get("HTTP_X_AMZ_CONTENT_SHA256", "")
    if re.fullmatch(r"[0-9a-f]{64}", signed) and signed != hashlib.sha256(body).hexdigest():
        return _bad("XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' header does not match.")
    return None


def _headers(environ: dict[str, Any]) -> dict[str, str]:
    start = "HTTP_X_AMZ_CHECKSUM_"
    return {key[len(start) :].lower(): environ[key] for key in environ if key.startswith(start)}


def _decoded(environ: dict[str, Any], body: bytes) -> tuple[bytes, dict[str, str]]:
    """Return the object's bytes, and the sums that follow them where a client sends it in chunks."""
    if not environ.get("HTTP_X_AMZ_CONTENT_SHA256", "").startswith("STREAMING-"):
        return body, {}
    data, rest = b"", body
    while True:
        head, _, rest = rest.partition(b"\r\n")
        size = int(head.split(b";")[0], 16)
        if size == 0:
            break
        data, rest = data + rest[:size], rest[size + 2 :]
    sums = re.findall(rb"x-amz-checksum-(\w+):(\S+)", rest)
    return data, {name.decode().lower(): value.decode() for name, value in sums}


def _unmet(call: Call, environ: dict[str, Any]) -> Reply | None:
    """moto completes an upload whatever the object is by then."""
    bucket = s3_backends[ACCOUNT]["aws"].buckets.get(call.params["Bucket"])
    held = bucket.keys.get(call.params["Key"]) if bucket is not None else None
    if_match, if_none_match = environ.get("HTTP_IF_MATCH"), environ.get("HTTP_IF_NONE_MATCH")
    if if_match is not None and held is None:
        return faults.error("s3", "NoSuchKey", "The specified key does not exist.", 404)
    differs = if_match is not None and held is not None and if_match.strip('"') != held.etag.strip('"')
    if differs or (if_none_match == "*" and held is not None):
        return faults.error("s3", "PreconditionFailed", "At least one of the pre-conditions did not hold", 412)
    return None


def _bytes(said: str) -> bytes | None:
    try:
        return base64.b64decode(said, validate=True)
    except (binascii.Error, ValueError):
        return None


def _bad(code: str, message: str) -> Reply:
    return faults.error("s3", code, message, 400)
