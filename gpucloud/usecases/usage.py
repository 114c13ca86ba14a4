"""How an attempt uses its GPUs over the last minutes of training, gathered pass by pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpucloud.domain.agentstatus import Progress, Status
from gpucloud.domain.state import Attempt
from gpucloud.domain.supervision.membership import members_of, part_of, progress_of
from gpucloud.domain.supervision.seen import NodeSeen, Seen
from gpucloud.domain.use import LOOK, DeviceUse, GpuUse, warning

_LONGEST_GAP_S = 5.0  # between two samples; a longer one was not seen, and counts as this much
_HALF = 0.5


@dataclass(slots=True)
class _Window:
    """Sums over the last `length` of training of one node: each figure with the seconds that it was known for."""

    length_s: float
    entries: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    covered_s: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, seconds: float, figures: dict[str, float]) -> None:
        self.entries.append((seconds, figures))
        self._count(seconds, figures)
        while self.covered_s - self.entries[0][0] >= self.length_s:
            gone, old = self.entries.popleft()
            self._count(-gone, old)

    def mean(self, name: str) -> float | None:
        total, seconds = self.sums.get(name, (0.0, 0.0))
        return total / seconds if seconds > 0 else None

    def share(self, name: str) -> float:
        """The share of the window for which the figure was there."""
        return self.sums.get(name, (0.0, 0.0))[1] / self.covered_s if self.covered_s else 0.0

    def _count(self, seconds: float, figures: dict[str, float]) -> None:
        self.covered_s += seconds
        for name, value in figures.items():
            total, known = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + seconds * value, known + seconds)


@dataclass(slots=True)
class _NodeUse:
    """One node's windows, by length."""

    windows: tuple[_Window, ...]
    sampled_at: datetime | None = None


@dataclass(slots=True)
class UsageMeter:
    """Meters the open attempt. `lasting` is the window of the job's `idle:` policy, None without one."""

    lasting: timedelta | None = None
    _attempt: int = 0
    _nodes: dict[str, _NodeUse] = field(default_factory=dict)
    _waiting: float | None = None
    _reports: bool = False
    _warned: int = 0

    def take(self, attempt: Attempt, seen: Seen) -> GpuUse | None:
        """Take what this pass saw, and return the use over the policy's window; None without policy or GPUs."""
        if attempt.number != self._attempt:
            self._attempt, self._nodes, self._waiting, self._reports = attempt.number, {}, None, False
        progress = progress_of(attempt, seen)
        if progress is not None and not self._reports:
            self._reports, self._nodes = True, {}  # what was taken for training was its start
        self._waiting = progress.waiting_share if progress else None
        for node in members_of(attempt, seen):
            if node is not None and node.status is not None and node.status.gpus:
                self._sample(attempt, node, node.status, counts=_trains(progress))
        return self._over(self.lasting) if self.lasting is not None else None

    def warning(self) -> str | None:
        """Return what to warn of, once an attempt."""
        if self._warned == self._attempt:
            return None
        text = warning(self._over(LOOK))
        if text is not None:
            self._warned = self._attempt
        return text

    def _sample(self, attempt: Attempt, node: NodeSeen, status: Status, *, counts: bool) -> None:
        at = status.gpus[0].at
        known = self._nodes.setdefault(node.node.id, _NodeUse(windows=self._windows()))
        before, known.sampled_at = known.sampled_at, at
        if not counts or before is None or at <= before or part_of(attempt, node) is None:
            return
        seconds = min((at - before).total_seconds(), _LONGEST_GAP_S)
        figures = _figures(status)
        for window in known.windows:
            window.add(seconds, figures)

    def _windows(self) -> tuple[_Window, ...]:
        lengths = {LOOK, self.lasting or LOOK}
        return tuple(_Window(length_s=length.total_seconds()) for length in lengths)

    def _over(self, length: timedelta) -> GpuUse | None:
        found = {
            node_id: window
            for node_id, node in self._nodes.items()
            for window in node.windows
            if window.length_s == length.total_seconds()
        }
        if not found:
            return None
        memory = [m for w in found.values() for name in w.sums if name.startswith("memory") if (m := w.mean(name))]
        cpu = [c for w in found.values() if (c := w.mean("cpu")) is not None]
        return GpuUse(
            covered=timedelta(seconds=round(min(window.covered_s for window in found.values()), 3)),
            devices=tuple(device for node_id, window in sorted(found.items()) for device in _devices(node_id, window)),
            memory=max(memory, default=None),
            cpu=max(cpu, default=None),
            slowdowns=_lasting_slowdowns(tuple(found.values())),
            waiting_share=self._waiting,
        )


def _trains(progress: Progress | None) -> bool:
    """Training counts from the first step on; a script that reports nothing is taken to train all the time."""
    return progress is None or (progress.phase == "train" and progress.step >= progress.first_step)


def _figures(status: Status) -> dict[str, float]:
    figures: dict[str, float] = {}
    for gpu in status.gpus:
        if gpu.use is not None:
            figures[f"use {gpu.index}"] = gpu.use
        if gpu.memory_used_mib is not None and gpu.memory_mib:
            figures[f"memory {gpu.index}"] = 100 * gpu.memory_used_mib / gpu.memory_mib
        figures.update({f"slow {reason}": 1.0 for reason in gpu.slowdowns})
    if status.host is not None and status.host.cpu is not None:
        figures["cpu"] = status.host.cpu
    return figures


def _devices(node_id: str, window: _Window) -> list[DeviceUse]:
    indices = sorted(int(name.split()[1]) for name in window.sums if name.startswith("use "))
    uses = ((index, window.mean(f"use {index}")) for index in indices)
    return [DeviceUse(node_id=node_id, index=index, use=use) for index, use in uses if use is not None]


def _lasting_slowdowns(windows: tuple[_Window, ...]) -> tuple[str, ...]:
    names = {name for window in windows for name in window.sums if name.startswith("slow ")}
    lasting = (name for name in names if any(window.share(name) >= _HALF for window in windows))
    return tuple(sorted(name.removeprefix("slow ") for name in lasting))
