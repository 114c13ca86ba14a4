"""Rehearsals and recorded markets as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpucloud.cli.render.plans import stored_json, stored_text
from gpucloud.cli.render.words import replayed_usd, table, undone_text, usd, usd_or_null
from gpucloud.domain import codec
from gpucloud.domain.job.quantities import format_hours, format_span, format_usd
from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.outcome import Stored, Summary
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone, mean_price, supply
from gpucloud.domain.market.scenario import Scenario, task_of
from gpucloud.domain.offer import region_of
from gpucloud.usecases.money.simulate import Result, Study

_HEAD = (
    "zones",
    "policy",
    "mean USD",
    "9 in 10 below",
    "worst",
    "of on demand",
    "done after",
    "interrupted",
    "starts",
)
_SPARE = ("starts", "of on demand", "worst", "interrupted", "zones", "9 in 10 below")
_LIST_HEAD = ("market", "machine", "nodes", "zones", "recorded", "length", "there", "interrupted/day", "spot price")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What was tried on one market, and what came of it."""

    market: RecordedMarket
    study: Study
    results: tuple[Result, ...]
    stored: Stored | None = None
    is_priced: bool = True
    """Whether its prices are the job's machine's, and not those of the recorded one."""


def simulation_text(job: str, scenario: Scenario, done: Simulation) -> str:
    """Return what was rehearsed, every result a row, what went wrong, and what the figures cannot know."""
    recovery, market = scenario.recovery, done.market
    lines = [
        f"{title(job, scenario)} on {scenario.nodes} × {market.machine}{_fewer(scenario)}",
        f"a restart takes {_span(recovery.restart_s)} (--restart changes it); {undone_text(recovery)}",
        f"market {market.name}: {market.about}, {_recorded(market)}, {format_span(market.length)};"
        f" {format_usd(market.on_demand_usd_per_hour)} an hour on demand{_whose(done)},"
        f" spot prices {'recorded' if market.prices_recorded else 'assumed'}",
        f"{done.study.windows} windows, seed {done.study.seed}: the job submitted at as many moments of the recording",
        "",
        table(_swept(scenario, done) if len(done.study.deadlines) > 1 else _each(scenario, done), _SPARE),
        "",
        *_troubles(done),
        *_remarks(scenario, done),
    ]
    return "\n".join(lines)


def title(job: str, scenario: Scenario) -> str:
    """Return what is rehearsed, in a line."""
    within = f"within {format_hours(scenario.deadline)}" if scenario.deadline is not None else "without a deadline"
    return f"{job}: {format_hours(scenario.work)} of work {within}, for {format_usd(scenario.budget_usd)} at the most"


def simulation_json(job: str, scenario: Scenario, done: Sequence[Simulation]) -> dict[str, Any]:
    """Return the rehearsal as an object: what was asked, and each market's results."""
    recovery = scenario.recovery
    return {
        "job": job,
        "work_s": scenario.work.total_seconds(),
        "deadline_s": _seconds(scenario.deadline),
        "budget_usd": usd(scenario.budget_usd),
        "nodes": scenario.nodes,
        "least_nodes": scenario.least_nodes or scenario.nodes,
        "restart_s": recovery.restart_s,
        "notice_s": recovery.notice_s,
        "save_s": None if recovery.begins_anew else recovery.save_s,
        "markets": [
            {
                **_about_json(one.market),
                "windows": one.study.windows,
                "seed": one.study.seed,
                "stored": stored_json(one.stored),
                "results": [_result_json(scenario, one.market, result) for result in one.results],
            }
            for one in done
        ],
    }


def markets_text(markets: Sequence[RecordedMarket]) -> str:
    """Return the markets as a table, and where they are from."""
    rows = [_LIST_HEAD, *(_market_row(market) for market in markets)]
    sources = dict.fromkeys(market.source for market in markets)
    about = (
        "there: how much of the time all those nodes could be had in any zone (in the worst and the best one)",
        "replays are billed by AWS's rules, on recordings of GCP too",
    )
    return "\n".join([table(rows), "", *about, "", "from", *(f"  {source}" for source in sources)])


def market_json(market: RecordedMarket) -> dict[str, Any]:
    """Return a market and how its zones were."""
    return {
        **_about_json(market),
        "nodes": market.nodes,
        "any_zone": _supply_json(market, market.zones),
        "zones": [{"zone": zone.name, **_supply_json(market, [zone])} for zone in market.zones],
    }


