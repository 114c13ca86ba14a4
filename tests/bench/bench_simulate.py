"""Measures how fast jobs are replayed on recorded markets: `python -m tests.bench simulate`.

CPU seconds of one thread for 10,000 hours of jobs (48 h of work in 60 h) under `uniform`, with the product's own
`decide` at every look that could change anything and its own meter for every bill.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from decimal import Decimal

from gpucloud.adapters.markets import PackagedMarkets
from gpucloud.adapters.markets.tables import TableMaker
from gpucloud.domain.job.spec import Policy
from gpucloud.domain.market.recordings import zone_set
from gpucloud.domain.market.scenario import Recovery, Scenario
from gpucloud.usecases.money.simulate import Study, simulate
from tests.bench.figures import figure

JOB_HOURS = 10_000
LIMIT_S = 1.0
WINDOWS = 60
ROUNDS = 3
ZONES = {"one_zone": "us-east-1f", "four_zones": "us-east-1", "nine_zones": "all"}
JOB = Scenario(
    work=timedelta(hours=48),
    deadline=timedelta(hours=60),
    budget_usd=Decimal(160),
    nodes=1,
    recovery=Recovery(restart_s=600.0),
)


def main() -> int:
    market = PackagedMarkets().market("p3.2xlarge-2023-02")
    kept = True
    for name, words in ZONES.items():
        study = Study(
            zone_sets=(zone_set(market, words),),
            policies=(Policy.UNIFORM,),
            deadlines=(JOB.deadline,),
            windows=WINDOWS,
            seed=0,
        )
        spent_s = min(_cpu_s(market, study) for _ in range(ROUNDS))
        hours = WINDOWS * JOB.work / timedelta(hours=1)
        kept &= figure(f"simulate_cpu_s_for_10000_job_hours_{name}", spent_s * JOB_HOURS / hours, LIMIT_S)
    return 0 if kept else 1


def _cpu_s(market, study) -> float:
    began = time.process_time()
    for _ in simulate(JOB, market, study, TableMaker):
        pass
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
