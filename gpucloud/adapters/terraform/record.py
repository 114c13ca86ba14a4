"""What is known of a stack beside its state: the run that was begun last, and the apply that ended well last."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from gpucloud import processes

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