def _swept(scenario: Scenario, done: Simulation) -> list[tuple[str, ...]]:
    """Return a row for each set of zones and deadline, with the mean cost under every policy."""
    means: dict[tuple[str, str], list[str]] = {}
    for result in done.results:
        deadline = format_hours(result.deadline) if result.deadline is not None else "none"
        place = (zones_named(done.market, result.zones), deadline)
        is_over = result.summary.uses_up(scenario.budget_usd, one_in=2)
        means.setdefault(place, []).append(_mean(result.summary, is_over=is_over))
    asked = all(result.asked for result in done.results)
    head = ("zones", "deadline", *(f"{policy_named(policy, asked=asked)} USD" for policy in done.study.policies))
    return [head, *((*place, *costs) for place, costs in means.items())]


def _each(scenario: Scenario, done: Simulation) -> list[tuple[str, ...]]:
    return [_HEAD, *(_row(scenario, done.market, result) for result in done.results)]


def _row(scenario: Scenario, market: RecordedMarket, result: Result) -> tuple[str, ...]:
    found = result.summary
    told = found.took is not None and not found.is_mostly_unfinished
    over, once_in_ten = (found.uses_up(scenario.budget_usd, one_in=times) for times in (2, 10))
    return (
        zones_named(market, result.zones),
        policy_named(result.policy, asked=result.asked),
        _mean(found, is_over=over),
        "over budget" if once_in_ten else replayed_usd(found.p90_usd),
        replayed_usd(found.worst_usd),
        "-" if over or found.is_mostly_unfinished else f"{_of_on_demand(scenario, market, found.mean_usd):.1%}",
        format_hours(found.took) if told and found.took is not None else "unfinished",
        f"{found.interruptions:.1f}" if told else "-",
        f"{found.launches:.1f}" if told else "-",
    )


def _mean(found: Summary, *, is_over: bool) -> str:
    if is_over:
        return "over budget"
    return "unfinished" if found.is_mostly_unfinished else f"{found.mean_usd:.2f}{_if_done(found)}"


def _if_done(found: Summary) -> str:
    """Return what is said behind a mean that is not of all: some did not come to their end."""
    return " if done" if found.unfinished and found.took is not None else ""


def _troubles(done: Simulation) -> list[str]:
    """Say of each result what went wrong in it, or that nothing did in any."""
    lines = []
    for result in done.results:
        found, place = result.summary, zones_named(done.market, result.zones)
        which = f"{policy_named(result.policy, asked=result.asked)} in {place}"
        if len(done.study.deadlines) > 1 and result.deadline is not None:
            which = f"{which}, {format_hours(result.deadline)}"
        if found.late:
            lines.append(f"{which}: {found.late} of {found.windows} ended unfinished at the deadline")
        if found.unended:
            lines.append(f"{which}: {found.unended} of {found.windows} had no end in the recording, and no known cost")
        if found.over_budget:
            lines.append(f"{which}: {found.over_budget} of {found.windows} ended unfinished at the budget")
    kept = "its deadline and budget" if None not in done.study.deadlines else "its budget"
    return lines or [f"finished within {kept}, in every window"]


def _whose(done: Simulation) -> str:
    """Return that the price is not that of the job's own machine, where it is not."""
    return "" if done.is_priced else f" (of {done.market.instance_type}, not of yours: --price)"


def _fewer(scenario: Scenario) -> str:
    return f", and on fewer, down to {scenario.least_nodes}" if scenario.least_nodes else ""


def _remarks(scenario: Scenario, done: Simulation) -> list[str]:
    market = done.market
    year = f" of {market.started_at:%Y}" if market.started_at else ""
    lines = [f"outside the budget: {stored_text(done.stored)}"] if done.stored is not None else []
    lines += [f"these were {market.gpu} machines{year}: others, H100-class ones above all, may come and go otherwise"]
    if Policy.LEARNED in done.study.policies:
        lines.append("learned knows nothing of these weeks, only of the other recordings")
    if scenario.nodes > market.nodes == 1:
        lines.append(f"recorded with one machine: all {scenario.nodes} are taken to come and go together")
    if scenario.nodes < market.nodes:
        lines.append(f"recorded with {market.nodes} machines: the job's are taken to be the last that go")
    return lines


