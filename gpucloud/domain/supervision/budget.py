"""The budget of a job that runs: what it may be lowered to, what follows for the shut-off, and what its end says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.job.quantities import format_span, format_usd, in_cents, span_of
from gpucloud.domain.job.spec import CheckpointPolicy
from gpucloud.domain.money.budget import PrepaidRule, Spend, Used, least_budget_usd, reserve_usd, sooner
from gpucloud.domain.money.ledger import usd_for
from gpucloud.domain.node.status import Status
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import Attempt, CheckpointRef, ExitReason, JobState
from gpucloud.domain.supervision.action import Arm, ObeyOrder
from gpucloud.domain.supervision.snapshot import Goal, Rules, Snapshot

_TIME_IS_OVER, _USED_UP_THEN = "the time that its machines were paid for is over", "its budget was used up then"
_LATER = "with a later `deadline:`, "
_SHOWN = Decimal("0.0001")
_ABOUT = Decimal("1.25")
"""Of the reserve: machines end some seconds before nothing else is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the money rule needs of a job: spent so far, machines that may be alive, and how many it needs to go on."""

    now: datetime
    spent_usd: Decimal
    alive: int
    needed: int


def obey(goal: Goal, snapshot: Snapshot, rules: Rules) -> Arm | ObeyOrder | None:
    """Return what a new order asks for before all else: the shut-off that its budget pays for, then to say so.

    What the cloud has armed counts, and no word of the state. A machine that may not move the shut-off leaves that to
    whoever gave the order.
    """
    if goal.number <= snapshot.state.order_number:
        return None
    alive = snapshot.group.most_alive
    standing = Standing(now=snapshot.now, spent_usd=snapshot.spent_usd, alive=alive, needed=max(goal.nodes, alive))
    if alive and not goal.within_rights:
        closer = sooner(snapshot.group.armed_until, shutdown_at(snapshot.state, goal.budget_usd, standing, rules))
        if closer is not None:
            return Arm(until=closer)
    changes = tuple(one for one in goal.budget_changes if one.number > snapshot.state.order_number)
    return ObeyOrder(number=goal.number, changes=changes)


def refusal(state: JobState, old_usd: Decimal, usd: Decimal, standing: Standing, rules: Rules) -> str | None:
    """Return why the budget cannot be that, naming the least sum; None when it can. Raising it always can."""
    least = least_to_lower_to(state, standing, rules)
    if usd >= old_usd or usd >= least:
        return None
    return f"{usd} USD is less than what is spent{_what_follows(state, standing)}: at least {in_cents(least)} USD"


def _what_follows(state: JobState, standing: Standing) -> str:
    """Return what the least budget pays for beside what is spent; nothing for a job of which nothing is left."""
    if not standing.alive:
        return "" if state.status.ended else " and what a start costs"
    return f" and what {'ending its machines' if state.status.ended else 'saving and ending'} costs"


def least_to_lower_to(state: JobState, standing: Standing, rules: Rules) -> Decimal:
    """Return the least budget of the job now: what is spent, the time for a last save, and the reserve.

    Without machines, it is what a start costs at the least. A job that has ended saves nothing more: it is what it has
    cost, and the reserve for machines that it still has.
    """
    cap, prepaid_rule = state.dearest_usd_per_hour, rules.prepaid_rule
    if standing.alive:
        is_over = state.status.ended and not state.drives_itself  # its own machines may say so and go on
        save = timedelta(0) if is_over else min(rules.limits.leave, prepaid_rule.least)
        saving = usd_for(cap * standing.alive, save)
        return standing.spent_usd + saving + reserve_usd(standing.alive, cap, prepaid_rule)
    if state.status.ended:
        return standing.spent_usd
    return standing.spent_usd + least_to_go_on(state, standing.needed, prepaid_rule, keeps=False)


def least_to_go_on(state: JobState, nodes: int, prepaid_rule: PrepaidRule, *, keeps: bool = True) -> Decimal:
    """Return the least sum beside what is spent with which a job starts once more, on so many machines.

    Where it `keeps` those that it has, their start is spent already.
    """
    lengths = prepaid_rule_for(state, prepaid_rule) if keeps else prepaid_rule
    return least_budget_usd(nodes, state.dearest_usd_per_hour, lengths)


_UPLOAD = timedelta(minutes=2)


def rules_for(checkpoint: CheckpointPolicy, unattended: timedelta | None, rules: Rules) -> Rules:
    """Return the cloud's rules for such a job.

    Machines that nobody looks after are paid for the whole time at once. A script that saves by itself has all the time
    that the cloud's rules give it; what it saved reaches the store after that.
    """
    if checkpoint.directory is not None:
        rules = replace(rules, limits=replace(rules.limits, upload=_UPLOAD))
    if unattended is None:
        return rules
    return replace(rules, prepaid_rule=replace(rules.prepaid_rule, horizon=unattended))


def prepaid_rule_for(state: JobState, prepaid_rule: PrepaidRule) -> PrepaidRule:
    """Return the lengths to plan with: the start of machines that are there is spent already."""
    return replace(prepaid_rule, start=timedelta(0)) if state.alive else prepaid_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a run that has ended goes on with: as it is, or with a larger budget, a later deadline, or both.

    `budget_usd` is the least budget, None where what is left of its own is enough. A run without a group starts on
    whichever machines are offered then: its least is that on `as_last`, and others may do with what is left.
    """

    budget_usd: Decimal | None = None
    is_late: bool = False
    as_last: Pool | None = None

    @property
    def conditions(self) -> tuple[str, ...]:
        """What has to be given, none where the run goes on as it is."""
        later = ("a later `deadline:`",) if self.is_late else ()
        return (*later, self._option) if self._option and self.as_last is None else later

    @property
    def otherwise(self) -> str:
        """Return what it takes on such machines as it had last, where others may do with what is left."""
        return f"; on {self.as_last}, as last, it takes {self._option}" if self.as_last is not None else ""

    def command(self, job: str) -> str:
        """Return what is to be typed, and written into the job file before."""
        return f"{_LATER if self.is_late else ''}gpucloud train {job}{self.option}"

    @property
    def option(self) -> str:
        """Return what the command takes, with a space before it: the budget, unless other machines may do without."""
        return f" {self._option}" if self._option and self.as_last is None else ""

    @property
    def _option(self) -> str:
        return f"--budget '{in_cents(self.budget_usd)} USD'" if self.budget_usd is not None else ""


