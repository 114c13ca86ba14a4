"""The embedded node as a machine: what runs on it, what ends with it, what cannot harm it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostUnreachable
from gpucloud.ports import Host
from gpucloud.system import processes
from tests.fakes.nodes import Server, embedded_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with embedded_server(tmp_path_factory.mktemp("node"), env={"MARKER": "from the node"}) as server:
        yield server


@pytest.fixture
def host(server: Server) -> Iterator[Host]:
    shell = SshShell(server.key_file)
    yield shell.host(server.node)
    shell.close()


@pytest.fixture
def transport(server: Server) -> Iterator[paramiko.Transport]:
    transport = connected(server)
    yield transport
    transport.close()


def connected(server: Server) -> paramiko.Transport:
    transport = paramiko.Transport(socket.create_connection(("127.0.0.1", server.node.port)))
    transport.connect(username=server.node.user, pkey=paramiko.PKey.from_path(server.key_file))
    return transport


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    return processes.started(pid) is not None


def pid_in(file: Path) -> int:
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_commands_have_the_nodes_environment_and_their_own(transport: paramiko.Transport):
    channel = transport.open_session()
    channel.set_environment_variable("EXTRA", "é=1")
    channel.exec_command('echo "$MARKER $EXTRA"')
    assert channel.recv(100).decode() == "from the node é=1\n"
    channel.close()


def test_terminal_has_the_clients_kind_and_size_and_follows_it(transport: paramiko.Transport):
    channel = transport.open_session()
    channel.get_pty("xterm-kitty", 100, 30)
    channel.exec_command("echo $TERM; stty size; read line; stty size; tty >/dev/null && echo controlled </dev/tty")
    shown = b""
    while b"30 100" not in shown:
        shown += channel.recv(100)
    channel.resize_pty(120, 40)
    channel.sendall(b"\n")
    while chunk := channel.recv(100):
        shown += chunk
    assert [line for line in shown.decode().split("\r\n") if line] == ["xterm-kitty", "30 100", "40 120", "controlled"]
    assert channel.recv_exit_status() == 0
    channel.close()


def test_shell_without_a_command_reads_its_input(transport: paramiko.Transport):
    channel = transport.open_session()
    channel.invoke_shell()
    channel.sendall(b"echo $((6 * 7)); exit 5\n")
    assert channel.recv(100) == b"42\n"
    assert channel.recv_exit_status() == 5
    channel.close()


def test_files_move_over_sftp(transport: paramiko.Transport, server: Server, tmp_path: Path):
    sftp = paramiko.SFTPClient.from_transport(transport)
    assert sftp is not None
    data = os.urandom(3 << 20)
    (tmp_path / "here").write_bytes(data)
    sftp.mkdir("files")
    sftp.put(str(tmp_path / "here"), "files/there")
    sftp.get("files/there", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == data
    sftp.chmod("files/there", 0o600)
    assert (server.home / "files/there").stat().st_mode & 0o777 == 0o600
    sftp.rename("files/there", "files/moved")
    sftp.symlink("moved", "files/link")
    assert sorted(sftp.listdir("files")) == ["link", "moved"]
    assert sftp.readlink("files/link") == "moved"
    assert sftp.normalize(".") == str(server.home)
    with sftp.open("files/moved", "a") as file:
        file.write(b"end")
    assert sftp.stat("files/moved").st_size == len(data) + 3
    with pytest.raises(FileNotFoundError):
        sftp.stat("files/none")
    sftp.remove("files/link")
    sftp.remove("files/moved")
    sftp.rmdir("files")
    sftp.close()
    assert not (server.home / "files").exists()


def test_forwarding_is_refused(transport: paramiko.Transport):
    with pytest.raises(paramiko.ChannelException):
        transport.open_channel("direct-tcpip", ("127.0.0.1", 22), ("127.0.0.1", 1))
    with pytest.raises(paramiko.SSHException):
        transport.request_port_forward("127.0.0.1", 0)


def test_other_keys_users_and_passwords_are_refused(server: Server, tmp_path: Path):
    generate_key(tmp_path / "other")
    right, wrong = paramiko.PKey.from_path(server.key_file), paramiko.PKey.from_path(tmp_path / "other")
    for user, credentials in [
        (server.node.user, {"pkey": wrong}),
        ("nobody-here", {"pkey": right}),
        (server.node.user, {"password": ""}),
    ]:
        transport = paramiko.Transport(socket.create_connection(("127.0.0.1", server.node.port)))
        with pytest.raises(paramiko.AuthenticationException):
            transport.connect(username=user, **credentials)
        transport.close()


@pytest.mark.parametrize("on_terminal", [False, True], ids=["pipes", "terminal"])
def test_command_ends_when_its_client_goes_away(server: Server, tmp_path: Path, on_terminal: bool):
    transport = connected(server)
    channel = transport.open_session()
    if on_terminal:
        channel.get_pty()
    (tmp_path / "log").write_text("")
    channel.exec_command(f"echo $$ > {tmp_path}/pid; tail -F {tmp_path}/log; true")
    pid = pid_in(tmp_path / "pid")
    below = (pid, *processes.descendants(pid))
    transport.close()
    until(lambda: not any(map(alive, below)))


def test_detached_command_lives_on(server: Server, host: Host, tmp_path: Path):
    host.run(("sh", "-c", f"setsid -f sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' </dev/null >/dev/null 2>&1"))
    pid = pid_in(tmp_path / "pid")
    host.close()
    until(lambda: "sleep" in Path(f"/proc/{pid}/cmdline").read_text())
    host.run(("true",))
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


def test_orphans_do_not_stay_as_zombies(server: Server, host: Host, tmp_path: Path):
    host.run(("sh", "-c", f"setsid -f sh -c 'echo $$ > {tmp_path}/pid' </dev/null >/dev/null 2>&1"))
    pid = pid_in(tmp_path / "pid")
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_sixty_four_clients_at_once_are_served(server: Server):
    codes: list[int] = []

    def one() -> None:
        shell = SshShell(server.key_file, connect_timeout_s=60)
        codes.append(shell.host(server.node).run(("sh", "-c", "exit 3"), timeout_s=60).exit_code)
        shell.close()

    threads = [threading.Thread(target=one) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [3] * 64


def test_silent_connections_and_killed_clients_do_not_hurt(server: Server, host: Host, tmp_path: Path):
    with contextlib.ExitStack() as stack:
        for greeting in [b"", b"SSH-2.0-x\r\n", b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n"] * 4:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.node.port)))
            sock.sendall(greeting)
        program = (
            "import sys; from pathlib import Path\n"
            "from gpucloud.adapters.ssh.shell import SshShell; import tests.fakes.nodes as n\n"
            "node = n.node_at(int(sys.argv[1]), sys.argv[2])\n"
            "host = SshShell(Path(sys.argv[3])).host(node); print('up', flush=True)\n"
            "host.run(('sh', '-c', 'echo $$ > ' + sys.argv[4] + '; cat'), stdin=bytes(200 << 20))\n"
        )
        arguments = [str(server.node.port), server.node.host_key or "", str(server.key_file), str(tmp_path / "pid")]
        client = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE)
        pid = pid_in(tmp_path / "pid")
        client.kill()
        client.communicate()
        until(lambda: not alive(pid))
        assert host.run(("echo", "well")).stdout == b"well\n"


@pytest.mark.parametrize("how", ["pipe", "signal"])
def test_everything_on_the_node_ends_with_it(tmp_path: Path, how: str):
    with embedded_server(tmp_path) as server:
        shell = SshShell(server.key_file)
        start = f"trap '' TERM HUP; echo $$ > {tmp_path}/pid; while :; do sleep 1; done"
        shell.host(server.node).run(("setsid", "-f", "sh", "-c", f"exec </dev/null >/dev/null 2>&1; {start}"))
        pid = pid_in(tmp_path / "pid")
        if how == "pipe":
            assert server.parent_pipe is not None
            os.close(server.parent_pipe)
        else:
            server.process.terminate()
        assert server.process.wait(10) == 0
        assert not alive(pid)
        with pytest.raises(HostUnreachable):
            shell.host(server.node).run(("true",), timeout_s=0.5)
        shell.close()


def test_connections_that_never_log_in_are_few_and_keep_nobody_out_for_long(server):
    with contextlib.ExitStack() as held:
        for _ in range(25):
            held.enter_context(socket.create_connection(("127.0.0.1", server.node.port)))
        until(lambda: open_connections(server) >= 15)
        assert open_connections(server) <= 22  # with the listener and its pipes

        waited = time.monotonic()
        shell = SshShell(server.key_file, connect_timeout_s=60)
        assert shell.host(server.node).run(("true",), timeout_s=60).exit_code == 0
        shell.close()
        assert time.monotonic() - waited < 50


def open_connections(server: Server) -> int:
    found = 0
    for one in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += str(one.readlink()).startswith("socket:")
    return found
