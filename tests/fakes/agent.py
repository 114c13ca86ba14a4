"""Nodes without processes: the agent's own decisions over a clock that jumps, and a training that is only counted.

Everything that a node knows outlives whoever asks it, as on a machine: its package, its agent's files, its attempts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.agent.attempt import decide as agent
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Promise,
    commit_key,
    generation_bytes,
    generation_key,
    manifest_bytes,
)
from gpucloud.domain.errors import StoreError
from gpucloud.domain.node.hardware import GpuSample
from gpucloud.domain.node.node import Node, NodeState, Notice
from gpucloud.domain.node.status import (
    AttemptStatus,
    Desired,
    Launch,
    Outcome,
    Progress,
    RunState,
    Status,
    desired_from_json,
)
from gpucloud.ports import Clock
from gpucloud.store import ObjectStore
from gpucloud.store.checkpoints import newest_commit
from tests.fakes.node_group import FakeNodeGroup

BEAT = timedelta(seconds=0.5)
LONG = timedelta(seconds=15)
IDLE = timedelta(minutes=10)


@dataclass
class Part:
    """A node's part in one attempt, while it runs."""

    launch: Launch
    started_at: datetime
    saving: bool = False


@dataclass
class Machine:
    """What one node has, on its disk and running. `log` is what rank after rank wrote."""

    package: str | None = None
    agent: str | None = None
    desired: Desired | None = None
    sha256: str = ""
    epoch: int = 0
    newest: int = 0
    prepaid: agent.Prepaid | None = None
    part: Part | None = None
    attempt: AttemptStatus | None = None
    heartbeat: int = 0
    log: dict[int, bytes] = field(default_factory=dict)

    def take(self, data: bytes) -> None:
        """Obey a `desired.json`, unless its epoch is lower than the highest seen."""
        desired = desired_from_json(data)
        if desired.epoch >= self.epoch:
            self.desired, self.epoch, self.sha256 = desired, desired.epoch, hashlib.sha256(data).hexdigest()

    def end(self, outcome: Outcome) -> None:
        """End the part that runs."""
        assert self.attempt is not None
        self.part = None
        self.attempt = replace(self.attempt, state=RunState.EXITED, outcome=outcome, over_s=0.0)


@dataclass(frozen=True)
class Training:
    """What the nodes of a job do together: `steps` of `step_s` seconds, committed every `every` steps.

    `gpu_use` is how much each node's one GPU is used, in percent; None for nodes without one. `fails_at` is the step at
    which the script raises, until it is mended.
    """

    nodes: int = 2
    steps: int = 12
    every: int = 4
    step_s: float = 0.5
    gpu_use: int | None = None
    fails_at: int | None = None


