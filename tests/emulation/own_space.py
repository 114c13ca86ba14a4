"""Runs a node: a command in namespaces of its own for users, processes, mounts, the host's name and network.

    python -m tests.emulation.own_space OPTIONS -- COMMAND…

This process stays outside and ends with the node; the node's first process (PID 1 there) starts COMMAND, collects its
orphans, and ends the node on SIGTERM, which anything on the node may send: that is its power-off. Everything that
runs there is killed by the kernel when PID 1 ends, and PID 1 when this process does.

The clock is the host's: a time namespace does not move the time of day. Files are the host's too, save `/proc`, the
name look-up's two files, and a home folder on a small disk of its own where one is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
from pathlib import Path

from tests.emulation import namespaces

_LOOK_UPS = "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
"""An unreachable name server would cost every start seconds: peers are looked up by their addresses."""


def main(arguments: list[str]) -> int:
    """Run the node and return its exit code once it has ended."""
    cut = arguments.index("--")
    options, command = _parser().parse_args(arguments[:cut]), arguments[cut + 1 :]
    uid, gid = os.getuid(), os.getgid()
    if options.user is not None:
        namespaces.enter(options.user, namespaces.USER)
    namespaces.enter(options.network, namespaces.NETWORK)
    namespaces.unshare(namespaces.MOUNTS | namespaces.HOST_NAME | namespaces.PIDS)
    for descriptor in (options.user, options.network):
        if descriptor is not None:
            os.close(descriptor)
    first = os.fork()
    if first == 0:
        namespaces.die_with_parent()
        _be_first(options, command, ids=None if options.user is None else (uid, gid))
    for low, high in ((3, options.parent_pipe), (options.parent_pipe + 1, 1024)):
        os.closerange(low, high)  # held here, the node's sockets would outlive it
    return _watch(first, options.parent_pipe)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="own_space", allow_abbrev=False)
    parser.add_argument("--network", type=int, required=True)
    parser.add_argument("--user", type=int)
    parser.add_argument("--name", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--home-mib", type=int, default=0)
    parser.add_argument("--parent-pipe", type=int, required=True)
    return parser


def _watch(first: int, parent_pipe: int) -> int:
    """Return the node's exit code; when the cloud died, return at once: the node dies with this process."""
    poll = select.poll()
    watched = os.pidfd_open(first)
    for descriptor in (watched, parent_pipe):
        poll.register(descriptor, select.POLLIN | select.POLLHUP)
    if all(descriptor != watched for descriptor, _ in poll.poll()):
        return 1
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF


def _be_first(options: argparse.Namespace, command: list[str], *, ids: tuple[int, int] | None) -> None:
    """Be PID 1: set the node up, start the command, collect orphans until the command or the node is ended."""
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    code = 1
    try:
        _furnish(options)
        server = os.fork()
        if server == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            _be_command(options.home, command, ids)
        _close_all()
        code = _collect(server, signals)
    finally:
        os._exit(code)


def _furnish(options: argparse.Namespace) -> None:
    namespaces.keep_mounts_private()
    namespaces.mount_proc()
    socket.sethostname(options.name)
    hosts = f"127.0.0.1 localhost\n{options.address} {options.name}\n"
    for target, text in ((Path("/etc/hosts"), hosts), (Path("/etc/nsswitch.conf"), _LOOK_UPS)):
        source = options.folder / target.name
        source.write_text(text)
        if target.exists():
            namespaces.mount_over(source, target)
    if options.home_mib:
        namespaces.mount_small_disk(options.home, options.home_mib)


def _be_command(home: Path, command: list[str], ids: tuple[int, int] | None) -> None:
    try:
        if ids is not None:  # as the user again, who may do nothing special there
            namespaces.unshare_user(as_id=ids[0], group_id=ids[1])
        os.chdir(home)
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(127)


def _close_all() -> None:
    """Close what is the command's: held here, sockets and pipes would outlive it."""
    os.closerange(3, 1024)


def _collect(server: int, signals: set[signal.Signals]) -> int:
    while True:
        if signal.sigwait(signals) == signal.SIGTERM:
            return 0
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    return os.waitstatus_to_exitcode(ended[1]) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
