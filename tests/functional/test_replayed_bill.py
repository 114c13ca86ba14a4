"""What a job on the embedded fleet was billed is what a replay of its machines' lives on the fleet's prices costs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path

from gpucloud.adapters.local.market import LocalMarket
from gpucloud.domain.market.outcome import Lifetime
from gpucloud.domain.market.recordings import RecordedMarket, RecordedZone, Timeline, timeline
from gpucloud.domain.market.simulation import Run, bill_usd
from gpucloud.domain.money.ledger import total
from gpucloud.domain.state.state import UsageInterval
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.standins.quick_fleet import quick_fleet

SECOND = timedelta(seconds=1)
A_DAY = 86_400


def recorded(lifetimes: tuple[UsageInterval, ...]) -> Timeline:
    """The fleet's own prices from the first launch on."""
    began, pool = min(lifetime.launched_at for lifetime in lifetimes), lifetimes[0].pool
    points = LocalMarket().prices(pool, began, began + A_DAY * SECOND)
    market = RecordedMarket(
        name="fleet",
        about="",
        source="",
        instance_type=pool.instance_type,
        gpus=1,
        gpu="",
        nodes=1,
        started_at=began,
        tick=SECOND,
        ticks=A_DAY,
        on_demand_usd_per_hour=Decimal(1),
        prices_recorded=True,
        zones=(RecordedZone(name=pool.zone, nodes=((0, 1),), prices=((0, Decimal(1)),)),),
    )
    return replace(timeline(market, market.zones, 1), prices=(points,))


def lived(lifetime: UsageInterval, began: datetime) -> Lifetime:
    assert lifetime.ended_at is not None
    assert lifetime.end_cause is not None
    since, until = (moment - began for moment in (lifetime.launched_at, lifetime.ended_at))
    return Lifetime(
        zone=0, nodes=1, launched_s=since.total_seconds(), ended_s=until.total_seconds(), cause=lifetime.end_cause
    )


def test_the_bill_of_a_job_is_that_of_its_replayed_machines(tmp_path: Path) -> None:
    with quick_fleet(tmp_path) as line:
        answer = line.run("train", line.quick_job(steps=20, step_s=0.05))
        assert answer.code == 0, answer.stderr
        jobs = JobStore(open_store(str(line.home / "store")), "small")
        loaded = jobs.load()
        assert loaded is not None
        lifetimes, billed = loaded[0].nodes, total(jobs.charges())
    assert len(lifetimes) == 2
    observation = recorded(lifetimes)
    run = Run(
        lifetimes=tuple(lived(lifetime, observation.when(0)) for lifetime in lifetimes),
        finished_s=None,
        late=False,
        interruptions=0,
        launches=2,
        decisions=0,
        usd=0.0,
    )
    assert bill_usd(run, observation) == billed > 0
