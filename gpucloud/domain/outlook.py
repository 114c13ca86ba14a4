"""What a job is going to cost and when it will be done: sums of replays, fitted to the job itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.outcome import Summary

_CENT = Decimal("0.01")


def undisturbed(task: Task) -> Summary:
    """Return what a job comes to on machines that nobody takes, at the task's price; of no window at all."""
    took = timedelta(seconds=task.work_s + task.changeover_s)
    hourly = Decimal(str(task.on_demand_usd_per_hour)) * task.nodes
    usd = (hourly * Decimal(took / timedelta(hours=1))).quantize(_CENT)
    return Summary(
        windows=0,
        mean_usd=usd,
        p90_usd=usd,
        worst_usd=usd,
        missed=0,
        over_budget=0,
        interruptions=0.0,
        launches=1.0,
        took=took,
    )


def shortened(task: Task, factor: float) -> Task:
    """Return the task with work and deadline so many times shorter; a start takes as long as ever."""
    return replace(task, work_s=task.work_s / factor, span_s=task.span_s / factor)


def stretched(summary: Summary, factor: float) -> Summary:
    """Return what a job comes to that is so many times as long as the one that was replayed."""
    times = Decimal(str(factor))
    return replace(
        summary,
        mean_usd=(summary.mean_usd * times).quantize(_CENT),
        p90_usd=(summary.p90_usd * times).quantize(_CENT),
        worst_usd=(summary.worst_usd * times).quantize(_CENT),
        interruptions=summary.interruptions * factor,
        launches=summary.launches * factor,
        took=summary.took * factor if summary.took is not None else None,
        on_spot=summary.on_spot * factor,
    )


def between(summary: Summary) -> timedelta | None:
    """Return the mean time on spot machines, which alone are interrupted, for each interruption; None without any."""
    return summary.on_spot / summary.interruptions if summary.interruptions else None
