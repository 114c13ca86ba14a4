"""`python3 <zip> bootstrap`: the node makes itself fit by its record, after a reboot too; the last line says how."""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import platform
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from gpucloud.agent.single_process import alone, boot_folder
from gpucloud.domain.errors import GpucloudError, NodeError
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.bootstrap.facts import package_path
from gpucloud.domain.node.bootstrap.wanted import NodeRecord, parse_record
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool
from gpucloud.domain.variables import GPUCLOUD_PER_BOOT
from gpucloud.ports import Clock, Completed, Host, PortForward
from gpucloud.system.processes import last_line
from gpucloud.system.wholefile import open_whole, read_text, write_whole
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.bootstrap import REBOOT, Bootstrapped, Conduct, bootstrap

# `python3 <zip> bootstrap`: the node makes itself fit by its record, after a reboot too; the last line says how.


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
        write_whole(boot_folder(root) / "ended.json", text)
    say(text)
    return code


def _keep(root: Path, given: BinaryIO) -> None:
    """Write down what was given; the record comes last."""
    line = given.readline()
    place = boot_folder(root)
    with open_whole(place / "code") as file:
        shutil.copyfileobj(given, file, _CHUNK_BYTES)
    write_whole(place / "node.json", line.decode())


def _install(root: Path, package: Path | None) -> None:
    """Put this package where a supervisor looks for it, before one can meet this bootstrap: it is asked by it."""
    data = package.read_bytes() if package is not None else b""
    target = Path(package_path(str(root), hashlib.sha256(data).hexdigest()))
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not target.exists():
        write_whole(target, data)


def _record(root: Path) -> NodeRecord:
    text = read_text(boot_folder(root) / "node.json")
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
    with (boot_folder(root) / "code").open("rb") as kept:
        done = subprocess.run(argv, stdin=kept, capture_output=True, check=False)
    if done.returncode != 0 or not json.loads(done.stdout or b"{}").get("ready"):
        why = last_line(done.stderr) or "it lacks files"
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


# Going on with the node's own bootstrap after a reboot: cloud-init runs a script on each boot.


_PER_BOOT = "/var/lib/cloud/scripts/per-boot"
_GOES_DOWN_WITHIN_S = 600.0
# The shell in the middle starts it in the background: cloud-init would wait, and with it `cloud-init status --wait`.
_SCRIPT = """\
#!/bin/sh
# The bootstrap of gpucloud's job goes on after a reboot; it removes this file when it has ended.
{command} </dev/null >>{log} 2>&1 &
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerBoot:
    """The script that goes on with the bootstrap of `root`, run from `package`, as `login`."""

    root: Path
    package: Path
    login: str

    def restart(self, host: Host, _boot_id: str, _clock: Clock) -> None:
        """Reboot, the script in place; returns never. Raises NodeError when the machine stays up."""
        self._put(host)
        done = host.run(("/bin/sh", "-c", REBOOT))
        if 0 < done.exit_code < 128:
            raise NodeError(f"no reboot: {done.stderr.decode(errors='replace').strip()}", hint="let its user reboot")
        time.sleep(_GOES_DOWN_WITHIN_S)  # we end with the machine
        raise NodeError("the machine did not go down within 10 min of its reboot", hint="replace the node")

    def remove(self, host: Host) -> None:
        """Have no script any more: a later boot is nobody's business but the supervisor's."""
        if self.path.exists():
            host.run(("sudo", "-n", "rm", "-f", str(self.path)))

    @property
    def path(self) -> Path:
        """Where cloud-init looks."""
        return Path(os.environ.get(GPUCLOUD_PER_BOOT, _PER_BOOT), "gpucloud-bootstrap")

    def text(self) -> str:
        """Return the script."""
        again = (sys.executable, "-I", str(self.package), "bootstrap", "--again", "--root", str(self.root))
        command = shlex.join(("sudo", "-n", "-H", "-u", self.login, "--", *again))
        return _SCRIPT.format(command=command, log=shlex.quote(str(self.root / "bootstrap.log")))

    def _put(self, host: Host) -> None:
        """Put it there whole: `mv` is the last thing done."""
        text = 'umask 022; mkdir -p "${1%/*}" && cat >"$1.new" && chmod 755 "$1.new" && mv -f "$1.new" "$1"'
        argv = ("sudo", "-n", "sh", "-c", text, "sh", str(self.path))
        done = host.run(argv, stdin=self.text().encode())
        if done.exit_code != 0:
            raise NodeError(f"{self.path}: {done.stderr.decode(errors='replace').strip()}", hint="let its user sudo")


# This machine as a host: what a supervisor runs over SSH, run here.


_BROUGHT = ("docker",)  # groups into which system software puts the login that uses it


class ThisHost:
    """The `Host` of the node itself: commands run in the login's home, as SSH has them."""

    def __init__(self, root: Path) -> None:
        self.node = _this_node(root)
        self._joined: tuple[str, ...] = ()

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Run argv and return when it ended. NodeError when it cannot be started, or takes longer than that."""
        try:
            process = subprocess.Popen(
                joining(argv, self._joined),
                cwd=Path.home(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise NodeError(f"{argv[0]}: {error.strerror}", hint=None) from error
        with process:
            try:
                out, said = process.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise NodeError(f"`{' '.join(argv[:4])}` did not end within {timeout_s:g} s", hint=None) from error
        return Completed(exit_code=process.returncode, stdout=out, stderr=said)

    def sync(self, root: Path, target: str) -> str:
        """Nothing is sent to oneself."""
        raise NodeError(f"{root} cannot be sent to {target} on this node by itself", hint=None)

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:  # noqa: ARG002
        """Nobody sits at a node's terminal."""
        raise NodeError(f"no terminal for {argv[:1]}", hint=None)

    def renew(self) -> None:
        """Have what runs from now on be in the groups that this login got meanwhile, as a new login would."""
        self._joined = tuple(group for group in _BROUGHT if _is_new(group))

    def close(self) -> None:
        """Nothing is open."""


def joining(argv: tuple[str, ...], groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command as a member of these groups runs it (newgrp(1), `sg`)."""
    for group in groups:
        argv = ("sg", group, "-c", shlex.join(argv))
    return argv


def _is_new(name: str) -> bool:
    """Whether the login is in the group, and this process, which is older than that, is not."""
    try:
        group = grp.getgrnam(name)
    except KeyError:
        return False
    return pwd.getpwuid(os.getuid()).pw_name in group.gr_mem and group.gr_gid not in os.getgroups()


def _this_node(root: Path) -> Node:
    home = Path.home()
    below = root.relative_to(home) if root.is_relative_to(home) else root
    return Node(
        id=platform.node(),
        pool=Pool(instance_type="", zone="", market=Market.OWNED),
        state=NodeState.RUNNING,
        launched_at=datetime.now(timezone.utc),
        address="127.0.0.1",
        port=0,
        user=os.environ.get("USER", ""),
        private_address="127.0.0.1",
        interface=None,
        root=str(below),
    )
