"""`simulate`: a job rehearsed on recorded spot markets, before any money is spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from gpucloud.cli.commands.training import everywhere
from gpucloud.cli.render.simulations import (
    Simulation,
    market_json,
    markets_text,
    policy_named,
    simulation_json,
    simulation_text,
    title,
    zones_named,
)
from gpucloud.cli.render.words import say_json, say_words, tell
from gpucloud.cli.target import Target, read_target
from gpucloud.domain.checkpoint.protection import Saving, saves_nothing
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import format_usd, parse_span, parse_usd
from gpucloud.domain.job.spec import Cloud, Job, Market, MarketPolicy, Policy
from gpucloud.domain.market.catalog import aged
from gpucloud.domain.market.outcome import Stored, saves_of, stored_of
from gpucloud.domain.market.plan import fitting
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone, recorded_beside, zone_set
from gpucloud.domain.market.scenario import (
    NOTICE,
    Recovery,
    Scenario,
    deadlines,
    recovery_of,
    recovery_within,
)
from gpucloud.domain.market.simulation import recordings
from gpucloud.domain.market.sizing import work_of
from gpucloud.domain.money.ledger import PLAIN_TERMS, Rates, Terms, with_extras
from gpucloud.ports import Chart, Series
from gpucloud.usecases.money.simulate import Result, Study, simulate
from gpucloud.wiring import Gpucloud, how_it_saves
from gpucloud.wiring.jobs import plot_into, policy_tables, recorded_markets

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options; what is None or empty is the job file's, or the default."""

    markets: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    policies: tuple[Policy, ...] = ()
    work: str | None = None
    deadline: str | None = None
    budget: str | None = None
    price: str | None = None
    restart: str | None = None
    notice: bool
    windows: int
    seed: int
    sweep: bool
    plot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """The job's machine: its GPUs, its prices an hour where known, what stands beside it, and its time for tokens.

    `rates` are its region's.
    """

    gpus: int
    on_demand_usd: Decimal | None = None
    spot_usd: Decimal | None = None
    terms: Terms = PLAIN_TERMS
    work: timedelta | None = None
    rates: Rates | None = None

    def market(self, recorded: RecordedMarket) -> RecordedMarket:
        """Return the market at the machine's prices; spot keeps its share of a price on demand where none is known."""
        if self.on_demand_usd is None:
            return recorded
        if self.spot_usd is None:
            return recorded.at_price(self.on_demand_usd)
        return recorded.at_prices(self.on_demand_usd, self.spot_usd)


def rehearse(target: str | None, asked: Asked, *, as_json: bool) -> int:
    """Say what the job would have cost on recorded markets; return the exit code."""
    cloud = Gpucloud()
    file = read_target(cloud, target)
    file = replace(file, job=everywhere(cloud, file.job) or file.job)
    priced = _priced(cloud, file.job, asked)
    saving = how_it_saves(file.job).saving
    scenario = _scenario(cloud, file, asked, priced, saving)
    if scenario.market is not file.job.resources.market:
        tell("replayed as with `market: auto`, which alone asks a policy: a deadline brings it where a file names none")
    plot = None if asked.plot is None else plot_into(asked.plot)
    known = recorded_markets()
    every = [known.market(name) for name in known.names()]
    done = []
    for name in asked.markets or recordings(priced.gpus):
        market = known.market(name)
        study = _study(file.job, scenario, priced.market(market), asked, unseen=recorded_beside(market, every))
        one = _simulated(scenario, priced.market(market), study)
        stored = _stored(file.job, saving, priced, scenario, one)
        done.append(replace(one, stored=stored, is_priced=priced.on_demand_usd is not None))
    if as_json:
        say_json(simulation_json(file.job.name, scenario, done))
    else:
        say_words("\n\n".join(simulation_text(file.job.name, scenario, one) for one in done))
    if plot is not None:
        plot.save(charts(scenario, done), title=title(file.job.name, scenario))
        tell(f"drawn: {asked.plot}")
    return 0


def list_markets(*, as_json: bool) -> int:
    """Say which recorded markets there are, and how they were; return the exit code."""
    known = recorded_markets()
    markets = [known.market(name) for name in known.names()]
    if as_json:
        say_json({"markets": [market_json(market) for market in markets]})
    else:
        say_words(markets_text(markets))
    return 0


