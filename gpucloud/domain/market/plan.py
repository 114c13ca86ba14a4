"""The plan: what will be rented, and what it costs at the most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from itertools import combinations, product
from typing import Any

from gpucloud.domain.errors import BudgetTooSmall, GpucloudError, NoCapacity, PlanRefused
from gpucloud.domain.job.quantities import counted, format_span, format_usd, in_cents
from gpucloud.domain.job.spec import Cloud, Job, Market, MarketPolicy, Model, Resources
from gpucloud.domain.market.catalog import Headroom
from gpucloud.domain.market.policies import Reason
from gpucloud.domain.market.sizing import MOST_NODES, Memory, Way, largest_that_fits, memory, ways_to_fit, work_of
from gpucloud.domain.money.budget import (
    NOTHING_USED,
    PrepaidRule,
    Used,
    least_budget_usd,
    prolonged,
    reserve_usd,
)
from gpucloud.domain.node.gate.models import MODELS
from gpucloud.domain.offer import Offer, Pool, rank, worth

_MOST_GPUS = 16  # in one machine, as a job file may ask for

Offered = Callable[[Job], tuple[Offer, ...]]
"""What a job would be offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen offer for `nodes` nodes, and the ceiling: no run can cost more than the budget.

    A job that also trains on fewer, on `least_nodes` at least, is planned and paid for with all of them.

    `offers` are all that would do, the chosen one first. `trains` is for how long the budget trains at today's price,
    `trains_at_cap` at the chosen offer's highest price, `trains_at_dearest` at that of the dearest of all: without
    what is `used`, after a first start, which takes `start`, and without `reserve` at the highest price, which only the
    last save and the machines' end may use: `kept_usd`, on the dearest `kept_at_dearest_usd`. `saving_usd` is paid for
    time after its last step: it is asked to save and leave before its paid time is over.
    """

    job: str
    nodes: int
    least_nodes: int
    workers: int
    offers: tuple[Offer, ...]
    usd_per_hour: Decimal
    cap_usd_per_hour: Decimal
    budget_usd: Decimal
    worst_usd: Decimal
    used: Used
    kept_usd: Decimal
    kept_at_dearest_usd: Decimal
    saving_usd: Decimal
    reserve: timedelta
    start: timedelta
    trains: timedelta
    trains_at_cap: timedelta
    trains_at_dearest: timedelta
    made_at: datetime
    deadline: timedelta | None = None
    """How long after its first start the job ends, done or not; None for no deadline."""
    spot_usd: Decimal | None = None
    """What replays on spot machines come to, where that is no less than on demand; None where it is, or few end."""
    on_demand_usd: Decimal | None = None
    """What the same costs on demand, where spot machines do not pay; None where they do, or nobody knows."""
    on_demand_budget_usd: Decimal | None = None
    """The budget that this takes, where on demand is not what is planned."""
    on_demand_for: Reason | None = None
    """Why the job's policy begins on demand, though there are spot machines; None where it does not."""

    @property
    def offer(self) -> Offer:
        """The chosen one."""
        return self.offers[0]

    @property
    def dearest_usd_per_hour(self) -> Decimal:
        """What its nodes cost an hour on the dearest of all that would do: where no other can be had."""
        return _dearest_usd(self.offers) * self.nodes

    @property
    def others(self) -> tuple[Offer, ...]:
        """The runners-up."""
        return self.offers[1:4]


