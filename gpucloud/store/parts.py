"""Parts of objects: several moved at once by a few threads, no faster than they may leave; and sums over their bytes.

Between memory and a file each part has its place. Sums are made as quickly as this machine can: fingerprints of tensors
by NumPy, CRC32 by ISA-L.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.checkpoint.objects import (
    ITEM_BYTES,
    NOTHING,
    PART_BYTES,
    Fingerprint,
    Header,
    Part,
    Sums,
    Tensor,
    bytes_in,
    cut,
    fingerprint,
)
from gpucloud.domain.errors import StoreError
from gpucloud.store.contract import Heard, unheard

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 4
"""How many parts move at once; more made neither a disk nor S3 faster, and cost memory."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def all_done(work: Callable[[_Item], _Answer], items: Iterable[_Item], *, threads: int = THREADS) -> list[_Answer]:
    """Return the answers in the items' order; after the first failure nothing new is begun, and that one is raised.

    StoreError where no thread can be started.
    """
    given = list(items)
    if len(given) < 2:
        return [work(item) for item in given]
    # Late: it takes as long to import as the rest of the store, and most objects are small.
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait  # noqa: PLC0415

    with ThreadPoolExecutor(min(threads, len(given))) as pool:
        running = _submitted(pool, work, given)
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        for one in running:
            if one.done() and not one.cancelled() and (error := one.exception()) is not None:
                raise error
        return [one.result() for one in running]


def _submitted(pool: ThreadPoolExecutor, work: Callable[[_Item], _Answer], given: list[_Item]) -> list[Future[_Answer]]:
    try:
        return [pool.submit(work, item) for item in given]
    except RuntimeError as error:  # Python's, where the system gives no thread
        pool.shutdown(wait=True, cancel_futures=True)
        raise StoreError(
            f"several parts are moved at once, and {error}", hint="ulimit -u, or the cgroup's pids.max"
        ) from error


# A bound on how fast bytes leave.


_BURST_S = 0.05  # what may leave at once after a pause, as time at the bound


class Pace:
    """At most `bytes_per_s` for all threads together; None is no bound."""

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = now()

    def wait_for(self, size: int) -> None:
        """Return when that many bytes may leave."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = self._now()
            start = max(self._free_at, now - _BURST_S)
            self._free_at = start + size / self._bytes_per_s
        if start > now:
            self._sleep(start - now)


# Sums over bytes.


_CHUNK_WORDS = 2**17
"""What is read at once: small enough to be read the second time from the processor's cache."""

_ROW_WORDS = 2**11
_ONE = 2  # dimensions that the words of a tensor of one dimension have


def of_object(data: memoryview, header: Header) -> tuple[Fingerprint, ...]:
    """Return those of the object's tensors, in the header's order. ImportError without NumPy."""
    shards: Mapping[str, Any] = json.loads(header.metadata.get("shards", "{}"))
    return tuple(_of(data, header.start, tensor, shards.get(tensor.name)) for tensor in header.tensors)


