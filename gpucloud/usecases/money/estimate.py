"""What a job would rent and whether quotas allow it, what it is going to cost, and when it will be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.checkpoint.protection import NEVER, Saving
from gpucloud.domain.errors import BudgetTooSmall, CredentialsError, NoCapacity, PlanRefused, UsageError
from gpucloud.domain.job.quantities import in_cents
from gpucloud.domain.job.spec import Cloud, Job, Market, MarketPolicy, Policy
from gpucloud.domain.market.catalog import Headroom, QuotaRequest
from gpucloud.domain.market.feasibility import (
    Needs,
    begins_on_demand_for,
    is_safer_on_demand,
    least_usd,
    needs_of,
    on_demand_usd,
    paid_for_by_least,
    refuse_what_cannot_be_kept,
    task_of,
)
from gpucloud.domain.market.outcome import Saves, Stored, Summary, saves_of, stored_of, undisturbed
from gpucloud.domain.market.plan import Plan, fitting, make_plan, quota_too_small, spot_first, with_on_demand_first
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import least_span_s
from gpucloud.domain.market.recordings import RecordedMarket
from gpucloud.domain.market.scenario import restart_within
from gpucloud.domain.market.sizing import Work, work_of
from gpucloud.domain.money.budget import NOTHING_USED, PrepaidRule, Used
from gpucloud.domain.money.costs import remark
from gpucloud.domain.money.ledger import Terms, with_extras
from gpucloud.domain.offer import Offer, Pool
from gpucloud.ports import Account, Clock, DataSets, MarketData
from gpucloud.usecases.money.simulate import Outlooks, Stage, is_replayed, stage_of, zones_of

QUICK = Policy.UNIFORM
"""What candidates and deadlines are compared under: the learned policy's tables take a second for each of them."""

