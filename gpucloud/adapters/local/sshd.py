"""The embedded cloud's node: an SSH and SFTP server for one user, which ends with all that was started through it.

    python -m gpucloud.adapters.local.sshd --fd N --host-key FILE --authorized-keys FILE --home DIR --parent-pipe FD

`--fd` is a listening socket. The node ends on SIGTERM, and when the other end of `--parent-pipe` is closed, which
the kernel does for a cloud that was killed. Its `GPUCLOUD_NODE` marks its processes, detached ones too.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import logging
import os
import pwd
import queue
import selectors
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
)
from paramiko.sftp import SFTP_FAILURE, SFTP_OK

from gpucloud.adapters.local.session import Children, NodeTransport, Session, Terminal, node_transport
from gpucloud.adapters.ssh.terminal import join
from gpucloud.domain.variables import GPUCLOUD_NODE
from gpucloud.system import processes

logging.getLogger("paramiko").addHandler(logging.NullHandler())

_BACKLOG = 256
_LOGIN_S = 30.0
_STRANGERS = 20
"""How many connections may stand before their login: each has threads of its own."""
_HURRIED_LOGIN_S = 10.0
"""How long a login may take while others wait for it."""
_LOOK_S = 0.02
_CONNECT_S = 1.0
"""How long what a client forwards to may take to answer: nothing else is heard on its line meanwhile."""


def _connected(destination: tuple[str, int]) -> socket.socket | None:
    """Return a connection; None when there is none within a second in all, its name's answer included.

    Who waits answers for the whole SSH connection: a client hangs up on one that is silent. What comes late is closed
    with the queue that holds it.
    """
    found: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()

    def connect() -> None:
        try:
            found.put(socket.create_connection(destination, timeout=_CONNECT_S))
        except (OSError, OverflowError, UnicodeError):
            found.put(None)

    threading.Thread(target=connect, daemon=True).start()
    try:
        return found.get(timeout=_CONNECT_S)
    except queue.Empty:
        return None


class NodeServer(paramiko.ServerInterface):
    """Answers what a client asks for on one connection: sessions and forwarding for the one user, by public key."""

    def __init__(self, authorized_keys: Path, home: Path, children: Children) -> None:
        self._keys = _keys(authorized_keys)
        self._home = home
        self._children = children
        self._sessions: dict[int, Session] = {}
        self._connected: dict[int, socket.socket] = {}

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002
        """Public keys only."""
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        """Accept an authorized key for this process's user; the library then demands a proof of it."""
        known = username in _user_names() and key.get_base64() in self._keys
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        """Open sessions; of the others, forwarding alone."""
        if kind != "session":
            return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        self._sessions[chanid] = Session(self._home, self._children)
        return OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(
        self,
        chanid: int,
        origin: tuple[str, int],  # noqa: ARG002
        destination: tuple[str, int],
    ) -> int:
        """Connect with what the client names, as this process reaches it, before the channel is there."""
        connection = _connected(destination)
        if connection is None:
            return OPEN_FAILED_CONNECT_FAILED
        connection.settimeout(None)
        self._connected[chanid] = connection
        return OPEN_SUCCEEDED

    def opened(self, channel: paramiko.Channel) -> None:
        """Join a forwarding channel to its connection; a session waits for its command."""
        number = channel.get_id()
        if number in self._connected:
            threading.Thread(target=join, args=(channel, self._connected.pop(number)), daemon=True).start()
        else:
            self._sessions[number].channel = channel

    def check_channel_env_request(self, channel: paramiko.Channel, name: bytes, value: bytes) -> bool:
        """Take a variable for the command to come."""
        self._sessions[channel.get_id()].env[os.fsdecode(name)] = os.fsdecode(value)
        return True

    def check_channel_pty_request(  # noqa: PLR0913, PLR0917
        self,
        channel: paramiko.Channel,
        term: bytes,
        width: int,
        height: int,
        pixelwidth: int,  # noqa: ARG002
        pixelheight: int,  # noqa: ARG002
        modes: bytes,  # noqa: ARG002
    ) -> bool:
        """Give the command to come a terminal."""
        self._sessions[channel.get_id()].terminal = Terminal(os.fsdecode(term), width or 80, height or 24)
        return True

    def check_channel_window_change_request(
        self,
        channel: paramiko.Channel,
        width: int,
        height: int,
        pixelwidth: int,  # noqa: ARG002
        pixelheight: int,  # noqa: ARG002
    ) -> bool:
        """Resize the terminal."""
        session = self._sessions.get(channel.get_id())
        terminal = session.terminal if session else None
        if terminal is not None:
            terminal.resize(width, height)
        return terminal is not None

    def check_channel_shell_request(self, channel: paramiko.Channel) -> bool:
        """Start a shell."""
        return self._start(channel, None)

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        """Start a command."""
        return self._start(channel, command)

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        """Start SFTP, which keeps its channel by itself."""
        started = super().check_channel_subsystem_request(channel, name)
        if started:
            del self._sessions[channel.get_id()]
        return started

    def _start(self, channel: paramiko.Channel, command: bytes | None) -> bool:
        thread = threading.Thread(target=self._run, args=(channel, command), daemon=True)
        node_transport(channel).start_after_reply(thread.start)
        return True

    def _run(self, channel: paramiko.Channel, command: bytes | None) -> None:
        try:
            self._sessions[channel.get_id()].run(channel, command)
        finally:
            del self._sessions[channel.get_id()]


