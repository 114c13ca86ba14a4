"""What embedded nodes stand on, metadata service included: the one point at which another kind of node is put in.

The daemon is given `Grounds`. Its own entry gives it `Loopback`; tests whose nodes need a network of their own have an
entry of theirs, which the fleet's folder names (`records.Settings.daemon`).
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol


class Ground(Protocol):
    """What one node stands on: its network, and what its first process is started in."""

    @property
    def interface(self) -> str:
        """The name of the interface that carries the traffic between nodes."""
        ...

    @property
    def private(self) -> str | None:
        """Where the other nodes reach it; None: at its own address."""
        ...

    @property
    def metadata(self) -> Metadata:
        """Its metadata service; whoever closes the ground has closed it."""
        ...

    @property
    def variables(self) -> dict[str, str]:
        """What of the node's environment is the ground's."""
        ...

    @property
    def stands(self) -> bool:
        """Whether it is there; a node ends with its ground."""
        ...

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        """Start the node's first process. OSError when that fails."""
        ...

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        """Make the ground as it is wanted now; called in every round of the daemon. Raises ProvisionError."""
        ...

    def close(self) -> None:
        """Give back what the node had, once none of its processes is left."""
        ...


class Grounds(Protocol):
    """Makes grounds, one for each node."""

    @property
    def pids(self) -> frozenset[int]:
        """Its own processes below the daemon: no orphans of a node."""
        ...

    def make(self, address: str, taken: Collection[str | None], instance: Callable[[], Instance]) -> Ground:
        """Return the ground of a node that SSH reaches at `address`. Raises ProvisionError.

        `taken` are the private addresses of the nodes that live; `instance` is what the metadata service tells.
        """
        ...

    def close(self) -> None:
        """End what all grounds share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A node's first process: its command, its whole environment, its folders, and the descriptors it inherits.

    `parent_pipe`, one of these, is closed when the daemon dies: then the node ends.
    """

    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    home: Path
    descriptors: tuple[int, ...]
    parent_pipe: int

    def start(self) -> subprocess.Popen[bytes]:
        """Start it in a session of its own; what it writes goes to `console.log`."""
        with (self.folder / "console.log").open("wb") as console:
            return subprocess.Popen(
                self.argv,
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                pass_fds=self.descriptors,
                start_new_session=True,
            )


class Loopback:
    """Implements `Grounds`: nodes are processes of this machine, and meet on loopback."""

    pids: frozenset[int] = frozenset()

    def make(
        self,
        address: str,
        taken: Collection[str | None],  # noqa: ARG002  nodes meet at their addresses
        instance: Callable[[], Instance],
    ) -> Ground:
        """Return the ground of a node at that address."""
        return OnLoopback(address, instance)

    def close(self) -> None:
        """Do nothing."""


class OnLoopback:
    """Implements `Ground`."""

    private = None
    stands = True

    def __init__(self, address: str, instance: Callable[[], Instance]) -> None:
        self.interface = loopback()
        self.metadata = Metadata(address, instance)

    @property
    def variables(self) -> dict[str, str]:
        """Where the metadata service is, which on EC2 has an address of its own."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.metadata.url}

    def start(self, launch: Launch) -> subprocess.Popen[bytes]:
        """Start the node's first process."""
        return launch.start()

    def follow(self, process: subprocess.Popen[bytes], *, frozen: bool) -> None:
        """Do nothing: loopback stays as it is."""

    def close(self) -> None:
        """Close the metadata service."""
        self.metadata.server_close()


# EC2's instance metadata service, version 2, for one embedded node.


_TOKEN_PATH = "/latest/api/token"  # noqa: S105
_DATA_PATH = "/latest/meta-data"
_DOCUMENT_PATH = "/latest/dynamic/instance-identity/document"
_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
_TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105
_LONGEST_TTL_S = 21600


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """What the service tells; `interrupted_at` is when the cloud takes the node, None without a notice.

    `rebalance_at` is since when it is recommended to leave the node; with a notice that is told at the same time.
    """

    id: str
    instance_type: str
    region: str
    zone: str
    spot: bool
    address: str
    noticed_at: datetime | None
    interrupted_at: datetime | None
    rebalance_at: datetime | None = None


