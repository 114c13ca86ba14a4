"""Replays jobs on recorded markets: greedy, uniform, ours, and the least that they could have cost.

`python -m tests.bench policies`. A line a case: mean costs as a share of the work on demand, before the first-hour
refund ("gross", as published replays count) and after it ("net", as AWS bills), ours with tables made for either; what
ours would have cost (gross) had it known how the zone comes and goes on the whole; and the bound, which knows when:
plain, with machines that boot beside others, and billed, with refunds on top. Then `FIGURE` lines. Ours learns from
other zones than those that it is tested on, or from earlier times. Elastic gangs, which ours runs, can be cheaper than
the bound, which takes all nodes or none. Gangs are read from a clone of skypilot-org/spot-traces in the folder that
GPUCLOUD_SPOT_TRACES names, and left out without it: that data has no licence, so that it does not come along.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.learned import Counts, Tables, count, watch
from gpucloud.domain.market.outcome import Lifetime
from gpucloud.domain.market.policies import Task
from gpucloud.domain.market.policy import decide
from gpucloud.domain.market.recordings import (
    LOOK_S,
    RecordedMarket,
    RecordedZone,
    Timeline,
    ZoneView,
    timeline,
    value_at,
    zone_set,
)
from gpucloud.domain.market.scenario import Recovery
from gpucloud.domain.market.simulation import replay
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.node.node import EndCause
from tests.bench.bound import Rules, least_costs
from tests.bench.figures import figure

HOUR = 3600.0
HANDOVER_S = 180.0
FREE_S = Terms().free_when_interrupted_within.total_seconds()
POLICIES = (Policy.GREEDY, Policy.UNIFORM, Policy.LEARNED)
ASSUMED_SPOT = Decimal("0.318")
PARTS = ("knowing", "plain", "beside", "billed")
SEED = 7
THIRD = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Hours of work, hours to the deadline, and minutes from a launch to the first step."""

    work_h: float = 48
    span_h: float = 60
    restart_min: float = 12

    @property
    def name(self) -> str:
        return f"{self.work_h:g}_{self.span_h:g}_{self.restart_min:g}min"

    def task(self, nodes: int, on_demand_usd_per_hour: float, least_nodes: int = 0) -> Task:
        return Task(
            work_s=self.work_h * HOUR,
            span_s=self.span_h * HOUR,
            changeover_s=self.restart_min * 60,
            handover_s=HANDOVER_S,
            tick_s=LOOK_S,
            on_demand_usd_per_hour=on_demand_usd_per_hour,
            nodes=nodes,
            least_nodes=least_nodes,
        )