class _Node:
    def __init__(self, options: argparse.Namespace) -> None:
        self._host_key = paramiko.Ed25519Key.from_private_key_file(str(options.host_key))
        self._authorized_keys: Path = options.authorized_keys
        self._home: Path = options.home
        self._children = Children()
        self._strangers: dict[socket.socket, float] = {}
        self._lock = threading.Lock()

    def serve(self, listener: socket.socket, endings: tuple[int, ...]) -> None:
        """Accept connections until one of `endings` can be read."""
        with selectors.DefaultSelector() as any_of, selectors.DefaultSelector() as end:
            any_of.register(listener, selectors.EVENT_READ)
            for ending in endings:
                any_of.register(ending, selectors.EVENT_READ)
                end.register(ending, selectors.EVENT_READ)
            while not any(key.fileobj is not listener for key, _ in any_of.select()):
                while not self._has_room():  # whoever comes next waits in the kernel's queue
                    if end.select(_LOOK_S):
                        return
                connection, _ = listener.accept()
                with self._lock:
                    self._strangers[connection] = time.monotonic()
                threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _has_room(self) -> bool:
        """Return whether one more connection may stand before its login; one that takes long leaves for the others."""
        with self._lock:
            strangers = dict(self._strangers)
        if len(strangers) < _STRANGERS:
            return True
        for connection, since in strangers.items():
            if time.monotonic() - since > _HURRIED_LOGIN_S:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return False

    def _greet(self, connection: socket.socket) -> None:
        try:
            self._log_in(connection)
        finally:
            with self._lock:
                del self._strangers[connection]

    def _log_in(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = NodeServer(self._authorized_keys, self._home, self._children)
        transport = NodeTransport(connection, server.opened)
        transport.add_server_key(self._host_key)
        transport.set_subsystem_handler("sftp", _Sftp, NodeFiles, home=self._home)
        try:
            transport.start_server(server=server)
            _await_login(transport)
        except (paramiko.SSHException, EOFError, OSError):
            transport.close()
            connection.close()


def _await_login(transport: paramiko.Transport) -> None:
    """A client that connects and then does nothing must not keep a thread and a socket for ever."""
    deadline = time.monotonic() + _LOGIN_S
    while transport.is_active() and not transport.is_authenticated():
        if time.monotonic() > deadline:
            raise EOFError
        time.sleep(0.1)


def _keys(file: Path) -> frozenset[str]:
    """Return the base64 parts of an authorized_keys file; options before the key's type are skipped."""
    words = [line.split() for line in file.read_text().splitlines() if not line.startswith("#")]
    return frozenset(word for line in words for word in line if word.startswith("AAAA"))


def _user_names() -> frozenset[str]:
    names = {getpass.getuser()}
    with contextlib.suppress(KeyError):
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    return frozenset(names)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sshd")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--host-key", type=Path, required=True)
    parser.add_argument("--authorized-keys", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--parent-pipe", type=int, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Serve until told to end; then end everything below, and leave."""
    options = _options(argv)
    told, tell = os.pipe()

    def end(_number: int, _frame: FrameType | None) -> None:
        os.write(tell, b".")

    # SIGHUP has a handler so that commands start with its default action even under nohup.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    processes.adopt_orphans()
    listener = socket.socket(fileno=options.fd)
    listener.listen(_BACKLOG)
    listener.settimeout(0)
    _Node(options).serve(listener, (told, options.parent_pipe))
    listener.close()
    name = os.environ.get(GPUCLOUD_NODE)
    processes.kill_below(os.getpid(), mark=(GPUCLOUD_NODE, name) if name else None)
    os._exit(0)  # connections and their threads need no farewell: this is a machine that is switched off


# The embedded node's SFTP: its file system, relative paths below the home folder.


class _Sftp(SFTPServer):
    """Says at its end that it ended well: OpenSSH's scp fails where no exit status comes."""

    def start_subsystem(self, name: str, transport: paramiko.Transport, channel: paramiko.Channel) -> None:
        super().start_subsystem(name, transport, channel)
        channel.send_exit_status(0)


class NodeFiles(SFTPServerInterface):
    """Answers SFTP requests with the rights of this process; nothing is hidden from the node's user."""

    def __init__(self, server: paramiko.ServerInterface, *, home: Path) -> None:
        super().__init__(server)
        self._home = home

    def canonicalize(self, path: str) -> str:
        """Return the absolute path, without following links."""
        return os.path.normpath(self._home / path)

    def list_folder(self, path: str) -> list[SFTPAttributes] | int:
        """Return the attributes of what is in a folder."""
        with contextlib.ExitStack() as stack:
            try:
                listing = stack.enter_context(os.scandir(self._home / path))
                return [SFTPAttributes.from_stat(item.stat(follow_symlinks=False), item.name) for item in listing]
            except OSError as error:
                return _code(error)

    def stat(self, path: str) -> SFTPAttributes | int:
        """Return the attributes of what a path leads to."""
        return _attributes((self._home / path).stat)

    def lstat(self, path: str) -> SFTPAttributes | int:
        """Return the attributes of the path itself."""
        return _attributes((self._home / path).lstat)

    def open(self, path: str, flags: int, attr: SFTPAttributes) -> SFTPHandle | int:
        """Open a file."""
        try:
            fd = os.open(self._home / path, flags, 0o666 if attr.st_mode is None else attr.st_mode)
        except OSError as error:
            return _code(error)
        return _OpenFile(fd, flags)

    def remove(self, path: str) -> int:
        """Delete a file."""
        return _done((self._home / path).unlink)

    def rename(self, oldpath: str, newpath: str) -> int:
        """Move a file; SFTP version 3 refuses an existing target."""
        if os.path.lexists(self._home / newpath):
            return SFTP_FAILURE
        return self.posix_rename(oldpath, newpath)

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        """Move a file over whatever has the new name."""
        return _done(lambda: (self._home / oldpath).replace(self._home / newpath))

    def mkdir(self, path: str, attr: SFTPAttributes) -> int:
        """Make a folder."""
        return _done(lambda: (self._home / path).mkdir(0o777 if attr.st_mode is None else attr.st_mode))

    def rmdir(self, path: str) -> int:
        """Delete an empty folder."""
        return _done((self._home / path).rmdir)

    def chattr(self, path: str, attr: SFTPAttributes) -> int:
        """Set mode, owner, times or size."""
        return _done(lambda: _change(self._home / path, attr))

    def readlink(self, path: str) -> str | int:
        """Return a link's target."""
        try:
            return str((self._home / path).readlink())
        except OSError as error:
            return _code(error)

    def symlink(self, target_path: str, path: str) -> int:
        """Make a link."""
        return _done(lambda: (self._home / path).symlink_to(target_path))


class _OpenFile(SFTPHandle):
    def __init__(self, fd: int, flags: int) -> None:
        super().__init__(flags)
        access = flags & (os.O_WRONLY | os.O_RDWR)
        mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "r+b"}[access]
        # Unbuffered: reads and writes of one handle share a position that the base class tracks.
        self.readfile = self.writefile = os.fdopen(fd, mode, buffering=0)

    def stat(self) -> SFTPAttributes | int:
        return _attributes(lambda: os.fstat(self.readfile.fileno()))

    def chattr(self, attr: SFTPAttributes) -> int:
        return _done(lambda: _change(self.readfile.fileno(), attr))


def _change(file: Path | int, attr: SFTPAttributes) -> None:
    """Set what the client names of size, owner, mode and times; the library would empty a file before it cuts it."""
    if attr.st_size is not None:
        os.truncate(file, attr.st_size)
    if attr.st_uid is not None and attr.st_gid is not None:
        os.chown(file, attr.st_uid, attr.st_gid)
    if attr.st_mode is not None:
        os.chmod(file, stat.S_IMODE(attr.st_mode))  # noqa: PTH101  an open file's number, too
    if attr.st_atime is not None and attr.st_mtime is not None:
        os.utime(file, (attr.st_atime, attr.st_mtime))


def _attributes(status: Callable[[], os.stat_result]) -> SFTPAttributes | int:
    try:
        return SFTPAttributes.from_stat(status())
    except OSError as error:
        return _code(error)


def _done(work: Callable[[], Any]) -> int:
    try:
        work()
    except OSError as error:
        return _code(error)
    return SFTP_OK


def _code(error: OSError) -> int:
    return SFTPServer.convert_errno(error.errno or 0)


if __name__ == "__main__":
    main()
