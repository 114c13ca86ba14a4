"""Strays: what bears gpucloud's tags in an account and belongs to no living job; and when it may be removed.

The rules are those of Karpenter's garbage collection (the cloud is listed first, then the own records) and of cloud
custodian (mark, wait, look again): two sightings at least a minute apart, and exact owner tags only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.state.state import JobState

MANAGED, CLUSTER, JOB, STORE = "gpucloud:managed", "gpucloud:cluster", "gpucloud:job", "gpucloud:store"
APART = timedelta(seconds=60)
_PREFIX = "gpucloud-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """One thing that a cloud lists: a machine, a disk, a group, a key. `usd_per_hour` is None where it is not known."""

    kind: str
    id: str
    account: str
    region: str
    tags: tuple[tuple[str, str], ...]
    since: datetime | None = None
    usd_per_hour: Decimal | None = None

    @property
    def key(self) -> str:
        """What tells it from every other thing."""
        return f"{self.account}/{self.region}/{self.kind}/{self.id}"

    def tag(self, name: str) -> str | None:
        """Return the tag's value, None without it."""
        return dict(self.tags).get(name)

    @property
    def cluster(self) -> str:
        """The cluster that it says it is of."""
        return self.tag(CLUSTER) or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose things are looked for: those of one account whose jobs keep their state in one store."""

    account: str
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a living job may have: everything of its cluster in these regions, None for any region."""

    cluster: str
    regions: frozenset[str] | None

    def covers(self, thing: Thing) -> bool:
        """Whether the thing is the job's."""
        return thing.cluster == self.cluster and (self.regions is None or thing.region in self.regions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ripe:
    """The strays of one cluster in one region, all of them seen twice: they may be removed together."""

    cluster: str
    region: str
    things: tuple[Thing, ...]


def is_owned(thing: Thing, owner: Owner) -> bool:
    """Whether every tag says, to the letter, that it was made for a job of this owner; a look-alike is foreign."""
    return (
        thing.account == owner.account
        and thing.tag(MANAGED) == "true"
        and thing.tag(STORE) == owner.store
        and thing.cluster.startswith(_PREFIX)
        and thing.tag(JOB) == thing.cluster.removeprefix(_PREFIX) != ""
    )


def claim(cluster: str, state: JobState | None, *, regional: bool) -> Claim | None:
    """Return what the job may have; None for one that does not exist or is torn down.

    A job is in its pool's region, and for as long as it moves in that of its group (`<region>/<cluster>`) too.
    """
    if state is None or state.torn_down:
        return None
    group = (state.group or "").rpartition("/")[0]
    regions = {state.pool.region, *([group] if group else [])}
    return Claim(cluster=cluster, regions=frozenset(regions) if regional else None)


def strays(things: Iterable[Thing], claims: Iterable[Claim], owner: Owner) -> tuple[Thing, ...]:
    """Return what is the owner's and no living job's."""
    living = tuple(claims)
    return tuple(t for t in things if is_owned(t, owner) and not any(one.covers(t) for one in living))


def sighted(found: Iterable[Thing], before: Mapping[str, datetime], now: datetime) -> dict[str, datetime]:
    """Return when each stray was first seen as one; what is no stray any more is forgotten."""
    return {thing.key: min(before.get(thing.key, now), now) for thing in found}


def ripe(found: Iterable[Thing], first_seen: Mapping[str, datetime], now: datetime) -> tuple[Ripe, ...]:
    """Return the clusters of which every stray was seen as one a minute ago and more."""
    places: dict[tuple[str, str], list[Thing]] = {}
    for thing in found:
        places.setdefault((thing.cluster, thing.region), []).append(thing)
    return tuple(
        Ripe(cluster=cluster, region=region, things=tuple(some))
        for (cluster, region), some in sorted(places.items())
        if all(now - first_seen.get(thing.key, now) >= APART for thing in some)
    )
