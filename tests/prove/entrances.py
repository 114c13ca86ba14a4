"""One job as it stood at one moment, entered by every entrance: what each of them decides there, and what it says.

The entrances are those that users have: the command line itself, and the driver of a machine. Each goes its own way to
the one decision, over a store that holds the order and the state; what is seen of cloud and machines is what was seen
at that moment, and the money is reckoned anew from it. Nothing is done: an entrance stops where it has decided.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gpucloud.adapters.home import Home
from gpucloud.adapters.local.market import Devices, LocalMarket
from gpucloud.adapters.transfer import sync
from gpucloud.agent.drive import controller as driving
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.money.ledger import ZERO
from gpucloud.domain.node.node import NO_GROUP, GroupView
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.order import Order, opened, sealed, with_budget
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.domain.supervision.action import Action, Arm, ObeyOrder
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Rules, Snapshot
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise import session
from gpucloud.usecases.supervise.observe import Observer
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.faults import process
from tests.faults.rig import GROUP, JOB, Outside, Rigged
from tests.faults.strikes import Killed, Strikes

AWS = ("a machine of AWS", "a machine of AWS, budget lowered")
"""Entrances whose cloud lets them neither buy time nor move the shut-off."""
MACHINES = ("a machine", "a machine, budget lowered", *AWS)
"""Entrances that buy no time."""
PASSES = ("reconcile", "reconcile --all", "CI tick")
"""Entrances that want nothing of their own."""
_MOST = 4
ENTRANCES = (
    *PASSES,
    *MACHINES,
    "train",
    "train --keep",
    "train --drill",
    "train --detach",
    "up",
    "down",
    "budget lower",
    "budget higher",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was wanted, what was stored and seen, and the lengths that decisions went by."""

    order: Order
    snapshot: Snapshot
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """What became of one entrance: the order that stands then, what was decided from what, how it ended, what it said.

    `action` is None where nothing was decided: the entrance was refused, or left it to who has the job.
    """

    order: Order
    goal: Goal | None
    snapshot: Snapshot | None
    action: Action | None
    code: int
    said: str
    armed: tuple[datetime, ...] = ()
    gave_up: bool = False
    """Whether a machine ended its group without a decision: its job had ended."""


class Decided(Killed):
    """An entrance has decided; that it is no `Exception` takes it out of all that would try again."""


