"""`python3 <zip> bootstrap`: the record and the code on standard input; how it ended as the last line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from gpucloud.agent.boot.files import alone, folder
from gpucloud.agent.boot.here import ThisHost
from gpucloud.agent.boot.resuming import PerBoot
from gpucloud.domain.bootstrap.noderecord import NodeRecord, parse_record
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.errors import GpucloudError, NodeError
from gpucloud.usecases.bootstrap import Bootstrapped, Conduct, bootstrap
from gpucloud.usecases.world import Package
from gpucloud.wholefile import read_text, write_whole

_CHUNK_BYTES = 1 << 20


class _Clock:
    def now(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def bootstrap_command(root: Path, package: Path | None, given: BinaryIO | None, say: Callable[[str], object]) -> int:
    """Make this node fit by the record and return 0; an error's exit code with its message where that fails.

    `given` is one line, the record, then its code as the store holds it; None goes by what was given before. May be
    killed anywhere and repeated. The answer is one line of JSON, kept in `boot/ended.json`.
    """
    if given is not None:
        _keep(root, given)
        _install(root, package)
    ended: dict[str, object]
    with alone(root):
        try:
            record = _record(root)
            done = _made(root, record, _package(package, record))
        except GpucloudError as error:
            code, ended = error.exit_code, {"error": error.message, "hint": error.hint}
        else:
            code, ended = 0, _answer(done, record)
        text = json.dumps({"version": 1, "at": _Clock().now().isoformat(timespec="seconds"), **ended})
        write_whole(folder(root) / "ended.json", text)
    say(text)
    return code


def _keep(root: Path, given: BinaryIO) -> None:
    """Write down what was given; the record comes last."""
    line = given.readline()
    place = folder(root)
    beside = place / f".code.{os.getpid()}"
    with beside.open("wb") as file:
        shutil.copyfileobj(given, file, _CHUNK_BYTES)
    beside.replace(place / "code")
    write_whole(place / "node.json", line.decode())


def _install(root: Path, package: Path | None) -> None:
    """Put this package where a supervisor looks for it, before one can meet this bootstrap: it is asked by it."""
    data = package.read_bytes() if package is not None else b""
    target = Path(package_path(str(root), hashlib.sha256(data).hexdigest()))
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not target.exists():
        beside = target.with_name(f"{target.name}.{os.getpid()}")
        beside.write_bytes(data)
        beside.replace(target)


def _record(root: Path) -> NodeRecord:
    text = read_text(folder(root) / "node.json")
    try:
        return parse_record(text or "")
    except ValueError as error:
        raise NodeError(f"the node record cannot be read: {error}", hint="wait for the supervisor") from error


def _package(path: Path | None, record: NodeRecord) -> Package:
    data = path.read_bytes() if path is not None else b""
    if hashlib.sha256(data).hexdigest() != record.wanted.package:
        raise NodeError("the record is of another package than this one", hint="wait for the supervisor")
    return Package(data=data, sha256=record.wanted.package)


def _made(root: Path, record: NodeRecord, package: Package) -> Bootstrapped:
    host = ThisHost(root)
    zip_path = Path(package_path(str(root), package.sha256))
    resuming = PerBoot(root=root, package=zip_path, login=record.login)
    left = record.left.step if record.left is not None else ""
    conduct = Conduct(own=True, restart=resuming.restart, left=left)
    try:
        if record.code is not None:
            _have_code(root, record.code.tree)
        return bootstrap(host, record.wanted, package, _Clock(), story=_tell, conduct=conduct)
    finally:
        resuming.remove(host)


def _have_code(root: Path, tree: str) -> None:
    """Make the tree from the kept code; a tree that stands already needs none of it."""
    argv = (sys.executable, "-I", sys.argv[0], "code", str(root / "code"), tree)
    with (folder(root) / "code").open("rb") as kept:
        done = subprocess.run(argv, stdin=kept, capture_output=True, check=False)
    if done.returncode != 0 or not json.loads(done.stdout or b"{}").get("ready"):
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "it lacks files"
        raise NodeError(f"the code in the store is not whole: {why}", hint="wait for the supervisor")


def _answer(done: Bootstrapped, record: NodeRecord) -> dict[str, object]:
    return {
        "changed": list(done.changed),
        "seconds": dict(done.seconds),
        "findings": list(done.findings),
        "left": {"step": record.left.step, "why": record.left.why} if record.left is not None else None,
        "lock": done.lock,
        "error": None,
        "hint": None,
    }


def _tell(line: str) -> None:
    sys.stderr.write(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} {line}\n")
