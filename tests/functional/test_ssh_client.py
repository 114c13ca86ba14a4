"""The supervisor's end of SSH when the other end is slow, gone, frozen or somebody else."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh import shell as shell_module
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostKeyMismatch, HostUnreachable, NodeError
from gpucloud.system import processes
from tests.fakes.nodes import Server, embedded_server, node_at, openssh_server

pytestmark = pytest.mark.alone  # looks at how quick it is


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with embedded_server(tmp_path / "n1") as server:
        yield server


@pytest.fixture
def shell(server: Server) -> Iterator[SshShell]:
    shell = SshShell(server.key_file)
    yield shell
    shell.close()


class Recorder(paramiko.ServerInterface):
    """Notes what a client says about itself."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def get_allowed_auths(self, username: str) -> str:
        self.told.append(username)
        return "publickey"

    def check_auth_none(self, username: str) -> int:
        self.told.append(username)
        return paramiko.AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.told.append(username)
        return paramiko.AUTH_SUCCESSFUL


@pytest.mark.parametrize("pinned", ["another key", "another kind", "none"])
def test_host_with_another_key_is_told_nothing(tmp_path: Path, pinned: str):
    generate_key(tmp_path / "real")
    generate_key(tmp_path / "user")
    ecdsa = paramiko.ECDSAKey.generate()
    keys = {
        "another key": generate_key(tmp_path / "pinned"),
        "another kind": f"{ecdsa.get_name()} {ecdsa.get_base64()}",
        "none": None,
    }
    recorder = Recorder()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)

        def serve() -> None:
            with contextlib.suppress(TimeoutError, paramiko.SSHException, EOFError, OSError):
                connection, _ = listener.accept()
                transport = paramiko.Transport(connection)
                transport.add_server_key(paramiko.PKey.from_path(tmp_path / "real"))
                transport.start_server(server=recorder)
                transport.join(5)

        thread = threading.Thread(target=serve)
        thread.start()
        shell = SshShell(tmp_path / "user")
        with pytest.raises(HostKeyMismatch, match="nothing was sent"):
            shell.host(node_at(listener.getsockname()[1], keys[pinned]))
        if pinned == "none":
            socket.create_connection(listener.getsockname()).close()  # it was never called
        thread.join()
        shell.close()
    assert recorder.told == []


def test_refused_key_is_said_at_once(server: Server, tmp_path: Path):
    generate_key(tmp_path / "other")
    shell = SshShell(tmp_path / "other", connect_timeout_s=60)
    with pytest.raises(HostUnreachable, match="refused the key") as caught:
        shell.host(server.node)
    assert "authorized_keys" in (caught.value.hint or "")
    shell.close()


def test_private_key_that_cannot_be_used_is_named(tmp_path: Path):
    (tmp_path / "bad").write_text("no key")
    for name in ("bad", "none"):
        shell = SshShell(tmp_path / name)
        with pytest.raises(NodeError, match=name):
            shell.host(node_at(1, "ssh-ed25519 AAAA"))
        shell.close()


def test_node_that_still_boots_is_waited_for(tmp_path: Path):
    with socket.socket() as chosen:
        chosen.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    host_key = generate_key(tmp_path / "n1" / "host")
    generate_key(tmp_path / "n1" / "user")
    shell = SshShell(tmp_path / "n1" / "user", connect_timeout_s=20)
    answers: list[bytes] = []

    def work() -> None:
        answers.append(shell.host(node_at(port, host_key)).run(("echo", "up")).stdout)

    thread = threading.Thread(target=work)
    thread.start()
    with embedded_server(tmp_path / "n1", port=port):
        thread.join()
        shell.close()
    assert answers == [b"up\n"]


def test_machine_that_is_switched_off_ends_a_blocked_command_at_once(server: Server, shell: SshShell):
    host = shell.host(server.node)
    timer = threading.Timer(0.3, server.process.kill)
    timer.start()
    before = time.monotonic()
    with pytest.raises(HostUnreachable):
        host.run(("sleep", "60"))
    assert time.monotonic() - before < 6
    timer.join()