def _scenario(cloud: Gpucloud, target: Target, asked: Asked, priced: _Priced, saving: Saving) -> Scenario:
    job = target.job
    work = _read(parse_span, "--work", asked.work) or job.work or priced.work
    deadline = _read(parse_span, "--deadline", asked.deadline) or job.deadline
    restart = _read(parse_span, "--restart", asked.restart)
    if work is None:
        raise UsageError(
            f"{target.file} does not say how much work the job is", hint="`work: 48h` there, or --work 48h"
        )
    if deadline is None and asked.policies and not asked.sweep:
        raise UsageError("without a deadline no policy is asked", hint="--deadline 60h, or --sweep, for --policy")
    return Scenario(
        work=work,
        deadline=deadline,
        budget_usd=_read(parse_usd, "--budget", asked.budget) or job.budget_usd,
        nodes=job.resources.nodes,
        least_nodes=job.resources.least_nodes,
        recovery=_recovery(cloud, job, restart, saving, notice=asked.notice),
        terms=priced.terms,
        saves_nothing=saves_nothing(job, saving),
        market=_market(job, asked),
    )


def _market(job: Job, asked: Asked) -> MarketPolicy:
    """Return the file's, and `auto` where a policy is asked for, or a deadline that the file does not have.

    With one in the file it would be `auto`, too, unless it names another.
    """
    undated = job.deadline is None and (asked.deadline is not None or asked.sweep)
    if asked.policies or (undated and job.resources.market is MarketPolicy.SPOT):
        return MarketPolicy.AUTO
    return job.resources.market


def _recovery(cloud: Gpucloud, job: Job, restart: timedelta | None, saving: Saving, *, notice: bool) -> Recovery:
    """Return what machines that go cost the script: starts are as long as a plan takes them to be on the job's cloud.

    Those of a `restart` that is asked for are another cloud's, with AWS's notice.
    """
    if restart is None:
        changeover = cloud.cloud(job).cloud_profile.rules.limits.changeover
        return recovery_within(changeover, saving, job.checkpoint, notice=notice)
    return recovery_of(restart, saving, job.checkpoint, notice=NOTICE if notice else None)


def _priced(cloud: Gpucloud, job: Job, asked: Asked) -> _Priced:
    """Return the machine that the job gets, on AWS at the catalog's prices: the one that `plan` would take."""
    if asked.price is not None or job.cloud is not Cloud.AWS:
        return _Priced(gpus=job.resources.gpus, on_demand_usd=_read(parse_usd, "--price", asked.price))
    aws = cloud.aws(job.aws, job.resources)
    whole = aws.cloud_profile.terms
    offers = fitting(job, with_extras(aws.listed_market().offers(job.resources), whole))
    if not offers:
        return _Priced(gpus=job.resources.gpus)
    best = offers[0]
    name, region = best.pool.instance_type, best.pool.region
    terms, listed = whole.of(name), aws.catalog.price(name, region)
    usd = listed.usd_per_hour
    spot = best.usd_per_hour - whole.extras_usd_per_hour if best.pool.market is Market.SPOT else None
    assumed = f"; {said}" if (said := aws.catalog.assumed([region])) else ""
    most = "at most " if listed.bound else ""
    tell(
        f"priced as {name} in {region}: {most}{format_usd(usd)} an hour, list price of"
        f" {aged(listed.as_of, cloud.clock.now())}{assumed}"
    )
    if spot is not None:
        beside = format_usd(terms.extras_usd_per_hour)
        of = aged(best.as_of.date(), cloud.clock.now())
        tell(f"spot at {format_usd(spot)} an hour, the price of {of}, throughout, as `plan` has it")
        tell(f"disk and address {beside} an hour")
    work = work_of(job, best)
    return _Priced(
        gpus=best.gpus,
        on_demand_usd=usd,
        spot_usd=spot,
        terms=terms,
        work=None if work is None else work.span,
        rates=whole.rates_in(region),
    )


def _simulated(scenario: Scenario, market: RecordedMarket, study: Study) -> Simulation:
    return Simulation(market=market, study=study, results=tuple(simulate(scenario, market, study, policy_tables)))


