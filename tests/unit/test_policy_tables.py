"""The learned policy: what is counted on recordings, the program over it, and the look-up."""

import functools
import random
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import Prices, TableMaker, hazards, recorded, solve
from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.learned import (
    BUCKETS,
    EDGES_H,
    Act,
    Grid,
    Hazards,
    bucket,
    count,
    grid_of,
    learned_from,
    pooled,
    remaining_h,
    watch,
)
from gpucloud.domain.market.policies import NOTHING, Holding, Mode, Observation, Task, ZoneState
from gpucloud.domain.market.policy import decide
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone, timeline, zone_set
from gpucloud.domain.market.scenario import Recovery
from gpucloud.domain.market.simulation import replay
from tests.bench.bench_policies import looked
from tests.bench.bound import Rules, least_costs
from tests.prior import counted, row

HOUR = 3600.0
HOUR_S = 3600
MARKET = PackagedMarkets().market("p3.2xlarge-2023-02")
TASK = Task(
    work_s=48 * HOUR,
    span_s=60 * HOUR,
    changeover_s=720.0,
    handover_s=180.0,
    on_demand_usd_per_hour=3.0,
    tick_s=180.0,
)
FLAT = Hazards(up_per_h=(0.5,) * BUCKETS, down_per_h=(0.4,) * BUCKETS, replaced=0.25, entered=(1 / BUCKETS,) * BUCKETS)


def test_a_recording_is_counted_by_the_age_of_its_states():
    up = [[True], [True], [False], [False], [False], [True], [True]]
    counts = count(watch(up, [[1.0]] * 7, 0.05), 0.05)
    assert counts.up_h[0] == pytest.approx(0.15)
    assert counts.down_h[:2] == (pytest.approx(0.1), pytest.approx(0.05))
    assert (counts.up_ends[0], counts.down_ends[1], counts.lost, counts.replaced) == (1, 1, 1, 0)


def test_of_several_zones_the_one_that_a_job_is_on_is_counted():
    up = [[True, True], [True, True], [False, True], [False, False], [True, False]]
    watched = list(watch(up, [[1.0, 2.0]] * 5, 0.5))
    assert [one.zone for one in watched] == [0, 0, 1, None, 0]
    assert [one.age_h for one in watched] == [0.0, 0.5, 1.0, 0.0, 0.0]
    counts = count(watched, 0.5)
    assert (counts.lost, counts.replaced, counts.entered[bucket(1.0)]) == (2, 1, 1)


def test_a_bucket_with_few_hours_takes_after_the_others():
    counts = count(watch([[True]] * 40 + [[False]], [[1.0]] * 41, 0.05), 0.05)
    rates = learned_from(counts).up_per_h
    assert rates[0] == pytest.approx(2 / (0.1 + 2 / 0.5))  # no end in its 0.1 h; one in 2 h over all ages
    assert rates[8] == pytest.approx(0.5)


def test_the_time_that_is_left_to_live():
    assert remaining_h(FLAT) == pytest.approx((2.0,) * BUCKETS)


def test_the_prior_is_what_the_recordings_show():
    market = PackagedMarkets().market("p3.2xlarge-2022-11")
    rows = [one for one in recorded() if one.market == market.name]
    assert [one.zones for one in rows] == [("us-west-2a",), ("us-west-2b",), ("us-west-2a", "us-west-2b")]
    zones = zone_set(market, "all")
    again = row(market, zones)["counts"]
    assert again["up_ends"] == list(rows[2].counts.up_ends)
    assert pooled([counted(market, zones[:1])]).lost == rows[0].counts.lost


def test_nothing_is_learned_from_what_is_left_out():
    assert hazards(1, 1, without=["us-west-2a", "us-west-2b"]) != hazards(1, 1)
    assert hazards(1, 1, without=["us-west-2a"]).up_per_h[0] != hazards(1, 1).up_per_h[0]


def test_big_machines_are_taken_to_stay_for_a_shorter_time():
    assert [round(remaining_h(hazards(1, gpus))[0], 1) for gpus in (1, 8)] == [2.2, 1.0]
    assert [round(remaining_h(hazards(2, gpus))[0], 1) for gpus in (1, 8)] == [1.8, 0.9]


