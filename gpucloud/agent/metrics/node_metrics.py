"""Everything that is measured on a node, for one look a second, and the history kept of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpucloud.agent.metrics.endpoint import PORT, Endpoint, Figures, exposition
from gpucloud.agent.metrics.kernel_log import KernelLog
from gpucloud.agent.metrics.sampler import Sampler
from gpucloud.domain.codec import to_json
from gpucloud.domain.node.hardware import GpuSample, HostSample, Signs, Xid, absent, illness, pci_address
from gpucloud.domain.node.status import AttemptStatus, RunState
from gpucloud.domain.node.use import SPAN_S, span_of
from gpucloud.domain.variables import GPUCLOUD_METRICS_PORT
from gpucloud.system.smi import NO_PARTS, mig_parts, visible
from gpucloud.system.wholefile import write_whole

PORT_VARIABLE = GPUCLOUD_METRICS_PORT
_EVERY_S = 1.0
_STALE_S = 10.0
_PARTS_WITHIN_S = 5.0


class NodeMetrics:
    """`gpus`, `host` and `unhealthy` are what the agent's status says; without nvidia-smi nothing of GPUs runs."""

    def __init__(self, root: Path, environ: Mapping[str, str] = os.environ) -> None:
        self.gpus: tuple[GpuSample, ...] = ()
        self.host: HostSample | None = None
        self.unhealthy: str | None = None
        self._root = root
        self._environ = environ
        program = shutil.which("nvidia-smi", path=environ.get("PATH"))
        self._sampler = Sampler(program) if program else None
        self._kernel: KernelLog | None = None
        self._machine = Machine(root)
        self._sample_writer = SampleWriter()
        self._watch = _Watch()
        self._attempt: AttemptStatus | None = None
        self._xids: dict[int, int] = {}
        self._endpoint: Endpoint | None = None
        self._looked_at = 0.0
        self._chosen: str | None = None
        self._parts = NO_PARTS

    @property
    def spared(self) -> frozenset[int]:
        """Processes that are no part of any attempt and outlive it."""
        pids = (part.pid for part in (self._sampler, self._kernel) if part is not None)
        return frozenset(pid for pid in pids if pid is not None)

    def start(self) -> None:
        """Begin to sample and to answer; in the process that will go on, because threads do not survive a fork."""
        if self._sampler is not None:
            self._kernel = KernelLog()
            if not self._kernel.readable:
                sys.stderr.write("the kernel's log may not be read here: errors that the GPU driver logs go unseen\n")
            self._sampler.start()
        wanted = self._environ.get(PORT_VARIABLE, str(PORT))
        if wanted.isdecimal():
            self._endpoint = Endpoint(self.text, port=int(wanted))
            self._endpoint.start()
            with contextlib.suppress(OSError):
                write_whole(self._root / "agent" / "metrics.port", str(self._endpoint.port))

    def stop(self) -> None:
        """End everything that was begun."""
        for part in (self._sampler, self._endpoint):
            if part is not None:
                part.stop()
        if self._kernel is not None:
            self._kernel.close()

    def text(self) -> str:
        """Return the figures for Prometheus."""
        xids = tuple(sorted(self._xids.items()))
        return exposition(
            Figures(gpus=self.gpus, host=self.host, attempt=self._attempt, unhealthy=self.unhealthy, xids=xids)
        )

    def look(self, attempt: AttemptStatus | None, folder: Path | None, devices: str | None) -> None:
        """Look, if the last time is a second ago. `folder` is the running attempt's, `devices` which GPUs it sees.

        Without an own word on devices, the node's CUDA_VISIBLE_DEVICES counts.
        """
        self._attempt = attempt
        numbers = attempt.numbers if attempt is not None else ()
        if folder is None:
            self._sample_writer.end(numbers)
        now = time.monotonic()
        if now - self._looked_at < _EVERY_S:
            return
        self._looked_at = now
        self.host = self._machine.look()
        self._look_at_gpus(attempt, devices, now)
        if folder is not None:
            self._sample_writer.keep(
                folder / "metrics.jsonl", self.gpus, self.host, datetime.now(timezone.utc), numbers
            )

    def _look_at_gpus(self, attempt: AttemptStatus | None, devices: str | None, now: float) -> None:
        if self._sampler is None:
            return
        chosen = devices if devices is not None else self._environ.get("CUDA_VISIBLE_DEVICES")
        heard = self._sampler.heard_at
        fresh = heard is not None and now - heard < _STALE_S
        if chosen != self._chosen:
            self._chosen, self._parts = chosen, mig_parts(chosen, timeout_s=_PARTS_WITHIN_S)
        self.gpus = visible(self._sampler.newest, chosen, self._parts) if fresh else ()
        news = self._kernel.news() if self._kernel is not None else ()
        self._note(news)
        running = attempt is not None and attempt.state is RunState.RUNNING
        signs = self._watch.signs(attempt.attempt if running and attempt else None, self.gpus, self._sampler, news, now)
        if signs is not None:
            self.unhealthy = self.unhealthy or illness(signs)

    def _note(self, news: tuple[Xid, ...]) -> None:
        own = {pci_address(gpu.pci): gpu.index for gpu in self.gpus}
        self._xids.update({own[place]: xid.number for xid in news if (place := pci_address(xid.pci)) in own})


