"""Doing on the cloud: group, level, shut-off, machines and their end, from outside or by a machine of the job.

And billing what is paid beside machines, and not of the budget.
"""

from __future__ import annotations

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
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.costs import Sundries, charges_of, drill_charges, saves_made, transfer_usd
from gpucloud.domain.money.ledger import ZERO
from gpucloud.domain.node.node import is_same_group
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.order import UNDRILLED
from gpucloud.domain.state.state import Attempt, JobState, UsageInterval
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
from gpucloud.ports import ClusterSpec
from gpucloud.store.contract import puts_of
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
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
        self.bootstrapper.publish(state.pool, self.lease.state.gpu)  # the first machine may read it at once
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
        self.lease.write(replace(self.lease.state, drilled=number))
        if charges:
            jobs.bill_outside_budget(what, charges)
        try:
            unknown = self.services.group.interrupt(group, node_id, notice=True)
        except (ProvisionError, CredentialsError) as error:
            hint = f" ({error.hint})" if error.hint else ""
            why = None if error.may_pass else f"{error}{hint}"
            self.lease.write(replace(self.lease.state, drilled=None, drill_refused=why))
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
        kept = state.group if state.group is not None and is_same_group(state.group, new) else None
        if state.group is not None and kept is None:
            self._end_group(state.group)
        if kept is not None:  # an old listing may not have shown that machines were asked for in the pool that is left
            services.group.resize(kept, 0, action.offer.pool)
        self.lease.write(transitions.move(self.lease.state, action, kept, services.clock.now()))
        if kept is not None and self.lease.state.efa != state.efa:
            self.provision()  # machines of another shape need a template of their own
        elif kept is not None:
            self.bootstrapper.publish(action.offer.pool, self.lease.state.gpu)

    def _tear_down(self) -> None:
        if (name := self.lease.state.group) is not None:
            try:
                self._end_group(name)
                self.bootstrapper.records.withdraw()
            except ProvisionError as error:
                raise self._incomplete(name, error) from error
        self.lease.write(replace(self.lease.state, torn_down=True, paid_until=None, group=None))

    def _end_group(self, name: str) -> None:
        """End the machines, bill them, and only then forget the group that lists them."""
        if self.lease.state.pool.market is Market.OWNED:  # what came to a host after it was cleared would stay there
            self.bootstrapper.settle()
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
        found, now = self._last_intervals(name), self.services.clock.now()
        intervals = tuple(ended(interval, self.lease.state.paid_until, now) for interval in found)
        self.lease.write(self.tracker.settle(replace(self.lease.state, nodes=intervals), now))

    def _last_intervals(self, name: str) -> tuple[UsageInterval, ...]:
        """Return the lives as the list tells them once it is up to date: for a while it may show what was so before."""
        deadline = self.services.clock.now() + _LISTED_WITHIN
        while True:
            intervals = as_listed(self.lease.state, self.services.group.describe(name), self.services.clock.now()).nodes
            if not replace(self.lease.state, nodes=intervals).alive or self.services.clock.now() >= deadline:
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


# The story of a shortage: pools that refuse are asked again and again, and only what changes is told.


_COMES_WITHIN = timedelta(seconds=10)
_NAMED = 4
"""Of those that refuse likewise; the others are counted."""


@dataclass(slots=True)
class Shortage:
    """Which pools have refused is told once: the first with its words, those that refuse likewise in one line after it.

    A try is told when machines come of it, or are waited for.
    """

    told_until: datetime | None = None
    """Until when the machines are paid, as it was told last."""
    _refused: set[tuple[Pool, str]] = field(default_factory=set)
    _likewise: dict[str, list[Pool]] = field(default_factory=dict)
    """Those that refused as another did, and of which nothing was told yet, by the code."""
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
                known, is_first = (pool, code) in self._refused, all(code != one for _, one in self._refused)
                self._refused.add((pool, code))
                self._tries.clear()
                if not known and not is_first:
                    self._likewise.setdefault(code, []).append(pool)
                return self._say(*news) if is_first else ()
            case Move() | Arm() | Resize() if self._refused and not renews and not self._gives_back(action, snapshot):
                if isinstance(action, Move) or not self._tries:
                    self._tries.clear()
                    self._since, self._counted = snapshot.now, counted
                self._tries.update({type(one): (one, said) for one, said in news})
                return ()
            case Wait(why=why) if self._refused and not self._told and why.startswith(NO_CAPACITY):
                self._told = True
                return (*self._of_others(), f"{why}; until then only what changes is told")
        late = self._since is not None and snapshot.now - self._since >= _COMES_WITHIN and snapshot.group.size > 0
        tries = tuple(self._tries.values()) if late or counted > self._counted else ()
        if tries:
            self._tries.clear()
        is_over = isinstance(action, OpenAttempt) or counted >= nodes > 0
        rests = isinstance(action, Wait) and action.why.startswith(NO_CAPACITY)
        others = self._of_others() if tries or news or is_over or rests else ()
        if is_over:
            self._refused.clear()
            self._told = False
        return (*others, *self._say(*tries, *news))

    def _of_others(self) -> tuple[str, ...]:
        """Return how many more refuse as the one that was told, a line for each way, and forget that they are many."""
        found, self._likewise = self._likewise, {}
        return tuple(_likewise_line(code, pools) for code, pools in found.items())

    def _say(self, *news: tuple[Action, str]) -> tuple[str, ...]:
        for action, _ in news:
            if isinstance(action, Arm):
                self.told_until = action.until
        return tuple(line for _, line in news)

    @staticmethod
    def _gives_back(action: Action, snapshot: Snapshot) -> bool:
        return isinstance(action, Resize) and action.size < snapshot.group.size and bool(snapshot.group.counted)


