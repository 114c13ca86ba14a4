"""A script that saves by itself, as this node sees it: its processes, and the directory in which it saves."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import stat
import struct
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.agent.attempt.composing import MARK, signalled
from gpucloud.domain.checkpoint.directory import OURS, Listing, Signature, above, family, folder_of, last_number
from gpucloud.domain.checkpoint.layouts import SAY_DONE_FILE, SINGLE_FILES, TORCH_FILES, Found, Rule, layout_of
from gpucloud.domain.checkpoint.manifest import CounterDrop, Counts, Why
from gpucloud.domain.job.spec import Layout
from gpucloud.domain.node.status import UNTOLD
from gpucloud.store import ObjectStore, get_small, open_store
from gpucloud.store.checkpoints import Checkpoints, under
from gpucloud.system import processes
from gpucloud.system.wholefile import read_text, write_whole


def tell(folder: Path, name: str, code: Path) -> tuple[int, bool | None]:
    """Send the signal to every rank with a script that heeds it; return to how many it was, and whether they do.

    Where none does, what a script has spawned and heeds it is sent it; without such, or where that cannot be seen
    (None), all scripts, which it ends. Else none that does not heed it: `tee` would end, and `train.py | tee` by that.
    """
    found = signalled(folder, number := signal.Signals[name], code)
    heeding = found.heeding or [(pid,) for pid in _spawned(found.scripts) if processes.handles(pid, number)]
    told = heeding or [(pid,) for pid in found.scripts]
    for pid in {pid for scripts in told for pid in scripts}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    return len(told), found.heeding if found.heeding is None else bool(heeding)


def _spawned(scripts: tuple[int, ...]) -> tuple[int, ...]:
    """Return what they start as `torch.multiprocessing.spawn` does; a script with loaders of data handles SIGCHLD."""
    starting = {pid for pid in scripts if not processes.handles(pid, signal.SIGCHLD)}
    below = [one.pid for one in processes.listing() if one.parent in starting]
    return tuple(pid for pid in below if "--multiprocessing-fork" in processes.command(pid))


def written_to(folder: Path) -> frozenset[int]:
    """Return the inodes of the files that a process of the attempt has open for writing (Linux; elsewhere none)."""
    return frozenset(inode for pid in processes.marked(MARK, str(folder)) for inode in _written_by(pid))


def end(folder: Path) -> None:
    """SIGKILL everything of the attempt but this process."""
    processes.kill_below(os.getpid(), mark=(MARK, str(folder)))


def _written_by(pid: int) -> Iterator[int]:
    for number, _ in processes.open_to_write(pid):
        with contextlib.suppress(OSError):
            about = Path(f"/proc/{pid}/fd/{number}").stat()
            if stat.S_ISREG(about.st_mode):
                yield about.st_ino


# What the checkpoint watcher says: to the user, and to the node's agent.


class Reporting:
    """The attempt's folder, as the agent reads it. A full disk silences what is said, never what is done."""

    def __init__(self, folder: Path, *, rank: int, first_step: int = 1) -> None:
        self.first_step = first_step
        self.counter_drop: CounterDrop | None = None
        self.unsaved: str | None = None
        self._folder = folder
        self._log = folder / f"rank-{rank}.log"
        self._leads = rank == 0
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Tell the user, in the output of the first rank; on other nodes in the launcher's."""
        line = f"gpucloud: {text}\n"
        if not self._leads:
            sys.stderr.write(line)
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(line)
        except OSError:
            sys.stderr.write(line)

    def say_once(self, text: str) -> None:
        """Tell the user, unless this was told before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def progress(self, committed: int, counts: Counts = Counts.STEPS) -> None:
        """Say which step, or save, is in the store, 0 for none: on the first rank's node, whose word it is."""
        if not self._leads:
            return
        self._write(
            "progress.json",
            {
                "step": committed,
                "first_step": self.first_step,
                "phase": UNTOLD,
                "committed_step": committed or None,
                "counts": counts.value,
                **({"counter_drop": asdict(self.counter_drop)} if self.counter_drop is not None else {}),
                **({"unsaved": self.unsaved} if self.unsaved is not None else {}),
                "written_at": time.time(),
            },
        )

    def saving(self, seconds: float) -> None:
        """Say how long it takes from a file at rest to its commit, as the first rank's node knows it."""
        if not self._leads:
            return
        self._write("saving.json", {"seconds": seconds, "step": None})

    def barred(self, why: str) -> None:
        """Say that what was saved could not be read here and now, or the last state not be saved: another may do."""
        self._write("barred-0.json", {"why": why})

    def stop(self) -> datetime | None:
        """Return until when the script may take to leave; None while nobody wants it to."""
        text = read_text(self._folder / "stop.json")
        if text is None:
            return None
        try:
            return datetime.fromisoformat(json.loads(text)["at"])
        except (ValueError, KeyError, TypeError):
            return datetime.now(timezone.utc)

    def why_stop(self) -> Why:
        """Return what the script is to leave for, STOP where that is not told."""
        try:
            return Why(json.loads(read_text(self._folder / "stop.json") or "")["reason"])
        except (ValueError, KeyError, TypeError):
            return Why.STOP

    def _write(self, name: str, content: dict[str, object]) -> None:
        try:
            write_whole(self._folder / name, json.dumps(content))
        except OSError as error:
            sys.stderr.write(f"{name}: {error}\n")


