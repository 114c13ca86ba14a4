"""The whole check of this machine: look, put its GPUs to work, alone or as a member of a gang, judge, write down."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import gpucloud
from gpucloud.agent.facts import write_down
from gpucloud.agent.gate.look import look, with_log
from gpucloud.agent.metrics.kernel_log import kernel_log
from gpucloud.agent.network import carrying
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.node.gate.gang import GangFacts, GangOrder
from gpucloud.domain.node.gate.judge import judge
from gpucloud.domain.node.gate.report import (
    GANG,
    MACHINE,
    Checked,
    CollectiveProbe,
    DeviceProbe,
    GateOrder,
    ProbeOrder,
    Report,
    Said,
    StoreFacts,
    TorchFacts,
    UnderLoad,
    failures,
    store_endpoint,
)
from gpucloud.domain.node.hardware import Gpu, on_interface
from gpucloud.system import smi
from gpucloud.system.processes import answered, leave, locked


def check(root: Path, order: GateOrder, *, busy: bool = False) -> Checked:
    """Look at this machine, put it to work where that is wanted, judge it; what has a digest and passes is recorded.

    `busy`: an attempt of ours runs here, and holds devices by right.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(root / "gate.lock"):  # two at once would measure each other
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
    observed = replace(
        report,
        clock_kept=clock_is_kept(),
        free_bytes=shutil.disk_usage(root).free,
        write_mbps=write_mbps(root),
        memlock=memlock(),
        store=reach(store) if store else None,
    )
    # Without devices there is nothing to put to work; with them, the job's torch is tried even where they are too few.
    tried = order.wanted.torch and observed.gpus and order.python and not observed.stand_in
    # What the devices did at work may be in the kernel's log only.
    return with_log(try_out(order, observed), kernel_log(sudo=order.sudo)) if tried else observed


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


def reach(endpoint: str) -> StoreFacts:
    """Return how long a connection to the endpoint (`https://host:port`) takes, TLS included, or why there is none."""
    url = urlsplit(endpoint)
    secure = url.scheme == "https"
    host, port = url.hostname or "", url.port or (443 if secure else 80)
    started = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE_S) as plain, contextlib.ExitStack() as stack:
            if secure:
                stack.enter_context(ssl.create_default_context().wrap_socket(plain, server_hostname=host))
            return StoreFacts(endpoint=endpoint, seconds=time.perf_counter() - started)
    except OSError as error:  # ssl.SSLError is one
        return StoreFacts(endpoint=endpoint, error=str(error))


# Putting this machine's GPUs to work, alone and as a member of a gang, by workers in the job's Python.


_LIMIT_S = 240.0  # a cold disk needs a minute to import torch on eight ranks at once
_MEGABYTES = 256
_LOOK_LIMIT_S = 5.0  # beside workers that have a limit of their own


def try_out(order: GateOrder, report: Report, *, device: str = "cuda", limit_s: float = _LIMIT_S) -> Report:
    """Return the report with what the job's torch made of the devices, one worker on each."""
    # Too few devices are found out without workers that wait for those that have none.
    most = len(report.gpus or ()) if device == "cuda" else order.wanted.gpus
    count, port = max(1, min(order.wanted.gpus, most)), free_port()
    orders = tuple(
        ProbeOrder(
            kind=MACHINE, rank=rank, world=count, address="127.0.0.1", port=port, device=device, megabytes=_MEGABYTES
        )
        for rank in range(count)
    )
    watched = _Watched(tuple(gpu.uuid for gpu in report.gpus or ()))
    heard = work(order.python, orders, _env(order), limit_s=limit_s, beside=watched.look)
    torch = _torch(heard)
    able = torch.available and torch.devices >= count if device == "cuda" else torch.version is not None
    return replace(
        report,
        torch=torch,
        probes=tuple(_probe(rank, one) for rank, one in enumerate(heard)) if able else (),
        collective=_collective(heard, device) if able and count > 1 else None,
        under_load=watched.best(),
    )


@dataclass(slots=True)
class _Watched:
    """The devices while they work: a PCIe link that rests is slow, and heat comes with load."""

    uuids: tuple[str, ...]
    observed: dict[int, UnderLoad] = field(default_factory=dict)

    def look(self) -> None:
        for gpu in smi.gpus({}, timeout_s=_LOOK_LIMIT_S)[0] or () if self.uuids else ():
            if gpu.uuid in self.uuids:
                self.observed[gpu.index] = _better(self.observed.get(gpu.index), gpu)

    def best(self) -> tuple[UnderLoad, ...]:
        return tuple(load for _, load in sorted(self.observed.items()))


def _better(before: UnderLoad | None, gpu: Gpu) -> UnderLoad:
    old = before or UnderLoad(index=gpu.index, generation=None, width=None)
    return UnderLoad(
        index=gpu.index,
        generation=max(filter(None, (old.generation, gpu.pcie_generation)), default=None),
        width=max(filter(None, (old.width, gpu.pcie_width)), default=None),
        slowdowns=tuple(sorted({*old.slowdowns, *gpu.slowdowns})),
        sm_clock=max(filter(None, (old.sm_clock, gpu.sm_clock)), default=None),
    )


