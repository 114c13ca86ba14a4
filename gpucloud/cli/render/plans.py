"""Plans as text for people, and as JSON for programs; and which run a start goes on with, or begins."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from gpucloud.cli.render.bills import whole_minute
from gpucloud.cli.render.words import folded, pool_json, usd
from gpucloud.domain.checkpoint.protection import COMES_HOME, ENDED_FOR_OUTPUTS, Protection
from gpucloud.domain.job.quantities import counted, format_moment, format_size, format_span, format_usd
from gpucloud.domain.job.spec import Market
from gpucloud.domain.market.catalog import aged
from gpucloud.domain.market.outcome import Stored
from gpucloud.domain.market.plan import Plan
from gpucloud.domain.market.policies import Reason
from gpucloud.domain.state.order import Onward, Until
from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobState
from gpucloud.domain.supervision.budget import rest_after
from gpucloud.usecases.jobstore.condition import ConditionKind, from_where
from gpucloud.usecases.jobstore.report import JobReport

_MUCH_CHEAPER = Decimal("0.8")
_WHY_ON_DEMAND = {
    Reason.DEADLINE: "it leaves no time for a run on spot machines that is lost, and a whole one after it",
    Reason.BUDGET: "the budget does not pay for a run on spot machines that is lost, and a whole one after it",
    Reason.EXPECTED: "so long a run that saves nothing is expected to cost less than on spot machines",
    Reason.ASKED: "`policy: on_demand` asks for it",
}


def plan_text(plan: Plan, protection: Protection, width: int | None = None, *, driven: bool = False) -> str:
    """Return the plan: what, at what price, the ceiling, and how the script saves; for a terminal so wide.

    `driven`: its machines are to drive the job themselves.
    """
    rows = {**plan_rows(plan), **saved_rows(protection, driven=driven)}
    if plan.deadline is not None:
        rows["deadline"] = ends_at(plan.deadline)
    others = [f"{o.pool} {format_usd(o.usd_per_hour)}" for o in plan.others]
    if others:
        rows["next"] = f"{'; '.join(others)} a node"
    return labelled(f"plan for {plan.job}", rows, width)


def ends_at(deadline: timedelta) -> str:
    """Return what a deadline does, whether or not anything keeps it."""
    return (
        f"{format_span(deadline)} after its first start the job ends, done or not, and saves first if its script does"
    )


# What a start goes on with, or comes after.


def onward_line(onward: Onward, state: JobState, now: datetime, held: int, until: Until) -> str:
    """Return how a run goes on that there is already: from where, on which machines, and how to have a new one.

    `until`: made ready alone, its machines run nothing yet.
    """
    start, ready = from_where(state.checkpoint), until is Until.READY
    then = f"`gpucloud train {state.job}` then goes on from {start}"
    match onward:
        case Onward.HELD if ready:
            machines = f"{counted(held, 'machine')} held for it {'is' if held == 1 else 'are'}"
            return f"{state.job}: the {machines} made ready; {then}"
        case Onward.HELD:
            machines = counted(held, "machine")
            return f"{state.job} goes on with the script as it is now, from {start}, on the {machines} held for it"
        case Onward.MENDED:
            goes_on = f"it goes on from {start} with the script as it is now"
            does = f"machines are made ready; {then}" if ready else goes_on
            return f"{ended_words(state, now)}: {does} (`--again` begins a new run)"
        case Onward.RAN:
            done = "what is left of it is torn down, and nothing is trained (`--again` begins a new run)"
            return f"{ended_words(state, now)}, and no edit was seen since: {done}"
        case Onward.UNASKED:
            return (
                f"{state.job} goes on: `--again` begins a new run of what has succeeded, failed by its own error or"
                f" passed its deadline (another `name:` does for any, and gpucloud rm {state.job} forgets this one)"
            )


def clearing_line(job: str, *, waited: bool, anew: bool) -> str:
    """Return what of a run that is over is torn down before it goes on, its script having failed, or one follows."""
    then = ", then a new run begins" if anew else ""
    if waited:
        return f"the machines of {job} wait no longer for a mended script: they are torn down first{then}"
    return f"what is left of {job} is torn down first{then}"


def new_run_line(before: JobState, name: str, now: datetime) -> str:
    """Return what run a start begins after one that has ended, and that it takes nothing of one whose script failed."""
    unused = _unused(before.checkpoint) if before.script_failed else ""
    return f"{ended_words(before, now)}: this starts {name}, a new run from step 0{unused}"


def ended_words(state: JobState, now: datetime) -> str:
    """Return how a run ended, and when."""
    at = f" at {format_moment(state.ended_at, now)}" if state.ended_at is not None else ""
    return f"{state.job} {state.status.value}{at}"


def _unused(checkpoint: CheckpointRef | None) -> str:
    return f" (the checkpoint at {checkpoint} is not used)" if checkpoint is not None else ""


def rest_line(report: JobReport, plan: Plan, script: str) -> str | None:
    """Return what is left of a run that goes on, and what that costs at the plan's price; None where that is not known.

    An attempt whose machines are on goes on where it is, all others from what is saved. `script` (`script_of`) is what
    a start runs now: where that is another one, the last one's steps are not its own. Interruptions cost more.
    """
    last, reached, saved = report.attempts[-1] if report.attempts else None, report.reached, report.checkpoint
    if last is None or last.script != script or report.exit_reason is ExitReason.SUCCEEDED:
        return None
    if report.kind is ConditionKind.TRAINED or (reached is not None and reached.is_done):
        return None
    is_on = report.open_attempt is not None and not (report.ran_out or report.lost_machines)
    rest = rest_after(report.attempts, saved, reached.step if is_on and reached is not None else None)
    if rest is None or not rest.steps:
        return None
    left = f"what is left of {report.job} by its last word: {rest.steps} of {rest.of} steps"
    if rest.takes is None:
        return left
    start = timedelta(0) if is_on else plan.start
    usd = plan.usd_per_hour * Decimal((rest.takes + start) / timedelta(hours=1))
    begun = f" and a start of {format_span(start)}" if start else ""
    costs = f": about {format_usd(usd)} at the price of now" if usd else ""
    return f"{left}, {format_span(rest.takes)} at its pace so far{begun}{costs}"


def leaving_line(name: str, machines: int) -> str:
    """Return what a process does that was told to detach, and how it is left before that is done."""
    when = (
        "once one of them has shown that it can drive it" if machines else "as soon as one is there that can drive it"
    )
    then = "" if machines else ", and then only a machine that was asked for before goes on with it"
    return (
        f"detaching: {name} is left to its machines {when}; until then this process stays."
        f" Ctrl-C twice leaves at once{then}"
    )


def driven_line(name: str, until: datetime, *, keep: bool) -> str:
    """Return until when a job drives itself, and what becomes of its machines where they stay after a success."""
    stay = ", and its machines stay until then when it has succeeded" if keep else ""
    return f"{name} drives itself until {whole_minute(until):%Y-%m-%d %H:%M} UTC at the latest{stay}"


def saved_rows(protection: Protection, *, driven: bool = False) -> dict[str, str]:
    """Return a plan's lines about what is left of the script's work: after an interruption, and at its end.

    Machines that drive the job bring results to its store, and the next command here brings them home.
    """
    rows = {"saves": protection.row}
    if protection.lost:
        rows["results"] = protection.lost
    elif protection.outputs:
        comes = "comes" if len(protection.outputs) == 1 else "come"
        ended = ENDED_FOR_OUTPUTS.get(protection.saving, "")
        it = "it" if len(protection.outputs) == 1 else "them"
        then = f"; from the store the next `train`, `reconcile` or `down` here brings {it} home" if driven else ""
        where = "into the job's store" if driven else "home"
        rows["results"] = f"{', '.join(protection.outputs)} {comes} {where} {COMES_HOME}{ended}{then}"
    return rows


def stored_text(stored: Stored) -> str:
    """Return what saves cost outside the budget, and at which interval they would cost much less."""
    text = f"about {format_usd(stored.usd)} to S3 for {stored.saves} saves of {format_size(stored.size)}, in no budget"
    if stored.cheapest_usd > stored.usd * _MUCH_CHEAPER:
        return text
    every = f"{max(1, round(stored.cheapest_every / timedelta(minutes=1)))}min"
    return f"{text}; `checkpoint: {{every: {every}}}` makes it {format_usd(stored.cheapest_usd)}"


def stored_json(stored: Stored | None) -> dict[str, Any] | None:
    """Return what saves cost as an object."""
    if stored is None:
        return None
    return {
        "saves": stored.saves,
        "save_bytes": stored.size,
        "usd": usd(stored.usd),
        "cheapest_every_s": stored.cheapest_every.total_seconds(),
        "cheapest_usd": usd(stored.cheapest_usd),
    }


def plan_rows(plan: Plan) -> dict[str, str]:
    """Return the plan's lines by their labels."""
    fewer = f"; fewer will do, down to {plan.least_nodes}" if plan.least_nodes < plan.nodes else ""
    workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
    of_all = f" for {plan.nodes} machines" if plan.nodes > 1 else ""
    most = f"{format_usd(plan.cap_usd_per_hour)} at the most"
    price = f"{format_usd(plan.usd_per_hour)} an hour{of_all} {_when(plan)}, {most}"
    trains = f"trains {_long(plan.trains)} at this price"
    kept = f"{format_span(plan.reserve)} at {format_usd(plan.cap_usd_per_hour)} an hour"
    if plan.cap_usd_per_hour > plan.usd_per_hour:
        trains += f", {_long(plan.trains_at_cap)} at {format_usd(plan.cap_usd_per_hour)} an hour"
    if plan.dearest_usd_per_hour > plan.cap_usd_per_hour:
        dearest = f"{format_usd(plan.dearest_usd_per_hour)} an hour"
        trains += f", {_long(plan.trains_at_dearest)} at {dearest}"
        price += f"; on others, where these are not to be had, up to {format_usd(plan.dearest_usd_per_hour)}"
        kept += f", or {format_usd(plan.kept_at_dearest_usd)} at {dearest}"
    spent = f" less {plan.used}," if plan.used.usd else ""
    saving = f"{format_usd(plan.saving_usd)} of time after its last step"
    less = f", {saving} and {format_span(plan.start)} paid for a start" if plan.start else f" and {saving}"
    then = (
        "nothing is paid for your own hosts" if plan.offer.pool.market is Market.OWNED else "then all machines are off"
    )
    return {
        "machines": f"{plan.nodes} × {plan.offer.pool}, {workers}{fewer}",
        "price": price,
        "budget": f"{format_usd(plan.budget_usd)}{spent} less what is kept aside{less}: {trains}",
        "kept aside": f"{format_usd(plan.kept_usd)} for the last save and the machines' end, which no training may use:"
        f" {kept}",
        "worst cost": f"{format_usd(plan.worst_usd)}, {then}",
        **_safer_rows(plan),
    }


