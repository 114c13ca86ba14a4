"""What a rank's profile says, in a few lines."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.codec import from_json
from gpucloud.domain.quoting import brief

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