def zones_named(market: RecordedMarket, names: Sequence[str]) -> str:
    """Return the shortest name of a set of zones."""
    if len(names) == 1:
        return names[0]
    if len(names) == len(market.zones):
        return f"all {len(names)}"
    regions = {region_of(name) for name in names}
    of_region = [zone.name for zone in market.zones if region_of(zone.name) in regions]
    return f"{', '.join(sorted(regions))} ({len(names)})" if list(names) == of_region else ", ".join(names)


def _of_on_demand(scenario: Scenario, market: RecordedMarket, cost_usd: Decimal) -> float:
    """Return a cost as a share of what the work alone costs on demand."""
    task = task_of(scenario, market)
    return float(cost_usd) / (task.nodes * task.on_demand_usd_per_hour * task.work_s / 3600)


def _result_json(scenario: Scenario, market: RecordedMarket, result: Result) -> dict[str, Any]:
    found = result.summary
    return {
        "zones": list(result.zones),
        "deadline_s": _seconds(result.deadline),
        "policy": _asked_policy(result),
        "runs_on": policy_named(result.policy, asked=result.asked),
        "mean_usd": usd_or_null(found.known_mean_usd),
        "p90_usd": usd_or_null(found.p90_usd),
        "worst_usd": usd_or_null(found.worst_usd),
        "of_on_demand": _share_or_null(scenario, market, found),
        "missed": found.missed,
        "over_budget": found.over_budget,
        "late": found.late,
        "unended": found.unended,
        "interruptions": found.interruptions,
        "launches": found.launches,
        "took_s": found.took.total_seconds() if found.took is not None else None,
    }


def _share_or_null(scenario: Scenario, market: RecordedMarket, found: Summary) -> float | None:
    """Return the mean as a share; None where most came to no end: what these paid is no cost of the work."""
    return None if found.is_mostly_unfinished else round(_of_on_demand(scenario, market, found.mean_usd), 4)


def _asked_policy(result: Result) -> str | None:
    """Return the policy; None where none is asked: machines on demand are what they are."""
    waits_for_spot = result.policy is Policy.GREEDY and not result.asked
    return result.policy.value if result.policy is not None and not waits_for_spot else None


def _about_json(market: RecordedMarket) -> dict[str, Any]:
    return {
        "market": market.name,
        "about": market.about,
        "source": market.source,
        "instance_type": market.instance_type,
        "gpu": market.gpu,
        "gpus": market.gpus,
        "started_at": codec.plain(market.started_at) if market.started_at else None,
        "length_s": market.length.total_seconds(),
        "on_demand_usd_per_hour": usd(market.on_demand_usd_per_hour),
        "prices_recorded": market.prices_recorded,
    }


def _market_row(market: RecordedMarket) -> tuple[str, ...]:
    each = [supply([zone], market.ticks, market.tick, nodes=market.nodes).available for zone in market.zones]
    together = supply(market.zones, market.ticks, market.tick, nodes=market.nodes)
    within = f" ({min(each):.0%}–{max(each):.0%})" if len(each) > 1 else ""
    shares = sorted(mean_price(zone, market.ticks) / market.on_demand_usd_per_hour for zone in market.zones)
    prices = f"{shares[0]:.0%}" if f"{shares[0]:.0%}" == f"{shares[-1]:.0%}" else f"{shares[0]:.0%}–{shares[-1]:.0%}"
    return (
        market.name,
        market.machine,
        str(market.nodes),
        str(len(market.zones)),
        _recorded(market),
        format_span(market.length),
        f"{together.available:.0%}{within}",
        f"{together.interruptions_per_day:.1f}",
        prices if market.prices_recorded else f"{prices} (assumed)",
    )


def _supply_json(market: RecordedMarket, zones: Sequence[RecordedZone]) -> dict[str, Any]:
    found = supply(zones, market.ticks, market.tick, nodes=market.nodes)
    price = min(mean_price(zone, market.ticks) for zone in zones)
    return {
        "available": round(found.available, 4),
        "interruptions_per_day": round(found.interruptions_per_day, 2),
        "spot_usd_per_hour": usd(price.quantize(Decimal("0.0001"))),
    }


def _recorded(market: RecordedMarket) -> str:
    return f"{market.started_at:%Y-%m-%d}" if market.started_at else "undated"


def policy_named(policy: Policy | None, *, asked: bool = True) -> str:
    """Return what a policy is called; unless it is asked, for there is no deadline, what the job does in its place."""
    if policy is None:
        return "spot, else on demand"
    return "spot alone" if policy is Policy.GREEDY and not asked else policy.value


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None


def _span(seconds: float) -> str:
    return format_span(timedelta(seconds=seconds))