def _study(job: Job, scenario: Scenario, market: RecordedMarket, asked: Asked, *, unseen: tuple[str, ...]) -> Study:
    """Return what is tried on the market; `unseen` are the recordings of which the learned policy knows nothing."""
    spans = (asked.sweep and deadlines(scenario, market)) or (scenario.deadline,)
    chooses = scenario.market is MarketPolicy.AUTO and None not in spans
    return Study(
        zone_sets=_zone_sets(job, market, asked.zones),
        policies=asked.policies or (tuple(Policy) if chooses else _without_a_choice(scenario.market)),
        deadlines=spans,
        windows=asked.windows,
        seed=asked.seed,
        unseen=unseen,
    )


def _without_a_choice(market: MarketPolicy) -> tuple[Policy | None, ...]:
    """Return what a job does that asks no policy, and beside it the same on demand; greedy waits for spot machines."""
    spot = Policy.GREEDY if market is MarketPolicy.SPOT else None
    return (Policy.ON_DEMAND,) if market is MarketPolicy.ON_DEMAND else (spot, Policy.ON_DEMAND)


def _stored(job: Job, saving: Saving, priced: _Priced, scenario: Scenario, done: Simulation) -> Stored | None:
    """Return what the job's saves cost in S3, under its own policy in the first zones, as `plan` has it."""
    own = job.policy if job.policy in done.study.policies else done.study.policies[0]
    first = next((one for one in done.results if one.policy is own), None)
    if first is None or priced.rates is None:
        return None
    found = first.summary
    return stored_of(job, priced.rates, scenario.work, found, saves_of(job, saving, found))


def _zone_sets(job: Job, market: RecordedMarket, asked: tuple[str, ...]) -> tuple[tuple[RecordedZone, ...], ...]:
    """Return the sets that are asked for; else the job's regions where the market has them, else each and all.

    How a region's zones were for other machines, years ago, says nothing of a job on AWS now: it has each, as `plan`.
    """
    own = [region for region in market.regions if region in job.resources.regions and job.cloud is not Cloud.AWS]
    regions = own or market.regions
    words = asked or (*regions, *(["all"] if len(regions) > 1 else []))
    return tuple(zone_set(market, word) for word in words)


def _read(parse: Callable[[str], _Value], option: str, text: str | None) -> _Value | None:
    """Return what the option says, None where it is left out; never nothing, which no rehearsal could be of."""
    try:
        value = None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error
    if value is not None and not value:
        raise UsageError(f"{option}: {text} is too little to be rehearsed", hint="leave it out, or name more")
    return value


# Rehearsals as charts: how costs are distributed, or how they fall with a later deadline.


def charts(scenario: Scenario, done: Sequence[Simulation]) -> tuple[Chart, ...]:
    """Return a panel for each market and set of zones: costs against deadlines if there are several, else spread."""
    return tuple(_chart(scenario, one, zones) for one in done for zones in dict.fromkeys(r.zones for r in one.results))


def _chart(scenario: Scenario, done: Simulation, zones: tuple[str, ...]) -> Chart:
    swept = len(done.study.deadlines) > 1
    within = [result for result in done.results if result.zones == zones]
    of_policy = [[result for result in within if result.policy is policy] for policy in done.study.policies]
    return Chart(
        title=f"{done.market.name}: {zones_named(done.market, zones)}",
        x_label="hours until the deadline" if swept else "% of the windows that cost no more",
        y_label="mean USD, shaded up to nine in ten" if swept else "cost in USD",
        series=tuple(_against_deadlines(results) if swept else _spread(results[0]) for results in of_policy),
        limit=("budget", float(scenario.budget_usd)),
    )


def _against_deadlines(results: Sequence[Result]) -> Series:
    dated = [(result.deadline, result.summary) for result in results if result.deadline is not None]
    # Of most that come to no end, or to that of the budget, nobody knows what the job costs.
    ended = [(deadline, one) for deadline, one in dated if not one.is_mostly_unfinished]
    found = [(deadline.total_seconds() / 3600, summary) for deadline, summary in ended]
    return Series(
        label=policy_named(results[0].policy, asked=results[0].asked),
        points=tuple((hours, float(one.mean_usd)) for hours, one in found),
        upper=tuple(float(one.p90_usd or one.mean_usd) for _, one in found),
    )


def _spread(result: Result) -> Series:
    costs = sorted(float(outcome.usd) for outcome in result.outcomes if outcome.ended)
    points = tuple((100 * number / len(result.outcomes), usd) for number, usd in enumerate(costs, start=1))
    return Series(label=policy_named(result.policy, asked=result.asked), points=points)
