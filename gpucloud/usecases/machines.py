"""Machines: which there are to rent, whether those of a job and this one are fit, and strays, found and removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from pathlib import Path

from gpucloud.domain.codec import Malformed
from gpucloud.domain.errors import GpucloudError, LeaseHeld, NodeError, StoreError, UsageError
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.job.spec import Cloud, KnownJob, Market
from gpucloud.domain.market.catalog import Catalog
from gpucloud.domain.market.listing import Listing, Order, Query, listings, rank, suits
from gpucloud.domain.node.bootstrap.facts import (
    PROBE_LIMIT_S,
    Bare,
    Facts,
    package_path,
    parse_facts,
    probe,
    question,
    ship,
)
from gpucloud.domain.node.bootstrap.steps import endpoints, gate_command, job_python, may_ask_root, require_python
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.gate.report import Checked, GateOrder, GateWanted
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.strays import (
    APART,
    Claim,
    Owner,
    Ripe,
    Thing,
    claim,
    is_owned,
    list_here,
    ripe,
    sighted,
    strays,
)
from gpucloud.ports import Census, Clock, Host, Sightings, SpotQuotes
from gpucloud.store import ObjectStore, TooMany
from gpucloud.store.contract import StoreAway
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.needs import of_node, parse_checked, wanted_for

# Examining machines: those of a job, from any terminal, and the one that gpucloud runs on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One machine: what its check said, or why there is none. `busy`: a job uses it, it was not put to work.

    `is_up`: it can be asked.
    """

    node: Node
    checked: Checked | None = None
    busy: bool = False
    error: str | None = None
    is_up: bool = True


def examine(services: Services, state: JobState, *, full: bool) -> tuple[Examined, ...]:
    """Return how each machine of the job is; the package is put there if it is not. Raises ProvisionError."""
    listed = list_here(services.group.describe, state).alive
    with ThreadPoolExecutor(max_workers=16) as hands:
        return tuple(hands.map(lambda node: _examined(services, state, node, full=full), listed))


def _examined(services: Services, state: JobState, node: Node, *, full: bool) -> Examined:
    if node.state is not NodeState.RUNNING or node.host_key is None:
        return Examined(node=node, error="it is still being started", is_up=False)
    try:
        host = services.shell.host(node)
        wanted = of_node(_wanted(services), services.job, state.gpu, node, services.store.url)
        facts = _facts(host, wanted, services)
        checked = _check(host, facts, wanted, full=full and not facts.agent_busy)
    except NodeError as error:
        return Examined(node=node, error=str(error))
    return Examined(node=node, checked=checked, busy=full and facts.agent_busy)


def _wanted(services: Services) -> Wanted:
    return wanted_for(
        services.job,
        package=services.package.sha256,
        code="",
        secrets={},
        store_url=services.store.url,
        power_off=services.power_off,
    )


def _facts(host: Host, wanted: Wanted, services: Services) -> Facts:
    found = _probed(host, wanted)
    if not isinstance(found, Facts):
        require_python(found.python, found.version)
        host.run(ship(found.python or "", services.package.sha256, host.node.root), stdin=services.package.data)
        found = _probed(host, wanted)
    if isinstance(found, Bare):
        raise NodeError(f"{host.node.id}: the package does not run there", hint="gpucloud ssh, and see its Python")
    return found


def _probed(host: Host, wanted: Wanted) -> Facts | Bare:
    done = host.run(probe(wanted.package, host.node.root), stdin=question(wanted), timeout_s=PROBE_LIMIT_S)
    try:
        return parse_facts(done.stdout)
    except Malformed as error:
        raise NodeError(f"{host.node.id}: {done.stderr.decode(errors='replace').strip()[-300:]}") from error


