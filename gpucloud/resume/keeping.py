"""Decides with all ranks at each step whether to save it, and sees to it that the last one of an attempt counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpucloud.domain.manifest import Commit, Promise, Why
from gpucloud.resume.agreement import Agreed, Agreement
from gpucloud.resume.cadence import Cadence
from gpucloud.resume.folder import AttemptFolder, say
from gpucloud.resume.progress import Progress
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.saving import Saver
from gpucloud.resume.windows import Window
from gpucloud.store.checkpoints import Checkpoints

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a save holds beside the script's objects: `own` is this rank's, `promise` what a resume can.

    `lacks` says what it may lack that came before this step; `steps_are_seen`: an optimizer was seen to step in it.
    """

    step: int
    promise: Promise
    own: dict[str, Any]
    lacks: str | None = None
    steps_are_seen: bool = True


class Keeper:
    """Every method with a result is called by all ranks at the same step. `progress` must be set before the first.

    `of_a_trial`: whatever is saved is saved for a trial of resuming.
    """

    progress: Progress
    of_a_trial = False

    def __init__(
        self,
        cadence: Cadence,
        checkpoints: Checkpoints,
        saver: Saver,
        ranks: Ranks,
        folder: AttemptFolder,
    ) -> None:
        self._cadence = cadence
        self._checkpoints = checkpoints
        self._saver = saver
        self._ranks = ranks
        self._folder = folder
        self._agreement = Agreement(ranks, folder)
        self._prepared = self._told_waits = self._told_lacks = False
        self._generation: int | None = None

    @property
    def committed(self) -> int:
        """The newest step that counts, 0 without one."""
        return self._saver.committed

    @property
    def no_memory(self) -> str | None:
        """What the newest save lacked; None where it had the memory that it takes."""
        return self._saver.no_memory

    def keep(self, step: int, now: Callable[[], Moment], window: Window = Window.CLOSED) -> bool:
        """Save if it is time, and return whether all ranks are to stop; not while a window is open. Raises Fenced."""
        agreed = self._agree(step, window)
        if agreed.stop is not None:
            return True
        if agreed.due or agreed.wished:
            self._save(agreed, now)
        elif not self._prepared:
            self._prepared = True
            self._saver.prepare(now().own)
        return False

    def last(self, step: int, now: Callable[[], Moment], why: Why | None = None) -> bool:
        """Return whether this step is committed, at the end of the run; without `why`, because of the wish to stop.

        Raises Fenced.
        """
        agreed = self._agree(step)
        why = why or agreed.stop or Why.STOP
        with self.progress.phase("save"):
            left = self._agreement.seconds_left()
            self._finish(0 if self._is_in_the_way(step, left) else left)
            for _ in range(_TRIES):
                left = self._agreement.seconds_left()
                if self.committed == step or not left:
                    break
                self._begin(agreed.generation, now(), why)
                self._finish(left)
        return self.committed == step

    def hold(self, step: int, now: Callable[[], Moment]) -> int | None:
        """Copy this step ahead of a pause, unless another is being saved; return which one `land` would have count.

        None without any. Each rank may do so by itself. Raises UsageError.
        """
        if self.committed >= step or not self._prepared or self._generation is None:
            return None
        if not self._saver.in_flight:
            at = now()
            commit = Commit(self._generation, step)
            self._saver.hold(commit, at.promise, at.own, Why.STOP, steps_are_seen=at.steps_are_seen)
        return self._saver.step

    def land(self, step: int) -> None:
        """Have the save of that step count, if there is time and all ranks have it: all call this. Raises Fenced."""
        if self._ranks.highest(step, -step) == (step, -step):
            why = self._agreement.stop()
            self._saver.release(Why.TRIAL if self.of_a_trial else why)
            self._finish(self._agreement.seconds_left())
            self.progress.write()

    def drop(self) -> None:
        """Forget what is held for `land`."""
        self._saver.drop()

    def settle(self) -> None:
        """Wait until no save is under way. Raises Fenced."""
        self._finish()

    def close(self) -> None:
        """End the writer, when it has deleted what is no longer needed."""
        self._saver.close(self._folder.seconds_left())

    def _agree(self, step: int, window: Window = Window.CLOSED) -> Agreed:
        """Agree with the other ranks, and go on with the save that is under way."""
        exactly = self._cadence.every_steps is not None
        due = self._ranks.rank == 0 and (exactly or not self._saver.in_flight) and self._saver.due(self._cadence, step)
        agreed = self._agreement.reach(
            due=due, generation=self._checkpoints.generation, news=self._saver.news(), window=window
        )
        self._generation = agreed.generation
        self._told(lambda: self._saver.advance(agreed.news))
        return agreed

    def _save(self, agreed: Agreed, now: Callable[[], Moment]) -> None:
        """Begin to save this step. For a save under way training waits only where the user set a number of steps."""
        if self._saver.in_flight:
            if self._cadence.every_steps is None or not agreed.due:
                return
            self._say_waits(self._cadence.every_steps)
            with self.progress.phase("save"):
                self._finish()
        self._begin(agreed.generation, now(), Why.DUE if agreed.due else Why.NOTICE)

    def _begin(self, generation: int, now: Moment, why: Why) -> None:
        self._agreement.granted()
        self._prepared = True
        why = Why.TRIAL if self.of_a_trial else why
        if now.lacks is not None and self._ranks.rank == 0 and not self._told_lacks:
            self._told_lacks = True
            say(f"step {now.step} is saved as {now.promise.level.value}: {now.lacks}")
        commit = Commit(generation, now.step)
        self._saver.begin(commit, now.promise, now.own, why, steps_are_seen=now.steps_are_seen)

    def _is_in_the_way(self, step: int, left_s: float) -> bool:
        first = self._ranks.rank == 0
        (found,) = self._ranks.highest(int(first and self._saver.is_in_the_way(step, left_s)))
        if found and first:
            say(f"the save under way is given up: with it there would be no time for one of step {step}")
        return bool(found)

    def _finish(self, limit_s: float = float("inf")) -> None:
        self._told(lambda: self._saver.finish(limit_s))

    def _told(self, advance: Callable[[], None]) -> None:
        """Go on with a save, and tell the node's agent how long saves take: by this it knows when to ask for one."""
        longest = self._saver.longest_s
        advance()
        if self._saver.longest_s != longest:
            self._folder.tell("saving.json", {"seconds": self._saver.longest_s, "step": self.progress.step_seconds})

    def _say_waits(self, every: int) -> None:
        if self._ranks.rank == 0 and not self._told_waits:
            self._told_waits = True
            say(f"a save takes longer than {every} steps: training waits for it, as it would not with `every: auto`")
