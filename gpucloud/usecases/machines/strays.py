"""Finding and removing strays: the cloud is listed first, then the jobs' states are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.errors import GpucloudError, LeaseHeld, StoreError
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.strays import APART, Claim, Owner, Ripe, Thing, claim, is_owned, ripe, sighted, strays
from gpucloud.ports import Census, Clock, Sightings
from gpucloud.store import ObjectStore
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one look found: strays, when each was first seen, and those that may be removed.

    `owned` and `foreign` are the keys of all that is listed: of this store's jobs, and of others.
    """

    strays: tuple[Thing, ...]
    first_seen: Mapping[str, datetime]
    ripe: tuple[Ripe, ...]
    owned: frozenset[str]
    foreign: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeper:
    """Looks for strays of the jobs of one store in one cloud."""

    census: Census
    store: ObjectStore
    clock: Clock
    sightings: Sightings
    story: Callable[[str], None]

    def look(self) -> Swept:
        """List the cloud, then the states of the jobs that its things name; remember what was seen as a stray."""
        owner = Owner(account=self.census.account, store=self.store.url)
        things = self.census.things()
        clusters = sorted({thing.cluster for thing in things if is_owned(thing, owner)})
        claims = (self._claim(one) for one in clusters)
        found, now = strays(things, tuple(one for one in claims if one is not None), owner), self.clock.now()
        first_seen = sighted(found, self.sightings.load(owner), now)
        self.sightings.save(owner, first_seen)
        listed = frozenset(thing.key for thing in things)
        owned = frozenset(thing.key for thing in things if is_owned(thing, owner))
        able = ripe(found, first_seen, now)
        return Swept(strays=found, first_seen=first_seen, ripe=able, owned=owned, foreign=listed - owned)

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

    def _claim(self, cluster: str) -> Claim | None:
        """A job whose state or order cannot be read may live: all that bears its name is left to `down`."""
        claimed: Claim | None = Claim(cluster=cluster, regions=None)
        try:
            claimed = claim(cluster, self._state(cluster), regional=self.census.regional)
            if claimed is not None:
                Orders(jobs=self._jobs(cluster), clock=self.clock).given()
        except StoreError as error:
            if error.may_pass:
                raise
            way_on = f" ({error.hint})" if error.hint else ""
            self.story(f"{error}: what is there of {cluster} is left alone{way_on}")
        return claimed

    def _state(self, cluster: str) -> JobState | None:
        loaded = self._jobs(cluster).believed()
        return loaded[0] if loaded is not None else None

    def _jobs(self, cluster: str) -> JobStore:
        return JobStore(self.store, cluster.removeprefix("gpucloud-"))
