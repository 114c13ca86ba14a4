"""What was done to a stack before: the record of runs, whether its state can be believed, how it is mended.

Three objects lie in the store: Terraform's state, the intent of the last run (`run.json`, written before it) and the
proof of the last apply that ended well (`applied.json`, written after it). They agree, or something is in doubt.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from gpucloud.adapters.terraform.workfolder import StateHome
from gpucloud.adapters.terraform.workfolder import write as write_file
from gpucloud.domain.errors import ProvisionError
from gpucloud.store.contract import Stored
from gpucloud.system import processes


class History:
    """The past of one stack, as its home in the store and the working folder tell it. Reads each object when asked."""

    def __init__(self, home: StateHome, folder: Path) -> None:
        self._home = home
        self._copy = folder / "applied.json"
        self._stored: Stored | None = None
        self._stored_is_read = False

    def last(self) -> tuple[Applied | None, bool]:
        """Return the last apply that ended well, and whether the state is still the one it left.

        On the machine that applied last this costs one read: of the state.
        """
        copy = read(Applied, self._copy.read_bytes()) if self._copy.exists() else None
        if copy is not None and self._is_left_by(copy):
            return copy, True
        stored = self._record(Applied, self._home.applied)
        return stored, stored is not None and self._is_left_by(stored)

    def variables(self) -> Mapping[str, Any] | None:
        """Return the variables of the run that was begun last, else of the last good apply; None: no record is left."""
        run: Run | None = self._record(Run, self._home.run)
        if run is not None and run.variables:
            return run.variables
        applied: Applied | None = self._record(Applied, self._home.applied)
        return applied.variables if applied else None

    def is_settled(self) -> bool:
        """Whether the run that was begun last ended well and its state is there: then the state knows everything."""
        applied: Applied | None = self._record(Applied, self._home.applied)
        run: Run | None = self._record(Run, self._home.run)
        return applied is not None and run is not None and applied.run == run.id and self._is_left_by(applied)

    def known(self) -> frozenset[str]:
        """Return every address in the state; none when there is no state."""
        stored = self._state()
        state = read_state(stored.data) if stored else None
        return state.addresses() if state else frozenset()

    def mend(self, story: Callable[[str], None]) -> None:
        """Put the last whole version in the place of a state that is lost or damaged, where the store keeps versions.

        A damaged one is kept aside. Where no version is kept the state begins anew, and what stands must be imported.
        """
        stored = self._state()
        applied: Applied | None = self._record(Applied, self._home.applied)
        if stored is None and applied is None:
            return
        if stored is not None:
            if not _is_damaged(stored, applied):
                return
            aside = f"{self._home.state}.damaged-{stored.modified:%Y%m%dT%H%M%SZ}"
            story(f"Terraform's state of {self._home.name} is damaged: it is kept as {aside}")
            self._home.store.put(aside, stored.data)
        else:
            story(f"Terraform's state of {self._home.name} is gone")
        self._restore(applied, story)
        self._stored_is_read = False

    def _restore(self, applied: Applied | None, story: Callable[[str], None]) -> None:
        wanted = applied.sha256 if applied else None
        whole = next((data for data in self._home.earlier() if _sha256(data) == wanted), None)
        if whole is not None:
            self._home.store.put(self._home.state, whole)
            story("its last whole version is back in place")
            return
        # The new state will have a lineage of its own: the proof of the old one says nothing about it.
        self._home.store.delete(self._home.applied)
        self._home.store.delete(self._home.state)

    def begin(self, run: Run) -> None:
        """Put the intent on record."""
        self._home.store.put(self._home.run, write(run))

    def keep(self, run: Run, *, digest: str, outputs: Mapping[str, Any]) -> None:
        """Put on record that the run ended well."""
        self._stored_is_read = False
        stored = self._state()
        state = read_state(stored.data) if stored else None
        if stored is None or state is None:
            raise ProvisionError(
                f"Terraform's state of {self._home.name} is not in {self._home.store.url} after an apply that ended "
                "well",
                hint="the same command again takes everything that was made into a new state",
            )
        applied = Applied(
            run=run.id,
            digest=digest,
            sha256=_sha256(stored.data),
            lineage=state.lineage,
            serial=state.serial,
            variables=run.variables,
            outputs=outputs,
        )
        self._home.store.put(self._home.applied, write(applied))
        write_file(self._copy, write(applied))

    def forget(self) -> None:
        """Remove the records and the empty state; what was kept aside too."""
        for key in (self._home.applied, self._home.state, self._home.run):
            self._home.store.delete(key)
        for key in self._home.store.list(f"{self._home.state}."):
            self._home.store.delete(key)
        self._copy.unlink(missing_ok=True)

    def _state(self) -> Stored | None:
        if not self._stored_is_read:
            self._stored = self._home.store.get(self._home.state)
            self._stored_is_read = True
        return self._stored

    def _is_left_by(self, applied: Applied) -> bool:
        state = self._state()
        return state is not None and _sha256(state.data) == applied.sha256

    def _record(self, kind: type[Any], key: str) -> Any:
        stored = self._home.store.get(key)
        return read(kind, stored.data) if stored else None


def _is_damaged(stored: Stored, applied: Applied | None) -> bool:
    """Whether Terraform cannot have written this: it is torn, or other bytes under the number of a former state."""
    state = read_state(stored.data)
    if state is None:
        return True
    if applied is None or _sha256(stored.data) == applied.sha256:
        return False
    return state.lineage != applied.lineage or state.serial <= applied.serial


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# What is known of a stack beside its state: the run that was begun last, and the apply that ended well last.


T = TypeVar("T", "Run", "Applied")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A change that was begun: by which processes, and after how long they are gone whatever happens.

    Written before the change. As long as no `Applied` names it, its outcome is not known.
    """

    id: str
    command: str
    host: str
    space: str
    group: int
    ends_within_s: float
    variables: Mapping[str, Any] = field(default_factory=dict)

    def is_gone(self) -> bool:
        """Whether it was on this machine and all of its processes have ended; False when that cannot be seen."""
        if (self.host, self.space) != (socket.gethostname(), processes.space()):
            return False
        try:
            os.killpg(self.group, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """An apply that ended well: of what (`digest`), and what it left: a state of these bytes (`sha256`)."""

    run: str
    digest: str
    sha256: str
    lineage: str
    serial: int
    variables: Mapping[str, Any]
    outputs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What we read of Terraform's own state."""

    lineage: str
    serial: int
    resources: tuple[Mapping[str, Any], ...]

    def addresses(self) -> frozenset[str]:
        """Return the address of every instance that it knows."""
        return frozenset(
            _address(resource, instance)
            for resource in self.resources
            if resource.get("mode") == "managed"
            for instance in resource.get("instances", ())
        )


def read_state(data: bytes) -> State | None:
    """Return the state in these bytes; None when they are torn."""
    value = _object(data)
    if value is None or value.get("version") != 4 or not isinstance(value.get("resources"), list):
        return None
    resources = tuple(entry for entry in value["resources"] if isinstance(entry, dict))
    lineage, serial = value.get("lineage"), value.get("serial")
    if not isinstance(lineage, str) or not isinstance(serial, int) or not all("type" in r for r in resources):
        return None
    return State(lineage=lineage, serial=serial, resources=resources)


def read(kind: type[T], data: bytes) -> T | None:
    """Return the record in these bytes; None when it is torn or of another version."""
    value = _object(data)
    if value is None or any(entry.name not in value for entry in fields(kind) if entry.name != "variables"):
        return None
    return kind(**{entry.name: value[entry.name] for entry in fields(kind) if entry.name in value})


def write(record: Run | Applied) -> bytes:
    """Return the record's bytes."""
    return json.dumps(asdict(record), sort_keys=True).encode()


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _address(resource: Mapping[str, Any], instance: Mapping[str, Any]) -> str:
    module = f"{resource['module']}." if resource.get("module") else ""
    key = instance.get("index_key")
    index = "" if key is None else f"[{json.dumps(key)}]"
    return f"{module}{resource['type']}.{resource.get('name')}{index}"
