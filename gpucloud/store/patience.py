"""What an answer of S3 to a part means, and how long to wait before the next try."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from enum import Enum

TRIES = 8
"""Of each part. Their waits are 11 s together on average and 22 s at most; a save on a notice has 90 s."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
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


def waits(dice: random.Random) -> Iterator[float | None]:
    """Yield the seconds to wait after each failed try, None after the last (AWS's "full jitter")."""
    for number in range(TRIES - 1):
        yield dice.uniform(0, min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**number))
    yield None
