"""A job to be rehearsed: what policies are told of it, when it is submitted, what a launch and an interruption cost."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import ROUND_UP, Decimal

from gpucloud.domain.checkpoint.protection import NEVER, Saving
from gpucloud.domain.errors import PlanRefused, UsageError
from gpucloud.domain.job.quantities import format_hours, format_span, format_usd, written_span
from gpucloud.domain.job.spec import CheckpointPolicy, MarketPolicy, OnNotice
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import least_span_s, least_task_budget_usd
from gpucloud.domain.market.recordings import LOOK_S, RecordedMarket, RecordedZone
from gpucloud.domain.money.ledger import PLAIN_TERMS, Terms, usd_for

_CENT = Decimal("0.01")
_SHARES = (1.1, 1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The job that is rehearsed: how much work it is, in how long and for how much, and what a restart takes.

    Without a `deadline` nothing ends it but its work and its budget. `work` is that of `nodes` nodes; on
    `least_nodes` of them, where that is not 0, it also goes on, and takes longer. `terms` say how machines are billed,
    with what stands beside them. `saves_nothing` is what policies are told of its script: it begins anew.
    On one `market` alone nothing is chosen to keep the deadline, which ends the job all the same.
    """

    work: timedelta
    deadline: timedelta | None
    budget_usd: Decimal
    nodes: int
    recovery: Recovery
    least_nodes: int = 0
    saves_nothing: bool = False
    terms: Terms = PLAIN_TERMS
    market: MarketPolicy = MarketPolicy.AUTO

    def spendable_usd(self, market: RecordedMarket) -> Decimal:
        """The budget, less what the meter's rounding up of a last second may add."""
        return self.budget_usd - usd_for(self.nodes * self.on_demand_usd_per_hour(market), timedelta(seconds=1))

    def on_demand_usd_per_hour(self, market: RecordedMarket) -> Decimal:
        """What the market's machine costs on demand with what stands beside it."""
        return market.on_demand_usd_per_hour + self.terms.extras_usd_per_hour


def task_of(scenario: Scenario, market: RecordedMarket) -> Task:
    """Return what policies are told of the job on that market."""
    return Task(
        work_s=scenario.work.total_seconds(),
        span_s=math.inf if scenario.deadline is None else scenario.deadline.total_seconds(),
        changeover_s=scenario.recovery.changeover_s,
        handover_s=scenario.recovery.handover_s,
        on_demand_usd_per_hour=float(scenario.on_demand_usd_per_hour(market)),
        tick_s=float(LOOK_S),
        nodes=scenario.nodes,
        least_nodes=scenario.least_nodes or scenario.nodes,
        saves_nothing=scenario.saves_nothing,
    )


def refuse_what_cannot_be_kept(scenario: Scenario, market: RecordedMarket, zones: Sequence[RecordedZone]) -> None:
    """Raise PlanRefused for a deadline, or a budget beside it, that no policy can keep.

    The hint is the number that must move. On demand alone one changeover is enough, and on one market alone no budget
    has to pay for an end on another.
    """
    if scenario.deadline is None:
        return
    task, tries_spot = task_of(scenario, market), scenario.market is not MarketPolicy.ON_DEMAND
    least_span = timedelta(seconds=least_span_s(task) if tries_spot else task.work_s + task.changeover_s)
    work = f"{format_hours(scenario.work)} of work"
    if scenario.deadline < least_span:
        raise PlanRefused(
            f"{work} and {_changeovers(scenario.recovery, two=tries_spot)} take {format_span(least_span)};"
            f" the deadline is after {format_hours(scenario.deadline)}",
            hint=f"deadline: {written_span(least_span)}, or {_another_restart(scenario)}",
        )
    if scenario.market is not MarketPolicy.AUTO:
        return
    spot_usd = min(price for zone in zones for _, price in zone.prices) + scenario.terms.extras_usd_per_hour
    rounding_usd = scenario.budget_usd - scenario.spendable_usd(market)
    least_usd = (Decimal(str(least_task_budget_usd(task, float(spot_usd)))) + rounding_usd).quantize(_CENT, ROUND_UP)
    if scenario.budget_usd < least_usd:
        raise PlanRefused(
            f"{work} on {scenario.nodes} × {market.machine} need {format_usd(least_usd)} to be finished on demand"
            f" whatever happens; the budget is {format_usd(scenario.budget_usd)}",
            hint=f"budget: {least_usd} USD, --price with what your machine costs an hour on demand,"
            f" or {_another_restart(scenario)}",
        )


def _changeovers(recovery: Recovery, *, two: bool) -> str:
    whole, restart = (timedelta(seconds=span_s) for span_s in (recovery.changeover_s, recovery.restart_s))
    return changeover_words(whole, restart, two=two)


def _another_restart(scenario: Scenario) -> str:
    taken = format_span(timedelta(seconds=scenario.recovery.restart_s))
    return f"--restart with how long yours take from a launch to the first step, {taken} here"


