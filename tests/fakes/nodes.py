"""Real SSH servers for tests: the embedded cloud's, and OpenSSH's where it is installed."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.adapters.keys import generate_key
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.offer import Pool

OPENSSH = Path("/usr/sbin/sshd")


@dataclass(frozen=True)
class Server:
    """A node with its server process; `key_file` opens it."""

    node: Node
    process: subprocess.Popen[bytes]
    key_file: Path
    home: Path
    parent_pipe: int | None = None


def node_at(port: int, host_key: str | None, *, name: str = "n1") -> Node:
    return Node(
        id=name,
        pool=Pool(instance_type="cpu", zone="local-a", market=Market.SPOT),
        state=NodeState.RUNNING,
        launched_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        address="127.0.0.1",
        port=port,
        user=getpass.getuser(),
        private_address="127.0.0.1",
        interface="lo",
        host_key=host_key,
    )


@contextlib.contextmanager
def embedded_server(
    folder: Path, *, name: str = "n1", env: dict[str, str] | None = None, port: int = 0
) -> Iterator[Server]:
    host_key, public = _keys(folder)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / "authorized_keys").write_text(public + "\n")
    ours, theirs = os.pipe()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        command = [sys.executable, "-m", "gpucloud.adapters.local.sshd", "--fd", str(listener.fileno())]
        command += ["--host-key", str(folder / "host"), "--authorized-keys", str(folder / "authorized_keys")]
        command += ["--home", str(home), "--parent-pipe", str(ours)]
        process = subprocess.Popen(
            command,
            pass_fds=(listener.fileno(), ours),
            env={**os.environ, "GPUCLOUD_NODE": f"{name}-{folder}", **(env or {})},
            start_new_session=True,
        )
        os.close(ours)
        node = node_at(listener.getsockname()[1], host_key, name=name)
    try:
        yield Server(node, process, folder / "user", home, theirs)
    finally:
        with contextlib.suppress(OSError):
            os.close(theirs)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)


@contextlib.contextmanager
def openssh_server(
    folder: Path, *, name: str = "n1", env: dict[str, str] | None = None, home: Path | None = None
) -> Iterator[Server]:
    """Start OpenSSH's server with its stock limits; with `home`, its logins find themselves there."""
    assert OPENSSH.exists(), "OpenSSH's server is missing: apt-get install openssh-server"
    host_key, public = _keys(folder)
    (folder / "authorized_keys").write_text(public + "\n")
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": folder / "pid",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
    }
    if home is not None:
        home.mkdir()
        env = {**(env or {}), "HOME": str(home)}
        settings["ForceCommand"] = 'cd "$HOME" && eval "$SSH_ORIGINAL_COMMAND"'
    if env:
        settings["SetEnv"] = " ".join(f"{key}={value}" for key, value in env.items())
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    log = (folder / "log").open("wb")
    process = subprocess.Popen([OPENSSH, "-D", "-e", "-f", folder / "config"], stderr=log)
    try:
        yield Server(node_at(port, host_key, name=name), process, folder / "user", home or Path.home())
    finally:
        process.terminate()
        process.wait(10)
        log.close()


def _keys(folder: Path) -> tuple[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    return generate_key(folder / "host"), generate_key(folder / "user")