class Door:
    """Enters moments, one after the other; what a process needs is made once. Used as `with door() as …`."""

    def __init__(self, folder: Path) -> None:
        self._outside = Outside(folder)
        self._outside.market = AnyPool()
        self._outside.home.key(JOB).parent.mkdir(parents=True, exist_ok=True)
        self._outside.home.key(JOB).touch()
        self._outside.home.remember(
            KnownJob(name=JOB, store=self._outside.store.url, file=self._outside.file, cloud=Cloud.LOCAL)
        )
        self._cloud = Composition(self._outside, Strikes())
        self._taken: list[tuple[Goal, Snapshot, Action]] = []
        self._gave_up = False
        self._moment: Moment | None = None

    def enter(self, moment: Moment, entrance: str) -> Entered:
        """Enter the moment there, on a copy of what is stored."""
        moment = here(moment, self._outside, Cloud.AWS if entrance in AWS else Cloud.LOCAL)
        if entrance.endswith("lowered"):
            moment = replace(moment, order=_lowered(moment))
        self._moment, self._gave_up = moment, False
        self._taken.clear()
        group = self._store(moment)
        words = _words(entrance, moment, self._outside.file)
        code, said = (self._drive(), "") if entrance in MACHINES else _run(words)
        goal, snapshot, action = self._taken[-1] if self._taken else (None, None, None)
        found = JobStore(self._outside.store, snapshot.state.job if snapshot is not None else JOB).order()
        assert found is not None
        return Entered(
            order=opened(found[0]),
            goal=goal,
            snapshot=snapshot,
            action=action,
            code=code,
            said=said,
            armed=tuple(group.armed),
            gave_up=self._gave_up,
        )

    def _store(self, moment: Moment) -> Listed:
        outside = self._outside
        outside.clock = JumpingClock(moment.snapshot.now)
        outside.store = MemoryStore(outside.clock)
        outside.cloud = group = Listed(moment.snapshot.group)  # type: ignore[assignment]
        outside.job = replace(moment.order.resolved, budget_usd=moment.order.file_budget_usd, cloud=Cloud.LOCAL)
        self._cloud.clock, self._cloud.rules = outside.clock, moment.rules  # type: ignore[assignment]
        jobs = JobStore(outside.store, JOB)
        jobs.put_order(sealed(moment.order), None)
        jobs.create(moment.snapshot.state)
        jobs.keep_spec(outside.file.read_bytes())
        return group

    def _drive(self) -> int:
        """As the driver of a machine does once nobody has the job."""
        machine = SimpleNamespace(
            store=self._outside.store,
            clock=self._outside.clock,
            services=lambda _: self._cloud.on_machine(),
            end_group=lambda *_: setattr(self, "_gave_up", True),
        )
        driver = driving.Controller(machine=machine, node="i-1", notice=lambda: None)  # type: ignore[arg-type]
        with contextlib.suppress(Decided):
            driver._is_over(SimpleNamespace(name=JOB))  # type: ignore[arg-type]
        return 0

    @contextlib.contextmanager
    def opened(self) -> Iterator[Door]:
        """Have what is seen be what was seen at the moment, and sums follow from what was spent then."""
        with (
            process.as_process(self._cloud),
            mock.patch.object(sys, "argv", list(sys.argv)),
            mock.patch.object(driving, "tell", _nothing),
            mock.patch.object(session, "decide", self._decide),
            mock.patch.object(Observer, "observe", lambda own, *given: self._see(own, *given)),  # noqa: PLW0108
            mock.patch.object(SpendTracker, "spent_usd", self._spent),
            mock.patch.object(SpendTracker, "unproven_usd", return_value=ZERO),
            mock.patch.object(SpendTracker, "settle", lambda _, state, __: state),
            mock.patch.object(Home, "known", return_value=self._outside.home.known()),
            mock.patch.object(sync, "make_tree", once_each(sync.make_tree)),
        ):
            yield self

    @property
    def _now(self) -> Moment:
        assert self._moment is not None
        return self._moment

    def _spent(self, *_: object) -> Decimal:
        return self._now.snapshot.spent_usd

    def _decide(self, goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
        """A new order is obeyed first of all, with what that takes; the decision is what follows under it."""
        action = decide(goal, snapshot, rules)
        self._taken.append((goal, snapshot, action))
        obeys = goal.number > snapshot.state.order_number and isinstance(action, Arm | ObeyOrder)
        if obeys and len(self._taken) < _MOST:
            return action
        raise Decided

    def _see(self, own: Observer, state: JobState, goal: Goal) -> Snapshot:
        """Return what was seen, by a supervisor that goes by that state and goal."""
        snapshot, now = self._now.snapshot, self._now.snapshot.now
        payable = own._payable(state, snapshot.group, goal, now)
        late = goal.deadline_at is not None and now >= goal.deadline_at
        return replace(
            snapshot,
            state=state,
            group=own.services.group.describe(state.group) if state.group is not None else NO_GROUP,
            wanted_end=goal.end or (ExitReason.DEADLINE if late else None),
            payable_until=payable.until,
            payable_with_another=payable.with_another,
            lasts_until=payable.lasts_until,
        )


@contextlib.contextmanager
def door() -> Iterator[Door]:
    """Give a door in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-door-") as folder, Door(Path(folder)).opened() as at:
        yield at


def once_each(make: Callable[..., Path]) -> Callable[..., Path]:
    """Make each tree of code once: every time else a process looks whether it is still as it was."""
    made: dict[tuple[Path, str], Path] = {}

    def once(folder: Path, sha256: str, stored: Callable[[], bytes]) -> Path:
        if (folder, sha256) not in made:
            made[folder, sha256] = make(folder, sha256, stored)
        return made[folder, sha256]

    return once


def _run(words: tuple[str, ...]) -> tuple[int, str]:
    """Run the command line up to its decision; return its exit code and what it told."""
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        try:
            return process.run_main(words), told.getvalue()
        except Decided:
            return 0, told.getvalue()


def _nothing(*_: object) -> None:
    pass


def _words(entrance: str, moment: Moment, file: Path) -> tuple[str, ...]:
    """What is typed there; budgets are a little lower and higher than the job's own."""
    if entrance.startswith("budget"):
        usd, spent = moment.order.budget_usd, moment.snapshot.spent_usd
        other = usd + Decimal("1.5") if entrance.endswith("higher") else spent + (usd - spent) * Decimal("0.6")
        return ("budget", JOB, f"{other:.4f} USD")
    if entrance == "CI tick":
        return ("reconcile", str(file))
    first, *rest = entrance.split()
    return (first, JOB) if (first, rest) in (("reconcile", []), ("down", [])) else _with_file(first, rest, file)


def _lowered(moment: Moment) -> Order:
    """The order that came after, from a terminal that has not moved the shut-off yet."""
    order, spent = moment.order, moment.snapshot.spent_usd
    return with_budget(replace(order, number=order.number + 1), spent + (order.budget_usd - spent) * Decimal("0.1"))


def _with_file(first: str, rest: list[str], file: Path) -> tuple[str, ...]:
    return (first, *rest) if rest == ["--all"] else (first, str(file), *rest)


def here(moment: Moment, outside: Outside, cloud: Cloud) -> Moment:
    """The moment as that of the job here: names and folders are those of this process, all else is as it was."""
    job = replace(
        moment.order.resolved, name=JOB, source=outside.file, code=_code(outside), cloud=cloud, store=None, data=()
    )
    order = replace(
        moment.order, store=MemoryStore(outside.clock).url, job=JOB, base=JOB, host=outside.home.identity, resolved=job
    )
    return replace(moment, order=order, snapshot=replace(moment.snapshot, state=_free(moment.snapshot.state)))


def _code(outside: Outside) -> Path:
    """A folder of its own: each start pins its tree, and what is pinned lies beside it, in the home here."""
    folder = outside.file.parent / "code"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").touch()
    return folder


def _free(state: JobState) -> JobState:
    return replace(state, job=JOB, group=GROUP if state.group is not None else None, owner=None, nonce="")


class Listed:
    """Stands for the cloud's groups: one is listed as it was, and what is asked of it is noted."""

    def __init__(self, view: GroupView) -> None:
        self._view = view
        self.armed: list[datetime] = []

    def describe(self, _: str) -> GroupView:
        return self._view

    def arm(self, _: str, until: datetime) -> None:
        self.armed.append(until)
        self._view = replace(self._view, armed_until=until)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is asked of the cloud, and nothing was decided yet")


class AnyPool(LocalMarket):
    """The embedded market, with a price for every pool: a recorded state may be of any."""

    def __init__(self) -> None:
        super().__init__(devices=lambda: Devices(uuids=()))

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        if pool.instance_type.startswith("local."):
            return super().prices(pool, start, end)
        return (PricePoint(since=start, usd_per_hour=Decimal("0.40")),)


class Composition(Rigged):
    """gpucloud as one process composes it, by the rules of the moment."""

    rules: Rules = Rules()

    def unable(self, job: object) -> None:
        """Every machine can drive."""

    def services(self, *arguments: Any, **named: Any) -> Services:
        return replace(super().services(*arguments, **named), rules=self.rules)

    def on_machine(self) -> Services:
        """Return the world of a machine that drives the job."""
        return replace(self.services(self._outside.job, JOB), on_machine=True)
