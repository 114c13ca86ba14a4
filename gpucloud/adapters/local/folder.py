"""The embedded cloud's folder: every record in a file of its own, changed under one lock.

lock                            held by whoever reads or changes records; holds the number of the last change
daemon.lock                     held by the daemon while it lives; its time is the daemon's last heartbeat
cloud.json                      Settings
groups/<name>/group.json        GroupRecord
groups/<name>/nodes/<id>.json   NodeRecord
groups/<name>/nodes/<id>/       the node's own files, `home` among them
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from gpucloud.adapters.local.records import (
    GroupRecord,
    NodeRecord,
    Settings,
    group_from,
    node_from,
    settings_from,
    to_json,
)
from gpucloud.domain.errors import ProvisionError
from gpucloud.wholefile import write_whole

_Record = TypeVar("_Record")
_GROUP_NAME = re.compile(r"[a-z0-9-]{1,63}")


class Folder:
    """Records of one embedded cloud. Reads and writes belong inside `with locked():`, save single reads."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # the daemon works elsewhere
        self.daemon_lock = self.root / "daemon.lock"
        self.daemon_pid = self.root / "daemon.pid"
        self.log = self.root / "daemon.log"
        self._lock = self.root / "lock"
        self._groups = self.root / "groups"

    @property
    def exists(self) -> bool:
        """Whether the folder has been made."""
        return self._lock.exists()

    def create(self) -> None:
        """Make the folder, readable by its owner only; may be repeated."""
        try:
            self._groups.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            self._lock.touch(mode=0o600)
        except OSError as error:
            raise ProvisionError(
                f"cannot make the embedded cloud's folder {self.root}: {error.strerror}",
                hint="set GPUCLOUD_HOME to a folder that you may write to",
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cloud's lock; FileNotFoundError when the folder is gone."""
        descriptor = os.open(self._lock, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def changes(self) -> int:
        """Return the number of the last change; FileNotFoundError when the folder is gone."""
        return int(self._lock.read_bytes() or b"0")

    def settings(self) -> Settings:
        """Return the settings, or the defaults where none were written."""
        return self._read(self.root / "cloud.json", settings_from) or Settings()

    def save_settings(self, settings: Settings) -> None:
        """Write the settings."""
        self._write(self.root / "cloud.json", to_json(settings))

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups."""
        return tuple(sorted(path.parent.name for path in self._groups.glob("*/group.json")))

    def group(self, name: str) -> GroupRecord | None:
        """Return the group, None when there is none; ProvisionError for a name that no group can have."""
        return self._read(self._group_folder(name) / "group.json", group_from)

    def save_group(self, group: GroupRecord) -> None:
        """Write the group."""
        self._write(self._group_folder(group.name) / "group.json", to_json(group))

    def nodes(self, group: str) -> tuple[NodeRecord, ...]:
        """Return the group's nodes, the ended ones too, in the order of their launch."""
        found = (self._read(path, node_from) for path in (self._group_folder(group) / "nodes").glob("*.json"))
        return tuple(sorted((node for node in found if node is not None), key=lambda node: node.number))

    def node(self, group: str, node_id: str) -> NodeRecord | None:
        """Return the node, None when there is none."""
        return self._read(self._group_folder(group) / "nodes" / f"{node_id}.json", node_from)

    def save_node(self, group: str, node: NodeRecord) -> None:
        """Write the node."""
        self._write(self._group_folder(group) / "nodes" / f"{node.id}.json", to_json(node))

    def node_folder(self, group: str, node_id: str) -> Path:
        """Return the folder of the node's own files."""
        return self._group_folder(group) / "nodes" / node_id

    def remove_group(self, name: str) -> None:
        """Remove the group with everything below it, in one step as others see it; what is gone is no error."""
        removed = self.root / "removed"
        removed.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self._group_folder(name).rename(removed / f"{name}-{secrets.token_hex(4)}")
            self._count_change()
        shutil.rmtree(removed, ignore_errors=True)

    def _group_folder(self, name: str) -> Path:
        if not _GROUP_NAME.fullmatch(name):
            raise ProvisionError(
                f"{name!r} cannot name a node group", hint="use 1 to 63 of a-z, 0-9 and '-', as in gpucloud-digits"
            )
        return self._groups / name

    def _read(self, path: Path, parse: Callable[[str], _Record]) -> _Record | None:
        try:
            return parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProvisionError(
                f"{path} is damaged: {error}", hint=f"end this cloud's nodes and remove {self.root}"
            ) from error

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, lasting=True)
        self._count_change()

    def _count_change(self) -> None:
        # In place: the lock belongs to this very file. Equal lengths, so that a reader without the lock sees a number.
        number = f"{self.changes() + 1:020d}"
        with self._lock.open("r+") as file:
            file.write(number)