class Metadata(ThreadingHTTPServer):
    """The service on an address and a free port; answers when its owner calls `handle_request` on readiness.

    Token rules as EC2's with tokens required and no proxies: PUT gives 200, 400 for a TTL outside 1..21600 s, 403 with
    X-Forwarded-For; GET gives 401 without a valid token and 404 for what is not there, such as an event before it is.
    """

    daemon_threads = True
    timeout = 0.0  # of handle_request: it is called when a connection is there

    def __init__(self, address: str, instance: Callable[[], Instance], listener: socket.socket | None = None) -> None:
        """Listen at `address`, or on `listener`, which listens already, on a node's own network perhaps."""
        super().__init__((address, 0), _Handler, bind_and_activate=listener is None)
        if listener is not None:
            self.socket.close()
            self.socket = listener
            self._know(listener)
        self.instance = instance
        self._tokens: dict[str, float] = {}

    def server_bind(self) -> None:
        """Bind, without the look-up of the host's name that HTTPServer does."""
        self.socket.bind(self.server_address)
        self._know(self.socket)

    def _know(self, listener: socket.socket) -> None:
        self.server_address = listener.getsockname()
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """Where the node finds the service."""
        return f"http://{self.server_name}:{self.server_port}"

    def new_token(self, ttl_s: int) -> str:
        """Return a token that is valid for `ttl_s` seconds."""
        now = time.monotonic()
        self._tokens = {token: until for token, until in self._tokens.items() if until > now}
        token = secrets.token_urlsafe(40)
        self._tokens[token] = now + ttl_s
        return token

    def knows(self, token: str) -> bool:
        """Whether the token is valid now."""
        return self._tokens.get(token, 0.0) > time.monotonic()


def tree(instance: Instance) -> dict[str, str]:
    """Return the metadata below `/latest/meta-data/`, by path."""
    told = {
        "instance-action": "none",
        "instance-id": instance.id,
        "instance-life-cycle": "spot" if instance.spot else "on-demand",
        "instance-type": instance.instance_type,
        "local-ipv4": instance.address,
        "placement/availability-zone": instance.zone,
        "placement/region": instance.region,
    }
    recommended_at = instance.rebalance_at or instance.noticed_at
    if recommended_at is not None:
        told["events/recommendations/rebalance"] = json.dumps({"noticeTime": _stamp(recommended_at)})
    if instance.noticed_at is not None and instance.interrupted_at is not None:
        at = _stamp(instance.interrupted_at)
        told["instance-action"] = "terminate"
        told["spot/instance-action"] = json.dumps({"action": "terminate", "time": at})
        told["spot/termination-time"] = at
    return told


def document(instance: Instance) -> str:
    """Return the instance identity document."""
    return json.dumps(
        {
            "availabilityZone": instance.zone,
            "instanceId": instance.id,
            "instanceType": instance.instance_type,
            "privateIp": instance.address,
            "region": instance.region,
            "version": "2017-09-30",
        },
        indent=2,
    )


def _stamp(time_: datetime) -> str:
    return time_.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Handler(BaseHTTPRequestHandler):
    server: Metadata
    protocol_version = "HTTP/1.1"
    server_version = "EC2ws"
    sys_version = ""
    timeout = 60.0  # a connection kept open and unused

    def do_PUT(self) -> None:
        if self.path != _TOKEN_PATH:
            self._answer(404)
            return
        if "X-Forwarded-For" in self.headers:
            self._answer(403)
            return
        ttl = self.headers.get(_TTL_HEADER, "")
        if not (ttl.isascii() and ttl.isdigit() and 1 <= int(ttl) <= _LONGEST_TTL_S):
            self._answer(400)
            return
        self._answer(200, self.server.new_token(int(ttl)), (_TTL_HEADER, ttl))

    def do_GET(self) -> None:
        if not self.server.knows(self.headers.get(_TOKEN_HEADER, "")):
            self._answer(401)
            return
        instance = self.server.instance()
        if self.path.rstrip("/") == _DOCUMENT_PATH:
            self._answer(200, document(instance))
            return
        found = _look_up(tree(instance), self.path)
        self._answer(404 if found is None else 200, found or "")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (http.server's name)
        """Say nothing: an agent asks twice a second."""

    def _answer(self, code: int, body: str = "", *headers: tuple[str, str]) -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _look_up(told: dict[str, str], path: str) -> str | None:
    """Return a value, or the names below a folder one a line, or None."""
    if path.rstrip("/") != _DATA_PATH and not path.startswith(f"{_DATA_PATH}/"):
        return None
    key = path[len(_DATA_PATH) :].strip("/")
    if key in told:
        return told[key]
    folder = f"{key}/" if key else ""
    below = {name[len(folder) :] for name in told if name.startswith(folder)}
    return "\n".join(sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in below})) or None


# Where a node is: its address and its socket.


def loopback() -> str:
    """Return the name of the loopback interface, which carries the traffic between nodes."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def listen(addresses: Collection[str], ports: Collection[int]) -> socket.socket:
    """Return a socket that listens on an address and a port that no live node has.

    On Linux each node has an address of its own (all of 127.0.0.0/8 binds there); elsewhere they share 127.0.0.1.
    """
    free = (f"127.0.{k // 200}.{10 + k % 200}" for k in range(5000))
    address = next(candidate for candidate in free if candidate not in addresses)
    while True:
        try:
            listener = socket.create_server((address, 0), backlog=256)
        except OSError:
            if address == "127.0.0.1":
                raise
            address = "127.0.0.1"
            continue
        if listener.getsockname()[1] not in ports:
            return listener
        listener.close()
