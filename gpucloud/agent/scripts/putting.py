"""Puts the newest whole checkpoint back into a script's directory before the script starts."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpucloud.agent.scripts.script import CheckpointLocation, Reporting, Texts, look, move, put_time
from gpucloud.agent.scripts.taking import Answering, Calling, Taking
from gpucloud.domain.checkpoint.directory import (
    OURS,
    Listing,
    Signature,
    above,
    beside,
    files_for,
    folder_of,
    inside,
    named_by,
    readdressed,
    written_before,
)
from gpucloud.domain.checkpoint.layouts import (
    Additions,
    KeepOrder,
    Rule,
    checkpoints_of,
    find_sets,
    leftovers,
    newest_checkpoint,
)
from gpucloud.domain.checkpoint.manifest import Commit, Counts, Manifest, Piece
from gpucloud.domain.checkpoint.objects import PART_BYTES
from gpucloud.domain.errors import StoreError
from gpucloud.store.checkpoints import all_damaged
from gpucloud.system.retries import Retry
from gpucloud.system.wholefile import read_text, write_whole

_READERS = 4
_OUTAGE = Retry(first_s=1.0, tries=6)
_Answer = TypeVar("_Answer")
_NUMBERED = re.compile(r".*\d$")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A commit whose files lie beside the directory, not yet in it."""

    commit: Commit
    paths: tuple[str, ...]
    pieces: tuple[Piece, ...]
    counts: Counts = Counts.STEPS


def patiently(work: Callable[[], _Answer]) -> _Answer:
    """Return what it returns. An outage is no damage: it is waited for, for half a minute. Raises StoreError."""
    tries = _OUTAGE.begin()
    while True:
        try:
            return work()
        except StoreError as error:
            if not error.may_pass or not tries.again():
                raise


