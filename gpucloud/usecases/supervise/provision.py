"""Doing on the cloud: group, level, shut-off, machines and their end, from outside or by a machine of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal

from gpucloud.domain.errors import (
    CleanupIncomplete,
    CredentialsError,
    GpucloudError,
    Interrupted,
    LeaseHeld,
    ProvisionError,
)
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import Market, Resources
from gpucloud.domain.money.costs import drill_charges
from gpucloud.domain.node.node import GroupView
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state.order import UNDRILLED
from gpucloud.domain.state.state import UsageInterval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    CoolDown,
    Drill,
    Move,
    OnTheCloud,
    OpenAttempt,
    Provision,
    Relieve,
    Replace,
    Resize,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.capacity import NO_CAPACITY
from gpucloud.domain.supervision.membership import barred
from gpucloud.domain.supervision.self_driving import arming, most_machines, newest_of, tells_of
from gpucloud.domain.supervision.snapshot import Snapshot, left_on_hosts
from gpucloud.domain.supervision.strays import JOB, STORE, as_listed, ended
from gpucloud.ports import ClusterSpec, MarketData, NodeGroup
from gpucloud.usecases.jobstore.lease import Lease
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.usecases.services import Services, Watcher
from gpucloud.usecases.supervise.prepare import Bootstrapper

_LISTED_WITHIN = timedelta(seconds=60)
_LIST_AGAIN_S = 2.0
_ASK_AGAIN = timedelta(minutes=1)


@dataclass(slots=True)
class MachineProvisioner:
    """Rents one job's machines, and gives them back. Everything may be done twice."""

    services: Services
    lease: Lease
    bootstrapper: Bootstrapper
    tracker: SpendTracker
    watcher: Watcher
    _asked_at: datetime | None = None
    """When it was asked last whether this supervisor has another address by now."""
    _owed: str | None = None
    """The address that is still to be let in."""

    def act(self, action: OnTheCloud) -> None:
        """Do it, if the lease is still ours. Raises LeaseHeld, and the cloud's errors."""
        self.lease.confirm()  # time may have passed since it was decided, and another may have followed us
        state, group = self.lease.state, self.services.group
        name = state.group or ""
        match action:
            case Provision():
                self.provision()
            case Arm(until=until):
                self._arm(name, until)
            case Resize(size=size):
                self._tell_of(size)
                chosen = state.successor or state
                group.resize(name, size, chosen.pool, cap_usd_per_hour=self._cap(chosen.cap_usd_per_hour))
            case Move():
                self._move(action)
            case Relieve(node_id=node_id):
                self._tell_of(len(state.alive) + 1)
                group.relieve(name, node_id, cap_usd_per_hour=self._cap(state.cap_usd_per_hour))
            case Replace(node_ids=node_ids):
                for node_id in node_ids:
                    group.terminate(name, node_id, bad=node_id in barred(state))
            case Drill(node_id=node_id):
                self._drill(name, node_id)
            case TearDown():
                self._tear_down()

    def provision(self) -> None:
        """Have the free parts made, or brought up to date.

        The group's name and the image are in the state before anything is made: a teardown then finds it all.
        """
        self.bootstrapper.data.wanted()  # data that cannot be read is said before a machine is paid
        state, provisioner = self.lease.state, self.services.provisioner
        region = state.pool.region
        images = dict(state.images)
        image = images.get(region) or provisioner.image(region)
        if image is not None:
            images[region] = image
        group = provisioner.group(self.services.cluster, region)
        self.lease.write(replace(state, group=group, images=tuple(sorted(images.items()))))
        self.bootstrapper.publish(
            state.pool, self.lease.state.gpu
        )  # the first machine may read it as soon as it is there
        provisioner.ensure(self._cluster(image), story=self.watcher.story)

    def come_back(self, now: datetime) -> None:
        """Have the firewall let in this supervisor where it is now, if it has moved; asked once a minute."""
        lately = self._asked_at is not None and now - self._asked_at < _ASK_AGAIN
        if lately or self.services.moved_to is None or self.lease.state.group is None:
            return
        self._asked_at = now
        address = self.services.moved_to() or self._owed
        if address is None:
            return
        self._owed = address
        self.lease.confirm()
        image = dict(self.lease.state.images).get(self.lease.state.pool.region)
        try:
            self.services.provisioner.ensure(self._cluster(image), story=self.watcher.story)
        except (LeaseHeld, Interrupted):
            raise
        except GpucloudError as error:  # whatever it is: the machines train on, and this supervisor is theirs
            self.watcher.story(f"{address}, which this machine has by now, could not be let in (tried again): {error}")
        else:
            self._owed = None
            self.watcher.story(f"this machine's address is {address} by now: its SSH is let in from there")

    def _arm(self, group: str, until: datetime) -> None:
        """A state that promises more than the cloud enforces would be a lie: the cloud first; last, when it lowers.

        Whoever dies in between leaves a state that promises too little, and whoever is refused takes that back. Nothing
        is decided by it: each pass writes down what the cloud has armed.
        """
        promised = self.lease.state.paid_until
        lowers = promised is not None and until < promised
        drives = self.services.order is not None or (self.lease.state.drives_itself and not self.services.on_machine)
        try:
            if lowers:
                self.lease.write(replace(self.lease.state, paid_until=until))
            if drives and not lowers:
                self._write_arming(until)
            self.services.group.arm(group, until)
        except GpucloudError:
            self.lease.remember(replace(self.lease.state, paid_until=promised))
            raise
        if drives and lowers:
            self._write_arming(until)  # after it is so: what was armed before counts until then
        if self.lease.state.paid_until != until:
            self.lease.write(replace(self.lease.state, paid_until=until))

    def _drill(self, group: str, node_id: str) -> None:
        """Have the cloud take a machine. A drill that it refuses is over, and not the job's supervision.

        It is written down and charged before it is asked for, so that none is forgotten; what is refused is taken back.
        """
        jobs, number = self.services.jobs, len(self.lease.state.attempts)
        rates, what = self.services.terms.rates_in(self.lease.state.pool.region), f"drill-{number:06d}"
        charges = drill_charges(number, self.services.clock.now(), rates)
        self.lease.write(replace(self.lease.state, drilled=True))
        if charges:
            jobs.bill_outside_budget(what, charges)
        try:
            unknown = self.services.group.interrupt(group, node_id, notice=True)
        except (ProvisionError, CredentialsError) as error:
            hint = f" ({error.hint})" if error.hint else ""
            why = None if error.may_pass else f"{error}{hint}"
            self.lease.write(replace(self.lease.state, drilled=False, drill_refused=why))
            if charges:
                jobs.withdraw_outside_budget(what)
            if why is None:
                raise
            self.watcher.story(f"{UNDRILLED}: {why}")
        else:
            if unknown is not None:  # it counts, and is paid: a second one would take another machine
                self.watcher.story(f"drill: {unknown}")

    def _cap(self, usd_per_hour: Decimal) -> Decimal | None:
        """Return what the machine alone may cost: the cloud caps that, and not what is paid beside it."""
        return max(usd_per_hour - self.services.terms.extras_usd_per_hour, Decimal(0)) or None

    def _tell_of(self, machines: int) -> None:
        """Whatever machines are asked for that are to drive the job: an arming tells of so many of them before."""
        state = self.lease.state
        if self.services.order is None or state.paid_until is None:
            return
        most = max(machines, len(state.alive))
        wanted = arming(state, at=self.services.clock.now(), machines=most, until=state.paid_until)
        if most and not tells_of(newest_of(self.services.jobs.armings()), wanted):
            self.services.jobs.arm(wanted)

    def _write_arming(self, until: datetime) -> None:
        """What machines say of the time that they drive the job proves nothing: this is what it may cost."""
        state, nodes = self.lease.state, self.services.job.resources.nodes
        machines = most_machines(state, nodes)
        self.services.jobs.arm(arming(state, at=self.services.clock.now(), machines=machines, until=until))

    def close_armings(self) -> None:
        """Write down that from now on the machines that there are, or none, are seen from outside, and which lived.

        The cloud forgets those that have ended, and their own word for their lives would count for nothing.
        """
        if not self.services.jobs.armings():
            return
        now, state = self.services.clock.now(), self.lease.state
        listed = None
        if state.group is not None:
            listed = as_listed(replace(state, nodes=()), self.services.group.describe(state.group), now).nodes
        self.services.jobs.arm(arming(state, at=now, machines=0, until=now, listed=listed))

    def _move(self, action: Move) -> None:
        """In the same region the group stays; in another one it is made anew, when nothing is left of the old one."""
        state, services = self.lease.state, self.services
        new = services.provisioner.group(services.cluster, action.offer.pool.region)
        if state.group is not None and state.group != new:
            self._end_group(state.group)
        kept = state.group if state.group == new else None
        if kept is not None:  # an old listing may not have shown that machines were asked for in the pool that is left
            services.group.resize(kept, 0, action.offer.pool)
        self.lease.write(transitions.move(self.lease.state, action, kept, services.clock.now()))
        if kept is not None and self.lease.state.efa != state.efa:
            self.provision()  # machines of another shape need a template of their own
        elif kept is not None:
            self.bootstrapper.publish(action.offer.pool, self.lease.state.gpu)

    def _tear_down(self) -> None:
        name = self.lease.state.group
        if name is not None:
            try:
                self._end_group(name)
                self.bootstrapper.records.withdraw()
            except ProvisionError as error:
                raise self._incomplete(name, error) from error
        self.lease.write(replace(self.lease.state, torn_down=True, paid_until=None, group=None))

    def _end_group(self, name: str) -> None:
        """End the machines, bill them, and only then forget the group that lists them."""
        self.services.group.purge(name, keep=left_on_hosts(self.lease.state))
        self._bill(name)
        if self.lease.state.drives_itself:
            self.close_armings()
        self.services.provisioner.destroy(name, story=self.watcher.story)

    def _cluster(self, image: str | None) -> ClusterSpec:
        pool = self.lease.state.pool
        return ClusterSpec(
            name=self.services.cluster,
            region=pool.region,
            zones=(pool.zone,),
            node_type=pool.instance_type,
            market=pool.market,
            tags=(*self.services.job.tags, (JOB, self.services.name), (STORE, self.services.store.url)),
            public_key=self.services.public_key,
            store=self.services.store.url,
            image=image,
            efa=self.lease.state.efa,
            unattended=self.services.order is not None,
            data=tuple(source for source, _ in self.services.job.data if source.startswith("s3://")),
        )

    def _bill(self, name: str) -> None:
        """Bill every machine of a group that was purged; one whose end the list never tells is charged up to now."""
        intervals = self._last_intervals(name)
        now = self.services.clock.now()
        intervals = tuple(ended(interval, self.lease.state.paid_until, now) for interval in intervals)
        self.lease.write(self.tracker.settle(replace(self.lease.state, nodes=intervals), now))

    def _last_intervals(self, name: str) -> tuple[UsageInterval, ...]:
        """Return the lives as the list tells them once it is up to date: for a while it may show what was so before."""
        deadline = self.services.clock.now() + _LISTED_WITHIN
        while True:
            intervals = as_listed(self.lease.state, self.services.group.describe(name), self.services.clock.now()).nodes
            if all(interval.ended_at is not None for interval in intervals) or self.services.clock.now() >= deadline:
                return intervals
            self.services.clock.sleep(_LIST_AGAIN_S)

    def _incomplete(self, name: str, error: ProvisionError) -> CleanupIncomplete:
        until = self.lease.state.paid_until
        alive = ", ".join(interval.node_id for interval in self.lease.state.alive)
        which = "their processes" if self.lease.state.pool.market is Market.OWNED else "they"
        ends = f"; {which} end by themselves at {format_moment(until, self.services.clock.now())}" if until else ""
        return CleanupIncomplete(
            f"group {name} could not be removed: {error}; may be alive: {alive or 'nothing known'}{ends}",
            hint=f"gpucloud down {self.services.name}",
            may_pass=error.may_pass,
        )


