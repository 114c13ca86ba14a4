"""Outputs by way of the store: a machine that drives its job puts them there, a command outside brings them home."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gpucloud.adapters.localfiles import inside
from gpucloud.domain.errors import StoreError
from gpucloud.ports import Host, Outputs
from gpucloud.store import ObjectStore

Note = dict[str, str | int]


class StoredOutputs:
    """Implements `Outputs`: what arrives below `folder` by `fetching(folder)` goes on into the store."""

    def __init__(self, store: ObjectStore, job: str, folder: Path, fetching: Callable[[Path], Outputs]) -> None:
        self._store = store
        self._job = job
        self._folder = folder
        self._fetching = fetching

    def bring_home(self, host: Host, code: str) -> tuple[str, ...]:
        """Return the keys of what was put into the store."""
        return self._through(lambda outputs: outputs.bring_home(host, code))

    def bring_profile(self, host: Host, attempt: int) -> tuple[str, ...]:
        """Return the keys of what was put into the store."""
        return self._through(lambda outputs: outputs.bring_profile(host, attempt))

    def _through(self, bring: Callable[[Outputs], tuple[str, ...]]) -> tuple[str, ...]:
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            bring(self._fetching(self._folder))
            return tuple(self._keep())
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> Iterator[str]:
        """A store has objects only: what is no file, and what a file is beside its bytes, is noted in one of its own.

        Notes are kept from call to call, and before the files that they are of: there is a call for each machine.
        """
        found = {path.relative_to(self._folder).as_posix(): path for path in sorted(self._folder.rglob("*"))}
        notes = {name: note for name, path in found.items() if (note := _noted(path))}
        if notes:
            self._store.put(_notes(self._job), json.dumps({**_read_notes(self._store, self._job), **notes}).encode())
        for name, path in found.items():
            if path.is_file() and not path.is_symlink():
                key = f"{_files(self._job)}{name}"
                self._store.put(key, path.read_bytes())
                yield key


def bring_stored_home(store: ObjectStore, job: str, target: Path) -> tuple[str, ...]:
    """Bring what a machine put into the store to `target` and remove it there; return where it is now.

    May be repeated. Raises StoreError (the store does not answer, or nothing can be written there), and UsageError for
    a name that leads out of `target`.
    """
    notes = _read_notes(store, job)
    brought = []
    for key in store.list(_files(job)):
        stored = store.get(key)
        if stored is not None:
            name = key.removeprefix(_files(job))
            brought.append(_place(inside(target, name), stored.data, notes.get(name, {})))
    brought += _make_links(target, notes)
    for key in (*store.list(_files(job)), *store.list(_notes(job))):
        store.delete(key)
    return tuple(brought)


def _noted(path: Path) -> Note:
    """Return what the path is beside its bytes; nothing for a folder, which its files make."""
    if path.is_symlink():
        return {"link": str(path.readlink())}
    if path.is_dir():
        return {}
    status = path.stat()
    return {"mode": stat.S_IMODE(status.st_mode) & 0o777, "mtime_ns": status.st_mtime_ns}


def _place(path: Path, data: bytes, note: Note) -> str:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    mode, mtime_ns = note.get("mode"), note.get("mtime_ns")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        if isinstance(mode, int) and isinstance(mtime_ns, int):
            beside.chmod(mode & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
            os.utime(beside, ns=(mtime_ns, mtime_ns))
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"outputs cannot be written to {path}: {error}", hint="free some space") from error
    return str(path)


def _make_links(target: Path, notes: Mapping[str, Note]) -> Iterator[str]:
    """Make the links that stay inside, where nothing else is."""
    for name, note in notes.items():
        path, to = inside(target, name), note.get("link")
        if to is not None and _is_below(target, path.parent / str(to)) and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(str(to))
            yield str(path)


def _is_below(target: Path, place: Path) -> bool:
    return os.path.normpath(place).startswith(f"{target}{os.sep}")


def _read_notes(store: ObjectStore, job: str) -> dict[str, Note]:
    stored = store.get(_notes(job))
    try:
        found = json.loads(stored.data) if stored is not None else {}
        return {str(name): dict(note) for name, note in found.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"the notes on the outputs are damaged: {error}") from error


def _files(job: str) -> str:
    return f"jobs/{job}/outputs/files/"


def _notes(job: str) -> str:
    return f"jobs/{job}/outputs/notes.json"