class FakeFleet:
    """The machines of one node group. `resumed` holds each attempt's first step, and what was committed before it."""

    def __init__(self, clock: Clock, cloud: FakeNodeGroup, store: ObjectStore, training: Training) -> None:
        self.clock = clock
        self.training = training
        self.resumed: list[tuple[int, int, int]] = []
        self._cloud = cloud
        self._store = store
        self._machines: dict[str, Machine] = {}
        self._steps: dict[int, tuple[int, float]] = {}
        self._newest: Commit | None = None
        self._at = clock.now()

    @property
    def committed(self) -> int:
        """The newest step that is in a whole checkpoint, 0 before the first."""
        return self._newest.step if self._newest is not None else 0

    def machine(self, node_id: str) -> Machine:
        """Return the node's inside."""
        return self._machines.setdefault(node_id, Machine())

    def live(self, group: str) -> None:
        """Let the time pass on the group's nodes that has passed on the clock."""
        now = self.clock.now()
        if now <= self._at:
            return
        nodes = self._cloud.describe(group).nodes
        while self._at < now:
            self._at = min(now, self._at + self._stride())
            alive = {node.id: node for node in nodes if _is_alive(node, self._at)}
            for node_id in alive:
                self._decide(self.machine(node_id), self._notice(group, node_id))
            self._train(group, tuple(alive))

    def status(self, group: str, node_id: str) -> Status:
        """Return what the node's agent says now."""
        own = self.machine(node_id)
        own.heartbeat = int(self._at.timestamp() / BEAT.total_seconds())
        return Status(
            heartbeat=own.heartbeat,
            epoch=own.epoch,
            boot_id=node_id,
            notice=self._notice(group, node_id),
            attempt=own.attempt and replace(own.attempt, output=tuple((r, len(t)) for r, t in own.log.items())),
            desired_sha256=own.sha256,
            gpus=self._gpus(),
        )

    def _gpus(self) -> tuple[GpuSample, ...]:
        used = {"memory_used_mib": 1, "memory_mib": 2, "temperature": 50, "power": 100.0}
        use = self.training.gpu_use
        return (GpuSample(at=self._at, index=0, use=use, **used),) if use is not None else ()

    def _stride(self) -> timedelta:
        """Whole gangs are followed beat by beat; a rank that waits for its peers, and idle machines, in long steps."""
        running = sum(own.part is not None for own in self._machines.values())
        return BEAT if running == self.training.nodes else LONG if running else IDLE

    def _notice(self, group: str, node_id: str) -> Notice | None:
        at = self._cloud.notice(group, node_id)
        return Notice(action="terminate", at=at) if at is not None else None

    def _decide(self, own: Machine, notice: Notice | None) -> None:
        until = own.desired.paid_until if own.desired else None
        if until is None or own.prepaid is None or own.prepaid.until != until:
            own.prepaid = agent.Prepaid(until=until, heard_at=self._at) if until is not None else None
        action = agent.decide(
            agent.Snapshot(
                desired=own.desired,
                running=own.part.launch.attempt if own.part else None,
                newest=own.newest,
                notice=notice,
                prepaid=own.prepaid,
                now=self._at,
            )
        )
        match action:
            case agent.Start(launch=launch):
                self._start(own, launch)
            case agent.Save():
                own.part = own.part and replace(own.part, saving=True)
            case agent.Kill():
                own.end(Outcome.KILLED)
            case agent.PowerOff() | agent.Rest():
                pass

    def _start(self, own: Machine, launch: Launch) -> None:
        own.newest, own.log = launch.attempt, {int(dict(launch.env)["GPUCLOUD_RANKS"]): b""}
        own.part = Part(launch, self._at)
        own.attempt = AttemptStatus(
            attempt=launch.attempt,
            state=RunState.RUNNING,
            outcome=None,
            exit_code=None,
            progress=None,
            failed_rank=None,
        )

    def _train(self, group: str, alive: tuple[str, ...]) -> None:
        """Ranks go on together, or not at all: where one is gone, the others lose the connection."""
        number = max((own.part.launch.attempt for own in self._machines.values() if own.part), default=0)
        ranks = [own for own in self._machines.values() if own.part and own.part.launch.attempt == number]
        living = [self._machines[node_id] for node_id in alive if self._machines.get(node_id) in ranks]
        if not living:
            return
        if len(living) < len(ranks) or any(_ended(own, number) for own in self._machines.values()):
            for own in living:
                own.end(Outcome.FAILED)
        elif len(living) == self.training.nodes:
            self._step(group, number, living)

    def _step(self, group: str, number: int, ranks: list[Machine]) -> None:
        prefix = f"jobs/{group.removeprefix('gpucloud-')}/checkpoints"
        first, done = self._steps.get(number) or self._restored(number, prefix)
        saving = any(own.part is not None and own.part.saving for own in ranks)
        done = done if saving else min(done + BEAT.total_seconds() / self.training.step_s, self.training.steps)
        self._steps[number] = (first, done)
        over = done >= self.training.steps
        due = saving or over or int(done) % self.training.every == 0
        try:
            if due and int(done) > self.committed:
                self._commit(prefix, Commit(number, int(done)))
        except StoreError:  # full: what cannot be saved goes on until it is to leave
            if saving:
                for own in ranks:
                    own.end(Outcome.BARRED)
                return
        for own in ranks:
            self._tell(own, first, int(done))
            if self.training.fails_at == int(done):
                own.end(Outcome.FAILED)
            elif saving or over:
                own.end(Outcome.DONE if over else Outcome.LEFT)

    def _tell(self, own: Machine, first: int, step: int) -> None:
        assert own.attempt is not None
        told = own.attempt.progress.step if own.attempt.progress else first - 1
        for rank in own.log:
            own.log[rank] += b"".join(b"step %d\n" % n for n in range(told + 1, step + 1))
        progress = Progress(
            step=step,
            first_step=first,
            total_steps=self.training.steps,
            loss=1.0 / (step + 1),
            phase="train",
            committed_step=self.committed or None,
            step_seconds=self.training.step_s,
            age_s=0.0,
        )
        own.attempt = replace(own.attempt, progress=progress)

    def _restored(self, number: int, prefix: str) -> tuple[int, float]:
        """Begin a generation where the newest commit ends, as the library in the script does."""
        newest = newest_commit(self._store, prefix)
        step = newest[0] if newest else 0
        self.resumed.append((number, step + 1, self.committed))
        key = f"{prefix}/{generation_key(number)}"
        self._store.put(key, generation_bytes(base=self._newest, owner=str(number)), if_absent=True)
        return step + 1, float(step)

    def _commit(self, prefix: str, commit: Commit) -> None:
        manifest = Manifest(commit=commit, world=self.training.nodes, promise=Promise(), pieces=())
        self._store.put(f"{prefix}/{commit_key(commit)}", manifest_bytes(manifest), if_absent=True)
        self._newest = commit


def _is_alive(node: Node, at: datetime) -> bool:
    running = node.state is NodeState.RUNNING or (node.ended_at is not None and at < node.ended_at)
    return running and node.launched_at <= at


def _ended(own: Machine, number: int) -> bool:
    """Whether this rank of the attempt is over while others run."""
    return own.part is None and own.attempt is not None and own.attempt.attempt == number
