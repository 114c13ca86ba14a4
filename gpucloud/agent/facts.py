"""What this node is and has, and what earlier runs left written: how the machine was left, what passed at the
gate, which data sets are whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpucloud.agent.layer.environment import base as base_python
from gpucloud.agent.layer.environment import gpu_kind, layer_fact, places
from gpucloud.agent.metrics.kernel_log import newest_event
from gpucloud.agent.single_process import agent_process, boots_itself, controller_process, note_visit, package_sha256
from gpucloud.domain.codec import Malformed, from_json, plain, to_json
from gpucloud.domain.job.data import DataFile
from gpucloud.domain.node.bootstrap.facts import Asked, Facts
from gpucloud.domain.node.container import ImageFact
from gpucloud.domain.node.gate.report import Finding, GateFact, Report, figures
from gpucloud.domain.node.machine.facts import MachineFact, Source
from gpucloud.domain.node.status import RunState, status_from_json
from gpucloud.system import processes, smi
from gpucloud.system.wholefile import read_text, write_whole


def gather(root: Path, *, package: Path | None, asked: Asked, image: ImageFact | None = None) -> Facts:
    """Return the facts."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if asked.visit:
        note_visit(root)
    gpus, fault = smi.gpus()
    base = base_python()
    return Facts(
        python=sys.executable,
        version=tuple(sys.version_info[:3]),
        torch=base.torch,
        root=str(root),
        package=package_sha256(package),
        free_bytes=shutil.disk_usage(root).free,
        cpus=processes.cpus(),
        time=datetime.now(timezone.utc),
        boot_id=processes.boot_id(),
        gpus=gpus,
        gpu_fault=fault,
        on_the_bus=len(smi.on_the_bus()),
        stand_in=smi.are_stand_ins(),
        agent_package=agent_process(root).taken_by(),
        agent_busy=is_busy(root),
        layer=layer_fact(places(), asked.layer, base, gpu_kind(gpus)),
        boto3=base.boto3,
        torch_cuda=base.torch_cuda,
        packages=base.packages,
        machine=machine_fact(root),
        staged=staged(root, asked.data),
        image=image,
        gate=gate_fact(root),
        boots_itself=boots_itself(root),
        controller_package=controller_process(root).taken_by(),
    )


def is_busy(root: Path) -> bool:
    """Whether an attempt runs here."""
    try:
        attempt = status_from_json(read_text(root / "agent" / "status.json") or "").attempt
    except Malformed:
        return False
    return attempt is not None and attempt.state is RunState.RUNNING


# What earlier runs left written below the agent's root: how the machine was left, what passed at the gate.


_LISTS_LAST_S = 24 * 3600


def machine_fact(root: Path) -> MachineFact | None:
    """Return how the machine was left on this boot; None when nobody looked since it booted."""
    try:
        note = json.loads(read_text(root / "machine" / "ready.json") or "")
        return from_json(MachineFact, json.dumps(note["fact"])) if note["boot_id"] == processes.boot_id() else None
    except (Malformed, ValueError, KeyError, TypeError):
        return None


def sources_digest(sources: tuple[Source, ...]) -> str:
    """Return what names a set of package sources."""
    return hashlib.sha256(to_json(sources).encode()).hexdigest()


