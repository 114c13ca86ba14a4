"""How an attempt uses its GPUs over the last minutes, and the nodes' history and profiles brought away from there."""

from __future__ import annotations

import gzip
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import NodeError, StoreError
from gpucloud.domain.job.quantities import counted, span_of
from gpucloud.domain.node.node import Node
from gpucloud.domain.node.status import OUTPUT, UNTOLD, Progress, Status
from gpucloud.domain.node.use import LOOK, DeviceUse, GpuUse, Span, UseSpan, parse_summary, summary_lines, warning
from gpucloud.domain.state.state import Attempt, JobState, Member
from gpucloud.domain.supervision.membership import members_of, part_of, progress_of
from gpucloud.domain.supervision.snapshot import NodeSnapshot, Snapshot
from gpucloud.domain.untrusted import STATUS_BYTES
from gpucloud.ports import Clock, Host, Outputs, Shell
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.records import DamagedPiece

_LONGEST_GAP_S = 5.0  # between two samples; a longer one was not seen, and counts as this much
_HALF = 0.5
_STRETCHES = 10  # in a window


@dataclass(slots=True)
class _Stretch:
    """Some seconds of training of one node: the sum of each figure, and the seconds that it was known for."""

    seconds: float = 0.0
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def add(self, seconds: float, figures: dict[str, float]) -> None:
        self.seconds += seconds
        for name, value in figures.items():
            total, known = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + seconds * value, known + seconds)

    def mean(self, name: str) -> float | None:
        total, known = self.sums.get(name, (0.0, 0.0))
        return total / known if known > 0 else None


@dataclass(slots=True)
class _Window:
    """The last `length_s` of training of one node, in a few stretches: few enough to be stored at every renewal."""

    length_s: float
    stretches: deque[_Stretch] = field(default_factory=deque)

    @property
    def covered_s(self) -> float:
        return sum(stretch.seconds for stretch in self.stretches)

    def add(self, seconds: float, figures: dict[str, float]) -> None:
        if not self.stretches or self.stretches[-1].seconds >= self.length_s / _STRETCHES:
            self.stretches.append(_Stretch())
        self.stretches[-1].add(seconds, figures)
        while self.covered_s - self.stretches[0].seconds >= self.length_s:
            self.stretches.popleft()

    def names(self) -> set[str]:
        return {name for stretch in self.stretches for name in stretch.sums}

    def mean(self, name: str) -> float | None:
        total, known = self._sum(name)
        return total / known if known > 0 else None

    def share(self, name: str) -> float:
        """The share of the window for which the figure was there."""
        return self._sum(name)[1] / self.covered_s if self.covered_s else 0.0

    def _sum(self, name: str) -> tuple[float, float]:
        found = [stretch.sums[name] for stretch in self.stretches if name in stretch.sums]
        return sum(total for total, _ in found), sum(known for _, known in found)


@dataclass(slots=True)
class _NodeUse:
    """One node's windows, by length."""

    windows: tuple[_Window, ...]
    sampled_at: datetime | None = None

    def over(self, length: timedelta) -> _Window:
        return next(window for window in self.windows if window.length_s == length.total_seconds())


