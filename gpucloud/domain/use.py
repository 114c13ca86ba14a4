"""How well an attempt uses its GPUs, and what most likely keeps them waiting."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

from gpucloud.domain.job import IdlePolicy
from gpucloud.domain.quantities import format_span

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