# A script's directory on the disk: listed, judged file by file, copied while the script goes on.


_JSON_BYTES = 256 << 20
_COPY_BYTES = 8 << 20
# Another file system, or one whose kernel cannot: then by our own hands.
_ELSEWHERE = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def look(directory: Path) -> dict[str, Signature]:
    """Return every file below the directory; what goes away meanwhile is not there. Empty for no directory."""
    found: dict[str, Signature] = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(OURS)]
        for name in names:
            path = os.path.join(folder, name)  # noqa: PTH118  thousands of files, several times a second
            try:
                about = os.stat(path)  # noqa: PTH116
            except OSError:
                continue
            if stat.S_ISREG(about.st_mode) and not name.startswith(OURS):
                relative = os.path.relpath(path, directory)
                found[relative] = Signature(size=about.st_size, mtime_ns=about.st_mtime_ns, inode=about.st_ino)
    return found


def is_whole(path: Path) -> bool | None:
    """Whether the file shows by its form that it was written to its end; None where its form does not tell.

    Nothing is unpickled: a zip (torch.save) ends with its directory, safetensors names its length at its beginning,
    JSON can be parsed. OSError when it cannot be read.
    """
    with path.open("rb") as file:
        head = file.read(8)
    if path.suffix == ".safetensors":
        return _is_whole_safetensors(path)
    if head[:4] == b"PK\3\4":
        return _is_whole_zip(path)
    if path.suffix == ".json":
        return _is_json(path)
    return False if path.name.endswith(TORCH_FILES) and len(head) < len(b"PK\3\4") else None


class Texts:
    """The texts of small files, each read again when it has changed."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, str]] = {}

    def of(self, directory: Path, paths: Iterable[str], listing: Listing) -> dict[str, str]:
        """Return what is in each of the files that is a text, and as it is listed."""
        kept = {path: self._known(directory, path, listing[path]) for path in paths}
        self._read = {path: (listing[path], text) for path, text in kept.items() if text is not None}
        return {path: text for path, (_, text) in self._read.items()}

    def _known(self, directory: Path, path: str, signature: Signature) -> str | None:
        known = self._read.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        try:
            with (directory / path).open("rb") as file:
                same = _signature(os.fstat(file.fileno())) == signature
                return file.read(signature.size).decode() if same else None
        except (OSError, UnicodeDecodeError):
            return None


def copy(directory: Path, content: Iterable[tuple[str, Signature]], into: Path) -> bool:
    """Copy the files below `into`, with their times; False when one is not, or is no longer, what it was listed as."""
    rows = tuple(content)
    for path, signature in rows:
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (directory / path).open("rb") as source, target.open("wb") as copied:
                same = _signature(os.fstat(source.fileno())) == signature
                if not same or not _copied(source.fileno(), copied.fileno(), signature.size):
                    return False
                put_time(target, signature.mtime_ns)
        except FileNotFoundError:
            return False
    return all(_still(directory / path, signature) for path, signature in rows)


def put_time(path: Path, mtime_ns: int) -> None:
    """Have the file or folder be last written then. OSError."""
    os.utime(path, ns=(mtime_ns, mtime_ns))


def move(source: Path, target: Path) -> None:
    """Move a file with its time, whatever lies at its target, to another file system too. OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    try:
        source.replace(target)
    except OSError:
        shutil.move(source, target)