class Directory:
    """A script's directory on this node; what we need beside it lies in the code folder, under a name of ours.

    A script may take an empty folder for a new run, so that nothing of ours is in its directory.
    """

    def __init__(self, path: Path, code: Path, rule: Rule) -> None:
        self.path = path
        self.rule = rule
        self._code = code
        self._own = code / f"{OURS}kept"
        self._before = self._own / "before.json"
        self._incoming = self._own / "incoming"
        self._aside = self._own / "aside"

    def fetch_newest(self, location: CheckpointLocation, say: Say, *, whole: bool = False) -> Fetched | None:
        """Return the newest commit whose files are now beside the directory, None without any.

        With `whole`, the files that only other nodes get are read too. Raises UsageError where none of those that are
        there can be used, StoreError, OSError.
        """
        passed = 0

        def pass_over(commit: Commit, why: str = "damaged") -> None:
            nonlocal passed
            passed += 1
            say(f"checkpoint {commit.step} is {why}: passed over")

        for manifest in location.checkpoints.candidates(pass_over):
            if files_for(manifest, self.rule.node) is None:
                pass_over(manifest.commit, "none of a script's directory")
                continue
            found = self.fetch(location, manifest)
            if found is not None and (not whole or _are_whole(location, manifest, found)):
                return found
            pass_over(manifest.commit)
        if passed:
            raise all_damaged(passed)
        return None

    def fetch(self, location: CheckpointLocation, manifest: Manifest) -> Fetched | None:
        """Return the commit once this node's files of it are beside the directory; None when one is damaged."""
        files = files_for(manifest, self.rule.node)
        shutil.rmtree(self._incoming, ignore_errors=True)
        if files is None:
            return None
        pieces, targets = tuple(piece for _, piece in files), [self._incoming / path for path, _ in files]
        if not _fetched(location, pieces, targets):
            return None
        for target, written_ns in zip(targets, written_before(time.time_ns(), pieces), strict=True):
            put_time(target, written_ns)
        paths = tuple(path for path, _ in files)
        return Fetched(commit=manifest.commit, paths=paths, pieces=pieces, counts=manifest.counts)

    def place(self, found: Fetched | None, say: Say) -> Commit | None:
        """Put into the directory what was fetched and return its commit. Raises OSError.

        What an earlier attempt left there and never was committed is set aside: a script would resume from it, and
        other nodes do not have it. What came with the code stays, and so does everything that is no checkpoint.
        """
        paths = found.paths if found else ()
        self._set_aside(paths, self._shipped(), say)
        for path in paths:
            self._place(path)
        self._readdress(paths)
        self._put_times_of_folders(paths)
        shutil.rmtree(self._incoming, ignore_errors=True)
        return found.commit if found else None

    def newest(self, found: Fetched) -> str:
        """Return the path of the newest checkpoint that was put back, as a script in the code folder names it."""
        listing = {path: about for path, about in look(self.path).items() if path in set(found.paths)}
        top = newest_checkpoint(self.rule, listing)
        return os.path.normpath(os.path.join(os.path.relpath(self.path, self._code), top))  # noqa: PTH118

    def forget_aside(self) -> None:
        """Free the disk of what was set aside: the script has saved since."""
        shutil.rmtree(self._aside, ignore_errors=True)

    def _shipped(self) -> dict[str, Signature]:
        """Return what was in the directory before the first attempt here."""
        with contextlib.suppress(ValueError, TypeError):
            rows = json.loads(read_text(self._before) or "")
            return {path: Signature(*numbers) for path, numbers in rows.items()}
        found = look(self.path)
        rows = {path: [one.size, one.mtime_ns, one.inode] for path, one in found.items()}
        self._own.mkdir(parents=True, exist_ok=True)
        write_whole(self._before, json.dumps(rows))
        return found

    def _set_aside(self, restored: tuple[str, ...], shipped: dict[str, Signature], say: Say) -> None:
        listing = look(self.path)
        own = {path for path, signature in listing.items() if shipped.get(path) == signature}
        left = set(leftovers(self.rule, listing, restored)) - own  # logs stay, and all else that is no checkpoint
        doomed = sorted(left | (self._pointing_only_at(left, listing) - own - set(restored)))
        if doomed:
            shutil.rmtree(self._aside, ignore_errors=True)
            say(f"set aside what was never saved: {_brief(doomed)}")
        for path in doomed:
            move(self.path / path, self._aside / path)
        if shipped.keys() != listing.keys() or restored:
            _drop_empty(self.path)

    def _pointing_only_at(self, gone: set[str], listing: Listing) -> set[str]:
        """Return the small files that name nothing but checkpoints that are not to be there any more."""
        sets = find_sets(self.rule, listing).sets
        checkpoints = checkpoints_of(sets, listing)
        texts = Texts().of(self.path, beside(sets, listing, checkpoints), listing)
        named = {path: named_by(text, folder_of(path), checkpoints) for path, text in texts.items()}
        lost = {top for top, paths in checkpoints.items() if not gone.isdisjoint(paths)}
        return {path for path, tops in named.items() if tops and lost.issuperset(tops)}

    def _readdress(self, paths: tuple[str, ...]) -> None:
        """Have what names a checkpoint by its whole path lead to where that lies on this machine."""
        listing = {path: about for path, about in look(self.path).items() if path in set(paths)}
        sets = find_sets(self.rule, listing).sets
        checkpoints = checkpoints_of(sets, listing)
        near = (*beside(sets, listing, checkpoints), *inside(sets, listing))
        for path, text in Texts().of(self.path, near, listing).items():
            now = readdressed(text, folder_of(path), str(self.path), checkpoints)
            if now != text:
                (self.path / path).write_bytes(now.encode())
                put_time(self.path / path, listing[path].mtime_ns)

    def _put_times_of_folders(self, paths: tuple[str, ...]) -> None:
        """Have each folder be as new as the newest file in it, as it was when the script had just written that."""
        newest: dict[str, int] = {}
        for path in paths:
            written_ns = (self.path / path).stat().st_mtime_ns
            for folder in above(path):
                newest[folder] = max(written_ns, newest.get(folder, 0))
        for folder, written_ns in newest.items():
            put_time(self.path / folder, written_ns)

    def _place(self, path: str) -> None:
        """Never write through a link: it may lead elsewhere."""
        folder = self.path
        folder.mkdir(parents=True, exist_ok=True)
        for part in path.split("/")[:-1]:
            folder /= part
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                folder.unlink()
            folder.mkdir(exist_ok=True)
        move(self._incoming / path, self.path / path)


def _fetched(location: CheckpointLocation, pieces: tuple[Piece, ...], targets: list[Path]) -> bool:
    """Whether every object arrived as it was written, in a file each."""
    with ThreadPoolExecutor(_READERS) as pool:
        jobs = [pool.submit(_fetch, location, p, t) for p, t in zip(pieces, targets, strict=True)]
        return all(job.result() for job in jobs)