def resumption(state: JobState, order: Order, used: Used, prepaid_rule: PrepaidRule, now: datetime) -> Resumption:
    """Return what the run would go on with now, where it has ended."""
    least_usd = used.usd + least_to_go_on(state, order.resolved.resources.nodes, prepaid_rule)
    is_short = order.budget_usd < least_usd
    return Resumption(
        budget_usd=least_usd if is_short else None,
        is_late=order.deadline_at is not None and now >= order.deadline_at,
        as_last=state.pool if is_short and state.group is None else None,
    )


def shutdown_at(state: JobState, budget_usd: Decimal, standing: Standing, rules: Rules) -> datetime:
    """Return until when the budget pays for the machines that are alive, a start worth it or not.

    Unlike `money.budget.paid_until` it is never None: machines that live must be ended at some time.
    """
    cap, nodes, prepaid_rule = state.dearest_usd_per_hour, max(standing.alive, 1), rules.prepaid_rule
    rate = cap * nodes
    if rate <= 0:
        return standing.now + prepaid_rule.horizon
    left = budget_usd - standing.spent_usd - reserve_usd(nodes, cap, prepaid_rule)
    seconds = max(0.0, float(left * 3600 / rate))
    return standing.now + min(prepaid_rule.horizon, span_of(seconds))


