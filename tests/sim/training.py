"""The ranks of one attempt, simulated: they step, save and leave together, and fail when one is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from gpucloud.agent.attempt.decide import Saving
from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.node.status import AttemptStatus, Outcome, Progress, RunState
from gpucloud.store.checkpoints import Checkpoints
from tests.sim.loom import Loom

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.store import Store


@dataclass(slots=True, kw_only=True)
class Script:
    """What the user's script does: steps of `step_s`, a save of `save_s` after every `every` of them."""

    steps: int
    step_s: float
    start_s: float
    every: int
    save_s: float

    def on(self, nodes: int, all_nodes: int) -> Script:
        """Return the same on a part of all nodes, where each step takes as many times longer."""
        return replace(self, step_s=self.step_s * all_nodes / nodes)


class Part:
    """One machine's part of an attempt: what the agent takes for a running attempt, and its folder."""

    def __init__(self, gang: Gang, machine: Machine, rank: int) -> None:
        self.number = gang.number
        self.folder = self
        self.path = None
        self.room = None  # it says nothing
        self.machine = machine
        self.rank = rank
        self.asked = False
        self.outcome: Outcome | None = None
        self._gang = gang

    @property
    def works(self) -> bool:
        """Whether its processes are there and get the processor."""
        return self.outcome is None and self.machine.alive and not self.machine.frozen

    def saving(self) -> Saving | None:
        """Return what a save takes, once there was one."""
        return self._gang.saving()

    def ask_to_stop(self, reason: str, at: datetime) -> None:
        self.asked = True

    def write_verdict(self, status: AttemptStatus) -> None:
        pass

    def abort(self) -> None:
        self.end(Outcome.KILLED)

    def kill(self, *, gently: bool = False) -> None:
        self.end(Outcome.KILLED)

    def end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome
            self._gang.ended(outcome)

    def advance(self, spare: frozenset[int]) -> AttemptStatus:
        return AttemptStatus(
            attempt=self.number,
            state=RunState.RUNNING if self.outcome is None else RunState.EXITED,
            outcome=self.outcome,
            exit_code=None,
            progress=self._gang.progress() if self.rank == 0 else None,
            failed_rank=self.rank if self.outcome is Outcome.FAILED else None,
            over_s=None if self.outcome is None else 0.0,
        )


class Gang:
    """All ranks of one attempt, over the checkpoint protocol of the in-script library."""

    def __init__(self, loom: Loom, dice: random.Random, number: int, size: int, script: Script, store: Store) -> None:
        self.number = number
        self.parts: list[Part] = []
        self.step = 0
        self.first_step = 0
        self.restored: int | None = None
        self.hung = False
        self.trained: Callable[[int], None] = lambda _: None
        self.committed: Callable[[Commit], None] = lambda _: None
        self.begun: Callable[[Gang], None] = lambda _: None
        self._loom = loom
        self._dice = dice
        self._size = size
        self._script = script
        self._checkpoints = Checkpoints(store, "jobs/job/checkpoints", keep=3)
        self._phase = "start"
        self._written_at = 0.0
        self.committed_step: int | None = None
        self._saving = False

    @property
    def running(self) -> bool:
        return any(part.outcome is None and part.machine.alive for part in self.parts)

    @property
    def left(self) -> bool:
        """Whether every rank saved and left."""
        return all(part.outcome is Outcome.LEFT for part in self.parts)

    @property
    def whole(self) -> bool:
        return len(self.parts) == self._size and all(part.works for part in self.parts)

    def join(self, part: Part) -> None:
        self.parts.append(part)
        if len(self.parts) == self._size:
            self._loom.after(self._script.start_s, self._load)

    def ended(self, outcome: Outcome) -> None:
        """A part is over; when it was lost, the others wait for it, and fail sooner or later."""
        if outcome in (Outcome.DONE, Outcome.LEFT):
            return
        for part in self.parts:
            self._loom.after(self._dice.uniform(0.2, 30), lambda part=part: self._fail(part))

    def saving(self) -> Saving | None:
        if self.committed_step is None:
            return None
        return Saving(save=timedelta(seconds=self._script.save_s), step=timedelta(seconds=self._script.step_s))

    def progress(self) -> Progress | None:
        if self.restored is None:
            return None
        return Progress(
            step=self.step,
            first_step=self.first_step,
            total_steps=self._script.steps,
            loss=0.5,
            phase=self._phase,
            committed_step=self.committed_step,
            step_seconds=self._script.step_s if self.step >= self.first_step else None,
            age_s=self._loom.now - self._written_at,
        )

    def _fail(self, part: Part) -> None:
        if part.works:
            part.end(Outcome.FAILED)

    def _load(self) -> None:
        if not self.whole:
            self._later(self._load)
            return
        try:
            newest = next(self._checkpoints.candidates(), None)
            self._checkpoints.begin(base=newest.commit if newest else None, attempt=self.number)
        except GpucloudError:
            self._later(self._load)
            return
        self.step = self.restored = newest.commit.step if newest else 0
        self.first_step = self.step + 1
        self._tell("train")
        self.begun(self)
        self._loom.after(self._script.step_s, self._step)

    def _later(self, what: Callable[[], None]) -> None:
        if any(part.works for part in self.parts):
            self._loom.after(1.0, what)

    def _step(self) -> None:
        if not self.whole or self.hung:
            self._later(self._step)
            return
        self.step += 1
        self.trained(self.step)
        self._tell("train")
        if self.step >= self._script.steps:
            self._save(lambda: self._leave(Outcome.DONE), tries=20)
        elif any(part.asked for part in self.parts):
            self._save(lambda: self._leave(Outcome.LEFT), tries=3)
        else:
            if self.step % self._script.every == 0 and not self._saving:
                self._saving = True
                step = self.step
                self._loom.after(self._script.save_s, lambda: self._commit(step, lambda: None, 1))
            self._loom.after(self._script.step_s, self._step)

    def _save(self, then: Callable[[], None], tries: int) -> None:
        self._tell("save")
        step = self.step
        self._loom.after(self._script.save_s, lambda: self._commit(step, then, tries))

    def _commit(self, step: int, then: Callable[[], None], tries: int) -> None:
        if not self.whole:
            self._saving = False
            if tries > 1:
                self._later(lambda: self._commit(step, then, tries))
            return
        commit = Commit(self._checkpoints.generation, step)
        try:
            piece = self._checkpoints.upload(commit, "rank-0", memoryview(b"%d" % step))
            self._checkpoints.commit(Manifest(commit=commit, world=self._size, promise=Promise(), pieces=(piece,)))
            self.committed_step = step
            self.committed(commit)
            self._checkpoints.collect()
        except GpucloudError:
            if tries > 1:
                self._loom.after(2.0, lambda: self._commit(step, then, tries - 1))
                return
        self._saving = False
        then()

    def _leave(self, outcome: Outcome) -> None:
        for part in self.parts:
            part.end(outcome)
        for part in self.parts:
            part.machine.soon()

    def _tell(self, phase: str) -> None:
        self._phase = phase
        self._written_at = self._loom.now
