"""The use cases about jobs, each built of what the user has here: asking, going on and ending, starting, planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.domain.errors import GpucloudError, ProvisionError, ToolMissing, UsageError
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.job.spec import AwsChoices, Cloud, Job, KnownJob, Resources
from gpucloud.domain.node.node import fleet_of
from gpucloud.domain.untrusted import in_one_line
from gpucloud.wiring.clouds import market_of
from gpucloud.wiring.root import Gpucloud

if TYPE_CHECKING:
    from gpucloud.adapters.plots import Plot
    from gpucloud.adapters.transfer.copying import Copier
    from gpucloud.domain.checkpoint.protection import Saving
    from gpucloud.domain.market.plan import Plan
    from gpucloud.domain.node.node import Node
    from gpucloud.domain.state.state import JobState
    from gpucloud.ports import Markets, PolicyTables, Shell
    from gpucloud.usecases.job.jobs import Asker
    from gpucloud.usecases.job.ordered import Access
    from gpucloud.usecases.job.passes import BudgetChanger, Deleter, Ender, Reconciler
    from gpucloud.usecases.job.start import Starter
    from gpucloud.usecases.jobstore.report import JobReport
    from gpucloud.usecases.jobstore.runs import Found
    from gpucloud.usecases.money.estimate import Estimator
    from gpucloud.usecases.money.simulate import Outlooks

_VISIT_S = 5.0
_LOOK_S = 0.3


def asker_of(gpucloud: Gpucloud, known: KnownJob) -> Asker:
    """Return what answers questions about a known job."""
    from gpucloud.store.contract import CountingStore, Tally
    from gpucloud.usecases.job.jobs import Asker
    from gpucloud.usecases.jobstore.jobstore import JobStore

    cloud, store, tally = gpucloud.cloud_of(known), gpucloud.store_of(known), Tally()
    jobs = JobStore(CountingStore(store, tally), known.name)
    return Asker(
        jobs=jobs,
        market=market_of(cloud, known.cloud),
        group=cloud.group(store),
        clock=gpucloud.store_clock(jobs),
        terms=cloud.cloud_profile.terms,
        rules=cloud.cloud_profile.rules,
        tally=tally,
        reader=gpucloud.reader,
        flush_s=cloud.cloud_profile.flush_s,
        look_s=max(_LOOK_S, cloud.cloud_profile.flush_s / 2),  # each look is paid for; output comes no more often
    )


def access_to(gpucloud: Gpucloud, known: KnownJob) -> Access:
    """Return the way to a known job: by what it is gone on with or ended. Raises CredentialsError."""
    from gpucloud.adapters.local.group import fleet_elsewhere
    from gpucloud.usecases.job.ordered import Access

    return Access(
        ordered=gpucloud.ordered(known),
        key=partial(gpucloud.machine_key, known),
        services=gpucloud.services,
        fleet_elsewhere=partial(fleet_elsewhere, own=gpucloud.home.fleet),
    )


def ender_of(gpucloud: Gpucloud, known: KnownJob, *, abandons: bool = False) -> Ender:
    """Return what ends a known job; `abandons`: also what can be neither saved nor brought. Raises CredentialsError."""
    from gpucloud.usecases.job.passes import Ender

    return Ender(
        asker=asker_of(gpucloud, known),
        access=access_to(gpucloud, known),
        leftovers=lambda: leftovers(gpucloud, known),
        ends_leftovers=ends_leftovers(known),
        abandons=abandons,
    )


def reconciler_of(gpucloud: Gpucloud, known: KnownJob, tell: Callable[[str], None]) -> Reconciler:
    """Return what makes passes for a known job. Raises CredentialsError."""
    from gpucloud.usecases.job.passes import Reconciler

    return Reconciler(asker=asker_of(gpucloud, known), access=access_to(gpucloud, known), tell=tell)


def budget_changer(
    gpucloud: Gpucloud, known: KnownJob, settle: Callable[[], object], tell: Callable[[str], None]
) -> BudgetChanger:
    """Return what changes a known job's budget; `settle` makes a pass for the job. Raises CredentialsError."""
    from gpucloud.usecases.job.passes import BudgetChanger

    return BudgetChanger(
        asker=asker_of(gpucloud, known),
        orders=gpucloud.orders(known),
        file=known.file,
        rules=gpucloud.cloud_of(known).cloud_profile.rules,
        settle=settle,
        tell=tell,
    )


def deleter_of(gpucloud: Gpucloud, known: KnownJob, require_over: Callable[[], None]) -> Deleter:
    """Return what deletes a known job that is over, as `require_over` says."""
    from gpucloud.usecases.job.passes import Deleter
    from gpucloud.usecases.jobstore.jobstore import JobStore

    return Deleter(
        jobs=JobStore(gpucloud.store_of(known), known.name),
        clock=gpucloud.clock,
        require_over=require_over,
        clear=lambda: gpucloud.home.clear(known),
    )


