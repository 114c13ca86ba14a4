"""`gpucloud gc` over random accounts: every stray is found, and nothing else is touched."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpucloud.domain.supervision.strays import CLUSTER, JOB, MANAGED, STORE, Owner, Thing
from gpucloud.store import ObjectStore, open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.machines import Sweeper
from tests.fakes.clock import JumpingClock
from tests.prove.goal import Figure, Form, Goal
from tests.unit.worlds import NOW, POOL, state

ACCOUNT = "123456789012"
REGIONS = ("us-east-2", "us-west-2", "eu-west-1")
KINDS = ("instance", "volume", "auto-scaling-group", "launch-template", "security-group", "key-pair", "role")


@dataclass
class _Account:
    """An account in memory; `removed` is what was taken away, and when it is too early to take anything."""

    there: list[Thing]
    account: str = ACCOUNT
    regional: bool = True
    removed: list[Thing] = field(default_factory=list)

    def things(self) -> tuple[Thing, ...]:
        return tuple(self.there)

    def remove(self, cluster: str, region: str, things: tuple[Thing, ...], *, story: Callable[[str], None]) -> None:
        """As the real ones do: everything in the region that bears the cluster's own tags goes."""
        del things
        gone = [thing for thing in self.there if (thing.cluster, thing.region) == (cluster, region)]
        gone = [thing for thing in gone if thing.account == self.account and thing.tag(MANAGED) == "true"]
        self.removed += gone
        self.there = [thing for thing in self.there if thing not in gone]


@dataclass
class _Memory:
    kept: dict[str, datetime] = field(default_factory=dict)

    def load(self, owner: Owner) -> Mapping[str, datetime]:
        del owner
        return self.kept

    def save(self, owner: Owner, first_seen: Mapping[str, datetime]) -> None:
        del owner
        self.kept = dict(first_seen)


@dataclass(frozen=True)
class _Case:
    """One account: what is there, and which of it are strays."""

    things: tuple[Thing, ...]
    strays: frozenset[str]


@dataclass
class _Counts:
    missed: int = 0
    touched: int = 0
    early: int = 0
    strays: int = 0
    others: int = 0

    @property
    def wrong(self) -> int:
        return self.missed + self.touched + self.early


def run(form: Form) -> Iterator[Figure]:
    """Yield what went wrong in 200 accounts, in the short form the first 50."""
    accounts = 50 if form is Form.SHORT else 200
    counts = _Counts()
    for seed in range(accounts):
        before = counts.wrong
        with tempfile.TemporaryDirectory() as folder:
            _one(random.Random(seed), open_store(folder), counts)
        if counts.wrong > before:
            print(f"gc: seed {seed}: {counts}", file=sys.stderr)
    yield Figure(name="gc", value=counts.wrong, limit=0)
    yield Figure(name="gc.missed", value=counts.missed, limit=0)
    yield Figure(name="gc.foreign-touched", value=counts.touched, limit=0)
    yield Figure(name="gc.too-early", value=counts.early, limit=0)
    yield Figure(name="gc.strays", value=counts.strays, limit=2 * accounts, least=True)
    yield Figure(name="gc.others", value=counts.others, limit=2 * accounts, least=True)


def _one(dice: random.Random, store: ObjectStore, counts: _Counts) -> None:
    case = _case(dice, store)
    account, clock, memory = _Account(list(case.things)), JumpingClock(NOW), _Memory()
    sweeper = Sweeper(census=account, store=store, clock=clock, sightings=memory, story=lambda line: None)
    sweeper.remove(sweeper.look())
    clock.sleep(dice.uniform(0, 59.9))
    sweeper.remove(sweeper.look())
    counts.early += len(account.removed)
    clock.sleep(60)
    sweeper.remove(sweeper.look())
    gone = {thing.key for thing in account.removed}
    counts.missed += len(case.strays - gone)
    counts.touched += len(gone - case.strays)
    counts.strays += len(case.strays)
    counts.others += len(case.things) - len(case.strays)


def _case(dice: random.Random, store: ObjectStore) -> _Case:
    things: list[Thing] = []
    strays: set[str] = set()
    for number in range(dice.randint(2, 6)):
        job = f"job-{number}" if dice.random() < 0.8 else f"job-{number}-2"
        fate = dice.choice(("living", "moved", "torn down", "unknown", "look-alike", "foreign account", "other store"))
        region = dice.choice(REGIONS)
        mine = [_thing(dice, job, store.url, region, f"{number}-{i}") for i in range(dice.randint(1, 6))]
        if fate in ("living", "moved", "torn down"):
            _remember(store, job, dice.choice([r for r in REGIONS if r != region]) if fate == "moved" else region, fate)
        mine = [_other(dice, thing, fate) for thing in mine]
        things += mine
        if fate in ("moved", "torn down", "unknown"):
            strays.update(thing.key for thing in mine)
    dice.shuffle(things)
    return _Case(things=tuple(things), strays=frozenset(strays))


def _thing(dice: random.Random, job: str, store: str, region: str, name: str) -> Thing:
    tags = ((MANAGED, "true"), (CLUSTER, f"gpucloud-{job}"), (JOB, job), (STORE, store), ("team", "vision"))
    return Thing(kind=dice.choice(KINDS), id=f"x-{name}", account=ACCOUNT, region=region, tags=tags)


def _remember(store: ObjectStore, job: str, region: str, fate: str) -> None:
    pool = replace(POOL, zone=f"{region}a")
    group = f"{region}/gpucloud-{job}" if fate != "torn down" else None
    JobStore(store, job).create(state(job=job, pool=pool, group=group, torn_down=fate == "torn down"))


def _other(dice: random.Random, thing: Thing, fate: str) -> Thing:
    """Return the thing as it is in an account of that kind."""
    tags = dict(thing.tags)
    match fate:
        case "foreign account":
            return replace(thing, account="210987654321")
        case "other store":
            tags[STORE] += dice.choice(("/team", "2", "/"))
        case "look-alike":
            wrong = dice.choice(((MANAGED, "True"), (MANAGED, ""), (JOB, "other"), (CLUSTER, tags[CLUSTER].upper())))
            tags[wrong[0]] = wrong[1]
        case _:
            return thing
    return replace(thing, tags=tuple(tags.items()))


GOAL = Goal(
    promise="gpucloud gc finds every stray of 200 random accounts, touches nothing else, and nothing before two looks",
    real="the rules, the use case with both looks, the jobs' states and leases in a directory store",
    simulated="the accounts: lists in memory of own, living, moved, foreign and look-alike things; the minute between",
    run=run,
)
