"""One process with one job: the lease, the order, the machines, until there is nothing left to do, and back again.

Every entrance comes by here: `train`, `up`, `down`, `budget`, `reconcile` for one job or all, a CI tick, a machine that
drives its own job. What is to be done stands in the order and the state alone; an entrance says who it is, whether it
gives another order first, and whether it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from gpucloud.domain.errors import GpucloudError, LeaseHeld, RunIsOver
from gpucloud.domain.state.order import Order, is_closed
from gpucloud.domain.state.state import ExitReason, JobState
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.seen import OUTSIDE, Supervising
from gpucloud.usecases.jobstore.lease import Lease, take
from gpucloud.usecases.jobstore.orders import Given, Orders
from gpucloud.usecases.services import Services, StoreClock, Watcher
from gpucloud.usecases.supervise.loop import Supervisor, supervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """A start of the job: the order that it gives over the one that it has read, and the state as it goes on."""

    order: Order
    over: Given
    spec: bytes
    adopt: Callable[[JobState], JobState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one process needs to supervise one job.

    `asked` is called at every pass: it returns why the user at this terminal wants the job to end, which becomes an
    order, and raises where he leaves. `left` hears how the job was known to stand when the session failed.
    """

    world: Services
    orders: Orders
    watcher: Watcher
    who: Supervising = OUTSIDE
    asked: Callable[[], ExitReason | None] = lambda: None
    left: Callable[[JobState], None] = lambda _: None

    def run(self, entering: Entering | None = None) -> JobState:
        """Supervise the job until nothing is left to do for its order, and return the state then.

        Raises LeaseHeld while another supervisor has it; OrderChanged, RunIsOver instead of `entering`; CannotLeave
        where the job was to be left to machines that cannot drive it.
        """
        with self._held(entering) as one:
            return one.run()

    def settle(self) -> JobState:
        """Make one pass, from nothing but what is stored and seen; return the state then. Raises LeaseHeld."""
        with self._held(None) as one:
            one.settle()
            return one.lease.state

    def end_unsaved(self, why: str | None = None) -> JobState:
        """End the job as it stands and its machines at once, and say why; return the state then. Raises LeaseHeld."""
        with self._held(None, saves=False) as one:
            if why is not None:
                self.watcher.story(f"{why}\nending the machines without a last save")
            return one.run()

    @contextmanager
    def _held(self, entering: Entering | None, *, saves: bool = True) -> Iterator[Supervisor]:
        world = replace(self.world, clock=StoreClock(self.world.clock, self.world.jobs, self.watcher.story))
        orders = replace(self.orders, clock=world.clock)
        who = replace(self.who, began_at=world.clock.now(), saving=world.saving)
        with take(world.jobs, world.clock, node=self.who.node) as lease:
            order = orders.acted_on().order if entering is None else _enter(entering, orders, lease)
            if not saves and not lease.state.status.ended:
                lease.write(transitions.abandon(lease.state, world.clock.now(), order.budget_usd, world.job.outputs))
            with supervisor(world, who, orders, lease, self.watcher, self.asked) as one, self._telling(lease):
                if not who.node:
                    one.begin()
                yield one

    @contextmanager
    def _telling(self, lease: Lease) -> Iterator[None]:
        try:
            yield
        except LeaseHeld:
            raise
        except GpucloudError:
            self.left(lease.state)
            raise


def _enter(entering: Entering, orders: Orders, lease: Lease) -> Order:
    """The job is ours before its order changes: whoever is refused has ordered nothing."""
    if is_closed(entering.over.order, lease.state):
        raise RunIsOver(f"{lease.state.job} ended just now", hint="the same command again starts another run")
    given = orders.give(entering.order, entering.over)
    orders.jobs.keep_spec(entering.spec)
    orders.jobs.keep_code_of(given.order, entering.over.order)
    lease.write(entering.adopt(lease.state))
    return given.order