def _is_whole_zip(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            end = archive.start_dir
            return all(entry.header_offset + 30 + entry.compress_size <= end for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError):
        return False


def _is_whole_safetensors(path: Path) -> bool:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == len(b"8 bytes.") else size
        if 8 + length > size:
            return False
        try:
            entries = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            return bool(8 + length + max(ends, default=0) == size)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
            return False


def _is_json(path: Path) -> bool | None:
    if path.stat().st_size > _JSON_BYTES:
        return None
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


def _copied(source: int, target: int, size: int) -> bool:
    """Copy `size` bytes, by the kernel where it can (some file systems then share the blocks); False for fewer."""
    done = 0
    while done < size:
        count = _some(source, target, min(_COPY_BYTES, size - done))
        if count == 0:
            return False
        done += count
    return True


def _some(source: int, target: int, size: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            return os.copy_file_range(source, target, size)
        except OSError as error:
            if error.errno not in _ELSEWHERE:
                raise
    data = os.read(source, size)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


def _still(path: Path, signature: Signature) -> bool:
    try:
        return _signature(path.stat()) == signature
    except OSError:
        return False


def _signature(about: os.stat_result) -> Signature:
    return Signature(size=about.st_size, mtime_ns=about.st_mtime_ns, inode=about.st_ino)


# Where a directory's checkpoints are: their store, and the prefix below which they lie in it.


class CheckpointLocation:
    """One job's checkpoints in the store at that URL, of which `keep` stay. Every call may raise StoreError."""

    def __init__(self, url: str, prefix: str, *, keep: int) -> None:
        self.store: ObjectStore = open_store(url)
        self.checkpoints = Checkpoints(self.store, prefix, keep=keep)
        self._prefix = prefix

    def key(self, name: str) -> str:
        """Return the key of an object in the store, by its name below the prefix."""
        return under(self._prefix, name)

    def get(self, name: str) -> bytes | None:
        """Return a small object, None when there is none; one that is too large has no bytes."""
        stored = get_small(self.store, self.key(name))
        return stored.data if stored else None

    def put(self, name: str, data: bytes, *, if_absent: bool = False) -> None:
        """Write a small object whole. Raises Conflict with `if_absent` when it is there."""
        self.store.put(self.key(name), data, if_absent=if_absent)

    def read_into(self, name: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        return self.store.read_into(self.key(name), at, into)


# Why files in a script's own directory are no checkpoint.


_ARRAYS = (".bin", ".npz", ".pkl")
_OFTEN = (*SINGLE_FILES, *_ARRAYS, ".distcp", ".h5", ".msgpack")
"""How the names of files end that are mostly a part of one."""
_OF_OTHERS = (*_OFTEN, ".npy", ".zip", ".joblib", ".keras", ".pdparams", ".params", ".eqx", ".model")
"""How the names of those end besides that may be one, where a script writes them again and again."""
_NAMED_AS_ONE = re.compile(r"(?<![a-z])(?:model|param|weight|ckpt|checkpoint|state)s?(?![a-z])")
_WHOLE = {
    Layout.HF: "`checkpoint-STEP/` with `trainer_state.json`, and with each rank's `rng_state_RANK.pth` if with any",
    Layout.DEEPSPEED: "`global_stepSTEP/` with `latest` beside it, written after it",
    Layout.MEGATRON: "`iter_STEP/`, of 7 digits, with `latest_checkpointed_iteration.txt` beside it, written after it",
    Layout.DCP: "a folder of `*.distcp` with `.metadata`, written after them",
    Layout.LIGHTNING: "`*.ckpt`",
    Layout.FILE: f"a file `*{'`, `*'.join(SINGLE_FILES)}`",
}


class Rewritten:
    """Files that a script writes again, or that another takes the place of: so are checkpoints, and data is not."""

    def __init__(self) -> None:
        self._rested: dict[str, Signature] = {}

    def look(self, listing: Listing, since_ns: int, rested_ns: int) -> frozenset[str]:
        """Return those that are there; `rested_ns` is since when a file that is whole has not changed."""
        listed = {path: at for path, at in listing.items() if path.endswith(_OF_OTHERS) and ".tmp" not in path}
        new = {path: at for path, at in listed.items() if at.mtime_ns >= since_ns}
        gone = {family(path) for path in self._rested.keys() - new.keys()}
        anew = {path for path in new if self._rested.get(path, new[path]) != new[path]}
        again = frozenset(path for path in new if family(path) in gone or (path in anew and _is_named_as_one(path)))
        self._rested |= {path: at for path, at in new.items() if at.mtime_ns <= rested_ns}
        return again


def _is_named_as_one(path: str) -> bool:
    """Whether a file that is written anew is a checkpoint by its name, where that alone tells: losses are arrays."""
    return not path.endswith((*_ARRAYS, ".npy")) or _NAMED_AS_ONE.search(Path(path).name.lower()) is not None


def why_none(
    rule: Rule,
    found: Found,
    listing: Listing,
    since_ns: int = 0,
    until_ns: int | None = None,
    again: frozenset[str] = frozenset(),
) -> str | None:
    """Return what was written since then that looks like a checkpoint, and what a whole one has.

    None where one is whole, or nothing looks like one; what is `unclear` says so itself. With `until_ns`, while the
    script runs, it is what came to rest by then, or was written `again`.
    """
    new = [path for path, about in listing.items() if about.mtime_ns >= since_ns]
    often = sorted(path for path in new if path.endswith(_OFTEN))
    sets = [one for one in found.sets if not since_ns or not set(new).isdisjoint(one.paths)]
    if until_ns is not None:
        often = [] if sets else sorted({*_at_rest(often, listing, until_ns), *again})
        sets = [one for one in sets if _newest_ns(one.paths, listing) <= until_ns]
    begun = max(sets, key=lambda one: one.written_ns(listing), default=None)
    if found.unclear or any(one.complete for one in found.sets) or not (begun or often):
        return None
    there = f"{begun.name or 'the directory'} is not whole" if begun is not None else f"{often[0]} is in none"
    if rule.done_file is not None:
        return f"{there}: a checkpoint is a folder with `{rule.done_file}`, written last"
    layout = rule.layout if rule.layout is not Layout.AUTO else layout_of(listing)
    if layout in _WHOLE:
        return f"{there}: a checkpoint (layout {layout.value}) is {_WHOLE[layout]}"
    alone = "if it is one by itself: checkpoint: {layout: file}; else " if often[0].endswith(SINGLE_FILES) else ""
    return f"{often[0]} is of no layout that is known; {alone}{SAY_DONE_FILE}"


def _at_rest(often: Iterable[str], listing: Listing, until_ns: int) -> list[str]:
    """Return those that are at rest with all of their numbered folder, else by their own number or with their folder.

    Arrays may be data: those count that are in a numbered folder, or of which another bears another number.
    """
    often, together = tuple(often), dict[str, list[str]]()
    alike = Counter(map(family, often))
    for path in often:
        numbered = next((one for one in (*reversed(above(path)), path) if last_number(one) is not None), None)
        if not path.endswith(_ARRAYS) or numbered not in (None, path) or alike[family(path)] > 1:
            together.setdefault(numbered or folder_of(path), []).append(path)
    return [path for paths in together.values() if _newest_ns(paths, listing) <= until_ns for path in paths]


def _newest_ns(paths: Iterable[str], listing: Listing) -> int:
    """Return when the newest was written of those that look like a checkpoint's, if any does: logs lie beside them."""
    paths = tuple(paths)
    often = [path for path in paths if path.endswith(_OFTEN)] or paths
    return max((listing[path].mtime_ns for path in often), default=0)