def _likewise_line(code: str, pools: list[Pool]) -> str:
    named, more = ", ".join(map(str, pools[:_NAMED])), len(pools) - _NAMED
    which = f"{named} and {more} more" if more > 0 else named
    verb = "1 more refuses" if len(pools) == 1 else f"{len(pools)} more refuse"
    return f"{verb} likewise ({code}), and {'is' if len(pools) == 1 else 'are'} excluded too: {which}"


# What an attempt used that the budget does not count is billed once, when it has ended.


@dataclass(frozen=True, slots=True, kw_only=True)
class SundryLedger:
    """Knows what an attempt used beside its machines. Only a store that costs something is asked about."""

    services: Services

    def bill(self, state: JobState, attempt: Attempt, sent: int) -> None:
        """Write the attempt's charges; `sent` are the bytes that came home. Raises StoreError."""
        rates = self.services.terms.rates_in(state.pool.region)
        if not rates.storage_usd_per_gib_month:
            return
        before = [one.ended_at for one in state.attempts if one.number < attempt.number and one.ended_at is not None]
        start, now = max(before, default=attempt.started_at), self.services.clock.now()
        puts, gets = self.services.tally.take()
        used = self._checkpoints(attempt)
        read, read_usd = self._read_from_afar(state, attempt)
        sundries = Sundries(
            attempt=attempt.number,
            start=start,
            end=max(start, now),
            puts=puts,
            gets=gets,
            sent=sent,
            read=read,
            read_usd=read_usd,
            **used,
        )
        self.services.jobs.bill_outside_budget(f"attempt-{attempt.number:06d}", charges_of(sundries, rates))

    def bill_sent(self, state: JobState, attempt: int, sent: int) -> None:
        """Write down the bytes that came home of an attempt which was closed before. Raises StoreError."""
        rates = self.services.terms.rates_in(state.pool.region)
        if sent and rates.storage_usd_per_gib_month:
            now = self.services.clock.now()
            charges = charges_of(Sundries(attempt=attempt, start=now, end=now, sent=sent), rates)
            self.services.jobs.bill_outside_budget(f"attempt-{attempt:06d}-outputs", charges)

    def _read_from_afar(self, state: JobState, attempt: Attempt) -> tuple[int, Decimal]:
        """Return the bytes and their price; a machine reads each set once, and those that took part before have it."""
        before = {member.node_id for one in state.attempts if one.number < attempt.number for member in one.members}
        new = sum(member.node_id not in before for member in attempt.members)
        found = [self.services.jobs.data_set(source) for source, _ in self.services.job.data]
        region = state.pool.region
        costing = [(one, usd) for one in found if one is not None and (usd := transfer_usd(one, region, new))]
        return sum(one.size for one, _ in costing) * new, sum((usd for _, usd in costing), ZERO)

    def _checkpoints(self, attempt: Attempt) -> dict[str, int]:
        jobs = self.services.jobs
        stored_checkpoints = StoredCheckpoints(
            store=jobs.store, prefix=jobs.checkpoints, keep=self.services.job.checkpoint.keep
        )
        found = [one for one in stored_checkpoints.standing() if one.found.manifest is not None]
        sizes = [piece.size for piece in found[0].found.manifest.pieces] if found and found[0].found.manifest else []
        return {
            "stored": sum(one.size or 0 for one in found),
            "saves": saves_made(attempt.first_step, attempt.last_step, tuple(one.commit.step for one in found)),
            "save_bytes": sum(sizes),
            "save_puts": sum(map(puts_of, sizes)) + 2,  # the manifest, and the list of what may be collected
        }