def leftovers(gpucloud: Gpucloud, known: KnownJob) -> tuple[str, ...]:
    """Return what the cloud still lists for a job, of any kind: its group, machines, disks, keys, roles."""
    from gpucloud.usecases.services import cluster_of

    asker, cloud, cluster = asker_of(gpucloud, known), gpucloud.cloud_of(known), cluster_of(known.name)
    provisioner, store = cloud.provisioner(gpucloud.store_of(known)), gpucloud.store_of(known)
    found: list[str] = []
    for region in _regions(gpucloud, known, asker):
        name = provisioner.group(cluster, region)
        listed = asker.group.describe(name)
        shown = name if fleet_of(name) is None else cluster
        found += [f"group {shown}", *(node.id for node in listed.alive)] if listed.exists else []
        if known.cloud is Cloud.AWS:
            census = gpucloud.aws(AwsChoices(profile=known.profile), Resources(regions=(region,))).census(store)
            found += [f"{one.kind} {one.id}" for one in census.of_cluster(cluster)]
    return tuple(dict.fromkeys(found))


def ends_leftovers(known: KnownJob) -> str:
    """Return what ends things that are listed of a job which was torn down; `gc` knows of no hosts of the user's own.

    These are free when the time is over that they were taken for, which they know themselves; a note of it stays.
    """
    from gpucloud.usecases.services import cluster_of

    if not known.cloud.traits.owned:
        return "gpucloud gc --wait --yes"
    note = f"{known.store}/clusters/{cluster_of(known.name)}/hosts.json"
    return f"own hosts free themselves when their time is over; then remove {note}"


def where_listed(gpucloud: Gpucloud, known: KnownJob) -> str:
    """Return in which regions that was looked for, as words to go behind; nothing of a cloud that has none.

    It may have had machines elsewhere, where its job file named another region before: no older order is kept.
    """
    regions = _regions(gpucloud, known, asker_of(gpucloud, known)) if known.cloud is Cloud.AWS else ()
    return f" in {', '.join(regions)} (gpucloud gc --region REGION looks elsewhere)" if regions else ""


def _regions(gpucloud: Gpucloud, known: KnownJob, asker: Asker) -> tuple[str, ...]:
    """Return where things of the job may be: by its state and what was armed; without a state by its order and bills.

    A state that stands in for a lost one names no pool.
    """
    loaded, jobs = asker.jobs.believed(), asker.jobs
    found = [one.rented.pool.region for one in jobs.armings()]
    if loaded is not None and loaded[0].pool.zone:
        found.insert(0, loaded[0].pool.region)
        return tuple(dict.fromkeys(found))
    ordered = asker.order().resolved.resources
    at = gpucloud.aws(AwsChoices(profile=known.profile), ordered).regions if known.cloud is Cloud.AWS else ("",)
    charged = (charge.pool.region for charge in jobs.charges() if charge.pool is not None)
    return tuple(dict.fromkeys((*found, *at, *charged)))


def state_of(gpucloud: Gpucloud, known: KnownJob) -> JobState | None:
    """Return a known job's state; None where it has none, and only what it left lies in the store."""
    asker = asker_of(gpucloud, known)
    return asker.state() if asker.jobs.exists() else None


def require_nothing_left(gpucloud: Gpucloud, known: KnownJob, called: str) -> None:
    """Raise UsageError unless it is known of a job without a state that nothing of it is left in its cloud."""
    asker, what = asker_of(gpucloud, known), f"{called} has no state"
    order, armed = asker.order(), asker.jobs.last_armed()
    if armed is not None and armed.machines:
        raise UsageError(f"{what}, and machines were to drive it", hint=f"gpucloud down {called} ends them by what was")
    if known.cloud is Cloud.LOCAL and order.host != gpucloud.home.identity:
        raise UsageError(
            f"{what}, and {order.by} ordered it from another home: its machines are listed there alone",
            hint=f"gpucloud rm {called} in that home",
        )
    if left := leftovers(gpucloud, known):
        owned = f"gpucloud train with its job file goes on with that, and gpucloud down {called} ends it"
        raise UsageError(
            f"{what}, and of it is still listed: {', '.join(left)}",
            hint=owned if known.cloud.traits.owned else "gpucloud gc --wait --yes ends that",
        )


