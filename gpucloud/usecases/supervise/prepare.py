"""Making nodes ready in the background, bootstrap and code, and writing to their agents what is wanted of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import PurePosixPath

from gpucloud.domain.errors import GateRefused, GpucloudError, HostUnreachable, NodeError, SetupFailed, StoreError
from gpucloud.domain.job.code import beside, is_name
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.node.bootstrap.wanted import Wanted, with_driver
from gpucloud.domain.node.launch import launch_of
from gpucloud.domain.node.member import (
    LOOK,
    AttemptStart,
    FreePorts,
    Place,
    attempt_secret,
    candidates,
    common_port,
    parse_free,
)
from gpucloud.domain.node.node import GroupView, Node
from gpucloud.domain.node.status import Desired, Launch, Status, Stop, desired_to_json
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import Attempt, JobState
from gpucloud.domain.supervision.quarantine import BootstrapTry
from gpucloud.domain.supervision.quarantine import Prepared as Ended
from gpucloud.domain.supervision.snapshot import Readiness
from gpucloud.domain.untrusted import masked, words_of
from gpucloud.ports import Shell
from gpucloud.usecases.services import Services, Watcher
from gpucloud.usecases.supervise.agents import AgentWriter, NodeRecords
from gpucloud.usecases.supervise.bootstrap import Bootstrapped, bootstrap
from gpucloud.usecases.supervise.needs import JobData, builds_in_code, of_node, wanted_for

_NOWHERE = "unlisted.invalid"  # a name that leads to no machine (RFC 2606)
_SHOWN_BYTES = 300
_UNANSWERED_FOR = timedelta(seconds=10)
_ASKED_S = 10.0
_WORTH_TELLING_S = 2.0
_SETTLED_WITHIN = timedelta(seconds=15)
_SETTLED_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A node that is ready for attempts; `code` is where its copy of the code lies."""

    bootstrapped: Bootstrapped
    code: str


def ready_line(seconds: tuple[tuple[str, float], ...]) -> str | None:
    """Return how long a node took to be ready, by phase; None where it was quick."""
    whole = sum(took for _, took in seconds)
    if whole < _WORTH_TELLING_S:
        return None
    parts = ", ".join(f"{name} {took:.1f}" for name, took in seconds if took >= 0.05)
    return f"ready in {whole:.1f} s ({parts})"


def free_ports(shell: Shell, node: Node, python: str, asked: tuple[int, ...]) -> FreePorts:
    """Return which of these TCP ports are free on the node now, as its Python says. Raises NodeError."""
    done = shell.host(node).run((python, "-c", LOOK, *map(str, asked)), timeout_s=_ASKED_S)
    said = done.stdout.strip()
    found = parse_free(said.decode(errors="replace"), asked) if done.exit_code == 0 else None
    if found is not None and found.free:
        return found
    words = " ".join((done.stderr.strip() or said)[-_SHOWN_BYTES:].decode(errors="replace").split())
    raise NodeError(f"{node.id}: no free port: {words}", hint="gpucloud ssh, and see its Python")