def _fetch(location: CheckpointLocation, piece: Piece, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w+b") as file:
        if piece.size == 0:
            return location.get(piece.key) is not None
        file.truncate(piece.size)
        with mmap.mmap(file.fileno(), piece.size) as mapped, memoryview(mapped) as whole:
            for number, crc32 in enumerate(piece.crc32):
                with whole[number * PART_BYTES : (number + 1) * PART_BYTES] as part:
                    if not location.read_into(piece.key, number * PART_BYTES, part) or zlib.crc32(part) != crc32:
                        return False
    return True


def _are_whole(location: CheckpointLocation, manifest: Manifest, found: Fetched) -> bool:
    """Whether the objects that were not fetched are as they were written too."""
    room, fetched = bytearray(PART_BYTES), set(found.pieces)
    for piece in manifest.pieces:
        if piece in fetched:
            continue
        if piece.size == 0 and location.get(piece.key) is None:
            return False
        for number, crc32 in enumerate(piece.crc32):
            with memoryview(room)[: min(PART_BYTES, piece.size - number * PART_BYTES)] as part:
                read = location.read_into(piece.key, number * PART_BYTES, part)
                if not read or zlib.crc32(part) != crc32:
                    return False
    return True


def _drop_empty(directory: Path) -> None:
    """Remove numbered folders without a file: `checkpoint-600/` that was just made is nobody's newest."""
    for folder, _, _ in sorted(os.walk(directory), reverse=True):
        if folder != str(directory) and _NUMBERED.match(folder):
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106


def _brief(paths: Iterable[str]) -> str:
    first, *more = sorted({path.split("/")[0] for path in paths})
    return f"{first} and {len(more)} more" if more else first


# Where all nodes begin.


_JOIN_S = 0.5


class Stopped(Exception):
    """The end was asked for before anything began."""


class Start:
    """Puts the directory back, from the same commit on every node.

    `base` is the checkpoint that was, and `added` what the launch then gets beside.
    """

    def __init__(self, order: KeepOrder, reporting: Reporting) -> None:
        self._order = order
        self._reporting = reporting
        self._location = CheckpointLocation(order.store, order.prefix, keep=order.keep)
        self._checkpoints = self._location.checkpoints
        self._directory = directory_of(order)
        self._copies = Path(order.folder) / "copies"
        self.base: Commit | None = None
        self.added = Additions()

    def taking(self) -> Taking | None:
        """Return what takes this node's sets, None where they are not wanted. Raises StoreError, OSError, Stopped."""
        order, rule = self._order, self._order.rule
        if order.rank == 0:
            patiently(lambda: self._checkpoints.announce(order.attempt))
        found = patiently(self._newest)
        if rule.per_node and order.rank != 0:
            return self._answering(found)
        base = self._place(found)
        if order.rank != 0:
            return None
        counts = found.counts if found else Counts.STEPS
        self._begin(base, counts)
        kind = Calling if rule.per_node else Taking
        taking = kind(self._location, self._copies, rule, self._reporting.say, base=base)
        taking.counts = counts
        return taking

    def _newest(self) -> Fetched | None:
        # Node 0 says for all that a commit is whole: what others alone will read is read by it too.
        whole = self._order.rule.per_node and self._order.rank == 0
        return self._directory.fetch_newest(self._location, self._reporting.say, whole=whole)

    def _answering(self, found: Fetched | None) -> Answering:
        """Node 0 decides where all begin, and says so by the generation's record."""
        while not patiently(lambda: self._checkpoints.join(self._order.attempt)):
            if self._reporting.stop() is not None:
                raise Stopped
            time.sleep(_JOIN_S)
        base = self._checkpoints.base
        if base != (found.commit if found else None):
            found = None if base is None else patiently(lambda: self._just(base))
        self._place(found)
        rule, attempt = self._order.rule, self._order.attempt
        return Answering(self._location, self._copies, rule, self._reporting.say, attempt=attempt)

    def _place(self, found: Fetched | None) -> Commit | None:
        self.base = self._directory.place(found, self._reporting.say)
        if found is not None and self._order.additions != Additions():
            self.added = self._order.additions.after(self._directory.newest(found))
        return self.base

    def _just(self, base: Commit) -> Fetched:
        manifest = self._checkpoints.manifest(base)
        found = self._directory.fetch(self._location, manifest) if manifest else None
        if found is None:
            raise StoreError(
                f"the checkpoint numbered {base.step}, from which node 0 begins, is not as it was written",
                hint="gpucloud checkpoints --verify says what is damaged",
            )
        return found

    def _begin(self, base: Commit | None, counts: Counts) -> None:
        say = self._reporting.say
        if not self._checkpoints.begin(base=base, attempt=self._order.attempt):
            say("this store ignores conditional writes: two attempts at once would not notice each other")
        if base is not None:
            self._reporting.first_step = base.step + 1
            adds = f"; the script gets {self.added}" if self.added != Additions() else ""
            say(f"put back the checkpoint of {counts.named(base.step)}: best effort, what your script saves{adds}")
        self._reporting.progress(base.step if base else 0, counts)


def directory_of(order: KeepOrder) -> Directory:
    """Return the directory that is kept."""
    return Directory(Path(order.directory), Path(order.code), order.rule)
