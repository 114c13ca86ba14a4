"""What is kept of a node's use: one span of some seconds a line, with means and extremes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.hardware.gpus import GpuSample
from gpucloud.domain.hardware.host import HostSample

SPAN_S = 10
"""Length of a span, in seconds; the last of an attempt may be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpan:
    """One GPU over a span: mean and most use in percent, most memory in MiB, most °C, mean and most W."""

    index: int
    use: float | None
    use_most: int | None
    memory_used_mib: int | None
    memory_mib: int | None
    temperature: int | None
    power: float | None
    power_most: float | None
    slowdowns: tuple[str, ...] = ()
    ecc_uncorrected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """The machine over a span: mean CPU in percent, most memory and least disk in MiB, bytes over the network."""

    cpu: float | None
    memory_used_mib: int
    memory_mib: int
    disk_free_mib: int
    received: int
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`seconds` from `start` on."""

    start: datetime
    seconds: float
    gpus: tuple[GpuSpan, ...]
    host: HostSpan | None


def span_of(
    start: datetime, end: datetime, rounds: Sequence[tuple[GpuSample, ...]], hosts: Sequence[HostSample]
) -> Span:
    """Return the span that these samples make: `rounds` of all GPUs, and looks at the host."""
    by_index: dict[int, list[GpuSample]] = {}
    for gpu in (gpu for one in rounds for gpu in one):
        by_index.setdefault(gpu.index, []).append(gpu)
    return Span(
        start=start,
        seconds=round((end - start).total_seconds(), 3),
        gpus=tuple(_gpu(samples) for _, samples in sorted(by_index.items())),
        host=_host(hosts) if hosts else None,
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known, None when nothing is."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 1) if known else None


def _gpu(samples: list[GpuSample]) -> GpuSpan:
    newest = samples[-1]
    return GpuSpan(
        index=newest.index,
        use=mean(s.use for s in samples),
        use_most=max((s.use for s in samples if s.use is not None), default=None),
        memory_used_mib=max((s.memory_used_mib for s in samples if s.memory_used_mib is not None), default=None),
        memory_mib=newest.memory_mib,
        temperature=max((s.temperature for s in samples if s.temperature is not None), default=None),
        power=mean(s.power for s in samples),
        power_most=max((s.power for s in samples if s.power is not None), default=None),
        slowdowns=tuple(sorted({reason for s in samples for reason in s.slowdowns})),
        ecc_uncorrected=newest.ecc_uncorrected,
    )


def _host(samples: Sequence[HostSample]) -> HostSpan:
    first, last = samples[0], samples[-1]
    return HostSpan(
        cpu=mean(s.cpu for s in samples),
        memory_used_mib=max(s.memory_used_mib for s in samples),
        memory_mib=last.memory_mib,
        disk_free_mib=min(s.disk_free_mib for s in samples),
        received=last.received - first.received,
        sent=last.sent - first.sent,
    )
