"""Decides with all ranks whether to save: at each step, while the script evaluates or waits, and at the end."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.manifest import NO_NOTES, Commit, Notes, Promise, Why
from gpucloud.domain.errors import UsageError
from gpucloud.resume.folder import AttemptFolder, Progress, say
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.save import agreement
from gpucloud.resume.save.agreement import Agreed, Agreement, Call, Here
from gpucloud.resume.save.cadence import Cadence, Window
from gpucloud.resume.save.saving import PendingSave, Saver
from gpucloud.store.checkpoints import Checkpoints

_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a save holds beside the script's objects: `own` is this rank's, `promise` what a resume can.

    `lacks` says what it may lack that came before this step; `steps_are_seen`: an optimizer was seen to step in it;
    `notes` can be read before all else.
    """

    step: int
    promise: Promise
    own: dict[str, Any]
    lacks: str | None = None
    steps_are_seen: bool = True
    notes: Notes = NO_NOTES


class SaveDecider:
    """Every method with a result is called by all ranks at the same step. `progress` must be set before the first.

    `of_a_trial`: whatever is saved is saved for a trial of resuming. `best` is the metric of the best checkpoint.
    """

    progress: Progress
    of_a_trial = False
    best = -math.inf

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
        self._reckoned_at = -math.inf
        self._asked: float | bool = False  # by the script, for the end of this step; a metric if it gave one
        self._hoped: tuple[int, float] | None = None  # the step that is the best once it counts

    @property
    def committed(self) -> int:
        """The newest step that counts, 0 without one."""
        return self._saver.committed

    @property
    def no_memory(self) -> str | None:
        """What the newest save lacked; None where it had the memory that it takes."""
        return self._saver.no_memory

    @property
    def failure(self) -> str | None:
        """Why the newest save failed on this rank; None where it did not, or nobody waited for it."""
        return self._saver.failure

    @property
    def is_refused(self) -> bool:
        """Whether the newest save failed, on this rank, by what the store refuses until somebody mends it."""
        return self._saver.is_refused

    def keep(self, step: int, now: Callable[[], Moment], window: Window = Window.CLOSED) -> bool:
        """Save if it is time, and return whether all ranks are to stop; not while a window is open. Raises Fenced."""
        asked = self._asked
        if asked is False and self._passes(step, window):
            return False
        agreed = self._agree(step, window, Call.STEP if asked is False else Call.STEP_ASKED)
        if asked is not False and agreed.closed:
            self._asked = False
            self._grant(agreed, step, now, None if asked is True else asked)
        if agreed.stop is not None:
            return True
        if self._saver.step == step:
            return False
        if agreed.due or agreed.asked_for:
            self._save(agreed, now)
        elif not self._prepared:
            self._prepared = True
            self._saver.prepare(now().own)
        return False

    def ask(self, metric: float | None) -> None:
        """Have the step that is under way saved when it is done; with a metric, if it is the best so far."""
        self._asked = True if metric is None else metric

    def save(self, step: int, now: Callable[[], Moment], metric: float | None) -> bool:
        """Save this step, which is done, because the script asks; return whether all ranks are to stop. Raises Fenced.

        With a metric (rank 0's holds), only if that is the best so far, and have it kept. Waits for a save under way.
        """
        agreed = self._agree(step, call=Call.SAVE)
        self._grant(agreed, step, now, metric)
        return agreed.stop is not None

    def _grant(self, agreed: Agreed, step: int, now: Callable[[], Moment], metric: float | None) -> None:
        if not step:
            return
        if metric is not None:
            metric = float(json.loads(self._ranks.shared(json.dumps(float(metric)).encode())))
            if not max(self.best, self._hoped[1] if self._hoped else -math.inf) < metric < math.inf:
                return
        if step not in (self.committed, self._saver.step):
            if self._saver.in_flight:
                with self.progress.phase("save"):
                    self._finish()
            self._begin(agreed.generation, now(), Why.ASKED)
        if metric is not None:
            self._hoped = step, metric
            self._call_best()

    def _call_best(self) -> None:
        """Have what was hoped for kept as the best, once it counts; a save that failed is none."""
        if self._hoped is None:
            return
        step, metric = self._hoped
        if self.committed == step:
            self.best, self._hoped = metric, None
            if self._ranks.rank == 0 and self._generation is not None:
                self._saver.call_best(step, self._generation, metric)
        elif self._saver.step != step:
            self._hoped = None

    def last(self, step: int, now: Callable[[], Moment], why: Why | None = None) -> bool:
        """Return whether this step is committed, at the end of the run; without `why`, because of the wish to stop.

        Raises Fenced.
        """
        agreed = self._agree(step, call=Call.END)
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
            pending = PendingSave(Commit(self._generation, step), at.promise, Why.STOP, at.notes)
            self._saver.hold(pending, at.own, steps_are_seen=at.steps_are_seen)
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

    def _passes(self, step: int, window: Window) -> bool:
        """Whether nothing is wanted at this step, as all ranks know without waiting for each other."""
        if not self._prepared or self._saver.in_flight:
            return False
        if self._agreement.is_alone:
            return self._agreement.is_calm_still() and not self._cadence.falls_on(step)
        if self._agreement.is_silent():
            return True
        return self._agreement.passes(self._here(step, window))

    def _agree(self, step: int, window: Window = Window.CLOSED, call: Call = Call.STEP) -> Agreed:
        """Agree with the other ranks, and go on with the save that is under way."""
        agreed = self._agreement.reach(self._here(step, window), self._saver.news(), call)
        self._generation = agreed.generation
        self._told(lambda: self._saver.advance(agreed.news))
        return agreed

    def _here(self, step: int, window: Window) -> Here:
        due = self._ranks.rank == 0 and self._due(step)
        return Here(step, window, due, self._cadence.free_after(step), self._checkpoints.generation)

    def _due(self, step: int) -> bool:
        """Whether a save is due at this step, as only rank 0 says."""
        if self._cadence.every_steps is not None:
            return self._cadence.falls_on(step)
        now = time.monotonic()
        if self._saver.in_flight or now - self._reckoned_at < agreement.LOOK_S:
            return False
        self._reckoned_at = now
        return self._saver.due(self._cadence, step)

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
        pending = PendingSave(Commit(generation, now.step), now.promise, why, now.notes)
        self._saver.begin(pending, now.own, steps_are_seen=now.steps_are_seen)

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
        self._call_best()

    def _say_waits(self, every: int) -> None:
        if self._ranks.rank == 0 and not self._told_waits:
            self._told_waits = True
            say(f"a save takes longer than {every} steps: training waits for it, as it would not with `every: auto`")