def test_host_reopens_a_lost_connection(tmp_path: Path):
    with embedded_server(tmp_path / "n1") as first:
        shell = SshShell(first.key_file)
        host = shell.host(first.node)
        assert host.run(("true",)).exit_code == 0
    with embedded_server(tmp_path / "n1", port=first.node.port):
        assert host.run(("echo", "again")).stdout == b"again\n"
        shell.close()


def test_node_with_a_new_address_is_another_host(server: Server, shell: SshShell, tmp_path: Path):
    before = shell.host(server.node)
    with embedded_server(tmp_path / "n2") as moved:
        (tmp_path / "n2" / "authorized_keys").write_text(generate_key(server.key_file) + "\n")
        after = shell.host(moved.node)
        assert after is not before
        assert after.run(("pwd",)).stdout.decode().strip() == str(moved.home)
        shell.close()


def stop_with_children(pid: int) -> tuple[int, ...]:
    stopped = (pid, *processes.descendants(pid))
    for one in stopped:
        with contextlib.suppress(ProcessLookupError):  # one that has just accepted a connection, and is gone
            os.kill(one, signal.SIGSTOP)
    return stopped


OPENSSH = [pytest.mark.slow, pytest.mark.engine(name="openssh")]


@pytest.mark.parametrize(
    "start", [embedded_server, pytest.param(openssh_server, marks=OPENSSH)], ids=["embedded", "openssh"]
)
def test_frozen_node_ends_a_blocked_command_in_six_seconds(start, tmp_path: Path):
    with start(tmp_path) as server:
        shell = SshShell(server.key_file)
        host = shell.host(server.node)
        stopped: list[int] = []
        timer = threading.Timer(0.3, lambda: stopped.extend(stop_with_children(server.process.pid)))
        timer.start()
        before = time.monotonic()
        with pytest.raises(HostUnreachable):
            host.run(("sleep", "60"), timeout_s=60)
        took_s = time.monotonic() - before
        timer.join()
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        shell.close()
        assert took_s < 6.3


def test_frozen_node_ends_a_transfer_too(server: Server, shell: SshShell):
    host = shell.host(server.node)
    timer = threading.Timer(0.3, lambda: os.kill(server.process.pid, signal.SIGSTOP))
    timer.start()
    before = time.monotonic()
    with pytest.raises(HostUnreachable):
        host.run(("sh", "-c", "sleep 1; cat >/dev/null; sleep 60"), stdin=bytes(64 << 20), timeout_s=60)
    assert time.monotonic() - before < 6.3
    timer.join()