# What a machine that drives its own job may do to its cloud: its group's level and nodes, and no later shut-off.


_OUTSIDE = "run `gpucloud train` outside"


class OwnGroup:
    """Implements `NodeGroup` for one group only, its shut-off never later than it is. Raises ProvisionError."""

    def __init__(self, groups: NodeGroup, own: str) -> None:
        self._groups = groups
        self._own = own

    def describe(self, group: str) -> GroupView:
        """Return the group as the cloud lists it now."""
        return self._groups.describe(self._checked(group))

    def arm(self, group: str, until: datetime) -> None:
        """Move the shut-off closer."""
        armed = self._groups.describe(self._checked(group)).armed_until
        if armed is None or until > armed:
            raise ProvisionError(f"{group}: a machine may not move its shut-off from {armed} to {until}", hint=_OUTSIDE)
        self._groups.arm(group, until)

    def resize(self, group: str, size: int, pool: Pool, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Set the level."""
        self._groups.resize(self._checked(group), size, pool, cap_usd_per_hour=cap_usd_per_hour)

    def relieve(self, group: str, node_id: str, *, cap_usd_per_hour: Decimal | None = None) -> None:
        """Count a node that is being interrupted no more."""
        self._groups.relieve(self._checked(group), node_id, cap_usd_per_hour=cap_usd_per_hour)

    def terminate(self, group: str, node_id: str, *, bad: bool = False) -> None:
        """End one node by choice."""
        self._groups.terminate(self._checked(group), node_id, bad=bad)

    def purge(self, group: str, *, keep: tuple[tuple[str, str], ...] = ()) -> None:  # noqa: ARG002
        """Refused: whoever ends all machines and waits for it is none of them."""
        raise ProvisionError(f"{group}: a machine cannot see its own group end", hint=_OUTSIDE)

    def interrupt(self, group: str, node_id: str, *, notice: bool) -> str | None:
        """Ask the cloud to take a node, as a drill."""
        return self._groups.interrupt(self._checked(group), node_id, notice=notice)

    def _checked(self, group: str) -> str:
        if group != self._own:
            raise ProvisionError(f"{group}: a machine of {self._own} may not touch it", hint=_OUTSIDE)
        return group


class OwnMarket:
    """Implements `MarketData` where nothing is bought: what machines cost, and no offer of others."""

    def __init__(self, market: MarketData) -> None:
        self._market = market

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:  # noqa: ARG002
        """Return none."""
        return ()

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        """Return the pool's price points that cover start..end, in order."""
        return self._market.prices(pool, start, end)


class OwnProvisioner:
    """Implements `Provisioner` where nothing can be made or removed: machines have no Terraform."""

    def __init__(self, own: str) -> None:
        self._own = own

    def group(self, name: str, region: str) -> str:  # noqa: ARG002  there is only one
        """Return the machine's own group."""
        return self._own

    def image(self, region: str) -> None:
        """Return None: what there is was chosen outside."""

    def ensure(self, spec: ClusterSpec, *, story: Callable[[str], None]) -> str:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{spec.name}: a machine cannot make its own group", hint=_OUTSIDE)

    def destroy(self, group: str, *, story: Callable[[str], None]) -> None:  # noqa: ARG002
        """Refused."""
        raise ProvisionError(f"{group}: a machine cannot remove its own group", hint=_OUTSIDE)


# The story of a shortage: pools that refuse are asked again and again, and only what changes is told.


_COMES_WITHIN = timedelta(seconds=10)


@dataclass(slots=True)
class Shortage:
    """Which pools have refused was told once each; a try is told when machines come of it, or are waited for."""

    told_until: datetime | None = None
    """Until when the machines are paid, as it was told last."""
    _refused: set[tuple[Pool, str]] = field(default_factory=set)
    _tries: dict[type[Action], tuple[Action, str]] = field(default_factory=dict)
    """What would be told of the try that goes on: the newest action of each kind."""
    _since: datetime | None = None
    _counted: int = 0
    _told: bool = False
    """Whether it was told that the refusing pools are asked again."""

    def told(self, action: Action, snapshot: Snapshot, nodes: int, line: str | None) -> tuple[str, ...]:
        """Return the lines of the story for an action of a job that wants so many nodes; `line` is the action's own.

        An `Arm` is given once the cloud has it. While an attempt goes on it is of its machines, and of no try.
        """
        news, counted = ((action, line),) if line else (), len(snapshot.group.counted)
        renews = isinstance(action, Arm) and snapshot.state.attempt is not None
        match action:
            case CoolDown(pool=pool, code=code):
                known = (pool, code) in self._refused
                self._refused.add((pool, code))
                self._tries.clear()
                return () if known else self._say(*news)
            case Move() | Arm() | Resize() if self._refused and not renews and not self._gives_back(action, snapshot):
                if isinstance(action, Move) or not self._tries:
                    self._tries.clear()
                    self._since, self._counted = snapshot.now, counted
                self._tries.update({type(one): (one, said) for one, said in news})
                return ()
            case Wait(why=why) if self._refused and not self._told and why.startswith(NO_CAPACITY):
                self._told = True
                return (f"{why}; until then only what changes is told",)
        late = self._since is not None and snapshot.now - self._since >= _COMES_WITHIN and snapshot.group.size > 0
        tries = tuple(self._tries.values()) if late or counted > self._counted else ()
        if tries:
            self._tries.clear()
        if isinstance(action, OpenAttempt) or counted >= nodes > 0:
            self._refused.clear()
            self._told = False
        return self._say(*tries, *news)

    def _say(self, *news: tuple[Action, str]) -> tuple[str, ...]:
        for action, _ in news:
            if isinstance(action, Arm):
                self.told_until = action.until
        return tuple(line for _, line in news)

    @staticmethod
    def _gives_back(action: Action, snapshot: Snapshot) -> bool:
        return isinstance(action, Resize) and action.size < snapshot.group.size and bool(snapshot.group.counted)
