"""Keeps an attempt's output from filling the disk: what is oldest loses its blocks, the file keeps its length."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.untrusted import KEPT_OUTPUT_BYTES

_STEP_BYTES = 64 << 20
_TRIM_EVERY_S = 10.0
_GRACE_S = 5.0  # between saying that bytes go and their going: nobody must read zeros for them
_PUNCH_KEEPING_SIZE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, linux/falloc.h


@dataclass(slots=True)
class _Rank:
    said: int = 0
    said_at_s: float = 0.0
    gone: int = 0


def gone(folder: Path, sizes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return how many bytes of each rank's output are gone already, as an agent finds it that knows nothing of it."""
    found: list[tuple[int, int]] = []
    for rank, size in sizes:
        with contextlib.suppress(OSError), (folder / f"rank-{rank}.log").open("rb") as file:
            if size and (begin := os.lseek(file.fileno(), 0, os.SEEK_DATA)):
                found.append((rank, begin))
    return tuple(found)


class OutputRoom:
    """The output files of one attempt, `rank-<n>.log` in its folder, which workers only append to, and other logs."""

    def __init__(self, folder: Path, *, kept_bytes: int = KEPT_OUTPUT_BYTES, step_bytes: int = _STEP_BYTES) -> None:
        self._folder = folder
        self._kept_bytes = kept_bytes
        self._step_bytes = step_bytes
        self._ranks: dict[int, _Rank] = {}
        self._frees: bool | None = None
        self._trimmed_at_s: float | None = None

    def look(self, sizes: tuple[tuple[int, int], ...], *, now_s: float) -> tuple[tuple[int, int], ...]:
        """Return how many bytes of each rank's output, from its beginning, are gone or will be in a moment."""
        self._trim_others(now_s)
        share = self._kept_bytes // max(1, len(sizes))
        for rank, size in sizes:
            known = self._ranks.setdefault(rank, _Rank())
            too_old = max(0, size - share) // self._step_bytes * self._step_bytes
            if too_old > known.said and self._can_free():
                known.said, known.said_at_s = too_old, now_s
        self.settle(now_s=now_s)
        return tuple((rank, known.said) for rank, known in sorted(self._ranks.items()) if known.said)

    def settle(self, *, now_s: float) -> None:
        """Free what was said to be gone; go on with it when the attempt is over, or the last of it stays."""
        for rank, known in self._ranks.items():
            if known.gone < known.said and now_s - known.said_at_s >= _GRACE_S:
                known.gone = known.said
                _free(self._folder / f"rank-{rank}.log", known.gone)

    def _can_free(self) -> bool:
        """Whether the file system gives blocks back: many a home on a network does not, and then nothing is gone."""
        if self._frees is None:
            try:
                with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".room-") as probe:
                    probe.write(b"x")
                    probe.flush()
                    self._frees = _free(Path(probe.name), 1)
            except OSError:
                return False
        return self._frees

    def _trim_others(self, now_s: float) -> None:
        """Bound what has no end: the launcher's words, what NCCL was told to write (`NCCL_DEBUG=INFO`), old times."""
        if self._trimmed_at_s is not None and now_s - self._trimmed_at_s < _TRIM_EVERY_S:
            return
        self._trimmed_at_s = now_s
        others = (path for name in ("nccl-*.log", "rank-*.times") for path in self._folder.glob(name))
        for path in (*others, self._folder / "launcher.log"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_blocks * 512 > 2 * self._step_bytes and self._can_free():
                    _free(path, status.st_size - self._step_bytes)


def _free(path: Path, length: int) -> bool:
    """Give the first bytes of the file back, and return whether the file system did."""
    allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if allocate is None:
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        if allocate(descriptor, _PUNCH_KEEPING_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(length)) == 0:
            return True
        sys.stderr.write(f"{path}: {os.strerror(ctypes.get_errno())}\n")
        return False
    finally:
        os.close(descriptor)