def test_command_that_was_given_up_is_ended(server: Server, shell: SshShell, tmp_path: Path):
    with pytest.raises(HostUnreachable, match="did not end"):
        shell.host(server.node).run(("sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60; true"), timeout_s=1)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while processes.started(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert processes.started(pid) is None


def test_key_is_made_once_and_private(tmp_path: Path):
    file = tmp_path / "keys" / "id"
    lines: list[str] = []
    threads = [threading.Thread(target=lambda: lines.append(generate_key(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(lines)) == 1
    assert lines[0] == generate_key(file)
    assert file.stat().st_mode & 0o777 == 0o600
    key = paramiko.PKey.from_path(file)
    assert lines[0] == f"ssh-ed25519 {key.get_base64()}"
    assert [path.name for path in file.parent.iterdir()] == ["id"]


INTERACT = (
    "import sys; from pathlib import Path; import tests.fakes.nodes as n\n"
    "from gpucloud.adapters.ssh.shell import SshShell\n"
    "shell = SshShell(Path(sys.argv[3]))\n"
    "sys.exit(shell.host(n.node_at(int(sys.argv[1]), sys.argv[2])).interact(tuple(sys.argv[4:])))\n"
)


def interact(server: Server, *argv: str) -> list[str]:
    where = [str(server.node.port), server.node.host_key or "", str(server.key_file)]
    return [sys.executable, "-c", INTERACT, *where, *argv]


def test_without_a_terminal_interact_is_a_pipe(server: Server):
    command = interact(server, "sh", "-c", "cat; echo problem >&2; exit 9")
    done = subprocess.run(command, input=b"\x00raw\xff\n" * 100_000, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (9, b"\x00raw\xff\n" * 100_000, b"problem\n")


class OnTerminal:
    """A process on a pseudo terminal of 90 × 25."""

    def __init__(self, command: list[str]) -> None:
        self.master, self.slave = pty.openpty()
        self.resize(90, 25)
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            command, stdin=self.slave, stdout=self.slave, stderr=self.slave, start_new_session=True
        )
        self.shown = b""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def type(self, text: bytes) -> None:
        os.write(self.master, text)

    def await_shown(self, text: bytes) -> None:
        while text not in self.shown:
            self.shown += os.read(self.master, 1000)

    def end(self) -> int:
        code = self.process.wait(10)
        assert termios.tcgetattr(self.slave) == self.before, "the terminal was not put back"
        os.close(self.slave)
        os.close(self.master)
        return code


def test_terminal_is_connected_resized_and_put_back(server: Server):
    terminal = OnTerminal(interact(server, "sh", "-c", "stty size; read a; stty size; read b; exit 4"))
    terminal.await_shown(b"25 90")
    terminal.resize(100, 40)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.type(b"x\r")
    terminal.await_shown(b"40 100")
    terminal.type(b"\r")
    assert terminal.end() == 4


def test_control_c_goes_to_the_remote_side(server: Server):
    terminal = OnTerminal(interact(server, "sh", "-c", "trap 'exit 6' INT; echo ready; while :; do sleep 0.05; done"))
    terminal.await_shown(b"ready")
    terminal.type(b"\x03")
    assert terminal.end() == 6


@pytest.mark.parametrize("how", ["node dies", "killed by SIGTERM"])
def test_terminal_is_put_back_whatever_happens(server: Server, how: str):
    terminal = OnTerminal(interact(server, "sh", "-c", "echo ready; sleep 60"))
    terminal.await_shown(b"ready")
    (server.process.kill if how == "node dies" else terminal.process.terminate)()
    assert terminal.end() == (1 if how == "node dies" else -signal.SIGTERM)


@pytest.mark.slow
def test_openssh_client_gets_along_with_the_embedded_node(server: Server, tmp_path: Path):
    (tmp_path / "known").write_text(f"[127.0.0.1]:{server.node.port} {server.node.host_key}\n")
    base = ["ssh", "-F", "none", "-i", str(server.key_file), "-p", str(server.node.port), "-o", "BatchMode=yes"]
    base += ["-o", f"UserKnownHostsFile={tmp_path / 'known'}", "-o", "IdentitiesOnly=yes", "127.0.0.1"]
    data = os.urandom(4 << 20)
    done = subprocess.run([*base, "cat; exit 5"], input=data, capture_output=True)
    assert (done.returncode, done.stdout) == (5, data)
    assert subprocess.run([*base, "kill -9 $$"], capture_output=True).returncode == 255
    shown = subprocess.run([*base[:1], "-tt", *base[1:], "tty"], input=b"", capture_output=True)
    assert shown.stdout.startswith(b"/dev/")


def test_a_node_that_answers_without_end_is_cut_off_and_the_next_command_is_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_module, "ANSWER_BYTES", 1 << 20)
    shell = SshShell(server.key_file)
    try:
        host = shell.host(server.node)
        for stream in ("yes", "yes >&2"):
            with pytest.raises(HostUnreachable, match=r"`sh …` answered more than 1 MiB; nothing of it is believed"):
                host.run(("sh", "-c", stream))
        assert shell.host(server.node).run(("echo", "well")).stdout == b"well\n"
    finally:
        shell.close()
