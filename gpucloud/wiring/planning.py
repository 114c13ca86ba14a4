"""What planning and starting a job need: the estimator, the starter, recorded markets, tables, and where charts go."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.domain.errors import ToolMissing
from gpucloud.domain.job.spec import Job
from gpucloud.wiring.root import Gpucloud

if TYPE_CHECKING:
    from gpucloud.adapters.plots import Plot
    from gpucloud.domain.checkpoint.protection import Saving
    from gpucloud.domain.market.plan import Plan
    from gpucloud.ports import Markets, PolicyTables
    from gpucloud.usecases.job.start import Starter
    from gpucloud.usecases.money.estimate import Estimator
    from gpucloud.usecases.money.simulate import Outlooks


def starter(gpucloud: Gpucloud, job: Job) -> Starter:
    """Return what starts jobs in the job's store."""
    from gpucloud.adapters.scripts import how_it_saves
    from gpucloud.adapters.transfer.sync import whole_code
    from gpucloud.usecases.job.start import Starter

    cloud = gpucloud.cloud(job)
    return Starter(
        store=gpucloud.store(job),
        market=cloud.market(),
        account=cloud.account(),
        clock=gpucloud.clock,
        rules=cloud.cloud_profile.rules,
        terms=cloud.cloud_profile.terms,
        group=cloud.group(gpucloud.store(job)),
        host=gpucloud.home.identity,
        signer=gpucloud.signer(),
        reader=gpucloud.reader(),
        pack_code=partial(whole_code, cache=gpucloud.home.root / "cache"),
        outlooks=outlooks,
        saving=lambda job: how_it_saves(job).saving,
    )


def estimator(gpucloud: Gpucloud, job: Job, saving: Saving, *, offline: bool = False) -> Estimator:
    """Return what says what the job is going to cost, and when it will be done, where its script saves so.

    `offline`: by the catalog's prices, for a job on AWS of somebody whom AWS does not know.
    """
    from gpucloud.usecases.money.estimate import Estimator, Planner

    cloud, recorded = gpucloud.cloud(job), outlooks()
    planner = Planner(
        market=gpucloud.aws(job.aws, job.resources).listed_market() if offline else cloud.market(),
        account=None if offline else cloud.account(),
        clock=gpucloud.clock,
        wall=cloud.cloud_profile.rules.wall,
        terms=cloud.cloud_profile.terms,
        changeover=cloud.cloud_profile.rules.limits.changeover,
        outlooks=lambda: recorded,
        saving=lambda _: saving,
    )
    return Estimator(planner=planner, outlooks=recorded, saving=saving)


def first_plan(gpucloud: Gpucloud, job: Job) -> Plan | None:
    """Return the plan of a job whose store does not exist yet; None when it does."""
    if job.store is not None or gpucloud.cloud(job).store_is_there():
        return None
    return starter(gpucloud, job).plan(job)


def outlooks() -> Outlooks:
    """Return what says what jobs are going to cost, from the spot markets of the past."""
    from gpucloud.usecases.money.simulate import Outlooks

    return Outlooks(markets=recorded_markets(), tables=policy_tables())


def recorded_markets() -> Markets:
    """Return the spot markets of the past that come with the package."""
    from gpucloud.adapters.markets import PackagedMarkets

    return PackagedMarkets()


def policy_tables(without: Collection[str] = ()) -> PolicyTables:
    """Return what makes the learned policy's tables, from recorded markets but from none of `without`."""
    from gpucloud.adapters.markets.tables import TableMaker

    return TableMaker(without)


def plot_into(path: Path) -> Plot:
    """Return the file to draw charts into. UsageError for none of PNG or SVG, ToolMissing without matplotlib."""
    try:
        from gpucloud.adapters.plots import Plot
    except ImportError as error:
        raise ToolMissing("plots need matplotlib", hint="pip install 'gpucloud[plots]'") from error
    return Plot(path)
