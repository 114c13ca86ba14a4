"""Measures `gpucloud cost` of a job with 10,000 attempts and machines: `python -m tests.bench cost`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from unittest import mock

from gpucloud.adapters.home import Home
from gpucloud.domain.job.spec import KnownJob, Market
from gpucloud.domain.money.ledger import Rates, Terms
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state.state import Attempt, ExitReason, JobState, JobStatus, Member, UsageInterval
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from tests.bench.figures import figure
from tests.unit.worlds import put_job

ATTEMPTS, EACH, LIMIT_S, ROUNDS = 10_000, timedelta(minutes=7), 1.0, 5
BORN = datetime(2026, 1, 1, tzinfo=timezone.utc)
POOL = Pool(instance_type="local.p2.xlarge", zone="us-east-2a", market=Market.SPOT)
DISK = Rates(region="us-east-2", disk_usd_per_gib_month=Decimal("0.08"), address_usd_per_hour=Decimal("0.005"))
TERMS = Terms(disk_gib=100, public_address=True, rates=(DISK,))


class OnePrice:
    """Implements `MarketData` as far as it is asked."""

    def offers(self, wanted: object) -> tuple[Offer, ...]:
        return ()

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        return (PricePoint(since=start, usd_per_hour=Decimal("0.2764")),)


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        home = Home(Path(name))
        make_job(home)
        tables = {"by_attempt": (), "by_day": ("--by", "day")}
        good = [
            figure(f"cost_of_10000_attempts_{way}_cpu_s", best(home, words), LIMIT_S) for way, words in tables.items()
        ]
        figure("cost_of_10000_attempts_json_cpu_s", best(home, ("--json",)))
        figure("cost_of_10000_attempts_csv_cpu_s", best(home, ("--csv", "-")))
    return 0 if all(good) else 1


def make_job(home: Home, attempts: int = ATTEMPTS) -> None:
    """A job that had one machine for each attempt, all ended and in the ledger."""
    jobs = JobStore(open_store(home.store), "long")
    state = JobState(
        job="long",
        pool=POOL,
        cap_usd_per_hour=Decimal(1),
        status=JobStatus.STOPPED,
        exit_reason=ExitReason.STOPPED,
        torn_down=True,
        attempts=tuple(attempt(number) for number in range(1, attempts + 1)),
        nodes=tuple(interval(number) for number in range(1, attempts + 1)),
    )
    with mock.patch("os.fsync"):  # ten thousand objects, of which none must outlive a power cut
        put_job(jobs, SpendTracker(jobs, OnePrice(), TERMS).settle(state, BORN), budget_usd=Decimal(5000))
    home.remember(KnownJob(name="long", store=jobs.store.url, file=Path("/nowhere/gpucloud.yaml")))


def attempt(number: int) -> Attempt:
    begins = BORN + (number - 1) * EACH
    return Attempt(
        number=number,
        members=(Member(node_id=node(number), rank=0),),
        port=29500,
        started_at=begins,
        ended_at=begins + EACH,
        reason=ExitReason.INTERRUPTED,
        first_step=number,
        last_step=number,
    )


def interval(number: int) -> UsageInterval:
    begins = BORN + (number - 1) * EACH
    return UsageInterval(
        node_id=node(number),
        pool=POOL,
        launched_at=begins,
        ended_at=begins + EACH,
        end_cause=EndCause.CHOICE,
    )


def node(number: int) -> str:
    return f"i-{number:017x}"


def best(home: Home, words: tuple[str, ...]) -> float:
    """Processor seconds of the whole command, start included: it waits for nothing, so a quiet core takes as long."""
    command = [sys.executable, "-m", "gpucloud", "cost", "long", *words]
    env = {**os.environ, "GPUCLOUD_HOME": str(home.root)}
    seconds = []
    for _ in range(ROUNDS):
        before = _processor_s()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
        seconds.append(_processor_s() - before)
        assert len(done.stdout) > 1000
    return min(seconds)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
