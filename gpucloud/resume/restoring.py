"""Finds the newest checkpoint that every rank can read whole."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpucloud.domain.manifest import Commit, Manifest, manifest_bytes, read_manifest
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state import Content, read
from gpucloud.store.checkpoints import Checkpoints

# Bytes that are as their manifest says and still no checkpoint, whoever wrote them: JSON of other shapes or nested
# without end, tensors that torch refuses.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint in this rank's memory, as bytes that can be read more than once; `seconds` is what that took."""

    manifest: Manifest
    files: tuple[tuple[str, bytes], ...]
    seconds: float

    @property
    def commit(self) -> Commit:
        """Which one."""
        return self.manifest.commit

    def content(self, rank: int) -> Content:
        """Return what the rank needs, in memory of its own."""
        return read(self.files, rank)


def find(checkpoints: Checkpoints, ranks: Ranks) -> Restored | None:
    """Return the newest checkpoint whose every object is whole, on all ranks the same; None without one.

    Damaged ones are passed over with a line to the user. Raises StoreError when the store does not answer, for an
    outage is no damage.
    """
    began = time.monotonic()
    candidates = checkpoints.candidates(_pass_over) if ranks.rank == 0 else iter(())
    while True:
        proposed = next(candidates, None)
        data = ranks.shared(manifest_bytes(proposed) if proposed else b"")
        if not data:
            return None
        manifest = read_manifest(data)
        found = _whole(checkpoints, manifest, ranks.rank)
        (damaged,) = ranks.highest(int(found is None))
        if found is not None and not damaged:
            return Restored(manifest=manifest, files=found, seconds=time.monotonic() - began)
        if ranks.rank == 0:
            _pass_over(manifest.commit)


def _pass_over(commit: Commit) -> None:
    say(f"the checkpoint of step {commit.step} is damaged: passed over")


def _whole(checkpoints: Checkpoints, manifest: Manifest, rank: int) -> tuple[tuple[str, bytes], ...] | None:
    objects = checkpoints.fetch(manifest)
    if objects is None:
        return None
    files = tuple((piece.key.rpartition("/")[2], data) for piece, data in zip(manifest.pieces, objects, strict=True))
    try:
        read(files, rank)
    except _UNREADABLE:
        return None
    return files
