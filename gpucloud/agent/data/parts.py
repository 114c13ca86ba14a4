"""A large file on its way: parts written at their places, and a journal of those that are there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from gpucloud.domain.data import RESERVED, DataFile
from gpucloud.domain.errors import StoreError

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
