"""`budget`: what a job may cost, shown, raised and lowered; also while it runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from typing import Any

from gpucloud.cli.commands.passes import reconcile_known
from gpucloud.cli.render.bills import money_json, money_line, plain_amount, unproven_rows
from gpucloud.cli.render.use import condition_word
from gpucloud.cli.render.words import say_json, say_words, table, tell, usd
from gpucloud.cli.target import known_job
from gpucloud.domain import codec
from gpucloud.domain.errors import BudgetRefused, GpucloudError, LeaseHeld, UsageError
from gpucloud.domain.job.quantities import format_usd, parse_usd
from gpucloud.domain.state.order import BudgetChange, Order, is_closed, with_budget
from gpucloud.domain.supervision.budget import plain_usd, refusal
from gpucloud.domain.supervision.seen import Rules, rules_for
from gpucloud.usecases.job.budgeting import bring_closer, least_usd, obey_here, standing
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.story import budget_line
from gpucloud.wiring import Gpucloud, KnownJob

_BARE = re.compile(r"[0-9]+(\.[0-9]+)?")
_LOOK_S = 0.1
_MACHINE_SAYS_SO = timedelta(seconds=30)


def sum_of(text: str | None) -> Decimal | None:
    """Return the sum that `--budget` says, None for none. UsageError says the right form."""
    return None if text is None else _sum(text, "--budget '{} USD'")


def _sum(text: str, form: str) -> Decimal:
    """Return the sum; `form` is what is to be typed, but for a number."""
    try:
        return parse_usd(text)
    except ValueError as error:
        hint = form.format(text if _BARE.fullmatch(text) else 40)
        raise UsageError(str(error), hint=f"did you mean {hint}?" if _BARE.fullmatch(text) else hint) from error


def meant(words: Sequence[str]) -> tuple[str | None, Decimal | None]:
    """Return the job, None for the file here, and the sum that the words of a command line mean."""
    with suppress(ValueError):
        return None, parse_usd(" ".join(words))
    job, rest = (words[0] if words else None), " ".join(words[1:])
    if job is not None and not rest and _BARE.fullmatch(job):
        return None, _sum(job, "gpucloud budget {} USD")
    return job, (_sum(rest, f"gpucloud budget {job} {{}} USD") if rest else None)


def budget(target: str | None, wanted: Decimal | None, *, as_json: bool) -> int:
    """Show the job's budget, or have it changed and wait until that is in force; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker = cloud.asker(known)
    if wanted is not None:
        _change(cloud, known, asker, wanted)
    report, order = asker.report(), asker.order()
    if as_json:
        say_json(_json(report, order))
    else:
        say_words(_text(report, order))
    return 0


def _change(cloud: Gpucloud, known: KnownJob, asker: Asker, wanted: Decimal) -> None:
    """Order it, and have it in force; the same sum again too: whoever ordered it may have died in between."""
    orders, state = cloud.orders(known), asker.state()
    before = orders.newest()
    if is_closed(before.order, state) and state.torn_down:
        file = known.file.name
        raise UsageError(
            f"{known.name} is over: no budget limits it any more",
            hint=f"the next run takes `budget:` of {file}, or gpucloud train --budget '{plain_usd(wanted)} USD'",
        )
    if before.order.budget_usd == wanted and not orders.is_trusted(before):
        return
    rules = rules_for(before.order.unattended, cloud.cloud_of(known).cloud_profile.rules)
    why = refusal(state, before.order.budget_usd, wanted, standing(asker, state), rules)
    if why is not None:
        raise _too_small(asker, known, why, least_usd(asker, state, rules))
    order = orders.change(lambda newest: with_budget(newest, wanted)).order
    is_news = state.order_number < order.number
    await_order(cloud, known, asker, order, rules)
    for change in order.budget_changes[-1:] if is_news else ():
        tell(budget_line(change))


def await_order(cloud: Gpucloud, known: KnownJob, asker: Asker, order: Order, rules: Rules) -> None:
    """Return once the order is acted on: by whoever supervises the job, or from here when nobody does.

    A machine that drives its job has no right to move the shut-off on every cloud: that is done from here, and it has
    some time to say that it goes by the order. Whatever it says, the cloud ends it when the budget says.
    """
    told, armed_at = False, None
    if asker.state().drives_itself:  # what it wrote may say that it did
        bring_closer(asker, order, rules)
    while asker.stored_state().order_number < order.number:
        state, by = asker.state(), asker.supervisor()
        if by is None:
            with suppress(LeaseHeld):  # somebody supervises it from this moment on, and reads the order
                _obey(cloud, known, asker, order, rules)
            continue
        if not told:
            tell(f"asking {by} to change the budget of {known.name}")
        told = True
        if state.drives_itself or (state.owner is not None and state.owner.node):
            bring_closer(asker, order, rules)
            armed_at = armed_at or asker.clock.now()
            if asker.clock.now() - armed_at > _MACHINE_SAYS_SO:
                tell(f"{by} has not said that it goes by that; the cloud ends the machines in time all the same")
                return
        asker.clock.sleep(_LOOK_S)


def _obey(cloud: Gpucloud, known: KnownJob, asker: Asker, order: Order, rules: Rules) -> None:
    with take(asker.jobs, asker.clock) as lease:
        closer = obey_here(asker, lease, order, rules)
    if not closer:
        return
    try:
        reconcile_known(cloud, known)  # the machines hear of a closer shut-off by an ordinary pass, and save before it
    except GpucloudError as error:  # the cloud has the closer shut-off: this is for the last save before it
        tell(f"the machines could not be told: {error}")


def _too_small(asker: Asker, known: KnownJob, why: str, least: str) -> BudgetRefused:
    ends = "" if asker.state().status.ended else f", or gpucloud down {known.name} ends it now"
    return BudgetRefused(f"{known.name}: {why}", hint=f"gpucloud budget {known.name} {least} USD{ends}")


def _json(report: JobReport, order: Order) -> dict[str, Any]:
    return {
        **money_json(report),
        "changes": [
            {
                "at": codec.plain(change.at),
                "by": change.by,
                "old_usd": usd(change.old_usd),
                "new_usd": usd(change.new_usd),
            }
            for change in order.budget_changes
        ],
    }


def _text(report: JobReport, order: Order) -> str:
    spend = report.spend
    rows = [
        ("budget", format_usd(spend.budget_usd)),
        ("spent", money_line(spend)),
        *unproven_rows(spend),
        ("left", format_usd(spend.left_usd)),
    ]
    parts = [f"{report.job}: {condition_word(report)}", table(rows)]
    if order.budget_changes:
        heads = ("changed (UTC)", "by", "from", "to")
        parts.append(table([heads, *map(_row, order.budget_changes)]))
    return "\n\n".join(parts)


def _row(change: BudgetChange) -> tuple[str, ...]:
    sums = (f"{plain_amount(usd)} USD" for usd in (change.old_usd, change.new_usd))
    return f"{change.at:%Y-%m-%d %H:%M:%S}", change.by, *sums
