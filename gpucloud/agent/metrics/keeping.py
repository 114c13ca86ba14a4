"""A node's history: a line of means and extremes every ten seconds, in the attempt's folder."""

from __future__ import annotations

import contextlib
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.codec import to_json
from gpucloud.domain.hardware.gpus import GpuSample
from gpucloud.domain.hardware.host import HostSample
from gpucloud.domain.history import SPAN_S, span_of


class Keeper:
    """Collects samples, and appends a span to the file when it is full or the attempt ends."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._start: datetime | None = None
        self._rounds: list[tuple[GpuSample, ...]] = []
        self._hosts: list[HostSample] = []

    def keep(self, path: Path, gpus: tuple[GpuSample, ...], host: HostSample | None, now: datetime) -> None:
        """Take what was sampled now, for the attempt whose file is `path`."""
        if path != self._path:
            self.end()
        self._path, self._start = path, self._start or now
        if gpus and (not self._rounds or gpus != self._rounds[-1]):
            self._rounds.append(gpus)
        if host is not None:
            self._hosts.append(host)
        if (now - self._start).total_seconds() >= SPAN_S:
            self._write(now)

    def end(self) -> None:
        """Write what is left of the span that is open."""
        if self._start is not None:
            self._write(datetime.now(timezone.utc))
        self._path = self._start = None

    def _write(self, now: datetime) -> None:
        # The last look ends this span and begins the next one: bytes on the network count from look to look.
        start, hosts, rounds = self._start, self._hosts, self._rounds
        self._start, self._hosts, self._rounds = now, hosts[-1:], []
        if self._path is None or start is None or len(hosts) < 2:
            return
        line = to_json(span_of(start, now, rounds, hosts)) + "\n"
        with contextlib.suppress(OSError), self._path.open("a") as file:  # a full disk costs history, not the job
            file.write(line)
