"""OpenSSH's own clients against an embedded node: sftp, scp and forwarded ports, as on a machine in the cloud."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import UsageError
from gpucloud.ports import PortForward
from tests.fakes.nodes import Server, embedded_server, openssh_server
from tests.standins.ports import free_port

Start = Callable[..., contextlib.AbstractContextManager[Server]]
OPENSSH = [pytest.mark.slow, pytest.mark.engine(name="openssh")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    missing = [name for name in ("ssh", "scp", "sftp") if shutil.which(name) is None]
    assert not missing, f"{', '.join(missing)} missing: apt-get install openssh-client"
    with embedded_server(tmp_path_factory.mktemp("node")) as server:
        yield server


@pytest.fixture
def options(server: Server, tmp_path: Path) -> list[str]:
    """What any of them is told: the key, the port, and the one host key that it may accept."""
    (tmp_path / "known").write_text(f"[127.0.0.1]:{server.node.port} {server.node.host_key}\n")
    said = {
        "IdentityFile": server.key_file,
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": tmp_path / "known",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "Port": server.node.port,
        "LogLevel": "ERROR",
    }
    return ["-F", "none", *(word for key, value in said.items() for word in ("-o", f"{key}={value}"))]


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """Serve a port that says all it heard, in capitals, once it has heard the end of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as heard:
                        connection.sendall(heard.read().upper())

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


def answer(port: int, said: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as heard:
            return heard.read()


@pytest.mark.parametrize("protocol", ["-s", "-O"])
def test_scp_copies_a_folder_there_and_back(server: Server, options: list[str], tmp_path: Path, protocol: str):
    data = os.urandom(3 << 20)
    (tmp_path / "here" / "in").mkdir(parents=True)
    (tmp_path / "here" / "in" / "large").write_bytes(data)
    (tmp_path / "here" / "program").write_text("#!/bin/sh\n")
    (tmp_path / "here" / "program").chmod(0o750)
    os.utime(tmp_path / "here" / "program", (1_000_000_000, 1_000_000_000))
    there = f"{server.node.user}@127.0.0.1:scp{protocol}"
    scp = ["scp", *options, protocol, "-q", "-r", "-p"]
    subprocess.run([*scp, str(tmp_path / "here"), there], check=True, timeout=60)
    subprocess.run([*scp, there, str(tmp_path / "back")], check=True, timeout=60)
    assert (tmp_path / "back" / "in" / "large").read_bytes() == data
    status = (tmp_path / "back" / "program").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o750, 1_000_000_000)


def test_sftp_lists_renames_and_goes_on_with_a_file_that_was_cut_off(
    server: Server, options: list[str], tmp_path: Path
):
    data = os.urandom(1 << 20)
    (server.home / "whole").write_bytes(data)
    (tmp_path / "whole").write_bytes(data[:300_000])
    batch = f"reget whole {tmp_path / 'whole'}\nmkdir made\nrename whole made/moved\nls made\n"
    done = subprocess.run(
        ["sftp", *options, "-b", "-", f"{server.node.user}@127.0.0.1"],
        input=batch, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == ["made/moved"]
    assert (tmp_path / "whole").read_bytes() == data


def test_a_forwarded_port_leads_to_what_listens_on_the_node(server: Server, options: list[str]):
    port = free_port()
    with echo() as served:
        ssh = ["ssh", *options, "-o", "ExitOnForwardFailure=yes", "-L", f"127.0.0.1:{port}:localhost:{served}"]
        # What it says comes when its ports are open.
        command = [*ssh, f"{server.node.user}@127.0.0.1", "echo open; read end"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"open\n"
            assert answer(port, b"by way of the node") == b"BY WAY OF THE NODE"
            assert answer(port, b"x" * (4 << 20)) == b"X" * (4 << 20)
            process.communicate(b"\n", timeout=20)
    assert process.returncode in {0, 1}


def test_a_port_where_nothing_listens_is_refused_as_openssh_refuses_it(server: Server, options: list[str]):
    target = [f"-W127.0.0.1:{free_port()}", f"{server.node.user}@127.0.0.1"]
    done = subprocess.run(
        ["ssh", "-o", "LogLevel=INFO", *options, *target], stdin=subprocess.DEVNULL, capture_output=True, timeout=60
    )
    assert done.returncode == 255
    assert b"open failed: connect failed" in done.stderr


@pytest.mark.parametrize("start", [embedded_server, pytest.param(openssh_server, marks=OPENSSH)])
def test_our_own_client_forwards_a_port_while_its_command_runs(tmp_path: Path, start: Start):
    with start(tmp_path / "node") as server, echo() as served:
        shell = SshShell(server.key_file)
        host, forward = shell.host(server.node), PortForward(port=free_port(), host_port=served)
        end = server.key_file.with_name("end")
        heard: list[bytes] = []

        def use() -> None:
            heard.extend(answer(forward.port, said) for said in (b"first", b"second"))
            end.touch()

        begun = tmp_path / "begun"
        script = 'touch "$1"; while [ ! -e "$2" ]; do sleep 0.05; done; exit 7'

        def wait() -> None:
            while not begun.exists():
                threading.Event().wait(0.02)
            use()

        user = threading.Thread(target=wait, daemon=True)
        user.start()
        assert host.interact(("sh", "-c", script, "sh", str(begun), str(end)), (forward,)) == 7
        user.join(20)
        assert heard == [b"FIRST", b"SECOND"]
        with pytest.raises(ConnectionRefusedError):
            answer(forward.port, b"after the end")
        shell.close()


def test_a_port_of_this_machine_that_is_in_use_is_named_with_the_next_one(server: Server):
    shell = SshShell(server.key_file)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}") as refused:
            shell.host(server.node).interact(("true",), (PortForward(port=port, host_port=6006),))
    assert refused.value.hint == f"another port of this machine: -L {port + 1}:localhost:6006"
    shell.close()
