"""Doing: one action on the world and in the books. Intent is written down first; everything may be done twice."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.bootstrap.record import attempt_lock
from gpucloud.domain.errors import CleanupIncomplete, HostUnreachable, NodeError, ProvisionError, StoreError
from gpucloud.domain.job import Market
from gpucloud.domain.launch import workers_per_node
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.state import ExitReason, NodeLife
from gpucloud.domain.strays import JOB, STORE
from gpucloud.domain.supervision import books
from gpucloud.domain.supervision.action import (
    Action,
    Arm,
    ChangeBudget,
    CloseAttempt,
    CoolDown,
    Detach,
    Done,
    Drill,
    EndAttempt,
    Finish,
    Inspect,
    Move,
    NoteInterruptions,
    OpenAttempt,
    Pause,
    Prepare,
    Provision,
    QuarantineNodes,
    Replace,
    Resize,
    TearDown,
    Tell,
    Wait,
)
from gpucloud.domain.supervision.membership import all_silent, quarantined, somebody_answers
from gpucloud.domain.supervision.seen import Seen
from gpucloud.ports import ClusterSpec
from gpucloud.usecases.announced import Announced
from gpucloud.usecases.cashier import Cashier
from gpucloud.usecases.failure import last_words
from gpucloud.usecases.history import HistoryKeeper
from gpucloud.usecases.inspection import Inspector
from gpucloud.usecases.lease import Lease
from gpucloud.usecases.lookout import LogReader, read_node
from gpucloud.usecases.prepare import Preparer
from gpucloud.usecases.profiles import bring_profiles
from gpucloud.usecases.story import silence, tell_story
from gpucloud.usecases.world import Watcher, World

_LISTED_WITHIN = timedelta(seconds=60)
_LIST_AGAIN_S = 2.0


@dataclass(slots=True)
class Actor:
    """Carries decisions out for one job."""

    world: World
    lease: Lease
    preparer: Preparer
    inspector: Inspector
    cashier: Cashier
    logs: LogReader
    watcher: Watcher
    history: HistoryKeeper
    _told: set[Refusal] = field(default_factory=set)
    _silence: bool = False
    _announced: Announced = field(default_factory=Announced)

    def act(self, action: Action, seen: Seen) -> None:
        """Do it. Errors of the cloud and of nodes come through as GpucloudError."""
        self._tell_of_hosts(seen)
        self._tell_of_silence(seen)
        for news in self._announced.news(action, seen, self.world.rules.limits):
            self.watcher.story(news)
        line = tell_story(action, seen)
        if line:
            self.watcher.story(line)
        match action:
            case Provision() | Arm() | ChangeBudget() | Resize() | Move() | Detach() | Replace() | Drill() | TearDown():
                self._on_the_cloud(action)
            case Prepare(node_ids=node_ids):
                for node_id in node_ids:
                    self.preparer.start(node_id, self.lease.state.gpu)
            case Inspect():
                self.inspector.start(action, seen)
            case Tell(node_ids=node_ids):
                self._tell(node_ids)
            case (
                CoolDown()
                | OpenAttempt()
                | NoteInterruptions()
                | QuarantineNodes()
                | EndAttempt()
                | CloseAttempt()
                | Finish()
                | Pause()
            ):
                self._in_the_books(action, seen)
            case Wait() | Done():
                pass

    def _tell_of_hosts(self, seen: Seen) -> None:
        """Say which of the user's own hosts were passed over: another has taken their place, so no action tells it."""
        for refusal in seen.group.refusals:
            if refusal.fault is Fault.TRANSIENT and refusal.pool.market is Market.OWNED and refusal not in self._told:
                self._told.add(refusal)
                self.watcher.story(f"passed over: {refusal.message}")

    def _tell_of_silence(self, seen: Seen) -> None:
        """Say once that no machine answers, which may be our own line, and once that one does again."""
        silent = all_silent(seen, self.world.rules.limits)
        if silent is not self._silence and (silent or somebody_answers(seen)):
            self._silence = silent
            self.watcher.story(silence(seen) if silent else "machines answer again")

    def let_us_in(self) -> None:
        """Bring the group's free parts up to date: SSH may come from another address than when they were made."""
        state = self.lease.state
        if self.world.knows_our_address and state.group is not None and not state.status.ended:
            self._provision()

    def change_driver(self) -> None:
        """Have the job's machines drive it from now on, or no longer, as this start of it wants."""
        state = self.lease.state
        if self.world.order is None:
            self.preparer.records.withdraw_order()
        if state.group is not None and not state.status.ended:
            self._provision()

    def _on_the_cloud(
        self, action: Provision | Arm | ChangeBudget | Resize | Move | Detach | Replace | Drill | TearDown
    ) -> None:
        self.lease.confirm()  # time may have passed since it was decided, and another may have followed us
        state, group = self.lease.state, self.world.group
        name = state.group or ""
        match action:
            case Provision():
                self._provision()
            case Arm(until=until):
                self._arm(name, until)
            case ChangeBudget():
                self._change_budget(action)
            case Resize(size=size):
                group.resize(name, size, state.pool)
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

    def _in_the_books(
        self,
        action: CoolDown
        | OpenAttempt
        | NoteInterruptions
        | QuarantineNodes
        | EndAttempt
        | CloseAttempt
        | Finish
        | Pause,
        seen: Seen,
    ) -> None:
        state = self.lease.state
        match action:
            case CoolDown():
                self.lease.write(books.cool_down(state, action, seen.now))
            case OpenAttempt():
                port = self.preparer.free_port(action.node_ids[0])
                self._keep_lock(action)
                self.lease.write(books.open_attempt(state, action, port, seen.now))
            case NoteInterruptions():
                self.lease.write(books.note_interruptions(state, action))
            case QuarantineNodes():
                self.lease.write(books.quarantine(state, action, seen.now))
            case EndAttempt():
                self.lease.write(books.order_end(state, action, seen.now))
            case CloseAttempt():
                self._read_to_the_end(seen)
                self._explain(action, seen)
                self._bring_home(action, seen)
                self._bring_profiles(seen)
                self.lease.write(books.close_attempt(state, action, seen.now))
            case Finish():
                self.lease.write(books.finish(state, action, seen.now))
            case Pause(message=message):
                self.lease.write(replace(state, message=message))

    def _keep_lock(self, action: OpenAttempt) -> None:
        made = {node_id: self.preparer.made_of(node_id) for node_id in action.node_ids}
        locks = {node_id: one.lock for node_id, one in made.items()}
        seconds = {node_id: dict(one.seconds) for node_id, one in made.items()}
        self.world.jobs.keep_attempt_lock(action.number, attempt_lock(locks, seconds))

    def _provision(self) -> None:
        """The group's name and the image are in the books before anything is made: a teardown then finds it all."""
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

    def _move(self, action: Move) -> None:
        """In the same region the group stays; in another one it is made anew, when nothing is left of the old one."""
        state, world = self.lease.state, self.world
        new = world.provisioner.group(world.cluster, action.offer.pool.region)
        if state.group is not None and state.group != new:
            self._end_group(state.group)
        kept = state.group if state.group == new else None
        self.lease.write(books.move(self.lease.state, action, kept, world.clock.now()))
        if kept is not None and self.lease.state.efa != state.efa:
            self._provision()  # machines of another shape need a template of their own
        elif kept is not None:
            self.preparer.publish(action.offer.pool.region, self.lease.state.gpu)

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

    def _tell(self, node_ids: tuple[str, ...]) -> None:
        for node_id in node_ids:
            try:
                self.preparer.tell(node_id, self.lease.state)
            except HostUnreachable:
                continue  # the next pass sees it silent, or tells it then

    def _read_to_the_end(self, seen: Seen) -> None:
        attempt = seen.state.attempt
        alive = {node.id: node for node in seen.group.alive}
        for member in attempt.members if attempt else ():
            if member.node_id not in alive:
                continue
            try:
                host = self.world.shell.host(alive[member.node_id])
                while read_node(host, member.node_id, attempt, workers_per_node(self.world.job), self.logs)[1]:
                    pass  # a long output comes in pieces
                if attempt is not None:
                    self.history.look(host, attempt.number, last=True)
            except NodeError:
                continue  # gone meanwhile: what had been read of it is kept
        self.logs.flush()

    def _explain(self, action: CloseAttempt, seen: Seen) -> None:
        attempt = seen.state.attempt
        if attempt is None or action.reason is not ExitReason.USER_ERROR:
            return
        try:
            words = last_words(attempt, seen, self.world.jobs, self.world.shell)
        except NodeError:
            return
        if words:
            self.watcher.story(words)

    def _bring_home(self, action: CloseAttempt, seen: Seen) -> None:
        """The outputs lie on the node of rank 0; without it, there are none to bring."""
        attempt = seen.state.attempt
        first = attempt.members[0].node_id if attempt is not None else ""
        node = next((node for node in seen.group.alive if node.id == first), None)
        code = self.preparer.code_on(first)
        if action.reason.retried or node is None or code is None:
            return
        try:
            brought = self.world.outputs.bring_home(self.world.shell.host(node), code)
        except (NodeError, StoreError) as error:
            self.watcher.story(f"the outputs could not be brought home: {error}")
            return
        for path in brought:
            self.watcher.story(f"brought home: {path}")

    def _bring_profiles(self, seen: Seen) -> None:
        attempt = seen.state.attempt
        if self.world.job.profile_steps and attempt is not None:
            members = {member.node_id for member in attempt.members}
            nodes = tuple(node for node in seen.group.alive if node.id in members)
            for line in bring_profiles(self.world.outputs, self.world.shell, nodes, attempt.number):
                self.watcher.story(line)

    def _tear_down(self) -> None:
        name = self.lease.state.group
        if name is not None:
            try:
                self._end_group(name)
                self.preparer.records.withdraw()
            except ProvisionError as error:
                raise self._incomplete(name, error) from error
        self.lease.write(replace(self.lease.state, torn_down=True, paid_until=None, group=None))

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
            lives = books.with_lives(self.lease.state.nodes, self.world.group.describe(name).nodes)
            if all(life.ended_at is not None for life in lives) or self.world.clock.now() >= deadline:
                return lives
            self.world.clock.sleep(_LIST_AGAIN_S)

    def _incomplete(self, name: str, error: ProvisionError) -> CleanupIncomplete:
        until = self.lease.state.paid_until
        alive = ", ".join(life.node_id for life in self.lease.state.nodes if life.ended_at is None)
        ends = f"; they end by themselves at {until:%H:%M:%S} UTC" if until else ""
        return CleanupIncomplete(
            f"group {name} could not be removed: {error}; may be alive: {alive or 'nothing known'}{ends}",
            hint=f"gpucloud down {self.world.name}",
            may_pass=error.may_pass,
        )
