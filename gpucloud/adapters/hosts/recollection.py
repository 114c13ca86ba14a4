"""Groups of own hosts in the job's store: read, and changed by compare-and-swap."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpucloud.adapters.hosts.records import Hosts
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import ProvisionError
from gpucloud.ports import Clock
from gpucloud.store import Conflict, ObjectStore

_ALIKE = timedelta(seconds=3)  # S3 tells whole seconds, and the answer takes its time


class Recollection:
    """The records of one store, and the time by its clock: `clock` is this machine's, and may be wrong."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._ahead = timedelta(0)

    def now(self) -> datetime:
        """Return the time by the clock that the shut-off is reckoned by, as far as a record was read yet."""
        return self._clock.now() - self._ahead

    def read(self, group: str) -> Hosts | None:
        """Return the group's record; None when there is none. ProvisionError when it is damaged."""
        found = self._read(group)
        return found[0] if found and not found[0].removed else None

    def make(self, group: str) -> Hosts:
        """Return the group's record, made with nothing in it if there is none. Its nodes' numbers go on."""
        while True:
            found = self._read(group)
            if found is not None and not found[0].removed:
                return found[0]
            launched, version = (found[0].launched, found[1]) if found is not None else (0, None)
            fresh = Hosts(name=group, token=secrets.token_hex(16), launched=launched)
            try:
                self._store.put(_key(group), to_json(fresh).encode(), if_absent=found is None, if_version=version)
            except Conflict:
                continue
            return fresh

    def change(self, group: str, change: Callable[[Hosts], Hosts]) -> Hosts:
        """Return the record after the change, which may be made again when another was faster. ProvisionError: none."""
        while True:
            found = self._read(group)
            if found is None or found[0].removed:
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
        """Forget the group, all but how many nodes it had; one that is gone already is no error."""
        if self.read(group) is not None:
            self.change(group, lambda old: Hosts(name=old.name, token="", launched=old.launched, removed=True))

    def path(self, group: str) -> str:
        """Return the record's file as hosts must see it too, where the store is a folder; else nothing."""
        url = urlsplit(self._store.url)
        return str(Path(unquote(url.path)) / _key(group)) if url.scheme == "file" else ""

    def _read(self, group: str) -> tuple[Hosts, str] | None:
        stored = self._store.get(_key(group))
        if stored is None:
            return None
        ahead = self._clock.now() - stored.store_time
        self._ahead = ahead if abs(ahead) > _ALIKE else timedelta(0)
        try:
            return from_json(Hosts, stored.data), stored.version
        except Malformed as error:
            raise ProvisionError(
                f"{self._store.url}/{_key(group)} is damaged: {error}", hint="remove that object; hosts free themselves"
            ) from error


def _key(group: str) -> str:
    return f"clusters/{group}/hosts.json"
