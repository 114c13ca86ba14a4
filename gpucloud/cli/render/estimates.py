"""An estimate as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpucloud.cli.render.plans import ends_at, labelled, plan_json, plan_rows, saved_rows, stored_json, stored_text
from gpucloud.cli.render.words import pool_json, replayed_usd, table, undone_text, usd, usd_or_null
from gpucloud.domain.checkpoint.protection import NEVER, Protection, Saving
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import format_span, format_usd
from gpucloud.domain.job.spec import Cloud, Job, Market, Policy
from gpucloud.domain.market.catalog import aged
from gpucloud.domain.market.outcome import Saves, Summary
from gpucloud.domain.market.plan import Plan, memory_needed
from gpucloud.domain.market.recordings import RecordedMarket
from gpucloud.domain.market.scenario import recovery_within, restart_within
from gpucloud.domain.offer import Offer
from gpucloud.ports import Chart, Series
from gpucloud.usecases.money.estimate import QUICK, AtDeadline, Candidate, Estimate, Need

_BARS = "▁▂▃▄▅▆▇█"
_SPARE = ("zones", "work", "9 in 10 below", "GPUs", "interrupted", "done after")
_FAR = 2.0  # a budget further above everything else would press it flat


def estimate_text(job: Job, estimate: Estimate, *, width: int | None, protection: Protection | None = None) -> str:
    """Return the estimate: the plan, what is to be expected, what else there is.

    `width` is a terminal's, which has a small curve too; None for what is none.
    """
    rows = plan_rows(estimate.plan)
    rows = {"machines": rows.pop("machines"), **dict(_memory_rows(job, estimate)), **rows}
    rows |= dict(_expected_rows(job, estimate))
    if protection is not None:
        every = f"; {rows['saves']}" if "saves" in rows else ""
        rows |= saved_rows(protection)
        rows["saves"] += every
    quotas = _quota_texts(estimate.quotas)
    parts = [labelled(f"plan for {estimate.plan.job}", rows, width), *quotas]
    parts.append(table([*_candidate_rows(job, estimate)], _SPARE))
    if len(estimate.policies) > 1:
        parts.append(table([*_policy_rows(job, estimate)]))
    if width is not None and len(estimate.curve) > 1:
        parts.append(_sparkline(estimate.curve))
    remarks = [*_sources(job, estimate), *_kept(job, estimate, protection)]
    return "\n\n".join([*parts, "\n".join(remarks)])


def deadline_chart(job: Job, estimate: Estimate) -> Chart:
    """Return cost against deadline; UsageError where nothing depends on one."""
    if len(estimate.curve) < 2:
        raise UsageError(
            "there is nothing to draw: no spot machines, or nobody knows how much work it is",
            hint="`market: spot` or auto, on AWS, with `work:` or `model: {tokens: …}`",
        )
    hours = [point.deadline / timedelta(hours=1) for point in estimate.curve]
    costs = [float(point.outlook.mean_usd) for point in estimate.curve]
    p90s = tuple(float(point.outlook.p90_usd or mean) for point, mean in zip(estimate.curve, costs, strict=True))
    series = [Series(label="expected; shaded: 9 in 10", points=tuple(zip(hours, costs, strict=True)), upper=p90s)]
    top = max(p90s)
    if estimate.on_demand is not None:
        usd = float(estimate.on_demand.mean_usd)
        top = max(top, usd)
        series.append(Series(label="on demand", points=((hours[0], usd), (hours[-1], usd))))
    if job.deadline is not None:
        at = job.deadline / timedelta(hours=1)
        series.append(Series(label="its deadline", points=((at, 0.0), (at, top))))
    budget = float(job.budget_usd)
    return Chart(
        title=str(estimate.plan.offer.pool),
        x_label="deadline (hours)",
        y_label="cost (USD)",
        series=tuple(series),
        limit=("budget", budget) if budget < _FAR * top else None,
    )


def estimate_json(job: Job, estimate: Estimate, protection: Protection | None = None) -> dict[str, Any]:
    """Return the estimate as an object: the plan as `train --detach` has it, and what is to be expected."""
    return {
        "job": estimate.plan.job,
        "plan": plan_json(estimate.plan),
        **({"saves": protection.saving.value} if protection is not None else {}),
        "as_of": estimate.plan.offer.as_of.isoformat(),
        "memory": _memory_json(job),
        "work_s": estimate.work.span.total_seconds() if estimate.work else None,
        "work_source": estimate.work.source if estimate.work else None,
        "changeover_s": estimate.changeover.total_seconds(),
        "policy": estimate.policy.value if estimate.policy else None,
        "outlook": _outlook_json(estimate.outlook),
        "on_demand": _outlook_json(estimate.on_demand),
        "candidates": [_candidate_json(candidate) for candidate in estimate.candidates],
        "policies": {policy.value: _outlook_json(outlook) for policy, outlook in estimate.policies},
        "by_deadline": [
            {"deadline_s": point.deadline.total_seconds(), "outlook": _outlook_json(point.outlook)}
            for point in estimate.curve
        ],
        "checkpoint_interval": _saves_json(estimate),
        "stored": stored_json(estimate.stored),
        "quotas": None if estimate.quotas is None else [need_json(need) for need in estimate.quotas],
        "recorded": [market.name for market in estimate.recorded],
    }


def _memory_rows(job: Job, estimate: Estimate) -> Iterator[tuple[str, str]]:
    needed, offer = memory_needed(job), estimate.plan.offer
    if needed is None:
        return
    of = f" of {offer.vram_gib}" if offer.vram_gib is not None else ""
    workers = estimate.plan.workers
    yield "model", f"{job.model} over {workers} {'GPU' if workers == 1 else 'GPUs'}"
    missing = "; activations are not counted without `seq:`" if needed.activations is None else ""
    yield "memory", f"{needed}{of} on each{missing}"


def _expected_rows(job: Job, estimate: Estimate) -> Iterator[tuple[str, str]]:
    work, outlook = estimate.work, estimate.outlook
    if work is None:
        yield "work", _unknown(job, estimate.plan.offer)
        if job.deadline is not None:
            yield "deadline", f"{ends_at(job.deadline)}; whether it will be done by then, only `work:` could tell"
        return
    yield "work", f"{format_span(work.span)}: {work.source}"
    if outlook is None:
        yield "expected", "not known: no replay came to its end, or the job is too long for one"
        return
    yield "expected", _cost_text(outlook, estimate.on_demand, job.budget_usd)
    is_kept = job.deadline is not None and (estimate.policy is not None or not outlook.windows)
    until = f"; the deadline is after {format_span(job.deadline)}" if job.deadline is not None and is_kept else ""
    if outlook.took is not None or outlook.is_mostly_unfinished:
        start = "" if outlook.windows else f", {format_span(estimate.start)} paid for a start included"
        yield "done after", f"{_took_text(outlook)}{start}{until}"
    if job.deadline is not None and not is_kept:
        yield "deadline", f"{ends_at(job.deadline)}; it depends on spot alone, `market: auto` keeps it on demand"
    if outlook.missed:
        yield _missed_row(job, outlook)
    if outlook.windows and not outlook.is_mostly_unfinished:
        yield "interrupted", f"{outlook.interruptions:.1f} times{_who(outlook)}"
    if estimate.saves is not None:
        yield "saves", _saves_text(estimate.saves)
    if estimate.stored is not None:
        yield "outside", stored_text(estimate.stored)


def _missed_row(job: Job, outlook: Summary) -> tuple[str, str]:
    """Return in how many replays the job did not do what is asked of it, and how often for which reason."""
    reasons = [
        f"{count} {why}"
        for count, why in (
            (outlook.late, "ended unfinished at the deadline"),
            (outlook.over_budget, "ended unfinished at the budget"),
            (outlook.unended, "with no end in the recording, and no known cost"),
        )
        if count > 0
    ]
    return _fails(job), f"in {outlook.missed} of {outlook.windows} replays: {', '.join(reasons)}"


def _fails(job: Job) -> str:
    """Return what replays do that do not do what is asked of the job."""
    return "missed" if job.deadline is not None else "unfinished"


def _who(outlook: Summary) -> str:
    """Return of which replays a figure is: some did not come to their end."""
    return f", in the {outlook.windows - outlook.unfinished} that finish" if outlook.unfinished else ""


def _unknown(job: Job, offer: Offer) -> str:
    if job.model is not None and job.model.tokens is not None:
        gpu = offer.gpu or "machines without GPUs"
        return f"not known: there is no peak in {job.model.precision.value} for {gpu}; `work: 48h` says it"
    return "not known: `work: 48h`, or `model: {tokens: 300B}`, makes time and cost known"


def _took_text(outlook: Summary) -> str:
    took = format_span(outlook.took) if outlook.took is not None else "never"
    if not outlook.unfinished:
        return took
    if not outlook.is_mostly_unfinished:
        return f"{took} in {outlook.windows - outlook.unfinished} of {outlook.windows} replays"
    others = f"; {took} in the others" if outlook.took is not None else ""
    return f"unfinished in {outlook.unfinished} of {outlook.windows} replays{others}"


def _cost_text(outlook: Summary, on_demand: Summary | None, budget_usd: Decimal) -> str:
    if not outlook.windows or on_demand is None:  # nothing takes these machines
        return format_usd(outlook.mean_usd)
    beside = f"on demand {format_usd(on_demand.mean_usd)}"
    if outlook.is_mostly_on_demand:
        beside = f"run on demand alone in {outlook.on_demand_alone} of {outlook.windows} replays"
    ended = f"off at {format_usd(budget_usd)}, unfinished"
    off = f"over budget in {outlook.over_budget} of {outlook.windows} replays: {ended}"
    if outlook.uses_up(budget_usd, one_in=2):
        return f"{off}; {beside}"
    if outlook.is_mostly_unfinished:
        return f"not known, for most replays come to no end; {beside}"
    mean = f"{format_usd(outlook.mean_usd)}{_who(outlook)}"
    if outlook.uses_up(budget_usd, one_in=10):
        return f"{mean}; {off}; {beside}"
    apart = ";" if outlook.unfinished else ","
    most = f" nine times in ten at most {format_usd(outlook.p90_usd)};" if outlook.p90_usd is not None else ""
    return f"{mean}{apart}{most} {beside}"


def _runs_on(outlook: Summary | None) -> str:
    """Return that what may take spot machines hardly does, as it follows on its name."""
    if outlook is None or not outlook.is_mostly_on_demand:
        return ""
    return f", run on demand in {outlook.on_demand_alone} of {outlook.windows}"


def _saves_text(saves: Saves) -> str:
    cost, apart = format_span(saves.times.cost), format_span(saves.between)
    return (
        f"every {format_span(saves.every)}: √(2 · {cost} a save · {apart} between interruptions);"
        f" {format_span(saves.with_notice)} would do if every notice came"
    )


def _quota_texts(needs: Sequence[Need] | None) -> list[str]:
    if needs is None:
        return ["quota: not known without AWS credentials"]
    return ["\n".join(map(_quota_text, needs))] if needs else []


def _quota_text(need: Need) -> str:
    room = need.room
    limit, used = ("?" if number is None else str(number) for number in (room.limit, room.used))
    verdict = "" if need.enough else ": too small, `gpucloud quota request` asks for more"
    return f"quota: {need.vcpus} vCPUs of {room.name!r} in {room.region}, {used} of {limit} in use{verdict}"


def _candidate_rows(job: Job, estimate: Estimate) -> Iterator[tuple[str, ...]]:
    of_policy = f" (by `{QUICK.value}`)" if estimate.policy not in (None, QUICK) else ""
    yield (
        f"machine{of_policy}",
        "GPUs",
        "zones",
        "USD/h each" if estimate.plan.nodes > 1 else "USD/h",
        "work",
        "expected",
        "9 in 10 below",
        "done after",
        "interrupted",
        _fails(job),
    )
    for candidate in estimate.candidates:
        offer, outlook = candidate.offer, candidate.outlook
        gpus = f"{offer.gpus} × {offer.gpu} {offer.vram_gib} GB" if offer.gpu else "-"
        work = format_span(candidate.work.span) if candidate.work else "?"
        hourly = f"{offer.usd_per_hour:.2f}"
        ends = f", ends as {candidate.ends_on}" if candidate.ends_on is not None else ""
        yield (
            f"{offer.pool}{ends}{_runs_on(outlook)}",
            gpus,
            str(candidate.zones),
            hourly,
            work,
            *_cells(outlook, estimate.plan),
        )


def _policy_rows(job: Job, estimate: Estimate) -> Iterator[tuple[str, ...]]:
    yield ("policy", "expected", "9 in 10 below", "done after", "interrupted", _fails(job))
    for policy, outlook in estimate.policies:
        yield (f"{policy.value}{_runs_on(outlook)}", *_cells(outlook, estimate.plan))


def _cells(outlook: Summary | None, plan: Plan) -> tuple[str, ...]:
    """Return what is to be expected: no sum that only the budget's end holds down, and no time that few have."""
    if outlook is None:
        return ("?", "?", "?", "?", "?")
    dear = tuple(outlook.uses_up(plan.budget_usd, one_in=times) for times in (2, 10))
    sums = (outlook.mean_usd, outlook.p90_usd)
    mean, p90 = ("over budget" if over else replayed_usd(of) for over, of in zip(dear, sums, strict=True))
    if not dear[0] and outlook.windows and outlook.is_mostly_unfinished:
        mean = "unfinished"
    elif not dear[0] and outlook.unfinished:
        mean += " if done"
    missed = f"{outlook.missed} of {outlook.windows}" if outlook.windows else "-"
    if outlook.took is None or outlook.is_mostly_unfinished or (dear[0] and not outlook.windows):
        return (mean, p90, "unfinished", "-", missed)
    return (mean, p90, format_span(outlook.took), f"{outlook.interruptions:.1f}", missed)


