"""What a job is going to cost and when it will be done: sums of replays, fitted to the job itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.interval import SaveTimes, cheapest_interval, interval, interval_with_notice, save_times
from gpucloud.domain.job import Job
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.protection import OTHERWISE, Saving
from gpucloud.domain.rates import Rates
from gpucloud.domain.simulation.outcome import Summary
from gpucloud.domain.sizing import saved_bytes
from gpucloud.domain.sundries import usd_of_saves

_CENT = Decimal("0.01")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """How often a job saves by itself, what a save takes, and how often would do if every notice came."""

    every: timedelta
    with_notice: timedelta
    between: timedelta
    times: SaveTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What checkpoints of `size` bytes cost in S3 beside the budget, saved at that interval; and at the cheapest."""

    size: int
    saves: int
    usd: Decimal
    cheapest_every: timedelta
    cheapest_usd: Decimal


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


def saves_of(job: Job, saving: Saving, outlook: Summary) -> Saves | None:
    """Return how often the job is to save; None where its script decides that, or nobody knows what a save is."""
    apart = between(outlook)
    if job.model is None or apart is None or saving in OTHERWISE:
        return None
    times = save_times(job.model, nodes=job.resources.nodes, gpus=job.resources.gpus)
    return Saves(
        every=interval(times, apart), with_notice=interval_with_notice(times, apart), between=apart, times=times
    )


def stored_of(job: Job, rates: Rates, work: timedelta, outlook: Summary, saves: Saves | None) -> Stored | None:
    """Return what the saves of so much work cost in S3; None where nothing is known of them, or charged."""
    if job.model is None or saves is None or not rates.storage_usd_per_gib_month:
        return None
    size, span, keep = saved_bytes(job.model), outlook.took or work, job.checkpoint.keep

    def usd(saved: int) -> Decimal:
        return usd_of_saves(size, saved, keep, span, rates)

    usd_per_hour = float(outlook.mean_usd) / max(span / timedelta(hours=1), 1.0)
    each_usd = float(usd(keep + 2) - usd(keep + 1))
    cheapest = cheapest_interval(saves.times, saves.between, each_usd, usd_per_hour)
    made = max(1, work // (job.checkpoint.every or saves.every))
    return Stored(
        size=size,
        saves=made,
        usd=usd(made),
        cheapest_every=cheapest,
        cheapest_usd=usd(max(1, work // cheapest)),
    )
