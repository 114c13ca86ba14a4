"""Fetches a set's files from S3 into a folder: many at once, large ones in parts, each proven before it counts."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.data import RESERVED, DataFile
from gpucloud.store.s3client import Head, Objects
from gpucloud.system import processes

LARGE_BYTES = 64 << 20
"""From here on an object is fetched in parts at the same time; below, one request each."""

_THREADS = 8
_MOST_PROCESSES = 16
_BATCH_FILES = 64
_BATCH_BYTES = 64 << 20
_SMALL_JOB_BYTES = 32 << 20  # starting processes costs more than it gains
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, prctl(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What was fetched: bytes, files, and how many of those S3 gave nothing but their length to prove them by."""

    size: int = 0
    files: int = 0
    unproven: int = 0

    def __add__(self, other: Fetched) -> Fetched:
        return Fetched(
            size=self.size + other.size, files=self.files + other.files, unproven=self.unproven + other.unproven
        )


def fetch(url: str, region: str | None, files: Sequence[DataFile], folder: Path) -> Fetched:
    """Fetch the files below `folder`; each appears whole. Raises StoreError at the first that cannot be had, OSError.

    Python's interpreter lock holds one process at a few hundred MB/s, so that there is one for each core.
    """
    cores = processes.cpus()
    count = 1 if sum(file.size for file in files) < _SMALL_JOB_BYTES else min(cores, _MOST_PROCESSES)
    total = Fetched()
    with _workers(count, url, region) as pool:
        for done in _done(pool, files, folder):
            total += done
    return total


def _done(pool: Executor, files: Sequence[DataFile], folder: Path) -> Iterator[Fetched]:
    """Yield what each task brought; when one fails, the rest is not begun."""
    # The large ones first: what is left at the end is small, and no core waits long for another.
    large = [file for file in files if file.size >= LARGE_BYTES]
    futures: list[Future[Fetched]] = [pool.submit(_fetch_large, file, folder) for file in large]
    futures += [pool.submit(_fetch_small, batch, folder) for batch in _batches(files)]
    try:
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _batches(files: Sequence[DataFile]) -> Iterator[list[DataFile]]:
    batch: list[DataFile] = []
    size = 0
    for file in files:
        if file.size >= LARGE_BYTES:
            continue
        batch.append(file)
        size += file.size
        if len(batch) >= _BATCH_FILES or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _workers(count: int, url: str, region: str | None) -> Executor:
    if count == 1:
        _begin(url, region, os.getpid())
        return ThreadPoolExecutor(max_workers=1)
    # Forked: nothing here has threads yet, and a spawned process cannot find its main module in a zip.
    fork = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(count, mp_context=fork, initializer=_begin, initargs=(url, region, os.getpid()))


class _Worker:
    """What one process fetches with."""

    objects: Objects
    threads: ThreadPoolExecutor


def _begin(url: str, region: str | None, parent: int) -> None:
    if os.getpid() != parent:
        # A worker must not outlive a killed parent: it would fetch beside the next one.
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    _Worker.objects = Objects(url, region=region, connections=_THREADS)
    _Worker.threads = ThreadPoolExecutor(max_workers=_THREADS)


def _fetch_small(batch: list[DataFile], folder: Path) -> Fetched:
    total = Fetched()
    for done in _Worker.threads.map(lambda file: _fetch_one(file, folder), batch):
        total += done
    return total


def _fetch_one(file: DataFile, folder: Path) -> Fetched:
    place = folder / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    part = beside(place)
    digest, size, head = hashlib.md5(usedforsecurity=False), 0, None
    with part.open("wb", buffering=0) as out:
        for piece in _Worker.objects.read(file, 0, file.size):
            if isinstance(piece, Head):
                head = piece
                continue
            digest.update(piece)
            size += out.write(piece)
    proven = _judge(file, size, digest.hexdigest(), head)
    keep(part, place, file)
    return Fetched(size=size, files=1, unproven=0 if proven else 1)


def _judge(file: DataFile, size: int, md5: str, head: Head | None) -> bool:
    """Return whether the bytes are proven to be the object's; StoreError when they are proven not to be."""
    if size != file.size:
        raise StoreError(f"{file.key}: {size} bytes arrived, {file.size} were listed", may_pass=True)
    if head is None or not head.etag_is_md5 or "-" in file.etag:
        return False
    if md5 != file.etag:
        raise StoreError(f"{file.key} arrived damaged: MD5 {md5}, S3 says {file.etag}", may_pass=True)
    return True


def _fetch_large(file: DataFile, folder: Path) -> Fetched:
    """Fetch the parts that a killed run has not, and prove the whole: by S3's own parts where it was uploaded so."""
    objects = _Worker.objects
    head = objects.head(file.key, file.etag)
    place = folder / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    parts = Parts(place, file, _part_bytes(objects, file) if head.etag_is_md5 else LARGE_BYTES)
    sizes = list(_Worker.threads.map(_filler(parts, file), parts.missing()))
    proven = head.etag_is_md5 and parts.prove()
    keep(parts.path, place, file)
    parts.forget()
    return Fetched(size=sum(sizes), files=1, unproven=0 if proven else 1)


