"""A node that talks for ever or sends what it may not: it costs its owner's side neither time nor memory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import paramiko
import pytest
from paramiko.common import (
    MSG_CHANNEL_SUCCESS,
    MSG_KEXINIT,
    MSG_UNIMPLEMENTED,
    cMSG_CHANNEL_DATA,
    cMSG_CHANNEL_SUCCESS,
    cMSG_EXT_INFO,
    cMSG_IGNORE,
)

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.ssh import connection as connection_module
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.node import Node
from tests.fakes.nodes import node_at

LIMIT_S = 1.0
SOON_S = 15.0  # far less than the half minute that the library waits for a key exchange
SMALL_BYTES = 16 << 20


class Accepts(paramiko.ServerInterface):
    """Lets everybody in; `asked` is called with the channel of each command, and says whether it is answered."""

    def __init__(self, asked: Callable[[paramiko.Channel], bool]) -> None:
        self._asked = asked

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        return self._asked(channel)


class Stalling(paramiko.Transport):
    """A server that can begin a new key exchange and never end it."""

    stalls = mute = False

    def __init__(self, line: socket.socket, **options: int) -> None:
        super().__init__(line, **options)
        self._handler_table = {**self._handler_table, MSG_KEXINIT: self._negotiate_keys}

    def _negotiate_keys(self, message: paramiko.Message) -> None:
        if not self.stalls:
            super()._negotiate_keys(message)

    def _send_message(self, message: paramiko.Message) -> None:
        silent = MSG_UNIMPLEMENTED if self.stalls else MSG_CHANNEL_SUCCESS if self.mute else None
        if message.asbytes()[0] != silent:
            super()._send_message(message)

    def chatter(self) -> None:
        """Say something every half second: whoever listens takes the line for alive."""
        with contextlib.suppress(Exception):
            while self.is_active():
                message = paramiko.Message()
                message.add_byte(cMSG_IGNORE)
                message.add_string(b"x")
                self._send_message(message)
                time.sleep(0.5)

    def exchanges_keys_for_ever(self, _: paramiko.Channel) -> bool:
        def begin() -> None:
            time.sleep(0.2)
            self.stalls = True
            self._send_kex_init()
            self.chatter()

        threading.Thread(target=begin, daemon=True).start()
        return True

    def reads_nothing(self, channel: paramiko.Channel) -> bool:
        threading.Thread(target=self.chatter, daemon=True).start()
        message = paramiko.Message()
        message.add_byte(cMSG_CHANNEL_SUCCESS)
        message.add_int(channel.remote_chanid)
        self._send_message(message)
        while self.is_active():  # the thread that reads stays here
            time.sleep(0.5)
        return False

    def sends_beyond_the_window(self, channel: paramiko.Channel) -> bool:
        def flood() -> None:
            with contextlib.suppress(Exception):
                for _ in range(64 << 5):  # 64 MiB
                    message = paramiko.Message()
                    message.add_byte(cMSG_CHANNEL_DATA)
                    message.add_int(channel.remote_chanid)
                    message.add_string(b"x" * (1 << 15))
                    self._send_message(message)

        threading.Thread(target=flood, daemon=True).start()
        return True

    def closes_without_a_status(self, channel: paramiko.Channel) -> bool:
        return self._soon(channel.close)

    def ends_its_output_and_stays(self, channel: paramiko.Channel) -> bool:
        return self._soon(channel.shutdown_write)

    def cuts_the_line(self, _: paramiko.Channel) -> bool:
        return self._soon(lambda: self.sock.shutdown(socket.SHUT_RDWR))

    def never_says_that_it_began(self, _: paramiko.Channel) -> bool:
        self.mute = True
        return True

    def _soon(self, then: Callable[[], object]) -> bool:
        threading.Timer(0.3, then).start()
        return True

    def lists_extensions_for_ever(self, _: paramiko.Channel) -> bool:
        message = paramiko.Message()
        message.add_byte(cMSG_EXT_INFO)
        message.add_int(2**32 - 1)
        self._send_message(message)
        return True


@contextlib.contextmanager
def stalling_node(
    folder: Path, how: Callable[[Stalling, paramiko.Channel], bool], window: int = 2**31 - 1
) -> Iterator[tuple[Node, Path]]:
    """Give a node that answers every command so, and the file of the key that opens it."""
    host_key, own = generate_key(folder / "host"), folder / "user"
    generate_key(own)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            transport = Stalling(server.accept()[0], default_window_size=window)
            transport.add_server_key(paramiko.PKey.from_path(folder / "host"))
            with contextlib.suppress(EOFError, paramiko.SSHException):  # who has seen enough may leave before it began
                transport.start_server(server=Accepts(lambda channel: how(transport, channel)))

        threading.Thread(target=serve, daemon=True).start()
        yield node_at(server.getsockname()[1], host_key), own


@pytest.mark.parametrize("how", [Stalling.exchanges_keys_for_ever, Stalling.reads_nothing])
def test_a_command_ends_at_its_limit_whatever_the_node_keeps_saying(
    tmp_path: Path, how: Callable[[Stalling, paramiko.Channel], bool]
) -> None:
    with stalling_node(tmp_path, how) as (node, key), contextlib.closing(SshShell(key)) as shell:
        host = shell.host(node)
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="did not end within"):
            host.run(("true",), stdin=b"x" * (16 << 20), timeout_s=LIMIT_S)
        assert time.monotonic() - began < SOON_S


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("said", "what"),
    [
        pytest.param(b"SSH-2.0-lies\r\n" + ((400 << 20) + 4).to_bytes(4, "big"), "a packet of 400 MiB", id="packet"),
        pytest.param(b"x" * 128, "more than 64 KiB of it", id="first line without an end"),
        pytest.param(b"SSH-2.0-lies\r\n\0\0\0\4\3\0\0\0", "is not SSH", id="packet without a kind"),
    ],
)
def test_what_a_server_says_before_a_key_was_compared_fills_no_memory(tmp_path: Path, said: bytes, what: str) -> None:
    generate_key(tmp_path / "user")
    with socket.create_server(("127.0.0.1", 0)) as server, little_memory():

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as line:
                line.sendall(said)
                while True:
                    line.sendall(b"x" * (1 << 16))

        threading.Thread(target=serve, daemon=True).start()
        shell = SshShell(tmp_path / "user", connect_timeout_s=0.0)
        with contextlib.closing(shell), pytest.raises(HostUnreachable, match=what):
            shell.host(node_at(server.getsockname()[1], generate_key(tmp_path / "host")))


def test_data_that_nobody_reads_is_kept_up_to_the_window_alone(tmp_path: Path) -> None:
    with (
        stalling_node(tmp_path, Stalling.sends_beyond_the_window) as (node, key),
        contextlib.closing(SshShell(key)) as shell,
    ):
        connection = shell.host(node).connect()
        with little_memory(), connection.channel(LIMIT_S) as channel:
            with contextlib.suppress(EOFError, paramiko.SSHException):  # the line may be cut before the answer is read
                channel.exec_command("true")
            deadline = time.monotonic() + SOON_S
            while connection.alive and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not connection.alive


def test_a_list_of_extensions_without_an_end_is_not_counted_to_its_end(tmp_path: Path) -> None:
    with (
        stalling_node(tmp_path, Stalling.lists_extensions_for_ever) as (node, key),
        contextlib.closing(SshShell(key)) as shell,
        pytest.raises(HostUnreachable, match="more than 64 extensions"),
    ):
        shell.host(node).run(("true",), timeout_s=SOON_S)


INTERACT = (
    "import sys; from pathlib import Path; from gpucloud.adapters.ssh import terminal\n"
    "from gpucloud.adapters.ssh.shell import SshShell\n"
    "from gpucloud.domain.errors import HostUnreachable; import tests.fakes.nodes as n\n"
    "terminal._STATUS_WITHIN_S = 0.5\n"
    "shell = SshShell(Path(sys.argv[3]), connect_timeout_s=2.0)\n"
    "try: print('exit code', shell.host(n.node_at(int(sys.argv[1]), sys.argv[2])).interact(('true',)))\n"
    "except HostUnreachable as error: print(error)\n"
)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Stalling.closes_without_a_status, "exit code 128"),
        (Stalling.ends_its_output_and_stays, "exit code 128"),
        (Stalling.cuts_the_line, "the connection was lost"),
        (Stalling.never_says_that_it_began, "the command was not begun within 2 s"),
    ],
)
@pytest.mark.parametrize("typed", [b"", b"x" * (4 << 20)], ids=["nothing typed", "more typed than is read"])
def test_a_shell_on_a_node_ends_with_its_output_whatever_is_left_unsaid(
    tmp_path: Path, how: Callable[[Stalling, paramiko.Channel], bool], said: str, typed: bytes
) -> None:
    with stalling_node(tmp_path, how, window=1 << 15) as (node, key):
        argv = [sys.executable, "-c", INTERACT, str(node.port), node.host_key or "", str(key)]
        done = subprocess.run(argv, input=typed, capture_output=True, timeout=SOON_S, check=False)
    assert said in done.stdout.decode(), done.stderr.decode()


def test_a_node_that_says_other_things_for_ever_and_answers_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "ANSWER_STEPS", 8)
    with (
        stalling_node(tmp_path, Stalling.reads_nothing) as (node, key),
        contextlib.closing(SshShell(key)) as shell,
    ):
        connection = shell.host(node).connect()
        with connection.channel(LIMIT_S) as channel:
            channel.exec_command("true")
            assert not connection.answers()
            assert not connection.alive
