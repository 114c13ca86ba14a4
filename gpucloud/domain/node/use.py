"""How nodes and GPUs are used: what is kept of it, what it says of an attempt, what a profile says of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import fmean

from gpucloud.domain.codec import from_json
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.job.spec import IdlePolicy
from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.untrusted import brief

LOOK = timedelta(minutes=5)
"""Over how much training time use is judged before anybody is warned."""

_LOW = 30.0  # percent; below it a GPU is paid for and mostly waits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One GPU's mean use over a window, in percent."""

    node_id: str
    index: int
    use: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UseSpan:
    """A stretch of training on one machine: how long it was, and each GPU's mean use in it, in percent."""

    seconds: float
    uses: tuple[float | None, ...]
    """By the GPUs' index; None for one that does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """All GPUs of an attempt over a window of training; saving and evaluating are left out of it.

    `covered` is how much training time there are samples for, `memory` the mean share of memory used on the fullest
    GPU and `cpu` the mean of the busiest machine, in percent; `slowdowns` held for half of the window at least;
    `waiting_share`, from 0 to 1, is what the script says of its steps.
    """

    covered: timedelta
    devices: tuple[DeviceUse, ...]
    memory: float | None = None
    cpu: float | None = None
    slowdowns: tuple[str, ...] = ()
    waiting_share: float | None = None

    @property
    def mean(self) -> float:
        """Mean use of all GPUs, in percent."""
        return fmean(device.use for device in self.devices)


def wasted(use: GpuUse | None, policy: IdlePolicy | None) -> str | None:
    """Return why the job is to stop under its `idle:` policy, None while it may go on."""
    if use is None or policy is None or not use.devices or use.covered < policy.lasting or use.mean >= policy.below:
        return None
    return (
        f"the GPUs were used {use.mean:.0f} % on average over {format_span(policy.lasting)} of training, "
        f"less than the {policy.below} % of `idle:`; {likely_cause(use)}"
    )


def warning(use: GpuUse | None) -> str | None:
    """Return a warning for the user who pays for GPUs that wait, None when they are well used or nothing is known."""
    if use is None or not use.devices or use.covered < LOOK:
        return None
    behind = _straggler(use)
    if use.mean >= _LOW and behind is None:
        return None
    return f"the GPUs are used {use.mean:.0f} % on average: {behind or likely_cause(use)}"


def likely_cause(use: GpuUse) -> str:
    """Return the likely cause of low use, with its figure and what to try."""
    return (
        _straggler(use)
        or _data(use)
        or _slowed(use)
        or _small_batch(use)
        or "no cause stands out: `gpucloud train --profile` shows where the time goes"
    )


def _straggler(use: GpuUse) -> str | None:
    """One GPU far below all others: its rank is late, and collectives make the others wait (busily) for it."""
    if len(use.devices) < 2:
        return None
    *others, lowest = sorted(use.devices, key=lambda device: -device.use)
    rest = fmean(device.use for device in others)
    if lowest.use >= _LOW or rest < 2 * _LOW:
        return None
    return (
        f"GPU {lowest.index} of {lowest.node_id} is used {lowest.use:.0f} %, the others {rest:.0f} %: "
        "its rank is behind, look at its data, disk and CPU"
    )


def _data(use: GpuUse) -> str | None:
    busy = use.cpu is not None and use.cpu >= 90
    if use.waiting_share is not None and use.waiting_share >= 0.3:
        remedy = "the CPUs are busy: cheaper samples, or machines with more cores" if busy else "raise num_workers"
        return f"{use.waiting_share:.0%} of a step is spent waiting for the next batch; {remedy}"
    if busy:
        return f"the CPUs are at {use.cpu:.0f} %: loading data is likely too slow; cheaper samples, or more cores"
    return None


def _slowed(use: GpuUse) -> str | None:
    if not use.slowdowns:
        return None
    reasons = ", ".join(use.slowdowns)
    cause = "heat" if any("thermal" in reason for reason in use.slowdowns) else "the power limit"
    return f"the GPUs are slowed down by {cause} ({reasons})"


def _small_batch(use: GpuUse) -> str | None:
    if use.memory is None or use.memory >= 40:
        return None
    return f"only {use.memory:.0f} % of GPU memory is used: a larger batch gives the GPUs more to do"


# What is kept of a node's use: one span of some seconds a line, with means and extremes.


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
    """`seconds` from `start` on; `numbers` are what the script said of itself at its end, by name."""

    start: datetime
    seconds: float
    gpus: tuple[GpuSpan, ...]
    host: HostSpan | None
    numbers: tuple[tuple[str, float], ...] = ()


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


# What a rank's profile says, in a few lines.


_LONGEST = 70  # kernels made from templates have names of many lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator's own time within the window, without what it called."""

    name: str
    calls: int
    cpu_seconds: float
    gpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSummary:
    """`rank-<r>.summary.json`; shares are of the window's `seconds`, None where nothing tells of them."""

    version: int
    rank: int
    steps: int
    seconds: float
    gpu_busy: float | None
    data_loading: float | None
    operators: tuple[Operator, ...]


def parse_summary(data: bytes) -> ProfileSummary:
    """Return the summary. Raises Malformed (a ValueError)."""
    return from_json(ProfileSummary, data, of_any_version=True)


def summary_lines(summary: ProfileSummary, most: int = 5) -> tuple[str, ...]:
    """Return the summary for people: the step, the shares, the operators that took the most."""
    steps = max(1, summary.steps)
    head = f"profile of rank {summary.rank}: {summary.steps} steps of {1000 * summary.seconds / steps:.1f} ms"
    if summary.gpu_busy is not None:
        head += f", GPU busy {100 * summary.gpu_busy:.0f} %"
    if summary.data_loading is not None:
        head += f", waiting for data {100 * summary.data_loading:.0f} %"
    return (head, *(f"  {_line(operator, summary, steps)}" for operator in summary.operators[:most]))


def _line(operator: Operator, summary: ProfileSummary, steps: int) -> str:
    seconds, where = (operator.cpu_seconds, "CPU") if summary.gpu_busy is None else (operator.gpu_seconds, "GPU")
    share = 100 * seconds / summary.seconds if summary.seconds else 0.0
    return f"{share:4.0f} % {where} {1000 * seconds / steps:8.2f} ms a step  {brief(operator.name, _LONGEST)}"