def _part_bytes(objects: Objects, file: DataFile) -> int:
    count = int(file.etag.partition("-")[2] or 0)
    size = objects.part_bytes(file.key) if count else 0
    # Parts of different sizes cannot be told from the listing: then the length must do.
    return size if size and -(-file.size // size) == count else LARGE_BYTES // 4


def _filler(parts: Parts, file: DataFile) -> Callable[[int], int]:
    def fill(index: int) -> int:
        first, length = parts.span(index)
        pieces = _Worker.objects.read(file, first, length)
        return parts.fill(index, (piece for piece in pieces if isinstance(piece, bytes)))

    return fill


def keep(part: Path, place: Path, file: DataFile) -> None:
    """Make proven bytes the file: read-only, and with the time that says so."""
    part.chmod(0o444)
    os.utime(part, (file.stamp_s, file.stamp_s))
    part.replace(place)


# A large file on its way: parts written at their places, and a journal of those that are there.


_READ_BYTES = 8 << 20


def beside(place: Path) -> Path:
    """Return where a file is until it is whole: a name that no other file's is, in a set or on its way."""
    digest = hashlib.sha256(os.fsencode(place.name)).hexdigest()[:32]
    return place.with_name(f"{RESERVED}{digest}.part")


class Parts:
    """One file in parts of `part_bytes`; the journal names the file's identity, so that another's rest is not taken."""

    def __init__(self, place: Path, file: DataFile, part_bytes: int) -> None:
        self.path = beside(place)
        self._journal = self.path.with_suffix(".parts")
        self._file = file
        self._part_bytes = part_bytes
        self._title = f"{file.identity} in parts of {part_bytes}"
        self._done = self._known()
        if not self._done:
            self._start_anew()

    def missing(self) -> list[int]:
        """Return the parts that are not there yet."""
        return [index for index in range(-(-self._file.size // self._part_bytes)) if index not in self._done]

    def span(self, index: int) -> tuple[int, int]:
        """Return where a part begins, and its length."""
        first = index * self._part_bytes
        return first, min(self._part_bytes, self._file.size - first)

    def fill(self, index: int, pieces: Iterable[bytes]) -> int:
        """Write a part, and note it with its MD5 once it is whole; return its length."""
        first, length = self.span(index)
        digest, at = hashlib.md5(usedforsecurity=False), first
        with self.path.open("r+b", buffering=0) as out:
            for piece in pieces:
                os.pwrite(out.fileno(), piece, at)
                digest.update(piece)
                at += len(piece)
        if at - first != length:
            raise StoreError(f"{self._file.key}: {at - first} of {length} bytes arrived from {first}", may_pass=True)
        self._done[index] = digest.hexdigest()
        line = f"{index} {digest.hexdigest()}\n".encode()
        with self._journal.open("ab", buffering=0) as journal:
            journal.write(line)  # one write of a short line: whole or not there, and none tears another's
        return length

    def prove(self) -> bool:
        """Return whether S3's ETag proves the bytes; StoreError, and nothing of them is kept, when it denies them.

        The ETag of an upload in parts is the MD5 of its parts' MD5s, then their number (S3 user guide, Checking object
        integrity); parts that do not match the upload's leave it open.
        """
        etag, _, count = self._file.etag.partition("-")
        if count and int(count) != len(self._done):
            return False
        found = self._md5_of_parts() if count else self._md5_of_all()
        if found == etag:
            return True
        self.forget()
        self.path.unlink()
        raise StoreError(f"{self._file.key} arrived damaged: S3 says {self._file.etag}", may_pass=True)

    def forget(self) -> None:
        """Remove the journal."""
        with contextlib.suppress(FileNotFoundError):
            self._journal.unlink()

    def _md5_of_parts(self) -> str:
        digests = b"".join(bytes.fromhex(self._done[index]) for index in sorted(self._done))
        return hashlib.md5(digests, usedforsecurity=False).hexdigest()

    def _md5_of_all(self) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        with self.path.open("rb", buffering=0) as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def _known(self) -> dict[int, str]:
        try:
            title, *lines = self._journal.read_text().splitlines()
            whole = self.path.stat().st_size == self._file.size
        except (OSError, ValueError):
            return {}
        pairs = [line.split() for line in lines]
        return {int(p[0]): p[1] for p in pairs if len(p) == 2} if whole and title == self._title else {}

    def _start_anew(self) -> None:
        with self.path.open("wb") as file:
            file.truncate(self._file.size)
        self._journal.write_text(f"{self._title}\n")
