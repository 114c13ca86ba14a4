"""SSH through a program whose input and output lead to the node, as Session Manager's does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostKeyMismatch, HostUnreachable, ToolMissing
from gpucloud.domain.node.node import Node
from gpucloud.system import processes
from tests.fakes.nodes import Server, embedded_server
from tests.running import words_of

BRIDGE = """\
import os, socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while data := os.read(0, 65536):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := there.recv(65536):
    os.write(1, data)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with embedded_server(tmp_path / "n1") as server:
        yield server


@pytest.fixture
def shell(server: Server) -> Iterator[SshShell]:
    shell = SshShell(server.key_file, connect_timeout_s=3.0)
    yield shell
    shell.close()


def behind(server: Server, *argv: str) -> Node:
    """Return the server's node as one whose own address leads nowhere."""
    through = argv or (sys.executable, "-c", BRIDGE, str(server.node.port))
    return replace(server.node, address="192.0.2.1", port=22, proxy=through)


def bridges() -> list[int]:
    """Return this process's bridges."""
    return [pid for pid in processes.descendants(os.getpid()) if BRIDGE in " ".join(words_of(pid))]


def test_commands_and_trees_arrive_through_the_program(server: Server, shell: SshShell, tmp_path: Path) -> None:
    host = shell.host(behind(server))
    data = bytes(range(256)) * 20_000
    done = host.run(("sh", "-c", "cat; echo problem >&2; exit 3"), stdin=data)
    assert (done.exit_code, done.stdout, done.stderr) == (3, data, b"problem\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()\n")
    synced = host.sync(tmp_path / "code", "code")
    assert (server.home / synced / "train.py").read_text() == "print()\n"


def test_interact_arrives_through_the_program(server: Server) -> None:
    script = (
        "import sys, json, dataclasses\n"
        "from pathlib import Path\n"
        "import tests.fakes.nodes as n\n"
        "from gpucloud.adapters.ssh.shell import SshShell\n"
        "port, key, file, proxy = json.loads(sys.argv[1])\n"
        "node = dataclasses.replace(n.node_at(port, key), address='192.0.2.1', proxy=tuple(proxy))\n"
        "shell = SshShell(Path(file))\n"
        "code = shell.host(node).interact(('sh', '-c', 'cat; exit 9'))\n"
        "shell.close()\n"
        "sys.exit(code)\n"
    )
    where = json.dumps([22, server.node.host_key, str(server.key_file), behind(server).proxy])
    done = subprocess.run([sys.executable, "-c", script, where], input=b"typed\n", capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (9, b"typed\n", b"")


def test_the_program_ends_with_the_connection(server: Server, shell: SshShell) -> None:
    host = shell.host(behind(server))
    assert len(bridges()) == 1
    host.close()
    assert bridges() == []


def test_a_lost_program_is_a_lost_connection_and_is_started_again(server: Server, shell: SshShell) -> None:
    host = shell.host(behind(server))
    timer = threading.Timer(0.3, lambda: os.kill(bridges()[0], signal.SIGKILL))
    timer.start()
    before = time.monotonic()
    with pytest.raises(HostUnreachable):
        host.run(("sleep", "60"))
    assert time.monotonic() - before < 6
    timer.join()
    assert host.run(("echo", "again")).stdout == b"again\n"
    assert len(bridges()) == 1


def test_the_key_behind_the_program_is_pinned(server: Server, shell: SshShell, tmp_path: Path) -> None:
    other = replace(behind(server), host_key=generate_key(tmp_path / "other"))
    with pytest.raises(HostKeyMismatch, match="nothing was sent"):
        shell.host(other)


def test_a_program_that_fails_is_quoted(server: Server, shell: SshShell) -> None:
    before = time.monotonic()
    with pytest.raises(HostUnreachable, match="sh ended with exit code 4: TargetNotConnected: i-0abc"):
        shell.host(behind(server, "sh", "-c", "echo TargetNotConnected: i-0abc >&2; exit 4"))
    assert time.monotonic() - before < 9


def test_a_program_that_is_not_there_is_named_at_once(server: Server, shell: SshShell) -> None:
    with pytest.raises(ToolMissing, match="cannot run no-such-program") as caught:
        shell.host(behind(server, "no-such-program", "-x"))
    assert caught.value.hint == "install no-such-program"


def test_a_program_that_never_answers_is_given_up(server: Server, shell: SshShell) -> None:
    before = time.monotonic()
    with pytest.raises(HostUnreachable):
        shell.host(behind(server, "sleep", "1000"))
    assert time.monotonic() - before < 9