@dataclass(slots=True)
class UsageMeter:
    """Meters the open attempt. `lasting` is the window of the job's `idle:` policy, None without one.

    What that policy goes by stands in the state: another process meters on from there.
    """

    lasting: timedelta | None = None
    _attempt: int = 0
    _nodes: dict[str, _NodeUse] = field(default_factory=dict)
    _waiting: float | None = None
    _reports: bool = False
    _warned: int = 0

    def take(self, attempt: Attempt, snapshot: Snapshot) -> GpuUse | None:
        """Take what this pass saw, and return the use over the policy's window; None without policy or GPUs."""
        if attempt.number != self._attempt:
            self._begin(attempt)
        progress = progress_of(attempt, snapshot)
        if progress is not None and not self._reports:
            self._reports, self._nodes = True, {}  # what was taken for training was its start
        self._waiting = progress.waiting_share if progress else None
        for node in members_of(attempt, snapshot):
            if node is not None and node.status is not None and node.status.gpus:
                self._sample(attempt, node, node.status, counts=_trains(progress))
        return self._over(self.lasting) if self.lasting is not None else None

    def written(self, state: JobState) -> JobState:
        """Return the state with what the policy goes by written into its open attempt."""
        attempt = state.attempt
        if attempt is None or attempt.number != self._attempt or self.lasting is None:
            return state
        members = tuple(self._written(member, self.lasting) for member in attempt.members)
        return replace(state, attempts=(*state.attempts[:-1], replace(attempt, members=members)))

    def warning(self) -> str | None:
        """Return what to warn of, once an attempt."""
        if self._warned == self._attempt:
            return None
        text = warning(self._over(LOOK))
        if text is not None:
            self._warned = self._attempt
        return text

    def _begin(self, attempt: Attempt) -> None:
        """Go on from what is stored of the attempt; once its first step was told of, that is of training."""
        self._attempt, self._nodes, self._waiting = attempt.number, {}, None
        self._reports = attempt.first_step is not None
        for member in attempt.members:
            if member.used_until is not None:
                windows = self._windows()
                for window, span in itertools.product(windows, member.use):
                    window.add(span.seconds, _uses(span))
                self._nodes[member.node_id] = _NodeUse(windows=windows, sampled_at=member.used_until)

    def _written(self, member: Member, lasting: timedelta) -> Member:
        node = self._nodes.get(member.node_id)
        if node is None:
            return replace(member, use=(), used_until=None)
        return replace(member, use=_spans(node.over(lasting)), used_until=node.sampled_at)

    def _sample(self, attempt: Attempt, node: NodeSnapshot, status: Status, *, counts: bool) -> None:
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
        found = {node_id: node.over(length) for node_id, node in self._nodes.items()}
        if not found:
            return None
        memory = [m for w in found.values() for name in w.names() if name.startswith("memory") if (m := w.mean(name))]
        cpu = [c for w in found.values() if (c := w.mean("cpu")) is not None]
        return GpuUse(
            covered=span_of(round(min(window.covered_s for window in found.values()), 3)),
            devices=tuple(device for node_id, window in sorted(found.items()) for device in _devices(node_id, window)),
            memory=max(memory, default=None),
            cpu=max(cpu, default=None),
            slowdowns=_lasting_slowdowns(tuple(found.values())),
            waiting_share=self._waiting,
        )


def _trains(progress: Progress | None) -> bool:
    """Training counts from the first step on; a script that reports nothing but saves is taken to train all the time.

    So is what it does after `run.done()`: nobody said of it that it takes its own time.
    """
    if progress is None or progress.phase in (UNTOLD, OUTPUT, "done"):
        return True
    return progress.phase == "train" and progress.step >= progress.first_step


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
    uses = ((index, window.mean(f"use {index}")) for index in _indices(window.names()))
    return [DeviceUse(node_id=node_id, index=index, use=use) for index, use in uses if use is not None]


def _indices(names: set[str]) -> list[int]:
    return sorted(int(name.removeprefix("use ")) for name in names if name.startswith("use "))


def _spans(window: _Window) -> tuple[UseSpan, ...]:
    """Return a window as it is stored."""
    most = max(_indices(window.names()), default=-1)
    return tuple(
        UseSpan(
            seconds=round(stretch.seconds, 3),
            uses=tuple(_rounded(stretch.mean(f"use {index}")) for index in range(most + 1)),
        )
        for stretch in window.stretches
    )


def _uses(span: UseSpan) -> dict[str, float]:
    """Return the figures of a stored stretch."""
    return {f"use {index}": use for index, use in enumerate(span.uses) if use is not None}


def _rounded(use: float | None) -> float | None:
    return round(use, 1) if use is not None else None


def _lasting_slowdowns(windows: tuple[_Window, ...]) -> tuple[str, ...]:
    names = {name for window in windows for name in window.names() if name.startswith("slow ")}
    lasting = (name for name in names if any(window.share(name) >= _HALF for window in windows))
    return tuple(sorted(name.removeprefix("slow ") for name in lasting))


# Bringing the nodes' history to the store: pieces of whole lines, compressed, each under the offset it starts at.


EVERY = timedelta(minutes=3)
_MOST = 1 << 20  # bytes that one look takes


@dataclass(slots=True)
class _Kept:
    """How far one node's file of one attempt is in the store, and when it was looked at."""

    offset: int
    at: datetime