def _check(host: Host, facts: Facts, wanted: Wanted, *, full: bool) -> Checked:
    gate = wanted.gate or GateWanted(gpus=0, torch=False)  # a job on CPUs: what GPUs there are is looked at
    order = GateOrder(
        wanted=replace(gate, full=full),
        digest="",
        python=job_python(facts),
        devices=wanted.devices,
        store=wanted.store_endpoint,
        env=endpoints(wanted),
        sudo=may_ask_root(wanted),
    )
    command = gate_command(facts.python, package_path(facts.root, wanted.package), order)
    done = host.run(command.argv, stdin=command.stdin, timeout_s=command.timeout_s)
    checked = parse_checked(done.stdout)
    if checked is None:
        raise NodeError(f"{host.node.id}: gate: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return checked


# What is said of the machine that gpucloud runs on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that gpucloud needs or can use here; `ok` is None where it is not needed.

    `bars`: whether no job runs here while it is wrong.
    """

    name: str
    ok: bool | None
    text: str
    hint: str | None = None
    bars: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This machine: what gpucloud needs of it, and its GPUs."""

    checks: tuple[Check, ...]
    checked: Checked

    @property
    def barred(self) -> tuple[Check, ...]:
        """What keeps every job out, whatever its GPUs are."""
        return tuple(check for check in self.checks if check.bars and check.ok is False)


def disk_check(
    what: str, folder: Path, free: int, *, has_room: Callable[[int, int], bool], least: int = 0, usual: int = 0
) -> Check:
    """Return whether a folder's disk has room; `free` in bytes, `has_room` is the rule of `train`.

    With less than `least` no job runs on this machine itself; `usual` is what most jobs need.
    """
    text = f"{format_size(free)} free at {folder}, {what}"
    if not has_room(free, least):
        jobs = "a job on this machine" if has_room(free, 0) else "any job"
        return Check(name="disk", ok=False, text=f"{text}: too little for {jobs}", hint="free some there", bars=True)
    if free < usual:
        return Check(name="disk", ok=None, text=f"{text}: little", hint=f"free {format_size(usual)} there")
    return Check(name="disk", ok=True, text=text)


def store_check(folder: Path, free: int, *, has_room: Callable[[int, int], bool]) -> Check:
    """Return whether a known store's disk has room: a full one bars no job but those that are kept there."""
    told = disk_check("a store", folder, free, has_room=has_room)
    text = f"{format_size(free)} free at {folder}, a store: too little for its jobs"
    return told if told.ok else Check(name="disk", ok=None, text=text, hint=told.hint)


def terraform_check(find: Callable[[], Path]) -> Check:
    """Return whether there is a Terraform that is new enough; `find` raises ToolMissing."""
    try:
        return Check(name="Terraform", ok=True, text=str(find()))
    except GpucloudError as error:
        return Check(name="Terraform", ok=None, text=f"{error.message}; needed for AWS only", hint=error.hint)


def aws_check(caller: Callable[[], str] | None) -> Check:
    """Return whether AWS knows who calls it; `caller` None where no credentials are set up: AWS may not be wanted."""
    if caller is None:
        text = "no credentials are set up here, and a machine's own role is not asked; needed for cloud: aws only"
        return Check(name="AWS", ok=None, text=text, hint="aws sso login, aws configure, or AWS_PROFILE=…")
    try:
        return Check(name="AWS", ok=True, text=caller())
    except GpucloudError as error:
        return Check(name="AWS", ok=False, text=error.message, hint=error.hint)


# Finding and removing strays: the cloud is listed first, then the jobs' states are read.


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one look found: strays, when each was first seen, and those that may be removed.

    `owned` and `foreign` are the keys of all that is listed: of this store's jobs, and of others. `away` is why the
    store could not be asked what its jobs have; nothing of them is a stray then. `unread` is why what single jobs have
    is left alone, as was told.
    """

    strays: tuple[Thing, ...]
    first_seen: Mapping[str, datetime]
    ripe: tuple[Ripe, ...]
    owned: frozenset[str]
    foreign: frozenset[str]
    away: GpucloudError | None = None
    unread: tuple[StoreError, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """Looks for strays of the jobs of one store in one cloud.

    What is of a job that is `known` here is none where the store has nothing of that: the store may be away.
    """

    census: Census
    store: ObjectStore
    clock: Clock
    sightings: Sightings
    story: Callable[[str], None]
    known: frozenset[str] = frozenset()

    def look(self) -> Swept:
        """List the cloud, then the states of the jobs that its things name; remember what was seen as a stray."""
        owner = Owner(account=self.census.account, store=self.store.url)
        things = self.census.things()
        clusters = sorted({thing.cluster for thing in things if is_owned(thing, owner)})
        unread: list[StoreError] = []
        claims, away = self._claims(clusters, unread)
        found, now = strays(things, claims, owner), self.clock.now()
        first_seen = sighted(found, self.sightings.load(owner), now)
        self.sightings.save(owner, first_seen)
        listed = frozenset(thing.key for thing in things)
        owned = frozenset(thing.key for thing in things if is_owned(thing, owner))
        able = ripe(found, first_seen, now)
        return Swept(
            strays=found,
            first_seen=first_seen,
            ripe=able,
            owned=owned,
            foreign=listed - owned,
            away=away,
            unread=tuple(unread),
        )

    def wait_for_a_second_look(self, swept: Swept) -> Swept:
        """Wait until the youngest stray was first seen a minute ago, and look again."""
        newest = max((swept.first_seen[thing.key] for thing in swept.strays), default=None)
        left = newest + APART - self.clock.now() if newest is not None else timedelta(0)
        if left > timedelta(0):
            self.clock.sleep(left.total_seconds())
        return self.look() if swept.strays else swept

    def remove(self, swept: Swept) -> Swept:
        """Remove what was seen twice, cluster by cluster; return what is left then. One that fails stops no other."""
        for one in swept.ripe:
            try:
                self._remove(one)
            except GpucloudError as error:
                self.story(f"{one.cluster} in {one.region}: {error}")
        return self.look()

    def _remove(self, one: Ripe) -> None:
        jobs = self._jobs(one.cluster)
        if jobs.load() is None:
            self._end(one)
            return
        try:
            with take(jobs, self.clock) as lease:  # so that nobody starts the job anew meanwhile
                living = claim(one.cluster, lease.state, regional=self.census.regional)
                if living is not None and any(living.covers(thing) for thing in one.things):
                    self.story(f"{one.cluster} is alive again: left alone")
                    return
                self._end(one)
        except LeaseHeld as held:
            self.story(f"{held}: left alone")

    def _end(self, one: Ripe) -> None:
        self.story(f"removing {one.cluster} in {one.region}: {', '.join(f'{t.kind} {t.id}' for t in one.things)}")
        self.census.remove(one.cluster, one.region, one.things, story=self.story)

    def _claims(
        self, clusters: Sequence[str], unread: list[StoreError]
    ) -> tuple[tuple[Claim, ...], GpucloudError | None]:
        """Return what jobs have; of a store that is away, or does not answer, each may have all that bears its name."""
        try:
            claims = [self._claim(one, unread) for one in clusters]
        except GpucloudError as error:
            return tuple(Claim(cluster=one, regions=None) for one in clusters), error
        return tuple(one for one in claims if one is not None), None

    def _claim(self, cluster: str, unread: list[StoreError]) -> Claim | None:
        """A job whose state or order cannot be read may live: all that bears its name is left to `down`."""
        claimed: Claim | None = Claim(cluster=cluster, regions=None)
        try:
            state, job = self._state(cluster), self._jobs(cluster).job
            if state is None and job in self.known and self._has_nothing(job):
                raise StoreAway(
                    f"nothing of {job} is in {self.store.url}, which may be away, as it is known here",
                    hint=f"gpucloud rm {job} --forget forgets the job",
                )
            claimed = claim(cluster, state, regional=self.census.regional)
            if claimed is not None:
                Orders(jobs=self._jobs(cluster), clock=self.clock).given()
        except StoreError as error:
            if error.may_pass:
                raise
            unread.append(error)
            way_on = f" ({error.hint})" if error.hint else ""
            self.story(f"{error}: what is there of {cluster} is left alone{way_on}")
        return claimed

    def _has_nothing(self, job: str) -> bool:
        """Whether nothing of the job is in the store; where anything is, the store is there, and a state is lost."""
        try:
            return not self.store.list(f"jobs/{job}/")
        except TooMany:
            return False

    def _state(self, cluster: str) -> JobState | None:
        loaded = self._jobs(cluster).believed()
        return loaded[0] if loaded is not None else None

    def _jobs(self, cluster: str) -> JobStore:
        return JobStore(self.store, cluster.removeprefix("gpucloud-"))


# What only the embedded cloud does: it interrupts its own machines when asked.


def require_embedded(known: KnownJob) -> None:
    """UsageError for a job that runs elsewhere."""
    if known.cloud is not Cloud.LOCAL:
        raise UsageError(
            f"{known.name} runs on {known.cloud.value}, not on the embedded fleet",
            hint=f"gpucloud train {known.name} --drill has one machine interrupted",
        )


# Which machines answer a question, with prices of now.


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The listings that answer the query, best first, and the catalog with the prices that count for them."""

    query: Query
    listings: tuple[Listing, ...]
    catalog: Catalog


def understood(query: Query, catalog: Catalog) -> Query:
    """Return the query in the catalog's own words, in the regions whose list prices are known if it names none.

    UsageError with the nearest name for a GPU, a type or a region that the catalog has not got.
    """
    return replace(
        query,
        gpu=tuple(_named(name, "GPU", catalog.gpus) for name in query.gpu),
        types=tuple(_named(name, "GPU machine", tuple(catalog.machines)) for name in query.types),
        regions=tuple(_named(name, "region", catalog.regions) for name in query.regions) or tuple(catalog.prices),
    )


def look(query: Query, order: Order, catalog: Catalog, quotes: SpotQuotes | None = None) -> Found:
    """Return what answers an understood query; `quotes` None: with the spot prices that the catalog has.

    Raises CredentialsError, ProvisionError when no region could be asked for them.
    """
    names = tuple(sorted(name for name, machine in catalog.machines.items() if suits(machine, query)))
    if quotes is not None and names and query.market.allows(Market.SPOT):
        asked = quotes.spot_lists(query.regions, names)
        catalog = replace(catalog, spot={**catalog.spot, **asked})
    return Found(query=query, listings=rank(listings(catalog, query.regions), query, order), catalog=catalog)


def _named(name: str, kind: str, known: Iterable[str]) -> str:
    by_small = {one.casefold(): one for one in known}
    if name.casefold() in by_small:
        return by_small[name.casefold()]
    near = get_close_matches(name.casefold(), by_small, n=1)
    hint = f"did you mean {by_small[near[0]]}?" if near else f"there are {', '.join(sorted(by_small.values()))}"
    raise UsageError(f"the catalog has no {kind} {name!r}", hint=hint)