def _sparkline(curve: Sequence[AtDeadline]) -> str:
    costs = [float(point.outlook.mean_usd) for point in curve]
    low, high = min(costs), max(costs)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    bars = "".join(_BARS[round((cost - low) / step)] for cost in costs)
    first, last = ((format_usd(at.outlook.mean_usd), format_span(at.deadline)) for at in (curve[0], curve[-1]))
    ends = f"{first[0]} for a deadline of {first[1]} … {last[0]} for one of {last[1]}"
    return f"expected cost by deadline, with `market: auto`: {bars}  {ends}"


def _sources(job: Job, estimate: Estimate) -> Iterator[str]:
    offer, outlook = estimate.plan.offer, estimate.outlook
    now = estimate.plan.made_at
    is_old = now - offer.as_of > timedelta(days=1)
    of = f"of {aged(offer.as_of.date(), now)}" if is_old else f"as of {offer.as_of:%Y-%m-%d %H:%M} UTC"
    stored = "; what is stored in S3 is outside the budget" if job.cloud is Cloud.AWS else ""
    yield f"prices: {of}; worst cost: the budget, which machines cannot pass{stored}"
    gpus = {candidate.offer.gpu for candidate in estimate.candidates if candidate.work is not None}
    if len(gpus) > 1 and estimate.work is not None and estimate.work.on_any_gpu:
        yield "work: the same is assumed on every GPU above; `gpu:` names yours, `model: {tokens: …}` tells them apart"
    windows = _replays(estimate)
    if windows and outlook is not None:
        of = "expected" if outlook.windows else "spot machines"
        start = format_span(restart_within(estimate.changeover))
        yield f"{of}: {windows} replays at these prices, {start} a restart, {_rule(job, estimate)}"
        yield "recorded (markets of newer GPUs may differ):"
        yield from (f"  {_recording(market)}" for market in estimate.recorded)
        if estimate.plan.nodes > max(market.nodes for market in estimate.recorded):
            yield f"  recorded with one machine: all {estimate.plan.nodes} are taken to come and go together"


