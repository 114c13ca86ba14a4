"""One job as it stood at one moment, asked by every command that answers questions: what each says, and how it ends.

The commands are the real ones, over a store that holds the order, the state, the bills and the checkpoints of that
moment; nodes answer what they said then, and nothing reaches a network. Time stands still between two questions.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from unittest import mock

from gpucloud.adapters.home import Home
from gpucloud.adapters.transfer import sync
from gpucloud.domain.checkpoint.manifest import Commit, Counts, Manifest, Promise, commit_key, manifest_bytes
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.node.node import Node
from gpucloud.domain.node.status import RunState, Status, status_to_json
from gpucloud.domain.offer import Pool, PricePoint
from gpucloud.domain.state.order import sealed
from gpucloud.domain.state.state import CheckpointRef, JobState, Owner
from gpucloud.domain.supervision.self_driving import USUAL_TIME, arming
from gpucloud.domain.supervision.snapshot import Snapshot
from gpucloud.domain.supervision.transitions import record
from gpucloud.ports import Completed
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.supervise.session import Session
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.faults import process
from tests.faults.rig import JOB, Outside
from tests.faults.strikes import Strikes
from tests.prove.entrances import AnyPool, Composition, Decided, Listed, Moment, here, once_each

GENERATION = 7
"""Of the checkpoints that are laid: one attempt's, as a restore looks for them."""
_BEHIND = timedelta(seconds=20)
_HELD_FOR = timedelta(minutes=5)
_ARMED_BEFORE = timedelta(minutes=2)
_NEXT_LOOK_S = 3.0
_USUAL_PRICE = Decimal("0.40")