def torn(data: memoryview, header: Header, stretches: memoryview) -> str | None:
    """Return the first tensor of a stretch of the object that is not what the GPU had; None where all is.

    `stretches` are 64-bit numbers, as they lie behind an object (`domain/checkpoint/objects`). ImportError without
    NumPy.
    """
    import numpy as np  # noqa: PLC0415 - late: the writer starts without it

    told, totals = stretches[: 3 * len(stretches) // 4], stretches[3 * len(stretches) // 4 :]
    for begin, end, width, total in zip(told[::3], told[1::3], told[2::3], totals, strict=True):
        if int(np.frombuffer(data[begin:end], dtype=f"<i{width}").sum(dtype="i8")) != total:
            return next((tensor.name for tensor in header.tensors if header.start + tensor.begin == begin), "?")
    return None


def of_words(words: Any, first: int = 0, last: int = 0) -> Fingerprint:
    """Return that of an array of words that lies in one piece; its last dimension is that of the words in one number.

    `first` and `last` are where the array begins in its whole tensor's first and last dimension.
    """
    if not words.size:
        return NOTHING
    width = words.size // len(words)
    if width > _CHUNK_WORDS:
        return _by_rows(words, first, last)
    together = max(1, _ROW_WORDS // width)
    whole = len(words) // together * together
    return _by_groups(words[:whole], together, first, last) + _by_groups(
        words[whole:], len(words) - whole, first + whole, last + (whole if words.ndim == _ONE else 0)
    )


def words_of(array: Any) -> Any:
    """Return the array (of whole numbers, one for each of the tensor's) as `of_words` takes it."""
    import numpy as np  # noqa: PLC0415 - late: on a rank it may be missing

    numbers = np.ascontiguousarray(array.reshape(array.shape or (1,)))[..., None]
    return numbers if array.dtype.itemsize == 1 else numbers.view(np.int16)


def _of(data: memoryview, start: int, tensor: Tensor, shard: Mapping[str, Any] | None) -> Fingerprint:
    import numpy as np  # noqa: PLC0415 - late: the writer starts without it

    offset: Sequence[int] = shard["offset"] if shard is not None else (0,) * len(tensor.shape)
    flat = np.frombuffer(data[start + tensor.begin : start + tensor.end], dtype=f"<i{ITEM_BYTES[tensor.dtype]}")
    return of_words(words_of(flat.reshape(tensor.shape)), *((offset[0], offset[-1]) if offset else (0, 0)))


def _by_rows(words: Any, first: int, last: int) -> Fingerprint:
    """Return that of an array of long rows, one by one."""
    found = NOTHING
    for at, row in enumerate(words, first + 1):
        one = of_words(row, 0, last)
        found += fingerprint(one.total, at * one.total, one.by_last)
    return found


def _by_groups(words: Any, together: int, first: int, last: int) -> Fingerprint:
    """Return that of an array, read as if so many of its rows were one: neither short rows nor long ones are slow.

    All by 32 bits, in which it is quick; what goes beyond them is not of the fingerprint.
    """
    import numpy as np  # noqa: PLC0415 - late: the writer starts without it

    if not words.size:
        return NOTHING
    groups = words.reshape(len(words) // together, -1)
    columns = np.zeros(groups.shape[1], "i4")
    found, step = NOTHING, max(1, _CHUNK_WORDS // groups.shape[1])
    for at in range(0, len(groups), step):
        wide = groups[at : at + step].astype("i4")
        columns += wide.sum(0, dtype="i4")
        total, by_group = _weighted(wide.sum(1, dtype="i4"))
        found += fingerprint(total, together * (by_group + (at - 1) * total), 0)
    total, by_group = found.total, found.by_first
    by_first = by_group + _weighted(columns.reshape(together, -1).sum(1, dtype="i4"))[1] + first * total
    if words.ndim == _ONE:
        return fingerprint(total, by_first, by_first + (last - first) * total)
    places = columns.reshape(-1, *words.shape[-2:]).sum((0, 2), dtype="i4")
    return fingerprint(total, by_first, _weighted(places)[1] + last * total)


def _weighted(columns: Any) -> tuple[int, int]:
    """Return their sum, and the sum of each times its place, from 1."""
    plain = columns.view("u4")
    return int(plain.sum(dtype="u4")), int((plain * _places(len(columns))).sum(dtype="u4"))


@functools.lru_cache(maxsize=8)
def _places(count: int) -> Any:
    import numpy as np  # noqa: PLC0415 - late: the writer starts without it

    return np.arange(1, count + 1, dtype="u4")


# CRC32, zlib's, as quickly as this machine can: Intel's ISA-L, where it is installed, takes a sixth of zlib's time.


try:
    from isal.isal_zlib import crc32
except ImportError:  # the numbers are the same
    from zlib import crc32


crc32_of = functools.partial(objects.crc32_of, crc32=crc32)
"""`objects.crc32_of`, quicker."""


# Large objects between memory and a file: several parts at once, each at its place, none of them copied.


# A file system that cannot set room aside says so in one of these ways.
_NO_ROOM_KEPT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


def write_parts(descriptor: int, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
    """Fill the empty file with the pieces, one after the other, and return their sums. Raises OSError."""
    parts = tuple(cut(pieces))
    size = bytes_in(pieces)
    if size > PART_BYTES:
        take_room(descriptor, size)

    def write(number: int) -> int:
        _write(descriptor, parts[number], number * PART_BYTES)
        heard()
        return crc32_of(parts[number])

    return Sums(size=size, crc32=tuple(all_done(write, range(len(parts)))))


def read_parts(descriptor: int, at: int, into: memoryview) -> bool:
    """Fill `into` with the file's bytes from `at` on; False when it ends before that. Raises OSError."""
    parts = tuple(cut((into,)))

    def read(number: int) -> bool:
        return _read(descriptor, parts[number][0], at + number * PART_BYTES)

    return all(all_done(read, range(len(parts))))


def take_room(descriptor: int, size: int) -> None:
    """Take the room of a file at once: a full disk is met first, and it lies in few stretches. Raises OSError."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _NO_ROOM_KEPT:
                raise


def _write(descriptor: int, part: Part, at: int) -> None:
    for view in part:
        rest = view
        while rest:
            done = os.pwrite(descriptor, rest, at)
            rest, at = rest[done:], at + done


def _read(descriptor: int, into: memoryview, at: int) -> bool:
    rest = into
    while rest:
        done = os.preadv(descriptor, [rest], at)
        if done == 0:
            return False
        rest, at = rest[done:], at + done
    return True