@dataclass(slots=True)
class Bootstrapper:
    """Prepares nodes beside everything else, and knows what each is to be told."""

    services: Services
    watcher: Watcher
    pool: ThreadPoolExecutor
    syncs: ThreadPoolExecutor
    data: JobData
    records: NodeRecords
    agent_writer: AgentWriter
    tries: list[BootstrapTry] = field(default_factory=list)
    """Every try that ended, in this order."""
    _begun: dict[str, datetime] = field(default_factory=dict)
    _work: dict[str, Future[Prepared]] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(default_factory=dict)
    _unanswered: dict[str, datetime] = field(default_factory=dict)
    """Since when a node that is to name a port gives no answer."""

    def see(self, group: GroupView) -> None:
        """Remember where the nodes are."""
        self._nodes.update({node.id: node for node in group.nodes})

    def start(self, node_id: str, gpu: str | None) -> None:
        """Begin to prepare the node, by a job that pays for GPUs of this model; nothing happens when that has begun."""
        if node_id not in self._work:
            self._begun[node_id] = self.services.clock.now()
            self._work[node_id] = self.pool.submit(self._prepare, self._nodes[node_id], gpu)

    def forget(self, node_id: str) -> None:
        """Prepare the node again when it is asked for next: its agent does not answer."""
        self._work.pop(node_id, None)
        self._unanswered.pop(node_id, None)
        self.agent_writer.forget(node_id)

    def try_again(self, node_id: str, *, ends: bool) -> None:
        """Prepare again, when it is asked for next, a node that the open attempt needs, and say why.

        Where the attempt `ends`, a node that cannot be told so is ended when its end is overdue.
        """
        limit = format_span(self.services.rules.limits.overdue)
        until = f" for {limit} at the most, then its outputs come home and it is ended" if ends else ""
        self.watcher.story(f"{node_id} could not be prepared: {self.error(node_id)}; it works on, trying again{until}")
        self.forget(node_id)

    @property
    def busy(self) -> bool:
        """Whether a preparation goes on, or a node is being told what is wanted."""
        return self.agent_writer.busy or any(not work.done() for work in self._work.values())

    def settle(self) -> None:
        """Wait for what is under way on the nodes, though not for minutes: it is no more wanted."""
        deadline = self.services.clock.now() + _SETTLED_WITHIN
        while self.busy and self.services.clock.now() < deadline:
            self.services.clock.sleep(_SETTLED_LOOK_S)

    def readiness(self, node_id: str) -> Readiness:
        """Return how far the node is. A fault of ours in its preparation is raised here."""
        work = self._work.get(node_id)
        if work is None:
            return Readiness.NO
        if not work.done():
            return Readiness.PREPARING
        error = work.exception()
        if error is not None and not isinstance(error, GpucloudError):
            raise error
        return Readiness.READY if error is None else Readiness.FAILED

    def error(self, node_id: str) -> str | None:
        """Return why the node could not be prepared, and what to do about it."""
        error = self._error(node_id)
        if error is None:
            return None
        hint = error.hint if isinstance(error, GpucloudError) else None
        return self._masked(f"{error}; hint: {hint}" if hint else str(error))

    def refused(self, node_id: str) -> str | None:
        """Return why the gate refused the node; None for any other failure, and none."""
        error = self._error(node_id)
        return error.message.removeprefix(f"{node_id}: ") if isinstance(error, GateRefused) else None

    def setup_failed(self, node_id: str) -> str | None:
        """Return what of the job's setup failed there twice, in one line; None for any other failure, and none."""
        error = self._error(node_id)
        return self._masked(error.message) if isinstance(error, SetupFailed) else None

    def failed_setup(self) -> tuple[str, bytes] | None:
        """Return the last lines and the log of a setup that failed twice on a machine; None where none did."""
        failed = (error for work in self._work if isinstance(error := self._error(work), SetupFailed))
        found = next(failed, None)
        return (self._masked(found.shown), self._masked(found.log).encode()) if found is not None else None

    def unreachable(self, node_id: str) -> bool:
        """Whether the node could not be prepared because it did not answer."""
        return isinstance(self._error(node_id), HostUnreachable)

    def has_heard(self, node: Node, status: Status | None, state: JobState) -> bool:
        """Whether the node's agent says that it has read what is wanted of it."""
        if status is None or self.readiness(node.id) is not Readiness.READY:
            return False
        return status.desired_sha256 == hashlib.sha256(self._desired(node.id, state)).hexdigest()

    def is_being_told(self, node: Node, state: JobState) -> bool:
        """Whether what is wanted is on its way to the node's agent, which reads many times a second."""
        ready = self.readiness(node.id) is Readiness.READY
        return ready and self.agent_writer.is_on_its_way(node.id, self._desired(node.id, state))

    def tell(self, node_ids: tuple[str, ...], state: JobState) -> None:
        """Write what is wanted of the nodes to their agents; see `AgentWriter.tell`."""
        self.agent_writer.tell({node_id: (self._nodes[node_id], self._desired(node_id, state)) for node_id in node_ids})
        for node_id in node_ids:
            refusal = self.agent_writer.gave_up(node_id)
            if refusal is not None:
                self.agent_writer.forget(node_id)
                self._fail(node_id, refusal, since=self.services.clock.now())

    def code_on(self, node_id: str) -> str | None:
        """Return where the node's copy of the code lies, None while it is not prepared."""
        ready = self._ready(node_id)
        return ready.code if ready is not None else None

    def tree_on(self, node: Node, tree: str) -> str:
        """Return where that tree of the code lies on the node; the folder here may have been changed since.

        Whoever took the job over prepares no machine that is about to be interrupted: its files come all the same.
        """
        prepared = self.code_on(node.id)
        if prepared is not None:
            return beside(prepared, tree)
        if not is_name(tree):
            raise NodeError(f"{node.id} is not prepared again yet", hint=None)
        return f"{PurePosixPath('~', node.root, 'code', tree)}"

    def one_tree(self, node_ids: tuple[str, ...]) -> str | None:
        """Return the tree of the code that these prepared nodes have, by its hash.

        None where the folder was changed between them: ranks of one attempt run one code, so all are prepared again.
        """
        trees = {PurePosixPath(self._work[node_id].result().code).name for node_id in node_ids}
        if len(trees) == 1:
            return trees.pop()
        self.watcher.story("the code was changed while machines were prepared: all of them take it as it is now")
        for node_id in node_ids:
            self.forget(node_id)
        return None

    def made_of(self, node_id: str) -> Bootstrapped:
        """Return what the bootstrap of a prepared node gave: its Python, its lock record, how long each phase took."""
        return self._work[node_id].result().bootstrapped

    def known(self, node_id: str) -> Node | None:
        """Return the node as it was last listed, None if it never was."""
        return self._nodes.get(node_id)

    def node(self, node_id: str) -> Node:
        """Return the node as it was last listed."""
        return self._nodes[node_id]

    def meeting_port(self, number: int, node_ids: tuple[str, ...]) -> int | None:
        """Return a TCP port for attempt `number` that is free now on all of its nodes; None where one names none.

        One that answers something else is no longer prepared, as if that had been while it was made ready; so is one
        that gives no answer to this for long, though it may give others.
        """
        asked = candidates(f"{self.services.name} {number}", node_ids)
        look = self.agent_writer.pool.submit
        answers = [
            look(free_ports, self.services.shell, self._nodes[node_id], self.made_of(node_id).python, asked)
            for node_id in node_ids
        ]
        found = [self._answered(node_id, answer) for node_id, answer in zip(node_ids, answers, strict=True)]
        there = [ports for ports in found if ports is not None]
        return common_port(there) if len(there) == len(found) else None

    def _answered(self, node_id: str, answer: Future[FreePorts]) -> FreePorts | None:
        now = self.services.clock.now()
        since = self._unanswered.setdefault(node_id, now)
        try:
            ports = answer.result()
        except NodeError as error:
            if not isinstance(error, HostUnreachable) or now - since >= _UNANSWERED_FOR:
                self._fail(node_id, error, since=since)
            return None
        self._unanswered.pop(node_id)
        return ports

    def _fail(self, node_id: str, error: NodeError, *, since: datetime) -> None:
        """A node that was ready is not fit after all: what follows is what follows a failed preparation."""
        self._begun[node_id] = since
        self._unanswered.pop(node_id, None)
        failed: Future[Prepared] = Future()
        failed.set_exception(error)
        self._work[node_id] = failed
        self._note(node_id, Ended.SILENT if isinstance(error, HostUnreachable) else Ended.FAILED)

    def publish(self, pool: Pool, gpu: str | None) -> None:
        """Write down for machines that make themselves fit what is wanted of them now, where the cloud has such."""
        self.records.publish(self.needs, pool, gpu, self.watcher.story)

    def needs(self, code: str) -> Wanted:
        """Return what the job needs of any node where its code lies at `code`."""
        services = self.services
        wanted = wanted_for(
            services.job,
            package=services.package.sha256,
            code=code,
            secrets=services.secrets,
            store_url=services.store.url,
            power_off=services.power_off,
            data=self.data.wanted(),
        )
        wanted = replace(wanted, controller=services.controller)
        return with_driver(wanted, self._driver()) if wanted.machine is not None else wanted

    def _masked(self, text: str) -> str:
        """What a node says of a failure is kept in the state: a setup may have printed a secret."""
        hidden = words_of(self.services.secrets.values())
        return masked(text.encode("utf-8", "replace"), hidden).decode("utf-8", "replace")

    def _error(self, node_id: str) -> BaseException | None:
        work = self._work.get(node_id)
        return work.exception() if work is not None and work.done() else None

    def _prepare(self, node: Node, gpu: str | None) -> Prepared:
        try:
            host = self.services.shell.host(node)
            syncing = self.syncs.submit(host.sync, self.services.job.code, f"{node.root}/code")
            # The setup runs where the code is; without one, both go on side by side.
            before = syncing.result() if builds_in_code(self.services.job) else ""
            wanted = of_node(self.needs(before), self.services.job, gpu, node, self.services.store.url)
            done = bootstrap(
                host,
                wanted,
                self.services.package,
                self.services.clock,
                sets=self.services.data_sets,
                story=self.watcher.story,
                hide=self._masked,
            )
            self._keep(done, node.pool, gpu)
            code = syncing.result()
        except GateRefused:
            raise  # the node's own fault, which another one need not have
        except HostUnreachable:
            self._note(node.id, Ended.SILENT)
            raise
        except GpucloudError:
            self._note(node.id, Ended.FAILED)
            raise
        self._note(node.id, Ended.READY)
        for finding in done.findings:
            self.watcher.story(f"{node.id}: {finding}")
        took = ready_line(done.seconds)
        if took is not None:
            self.watcher.story(f"{node.id}: {took}")
        return Prepared(bootstrapped=done, code=f"{done.root}/{code.removeprefix(f'{node.root}/')}")

    def _note(self, node_id: str, how: Ended) -> None:
        over = self.services.clock.now()
        self.tries.append(BootstrapTry(node_id=node_id, begun_at=self._begun[node_id], over_at=over, how=how))

    def _keep(self, done: Bootstrapped, pool: Pool, gpu: str | None) -> None:
        """The first machine's record is the job's: a later one gets the same driver, where it can still be had."""
        if done.lock["machine"] is not None:
            with contextlib.suppress(StoreError):  # whoever supervises the job meets the store's faults
                self.services.jobs.keep_lock(done.lock)
                self.publish(pool, gpu)

    def _driver(self) -> str:
        with contextlib.suppress(StoreError):
            return self.services.jobs.driver()
        return ""

    def _desired(self, node_id: str, state: JobState) -> bytes:
        ready = self._ready(node_id)
        ahead = ready.bootstrapped.ahead if ready is not None else timedelta(0)
        return desired_for(node_id, state, self.services, self._place, ahead)

    def _place(self, member: str, reader: str, tree: str) -> Place:
        """Return where a member of an attempt of that tree is; what was synced since is another attempt's.

        Paths differ from node to node; of the others, which may be gone, only the address matters to the reader. One
        that ended long before this supervisor came is listed no more: nobody knows its address then, or needs it.
        """
        ready = self._ready(member) or self._work[reader].result()
        unlisted = replace(self._nodes[reader], id=member, private_address=_NOWHERE)
        return Place(
            node=self._nodes.get(member, unlisted),
            python=ready.bootstrapped.python,
            package=ready.bootstrapped.package_path,
            code=beside(ready.code, tree),
            root=ready.bootstrapped.root,
            image=ready.bootstrapped.image,
        )

    def _ready(self, node_id: str) -> Prepared | None:
        return self._work[node_id].result() if self.readiness(node_id) is Readiness.READY else None