class Held(str, Enum):
    """Who has the job's lease at the moment."""

    NOBODY = "nobody"  # it was given back
    DIED = "died"  # its holder was last heard 20 s ago; the nodes have gone on since
    ELSEWHERE = "elsewhere"
    MACHINE = "machine"  # one of the job's own, which drive it
    HANDED = "handed over"  # to them, 20 s ago, and none has taken it yet

    @property
    def is_free(self) -> bool:
        """Whether anybody may take the job now."""
        return self in (Held.NOBODY, Held.DIED, Held.HANDED)

    @property
    def is_machines(self) -> bool:
        """Whether the job's machines were told to drive it."""
        return self in (Held.MACHINE, Held.HANDED)

    @property
    def is_behind(self) -> bool:
        """Whether the nodes have gone on since the state was written."""
        return self in (Held.DIED, Held.HANDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was typed, what came on both ways, the exit code, and the traceback of what nobody caught."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    fault: str | None = None


class Window:
    """Answers questions about moments, one after the other. Used as `with window() as …`."""

    def __init__(self, folder: Path) -> None:
        self._outside = Outside(folder)
        self._outside.market = self._prices = _OnePrice()
        self._outside.home.key(JOB).parent.mkdir(parents=True, exist_ok=True)
        self._outside.home.key(JOB).touch()
        self._known = KnownJob(name=JOB, store=self._outside.store.url, file=self._outside.file, cloud=Cloud.LOCAL)
        self._outside.home.remember(self._known)
        self._cloud = _Watched(self._outside, Strikes())
        self._clock = _Still()
        self._objects: dict[str, Any] = {}
        self.moment: Moment
        self.state: JobState

    def lay(self, moment: Moment, held: Held) -> None:
        """Have the job stand as at the moment, its lease held so."""
        outside, now = self._outside, moment.snapshot.now
        moment = here(moment, outside, Cloud.LOCAL)
        if held.is_machines:
            moment = replace(moment, order=replace(moment.order, unattended=USUAL_TIME))
        self.moment = moment
        outside.clock = self._clock = clock = _Still(now - _BEHIND if held.is_behind else now)
        outside.store = MemoryStore(clock)
        outside.cloud = Listed(moment.snapshot.group)  # type: ignore[assignment]
        outside.job = replace(moment.order.resolved, budget_usd=moment.order.file_budget_usd, cloud=Cloud.LOCAL)
        self._prices.usd_per_hour = _price_of(moment)
        self._cloud.clock, self._cloud.rules = clock, moment.rules  # type: ignore[assignment]
        self._cloud.nodes = _Nodes(moment, ahead=8 if held.is_behind else 0)
        jobs = JobStore(outside.store, JOB)
        jobs.put_order(sealed(moment.order), None)
        self.state = self._put_state(jobs, held)
        jobs.keep_spec(outside.file.read_bytes())
        clock.set(now)
        self._objects = dict(outside.store._objects)  # what a question may write is gone before the next one

    def _put_state(self, jobs: JobStore, held: Held) -> JobState:
        """Store the state with its bills and checkpoints; who is dead has not seen what is seen now."""
        snapshot = self.moment.snapshot
        state = snapshot.state if held.is_behind else record(snapshot)
        saved = _put_checkpoints(jobs, state, self._cloud.nodes)
        state = replace(state, checkpoint=saved, owner=_owner(held, snapshot))
        if held.is_machines and not state.status.ended:
            state = replace(state, drives_itself=True)
            until, at = state.paid_until or snapshot.now, snapshot.now - _ARMED_BEFORE
            jobs.arm(arming(state, at=at, machines=len(state.alive) or 1, until=until))
        state = replace(state, nodes=tuple(replace(interval, charged=False) for interval in state.nodes))
        state = SpendTracker(jobs, self._outside.market).settle(state, snapshot.now)
        jobs.create(state)
        return state

    @property
    def store(self) -> MemoryStore:
        """The store, as the job was laid there."""
        return self._outside.store

    @property
    def market(self) -> AnyPool:
        """What machines cost there."""
        return self._prices

    def ask(self, *words: str) -> Asked:
        """Type that, as the job was laid; JOB and FILE mean the job's name and its file."""
        outside = self._outside
        self._clock.set(self.moment.snapshot.now)
        self._put_back()
        typed = tuple({"JOB": JOB, "FILE": str(outside.file)}.get(word, word) for word in words)
        out, err, fault = io.StringIO(), io.StringIO(), None
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = process.run_main(typed)
            except Decided:
                pass
            except Exception:  # noqa: BLE001  (a user would see this traceback)
                fault = traceback.format_exc()
        return Asked(words=words, code=code, out=out.getvalue(), err=err.getvalue(), fault=fault)

    def _take(self, *_: object) -> None:
        """Make a pass in which nothing is to be done. LeaseHeld while somebody else has the job."""
        with take(JobStore(self.store, JOB), self._clock):
            pass
        self._put_back()

    def _take_and_stop(self, *_: object) -> None:
        self._take()
        raise Decided

    def _put_back(self) -> None:
        self.store._objects.clear()
        self.store._objects.update(self._objects)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Window]:
        """Have every command be composed over the moment; where one begins to act, it ends."""
        with (
            process.as_process(self._cloud),
            mock.patch.object(sys, "argv", list(sys.argv)),
            mock.patch.object(Session, "run", self._take_and_stop),
            mock.patch.object(Session, "end_unsaved", self._take_and_stop),
            mock.patch.object(Session, "settle", self._take),
            mock.patch.object(Home, "known", return_value=(self._known,)),
            mock.patch.object(sync, "make_tree", once_each(sync.make_tree)),
        ):
            yield self


@contextlib.contextmanager
def window() -> Iterator[Window]:
    """Give a window in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-window-") as folder, Window(Path(folder)).opened() as at:
        yield at


def _owner(held: Held, snapshot: Snapshot) -> Owner | None:
    since = snapshot.now - _HELD_FOR
    match held:
        case Held.NOBODY | Held.HANDED:
            return None
        case Held.DIED | Held.ELSEWHERE:
            return Owner(id="a", host="far-away", pid=71, started="then", since=since)
        case Held.MACHINE:
            node = snapshot.state.alive[0].node_id if snapshot.state.alive else "i-0"
            return Owner(id="b", host="ip-10-0-0-9", pid=9, started="then", since=since, node=node)


def _price_of(moment: Moment) -> Decimal:
    """Return the price at which the machines' lives come to about what was spent, within what may be paid."""
    now, intervals = moment.snapshot.now, moment.snapshot.state.nodes
    seconds = sum(
        max(60.0, ((interval.ended_at or now) - interval.launched_at).total_seconds()) for interval in intervals
    )
    price = moment.snapshot.spent_usd * 3600 / Decimal(seconds) if seconds else _USUAL_PRICE
    return min(price.quantize(Decimal("0.0001")), moment.snapshot.state.dearest_usd_per_hour) or _USUAL_PRICE