def make_plan(  # noqa: PLR0913  each is a part of the question
    job: Job,
    offers: tuple[Offer, ...],
    now: datetime,
    prepaid_rule: PrepaidRule,
    *,
    used: Used = NOTHING_USED,
    pool: Pool | None = None,
    saves: bool = True,
    offered: Offered | None = None,
) -> Plan:
    """Return the plan for the job: the cheapest offer that does what it asks and that the budget can start.

    A run that goes on in its `pool` asks for no other machines first, where these still do what it asks. What never
    `saves` is not asked to, and trains until its machines end, or its outputs are to come home. `offered` is what other
    jobs would be offered: what a refusal advises is tried on it first.

    Raises PlanRefused, naming what must change, or BudgetTooSmall where it is what was spent that leaves too little.
    """
    _refuse_what_is_not_offered(job)
    ranked = fitting(job, offers)
    if not ranked:
        others = offered or (lambda _: offers)
        _refuse_what_is_too_large(job, offers, others, prepaid_rule)
        _refuse_what_is_not_here(job, others)
        raise PlanRefused(_nothing_matches(job, offers), hint=_what_may_match(job, others))
    nodes, left = job.resources.nodes, job.budget_usd - used.usd
    payable = affordable(ranked, nodes, left, prepaid_rule)
    own = next((offer for offer in ranked if offer.pool == pool), None)
    if not payable or (own is not None and own not in payable):
        least = own or min(ranked, key=lambda offer: offer.cap_usd_per_hour)
        raise _too_small(job, least, prepaid_rule, used)
    payable = tuple(sorted(payable, key=lambda offer: offer is not own))
    best = payable[0]
    dearest_usd = _dearest_usd(payable)

    paid_for = partial(prolonged, left, nodes=nodes, prepaid_rule=prepaid_rule, saves=saves or bool(job.outputs))

    def trains(usd: Decimal, cap_usd: Decimal) -> timedelta:
        asked_in = paid_for(usd_per_hour=usd, cap_usd_per_hour=cap_usd).asked_in if usd else timedelta(days=365)
        return max(timedelta(0), asked_in - prepaid_rule.start)

    return Plan(
        job=job.name,
        nodes=nodes,
        least_nodes=job.resources.least,
        workers=nodes * job.resources.gpus,
        offers=payable,
        usd_per_hour=best.usd_per_hour * nodes,
        cap_usd_per_hour=best.cap_usd_per_hour * nodes,
        budget_usd=job.budget_usd,
        worst_usd=job.budget_usd if dearest_usd else used.usd,
        used=used,
        kept_usd=reserve_usd(nodes, best.cap_usd_per_hour, prepaid_rule),
        kept_at_dearest_usd=reserve_usd(nodes, dearest_usd, prepaid_rule),
        saving_usd=paid_for(usd_per_hour=best.usd_per_hour, cap_usd_per_hour=best.cap_usd_per_hour).unused_usd,
        reserve=prepaid_rule.reserve,
        start=prepaid_rule.start,
        trains=trains(best.usd_per_hour, best.cap_usd_per_hour),
        trains_at_cap=trains(best.cap_usd_per_hour, best.cap_usd_per_hour),
        trains_at_dearest=trains(dearest_usd, dearest_usd),
        made_at=now,
        deadline=job.deadline,
    )


def _too_small(job: Job, offer: Offer, prepaid_rule: PrepaidRule, used: Used) -> PlanRefused | BudgetTooSmall:
    """Return the error for a budget that would end before anything is trained: what the least is, and what is in it."""
    nodes, cap_usd = job.resources.nodes, offer.cap_usd_per_hour
    least = in_cents(used.usd + least_budget_usd(nodes, cap_usd, prepaid_rule))
    of, told = format_usd(job.budget_usd), ""
    some = nodes > 1 and least_budget_usd(1, cap_usd, prepaid_rule) <= job.budget_usd - used.usd
    start = f"{format_span(prepaid_rule.start)} to start and " if prepaid_rule.start else ""
    if used.usd:
        of, told = f"what is left of {of}", f"{used}, "
    refused = BudgetTooSmall if used.usd else PlanRefused  # what a job has used up is no fault of its file
    return refused(
        f"{of} would end before {nodes} × {offer.pool} could train; the least that works is {least} USD:"
        f" {told}{start}{format_span(prepaid_rule.least)} to train and save at"
        f" {format_usd(cap_usd * nodes)} an hour,"
        f" and {format_usd(reserve_usd(nodes, cap_usd, prepaid_rule))} kept aside for"
        " the last save and the machines' end",
        hint=f"budget: {least} USD" + (", or fewer nodes" if some else ""),
    )


def _dearest_usd(offers: Sequence[Offer]) -> Decimal:
    return max(offer.cap_usd_per_hour for offer in offers)