def _replays(estimate: Estimate) -> int:
    """Return how many replays stand behind what is expected, or behind the rows of spot machines beside it; maybe 0."""
    beside = (*(one.outlook for one in estimate.candidates), *(one for _, one in estimate.policies))
    of_all = (one.windows for one in beside if one is not None)
    return (estimate.outlook.windows if estimate.outlook is not None else 0) or max(of_all, default=0)


def _rule(job: Job, estimate: Estimate) -> str:
    """Return what decided in the replays: a policy is asked by jobs with a deadline alone."""
    if estimate.policy is Policy.ON_DEMAND:
        return f"machines and deadlines under `{QUICK.value}`"
    if estimate.policy is not None:
        return f"under `{estimate.policy.value}` (machines and deadlines under `{QUICK.value}`)"
    if job.deadline is None and any(offer.pool.market is Market.ON_DEMAND for offer in estimate.plan.offers):
        return "spot after each loss, and on demand to the end once no zone has any: no `deadline:` lets it wait"
    return "waiting for spot machines"


def _kept(job: Job, estimate: Estimate, protection: Protection | None) -> Iterator[str]:
    """Say what an interruption was taken to cost the script, and where it trains for less."""
    if protection is None or not estimate.recorded:
        return
    if protection.saving is Saving.DIRECTORY:
        recovery = recovery_within(estimate.changeover, protection.saving, job.checkpoint)
        yield f"replayed as a script that saves by itself: {undone_text(recovery)}"
    if protection.saving in NEVER:
        yield "replayed as a script that begins anew whenever its machines go"
        if estimate.plan.offer.pool.market is Market.SPOT and estimate.plan.on_demand_usd is not None:
            yield "spot machines do not pay for such a script: `resources: {market: on_demand}`, or have it save"