def _put_checkpoints(jobs: JobStore, state: JobState, nodes: _Nodes) -> CheckpointRef | None:
    """Store the checkpoint that the state knows, and a newer one that nodes tell of; return the first."""
    ref = state.checkpoint
    if ref is not None:
        ref = replace(ref, sha256=_commit(jobs, ref.step, ref.counts))
    if nodes.committed > (ref.step if ref is not None else 0):
        _commit(jobs, nodes.committed, ref.counts if ref is not None else Counts.STEPS)
    return ref


def _commit(jobs: JobStore, step: int, counts: Counts) -> str:
    commit = Commit(GENERATION, step)
    data = manifest_bytes(Manifest(commit=commit, world=1, promise=Promise(), pieces=(), counts=counts))
    jobs.store.put(f"{jobs.checkpoints}/{commit_key(commit)}", data)
    return hashlib.sha256(data).hexdigest()


class _OnePrice(AnyPool):
    """Every pool has had one price for ever."""

    usd_per_hour = _USUAL_PRICE

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        del pool, end
        return (PricePoint(since=start, usd_per_hour=self.usd_per_hour),)


class _Still(JumpingClock):
    """A clock that stands still, by which the next look of one who watches never comes: Ctrl-C does."""

    def sleep(self, seconds: float) -> None:
        if seconds >= _NEXT_LOOK_S:
            raise KeyboardInterrupt
        super().sleep(seconds)

    def set(self, now: datetime) -> None:
        """Have it be that time."""
        self._now = now


class _Nodes:
    """Implements `Shell`: nodes say what they said at the moment, so many steps `ahead`; some are silent.

    Whoever asks twice finds that the agent has written again.
    """

    def __init__(self, moment: Moment, ahead: int) -> None:
        snapshot = moment.snapshot
        self._said = {
            node.node.id: _ahead(node.status, ahead)
            for node in snapshot.nodes
            if not node.silent_for and not node.mute_for
        }
        self._asked = 0

    @property
    def committed(self) -> int:
        """The newest step that they tell to be saved, 0 for none."""
        parts = [status.attempt for status in self._said.values() if status is not None and status.attempt is not None]
        return max((part.progress.committed_step or 0 for part in parts if part.progress is not None), default=0)

    def host(self, node: Node) -> _Node:
        if node.id not in self._said:
            raise HostUnreachable(f"{node.id}: no answer")
        self._asked += 1
        status = self._said[node.id]
        return _Node(node, None if status is None else replace(status, heartbeat=status.heartbeat + self._asked))

    def close(self) -> None:
        """Nothing is open."""


class _Node:
    """Implements what of `Host` a question needs."""

    def __init__(self, node: Node, status: Status | None) -> None:
        self.node, self._status = node, status

    def run(self, _: tuple[str, ...]) -> Completed:
        said = status_to_json(self._status).encode() if self._status is not None else b""
        return Completed(exit_code=0 if said else 1, stdout=said, stderr=b"")


def _ahead(status: Status | None, steps: int) -> Status | None:
    """Return what the node says so many steps later, the half of them saved, at the end of its script at the most."""
    part = status.attempt if status is not None else None
    if status is None or part is None or part.progress is None or part.state is not RunState.RUNNING:
        return status
    told = part.progress
    step = told.step + steps if told.total_steps is None else max(told.step, min(told.total_steps, told.step + steps))
    saved = told.committed_step
    if saved is not None:
        saved = max(saved, min(step, saved + steps // 2))
    return replace(status, attempt=replace(part, progress=replace(told, step=step, committed_step=saved)))


class _Watched(Composition):
    """gpucloud as a process that asks composes it: its way to nodes ends here."""

    nodes: _Nodes

    def shell(self, *_: object) -> Any:
        return self.nodes
