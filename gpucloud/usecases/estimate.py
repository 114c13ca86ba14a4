"""What a job is going to cost, when it will be done and what the account must allow: the long form of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.errors import CredentialsError
from gpucloud.domain.feasibility import Needs, needs_of, task_of
from gpucloud.domain.interval import SaveTimes, interval, interval_with_notice, save_times
from gpucloud.domain.job import Cloud, Job, Market, MarketPolicy
from gpucloud.domain.markets import RecordedMarket
from gpucloud.domain.offer import Offer
from gpucloud.domain.outlook import between, undisturbed
from gpucloud.domain.plan import Plan
from gpucloud.domain.policy.names import Policy
from gpucloud.domain.policy.net import least_span_s
from gpucloud.domain.policy.observation import Task
from gpucloud.domain.simulation.outcome import Summary
from gpucloud.domain.work import Work, work_of
from gpucloud.usecases.outlooks import Outlooks, Stage
from gpucloud.usecases.planning import Planner
from gpucloud.usecases.quotas import Need, Quotas

QUICK = Policy.UNIFORM
"""What candidates and deadlines are compared under: the learned policy's tables take a second for each of them."""

_MOST_CANDIDATES = 5
_FEW = 24  # windows, where many outlooks are asked for
_SLACKS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0)  # of the work: deadlines from hardly any slack to three times the work
_ANY_SUM = Decimal(10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One type of machine on one market: its best offer, in how many of the region's zones it is, and the outlook."""

    offer: Offer
    zones: int
    work: Work | None
    outlook: Summary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtDeadline:
    """What the job comes to when it has so much time, and ends on demand where spot machines do not suffice."""

    deadline: timedelta
    outlook: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """How often a job saves by itself, what a save takes, and how often would do if every notice came."""

    every: timedelta
    with_notice: timedelta
    between: timedelta
    times: SaveTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan, and what is to be expected of it; without known work only the plan, the candidates and the quotas.

    `outlook` is the chosen machines' under `policy`, which is None where there is nothing to choose: no spot machines,
    or nothing else. `on_demand` is the same machines, never taken. `policies` and `curve` are of jobs that may take
    spot machines; `recorded` is what they were replayed on. `quotas` is None where nobody can ask for them.
    """

    plan: Plan
    changeover: timedelta
    candidates: tuple[Candidate, ...]
    quotas: tuple[Need, ...] | None
    work: Work | None = None
    policy: Policy | None = None
    outlook: Summary | None = None
    on_demand: Summary | None = None
    policies: tuple[tuple[Policy, Summary], ...] = ()
    curve: tuple[AtDeadline, ...] = ()
    saves: Saves | None = None
    recorded: tuple[RecordedMarket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Estimates jobs as one planner plans them."""

    planner: Planner
    outlooks: Outlooks

    def estimate(self, job: Job) -> Estimate:
        """Return the job's estimate; nothing is written. Raises what a plan raises."""
        plan = self.planner.plan(job)
        bare = Estimate(
            plan=plan,
            changeover=self.planner.changeover,
            candidates=tuple(self._candidates(job, plan)),
            quotas=self._quotas(job, plan.offer),
        )
        needs = needs_of(job, plan.offers, self.planner.changeover)
        return bare if needs is None else self._foreseen(job, bare, needs)

    def _foreseen(self, job: Job, bare: Estimate, needs: Needs) -> Estimate:
        stage = _stage(job, bare.plan.offers, needs)
        quick = bare.candidates[0].outlook
        known = replace(bare, work=work_of(job, needs.offer), outlook=quick, on_demand=_never_taken(job, needs))
        if stage is None or quick is None:
            return known
        task = _task(job, needs)
        policies = tuple(self._policies(job, needs, stage, quick))
        outlook = dict(policies).get(job.policy, quick)
        return replace(
            known,
            outlook=outlook,
            policy=job.policy if stage.fallback else None,
            policies=policies,
            curve=tuple(self._curve(task, replace(stage, fallback=True))),
            saves=_saves(job, task, outlook),
            recorded=self.outlooks.recordings(needs.offer.gpus),
        )

    def _candidates(self, job: Job, plan: Plan) -> Iterator[Candidate]:
        """Yield the best offer of each type and market, the chosen one first."""
        kinds: dict[tuple[str, Market], list[Offer]] = {}
        for offer in plan.offers:
            kinds.setdefault((offer.pool.instance_type, offer.pool.market), []).append(offer)
        for at, offers in enumerate(list(kinds.values())[:_MOST_CANDIDATES]):
            others = [offer for offer in plan.offers if offer not in offers]
            needs = needs_of(job, (*offers, *others), self.planner.changeover)
            yield Candidate(
                offer=offers[0],
                zones=_zones(offers),
                work=work_of(job, offers[0]),
                outlook=self._outlook(job, plan, needs, few=at > 0) if needs is not None else None,
            )

    def _outlook(self, job: Job, plan: Plan, needs: Needs, *, few: bool) -> Summary | None:
        stage = _stage(job, plan.offers, needs)
        if stage is None:
            return _never_taken(job, replace(needs, fallback=needs.offer))
        windows = {"windows": _FEW} if few else {}
        return self.outlooks.outlook(QUICK, _task(job, needs), stage, budget_usd=job.budget_usd, **windows)

    def _policies(self, job: Job, needs: Needs, stage: Stage, quick: Summary) -> Iterator[tuple[Policy, Summary]]:
        if not stage.fallback:
            return
        for policy in (Policy.LEARNED, QUICK, Policy.GREEDY):
            asked = policy is not QUICK
            outlook = (
                self.outlooks.outlook(policy, _task(job, needs), stage, budget_usd=job.budget_usd) if asked else quick
            )
            if outlook is not None:
                yield policy, outlook
        yield Policy.ON_DEMAND, _never_taken(job, needs)

    def _curve(self, task: Task, stage: Stage) -> Iterator[AtDeadline]:
        for slack in _SLACKS:
            span_s = least_span_s(task) + slack * task.work_s
            asked = replace(task, span_s=span_s)
            outlook = self.outlooks.outlook(QUICK, asked, stage, budget_usd=_ANY_SUM, windows=_FEW)
            if outlook is not None:
                yield AtDeadline(deadline=timedelta(seconds=span_s), outlook=outlook)

    def _quotas(self, job: Job, offer: Offer) -> tuple[Need, ...] | None:
        """Return what the chosen machines need of the quotas of both markets; None where nobody can say."""
        if self.planner.account is None:
            return () if job.cloud is not Cloud.AWS else None
        types = (offer.pool.instance_type,)
        both = replace(job, resources=replace(job.resources, market=MarketPolicy.AUTO, types=types))
        try:
            return Quotas(market=self.planner.market, account=self.planner.account).needs(both)
        except CredentialsError:
            return None


def _stage(job: Job, offers: tuple[Offer, ...], needs: Needs) -> Stage | None:
    """Return where the job's spot machines are replayed; None where it has none that a market takes."""
    offer = needs.offer
    if offer.pool.market is not Market.SPOT or job.cloud is not Cloud.AWS:
        return None
    alike = [o for o in offers if (o.pool.instance_type, o.pool.market) == (offer.pool.instance_type, Market.SPOT)]
    return Stage(
        gpus=offer.gpus,
        zones=_zones(alike),
        spot_usd_per_hour=offer.usd_per_hour,
        on_demand_usd_per_hour=Decimal(str(task_of(job, needs).on_demand_usd_per_hour)),
        fallback=needs.fallback is not None,
    )


def _zones(offers: list[Offer]) -> int:
    region = offers[0].pool.region
    return sum(offer.pool.region == region for offer in offers)


def _task(job: Job, needs: Needs) -> Task:
    """Return the task; a job that may take machines on demand, and has no deadline, never waits for spot machines."""
    task = task_of(job, needs)
    if job.deadline is None and needs.fallback is not None:
        return replace(task, span_s=least_span_s(task))
    return task


def _never_taken(job: Job, needs: Needs) -> Summary:
    return undisturbed(task_of(job, needs))


def _saves(job: Job, task: Task, outlook: Summary) -> Saves | None:
    apart = between(task, outlook)
    if job.model is None or apart is None:
        return None
    times = save_times(job.model, nodes=job.resources.nodes, gpus=job.resources.gpus)
    return Saves(
        every=interval(times, apart), with_notice=interval_with_notice(times, apart), between=apart, times=times
    )