def _recording(market: RecordedMarket) -> str:
    when = f" from {market.started_at:%Y-%m-%d} on" if market.started_at is not None else ""
    zones = "1 zone" if len(market.zones) == 1 else f"{len(market.zones)} zones"
    return f"{market.machine} in {zones}, {format_span(market.length)}{when} ({market.name})"


def _memory_json(job: Job) -> dict[str, Any] | None:
    needed = memory_needed(job)
    if needed is None:
        return None
    return {
        "states_bytes": needed.states,
        "working_bytes": needed.working,
        "activations_bytes": needed.activations,
        "margin_bytes": needed.margin,
        "total_bytes": needed.total,
    }


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    offer = candidate.offer
    return {
        **pool_json(offer.pool),
        "gpu": offer.gpu,
        "gpus": offer.gpus,
        "vram_gib": offer.vram_gib,
        "zones": candidate.zones,
        "usd_per_hour": usd(offer.usd_per_hour),
        "cap_usd_per_hour": usd(offer.cap_usd_per_hour),
        "work_s": candidate.work.span.total_seconds() if candidate.work else None,
        "ends_on": pool_json(candidate.ends_on) if candidate.ends_on is not None else None,
        "outlook": _outlook_json(candidate.outlook),
    }


def _outlook_json(outlook: Summary | None) -> dict[str, Any] | None:
    if outlook is None:
        return None
    return {
        "windows": outlook.windows,
        "expected_usd": usd_or_null(outlook.known_mean_usd),
        "p90_usd": usd_or_null(outlook.p90_usd),
        "worst_replayed_usd": usd_or_null(outlook.worst_usd),
        "done_after_s": outlook.took.total_seconds() if outlook.took is not None else None,
        "interruptions": outlook.interruptions,
        "missed": outlook.missed,
        "over_budget": outlook.over_budget,
        "late": outlook.late,
        "unended": outlook.unended,
        "on_demand_alone": outlook.on_demand_alone,
    }


def _saves_json(estimate: Estimate) -> dict[str, float] | None:
    saves = estimate.saves
    if saves is None:
        return None
    return {
        "every_s": saves.every.total_seconds(),
        "with_notice_s": saves.with_notice.total_seconds(),
        "cost_s": saves.times.cost.total_seconds(),
        "upload_s": saves.times.upload.total_seconds(),
        "between_interruptions_s": saves.between.total_seconds(),
    }


def need_json(need: Need) -> dict[str, Any]:
    """Return what a job needs of one quota as an object."""
    room = need.room
    return {
        "region": room.region,
        "code": room.code,
        "name": room.name,
        "limit": room.limit,
        "used": room.used,
        "needed": need.vcpus,
        "instance_type": need.instance_type,
        "enough": need.enough,
    }