def with_leaving(spend: Spend, statuses: Iterable[Status | None]) -> Spend:
    """Return the money with how long before the end of what is paid the first machine that tells, and so all, leave."""
    told = [status for status in statuses if status is not None]
    leaves_s = max((status.leaves_s or 0.0 for status in told), default=0.0)
    at_most_s = max((status.leaves_at_most_s or 0.0 for status in told), default=0.0)
    share = max((status.leaves_share or 0.0 for status in told), default=0.0)
    most = timedelta(seconds=at_most_s)
    return replace(spend, leaves=timedelta(seconds=leaves_s), leaves_at_most=most, leaves_share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitEnd:
    """What there is to say of a job that its budget or its deadline ended, in parts.

    `told` is why, and what is saved; `before` comes before the command that it goes on with, `option` is a part of it,
    and `then` what that does.
    """

    job: str
    told: str
    before: str = ""
    option: str = ""
    then: str

    def said(self, means: str | None = None) -> str:
        """Return all of it in one line; `means` is what its command takes in place of the job's name."""
        return f"{self.told}: {self.before}gpucloud train {means or self.job}{self.option} {self.then}"


def has_budget_left(state: JobState, budget_usd: Decimal, used: Used, prepaid_rule: PrepaidRule, nodes: int) -> bool:
    """Whether what is left of the budget is enough for a start with all machines that the job asks for."""
    start_usd = least_to_go_on(state, max(nodes, _members(state, nodes)), prepaid_rule, keeps=False)
    return state.dearest_usd_per_hour > 0 and budget_usd - used.usd >= start_usd


def used_up(
    state: JobState,
    budget_usd: Decimal,
    used: Used,
    prepaid_rule: PrepaidRule,
    *,
    nodes: int = 1,
    is_late: bool = False,
) -> LimitEnd:
    """Return what to say of a job that ended at its budget: what was not spent, and why; what is saved; how it goes on.

    It starts with all `nodes` that it asks for, and what is left may be enough for that: those that drive a job may not
    have their paid time prolonged, and it may be enough since it ended, by another budget. The sum that it goes on
    with is enough for the steps that it still has to make on as many machines as last, where these are known: on top of
    what is used, whatever the budget was.
    """
    rest_usd, before, then = budget_usd - used.usd, _LATER if is_late else "", _goes_on(state)
    if has_budget_left(state, budget_usd, used, prepaid_rule, nodes):
        why, left = (_TIME_IS_OVER, "left") if state.had_budget_left else (_USED_UP_THEN, "left now")
        told = f"{why} ({used}, {format_usd(rest_usd)} {left}), {_saved(state)}"
        return LimitEnd(job=state.job, told=told, before=before, then=then)
    cap_usd, members = state.dearest_usd_per_hour, _members(state, nodes)
    nodes = max(nodes, members)
    reserve = reserve_usd(nodes, cap_usd, prepaid_rule)
    start_usd = least_to_go_on(state, nodes, prepaid_rule, keeps=False)
    kept = f" ({used}, {_rest(rest_usd, reserve, prepaid_rule)})" if rest_usd > 0 else ""
    new_usd = budget_usd + max(budget_usd, start_usd)
    rest = rest_after(state.attempts, state.checkpoint)
    if rest is not None and (to_go := rest.takes) is not None:
        trains = prepaid_rule.start + max(to_go, prepaid_rule.least)
        new_usd = used.usd + max(usd_for(cap_usd * members, trains) + reserve, start_usd)
        then = f"{then}, and pays for the {format_span(to_go)} to go"
    return LimitEnd(
        job=state.job,
        told=f"the budget of {plain_usd(budget_usd)} USD pays for no more machine time{kept}, {_saved(state)}",
        before=before,
        option=f" --budget '{plain_usd(Decimal(in_cents(new_usd)))} USD'",
        then=then,
    )


def ended_at_limit(
    state: JobState, budget_usd: Decimal, used: Used, prepaid_rule: PrepaidRule, *, nodes: int, again: Resumption
) -> LimitEnd | None:
    """Return what to say of the limit that ended the job, by the budget and sums of now; None where that is no limit.

    Where another reason was given with it, that is its message.
    """
    if state.message is not None:
        return None
    if state.exit_reason is ExitReason.DEADLINE:
        return overdue(state, again)
    if state.exit_reason is not ExitReason.BUDGET:
        return None
    return used_up(state, budget_usd, used, prepaid_rule, nodes=nodes, is_late=again.is_late)


def _members(state: JobState, nodes: int) -> int:
    return len(state.attempts[-1].members) if state.attempts else nodes


def _rest(rest_usd: Decimal, reserve: Decimal, prepaid_rule: PrepaidRule) -> str:
    trains = f"train {format_span(prepaid_rule.least)}"
    if rest_usd > reserve * _ABOUT:
        return f"{format_usd(rest_usd)} left, which is too little to start machines and {trains} on them"
    kept = f"{format_usd(min(rest_usd, reserve))} kept aside for the last save and the machines' end"
    over = rest_usd - reserve
    return kept + (f", and {format_usd(over)}, which is too little to {trains}" if over >= _SHOWN else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Steps that a script still has to make, of so many in all, and how long they take; None where nobody knows."""

    steps: int
    of: int
    takes: timedelta | None


def rest_after(attempts: Sequence[Attempt], checkpoint: CheckpointRef | None, made: int | None = None) -> Rest | None:
    """Return what the newest attempt's script has left after the step `made`, or else after what is saved.

    By the word of all its attempts. None where they tell no total or count saves, or where it came to its end.
    """
    last = attempts[-1] if attempts else None
    by_saves = Counts.SAVES in (last and last.counts, checkpoint and checkpoint.counts)
    if last is None or by_saves or last.done_at is not None:
        return None
    same = [one for one in reversed(attempts) if one.script == last.script]
    total = next((one.total_steps for one in same if one.total_steps is not None), None)
    pace_s = next((pace for one in same if (pace := one.pace_s or one.step_seconds)), None)
    if total is None:
        return None
    saved = checkpoint.step if checkpoint is not None else 0
    steps = max(0, total - (made if made is not None else saved))
    return Rest(steps=steps, of=total, takes=span_of(steps * pace_s) if pace_s is not None else None)


def overdue(state: JobState, again: Resumption = Resumption(is_late=True)) -> LimitEnd:
    """Return what to say of a job that ended at its deadline: what is kept, and how it goes on."""
    return LimitEnd(
        job=state.job,
        told=f"the deadline is over, {_saved(state)}",
        before="with a later one in the job file, " if again.is_late else "",
        option=again.option,
        then=f"{_goes_on(state)}{again.otherwise}",
    )


def _goes_on(state: JobState) -> str:
    return f"goes on from {'there' if state.checkpoint is not None else 'the beginning'}"


def _saved(state: JobState) -> str:
    return f"{state.checkpoint or 'nothing'} is saved"


def plain_usd(usd: Decimal) -> str:
    """Return the sum as a person writes it: at least two places, no zeros behind them."""
    text = f"{usd.normalize():f}"
    whole, _, places = text.partition(".")
    return f"{whole}.{places.ljust(2, '0')}" if places else whole