_MOST_CANDIDATES = 5
_FEW = 36  # windows, where many outlooks are asked for
_SLACKS = (0.02, 0.1, 0.25, 0.5, 1.0, 2.0)  # of the work: deadlines from hardly any slack to three times the work
_ANY_SUM = Decimal(10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One type of machine on one market: its best offer, in how many of the region's zones it is, and the outlook.

    The outlook is of this type alone, also on demand; `ends_on` is what it ends on where it cannot be had there.
    """

    offer: Offer
    zones: int
    work: Work | None
    outlook: Summary | None
    ends_on: Pool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtDeadline:
    """What the job comes to when it has so much time, and ends on demand where spot machines do not suffice."""

    deadline: timedelta
    outlook: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan, and what is to be expected of it; without known work only the plan, the candidates and the quotas.

    `outlook` is the chosen machines' under `policy`, which is None where none is asked: without a deadline, without
    spot machines, or with nothing else. `on_demand` is the same machines, never interrupted. `policies` are of jobs
    that ask one, `curve` of those that may take spot machines; `recorded` is what they were replayed on. `quotas` is
    None where nobody can ask for them.
    """

    plan: Plan
    changeover: timedelta
    start: timedelta
    """How long a start takes on machines that nothing interrupts."""
    candidates: tuple[Candidate, ...]
    quotas: tuple[Need, ...] | None
    work: Work | None = None
    policy: Policy | None = None
    outlook: Summary | None = None
    on_demand: Summary | None = None
    policies: tuple[tuple[Policy, Summary], ...] = ()
    curve: tuple[AtDeadline, ...] = ()
    saves: Saves | None = None
    stored: Stored | None = None
    recorded: tuple[RecordedMarket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Estimates jobs as one planner plans them, whose script saves so: an interruption costs what is not saved."""

    planner: Planner
    outlooks: Outlooks
    saving: Saving = Saving.RESUME

    def estimate(self, job: Job) -> Estimate:
        """Return the job's estimate; nothing is written. Raises what a plan raises."""
        plan = self.planner.plan(job)
        bare = Estimate(
            plan=plan,
            changeover=self.planner.changeover,
            start=self.planner.start,
            candidates=_that_finish_first(job, tuple(self._candidates(job, plan))),
            quotas=self._quotas(job, plan.offer),
        )
        # What the policy comes to is asked of all that it may choose from, whatever it chooses first.
        offers = plan.offers if plan.on_demand_for is None else spot_first(plan.offers)
        needs = needs_of(job, offers, self.planner.changeover)
        return bare if needs is None else self._foreseen(job, bare, needs)

    def _foreseen(self, job: Job, bare: Estimate, needs: Needs) -> Estimate:
        stage = self._stage(job, bare.plan.offers, needs)
        known = replace(bare, work=work_of(job, needs.offer), on_demand=self.planner.undisturbed(job, needs))
        if stage is None:
            replayed = any(one.outlook is not None and one.outlook.windows for one in bare.candidates)
            recorded = self.outlooks.recordings(needs.offer.gpus) if replayed else ()
            return replace(known, outlook=bare.candidates[0].outlook, recorded=recorded)
        task = self.planner.task(job, needs)
        known = replace(known, recorded=self.outlooks.recordings(needs.offer.gpus))
        policies = tuple(self._policies(job, needs, stage)) if stage.fallback and job.deadline is not None else ()
        outlook = dict(policies).get(job.policy) if policies else self._outlook(job, needs, stage)
        if outlook is None:
            return known
        saves = saves_of(job, self.saving, outlook)
        return replace(
            known,
            outlook=outlook,
            policy=job.policy if policies else None,
            policies=policies,
            curve=tuple(self._curve(task, replace(stage, fallback=True))),
            saves=saves,
            stored=stored_of(job, self.planner.terms.rates_in(needs.offer.pool.region), needs.work, outlook, saves),
        )

    def _candidates(self, job: Job, plan: Plan) -> Iterator[Candidate]:
        """Yield the best offer of each type and market, the chosen one first, each as if there were no other type."""
        kinds: dict[tuple[str, Market], list[Offer]] = {}
        for offer in plan.offers:
            kinds.setdefault((offer.pool.instance_type, offer.pool.market), []).append(offer)
        for at, offers in enumerate(list(kinds.values())[:_MOST_CANDIDATES]):
            alike = kinds.get((offers[0].pool.instance_type, Market.ON_DEMAND), [])
            needs = needs_of(job, (*offers, *(alike or plan.offers)), self.planner.changeover)
            other = None if alike or needs is None or needs.fallback is None else needs.fallback.pool
            yield Candidate(
                offer=offers[0],
                zones=zones_of(offers),
                work=work_of(job, offers[0]),
                outlook=self._of(job, plan, needs, few=at > 0) if needs is not None else None,
                ends_on=other if offers[0].pool.market is Market.SPOT else None,
            )

    def _of(self, job: Job, plan: Plan, needs: Needs, *, few: bool) -> Summary | None:
        stage = self._stage(job, plan.offers, needs)
        if stage is None:
            return self.planner.undisturbed(job, replace(needs, fallback=needs.offer))
        return self._outlook(job, needs, stage, few=few)

    def _outlook(
        self, job: Job, needs: Needs, stage: Stage, *, policy: Policy = QUICK, few: bool = False
    ) -> Summary | None:
        """Under the policy; as it goes without any where the job has no deadline, but may go on demand."""
        windows = {"windows": _FEW} if few else {}
        asked = _asked(job, stage, policy)
        return self.outlooks.outlook(asked, self.planner.task(job, needs), stage, budget_usd=job.budget_usd, **windows)

    def _policies(self, job: Job, needs: Needs, stage: Stage) -> Iterator[tuple[Policy, Summary]]:
        for policy in (Policy.LEARNED, QUICK, Policy.GREEDY):
            outlook = self._outlook(job, needs, stage, policy=policy)
            if outlook is not None:
                yield policy, outlook
        yield Policy.ON_DEMAND, self.planner.undisturbed(job, needs)

    def _stage(self, job: Job, offers: tuple[Offer, ...], needs: Needs) -> Stage | None:
        return stage_of(job, offers, needs, self.planner.terms, self.saving)

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


def _that_finish_first(job: Job, found: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Return the chosen one, those that mostly come to their end within deadline and budget, and then the rest."""
    chosen, *others = found

    def fails(one: Candidate) -> bool:
        return one.work is not None and (one.outlook is None or one.outlook.mostly_fails(job.budget_usd))

    return (chosen, *sorted(others, key=fails))


def _asked(job: Job, stage: Stage, policy: Policy) -> Policy | None:
    return policy if job.deadline is not None or not stage.fallback else None


# What a job would rent: the offers that do what it asks, that the account may rent and that can keep its limits.


def _as_the_file_says(job: Job) -> Saving:
    if job.checkpoint.none:
        return Saving.NONE
    return Saving.DIRECTORY if job.checkpoint.directory is not None else Saving.RESUME


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans jobs at one market's prices, within what the account may rent.

    `changeover` is what a launch is taken to cost a job in time, as long as none was measured. With `outlooks` a budget
    that does not surely suffice is refused only where hardly any replay ends within it; `saving` is how a job saves.
    """

    market: MarketData
    account: Account | None
    clock: Clock
    prepaid_rule: PrepaidRule
    terms: Terms
    changeover: timedelta
    outlooks: Callable[[], Outlooks] | None = None
    saving: Callable[[Job], Saving] = _as_the_file_says

    @property
    def start(self) -> timedelta:
        """How long a start takes: as in the replays that stand beside it, and no less than the budget pays it for."""
        return max(restart_within(self.changeover), self.prepaid_rule.start)

    def saves(self, job: Job) -> bool:
        """Whether the job's script saves at all, as far as can be seen."""
        return self.saving(job) not in NEVER

    def task(self, job: Job, needs: Needs) -> Task:
        """Return the job as policies are told of it."""
        return task_of(job, needs, self.saving(job))

    def undisturbed(self, job: Job, needs: Needs) -> Summary:
        """Return what the job comes to on machines that nothing interrupts."""
        return undisturbed(self.task(job, needs), self.start)

    def plan(self, job: Job) -> Plan:
        """Return the plan of a new run; nothing is written.

        Raises PlanRefused, NoCapacity (no offer, or no quota for any), BudgetTooSmall.
        """
        offers, now = self.allowed(job, self.offers(job)), self.clock.now()
        try:
            plan = make_plan(job, offers, now, self.prepaid_rule, saves=self.saves(job), offered=self.offers)
            self._refuse_what_cannot_be_kept(job, plan.offers)
        except PlanRefused:
            # The whole work may want more than a start, and its sum start other machines: one that suffices is named.
            if found := fitting(job, offers):
                self._refuse_what_cannot_be_kept(job, paid_for_by_least(job, found, self.changeover, self.prepaid_rule))
            raise
        return self.safer(job, plan, self.prepaid_rule)

    def safer(self, job: Job, plan: Plan, prepaid_rule: PrepaidRule, *, used: Used = NOTHING_USED) -> Plan:
        """Say where spot machines do not pay; a job that may go on demand then does, where its budget holds that.

        It is asked of the whole work: what a run has spent was for a part of it. A job whose policy begins on demand
        is planned so.
        """
        needs = needs_of(job, plan.offers, self.changeover)
        if needs is None:
            return plan
        begun = self._begun_on_demand(job, plan, needs, prepaid_rule, used)
        if begun is not None:
            return begun
        if self.outlooks is None or stage_of(job, plan.offers, needs, self.terms, Saving.NONE) is None:
            return plan
        spot = self._foresee(job, plan.offers, needs, _ANY_SUM)
        if not is_safer_on_demand(job, needs, spot):
            return plan
        if job.deadline is not None:  # what is told is of the policy that the job goes by
            spot = self._foresee(job, plan.offers, needs, _ANY_SUM, job.policy)
            if not is_safer_on_demand(job, needs, spot):
                return plan
        spot_usd = None if spot is None or spot.is_mostly_unfinished else spot.mean_usd  # of few it says nothing
        safe = self._on_demand(job, plan, prepaid_rule, used) if job.deadline is None else None
        if safe is not None and on_demand_usd(job, needs) + safe.kept_usd <= job.budget_usd:
            told = replace(plan, on_demand_usd=self.undisturbed(job, needs).mean_usd, spot_usd=spot_usd)
            return with_on_demand_first(told, safe)
        return self._advised(job, plan, spot_usd)

    def _advised(self, job: Job, plan: Plan, spot_usd: Decimal | None) -> Plan:
        """Return the plan with what the job comes to on demand alone, and the budget that this takes, as tried."""
        asked = replace(job, resources=replace(job.resources, market=MarketPolicy.ON_DEMAND))
        with suppress(PlanRefused, NoCapacity):  # whatever the budget
            fixed = self.plan(replace(asked, budget_usd=_ANY_SUM))
            needs = needs_of(asked, fixed.offers, self.changeover)
            usd = self.undisturbed(asked, needs).mean_usd if needs is not None else None
            if needs is not None and usd is not None and (spot_usd is None or usd <= spot_usd):
                takes_usd = Decimal(in_cents(least_usd(asked, needs, self.prepaid_rule)))
                return replace(plan, spot_usd=spot_usd, on_demand_usd=usd, on_demand_budget_usd=takes_usd)
        return plan

    def _begun_on_demand(
        self, job: Job, plan: Plan, needs: Needs, prepaid_rule: PrepaidRule, used: Used
    ) -> Plan | None:
        """Return the plan of a job whose policy first asks for machines on demand; None for any other."""
        is_spot = plan.offer.pool.market is Market.SPOT
        safe = self._on_demand(job, plan, prepaid_rule, used) if is_spot else None
        if safe is None:
            return None
        left_usd = job.budget_usd - used.usd - safe.kept_usd
        why = begins_on_demand_for(job, plan.offers, needs, left_usd, self.saving(job))
        if why is None or on_demand_usd(job, needs) > left_usd:  # without the money it goes on with spot machines
            return None
        return replace(with_on_demand_first(plan, safe), on_demand_for=why)

    def _on_demand(self, job: Job, plan: Plan, prepaid_rule: PrepaidRule, used: Used) -> Plan | None:
        """Return the plan on those of its machines that are had on demand; None where there is no such plan."""
        fixed = tuple(offer for offer in plan.offers if offer.pool.market is Market.ON_DEMAND)
        try:
            saves = self.saves(job)
            return make_plan(job, fixed, plan.made_at, prepaid_rule, used=used, saves=saves) if fixed else None
        except (PlanRefused, BudgetTooSmall):
            return None

    def _foresee(
        self, job: Job, offers: tuple[Offer, ...], needs: Needs, budget_usd: Decimal, policy: Policy = QUICK
    ) -> Summary | None:
        stage = stage_of(job, offers, needs, self.terms, self.saving(job))
        if self.outlooks is None or stage is None:
            return None
        asked = _asked(job, stage, policy)
        return self.outlooks().outlook(asked, self.task(job, needs), stage, budget_usd=budget_usd)

    def _refuse_what_cannot_be_kept(self, job: Job, offers: tuple[Offer, ...]) -> None:
        undated = replace(job, deadline=None)  # it is asked of money alone

        def foresee(needs: Needs, budget_usd: Decimal) -> Summary | None:
            return self._foresee(undated, offers, needs, budget_usd)

        def is_too_long(needs: Needs) -> bool:
            stage = stage_of(job, offers, needs, self.terms, self.saving(job))
            return bool(stage and self.outlooks and self.outlooks().is_too_long(self.task(job, needs), stage))

        known = (foresee, is_too_long) if self.outlooks is not None and is_replayed(job, offers[0]) else None
        saving = self.saving(job)
        refuse_what_cannot_be_kept(job, offers, self.changeover, self.prepaid_rule, known, saving=saving)

    def offers(self, job: Job) -> tuple[Offer, ...]:
        """Return the market's offers, at the price of a node with what it has beside."""
        return with_extras(self.market.offers(job.resources), self.terms)

    def allowed(self, job: Job, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
        """Return the offers that the account's quotas hold; NoCapacity, naming the quota, when they hold none."""
        if self.account is None:
            return offers
        ranked = fitting(job, offers)
        rooms = {offer.pool: self.account.headroom(offer) for offer in ranked}
        held = tuple(o for o in ranked if rooms[o.pool].holds(o.vcpus * job.resources.nodes))
        if ranked and not held:
            raise quota_too_small(ranked[0], job.resources.nodes, rooms[ranked[0].pool])
        return held or offers  # nothing fits: the plan says why


def data_remarks(job: Job, sets: DataSets | None, region: str) -> tuple[str, ...]:
    """Return what reading the job's data costs machines in that region, where it costs anything; `sets` lists it."""
    if sets is None or job.cloud is not Cloud.AWS:
        return ()
    found = (sets.listed(source) for source, _ in job.data if source.startswith("s3://"))
    return tuple(line for one in found if (line := remark(one, region, job.resources.nodes)))


# What a job needs of the account's quotas, what there is, and asking for more.


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One quota that the job's machines count against; `vcpus` is the least of it that some offer of the job needs."""

    room: Headroom
    vcpus: int
    instance_type: str

    @property
    def enough(self) -> bool:
        """Whether the machines can be started."""
        return self.room.holds(self.vcpus)

    @property
    def to_request(self) -> int:
        """The limit to ask for: what is used and what is needed."""
        return (self.room.used or 0) + self.vcpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Answers about quotas for one market and account."""

    market: MarketData
    account: Account

    def needs(self, job: Job) -> tuple[Need, ...]:
        """Return each quota that the job could use, that of its best offer first; NoCapacity without any offer."""
        found: dict[tuple[str, str], Need] = {}
        for offer in fitting(job, self.market.offers(job.resources)):
            room = self.account.headroom(offer)
            need = Need(room=room, vcpus=offer.vcpus * job.resources.nodes, instance_type=offer.pool.instance_type)
            known = found.get((room.region, room.code))
            if known is None or need.vcpus < known.vcpus:
                found[room.region, room.code] = need
        if not found:
            raise NoCapacity(f"no machine that is known does what {job.name} asks", hint="ask for less in `resources:`")
        return tuple(found.values())

    def request(self, job: Job, vcpus: int | None) -> QuotaRequest:
        """Ask for as much as the job needs, or for `vcpus`; UsageError when that is there already."""
        need = self.needs(job)[0]
        wanted = vcpus if vcpus is not None else need.to_request
        if need.room.limit is not None and wanted <= need.room.limit:
            raise UsageError(
                f"the quota {need.room.name!r} in {need.room.region} is {need.room.limit} vCPUs already",
                hint="--vcpus N asks for more than that",
            )
        return self.account.ask_for_more(need.room, wanted)