@pytest.mark.parametrize(
    ("work_h", "span_h", "changeover_min", "handover_min", "expected"),
    [
        (48, 60, 12, 3, Grid(tick_s=180, work=960, slack=240, changeover=4, beside=3)),
        (48, 60, 12, None, Grid(tick_s=180, work=960, slack=240, changeover=4, beside=0)),
        (48, 60, 3, 3, Grid(tick_s=180, work=960, slack=240, changeover=1, beside=0)),
        (48, 52, 12, 3, Grid(tick_s=180, work=960, slack=80, changeover=4, beside=3)),  # 5 parts would round 3 min up
        (1, 4, 3, 1, Grid(tick_s=60, work=60, slack=180, changeover=3, beside=2)),
        (48, 60, 180, 90, Grid(tick_s=675, work=256, slack=64, changeover=16, beside=8)),
        (480, 600, 12, 3, Grid(tick_s=1800, work=960, slack=240, changeover=1, beside=0, lost=0.4)),
        (48, 480, 12, 3, Grid(tick_s=1440, work=120, slack=480, changeover=1, beside=0, lost=0.5)),
    ],
)
def test_the_program_counts_in_parts_of_a_changeover(work_h, span_h, changeover_min, handover_min, expected):
    task = Task(
        work_s=work_h * HOUR,
        span_s=span_h * HOUR,
        changeover_s=changeover_min * 60.0,
        handover_s=None if handover_min is None else handover_min * 60.0,
        on_demand_usd_per_hour=1.0,
    )
    assert grid_of(task) == expected


@settings(max_examples=300)
@given(
    work_s=st.integers(60, 60 * 24 * HOUR_S),
    changeover_min=st.integers(1, 45),
    over_s=st.sampled_from([0, 1, 59, 300]),
)
@example(work_s=23 * HOUR_S + 37 * 60, changeover_min=22, over_s=0)
@example(work_s=48 * HOUR_S, changeover_min=12, over_s=0)
@example(work_s=480 * HOUR_S, changeover_min=3, over_s=0)
def test_the_least_deadline_leaves_time_for_a_try_at_spot(work_s, changeover_min, over_s):
    changeover_s = 60.0 * changeover_min
    task = replace(TASK, work_s=work_s, span_s=work_s + 2 * changeover_s + over_s, changeover_s=changeover_s)
    grid = grid_of(task)
    spare_s = task.span_s - task.work_s
    assert grid.hides_a_try(task, spare_s) or grid.slack >= 2 * grid.changeover
    assert grid.slack * grid.tick_s <= spare_s + 1e-3


@pytest.mark.parametrize(
    ("work_s", "changeover_s"), [(23 * HOUR_S + 37 * 60, 720), (17 * HOUR_S + 1111, 1320), (480 * HOUR_S, 180)]
)
def test_at_the_least_deadline_the_program_is_no_dearer_than_uniform(work_s, changeover_s):
    observation = timeline(MARKET, zone_set(MARKET, "us-west-2"), 1)
    lasts = {"changeover_s": float(changeover_s), "tick_s": 180.0}
    task = replace(TASK, work_s=float(work_s), span_s=float(work_s + 2 * changeover_s), **lasts)
    tables = TableMaker().tables(task, 3, 1, 0.9)
    recovery = Recovery(restart_s=changeover_s - 120.0, handover_s=60.0)
    usd = {}
    for policy in (Policy.UNIFORM, Policy.LEARNED):
        decided = functools.partial(decide, policy, tables=tables)
        runs = [replay(decided, task, observation, start, recovery) for start in range(0, 10_000, 1_000)]
        assert all(run.finished_s is not None and run.finished_s <= task.span_s for run in runs)
        usd[policy] = sum(run.usd for run in runs)
    assert usd[Policy.LEARNED] <= 1.02 * usd[Policy.UNIFORM]


def test_the_program_finds_what_a_plain_recursion_finds():
    grid = Grid(tick_s=1200.0, work=6, slack=7, changeover=2, beside=1)
    tables = solve(grid, FLAT, Prices(spot=0.4, free_within_s=3600.0))
    plain = Recursion(grid, FLAT, price=0.4, free=3)
    for left in range(1, grid.span + 1):
        for slack in range(max(left - grid.work, 0), min(left, grid.slack + 1)):
            for market in range(2 * BUCKETS):
                for stage in range(grid.stages - (0 if market < BUCKETS else grid.beside)):
                    act = tables.act(left, market, slack, stage)
                    costs = plain.costs(left, market, slack, stage)
                    assert costs[act] == pytest.approx(min(costs.values()), rel=1e-5), (left, market, slack, stage)


