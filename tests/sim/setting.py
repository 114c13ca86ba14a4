"""What a run is made of, drawn from its seed: the job, the weather, and how often what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal

from gpucloud.domain.job.spec import Policy
from gpucloud.domain.supervision.snapshot import Limits, Rules
from tests.sim.cloud import CAP, Weather
from tests.sim.store import Faults
from tests.sim.training import Script


@dataclass(slots=True, kw_only=True)
class Setting:
    """One run. Rates are per second while the storm lasts; `kills` and `pauses` are of supervisors."""

    nodes: int
    budget_usd: Decimal
    script: Script
    weather: Weather = field(default_factory=Weather)
    faults: Faults = field(default_factory=Faults)
    rules: Rules = field(default_factory=Rules)
    period_s: float = 2.0
    heartbeat_s: float = 1.0
    price_s: float = 180.0
    lease_s: float = 15.0
    bootstrap_s: tuple[float, float] = (3.0, 12.0)
    at_cap: bool = False
    storm_s: float = 0.0
    notices: float = 0.0
    deaths: float = 0.0
    freezes: float = 0.0
    hangs: float = 0.0
    agents_lost: float = 0.0
    cuts: float = 0.0
    offline: float = 0.0
    kills: float = 0.0
    pauses: float = 0.0
    rivals: float = 0.0
    shortages: float = 0.0
    outages: float = 0.0
    all_at_once: float = 0.0
    skew_s: float = 0.0
    bound_s: float = 4 * 3600.0
    deadline: Deadline | None = None
    least_nodes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When a run is to be over, how that is kept, and what the job file says of the work, None for nothing.

    Every spot pool is up for `up_s` and down for `down_s` on average; where it goes down, it takes its machines.
    """

    span_s: float
    policy: Policy
    work_s: float | None
    up_s: float
    down_s: float


def fewest(dice: random.Random, nodes: int) -> int:
    """Return on how few nodes a run may go on: in some of those with several on a part of them, in others on all."""
    return dice.randint(1, nodes - 1) if nodes > 1 and dice.random() < 0.5 else 0


def hours(usd_hours: float, nodes: int) -> Decimal:
    """Return what so many hours of all nodes cost at the cap."""
    return (CAP * nodes * Decimal(usd_hours)).quantize(Decimal("0.01"))


def storm(dice: random.Random) -> Setting:
    """Return a run in which most things go wrong, each in some runs rarely, in some often."""
    nodes = dice.choice((1, 2, 2, 3, 4))

    def rate(often_s: float) -> float:
        return 0.0 if dice.random() < 0.35 else 1 / dice.uniform(often_s, 10 * often_s)

    return Setting(
        nodes=nodes,
        budget_usd=hours(dice.choice((0.3, 1.0, 4.0)), nodes),
        script=Script(
            steps=dice.randint(20, 80),
            step_s=dice.uniform(1, 5),
            start_s=dice.uniform(1, 10),
            every=dice.choice((3, 5, 10, 20)),
            save_s=dice.uniform(0.5, 12),
        ),
        weather=Weather(
            notice_s=dice.choice((120.0, 120.0, 20.0)),
            stale_s=dice.choice((0.0, 0.0, 5.0, 30.0)),
            refused=dice.choice((0.0, 0.02, 0.1)),
            reply_lost=dice.choice((0.0, 0.02, 0.1)),
            forgets_after_s=dice.choice((3600.0, 900.0)),
        ),
        faults=Faults(refused=dice.choice((0.0, 0.03)), reply_lost=dice.choice((0.0, 0.03))),
        storm_s=dice.uniform(120, 900),
        notices=rate(60),
        deaths=rate(90),
        freezes=rate(150),
        hangs=rate(200),
        agents_lost=rate(120),
        cuts=rate(100),
        offline=rate(100),
        kills=rate(50),
        pauses=rate(100),
        rivals=rate(40),
        shortages=rate(150),
        outages=rate(200),
        all_at_once=rate(400),
        skew_s=dice.choice((0.0, 0.0, 3600.0)),
        least_nodes=fewest(dice, nodes),
    )


def too_much_work(dice: random.Random) -> Setting:
    """Return a run whose work does not fit into its budget, with what interrupts a run of hours."""
    return _too_much_work(dice, lasting_h=dice.uniform(4, 10))


def too_much_for_an_hour(dice: random.Random) -> Setting:
    """Return the same with a budget of an hour at most, and all that interrupts it so much more often."""
    return _too_much_work(dice, lasting_h=dice.uniform(0.25, 1))