@dataclass(slots=True)
class UsageHistory:
    """Keeps each node's use in the store, every few minutes and when an attempt ends; threads may share it."""

    jobs: JobStore
    clock: Clock
    _kept: dict[tuple[int, str], _Kept] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, host: Host, attempt: int, *, last: bool = False) -> None:
        """Bring what is new, if it is time or this is the `last` look. Raises HostUnreachable.

        What the store refuses waits for the next look: no job ends for its history.
        """
        key, now = (attempt, host.node.id), self.clock.now()
        with self._lock:
            known = self._kept.setdefault(key, _Kept(offset=-1, at=now))
        if not last and now - known.at < EVERY:
            return
        known.at = now
        try:
            if known.offset < 0:  # an earlier supervisor may have kept some
                known.offset = self.jobs.records.history_length(attempt, host.node.id)
            self._bring(host, attempt, known)
        except StoreError:
            known.offset = -1  # only the answer may have been lost: what is there is asked again

    def _bring(self, host: Host, attempt: int, known: _Kept) -> None:
        path = f"{host.node.root}/attempts/{attempt:04d}/metrics.jsonl"
        done = host.run(("sh", "-c", 'tail -c "+$2" "$1" 2>/dev/null | head -c "$3"', "sh", path, *_range(known)))
        said = done.stdout[:_MOST]  # a machine may say more than it was asked for
        whole = said[: said.rfind(b"\n") + 1]
        if whole:
            self.jobs.records.append_history(attempt, host.node.id, known.offset, gzip.compress(whole, mtime=0))
            known.offset += len(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """One node's use during one attempt."""

    attempt: int
    node_id: str
    spans: tuple[Span, ...]


def read_history(jobs: JobStore, attempt: int | None = None) -> tuple[NodeHistory, ...]:
    """Return what the store has, by attempt and node; a piece or a line that is damaged is passed over."""
    found: dict[tuple[int, str], list[Span]] = {}
    for part in jobs.records.history_parts(attempt):
        spans = found.setdefault((part.attempt, part.node_id), [])
        with suppress(DamagedPiece):
            for line in jobs.records.read_history(part).splitlines():
                with suppress(Malformed):
                    spans.append(from_json(Span, line, of_any_version=True))
    return tuple(NodeHistory(attempt=key[0], node_id=key[1], spans=tuple(spans)) for key, spans in found.items())


def _range(known: _Kept) -> tuple[str, str]:
    return str(known.offset + 1), str(_MOST)


# Bringing home what profilers recorded, from every node of an attempt.


_SUMMARY = "rank-0.summary.json"


def bring_profiles(
    outputs: Outputs,
    shell: Shell,
    nodes: tuple[Node, ...],
    attempt: int,
    *,
    gone: tuple[str, ...] = (),
    stored: Outputs | None = None,
) -> Iterator[str]:
    """Yield what to tell: where the profiles are, what rank 0's says; machines that are `gone` keep their own.

    What finds no place at home goes to `stored`.
    """
    brought: list[Path] = []
    is_known = not gone
    for node in nodes:
        try:
            brought += (Path(path) for path in outputs.bring_profile(shell.host(node), attempt))
        except (NodeError, StoreError) as error:
            is_known = False
            yield f"the profile that {node.id} recorded could not be brought home: {error}"
            if stored is not None and isinstance(error, StoreError):
                yield from _stored_profile(stored, shell, node, attempt)
    traces = [path for path in brought if not path.name.endswith(".summary.json")]
    if traces:
        yield f"brought home: {counted(len(traces), 'profile')} in {traces[0].parent}"
    elif is_known:
        yield "no profile: no rank came as far, or the script does not use gpucloud.resume and there is no nsys"
    if gone:
        them = "it" if len(gone) == 1 else "them"
        yield f"what {', '.join(gone)} recorded for a profile, if anything, went with {them}"
    for path in brought:
        # A node may send a folder or a link by that name.
        if path.name == _SUMMARY and path.is_file() and not path.is_symlink() and path.stat().st_size <= STATUS_BYTES:
            try:
                yield from summary_lines(parse_summary(path.read_bytes()))
            except (ValueError, OverflowError) as error:
                yield f"what the profile says of itself is damaged: {error}"


def _stored_profile(stored: Outputs, shell: Shell, node: Node, attempt: int) -> Iterator[str]:
    try:
        if stored.bring_profile(shell.host(node), attempt):
            then = "comes home when the job has ended; where it cannot yet, `gpucloud down JOB` tries again"
            yield f"the profile that {node.id} recorded is in the store instead, and {then}"
    except (NodeError, StoreError) as error:
        yield f"it could not be put into the store either: {error}"