class Notes:
    """The notes in `folder`, each a file of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ready(self, fact: MachineFact) -> None:
        """Write down that the machine is ready, on this boot."""
        self._write("ready.json", {"boot_id": processes.boot_id(), "fact": json.loads(to_json(fact))})
        (self._folder / "reboot.json").unlink(missing_ok=True)

    def listed(self) -> str:
        """Return the digest of the sources whose lists apt has, less than a day old; else nothing."""
        note = self._read("lists.json")
        at = note.get("at", 0.0)
        fresh = isinstance(at, float) and 0 <= time.time() - at < _LISTS_LAST_S
        return str(note.get("sources", "")) if fresh else ""

    def set_listed(self, sources: str) -> None:
        """Write down that apt's lists are those of these sources now."""
        self._write("lists.json", {"sources": sources, "at": time.time()})

    def installed(self) -> bool:
        """Whether the driver, or part of it, was put here by us."""
        return bool(self._read("installed.json"))

    def set_installed(self) -> None:
        """Write down, before it is done, that we install."""
        self._write("installed.json", {"at": time.time()})

    def rebooted_for(self) -> str:
        """Return why we asked for the reboot that has happened since; nothing when we asked for none."""
        note = self._read("reboot.json")
        return str(note["why"]) if note and note.get("boot_id") != processes.boot_id() else ""

    def set_reboot(self, why: str) -> None:
        """Write down that we ask for a reboot."""
        self._write("reboot.json", {"boot_id": processes.boot_id(), "why": why})

    def _read(self, name: str) -> dict[str, object]:
        try:
            found = json.loads(read_text(self._folder / name) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, name: str, note: dict[str, object]) -> None:
        write_whole(self._folder / name, json.dumps(note))


# The record of the last check that passed, for this boot.


_RECORD = "gate.json"


def gate_fact(root: Path) -> GateFact | None:
    """Return what the last check on this boot passed.

    None when there was none, when the machine booted since, or its log tells of something newer: the driver was loaded
    anew, a device broke or was reset.
    """
    try:
        data = json.loads(read_text(root / _RECORD) or "")
        if data.pop("boot_id") != processes.boot_id():
            return None
        fact = from_json(GateFact, json.dumps(data))
    except (ValueError, KeyError, AttributeError, Malformed):
        return None
    newest = None if smi.are_stand_ins() else newest_event()
    return None if newest is not None and newest > (fact.newest or 0.0) else fact


def write_down(root: Path, digest: str, report: Report, findings: tuple[Finding, ...]) -> None:
    """Write the record of a check that passed; what it found wanting all the same are remarks."""
    remarks = tuple(f"{finding} ({finding.hint})" for finding in findings)
    fact = GateFact(digest=digest, at=report.at, newest=report.newest, figures=figures(report), remarks=remarks)
    write_whole(root / _RECORD, json.dumps({"boot_id": processes.boot_id(), **plain(fact)}))


# Which data sets are whole on this node, told quickly.


MARK = ".gpucloud-data.json"
"""In a set's folder, written last: with it the set is whole."""

_LOOKED_AT = 10_000  # files of a set, spread evenly: 0.05 s


def staged(root: Path, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of the keys whose set is marked whole, undamaged as far as sizes and times tell, at its target."""
    return tuple(key for key in keys if _is_staged(root, key))


def _is_staged(root: Path, key: str) -> bool:
    record = _record_at(root / "data" / f"{key}.json")
    folder, target = record.get("folder"), record.get("target")
    if (
        not isinstance(folder, str)
        or not isinstance(target, str)
        or os.path.realpath(target) != os.path.realpath(folder)
    ):
        return False
    files = marked(Path(folder))
    return bool(files) and all(_is_whole(folder, row) for row in files[:: max(1, len(files) // _LOOKED_AT)])


def marked(folder: Path) -> list[Any]:
    """Return what the folder's mark says of each file of its set, for `of_mark`; a script may have spoiled it."""
    files = _record_at(folder / MARK).get("files")
    return files if isinstance(files, list) else []


def of_mark(row: object) -> tuple[str, int, str] | None:
    """Return path, size and identity of a file of which a mark tells; None for what is no file of the set's folder."""
    match row:
        case [str(path), int(size), str(identity)] if "\0" not in path and not {"", ".", ".."} & {*path.split("/")}:
            return path, size, identity
    return None


def _is_whole(folder: str, row: object) -> bool:
    file = of_mark(row)
    if file is None:
        return False
    path, size, identity = file
    try:
        status = os.lstat(f"{folder}/{path}")
    except OSError:
        return False
    stamp_s = DataFile(path=path, size=size, sha256=identity.partition(" ")[2]).stamp_s
    return status.st_size == size and status.st_mtime_ns == stamp_s * 10**9


def _record_at(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(read_text(path) or "{}")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
