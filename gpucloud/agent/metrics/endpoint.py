"""A node's figures for Prometheus: the text format, and a tiny HTTP server on this machine's loopback."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.node.status import AttemptStatus, RunState

PORT = 9401  # DCGM's own exporter has 9400
_ADDRESS = "127.0.0.1"
_PATIENCE_S = 2.0


class Endpoint:
    """Answers `GET /metrics`; anything else is 404. `port` is where, 0 when it could not listen."""

    def __init__(self, text: Callable[[], str], *, port: int = PORT) -> None:
        """Listen on `port`, or on any free one when it is taken: several nodes may share one machine."""
        self._text = text
        self._listener = _listener(port)
        self.port: int = self._listener.getsockname()[1] if self._listener else 0

    def start(self) -> None:
        """Answer from a thread of its own."""
        if self._listener is not None:
            threading.Thread(target=self._serve, args=(self._listener,), name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # stopped
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_PATIENCE_S)
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            words = stream.readline(4096).split()
            while stream.readline(8192).strip():
                pass  # its headers: nothing of them matters
        known = words[:1] == [b"GET"] and len(words) > 1 and words[1].partition(b"?")[0] == b"/metrics"
        body = (self._text() if known else "gpucloud: /metrics\n").encode()
        status = "200 OK" if known else "404 Not Found"
        head = f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)


def fetch(port: int) -> str:
    """Return the text of the endpoint on this machine. Raises OSError."""
    with socket.create_connection((_ADDRESS, port), timeout=_PATIENCE_S) as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        with connection.makefile("rb") as stream:
            answer = stream.read()
    return answer.partition(b"\r\n\r\n")[2].decode()


def _listener(port: int) -> socket.socket | None:
    for wanted in (port, 0):
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((_ADDRESS, wanted))
            listener.listen(8)
        except OSError:
            listener.close()
        else:
            return listener
    return None


# A node's figures as Prometheus reads them (text exposition format 0.0.4).
#
# Names are those of NVIDIA's DCGM exporter where the same thing is meant (its `default-counters.csv`), so that
# dashboards for it work here too; everything else is `gpucloud_…`.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What there is to tell; `xid` is the number of the newest error of each device by its index."""

    gpus: tuple[GpuSample, ...] = ()
    host: HostSample | None = None
    attempt: AttemptStatus | None = None
    unhealthy: str | None = None
    xids: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Family:
    name: str
    kind: str
    text: str
    rows: tuple[tuple[dict[str, str], float | None], ...]


def exposition(figures: Figures) -> str:
    """Return the text; what is not known is left out."""
    return "".join(_written(family) for family in (*_of_gpus(figures), *_of_host(figures.host), *_of_job(figures)))


def _of_gpus(figures: Figures) -> Iterator[_Family]:
    gpus = figures.gpus
    if not gpus:
        return
    xids = dict(figures.xids)
    plain = (
        ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %).", [g.use for g in gpus]),
        ("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).", [g.memory_used_mib for g in gpus]),
        ("DCGM_FI_DEV_FB_TOTAL", "Framebuffer memory in all (in MiB).", [g.memory_mib for g in gpus]),
        ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", [g.temperature for g in gpus]),
        ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", [g.power for g in gpus]),
        ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "Power limit (in W).", [g.power_limit for g in gpus]),
        ("DCGM_FI_DEV_SM_CLOCK", "SM clock frequency (in MHz).", [g.sm_clock for g in gpus]),
        ("DCGM_FI_DEV_XID_ERRORS", "Newest XID error since the agent started.", [xids.get(g.index, 0) for g in gpus]),
    )
    for name, text, values in plain:
        yield _Family(name, "gauge", text, tuple((_labels(g), v) for g, v in zip(gpus, values, strict=True)))
    ecc = tuple((_labels(g), g.ecc_uncorrected) for g in gpus)
    yield _Family("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Uncorrected ECC errors since the driver's start.", ecc)
    slow = tuple(({**_labels(g), "reason": reason}, 1.0) for g in gpus for reason in g.slowdowns)
    yield _Family("gpucloud_gpu_slowdown", "gauge", "Why the GPU is slowed down now; absent when it is not.", slow)
    yield _Family(
        "gpucloud_gpus_unhealthy", "gauge", "1 when a GPU must not be trusted.", (({}, float(bool(figures.unhealthy))),)
    )


def _of_host(host: HostSample | None) -> Iterator[_Family]:
    if host is None:
        return
    cpu = None if host.cpu is None else host.cpu / 100
    yield _one("gpucloud_host_cpu_ratio", "Share of all cores that is busy, 0 to 1.", cpu)
    yield _one("gpucloud_host_memory_used_bytes", "Memory that is not available.", host.memory_used_mib * _MIB)
    yield _one("gpucloud_host_memory_bytes", "Memory in all.", host.memory_mib * _MIB)
    yield _one("gpucloud_host_disk_free_bytes", "Free space where the job's files are.", host.disk_free_mib * _MIB)
    yield _one("gpucloud_host_received_bytes_total", "Bytes received since the boot.", host.received, "counter")
    yield _one("gpucloud_host_sent_bytes_total", "Bytes sent since the boot.", host.sent, "counter")


def _of_job(figures: Figures) -> Iterator[_Family]:
    attempt = figures.attempt
    if attempt is None:
        return
    yield _one("gpucloud_attempt", "Number of the newest attempt.", attempt.attempt)
    running = float(attempt.state is RunState.RUNNING)
    yield _one("gpucloud_attempt_running", "1 while the attempt runs on this node.", running)
    progress, readings = attempt.shown, attempt.readings
    if readings is not None and readings.values:
        rows = tuple(({"name": name}, value) for name, value in readings.values)
        yield _Family("gpucloud_printed", "gauge", "Numbers that the script prints, by the job file's names.", rows)
    if progress is not None:
        yield _one("gpucloud_step", "The last training step.", progress.step)
        yield _one("gpucloud_committed_step", "Step of the newest checkpoint.", progress.committed_step)
        yield _one("gpucloud_loss", "Loss at the last report.", progress.loss)
        yield _one("gpucloud_step_seconds", "Median time of the last steps.", progress.step_seconds)
        text = "Share of the steps' time spent waiting for data, 0 to 1."
        yield _one("gpucloud_waiting_ratio", text, progress.waiting_share)


def _one(name: str, text: str, value: float | None, kind: str = "gauge") -> _Family:
    return _Family(name, kind, text, (({}, value),))


def _labels(gpu: GpuSample) -> dict[str, str]:
    return {"gpu": str(gpu.index), "UUID": gpu.uuid, "pci_bus_id": gpu.pci}


def _written(family: _Family) -> str:
    rows = [(labels, value) for labels, value in family.rows if value is not None]
    if not rows:
        return ""
    lines = [f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}"]
    for labels, value in rows:
        inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        lines.append(f"{family.name}{{{inside}}} {_figure(value)}" if inside else f"{family.name} {_figure(value)}")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    """Integers in full: `%g` would round bytes."""
    if math.isfinite(value):
        return str(int(value)) if value == int(value) else repr(value)
    return {"inf": "+Inf", "-inf": "-Inf"}.get(str(value), "NaN")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