# What a node's agent is told: its part in the open attempt, whether to end it, and until when it is paid.


def desired_for(
    node_id: str, state: JobState, services: Services, place: Callable[[str, str, str], Place], ahead: timedelta
) -> bytes:
    """Return the node's desired.json.

    `place` says where a member is, as this node is to read it, in an attempt of that tree. The agent goes by the node's
    clock, and on every cloud ends what it runs when its paid time ends. A cloud's machines have their cloud's clock, by
    which its schedule ends them; that of a host of one's own is `ahead` of ours, and its paid time is told by it.
    """
    attempt = state.attempt
    ranks = {member.node_id: member.rank for member in attempt.members} if attempt else {}
    launch, until = None, state.paid_until
    if attempt and node_id in ranks:
        places = tuple(place(member.node_id, node_id, attempt.tree) for member in attempt.members)
        launch = _launch(ranks[node_id], attempt, services, places)
    desired = Desired(
        epoch=state.epoch,
        launch=launch,
        stop=attempt.ordered if attempt and launch else Stop.NO,
        paid_until=until + ahead if until is not None and services.job.cloud.traits.owned else until,
    )
    return desired_to_json(desired).encode()


def _launch(rank: int, attempt: Attempt, services: Services, places: tuple[Place, ...]) -> Launch:
    start = AttemptStart(
        number=attempt.number,
        port=attempt.port,
        store_url=services.store.address,
        checkpoints=services.jobs.checkpoints,
        secret=attempt_secret(services.key, services.name, attempt.number),
        profile_steps=services.job.profile_steps,
        save=services.rules.limits.save,
        upload=services.rules.limits.upload,
    )
    return launch_of(rank, services.job, start, places, services.secrets)