def _too_much_work(dice: random.Random, *, lasting_h: float) -> Setting:
    nodes = dice.choice((1, 2, 4, 8))

    def rate(often_s: float) -> float:
        return 7 / lasting_h / dice.uniform(often_s, 10 * often_s)

    return Setting(
        nodes=nodes,
        budget_usd=hours(lasting_h, nodes),
        script=Script(steps=10**6, step_s=dice.uniform(20, 60), start_s=30, every=20, save_s=dice.uniform(1, 25)),
        rules=Rules(limits=Limits(silent=timedelta(seconds=95), settle=timedelta(seconds=40))),
        period_s=30.0,
        heartbeat_s=15.0,
        price_s=3600.0,
        lease_s=300.0,
        at_cap=dice.random() < 0.5,
        storm_s=24 * 3600.0,
        notices=rate(3000),
        deaths=rate(5000),
        offline=rate(5000),
        kills=rate(3000),
        pauses=rate(5000),
        skew_s=dice.choice((0.0, 3600.0)),
        bound_s=40 * 3600.0,
        least_nodes=fewest(dice, nodes),
    )


def short_of_money(dice: random.Random) -> Setting:
    """Return a run whose budget ends at some moment of its work, whatever it is doing then."""
    nodes = dice.choice((1, 2, 4))
    return Setting(
        nodes=nodes,
        budget_usd=hours(dice.uniform(0.15, 0.5), nodes),
        script=Script(
            steps=10**6,
            step_s=dice.uniform(1, 10),
            start_s=dice.uniform(5, 30),
            every=dice.choice((3, 10, 50)),
            save_s=dice.uniform(1, 25),
        ),
        rules=Rules(limits=Limits(silent=timedelta(seconds=15))),
        period_s=5.0,
        at_cap=dice.random() < 0.5,
        storm_s=3600.0,
        kills=dice.choice((0.0, 1 / 400)),
        offline=dice.choice((0.0, 1 / 600)),
        least_nodes=fewest(dice, nodes),
    )


def taken_machines(dice: random.Random) -> Setting:
    """Return a run whose machines are taken, with notice or without."""
    nodes = dice.choice((1, 2, 3))
    step_s = dice.uniform(1, 5)
    return Setting(
        nodes=nodes,
        budget_usd=hours(4, nodes),
        script=Script(
            steps=dice.randint(30, 60),
            step_s=step_s,
            start_s=dice.uniform(1, 10),
            every=dice.choice((5, 10)),
            save_s=dice.uniform(0.1, 4) * step_s,
        ),
        storm_s=600.0,
        notices=1 / dice.uniform(60, 200),
        deaths=1 / dice.uniform(60, 200),
        least_nodes=fewest(dice, nodes),
    )


def coming_up(dice: random.Random, *, throttled: float = 0.0) -> Setting:
    """Return a run that is over soon, and whose first minute the cloud refuses so large a part of all calls."""
    nodes = dice.choice((1, 2, 4))
    return Setting(
        nodes=nodes,
        budget_usd=hours(1, nodes),
        script=Script(steps=3, step_s=1.0, start_s=2.0, every=10, save_s=1.0),
        weather=Weather(refused=throttled),
        storm_s=60.0,
    )


def due(dice: random.Random) -> Setting:
    """Return a run with a deadline that machines on demand can keep, in a market that gives spot now and then."""
    nodes = dice.choice((1, 1, 2, 3))
    script = Script(
        steps=dice.randint(60, 150),
        step_s=dice.uniform(15, 40),
        start_s=dice.uniform(5, 30),
        every=dice.choice((3, 10)),
        save_s=dice.uniform(1, 15),
    )
    changeover = timedelta(seconds=240)
    work_s = script.steps * script.step_s
    told = dice.choice((None, 1.0, 1.0, 1.1))
    return Setting(
        nodes=nodes,
        budget_usd=hours(dice.uniform(1.1, 1.5) * (work_s + 4 * changeover.total_seconds()) / 3600, nodes),
        script=script,
        weather=Weather(reply_lost=dice.choice((0.0, 0.02)), stale_s=dice.choice((0.0, 0.0, 5.0))),
        rules=Rules(limits=Limits(silent=timedelta(seconds=30), settle=timedelta(seconds=15), changeover=changeover)),
        period_s=5.0,
        heartbeat_s=5.0,
        price_s=900.0,
        storm_s=24 * 3600.0,
        deaths=dice.choice((0.0, 1 / 4000)),
        kills=dice.choice((0.0, 1 / 1500)),
        bound_s=24 * 3600.0,
        deadline=Deadline(
            span_s=dice.uniform(1.15, 1.7) * work_s + 5 * changeover.total_seconds(),
            policy=dice.choice((Policy.GREEDY, Policy.UNIFORM, Policy.LEARNED, Policy.GREEDY)),
            work_s=work_s * told if told is not None else None,
            up_s=dice.uniform(200, 1500),
            down_s=dice.uniform(600, 5000),
        ),
        least_nodes=fewest(dice, nodes),
    )
