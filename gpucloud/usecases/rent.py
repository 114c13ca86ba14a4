"""Doing on the cloud: its group, level, shut-off and machines, and their end. Intent is written down first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import CleanupIncomplete, ProvisionError
from gpucloud.domain.state import NodeLife
from gpucloud.domain.strays import JOB, STORE
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import (
    Arm,
    ChangeBudget,
    Detach,
    Drill,
    Move,
    OnTheCloud,
    Provision,
    Replace,
    Resize,
    TearDown,
)
from gpucloud.domain.supervision.lives import with_lives
from gpucloud.domain.supervision.membership import quarantined
from gpucloud.ports import ClusterSpec
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.lease import Lease
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.world import Watcher, World

_LISTED_WITHIN = timedelta(seconds=60)
_LIST_AGAIN_S = 2.0


@dataclass(slots=True)
class Renter:
    """Rents one job's machines, and gives them back. Everything may be done twice."""

    world: World
    lease: Lease
    preparer: Preparer
    cashier: Cashier
    watcher: Watcher

    def act(self, action: OnTheCloud) -> None:
        """Do it, if the lease is still ours. Raises LeaseHeld, and the cloud's errors."""
        self.lease.confirm()  # time may have passed since it was decided, and another may have followed us
        state, group = self.lease.state, self.world.group
        name = state.group or ""
        match action:
            case Provision():
                self.provision()
            case Arm(until=until):
                self._arm(name, until)
            case ChangeBudget():
                self._change_budget(action)
            case Resize(size=size):
                group.resize(name, size, state.successor.pool if state.successor is not None else state.pool)
            case Move():
                self._move(action)
            case Detach(node_id=node_id):
                group.detach(name, node_id)
            case Replace(node_ids=node_ids):
                for node_id in node_ids:
                    group.terminate(name, node_id, bad=node_id in quarantined(state))
            case Drill(node_id=node_id):
                self.lease.write(replace(state, drilled=True))
                group.interrupt(name, node_id, notice=True)
            case TearDown():
                self._tear_down()

    def provision(self) -> None:
        """Have the free parts made, or brought up to date.

        The group's name and the image are in the books before anything is made: a teardown then finds it all.
        """
        self.preparer.data.wanted()  # data that cannot be read is said before a machine is paid
        state, provisioner = self.lease.state, self.world.provisioner
        region = state.pool.region
        images = dict(state.images)
        image = images.get(region) or provisioner.image(region)
        if image is not None:
            images[region] = image
        group = provisioner.group(self.world.cluster, region)
        self.lease.write(replace(state, group=group, images=tuple(sorted(images.items()))))
        self.preparer.publish(region, self.lease.state.gpu)  # the first machine may read it as soon as it is there
        provisioner.ensure(self._cluster(image), story=self.watcher.story)

    def _arm(self, group: str, until: datetime) -> None:
        """A state that promises more than the cloud enforces would be a lie: the cloud first; last, when it lowers."""
        promised = self.lease.state.paid_until
        if promised is not None and until < promised:
            self.lease.write(replace(self.lease.state, paid_until=until))
        self.world.group.arm(group, until)
        if self.lease.state.paid_until != until:
            self.lease.write(replace(self.lease.state, paid_until=until))

    def _change_budget(self, action: ChangeBudget) -> None:
        """The closer shut-off comes before the lower budget; a wish that is in the books is not wished any more."""
        if action.until is not None:
            self._arm(self.lease.state.group or "", action.until)
        state, changes = self.lease.state, {change.id for change in self.lease.state.budget_changes}
        news = tuple(change for change in action.changes if change.id not in changes)
        if news:
            self.lease.write(
                replace(
                    state,
                    budget_usd=action.budget_usd,
                    budget_changes=(*state.budget_changes, *news),
                    paid_until=action.until or state.paid_until,
                )
            )
        self.world.jobs.take_up(action.taken)

    def _move(self, action: Move) -> None:
        """In the same region the group stays; in another one it is made anew, when nothing is left of the old one."""
        state, world = self.lease.state, self.world
        new = world.provisioner.group(world.cluster, action.offer.pool.region)
        if state.group is not None and state.group != new:
            self._end_group(state.group)
        kept = state.group if state.group == new else None
        if kept is not None:  # an old listing may not have shown that machines were asked for in the pool that is left
            world.group.resize(kept, 0, action.offer.pool)
        self.lease.write(books.move(self.lease.state, action, kept, world.clock.now()))
        if kept is not None and self.lease.state.efa != state.efa:
            self.provision()  # machines of another shape need a template of their own
        elif kept is not None:
            self.preparer.publish(action.offer.pool.region, self.lease.state.gpu)

    def _tear_down(self) -> None:
        name = self.lease.state.group
        if name is not None:
            try:
                self._end_group(name)
                self.preparer.records.withdraw()
            except ProvisionError as error:
                raise self._incomplete(name, error) from error
        self.lease.write(replace(self.lease.state, torn_down=True, paid_until=None, group=None))

    def _end_group(self, name: str) -> None:
        """End the machines, bill them, and only then forget the group that lists them."""
        self.world.group.purge(name)
        self._bill(name)
        self.world.provisioner.destroy(name, story=self.watcher.story)

    def _cluster(self, image: str | None) -> ClusterSpec:
        pool = self.lease.state.pool
        return ClusterSpec(
            name=self.world.cluster,
            region=pool.region,
            zones=(pool.zone,),
            node_type=pool.instance_type,
            market=pool.market,
            tags=(*self.world.job.tags, (JOB, self.world.name), (STORE, self.world.store.url)),
            public_key=self.world.public_key,
            store=self.world.store.url,
            image=image,
            efa=self.lease.state.efa,
            unattended=self.world.order is not None,
            data=tuple(source for source, _ in self.world.job.data if source.startswith("s3://")),
        )

    def _bill(self, name: str) -> None:
        """Bill every machine of a group that was purged; one whose end the list never tells is charged up to now."""
        lives = self._last_lives(name)
        now = self.world.clock.now()
        lives = tuple(life if life.ended_at is not None else replace(life, ended_at=now) for life in lives)
        self.lease.write(self.cashier.settle(replace(self.lease.state, nodes=lives), now))

    def _last_lives(self, name: str) -> tuple[NodeLife, ...]:
        """Return the lives as the list tells them once it is up to date: for a while it may show what was so before."""
        deadline = self.world.clock.now() + _LISTED_WITHIN
        while True:
            lives = with_lives(self.lease.state.nodes, self.world.group.describe(name).nodes)
            if all(life.ended_at is not None for life in lives) or self.world.clock.now() >= deadline:
                return lives
            self.world.clock.sleep(_LIST_AGAIN_S)

    def _incomplete(self, name: str, error: ProvisionError) -> CleanupIncomplete:
        until = self.lease.state.paid_until
        alive = ", ".join(life.node_id for life in self.lease.state.alive)
        ends = f"; they end by themselves at {until:%H:%M:%S} UTC" if until else ""
        return CleanupIncomplete(
            f"group {name} could not be removed: {error}; may be alive: {alive or 'nothing known'}{ends}",
            hint=f"gpucloud down {self.world.name}",
            may_pass=error.may_pass,
        )
