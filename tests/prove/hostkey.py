"""A host with another key than the pinned one gets not a byte of the job, whichever way it is reached."""

from __future__ import annotations

import ast
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko

from gpucloud.adapters.hosts.cloud import Configured, Sources, places
from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.adapters.transfer.copying import Copier
from gpucloud.adapters.transfer.localfiles import sent
from gpucloud.adapters.transfer.outputs import OutputsFolder
from gpucloud.domain.errors import HostKeyMismatch, HostUnreachable
from gpucloud.domain.job.spec import OwnHost, SshChoices
from gpucloud.domain.node.node import Node
from gpucloud.ports import Host
from tests.fakes.nodes import Server, embedded_server, openssh_server
from tests.prove.goal import Figure, Form, Goal
from tests.standins.ssh_line import Line, line_to

ROOT = Path(__file__).resolve().parents[2]
_BRIDGE = (
    "import os, socket, sys, threading\n"
    "there = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
    "def up():\n"
    "    while data := os.read(0, 65536):\n"
    "        there.sendall(data)\n"
    "threading.Thread(target=up, daemon=True).start()\n"
    "while data := there.recv(65536):\n"
    "    os.write(1, data)\n"
)

Case = Callable[[], str | None]


class Stage:
    """The node whose key is pinned, an impostor with another one, and the line that leads to either."""

    def __init__(self, folder: Path, real: Server, impostor: Server, line: Line) -> None:
        self.folder, self.real, self.impostor, self.line = folder, real, impostor, line
        (folder / "code").mkdir(exist_ok=True)
        (folder / "code" / "train.py").write_text("print('the job')\n")

    def node(self, **changed: object) -> Node:
        return replace(self.real.node, port=self.line.port, **changed)

    def shell(self) -> SshShell:
        return SshShell(self.real.key_file, connect_timeout_s=5.0)

    def refused(self, act: Callable[[], object]) -> str | None:
        """Do what must be refused, and return what went wrong: it was not, or something was sent."""
        self.line.conversations.clear()
        try:
            act()
        except HostKeyMismatch:
            pass
        except HostUnreachable as error:
            return f"it is not said that the key is another: {error}"
        else:
            return "it was not refused"
        if not self.line.conversations:
            return "nobody came by the line"
        return f"{self.line.secret} bytes were sent" if self.line.secret else None

    def operations(self) -> dict[str, Callable[[Host], object]]:
        code = self.folder / "code"
        return {
            "run": lambda host: host.run(("true",), stdin=b"a secret"),
            "sync": lambda host: host.sync(code, "code"),
            "cp to": lambda host: Copier(host, ".", python=sys.executable).send([sent(code / "train.py", "x")]),
            "cp from": lambda host: Copier(host, ".", python=sys.executable).listing(["x"]),
            "outputs": lambda host: OutputsFolder(("x",), self.folder / "out").bring_home(host, "code", 1),
            "shell": lambda host: host.interact(("true",)),
        }


def run(form: Form) -> Iterator[Figure]:
    """Yield in how many cases a swapped key was accepted, or told of the job, and in how many cases all in all."""
    wrong = cases = 0
    servers = [embedded_server] if form is Form.SHORT else [embedded_server, openssh_server]
    for make in servers:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as undo:
            folder = Path(name)
            real = undo.enter_context(make(folder / "real"))
            impostor = undo.enter_context(make(folder / "impostor"))
            stage = Stage(folder, real, impostor, undo.enter_context(line_to(real.node.port)))
            for case, found in _found(stage, form, undo):
                cases += 1
                if found is not None:
                    wrong += 1
                    sys.stderr.write(f"hostkey: {make.__name__}, {case}: {found}\n")
    wrong += len(_trusting())
    yield Figure(name="hostkey", value=wrong, limit=0)
    yield Figure(name="hostkey.cases", value=cases, limit=11 if form is Form.SHORT else 26, least=True)


def _found(stage: Stage, form: Form, undo: contextlib.ExitStack) -> Iterator[tuple[str, str | None]]:
    yield "the right key", _control(stage)
    for name, act in stage.operations().items():
        yield f"another host at the node's address, {name}", _reused(stage, act)
    stage.line.target = stage.real.node.port
    for kind in ("ssh-ed25519", "ecdsa-sha2-nistp256", "ssh-rsa"):
        yield f"pinned {kind}", stage.refused(lambda kind=kind: _open(stage, stage.node(host_key=_other(kind))))
    yield "no key known", _unknown(stage)
    through = (sys.executable, "-c", _BRIDGE, str(stage.line.port))
    bridged = stage.node(host_key=stage.impostor.node.host_key, address="192.0.2.1", proxy=through)
    yield "through a program", stage.refused(lambda: _open(stage, bridged))
    if form is Form.LONG:
        door = undo.enter_context(openssh_server(stage.folder / "door"))
        yield "through a jump host", stage.refused(lambda: _open(stage, _behind(stage, door, door.node.host_key)))
        yield "a jump host with another key", _bad_door(stage, door)


