"""How much is read at once of what machines say, and of what they or their jobs put into the store.

Whoever runs code there chooses what is said: without a limit, it could fill this machine's memory.
"""

from __future__ import annotations

import re
import zlib
from datetime import datetime
from functools import lru_cache

ANSWER_BYTES = 32 << 20
"""Of one command on a machine, output and errors together; copies ask for half of it."""

STATUS_BYTES = 1 << 20
"""Of a machine's status, and of how a part of an attempt was launched: a few KiB where all is well."""

RECORD_BYTES = 16 << 20
"""Of a record in the store: a state, an order, a manifest, a page of bills. Python takes thirty times as much to read
JSON that was made for it; the state of a thousand machines has 1 MiB, the manifest of 10 TiB has 4."""

NOTES_BYTES = 32 << 20
"""Of what is noted beside the bytes of a job's outputs: some 200,000 files."""

LOG_BYTES = 15 << 20
"""Of a piece of a script's output; pieces are written of 1 MiB, larger ones after a failure of the store alone."""

LOG_TIMES_BYTES = 1 << 20
"""Of the line before a piece that says when it was written."""

KEPT_OUTPUT_BYTES = 1 << 30
"""Of the output of all ranks of an attempt on a machine: what that keeps of it on its disk, and a little more, and so
what can be read of it at the attempt's end."""

OBJECT_BYTES = 256 << 20
"""Of an object that is read whole, and is never JSON; larger ones are read in pieces."""

LISTED_KEYS = 1_000_000
"""Of objects that are listed at once: a job of months has some ten thousands."""

HISTORY_BYTES = 16 << 20
"""Of a piece of a machine's use, unpacked; pieces are written of 1 MiB."""

DATA_SET_BYTES = 1 << 30
"""Of the list of a data set, unpacked: some five million files."""

DIGITS = 20
"""Of a whole number: one of 64 bits has no more."""

COUNTED = 10**15
"""Beyond all that a job counts: its steps, attempts, generations, leases and writes."""

MOST_RANKS = 10**6
"""Of one attempt."""

EARLIEST_YEAR, LATEST_YEAR = 1970, 2500
"""Of a time; times are added to and subtracted from, and years end at 9999."""


def in_calendar(at: datetime) -> bool:
    """Whether sums with that time stay within the calendar."""
    return EARLIEST_YEAR <= at.year <= LATEST_YEAR


_MOST = (
    (r"jobs/[^/]+/outputs/files/.*", OBJECT_BYTES),
    (r"jobs/[^/]+/outputs/notes\.json", NOTES_BYTES),
    (r"jobs/[^/]+/launches/(?:\d+/)?lock\.json", RECORD_BYTES),
    (r"jobs/[^/]+/(?:status|launches)/.*", STATUS_BYTES),
    (r"jobs/[^/]+/logs/.*", LOG_BYTES + LOG_TIMES_BYTES),
    (r"jobs/[^/]+/metrics/.*", HISTORY_BYTES),
    (r"(?:.*/)?gen/\d+(?:\.start)?\.json", STATUS_BYTES),
    (r"clusters/[^/]+/hosts/.*", STATUS_BYTES),
    (r".*\.(?:json|yaml)", RECORD_BYTES),
)
_KINDS = tuple((re.compile(pattern, re.DOTALL), most) for pattern, most in _MOST)


@lru_cache(1024)
def most_of(key: str) -> int:
    """Return how large an object of that key may be to be read whole, by what is kept there."""
    return next((most for kind, most in _KINDS if kind.fullmatch(key)), OBJECT_BYTES)


def unpacked(data: bytes, most: int) -> bytes:
    """Return what zlib or gzip packed. ValueError for anything else, and for more than `most` bytes."""
    packer = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        found = packer.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) > most:
        raise ValueError(f"it unpacks to more than {most} bytes")
    if not packer.eof:
        raise ValueError("it is cut off")
    return found