class _Watch:
    """What has been seen since an attempt began."""

    def __init__(self) -> None:
        self._attempt: int | None = None
        self._before: tuple[GpuSample, ...] = ()
        self._xids: tuple[Xid, ...] = ()
        self._missing_since: float | None = None

    def signs(
        self, attempt: int | None, gpus: tuple[GpuSample, ...], sampler: Sampler, news: tuple[Xid, ...], now: float
    ) -> Signs | None:
        """Return the signs, None while no attempt runs or no GPU has been seen in it."""
        if attempt is None or sampler.heard_at is None or (attempt != self._attempt and not gpus):
            self._attempt = None
            return None
        if attempt != self._attempt:
            self._attempt, self._before, self._xids, self._missing_since = attempt, gpus, (), None
        self._xids += news
        missing = bool(absent(self._before, gpus))
        self._missing_since = (self._missing_since or now) if missing else None
        return Signs(
            before=self._before,
            now=gpus,
            silent=timedelta(seconds=now - sampler.heard_at),
            said=sampler.said,
            missing=timedelta(seconds=now - self._missing_since if self._missing_since else 0),
            xids=self._xids,
        )


# A node's history: a line of means and extremes every ten seconds, in the attempt's folder.


class SampleWriter:
    """Collects samples, and appends a span to the file when it is full or the attempt ends."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start: datetime | None = None
        self._rounds: list[tuple[GpuSample, ...]] = []
        self._hosts: list[HostSample] = []
        self._numbers: tuple[tuple[str, float], ...] = ()

    def keep(
        self,
        path: Path,
        gpus: tuple[GpuSample, ...],
        host: HostSample | None,
        now: datetime,
        numbers: tuple[tuple[str, float], ...] = (),
    ) -> None:
        """Take what was sampled now, for the attempt whose file is `path`."""
        if path != self._path:
            self.end()
        self._path, self._start, self._numbers = path, self._start or now, numbers
        if gpus and (not self._rounds or gpus != self._rounds[-1]):
            self._rounds.append(gpus)
        if host is not None:
            self._hosts.append(host)
        if (now - self._start).total_seconds() >= SPAN_S:
            self._write(now)

    def end(self, numbers: tuple[tuple[str, float], ...] = ()) -> None:
        """Write what is left of the span that is open, with what the script said last."""
        self._numbers = numbers or self._numbers
        if self._start is not None:
            self._write(datetime.now(timezone.utc))
        self._path = self._start = None

    def _write(self, now: datetime) -> None:
        # The last look ends this span and begins the next one: bytes on the network count from look to look.
        start, hosts, rounds = self._start, self._hosts, self._rounds
        self._start, self._hosts, self._rounds = now, hosts[-1:], []
        if self._path is None or start is None or len(hosts) < 2:
            return
        line = to_json(replace(span_of(start, now, rounds, hosts), numbers=self._numbers)) + "\n"
        with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk costs history, not the job
            file.write(line)


# The machine's own figures, from the kernel.


_MIB = 1 << 20


class Machine:
    """Looks at /proc; remembers the look before, because the kernel counts from the boot on."""

    def __init__(self, disk: Path, proc: Path = Path("/proc"), net: Path = Path("/sys/class/net")) -> None:
        """`disk` is a folder on the file system whose space counts."""
        self._net = net
        self._disk = disk
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def look(self) -> HostSample | None:
        """Return how it stands, None where there is no /proc (macOS)."""
        try:
            memory = _memory(self._proc / "meminfo")
            received, sent = _network(self._proc / "net/dev", self._net)
            disk = os.statvfs(self._disk)
            return HostSample(
                at=datetime.now(timezone.utc),
                cpu=self._cpu(),
                memory_used_mib=memory["MemTotal"] - memory["MemAvailable"],
                memory_mib=memory["MemTotal"],
                disk_free_mib=disk.f_bavail * disk.f_frsize // _MIB,
                received=received,
                sent=sent,
            )
        except (OSError, KeyError, ValueError, IndexError):
            return None

    def _cpu(self) -> float | None:
        """Return the busy share since the look before, in percent (proc(5): user … steal; guest is in user)."""
        with (self._proc / "stat").open() as file:
            counts = [int(word) for word in file.readline().split()[1:9]]
        total, idle = sum(counts), counts[3] + counts[4]
        before, self._before = self._before, (total, idle)
        if before is None or total <= before[0]:
            return None
        return round(100.0 * (1 - (idle - before[1]) / (total - before[0])), 1)


def _memory(path: Path) -> dict[str, int]:
    """Return the first lines of meminfo, in MiB."""
    found = {}
    with path.open() as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) // 1024
            if name == "MemAvailable":
                break
    return found


def _network(path: Path, net: Path) -> tuple[int, int]:
    """Return bytes received and sent by the machine's network cards.

    What goes over a bond, a VLAN, a bridge or a container's pair of ends goes over a card's port too, and would count
    twice; only a card has a device. Where none has one, as in a container, whatever there is counts.
    """
    counts: dict[str, tuple[int, int]] = {}
    with path.open() as file:
        for line in file:
            name, colon, rest = line.partition(":")
            if colon and name.strip() != "lo":
                words = rest.split()
                counts[name.strip()] = int(words[0]), int(words[8])
    cards = [name for name in counts if (net / name / "device").exists()] or list(counts)
    return sum(counts[name][0] for name in cards), sum(counts[name][1] for name in cards)