def _control(stage: Stage) -> str | None:
    """With the right key it works, and the line sees it: else the other cases would show nothing."""
    stage.line.conversations.clear()
    shell = stage.shell()
    try:
        done = shell.host(stage.node()).run(("cat",), stdin=b"x" * 1000)
    finally:
        shell.close()
    if done.stdout != b"x" * 1000:
        return f"it does not work: {done}"
    return None if stage.line.secret > 1000 else f"only {stage.line.secret} bytes were seen"


def _reused(stage: Stage, act: Callable[[Host], object]) -> str | None:
    """Connect to the node; then another host is at its address."""
    stage.line.target = stage.real.node.port
    shell = stage.shell()
    try:
        host = shell.host(stage.node())
        stage.line.target = stage.impostor.node.port
        stage.line.conversations.clear()
        stage.line.cut()
        return _when_lost(stage, host) or stage.refused(lambda: act(host))
    finally:
        shell.close()


def _when_lost(stage: Stage, host: Host) -> str | None:
    """Wait until the loss of the connection is known and the next one was tried."""
    for _ in range(500):
        try:
            host.run(("true",))
        except HostKeyMismatch:
            return f"{stage.line.secret} bytes were sent" if stage.line.secret else None
        except HostUnreachable:
            time.sleep(0.01)
    return "it was not refused"


def _unknown(stage: Stage) -> str | None:
    before = len(stage.line.conversations)
    try:
        _open(stage, stage.node(host_key=None))
    except HostKeyMismatch:
        return None if len(stage.line.conversations) == before else "it was asked all the same"
    return "it was trusted at first sight"


def _open(stage: Stage, node: Node) -> None:
    shell = stage.shell()
    try:
        shell.host(node).run(("true",))
    finally:
        shell.close()


def _other(kind: str) -> str:
    """Return a key of that kind that is nobody's."""
    made = {
        "ssh-rsa": lambda: paramiko.RSAKey.generate(2048),
        "ecdsa-sha2-nistp256": lambda: paramiko.ECDSAKey.generate(bits=256),
    }
    if kind in made:
        return f"{kind} {made[kind]().get_base64()}"
    with tempfile.TemporaryDirectory() as folder:
        return generate_key(Path(folder) / "key")


def _behind(stage: Stage, door: Server, door_key: str | None) -> Node:
    """Return the node as one behind a jump host with that key, itself pinned to the impostor's."""
    known = stage.folder / "known_hosts"
    known.write_text(f"[127.0.0.1]:{door.node.port} {door_key}\n")
    host = OwnHost(
        address="127.0.0.1",
        port=stage.line.port,
        host_key=stage.impostor.node.host_key,
        jump=f"{door.node.user}@127.0.0.1:{door.node.port}",
    )
    sources = Sources(known_hosts=known, configured=lambda name: Configured(), key_of=lambda address, port: None)
    (place,) = places(SshChoices(hosts=(host,), key=door.key_file), sources)
    return stage.node(host_key=place.host_key, proxy=place.proxy, address="192.0.2.1")


def _bad_door(stage: Stage, door: Server) -> str | None:
    """The jump host itself is another: it gets nothing, and so does nobody behind it."""
    with line_to(door.node.port) as way:
        leading = replace(door, node=replace(door.node, port=way.port))
        try:
            _open(stage, _behind(stage, leading, stage.impostor.node.host_key))
        except (HostUnreachable, HostKeyMismatch) as error:
            if way.secret or not way.conversations:
                return f"{way.secret} bytes were sent to the jump host in {len(way.conversations)} connections"
            return None if "ost key" in str(error) else f"it is not said why: {error}"
        return "it was not refused"


def _trusting() -> list[str]:
    """Return the places in the product that would take any key."""
    found = []
    for path in sorted((ROOT / "gpucloud").rglob("*.py")):
        text = path.read_text()
        names = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
        bad = names & {"AutoAddPolicy", "WarningPolicy", "MissingHostKeyPolicy"}
        bad |= {option for option in ("StrictHostKeyChecking=no", "StrictHostKeyChecking=accept-new") if option in text}
        found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(bad)]
    for place in found:
        sys.stderr.write(f"hostkey: {place}\n")
    return found


GOAL = Goal(
    promise="a host with another key than the pinned one is refused, and not a byte of the job is sent to it",
    real="SSH servers (long: OpenSSH's too), every kind of use, programs and jump hosts on the way; bytes counted",
    simulated="nothing",
    run=run,
)