class Recursion:
    """The program as one would write it down, state by state: slow, and plain enough to be believed."""

    def __init__(self, grid, rates, price, free):
        self.grid, self.rates, self.price, self.free = grid, rates, price, free
        self.value = functools.cache(self.value)

    def costs(self, left, market, slack, stage):
        """What each act costs from here on, for what is decided: idle, on demand by its boot, spot beside it by age."""
        d, up = self.grid.changeover, market < BUCKETS
        if left <= slack:
            return dict.fromkeys(Act, 0.0)
        costs = {
            Act.IDLE: self.then("idle", left, market, slack - 1),
            Act.ON_DEMAND: self.boots(d, left, market, slack),
        }
        if up:
            costs[Act.SPOT] = self.spot(0, left, market, slack)
        if stage:
            boot = max(stage - 1, 0) if stage <= d + 1 else 0
            costs[Act.ON_DEMAND] = self.boots(boot, left, market, slack)
        if up and stage == 1 and self.grid.beside:
            costs[Act.BOTH] = 1 + self.price + self.then(("both", 1), left, market, slack)
        if stage > d + 1:
            age = stage - d - 1
            del costs[Act.IDLE]
            costs[Act.SPOT] = self.spot(age, left, market, slack)
            if age < self.grid.beside:
                costs[Act.BOTH] = 1 + self.price + self.then(("both", age + 1), left, market, slack)
        return costs

    def boots(self, boot, left, market, slack):
        return 1 + self.then(("on demand", max(boot - 1, 0)), left, market, slack - (boot > 0))

    def spot(self, age, left, market, slack):
        boots = age < self.grid.changeover
        return self.price + self.then(("spot", min(age + 1, 3)), left, market, slack - boots)

    def value(self, held, left, market, slack):
        """The least cost of what is held, before the next act."""
        if slack < 0:
            return 1e12
        if held == "idle":
            return min(self.costs(left, market, slack, 0).values())
        kind, n = held
        if kind == "on demand":
            return min(self.costs(left, market, slack, 1 + n).values())
        if kind == "spot":
            return 0.0 if left <= slack else self.spot(n, left, market, slack)
        return min(self.costs(left, market, slack, 1 + self.grid.changeover + n).values())

    def then(self, held, left, market, slack):
        """What is to be expected after the market's next move."""
        if slack < 0:
            return 1e12
        total = 0.0
        for chance, after, lost in self.moves(market):
            refund = 0.0
            now = held
            if lost and held != "idle" and held[0] in ("spot", "both"):
                refund = held[1] * self.price if held[1] < self.free else 0.0
                now = "idle" if held[0] == "spot" else ("on demand", 0)
            total += chance * (self.value(now, left - 1, after, slack) - refund)
        return total

    def moves(self, market):
        n, tick_h = BUCKETS, self.grid.tick_s / HOUR
        is_up, at = market < n, market % n
        rate = (self.rates.up_per_h if is_up else self.rates.down_per_h)[at]
        ends = 1 - 2.718281828459045 ** (-rate * tick_h)
        older = min(tick_h / (EDGES_H[at + 1] - EDGES_H[at]), 1) if at + 1 < n else 0.0
        base = market - at
        moves = [((1 - ends) * (1 - older), market, False)]
        if older:
            moves.append(((1 - ends) * older, base + at + 1, False))
        if not is_up:
            return [*moves, (ends, 0, False)]
        moves += [(ends * self.rates.replaced * share, i, True) for i, share in enumerate(self.rates.entered)]
        return [*moves, (ends * (1 - self.rates.replaced), n, True)]


TABLES = TableMaker().tables(TASK, 1, 1, 0.95)
UP = ZoneState(zone="a", up=True, age_s=2 * HOUR, usd_per_hour=1.0)
DOWN = ZoneState(zone="a", up=False, age_s=2 * HOUR, usd_per_hour=1.0)
ON_DEMAND = Holding(mode=Mode.ON_DEMAND)


@pytest.mark.parametrize(
    ("holding", "zone", "left_h", "slack_h", "mode"),
    [
        (NOTHING, UP, 40, 10, Mode.SPOT),
        (NOTHING, DOWN, 40, 10, Mode.IDLE),
        (NOTHING, DOWN, 40, 5, Mode.ON_DEMAND),
        (NOTHING, UP, 40, 0.25, Mode.ON_DEMAND),
        (ON_DEMAND, UP, 40, 5, Mode.BOTH),  # the spot machines boot beside
        (ON_DEMAND, UP, 40, 11, Mode.SPOT),  # there is time for a changeover, which costs less
        (ON_DEMAND, DOWN, 40, 1, Mode.ON_DEMAND),
        (Holding(mode=Mode.BOTH, zone="a", beside_s=540.0), UP, 40, 5, Mode.BOTH),
        (Holding(mode=Mode.BOTH, zone="a", beside_s=0.0), UP, 40, 5, Mode.SPOT),
        (Holding(mode=Mode.SPOT, zone="a"), UP, 40, 0.2, Mode.SPOT),
        (NOTHING, UP, 0.1, 10, Mode.SPOT),
        (NOTHING, DOWN, 100, 100, Mode.IDLE),  # more work than the tables were made for
        (NOTHING, DOWN, 40, -1, Mode.ON_DEMAND),
    ],
)
def test_the_tables_are_looked_up(holding, zone, left_h, slack_h, mode):
    observation = Observation(
        work_left_s=left_h * HOUR, time_left_s=(left_h + slack_h) * HOUR, holding=holding, zones=(zone,)
    )
    assert decide(Policy.LEARNED, TASK, observation, TABLES).mode is mode