def _long(span: timedelta) -> str:
    """Return the span; from a year on, how much more does not matter to anybody."""
    return format_span(span) if span < timedelta(days=365) else "more than a year"


def _when(plan: Plan) -> str:
    """Return of when the price is: it may have been read long ago, or never, and is then AWS's word of a day."""
    as_of = plan.offer.as_of
    return "now" if plan.made_at - as_of <= timedelta(days=1) else f"by prices of {aged(as_of.date(), plan.made_at)}"


def _safer_rows(plan: Plan) -> dict[str, str]:
    """Return the row of a job that begins on demand, or for which spot machines do not pay; none for any other."""
    if plan.on_demand_for is not None:
        why = _WHY_ON_DEMAND.get(plan.on_demand_for, plan.on_demand_for.value)
        return {"on demand": f"from the start, under the deadline: {why}"}
    if plan.on_demand_usd is None:
        return {}
    recorded = "in what is recorded of them"
    spot = (
        f"are expected to cost {format_usd(plan.spot_usd)}, whatever the budget"
        if plan.spot_usd is not None
        else f"mostly come to no end {recorded if plan.deadline is None else 'before the deadline'}"
    )
    on_demand = format_usd(plan.on_demand_usd)
    if plan.offer.pool.market is Market.ON_DEMAND:
        return {"on demand": f"chosen for {on_demand}, where nothing interrupts it: spot machines {spot}"}
    takes_usd = plan.on_demand_budget_usd
    budget = f" with `budget: {takes_usd} USD`" if takes_usd is not None and takes_usd > plan.budget_usd else ""
    costs = "is cheaper:" if plan.spot_usd is not None else "costs"
    return {
        "on demand": f"{costs} {on_demand}, and nothing interrupts it; spot machines {spot}."
        f" `resources: {{market: on_demand}}`{budget}"
    }


def labelled(title: str, rows: Mapping[str, str], width: int | None = None) -> str:
    """Return lines under a title, their labels in a column; for a terminal so wide, None for none."""
    behind = " " * len(f"  {'':<10} ")
    return "\n".join([title, *(folded(f"  {label:<10} {text}", width, behind) for label, text in rows.items())])


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as an object."""
    return {
        "nodes": plan.nodes,
        "least_nodes": plan.least_nodes,
        "workers": plan.workers,
        **pool_json(plan.offer.pool),
        "usd_per_hour": usd(plan.usd_per_hour),
        "cap_usd_per_hour": usd(plan.cap_usd_per_hour),
        "dearest_usd_per_hour": usd(plan.dearest_usd_per_hour),
        "budget_usd": usd(plan.budget_usd),
        "worst_usd": usd(plan.worst_usd),
        "kept_usd": usd(plan.kept_usd),
        "spot_usd": usd(plan.spot_usd) if plan.spot_usd is not None else None,
        "on_demand_usd": usd(plan.on_demand_usd) if plan.on_demand_usd is not None else None,
    }