PLAIN = Setting()
TIGHT = Setting(span_h=52)
QUICK = Setting(restart_min=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A part of a market for a job of so many nodes. None begins in `past`, a share of it from which ours learns."""

    name: str
    market: RecordedMarket
    zones: tuple[RecordedZone, ...]
    nodes: int = 1
    past: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A case's mean costs as shares of the work on demand: by policy, ours if it knew the zone, and three bounds."""

    case: str
    gross: dict[Policy, float]
    net: dict[Policy, float]
    knowing: float = 0.0
    plain: float = 0.0
    beside: float = 0.0
    billed: float = 0.0
    missed: int = 0
    breached: int = 0


@dataclass(slots=True)
class Tally:
    """What one policy came to, window by window."""

    gross: list[float] = field(default_factory=list)
    net: list[float] = field(default_factory=list)
    missed: int = 0
    breached: int = 0


def main() -> int:
    kept = [quick_to_make(), single(PLAIN, 0.97), single(TIGHT, 0.95), single(QUICK, 0.985)]
    kept += [harder(PLAIN, 0.530), harder(QUICK, 0.456), capped(PLAIN)]
    return 0 if all(kept) else 1


def quick_to_make() -> bool:
    """The tables of a job of 48 h in 60 h: what they take of one core."""
    began = time.process_time()
    TableMaker().tables(PLAIN.task(1, 1.0), 1, 1, 0.3)
    return figure("policies_tables_cpu_s", time.process_time() - began, 5)


def single(setting: Setting, limit: float) -> bool:
    """25 zones, each by itself: what ours costs of what uniform does."""
    name = f"policies_single_{setting.name}"
    found = singles(setting)
    kept = told(name, found)
    for books in ("gross", "net"):
        kept &= figure(f"{name}_{books}_over_uniform", over_uniform(found, books), limit)
    return kept


def harder(setting: Setting, limit: float) -> bool:
    """Nodes of 8 GPUs, gangs, and several zones: what ours costs of the work on demand."""
    name = f"policies_harder_{setting.name}"
    found = shown(name, (measured(case, setting, windows=40) for case in harder_cases()))
    kept = told(name, found)
    for books in ("gross", "net"):
        kept &= figure(f"{name}_{books}_mean", mean(found, books, Policy.LEARNED), limit)
    return kept & figure(f"{name}_worst_over_uniform", worst_over_uniform(found), 1.005)


def capped(setting: Setting) -> bool:
    """A budget of 1.05 times the work on demand: kept in every window, and what that costs."""
    held = [measured(case, setting, windows=30, cap=1.05) for case in single_zones()]
    kept = figure("policies_capped_breaches", sum(one.breached for one in held), 0)
    kept &= figure("policies_capped_missed", sum(one.missed for one in held), 0)
    dearer = mean(held, "net", Policy.LEARNED) / mean(singles(setting), "net", Policy.LEARNED)
    return kept & figure("policies_capped_over_uncapped", dearer, 1.015)


@functools.cache
def singles(setting: Setting) -> tuple[Found, ...]:
    return shown(f"policies_single_{setting.name}", (measured(case, setting, windows=30) for case in single_zones()))


def shown(name: str, found: Iterable[Found]) -> tuple[Found, ...]:
    """Print a line a case as it is measured, and their means."""
    columns = f"{'greedy':>14}{'uniform':>14}{'ours':>14}{'knowing':>9}  plain, beside, billed bound"
    print(f"\n{name}: gross, and net of refunds\n{'':28}{columns}")
    kept = []
    for one in found:
        print(line(one), flush=True)
        kept.append(one)
    whole = Found(
        case="mean",
        gross={policy: mean(kept, "gross", policy) for policy in POLICIES},
        net={policy: mean(kept, "net", policy) for policy in POLICIES},
        **{part: share(kept, part) for part in PARTS},
    )
    print(line(whole), flush=True)
    return tuple(kept)


def line(one: Found) -> str:
    costs = "".join(f"{one.gross[policy]:8.3f}{one.net[policy]:6.3f}" for policy in POLICIES)
    return f"{one.case:28}{costs}{one.knowing:9.3f}{one.plain:8.3f}{one.beside:7.3f}{one.billed:7.3f}"


def told(name: str, found: Sequence[Found]) -> bool:
    """Tell what the way from ours to the bound is made of, and what must not happen."""
    ours = mean(found, "gross", Policy.LEARNED)
    figure(f"{name}_lost_by_rates_unknown", ours - share(found, "knowing"))
    figure(f"{name}_lost_by_future_unknown", share(found, "knowing") - share(found, "beside"))
    figure(f"{name}_bound_won_by_boots_beside", share(found, "plain") - share(found, "beside"))
    figure(f"{name}_bound_won_by_refunds", share(found, "beside") - share(found, "billed"))
    figure(f"{name}_won_by_refunds", ours - mean(found, "net", Policy.LEARNED))
    return figure(f"{name}_missed", sum(one.missed for one in found), 0)


def share(found: Sequence[Found], part: str) -> float:
    return sum(getattr(one, part) for one in found) / len(found)


def mean(found: Sequence[Found], books: str, policy: Policy) -> float:
    return sum(getattr(one, books)[policy] for one in found) / len(found)


def over_uniform(found: Sequence[Found], books: str) -> float:
    return mean(found, books, Policy.LEARNED) / mean(found, books, Policy.UNIFORM)


def worst_over_uniform(found: Sequence[Found]) -> float:
    return max(one.gross[Policy.LEARNED] / one.gross[Policy.UNIFORM] for one in found)


def measured(case: Case, setting: Setting, *, windows: int, cap: float | None = None) -> Found:
    """Run the job in windows at random (the same for every setting of that length), under every policy.

    Under a cap nothing is asked but what it costs.
    """
    observation = timeline(case.market, case.zones, case.nodes)
    draw = random.Random(SEED)
    last = observation.looks - int(setting.span_h * HOUR / LOOK_S)
    starts = [draw.randrange(int(case.past * observation.looks), last) for _ in range(windows)]
    tallies = {policy: tally(policy, case, setting, observation, starts, cap) for policy in POLICIES}
    found = Found(
        case=case.name,
        gross={policy: float(np.mean(one.gross)) for policy, one in tallies.items()},
        net={policy: float(np.mean(one.net)) for policy, one in tallies.items()},
        missed=sum(one.missed for one in tallies.values()),
        breached=sum(one.breached for one in tallies.values()),
    )
    if cap is not None:
        return found
    knowing = tally(Policy.LEARNED, replace(case, past=1.0), setting, observation, starts, None)
    beside = round((setting.restart_min * 60 - HANDOVER_S) / LOOK_S)
    return replace(
        found,
        knowing=float(np.mean(knowing.gross)),
        plain=bound(observation, setting, starts, 0, 0),
        beside=bound(observation, setting, starts, beside, 0),
        billed=bound(observation, setting, starts, beside, int(FREE_S / LOOK_S)),
    )


def tally(
    policy: Policy, case: Case, setting: Setting, observation: Timeline, starts: Sequence[int], cap: float | None
) -> Tally:
    on_demand = float(case.market.on_demand_usd_per_hour)
    # Greedy and uniform as published: all of a gang or none.
    task = setting.task(case.nodes, on_demand, least_nodes=1 if policy is Policy.LEARNED else 0)
    whole_usd = case.nodes * on_demand * setting.work_h
    recovery = Recovery(restart_s=task.changeover_s, handover_s=HANDOVER_S, notice_s=0.0)
    found = Tally()
    for start in starts:
        for free_s in (0.0, FREE_S) if policy is Policy.LEARNED else (None,):
            known = None if free_s is None else tables(case, setting, price_at(observation, start), free_s)
            choose = functools.partial(decide, policy, tables=known)
            run = replay(choose, task, observation, start, recovery, None if cap is None else cap * whole_usd)
            gross_usd = run.usd + sum(refund_usd(lifetime, observation) for lifetime in run.lifetimes)
            if free_s != FREE_S:
                found.gross.append(gross_usd / whole_usd)
            if free_s != 0.0:
                found.net.append(run.usd / whole_usd)
            found.missed += run.finished_s is None or run.finished_s > task.span_s + 1e-6
            found.breached += cap is not None and run.usd > cap * whole_usd + 1e-6
    return found


def price_at(observation: Timeline, start: int) -> float:
    """The mean spot price over the zones at submit as a share of on demand, in steps of 0.05: fewer tables to make."""
    views = views_at(observation, start)
    share = sum(view.usd_per_hour for view in views) / len(views) / float(observation.market.on_demand_usd_per_hour)
    return round(share / 0.05) * 0.05


@functools.cache
def tables(case: Case, setting: Setting, share: float, free_s: float) -> Tables:
    """The tables of a job in the case's zones, learned from others, and from the past if the case has one."""
    past = counts(timeline(case.market, case.zones, case.nodes), case.past) if case.past else None
    names = tuple(zone.name for zone in case.zones)
    maker = TableMaker(without=names, past=past, free_within=timedelta(seconds=free_s))
    return maker.tables(setting.task(1, 1.0), len(names), case.market.gpus, share)


def counts(observation: Timeline, share: float) -> Counts:
    """What the first part of a market shows."""
    up, price = looked(observation)
    end = int(share * observation.looks)
    return count(watch(up[:end].tolist(), price[:end].tolist(), LOOK_S / HOUR), LOOK_S / HOUR)


def refund_usd(lifetime: Lifetime, observation: Timeline) -> float:
    """What was not charged for machines that were taken in their first hour."""
    if lifetime.cause is not EndCause.INTERRUPTED or lifetime.ended_s - lifetime.launched_s >= FREE_S:
        return 0.0
    looks = range(int(lifetime.launched_s // LOOK_S), int(lifetime.ended_s // LOOK_S))
    return (
        lifetime.nodes * sum(views_at(observation, look)[lifetime.zone].usd_per_hour for look in looks) * LOOK_S / HOUR
    )


def views_at(observation: Timeline, look: int) -> tuple[ZoneView, ...]:
    return value_at(tuple(zip(observation.changes, observation.views, strict=True)), look)


def bound(observation: Timeline, setting: Setting, starts: Sequence[int], beside: int, free: int) -> float:
    """The least mean cost, by a job that knows the market; looks to boot beside others, and to be taken uncharged."""
    rules = Rules(
        work=round(setting.work_h * HOUR / LOOK_S),
        slack=round((setting.span_h - setting.work_h) * HOUR / LOOK_S),
        changeover=round(setting.restart_min * 60 / LOOK_S),
        beside=beside,
        free=free,
    )
    up, price = looked(observation)
    found: list[float] = []
    step = max(40 // up.shape[1], 1)
    for some in (starts[i : i + step] for i in range(0, len(starts), step)):
        windows = np.array(some)[:, None] + np.arange(rules.work + rules.slack)
        found.extend(least_costs(up[windows], price[windows], rules) / rules.work)
    return float(np.mean(found))


def looked(observation: Timeline) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Whether each zone was up, and its price as a share of on demand, by look and zone."""
    lengths = np.diff([*observation.changes, observation.looks])
    up = np.array([[view.up for view in views] for views in observation.views])
    price = np.array([[view.usd_per_hour for view in views] for views in observation.views])
    return np.repeat(up, lengths, axis=0), np.repeat(price, lengths, axis=0) / float(
        observation.market.on_demand_usd_per_hour
    )


def single_zones() -> Iterator[Case]:
    """The reference's 25: p3.2xlarge in 9 zones in 2023, and 4 types in 2 zones in October and in December 2022."""
    markets = PackagedMarkets()
    types = ("p2.xlarge", "p2.8xlarge", "p3.2xlarge", "p3.16xlarge")
    for name in ("p3.2xlarge-2023-02", *(f"{kind}-2022-{month}" for month in (10, 12) for kind in types)):
        market = markets.market(name)
        for zone in market.zones:
            yield Case(name=f"{name} {zone.name}", market=market, zones=(zone,))


def harder_cases() -> Iterator[Case]:
    """Those of the reference that it names, and the ones of their kind that make 17; the first third is their past."""
    big, small = PackagedMarkets().market("p3.16xlarge-2022-10"), PackagedMarkets().market("p3.2xlarge-2023-02")
    for zones in ("us-west-2a", "us-west-2b", "all"):
        yield Case(name=f"8 GPUs, {zones}", market=big, zones=zone_set(big, zones), past=THIRD)
    yield from gangs()
    for zones in ("us-east-1f", "us-east-1", "us-east-2", "us-west-2", "us-east-1,us-east-2", "all"):
        yield Case(name=zones, market=small, zones=zone_set(small, zones), past=THIRD)


def gangs() -> Iterator[Case]:
    folder = os.environ.get("GPUCLOUD_SPOT_TRACES")
    if not folder:
        print("GPUCLOUD_SPOT_TRACES names no folder: the 8 cases of gangs are left out", file=sys.stderr)
        return
    for nodes, path in ((4, "preemption/4-node/aws-08-03-2023"), (16, "availability/16-node/aws-08-27-2023")):
        market = gang(Path(folder) / path, nodes)
        for zone in market.zones:
            yield Case(name=f"{nodes} nodes, {zone.name}", market=market, zones=(zone,), nodes=nodes, past=THIRD)
        yield Case(name=f"{nodes} nodes, any", market=market, zones=market.zones, nodes=nodes, past=THIRD)


def gang(folder: Path, nodes: int) -> RecordedMarket:
    """A recorded group of p3.2xlarge; as long as the shortest of its zones."""
    raw = {file.stem.split("_")[0]: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    ticks = min(len(one["data"]) for one in raw.values())
    usd = Decimal("3.06")
    zones = tuple(
        RecordedZone(name=zone, nodes=changes(one["data"][:ticks]), prices=((0, usd * ASSUMED_SPOT),))
        for zone, one in raw.items()
    )
    return RecordedMarket(
        name=f"{nodes} nodes",
        about="",
        source="github.com/skypilot-org/spot-traces",
        instance_type="p3.2xlarge",
        gpus=1,
        gpu="V100",
        nodes=nodes,
        started_at=None,
        tick=timedelta(seconds=next(iter(raw.values()))["metadata"]["gap_seconds"]),
        ticks=ticks,
        on_demand_usd_per_hour=usd,
        prices_recorded=False,
        zones=zones,
    )


def changes(counted: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(tick, nodes) wherever their number changes."""
    return tuple((tick, now) for tick, now in enumerate(counted) if tick == 0 or now != counted[tick - 1])


if __name__ == "__main__":
    sys.exit(main())
