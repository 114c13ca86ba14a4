"""What the node learns over the network: its own interfaces, whether another machine answers, notices of its end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import ipaddress
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from urllib.parse import urlsplit

from gpucloud.domain.node.node import Notice, PeerReport, notice_from, recommended_at
from gpucloud.domain.variables import GPUCLOUD_NOTICE_POLL_S

_GET_ADDRESS, _GET_NETMASK = 0x8915, 0x891B  # Linux: SIOCGIFADDR, SIOCGIFNETMASK


def carrying(address: str) -> str | None:
    """Return the interface's name; None where none is found, and for all but loopback where this is not Linux."""
    try:
        wanted = ipaddress.IPv4Address(address)
    except ValueError:
        return None
    if not sys.platform.startswith("linux"):
        return "lo0" if wanted.is_loopback else None
    return choose(wanted, interfaces())


def choose(wanted: ipaddress.IPv4Address, interfaces: tuple[tuple[str, ipaddress.IPv4Interface], ...]) -> str | None:
    """Return the interface that has the address, else the one whose network is the narrowest that holds it."""
    holding = [(name, interface) for name, interface in interfaces if wanted in interface.network]
    if not holding:
        return None
    return max(holding, key=lambda pair: (pair[1].ip == wanted, pair[1].network.prefixlen))[0]


def interfaces() -> tuple[tuple[str, ipaddress.IPv4Interface], ...]:
    """Return the name of every interface with its IPv4 address and network; empty where this is not Linux."""
    return tuple(_each()) if sys.platform.startswith("linux") else ()


def _each() -> Iterator[tuple[str, ipaddress.IPv4Interface]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an IPv4 address
                address, netmask = (_ask(asker, question, name) for question in (_GET_ADDRESS, _GET_NETMASK))
                yield name, ipaddress.IPv4Interface(f"{address}/{netmask}")


def _ask(asker: socket.socket, question: int, name: str) -> str:
    answer = fcntl.ioctl(asker.fileno(), question, struct.pack("256s", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])


# Knocks at another machine's SSH: the second witness of a machine that the supervisor does not reach.


_OWN_FAULTS = (
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.EADDRNOTAVAIL,
    errno.EMFILE,
    errno.ENFILE,
    errno.EPERM,
    errno.EACCES,
)


def probe(address: str, port: int, *, limit_s: float) -> PeerReport:
    """Return ALIVE when an SSH server greets within `limit_s`, DEAD when none does, NOTHING for a fault of our own.

    A frozen machine still accepts connections, in its kernel; it does not greet (RFC 4253, 4.2: the server sends its
    version, perhaps after other lines).
    """
    deadline = time.monotonic() + limit_s
    try:
        with socket.create_connection((address, port), timeout=limit_s) as connection:
            return _greeted(connection, deadline)
    except socket.gaierror:
        return PeerReport.NOTHING
    except OSError as error:
        return PeerReport.NOTHING if error.errno in _OWN_FAULTS else PeerReport.DEAD


def _greeted(connection: socket.socket, deadline: float) -> PeerReport:
    said = b""
    while b"SSH-" not in said and len(said) < 8192:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(1024)
        if not more:
            return PeerReport.DEAD
        said += more
    return PeerReport.ALIVE if b"SSH-" in said else PeerReport.DEAD


# The interruption notice of this node, from the instance metadata service (IMDSv2).


_TOKEN_TTL_S = 21600  # the longest that IMDSv2 grants
_ABSENT_LIMIT_S = 30.0  # a host that never had a metadata service is asked this often at last
_INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_REBALANCE_EVERY = 5  # looks at the notice: a recommendation comes minutes ahead, or not at all


class MetadataClient:
    """IMDSv2 over one kept connection; the token is renewed at 80 % of its life."""

    def __init__(self, endpoint: str, *, timeout_s: float = 1.0) -> None:
        url = urlsplit(endpoint)
        self._connection = http.client.HTTPConnection(url.hostname or "169.254.169.254", url.port, timeout=timeout_s)
        self._token: str | None = None
        self._renew_at = 0.0

    def get(self, path: str) -> tuple[int, str]:
        """Return the status and the body. Raises OSError or HTTPException when nobody answers."""
        status, body = self._get_with_token(path)
        if status == 401:  # the service was restarted and knows our token no more
            self._token = None
            status, body = self._get_with_token(path)
        return status, body

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _get_with_token(self, path: str) -> tuple[int, str]:
        if self._token is None or time.monotonic() > self._renew_at:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
            status, token = self._request("PUT", "/latest/api/token", ttl)
            if status != 200:
                return status, token
            self._token = token
            self._renew_at = time.monotonic() + 0.8 * _TOKEN_TTL_S
        return self._request("GET", path, {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        try:
            return self._exchange(method, path, headers)
        except (ConnectionError, http.client.HTTPException):
            # A kept connection is closed by the other side when it was idle: once more on a new one.
            return self._exchange(method, path, headers)

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        try:
            self._connection.request(method, path, headers=headers)
            with self._connection.getresponse() as response:
                return response.status, response.read(65536).decode("utf-8", errors="replace")
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise


class NoticeWatcher:
    """Asks the metadata service every `period_s`; `notice` and `rebalance` are the first ones seen, and stay.

    `rebalance` is since when the cloud recommends to leave this machine.
    """

    def __init__(self, client: MetadataClient, *, period_s: float, on_notice: Callable[[], None]) -> None:
        self.notice: Notice | None = None
        self.rebalance: datetime | None = None
        self._looks = 0
        self._client = client
        self._period_s = period_s
        self._on_notice = on_notice
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice", daemon=True)

    def start(self) -> None:
        """Begin to watch, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the connection."""
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        pause_s, was_there = self._period_s, False
        while not self._stop.wait(pause_s):
            try:
                status, body = self._client.get(_INSTANCE_ACTION)
            except (OSError, http.client.HTTPException):
                # Once there, always there: a moment's silence must not slow the watch down.
                pause_s = self._period_s if was_there else min(2 * pause_s, _ABSENT_LIMIT_S)
                continue
            was_there, pause_s = True, self._period_s
            if status == 200 and self.notice is None:
                self.notice = notice_from(body)
                if self.notice is not None:
                    self._on_notice()
            self._look_for_recommendation()

    def _look_for_recommendation(self) -> None:
        self._looks += 1
        if self.rebalance is not None or self.notice is not None or self._looks % _REBALANCE_EVERY:
            return
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, body = self._client.get(_REBALANCE)
            self.rebalance = recommended_at(body) if status == 200 else None
            if self.rebalance is not None:
                self._on_notice()


def watcher_from(environ: Mapping[str, str], on_notice: Callable[[], None]) -> NoticeWatcher | None:
    """Return a watcher as the environment says; None where AWS_EC2_METADATA_DISABLED is true.

    AWS_EC2_METADATA_SERVICE_ENDPOINT moves the service, GPUCLOUD_NOTICE_POLL_S sets the period (default 1 s).
    """
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    period_s = _positive(environ.get(GPUCLOUD_NOTICE_POLL_S), default=1.0)
    return NoticeWatcher(MetadataClient(endpoint(environ)), period_s=period_s, on_notice=on_notice)


def endpoint(environ: Mapping[str, str]) -> str:
    """Return where the metadata service answers."""
    return environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"


def _positive(text: str | None, *, default: float) -> float:
    try:
        value = float(text) if text else default
    except ValueError:
        return default
    return value if value > 0 else default