def with_seen_again(gpucloud: Gpucloud, known: KnownJob, report: JobReport) -> JobReport:
    """Return the report that tells of machines which the job went on without, where this home's fleet has such.

    They may be others than those that it left: a home that comes back starts its group's level anew.
    """
    if known.cloud is not Cloud.LOCAL or all(one.let_go_until is None for one in report.intervals):
        return report
    from gpucloud.usecases.services import cluster_of

    told, here = {node.id for node in report.nodes}, []
    with suppress(ProvisionError):  # a damaged record of its fleet: the books are shown all the same
        listed = asker_of(gpucloud, known).group.describe(cluster_of(known.name))
        here = [node for node in listed.alive if node.id not in told]
    if not here:
        return report
    are, them = ("is", "it") if len(here) == 1 else ("are", "them")
    once = "" if report.torn_down else "once the job is over, "
    line = f"{counted(len(here), 'machine')} of this home, which the job went on without, {are} alive:"
    line = f"{line} {once}`gpucloud gc --wait --yes` ends {them}"
    return replace(report, message="; ".join(filter(None, (report.message, line))))


def unlisted_fleet(ender: Ender) -> str | None:
    """Return what to say of the embedded fleet of another home, where the job's machines are: it cannot be listed.

    So of one on which machines may live that the job went on without.
    """
    from gpucloud.domain.supervision.strays import may_live_to

    group, let_go, now = None, False, ender.asker.clock.now()
    with suppress(GpucloudError):  # a state that cannot be read: the job is ended all the same
        state = ender.asker.stored_state()
        group = state.group
        let_go = any(may_live_to(one, now) for one in state.nodes)
    away, fleet = ender.access.fleet_elsewhere(group), fleet_of(group)
    if away is None or fleet is None:
        return "listed again here alone: no machines, no node group" if let_go else None
    there = f"{fleet.variable} gpucloud gc --wait --yes removes what is left there" if away.is_here else ""
    place = in_one_line(f"{fleet.home} on {fleet.host}")
    return f"not listed again: the embedded fleet of another home ({place}); {there or 'it is not seen from here'}"


def visitor(gpucloud: Gpucloud, known: KnownJob) -> Shell:
    """Return SSH for a short look at a known job's nodes: one that does not answer is not waited for."""
    return gpucloud.shell(known.name, replace(gpucloud.cloud_of(known).cloud_profile, connect_s=_VISIT_S))


def visited_report(gpucloud: Gpucloud, known: KnownJob, report: JobReport) -> JobReport:
    """Return the report with what its nodes say now; one that does not answer has no status."""
    if not report.nodes or (report.open_attempt is None and not report.hands_over):
        return report
    from gpucloud.usecases.supervise.look import visited

    shell = visitor(gpucloud, known)
    try:
        return visited(report, shell, gpucloud.clock.sleep)
    finally:
        shell.close()


@contextmanager
def copier_to(gpucloud: Gpucloud, known: KnownJob, node: Node, shown: Callable[[int, int], None]) -> Iterator[Copier]:
    """Give what copies to and from a job's node, paths starting in its code folder."""
    from gpucloud.adapters.transfer.copying import Copier

    cloud_profile = gpucloud.cloud_of(known).cloud_profile
    shell = gpucloud.shell(known.name, cloud_profile)
    try:
        yield Copier(shell.host(node), python=cloud_profile.node_python, progress=shown)
    finally:
        shell.close()


def starter(gpucloud: Gpucloud, job: Job) -> Starter:
    """Return what starts jobs in the job's store."""
    from gpucloud.adapters.scripts import how_it_saves
    from gpucloud.adapters.transfer.sync import whole_code
    from gpucloud.usecases.job.start import Starter

    cloud = gpucloud.cloud(job)
    return Starter(
        store=gpucloud.store(job),
        market=market_of(cloud, job.cloud),
        account=cloud.account(),
        clock=gpucloud.clock,
        rules=cloud.cloud_profile.rules,
        terms=cloud.cloud_profile.terms,
        group=cloud.group(gpucloud.store(job)),
        host=gpucloud.home.identity,
        signer=gpucloud.signer(),
        reader=gpucloud.reader(),
        pack_code=partial(whole_code, cache=gpucloud.home.root / "cache"),
        outlooks=cache(outlooks),  # one that remembers, made when a plan asks for it
        saving=lambda job: how_it_saves(job).saving,
    )


def refuse_after_the_deadline(gpucloud: Gpucloud, job: Job, found: Found) -> None:
    """Raise PlanRefused where a start refuses to go on with the ended run that it finds, for its deadline is over."""
    from gpucloud.domain.state.state import ExitReason
    from gpucloud.usecases.job.ordered import require_time_by_file

    now = gpucloud.clock.now()
    if found.state.exit_reason is not ExitReason.SUCCEEDED and not found.begins_anew(job, now, again=False):
        require_time_by_file(found, job, now)


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
        prepaid_rule=cloud.cloud_profile.rules.prepaid_rule,
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