def starts(market: RecordedMarket, followed: timedelta, count: int, seed: int) -> tuple[int, ...]:
    """Return the looks at which `count` jobs are submitted, all followed for so long within the recording.

    One at random in each of as many equal parts of it: calm and busy weeks have their share, whatever the seed. The
    same seed gives the same looks. Raises UsageError where the recording is too short.
    """
    room = int(market.length.total_seconds() - followed.total_seconds()) // LOOK_S
    if room < 0:
        raise UsageError(
            f"{market.name} is {format_hours(market.length)} long, and the job may take {format_hours(followed)}",
            hint="a longer market (gpucloud simulate --list), or --deadline",
        )
    draw = random.Random(seed)  # noqa: S311  windows, not secrets
    return tuple(min(room, int((room + 1) * (part + draw.random()) / count)) for part in range(count))


def deadlines(scenario: Scenario, market: RecordedMarket) -> tuple[timedelta, ...]:
    """Return deadlines from the tightest that can be kept to twice the work, the scenario's own among them.

    Only those that the recording is long enough for, in whole minutes.
    """
    tightest = math.ceil(least_span_s(task_of(scenario, market)) / 60) * 60
    work_s = scenario.work.total_seconds()
    tried: set[float] = {tightest, *(round(work_s * share / 60) * 60 for share in _SHARES)}
    tried |= {scenario.deadline.total_seconds()} if scenario.deadline is not None else set()
    longest = market.length.total_seconds()
    return tuple(timedelta(seconds=span) for span in sorted(tried) if tightest <= span <= longest)


# What a launch, an interruption and a change of machines cost a job in time.


_HANDOVER = timedelta(minutes=3)  # from the last save on the old machines to the first step on new ones that are ready
NOTICE = timedelta(minutes=2)
"""AWS's."""
_SAVE = timedelta(minutes=10)  # between saves, where nobody says


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """`restart_s` passes from a launch to the first step; `handover_s` is what remains of it after a boot beside.

    With a notice, work stops `notice_s` before the machines go, and nothing else is lost. Without one (None), all is
    lost since the last checkpoint, of which there is one every `save_s` of work; never, where that is infinite.
    `saves_when_asked`: whether it saves before it leaves for other machines; else that costs what an interruption does.
    """

    restart_s: float
    handover_s: float = 0.0
    notice_s: float | None = 120.0
    save_s: float = 600.0
    saves_when_asked: bool = True

    @property
    def begins_anew(self) -> bool:
        """Whether nothing is ever saved."""
        return math.isinf(self.save_s)

    @property
    def changeover_s(self) -> float:
        """A restart, with the most that an interruption can undo: what policies are told.

        Where nothing is saved, that has no bound, and they are told what they are of any other job, as it trains.
        """
        if self.notice_s is not None:
            return self.restart_s + self.notice_s
        return self.restart_s + (NOTICE.total_seconds() if self.begins_anew else self.save_s)

    def lost_s(self, worked_s: float) -> float:
        """Return how much an interruption undoes of the work done since the last start."""
        return worked_s % self.save_s if self.notice_s is None else min(worked_s, self.notice_s)

    def left_behind_s(self, worked_s: float) -> float:
        """Return how much a change of machines by choice undoes of the work done since the last start."""
        return 0.0 if self.saves_when_asked else worked_s % self.save_s


def recovery_of(
    restart: timedelta, saving: Saving, policy: CheckpointPolicy, *, notice: timedelta | None = NOTICE
) -> Recovery:
    """Return what launches and interruptions cost a script that saves so; one of which nobody knows is taken to save.

    `notice`: how long before the cloud tells of an interruption, None where it does not. A script that saves by itself
    makes use of it with `on_notice` alone; how often it saves is not known beforehand.
    """
    kept = policy.directory
    told = saving not in NEVER and (saving is not Saving.DIRECTORY or _is_told(policy))
    save = _SAVE if kept is not None or policy.every is None else policy.every
    return Recovery(
        restart_s=restart.total_seconds(),
        handover_s=min(restart, _HANDOVER).total_seconds(),
        notice_s=notice.total_seconds() if notice is not None and told else None,
        save_s=math.inf if saving in NEVER else save.total_seconds(),
        saves_when_asked=told,
    )


def recovery_within(
    changeover: timedelta, saving: Saving, policy: CheckpointPolicy, *, notice: bool = True
) -> Recovery:
    """Return the same for a cloud whose changeover is so long: a restart, and what a notice undoes."""
    restart = restart_within(changeover)
    return recovery_of(restart, saving, policy, notice=changeover - restart if notice else None)


def restart_within(changeover: timedelta) -> timedelta:
    """Return what is left for a restart of a changeover that has in it what a notice undoes."""
    return changeover - min(NOTICE, changeover / 2)


def changeover_words(changeover: timedelta, restart: timedelta, *, two: bool) -> str:
    """Return "a changeover (30 s: a restart of 15 s, and 15 s of work done again)", or the same of two."""
    of = f"a restart of {format_span(restart)}, and {format_span(changeover - restart)} of work done again"
    return f"{'two changeovers' if two else 'a changeover'} ({format_span(changeover)}{' each' * two}: {of})"


def _is_told(policy: CheckpointPolicy) -> bool:
    return policy.directory is not None and policy.directory.on_notice is not OnNotice.NONE


USUAL = recovery_of(timedelta(minutes=10), Saving.RESUME, CheckpointPolicy())
"""A changeover of 12 minutes: what a start is taken to be as long as none was measured."""
