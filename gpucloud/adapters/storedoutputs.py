"""Outputs by way of the store: a machine that drives its job puts them there, a command outside brings them home."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.adapters.localfiles import inside
from gpucloud.domain.errors import StoreError
from gpucloud.ports import Host, Outputs
from gpucloud.store import ObjectStore


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
        """A link becomes a file of its own kind: a store has objects only."""
        links = {}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.is_symlink():
                links[name] = str(path.readlink())
            elif path.is_file():
                key = f"{_files(self._job)}{name}"
                self._store.put(key, path.read_bytes())
                yield key
        if links:
            self._store.put(_links(self._job), json.dumps(links).encode())


def bring_stored_home(store: ObjectStore, job: str, target: Path) -> tuple[str, ...]:
    """Bring what a machine put into the store to `target` and remove it there; return where it is now.

    May be repeated. Raises StoreError (the store does not answer, or nothing can be written there), and UsageError for
    a name that leads out of `target`.
    """
    brought = []
    for key in store.list(_files(job)):
        stored = store.get(key)
        if stored is not None:
            brought.append(_place(inside(target, key.removeprefix(_files(job))), stored.data))
    links = store.get(_links(job))
    for name, to in _parsed(links.data).items() if links is not None else ():
        path = inside(target, name)
        if os.path.normpath(path.parent / to).startswith(f"{target}{os.sep}") and not os.path.lexists(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(to)
            brought.append(str(path))
    for key in (*store.list(_files(job)), *([_links(job)] if links is not None else [])):
        store.delete(key)
    return tuple(brought)


def _place(path: Path, data: bytes) -> str:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(data)
        beside.replace(path)
    except OSError as error:
        raise StoreError(f"outputs cannot be written to {path}: {error}", hint="free some space") from error
    return str(path)


def _parsed(data: bytes) -> dict[str, str]:
    try:
        found = json.loads(data)
        return {str(name): str(to) for name, to in found.items()}
    except (ValueError, AttributeError) as error:
        raise StoreError(f"the links of the outputs are damaged: {error}") from error


def _files(job: str) -> str:
    return f"jobs/{job}/outputs/files/"


def _links(job: str) -> str:
    return f"jobs/{job}/outputs/links.json"
