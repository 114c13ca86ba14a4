"""The whole check of this machine and its surroundings: look, try out, judge; what passed is written down."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import socket
import ssl
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from gpucloud.agent.gate.look import look, with_log
from gpucloud.agent.gate.work import try_out
from gpucloud.agent.metrics.kernel_log import kernel_log
from gpucloud.agent.notes import write_down
from gpucloud.commands import answered
from gpucloud.domain.node.gate.judge import judge
from gpucloud.domain.node.gate.report import Checked, GateOrder, Report, StoreSeen, failures, store_endpoint


def check(root: Path, order: GateOrder, *, busy: bool = False) -> Checked:
    """Look at this machine, put it to work where that is wanted, judge it; what has a digest and passes is recorded.

    `busy`: an attempt of ours runs here, and holds devices by right.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "gate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would measure each other
        started = time.monotonic()
        report = look(order, busy=busy)
        if order.wanted.full:
            report = _fully(root, order, report)
        report = replace(report, seconds=round(time.monotonic() - started, 2))
        findings = judge(report, order.wanted)
        if order.digest and not failures(findings):
            write_down(root, order.digest, report, findings)
    return Checked(report=report, findings=findings)


def _fully(root: Path, order: GateOrder, report: Report) -> Report:
    store = store_endpoint(order, os.environ)
    seen = replace(
        report,
        clock_kept=clock_is_kept(),
        free_bytes=shutil.disk_usage(root).free,
        write_mbps=write_mbps(root),
        memlock=memlock(),
        store=reach(store) if store else None,
    )
    # Without devices there is nothing to put to work; with them, the job's torch is tried even where they are too few.
    tried = order.wanted.torch and seen.gpus and order.python and not seen.stand_in
    # What the devices did at work may be in the kernel's log only.
    return with_log(try_out(order, seen), kernel_log(sudo=order.sudo)) if tried else seen


# What a job needs beside GPUs: a clock that is kept, a disk that writes, a way to the store.


_WRITTEN = 64 << 20
_PIECE = 4 << 20
_PATIENCE_S = 5.0
_AMAZON = "0x1d0f"


def clock_is_kept() -> bool | None:
    """Return whether a time service keeps the clock; None where none can be asked."""
    for argv, good in (
        (("timedatectl", "show", "-p", "NTPSynchronized", "--value"), "yes"),
        (("chronyc", "-c", "tracking"), "Normal"),
    ):
        if shutil.which(argv[0]) is None:
            continue
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = answered(argv, timeout_s=_PATIENCE_S)
            if done.exit_code == 0 and done.stdout.strip():
                return good in done.stdout
    return None


def memlock(interfaces: Path = Path("/sys/class/infiniband")) -> int | None:
    """Return how many bytes a job may lock where an EFA interface needs it to; None without one, or without a limit."""
    try:
        vendors = [(one / "device" / "vendor").read_text().strip() for one in interfaces.iterdir()]
    except OSError:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return hard if _AMAZON in vendors and hard != resource.RLIM_INFINITY else None


def write_mbps(folder: Path) -> float | None:
    """Return how fast the disk of the folder takes 64 MiB (written through), in 10^6 bytes a second; None: it fails."""
    path = folder / f".written-{os.getpid()}"
    piece = os.urandom(_PIECE)
    started = time.perf_counter()
    try:
        with path.open("wb") as file:
            for _ in range(_WRITTEN // _PIECE):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        return _WRITTEN / (time.perf_counter() - started) / 1e6
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def reach(endpoint: str) -> StoreSeen:
    """Return how long a connection to the endpoint (`https://host:port`) takes, TLS included, or why there is none."""
    url = urlsplit(endpoint)
    secure = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if secure else 80)
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE_S) as plain, contextlib.ExitStack() as stack:
            if secure:
                stack.enter_context(ssl.create_default_context().wrap_socket(plain, server_hostname=host))
            return StoreSeen(endpoint=endpoint, seconds=time.perf_counter() - started)
    except OSError as error:  # ssl.SSLError is one
        return StoreSeen(endpoint=endpoint, error=str(error))