def test_spot_machines_that_boot_beside_are_not_given_up_for_how_work_and_time_are_rounded():
    booting = Holding(mode=Mode.BOTH, zone="a", beside_s=540.0)
    for worked_s in range(0, 180, 20):
        left_s = 40 * HOUR - worked_s
        observation = Observation(work_left_s=left_s, time_left_s=left_s + 3600, holding=booting, zones=(UP,))
        assert decide(Policy.LEARNED, TASK, observation, TABLES).mode is Mode.BOTH


def test_of_zones_that_cost_the_same_the_one_that_lasts_longer_is_taken():
    old = ZoneState(zone="old", up=True, age_s=20 * HOUR, usd_per_hour=1.0)
    young = ZoneState(zone="young", up=True, age_s=0.0, usd_per_hour=0.98)
    observation = Observation(work_left_s=40 * HOUR, time_left_s=50 * HOUR, holding=NOTHING, zones=(young, old))
    assert decide(Policy.LEARNED, TASK, observation, TABLES).zone == "old"


SHORT = Task(
    work_s=6 * HOUR, span_s=7 * HOUR, changeover_s=720.0, handover_s=180.0, on_demand_usd_per_hour=3.0, tick_s=180.0
)
SHORT_TABLES = TableMaker().tables(SHORT, 2, 1, 1.0)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("cap", [None, 1.05])
@pytest.mark.parametrize(("nodes", "least"), [(1, 0), (4, 0), (4, 1)])
def test_no_market_makes_a_job_late_or_dearer_than_its_budget(policy, cap, nodes, least):
    task = replace(SHORT, nodes=nodes, least_nodes=least)
    choose = functools.partial(decide, policy, tables=SHORT_TABLES)
    recovery = Recovery(restart_s=720.0, handover_s=180.0, notice_s=0.0)
    budget = None if cap is None else nodes * (cap * 18.0 + 0.2)
    for seed in range(30):
        market = random_market(random.Random(seed), nodes)
        run = replay(choose, task, timeline(market, market.zones, nodes), 0, recovery, budget)
        assert run.finished_s is not None
        assert run.finished_s <= task.span_s + 1e-6
        assert budget is None or run.usd <= budget + 1e-9


@pytest.mark.parametrize("policy", list(Policy))
def test_nothing_costs_less_than_with_the_whole_market_known(policy):
    choose = functools.partial(decide, policy, tables=SHORT_TABLES)
    recovery = Recovery(restart_s=720.0, handover_s=180.0, notice_s=0.0)
    for seed in range(6):
        market = random_market(random.Random(seed), 1)
        observation = timeline(market, market.zones, 1)
        up, price = looked(observation)
        rules = Rules(work=120, slack=20, changeover=4, beside=3, free=20)
        least = least_costs(up[None, :140], price[None, :140], rules)[0] * 3.0 / 20
        assert replay(choose, SHORT, observation, 0, recovery).usd >= least - 1e-6


def test_the_least_cost_with_the_market_known():
    # Up for 3 ticks, down for 3, up to the end; a start takes one tick, 4 ticks of work in 8.
    up = np.array([[[True]] * 3 + [[False]] * 3 + [[True]] * 2])
    price = np.full(up.shape, 0.5)
    plain = Rules(work=4, slack=4, changeover=1)
    # Two ticks of work on spot (1.5), the rest on demand (1 + 2), where a second spot start would leave one undone.
    assert least_costs(up, price, plain)[0] == pytest.approx(4.5)
    # The spot machines are taken young: nothing is charged for them.
    assert least_costs(up, price, replace(plain, free=4))[0] == pytest.approx(3.0)


def random_market(draw, most):
    """Two zones for 8 h whose every state lasts 3 min to 2 h, at prices of up to more than on demand."""

    def zone(name):
        ticks = sorted({0, *(draw.randrange(160) for _ in range(draw.choice((8, 40, 120))))})
        nodes = tuple((tick, draw.choice((0, most, draw.randint(0, most)))) for tick in ticks)
        prices = ((0, Decimal(draw.choice(("0.9", "1.2", "2.9")))), (80, Decimal(draw.choice(("0.9", "3.3")))))
        return RecordedZone(name=name, nodes=nodes, prices=prices)

    return RecordedMarket(
        name="random",
        about="",
        source="",
        instance_type="p3.2xlarge",
        gpus=1,
        gpu="V100",
        nodes=most,
        started_at=None,
        tick=timedelta(seconds=180),
        ticks=160,
        on_demand_usd_per_hour=Decimal(3),
        prices_recorded=True,
        zones=(zone("us-east-1a"), zone("us-east-1b")),
    )
