"""Every node but the first: waits for mpirun's command, runs it, and ends when the head says so."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpucloud.agent.mpi.link import Link, LinkLost
from gpucloud.agent.mpi.order import Order, missing_program, search_path

_CONNECT_S = 300.0


def follow(order: Order) -> int:
    """Take part; return what mpirun returned, 1 when the head was lost before it said so."""
    try:
        link = _connect(order)
        link.send({"rank": order.rank, "missing": missing_program(order.rank)})
        return _obey(link)
    except LinkLost as error:
        sys.stderr.write(f"gpucloud: node 0 is lost: {error}\n")
        return 1


def _connect(order: Order) -> Link:
    """The head may start later than this node: try until it listens."""
    deadline = time.monotonic() + _CONNECT_S
    while True:
        try:
            connection = socket.create_connection((order.head, order.port), timeout=10)
            link = Link(connection, order.secret, leads=False)
        except (OSError, LinkLost) as error:
            if time.monotonic() > deadline:
                raise LinkLost(f"it does not answer at {order.head}:{order.port}: {error}") from error
            time.sleep(0.1)
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return link


def _obey(link: Link) -> int:
    while True:
        message = link.receive()
        if "end" in message:
            return int(message["end"])
        command = run_command(message["words"])
        threading.Thread(target=_report, args=(link, int(message["command"]), command), daemon=True).start()


def _report(link: Link, number: int, command: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(LinkLost):  # heard by `_obey`
        link.send({"command": number, "ended": command.wait()})


def run_command(words: list[str]) -> subprocess.Popen[bytes]:
    """Start what mpirun would have given to SSH: words that a shell on the other side puts together.

    Open MPI's own files go to the attempt's folder: daemons of two nodes of one machine would meet in /tmp, and one of
    them die of it. The ranks get their TMPDIR back.
    """
    folder = Path(os.environ["GPUCLOUD_ATTEMPT_DIR"], "mpi")
    folder.mkdir(exist_ok=True)
    usual = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  # nosec B108 - where no TMPDIR is set; nothing is made there
    theirs = {"TMPDIR": str(folder), "GPUCLOUD_TMPDIR": usual}
    return subprocess.Popen(
        ["/bin/sh", "-c", " ".join(words)],
        env={**os.environ, **theirs, "PATH": search_path()},
        stdin=subprocess.DEVNULL,
    )