def fitting(job: Job, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Return the offers that do what the job asks, and that hold its model, best first.

    The best is the cheapest hour, or where the time of the model's tokens is known the cheapest whole training.
    """
    return _by_training(job, _holding(job, rank(offers, job.resources)))


def memory_needed(job: Job) -> Memory | None:
    """Return what the job's model needs of each GPU; None where the file names no model."""
    if job.model is None:
        return None
    return memory(job.model, job.resources.nodes * job.resources.gpus)


def affordable(
    offers: tuple[Offer, ...], nodes: int, left_usd: Decimal, prepaid_rule: PrepaidRule
) -> tuple[Offer, ...]:
    """Return the offers of which the money that is left can start `nodes` machines."""
    return tuple(o for o in offers if least_budget_usd(nodes, o.cap_usd_per_hour, prepaid_rule) <= left_usd)


def quota_too_small(offer: Offer, nodes: int, room: Headroom) -> NoCapacity:
    """Return the error for a quota that does not hold the machines: what is needed, what there is, what to do."""
    return NoCapacity(
        f"{nodes} × {offer.pool} need {offer.vcpus * nodes} vCPUs; the quota {room.name!r} in {room.region} is"
        f" {room.limit}, of which {room.used} are used",
        hint="gpucloud quota request asks AWS for more; `market:`, `types:` or `regions:` may name others",
    )


def spot_first(offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """Return the offers with the spot machines before the others."""
    return tuple(sorted(offers, key=lambda offer: offer.pool.market is not Market.SPOT))


def with_on_demand_first(plan: Plan, safe: Plan) -> Plan:
    """Return the plan that takes machines on demand, and has the spot machines behind them."""
    spot = tuple(offer for offer in plan.offers if offer.pool.market is Market.SPOT)
    return replace(safe, offers=(*safe.offers, *spot), spot_usd=plan.spot_usd, on_demand_usd=plan.on_demand_usd)


def _holding(job: Job, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Return the offers whose GPUs hold the job's model, as far as their memory is known."""
    needed = memory_needed(job)
    return tuple(o for o in offers if needed is None or o.vram_gib is None or needed.fits(o.vram_gib))


def _by_training(job: Job, offers: tuple[Offer, ...]) -> tuple[Offer, ...]:
    """Return the cheapest training first, as `worth` has it; those of unknown time come last."""
    if job.work is not None or job.model is None or job.model.tokens is None:
        return offers
    return tuple(sorted(offers, key=lambda offer: worth(offer, _training_usd(job, offer))))


def _training_usd(job: Job, offer: Offer) -> Decimal:
    work = work_of(job, offer)
    return offer.usd_per_hour * Decimal(work.span / timedelta(hours=1)) if work is not None else Decimal("Infinity")


def _refuse_what_is_not_offered(job: Job) -> None:
    hosts = job.hosts_on(job.cloud)
    if job.cloud.traits.owned and len(hosts) < job.resources.nodes:
        raise PlanRefused(
            f"{counted(job.resources.nodes, 'node')} wanted, and the job file has"
            f" {counted(len(hosts), 'host') if hosts else 'no hosts'}",
            hint=f"{job.cloud.traits.section}: {{hosts: [user@address]}}"
            + (f", or `nodes: {len(hosts)}`" if hosts else ""),
        )
    if job.cloud is Cloud.AWS and job.store is not None and not job.store.startswith("s3://"):
        raise PlanRefused(
            f"store: {job.store} is a folder here, which machines on AWS cannot reach",
            hint="leave `store:` out, or write s3://bucket/prefix",
        )


def _refuse_what_is_not_here(job: Job, offered: Offered) -> None:
    """The embedded fleet has this machine's GPUs, or processes on the CPU, and names nothing that a cloud rents."""
    if job.cloud is not Cloud.LOCAL or _meant(job.resources.gpu):
        return
    wanted = job.resources
    here = _gpus_here(job, offered)
    has = "this machine has no GPUs, and nodes here are processes on the CPU"
    if here is not None:
        memory_gib = f" of {here.vram_gib} GB" if here.vram_gib is not None else ""
        has = f"this machine has {here.gpus} × {here.gpu}{memory_gib}"
    nobody = "no node here has" if wanted.nodes == 1 else f"{wanted.nodes} nodes here cannot have"
    raise PlanRefused(
        f"{nobody} {_request(job)}: {has}",
        hint=_way_out(job, offered, here) or "fewer `gpus`, and no `gpu`, `vram_gib`, `types` and `regions`",
    )


def _gpus_here(job: Job, offered: Offered) -> Offer | None:
    """Return the node that has all GPUs of this machine; None where it has none."""
    for gpus in range(_MOST_GPUS, 0, -1):
        asked = replace(job, resources=Resources(gpus=gpus, market=job.resources.market))
        if (found := next((offer for offer in offered(asked) if offer.gpu), None)) is not None:
            return found
    return None


def _what_may_match(job: Job, offered: Offered) -> str:
    """Return the hint for machines that are nowhere, or not where they are asked for."""
    meant = _meant(job.resources.gpu)
    if meant is not None:
        return meant if job.cloud is Cloud.LOCAL else f"{meant} gpucloud offers lists what there is"
    way = _way_out(job, offered, None)
    return f"more `regions`, or {way}" if way is not None else "more `regions`, or other `resources`; gpucloud offers"


_Change = tuple[str, Mapping[str, Any]]


def _way_out(job: Job, offered: Offered, here: Offer | None) -> str | None:
    """Return the fewest keys that must change for any machines, tried first; `here` are this one's GPUs.

    Of the keys to change each is tried at its utmost, then for the least that will do: a few hundred ways, not all.
    """
    wanted = job.resources
    ways: list[tuple[_Change, ...]] = []  # of one key each, the least change first
    if wanted.regions and job.cloud is Cloud.LOCAL:
        ways.append((("leave out `regions`", {"regions": ()}),))
    unpriced = wanted.market is MarketPolicy.SPOT and job.cloud is Cloud.AWS
    on_demand = "market: on_demand (what they cost on spot is not known)", {"market": MarketPolicy.ON_DEMAND}
    ways += [(on_demand,)] * unpriced
    if wanted.types:
        ways.append((("leave out `types`", {"types": ()}),))
    if here is not None and wanted.gpu and here.gpu not in wanted.gpu:
        ways.append(((f"gpu: [{here.gpu}]", {"gpu": (here.gpu,)}),))
    if wanted.vram_gib is not None:
        ways.append((("leave out `vram_gib`", {"vram_gib": None}),))
    ways.append(tuple((f"gpus: {gpus}", {"gpus": gpus}) for gpus in range(wanted.gpus - 1, 0, -1)))
    if wanted.gpu or wanted.vram_gib is not None:
        fewer = range(wanted.nodes - 1, 0, -1)
        ways.append(tuple((f"nodes: {nodes}", {"nodes": nodes, "least_nodes": 0}) for nodes in fewer))
    if wanted.gpu:
        ways.append((("leave out `gpu`", {"gpu": ()}),))

    def tried(chosen: Sequence[_Change]) -> tuple[Offer, ...]:
        changed = {key: value for _, change in chosen for key, value in change.items()}
        return _tried(replace(job, resources=replace(wanted, **changed)), offered)

    for several in range(1, 6):
        for of in combinations(filter(None, ways), several):
            chosen, keys = [way[-1] for way in of], [key for way in of for key in way[-1][1]]
            if len(set(keys)) < len(keys) or not tried(chosen):
                continue
            for at, way in enumerate(of):
                behind = chosen[at + 1 :]
                chosen[at] = next((one for one in way if tried([*chosen[:at], one, *behind])), way[-1])
            found = tried(chosen)
            workers = (
                job.cloud is Cloud.LOCAL and found and not found[0].gpu and {"gpu", "vram_gib", "gpus"} & set(keys)
            )
            note = "; `gpus` is then the number of workers on each node" if workers else ""
            return ", ".join(words for words, _ in chosen) + note
    return None


def _refuse_what_is_too_large(job: Job, offers: tuple[Offer, ...], offered: Offered, prepaid_rule: PrepaidRule) -> None:
    needed, ranked = memory_needed(job), rank(offers, job.resources)
    if job.model is None or needed is None or not ranked or _holding(job, ranked):
        return
    nodes, gpus = job.resources.nodes, job.resources.gpus
    largest = max(ranked, key=lambda offer: offer.vram_gib or 0)
    over = "1 GPU" if nodes * gpus == 1 else f"{nodes * gpus} GPUs"
    raise PlanRefused(
        f"{job.model} over {over} needs {needed} of each; the most that is offered is {largest.vram_gib} GB"
        f" ({largest.pool.instance_type})",
        hint=_way_to_hold(job, job.model, largest, offered, prepaid_rule) or "a smaller `batch` or `seq`",
    )


def _way_to_hold(job: Job, model: Model, largest: Offer, offered: Offered, prepaid_rule: PrepaidRule) -> str | None:
    """Return the first way to have the model held that is offered, with the budget that it takes; None for none."""
    for changed, words in _ways_to_hold(job, model, largest, offered):
        if needed := memory_needed(changed):
            found = [one for one in _tried(changed, offered) if one.vram_gib is not None and needed.fits(one.vram_gib)]
            if found:
                cap_usd = min(one.cap_usd_per_hour for one in found)
                least_usd = least_budget_usd(changed.resources.nodes, cap_usd, prepaid_rule)
                return words if least_usd <= job.budget_usd else f"{words}, and budget: {in_cents(least_usd)} USD"
    return None


def _ways_to_hold(job: Job, model: Model, largest: Offer, offered: Offered) -> Iterator[tuple[Job, str]]:
    """Yield jobs that differ by the least first, and how: other ways to train, more of the GPUs, others, a part."""
    wanted = job.resources
    here = tuple(range(1, _MOST_GPUS + 1)) if job.cloud is Cloud.LOCAL else ()
    every = () if job.cloud.traits.owned else offered(replace(job, resources=_any_gpu(wanted)))
    others = {o.gpu: o.vram_gib for o in every if o.gpu and o.vram_gib and o.vram_gib > (largest.vram_gib or 0)}
    kinds: list[tuple[str | None, int]] = [(None, largest.vram_gib or 0)]
    kinds += sorted(others.items(), key=lambda kind: (kind[1], kind[0] or ""))
    for gpu, vram_gib in kinds:
        shape = wanted if gpu is None else replace(_any_gpu(wanted), gpu=(gpu,), gpus=wanted.gpus)
        named = [f"gpu: [{gpu}]"] * (gpu is not None) + ["no `types`"] * (gpu is not None and bool(wanted.types))
        counts = here or tuple(one.gpus for one in rank(every, replace(shape, gpus=1)) if one.vram_gib == vram_gib)
        for way in ways_to_fit(model, nodes=wanted.nodes, gpus=wanted.gpus, vram_gib=vram_gib, counts=counts):
            yield _changed(job, shape, way), ", ".join(filter(None, [*named, way.words]))
    for nodes, gpus in product((MOST_NODES, len(job.hosts_on(job.cloud)), wanted.nodes), (16, 8, 4, 2, wanted.gpus)):
        if nodes >= wanted.nodes and gpus >= wanted.gpus and (gpus == wanted.gpus or every):
            grown = replace(wanted, nodes=nodes, gpus=gpus, least_nodes=0)
            there = rank(_tried(replace(job, resources=grown), offered), grown)
            vram_gib = max((one.vram_gib or 0 for one in there), default=0)
            part = largest_that_fits(model, nodes=nodes, gpus=gpus, vram_gib=vram_gib) if vram_gib else None
            if part is not None:
                said = [f"nodes: {nodes}"] * (nodes != wanted.nodes) + [f"gpus: {gpus}"] * (gpus != wanted.gpus)
                yield _changed(job, wanted, part), ", ".join([*said, part.words])


def _any_gpu(wanted: Resources) -> Resources:
    return replace(wanted, nodes=1, least_nodes=0, gpus=1, gpu=(), types=(), vram_gib=None)


def _changed(job: Job, shape: Resources, way: Way) -> Job:
    least = shape.least_nodes if way.nodes == shape.nodes else 0
    return replace(job, model=way.model, resources=replace(shape, nodes=way.nodes, gpus=way.gpus, least_nodes=least))


def _tried(job: Job, offered: Offered) -> tuple[Offer, ...]:
    """Return what such a job would be offered; nothing where it would be refused as it stands."""
    try:
        _refuse_what_is_not_offered(job)
        # One question for all that is tried on AWS, whose machines have what they have.
        asked = replace(job, resources=_any_gpu(job.resources)) if job.cloud is Cloud.AWS else job
        return rank(offered(asked), job.resources)
    except GpucloudError:
        return ()


def _nothing_matches(job: Job, offers: tuple[Offer, ...]) -> str:
    if not offers:
        return f"no machine has {_request(job)}"
    slots = ", ".join(map(str, sorted({offer.gpus for offer in offers})))
    zones = ", ".join(sorted({offer.pool.zone for offer in offers}))
    return f"no offer has {_request(job)}; there are {slots} in {zones}"


def _meant(gpus: Sequence[str]) -> str | None:
    """Return the GPU that is nearest to one that nobody has."""
    for gpu in gpus:
        near = get_close_matches(gpu.upper(), MODELS, n=1, cutoff=0.5) if gpu not in MODELS else []
        if near:
            return f"did you mean {near[0]}?"
    return None


def _request(job: Job) -> str:
    wanted = job.resources
    workers = "1 worker" if wanted.gpus == 1 else f"{wanted.gpus} workers"
    parts = [f"{workers} a node, market {wanted.market.value}"]
    parts += [f"GPU {' or '.join(wanted.gpu)}"] if wanted.gpu else []
    parts += [f"{wanted.vram_gib} GiB a GPU"] if wanted.vram_gib is not None else []
    parts += [f"type {' or '.join(wanted.types)}"] if wanted.types else []
    parts += [f"regions {', '.join(wanted.regions)}"] if wanted.regions else []
    return ", ".join(parts)
