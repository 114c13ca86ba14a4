"""Starts mpirun over the nodes of an attempt, without SSH between them.

mpirun reaches other machines through a program of the user's choice (Open MPI's `plm_rsh_agent`). Ours hands its
command to the launcher of that node, which is connected to the one of node 0 already: so each node's ranks are
processes of its own agent, nothing is added to anybody's authorized_keys, and no inbound SSH is needed between nodes.

    node 0: agent ─ head ─ mpirun ─ remote (one a node) ──unix socket── head
    node n: agent ─ member ─ orted ─ ranks                             member ══ TCP, signed ══ head

The listening port is the attempt's own and is closed again when all members are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gpucloud.agent.attempt.mpi_member import (
    Link,
    LinkLost,
    Order,
    host_names,
    hostfile,
    missing_program,
    network_of,
    run_command,
    search_path,
    settings,
)
from gpucloud.agent.network import interfaces
from gpucloud.domain.variables import GPUCLOUD_HOSTFILE, GPUCLOUD_MPI_FOLDER
from gpucloud.system.wholefile import write_whole

SOCKET = "mpirun.sock"
"""Where `remote` reaches the head, in the attempt's folder (0700)."""

_GATHER_S = 300.0
_NODES_LOST = 1


def lead(order: Order) -> int:
    """Run mpirun and return its exit code; 1 when a node did not come, cannot take part or was lost."""
    reason = missing_program(0)
    members: dict[int, Link] = {}
    try:
        if reason is None:
            members, reason = _gather(order)
        code = _complain(reason) if reason else _run(order, members)
    finally:
        _end(members, _NODES_LOST)
    return code


def _gather(order: Order) -> tuple[dict[int, Link], str | None]:
    """Return the links to all other nodes, and why they cannot all take part."""
    members: dict[int, Link] = {}
    if order.nodes == 1:
        return members, None
    deadline = time.monotonic() + _GATHER_S
    with socket.create_server((order.head, order.port), backlog=order.nodes) as listener:
        while len(members) < order.nodes - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                rank, link, missing = _admit(listener.accept()[0], order)
            except TimeoutError:
                absent = [str(rank) for rank in range(1, order.nodes) if rank not in members]
                return members, f"node {', '.join(absent)} did not come within {_GATHER_S:.0f} s"
            except LinkLost as error:
                sys.stderr.write(f"gpucloud: refused a connection: {error}\n")
                continue
            members[rank] = link
            if missing:
                return members, missing
    return members, None


def _admit(connection: socket.socket, order: Order) -> tuple[int, Link, str | None]:
    connection.settimeout(10)
    try:
        link = Link(connection, order.secret, leads=True)
        said = link.receive()
    except LinkLost:
        connection.close()
        raise
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return int(said["rank"]), link, said.get("missing")


def _complain(reason: str) -> int:
    sys.stderr.write(f"gpucloud: {reason}\n")
    return _NODES_LOST


def _run(order: Order, members: dict[int, Link]) -> int:
    write_whole(order.folder / "hostfile", hostfile(order.nodes, order.slots))
    with _doorway(order.folder) as door:
        desk = _Desk(members)
        mpirun = subprocess.Popen(
            [
                "mpirun",
                "-np",
                str(order.nodes * order.slots),
                "--hostfile",
                str(order.folder / "hostfile"),
                *order.words,
            ],
            env=_environment(order),
            stdin=subprocess.DEVNULL,
        )
        desk.mpirun = mpirun
        for link in members.items():
            threading.Thread(target=desk.listen, args=link, daemon=True).start()
        threading.Thread(target=desk.serve, args=(door,), daemon=True).start()
        code = mpirun.wait()
    _end(members, code)
    members.clear()
    return code


def _environment(order: Order) -> dict[str, str]:
    package = str(Path(sys.argv[0]).absolute())
    ours = settings(network_of(order.head, interfaces()), root=os.geteuid() == 0, remote=package, python=sys.executable)
    given = {GPUCLOUD_HOSTFILE: str(order.folder / "hostfile"), GPUCLOUD_MPI_FOLDER: str(order.folder)}
    return {**ours, **os.environ, **given, "PATH": search_path()}


@contextlib.contextmanager
def _doorway(folder: Path) -> Iterator[socket.socket]:
    """Listen in the attempt's folder: by a relative name, because a socket's path may have 107 bytes."""
    with socket.socket(socket.AF_UNIX) as door:
        before = Path.cwd()
        os.chdir(folder)
        try:
            door.bind(SOCKET)
        finally:
            os.chdir(before)
        door.listen(64)
        yield door


class _Desk:
    """Takes mpirun's commands and hands each to its node."""

    def __init__(self, members: dict[int, Link]) -> None:
        self.mpirun: subprocess.Popen[bytes] | None = None
        self._members = dict(members)
        self._ranks = {name: rank for rank, name in enumerate(host_names(len(members) + 1))}
        self._lock = threading.Lock()
        self._waiting: dict[int, socket.socket] = {}
        self._count = 0

    def serve(self, door: socket.socket) -> None:
        """Answer every caller, each with the exit code of its command."""
        while True:
            try:
                caller = door.accept()[0]
            except OSError:
                return  # the doorway was closed: mpirun has ended
            threading.Thread(target=self._hand_on, args=(caller,), daemon=True).start()

    def listen(self, rank: int, link: Link) -> None:
        """Hear from one node which of its commands ended; when it is lost, mpirun is ended."""
        try:
            while True:
                said = link.receive()
                self._answer(int(said["command"]), int(said["ended"]))
        except LinkLost as error:
            if self.mpirun is not None and self.mpirun.poll() is None:
                sys.stderr.write(f"gpucloud: node {rank} is lost: {error}\n")
                self.mpirun.terminate()

    def _hand_on(self, caller: socket.socket) -> None:
        with caller.makefile("rb") as lines:
            asked = json.loads(lines.readline())
        rank = self._ranks.get(asked["host"])
        with self._lock:
            self._count += 1
            number = self._count
            self._waiting[number] = caller
        if rank == 0:
            self._answer(number, run_command(asked["words"]).wait())
        elif rank is None:
            self._answer(number, 255)
        else:
            with contextlib.suppress(LinkLost):  # heard by `listen`, which ends it all
                self._members[rank].send({"command": number, "words": asked["words"]})

    def _answer(self, number: int, code: int) -> None:
        with self._lock:
            caller = self._waiting.pop(number)
        with caller, contextlib.suppress(OSError):
            caller.sendall(b"%d\n" % code)


def _end(members: dict[int, Link], code: int) -> None:
    for link in members.values():
        with contextlib.suppress(LinkLost):
            link.send({"end": code})


# What mpirun calls in SSH's place: hands one command to the head and waits for its exit code.


def call(host: str, words: list[str]) -> int:
    """Return the exit code of the command on that node; 255, as SSH does, when it was not reached."""
    os.chdir(os.environ[GPUCLOUD_MPI_FOLDER])
    with socket.socket(socket.AF_UNIX) as desk:
        desk.connect(SOCKET)
        desk.sendall(json.dumps({"host": host, "words": words}).encode() + b"\n")
        with desk.makefile("rb") as lines:
            answer = lines.readline()
    return int(answer) if answer else 255