def _env(order: GateOrder) -> dict[str, str]:
    # torch numbers devices by speed unless told otherwise; nvidia-smi numbers them by their place on the bus.
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(order.devices)} if order.devices else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "1", **chosen}


def _torch(heard: tuple[Heard, ...]) -> TorchFacts:
    said = [one.torch for worker in heard for one in worker.said if one.torch is not None]
    if said:
        return said[0]
    return TorchFacts(error=heard[0].complaint or "the job's Python said nothing")


def _probe(rank: int, heard: Heard) -> DeviceProbe:
    said = [one.probe for one in heard.said if one.probe is not None]
    if said:
        return said[0]
    return DeviceProbe(index=rank, error="it hangs" if heard.ended else heard.complaint or "its worker died")


def _collective(heard: tuple[Heard, ...], device: str) -> CollectiveProbe:
    said = [one.collective for worker in heard for one in worker.said if one.collective is not None]
    if said:
        return said[0]
    complaints = [worker.complaint for worker in heard if worker.complaint and not worker.ended]
    error = complaints[0] if complaints else f"it hangs: {sum(worker.ended for worker in heard)} ranks did not end"
    return CollectiveProbe(backend="nccl" if device == "cuda" else "gloo", ranks=len(heard), error=error)


# Workers in the job's Python: started, waited for, ended, and what they said.


_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one worker said, the end of its complaints, and whether it had to be ended."""

    said: tuple[Said, ...]
    complaint: str
    ended: bool


def work(
    python: str,
    orders: tuple[ProbeOrder, ...],
    env: Mapping[str, str],
    *,
    limit_s: float,
    beside: Callable[[], None] = lambda: None,
) -> tuple[Heard, ...]:
    """Run one worker for each order and return what they said; `beside` is called now and then meanwhile."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-gate-") as folder, contextlib.ExitStack() as stack:
        started = [_Worker(stack, Path(folder), python, order, env) for order in orders]
        until = time.monotonic() + limit_s
        while any(worker.runs for worker in started) and time.monotonic() < until:
            beside()
            time.sleep(_LOOK_S)
        return tuple(worker.heard() for worker in started)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


class _Worker:
    """One process group; it is ended with the stack that it was started in."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, python: str, order: ProbeOrder, env: Mapping[str, str]
    ) -> None:
        self._out, self._err = (folder / f"{order.rank}.{name}" for name in ("out", "err"))
        self._ended = False
        out, err = stack.enter_context(self._out.open("wb")), stack.enter_context(self._err.open("wb"))
        self._process = subprocess.Popen(
            (python, "-m", "gpucloud.probe"),
            env={**os.environ, **env, "PYTHONPATH": str(Path(gpucloud.__file__).parent.parent)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        stack.callback(self._end)
        with contextlib.suppress(BrokenPipeError), self._process.stdin:  # type: ignore[union-attr]
            self._process.stdin.write(to_json(order).encode())  # type: ignore[union-attr]

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def heard(self) -> Heard:
        if self.runs:
            self._ended = True
            self._end()
        said = [one for line in _text(self._out).splitlines() if (one := _parsed(line)) is not None]
        return Heard(said=tuple(said), complaint=_last_line(_text(self._err)), ended=self._ended)

    def _end(self) -> None:
        leave(self._process)


def _parsed(line: str) -> Said | None:
    """NCCL writes to standard output too when it is asked to be chatty."""
    try:
        return from_json(Said, line) if line.startswith("{") else None
    except Malformed:
        return None


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""


# This machine's part in the check of a gang.


def take_part(order: GangOrder) -> GangFacts:
    """Return what this member saw of the others."""
    if order.device == "cuda" and smi.are_stand_ins():
        return GangFacts(rank=order.rank, met=True, arrived=tuple(range(order.world)))
    probe = ProbeOrder(
        kind=GANG,
        rank=order.rank,
        world=order.world,
        address=order.address,
        port=order.port,
        device=order.device,
        megabytes=order.megabytes,
        patience_s=order.limit_s / 2,
    )
    (heard,) = work(order.python, (probe,), _member_env(order), limit_s=order.limit_s)
    errors = [one.error for one in heard.said if one.error is not None]
    pairs = tuple(one.pair for one in heard.said if one.pair is not None)
    complaint = None if pairs and not heard.ended else heard.complaint  # else it is a library's warning
    return GangFacts(
        rank=order.rank,
        met=any(one.met for one in heard.said),
        arrived=next((one.arrived for one in heard.said if one.arrived), ()),
        pairs=pairs,
        error=errors[0] if errors else complaint or ("it hangs" if heard.ended else None),
    )


def _member_env(order: GangOrder) -> dict[str, str]:
    interface = order.interface or carrying(order.own_address)
    found = on_interface(interface) if interface else {}
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(order.devices)} if order.devices else {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **found, **chosen, **dict(order.env), "OMP_NUM_THREADS": "1"}
