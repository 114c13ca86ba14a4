"""What machines that drive their job may claim of it: written with their role, reckoned with on the user's side.

All of the job's state and of its machines' ledger is theirs to write. Whatever they write there, the budget stays, no
sum falls below that of honest books, and no shut-off comes later, or is paid higher, than it was armed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal

from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, StateUnreadable, StoreError
from gpucloud.domain.job.spec import CheckpointPolicy, Market
from gpucloud.domain.money.ledger import Charge, Terms
from gpucloud.domain.node.node import EndCause, GroupView, NodeState
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.state import ExitReason, JobState, JobStatus, Successor, UsageInterval
from gpucloud.domain.supervision.budget import least_to_lower_to, rules_for
from gpucloud.domain.supervision.self_driving import arming
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.domain.untrusted import COUNTED
from gpucloud.store import ObjectStore
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.job.passes import bring_closer, budget_standing
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.money.spend import SpendTracker
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import node, order, state

Claim = tuple[str, Callable[["Driven"], None]]
_START = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
_HOUR = timedelta(hours=1)
_NOW, _UNTIL = _START + 5 * _HOUR, _START + 9 * _HOUR
_GROUP = "us-east-1/gpucloud-digits"
_POOL = Pool(instance_type="g4dn.xlarge", zone="us-east-1a", market=Market.SPOT)
_CHEAP, _DEAR = replace(_POOL, instance_type="g4dn.nano"), replace(_POOL, instance_type="p5.48xlarge")
_USD = {_POOL: Decimal("0.5"), _CHEAP: Decimal("0.01"), _DEAR: Decimal(98)}
_RULES = rules_for(CheckpointPolicy(), 8 * _HOUR, Rules())


class Driven:
    """A job that its user had beside him for an hour and left to its machines for four.

    One machine ended in the first hour and one, which the cloud lists no longer, in the third; two live. `judged` is
    the store as the machines have it: what it lets them write is then in the copy that the user's side reads.
    """

    def __init__(self, judged: ObjectStore) -> None:
        self._judged = judged
        self.users = JobStore(MemoryStore(JumpingClock(_NOW)), "digits")
        self.cloud = _Cloud()
        alive = [_interval(name, 0) for name in ("i-a", "i-b", "i-c")]
        self.left = _state(_interval("i-0", 0, 1, charged=True), *alive)
        self.honest = _state(_interval("i-0", 0, 1, charged=True), *alive[:2], _interval("i-c", 0, 3, charged=True))
        wanted = {"budget_usd": Decimal(20), "file_budget_usd": Decimal(20), "unattended": 8 * _HOUR}
        Orders(jobs=self.users, clock=JumpingClock(_NOW)).first(order(self.users.store.url, **wanted))
        self.users.bill("i-0", (_charge("i-0", 0, 1, "0.5"),))
        self.users.arm(arming(self.left, at=_START + _HOUR, machines=3, until=_UNTIL))
        self.users.create(replace(self.left, drives_itself=True))
        self.claim(epoch=9, nodes=self.honest.nodes)
        self.put("ledger/i-c.json", _bill(_charge("i-c", 0, 3, "1.5")))
        self._kept = {key: stored.data for key in self._keys() if (stored := self.users.store.get(key)) is not None}

    def claim(self, **changes: object) -> None:
        """Write the state as a machine does, with these changes."""
        loaded = self.users.load()
        assert loaded is not None
        self.put("state.json", codec.to_json(replace(loaded[0], **changes)).encode())  # type: ignore[arg-type]

    def put(self, key: str, data: bytes) -> None:
        """Write an object of the job as a machine does. StoreError where its rights do not allow that."""
        name = f"jobs/digits/{key}"
        there = self._judged.get(name)
        version = there.version if there is not None else None
        self._judged.put(name, data, if_absent=version is None, if_version=version)
        self.users.store.put(name, data)

    def restore(self) -> None:
        """Put everything back as honest machines left it."""
        for key in self._keys():
            self.users.store.delete(key)
        for key, data in self._kept.items():
            self.users.store.put(key, data)
        self.cloud = _Cloud()

    def reckoned(self) -> Reckoned:
        """Return what the user's side makes of it, by what was armed where the state tells nothing (as `down` does)."""
        try:
            return self._reckoned()
        except StateUnreadable:
            newest = self.users.last_armed()
            assert newest is not None
            self.users.rescue(newest)
            return self._reckoned()

    def _reckoned(self) -> Reckoned:
        """Return what `cost` and `budget` say, what the next holder of the job pays for, what a lower budget does."""
        clock = JumpingClock(_NOW)
        asker = Asker(jobs=self.users, market=_Prices(), group=self.cloud, clock=clock, terms=Terms())  # type: ignore[arg-type]
        seen, given, spend = asker.state(), asker.order(), asker.report().spend
        stands = budget_standing(asker, seen, given)
        with take(self.users, clock) as lease:
            held, tracker = lease.state, SpendTracker(self.users, _Prices(), Terms())
            payable = tracker.payable(held, self.cloud.describe(_GROUP), 3, _NOW, given.budget_usd, _RULES.prepaid_rule)
        bring_closer(asker, replace(given, number=2, budget_usd=Decimal(14)), _RULES)
        return Reckoned(
            budget_usd=given.budget_usd,
            acted_on=held.order_number,
            sums={
                "cost": spend.spent_usd + spend.unproven_usd,
                "budget": stands.spent_usd,
                "the least budget": least_to_lower_to(seen, stands, _RULES),
                "the next holder's": payable.used.usd,
            },
            shutdowns={
                "paid for": payable.until or _NOW,
                "paid for one more": payable.with_another or _NOW,
                "of a lower budget": self.cloud.armed_until,
            },
            usd_per_hour=held.dearest_usd_per_hour,
        )

    def _keys(self) -> tuple[str, ...]:
        return self.users.store.list("jobs/digits/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """What the user's side makes of a job."""

    budget_usd: Decimal
    acted_on: int
    sums: dict[str, Decimal]
    shutdowns: dict[str, datetime]
    usd_per_hour: Decimal

    def budget_changed(self, honest: Reckoned) -> list[str]:
        """Say how the budget is another one, or its orders seem acted on."""
        if (self.budget_usd, self.acted_on) == (honest.budget_usd, honest.acted_on):
            return []
        return [f"{self.budget_usd} USD by order {self.acted_on}, not {honest.budget_usd} by {honest.acted_on}"]

    def sums_lowered(self, honest: Reckoned) -> list[str]:
        """Say which sums fell."""
        return [f"{name}: {self.sums[name]} of {usd} USD" for name, usd in honest.sums.items() if self.sums[name] < usd]

    def shutdowns_raised(self, honest: Reckoned) -> list[str]:
        """Say which shut-off comes later, or at another price."""
        later = [
            f"{name}: {self.shutdowns[name]}" for name, at in honest.shutdowns.items() if self.shutdowns[name] > at
        ]
        return [*later, *([f"at {self.usd_per_hour} USD/h"] if self.usd_per_hour != honest.usd_per_hour else [])]


class _Cloud:
    """What the user asks of the cloud here: its list, and to shut the machines off sooner."""

    def __init__(self) -> None:
        self.armed_until = _UNTIL

    def describe(self, group: str) -> GroupView:
        nodes = tuple(node(name, pool=_POOL, launched_at=_START, state=NodeState.RUNNING) for name in ("i-a", "i-b"))
        exists = group == _GROUP
        return GroupView(exists=exists, size=2, armed_until=self.armed_until, nodes=nodes if exists else ())

    def arm(self, group: str, until: datetime) -> None:
        assert group == _GROUP
        self.armed_until = until


class _Prices:
    """Implements `MarketData`."""

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        del end
        return (PricePoint(since=start, usd_per_hour=_USD[pool]),)


def claims(job: Driven) -> Iterator[Claim]:
    """Yield what machines may claim, each with what writes it."""
    yield from _of_the_ledger()
    yield from _of_intervals(job)
    yield from _of_the_job(job)
    yield from _of_all(job)


def _of_the_ledger() -> Iterator[Claim]:
    bill = "ledger/i-c.json"
    for why, data in {
        "an empty bill": b'{"version":1,"charges":[]}',
        "a bill of no bytes": b"",
        "a torn bill": b'{"version":1,"char',
        "a bill of a later gpucloud": b'{"version":99}',
        "a bill nested deep": b"[" * 5000,
        "a small bill": _bill(_charge("i-c", 0, 3, "0.01")),
        "a bill below zero": _bill(_charge("i-c", 0, 3, "-100")),
        "a bill of another time": _bill(_charge("i-c", -90, -80, "1.5")),
        "a bill that ends before it begins": _bill(_charge("i-c", 3, 0, "1.5")),
    }.items():
        yield why, lambda job, data=data: job.put(bill, data)
    for name in ("i-a", "i-b", "i-0", ""):
        yield (
            f"a refund for {name or 'nobody'}",
            lambda job, name=name: job.put(
                f"ledger/{name or 'outside_budget/x'}.json", _bill(_charge(name, 0, 5, "-50"))
            ),
        )
    page = json.dumps({"version": 1, "nodes": ["i-0", "i-a", "i-b", "i-c"], "charges": []}).encode()
    yield "a page that stands for all bills", lambda job: job.put("ledger/pages/000000.json", page)
    yield "a torn page", lambda job: job.put("ledger/pages/000000.json", page[:9])


def _of_intervals(job: Driven) -> Iterator[Claim]:
    old, a, b, c = job.honest.nodes
    intervals: dict[str, tuple[UsageInterval, ...]] = {
        "no machine was ever there": (),
        "only those that live": (a, b),
        "the first hour's machine was never there": (a, b, c),
        "they came just now": (old, *(replace(one, launched_at=_NOW) for one in (a, b)), c),
        "they came when they were left": (old, *(replace(one, launched_at=_START + _HOUR) for one in (a, b)), c),
        "they will come": (old, *(replace(one, launched_at=_UNTIL) for one in (a, b)), c),
        "they ended at once": tuple(replace(one, ended_at=one.launched_at) for one in (old, a, b, c)),
        "they ended before they came": tuple(replace(one, ended_at=_START - 90 * _HOUR) for one in (old, a, b, c)),
        "the cloud took them in their first hour": tuple(
            replace(one, ended_at=_START + _HOUR / 2, end_cause=EndCause.INTERRUPTED) for one in (old, a, b, c)
        ),
        "they are missed for long": tuple(replace(one, missing_at=_START) for one in (old, a, b, c)),
        "all is charged": tuple(replace(one, charged=True) for one in (old, a, b, c)),
        "nothing is charged, and nothing lasted": tuple(
            replace(one, charged=False, ended_at=one.launched_at) for one in (old, a, b, c)
        ),
        "they are cheap": tuple(replace(one, pool=_CHEAP) for one in (old, a, b, c)),
        "they are others": tuple(replace(one, node_id=f"i-f{n}", pool=_CHEAP) for n, one in enumerate((old, a, b, c))),
    }
    for why, nodes in intervals.items():
        yield why, lambda job, nodes=nodes: job.claim(nodes=nodes)


def _of_the_job(job: Driven) -> Iterator[Claim]:
    changes: dict[str, dict[str, object]] = {
        "a later end of what is paid": {"paid_until": _START + 900 * _HOUR},
        "an end of what is paid, long ago": {"paid_until": _START - _HOUR},
        "no end of what is paid": {"paid_until": None},
        "a lower cap": {"cap_usd_per_hour": Decimal("0.01")},
        "no cap": {"cap_usd_per_hour": Decimal(0)},
        "a cap below zero": {"cap_usd_per_hour": Decimal(-9), "left_usd_per_hour": Decimal(-9)},
        "a cheaper pool": {"pool": _CHEAP},
        "a dearer pool": {"pool": _DEAR, "cap_usd_per_hour": Decimal(98)},
        "a dearer successor": {"successor": Successor(pool=_DEAR, cap_usd_per_hour=Decimal(98), at=_NOW)},
        "no group": {"group": None},
        "torn down": {"torn_down": True},
        "ended well": {
            "status": JobStatus.SUCCEEDED, "exit_reason": ExitReason.SUCCEEDED, "torn_down": True, "ended_at": _START,
        },
        "nobody drives it": {"drives_itself": False},
        "a thousand orders acted on": {"order_number": 1000},
        "a lease without an end": {"lease_s": float("inf")},
        "no lease at all": {"lease_s": 0.0},
        "the farthest epoch": {"epoch": COUNTED - 2},
        "an epoch beyond all": {"epoch": COUNTED},
    }  # fmt: skip
    for why, one in changes.items():
        yield why, lambda job, one=one: job.claim(**one)


def _of_all(job: Driven) -> Iterator[Claim]:
    old, a, b, c = job.honest.nodes
    first = codec.to_json(job.left).encode()
    yield "the state as its user left it", lambda job: job.put("state.json", first)
    bare = codec.to_json(replace(job.left, nodes=(), attempts=(), paid_until=None, epoch=0)).encode()
    yield "the state before its first machine", lambda job: job.put("state.json", bare)

    def emptied(job: Driven) -> None:
        job.put("ledger/i-c.json", b'{"version":1,"charges":[]}')
        job.claim(nodes=(), cap_usd_per_hour=Decimal(0), group=None, torn_down=True, paid_until=None)

    def paid_by_another(job: Driven) -> None:
        job.put("ledger/i-x.json", _bill(_charge("i-x", 0, 5, "7")))
        job.claim(nodes=(_interval("i-x", 5),))

    def paid_and_forgotten(job: Driven) -> None:
        for one in ("i-a", "i-b"):
            job.put(f"ledger/{one}.json", _bill(_charge(one, 0, 5, "2.5")))
        job.claim(nodes=(old, c))

    def billed_small(job: Driven) -> None:
        for one in ("i-a", "i-b"):
            job.put(f"ledger/{one}.json", _bill(_charge(one, 0, 5, "0.001")))
        job.claim(nodes=tuple(replace(one, charged=True, ended_at=_NOW) for one in (old, a, b, c)))

    def one_bill_for_two(job: Driven) -> None:
        job.put("ledger/i-a.json", _bill(_charge("i-b", 0, 5, "2.5")))
        job.claim(nodes=(old, replace(a, charged=True), replace(b, charged=True), c))

    yield "all of it emptied", emptied
    yield "a bill for a machine that came just now", paid_by_another
    yield "honest bills, and no machines", paid_and_forgotten
    yield "small bills for those that live", billed_small
    yield "one bill for two", one_bill_for_two


def verdicts(job: Driven) -> Iterator[tuple[str, str, list[str]]]:
    """Make every claim, and yield it with each thing that is worse for it: `budget`, `sum` or `shut-off`, and how."""
    honest = job.reckoned()
    for why, make in claims(job):
        job.restore()
        try:
            make(job)
        except StoreError as error:
            yield why, "written", [f"it could not be written: {error}"]
            continue
        try:
            found = job.reckoned()
        except (GpucloudError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            yield why, "sum", [f"the user is kept from his job: {error}"]
            continue
        yield why, "budget", found.budget_changed(honest)
        yield why, "sum", found.sums_lowered(honest)
        yield why, "shut-off", found.shutdowns_raised(honest)


def _state(*nodes: UsageInterval) -> JobState:
    return state(
        pool=_POOL, group=_GROUP, nodes=nodes, order_number=1, paid_until=_UNTIL,
        status=JobStatus.RUNNING,
    )  # fmt: skip


def _interval(node_id: str, begins: float, ends: float | None = None, *, charged: bool = False) -> UsageInterval:
    at = None if ends is None else _START + ends * _HOUR
    return UsageInterval(
        node_id=node_id, pool=_POOL, launched_at=_START + begins * _HOUR, ended_at=at, charged=charged, prepared=True
    )


def _charge(node_id: str, begins: float, ends: float, usd: str) -> Charge:
    span = {"start": _START + begins * _HOUR, "end": _START + ends * _HOUR}
    return Charge(node_id=node_id, attempt=1, usd_per_hour=Decimal("0.5"), usd=Decimal(usd), **span)


def _bill(*charges: Charge) -> bytes:
    return json.dumps({"version": 1, "charges": [codec.plain(one) for one in charges]}).encode()