# What is saved while a script does not train: evaluates, or waits for data, for longer than a notice leaves.
#
# The state is copied as such a pause begins, before the script swaps in averaged weights or draws numbers. Nothing is
# written of it until somebody asks for a stop, and only where every rank is in a pause at the same step.


_LOOK_S = 0.5
_STALL_S = 2.0
"""Who has waited so long for a batch is in a pause."""


class Pauses:
    """A thread looks for a wish to stop during a pause; `over` waits for it, and is called before ranks agree again."""

    def __init__(self, decider: SaveDecider, ranks: Ranks, folder: AttemptFolder) -> None:
        self._decider = decider
        self._ranks = ranks
        self._folder = folder
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._at: tuple[int, int] = 0, 0  # the step, and how many pauses there were at it

    @contextlib.contextmanager
    def during(self, step: int, now: Callable[[], Moment]) -> Iterator[None]:
        """What is inside is a pause after that step. Raises what `over` does, UsageError for what has no form."""
        begun = self.begin(step, now)
        try:
            yield
        finally:
            if begun:  # not by a phase around this one
                self.over()

    def stalls(self, at: Callable[[], tuple[int, Callable[[], Moment]] | None]) -> Stalls:
        """Return what a script waits for batches in; `at` says after which step, None in the midst of one."""
        return Stalls(self, at)

    def begin(self, step: int, now: Callable[[], Moment]) -> bool:
        """Begin a pause, which the script's own thread ends by `over`, and return whether this is the begin of one.

        Raises UsageError for what has no form.
        """
        if self._thread is not None or (saving := self._decider.hold(step, now)) is None:
            return False
        self._at = step, self._at[1] + 1 if self._at[0] == step else 0
        self._ended.clear()
        thread = threading.Thread(target=self._watch, args=(saving,), name="gpucloud pause", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the next step heeds the wish
            self._decider.drop()
            return False
        self._thread = thread
        return True

    def settle_here(self) -> None:
        """Wait, in another thread than the script's, until the GPU is done: only the script knows its streams."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
            torch.cuda.synchronize()

    def over(self) -> None:
        """End the pause, if this is one: at once, or when a save that all ranks began in it is over. Raises Fenced."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._decider.drop()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _watch(self, saving: int) -> None:
        try:
            if self._meets():
                self.settle_here()
                self._decider.land(saving)
        except Exception as error:  # noqa: BLE001  (raised where the script can hear it)
            self._failed = error

    def _meets(self) -> bool:
        with contextlib.suppress(RuntimeError):  # no store, as where another rank is gone
            meeting = self._ranks.meeting("pause-{}-{}".format(*self._at))
            while meeting is not None:
                ended = self._ended.wait(_LOOK_S)
                if not ended and (self._folder.stop_asked() is not None or meeting.called()):
                    meeting.call()
                stands = meeting.leave() if ended else meeting.stands()
                if stands is not None:
                    return stands
        return False


class Stalls:
    """Enter it to wait for a batch. A thread begins a pause for those who wait long."""

    def __init__(self, pauses: Pauses, at: Callable[[], tuple[int, Callable[[], Moment]] | None]) -> None:
        self._pauses = pauses
        self._at = at
        self._since: float | None = None
        self._lock = threading.Lock()
        with contextlib.suppress(RuntimeError):  # no thread to be had: the next step heeds the wish
            threading.Thread(target=_look, args=(weakref.ref(self),), name="gpucloud stalls", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._since = None
        self._pauses.over()

    def look(self) -> None:
        """Begin a pause if the script has waited for long."""
        with self._lock:
            stalls = self._since is not None and time.monotonic() - self._since > _STALL_S
            if stalls and (at := self._at()) is not None:
                with contextlib.suppress(UsageError):  # it comes out of the next save
                    self._pauses.settle_here()
                    self._pauses.begin(*at)


def _look(stalls: weakref.ref[Stalls]) -> None:
    while (there := stalls()) is not None:
        there.look()
        del there
        time.sleep(_LOOK_S)
