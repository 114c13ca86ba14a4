"""Groups of own hosts in the job's store: read, and changed by compare-and-swap."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpucloud.adapters.hosts.records import Hosts
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import ProvisionError
from gpucloud.store import Conflict, ObjectStore


class Recollection:
    """The records of one store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read(self, group: str) -> Hosts | None:
        """Return the group's record; None when there is none. ProvisionError when it is damaged."""
        found = self._read(group)
        return found[0] if found else None

    def make(self, group: str) -> Hosts:
        """Return the group's record, made with nothing in it if there is none."""
        fresh = Hosts(name=group, token=secrets.token_hex(16))
        try:
            self._store.put(_key(group), to_json(fresh).encode(), if_absent=True)
        except Conflict:
            fresh = self.read(group) or fresh
        return fresh

    def change(self, group: str, change: Callable[[Hosts], Hosts]) -> Hosts:
        """Return the record after the change, which may be made again when another was faster. ProvisionError: none."""
        while True:
            found = self._read(group)
            if found is None:
                raise ProvisionError(f"there is no group of hosts {group}", hint="gpucloud up makes it")
            old, version = found
            new = change(old)
            if new == old:
                return old
            try:
                self._store.put(_key(group), to_json(new).encode(), if_version=version)
            except Conflict:
                continue
            return new

    def remove(self, group: str) -> None:
        """Forget the group; one that is gone already is no error."""
        self._store.delete(_key(group))

    def path(self, group: str) -> str:
        """Return the record's file as hosts must see it too, where the store is a folder; else nothing."""
        url = urlsplit(self._store.url)
        return str(Path(unquote(url.path)) / _key(group)) if url.scheme == "file" else ""

    def _read(self, group: str) -> tuple[Hosts, str] | None:
        stored = self._store.get(_key(group))
        if stored is None:
            return None
        try:
            return from_json(Hosts, stored.data), stored.version
        except Malformed as error:
            raise ProvisionError(
                f"{self._store.url}/{_key(group)} is damaged: {error}", hint="remove that object; hosts free themselves"
            ) from error


def _key(group: str) -> str:
    return f"clusters/{group}/hosts.json"
