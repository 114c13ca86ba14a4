"""What all ranks see together: what is due or wished for anywhere, and whether they are at the same."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.domain.errors import UsageError
from gpucloud.resume.folder import AttemptFolder
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.save.cadence import Window

LOOK_S = 0.05
"""How often a node's wishes are looked for at most, and the clock for what is due: that takes as long as all else."""

_QUICK_S = 0.1
"""After a step that took as long, the next waits for what the others say: it is nothing beside such steps."""

_MOST_SILENT = 4
"""Of quick steps, so many at most go by with nothing told: should they be slow ones all at once, no more are late."""

_LEAST_S = 1e-6
_FOREVER_S = 10.0**7
_IN_ORDER = "call run.step, run.save and run.done on every rank, in the same order"
_STOPS = (None, Why.STOP, Why.BUDGET, Why.NOTICE)
"""As ranks tell each other; where nodes have different reasons, the one that leaves the least time holds."""


@dataclass(frozen=True, slots=True)
class News:
    """What a rank tells the others at a step: its writer is not done yet; what became of the commit, and how soon."""

    busy: int = 0
    outcome: int = 0
    commit_ms: int = 0

    def numbers(self) -> tuple[int, int, int]:
        """Return it as numbers of which the highest over all ranks counts."""
        return self.busy, self.outcome, self.commit_ms


_NO_NEWS = News()


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The same on all ranks: why to stop, whether to save (due, or wished for by a node), the generation.

    `news` is how the save under way goes on; `closed`: no gradients are gathered that a checkpoint would lack.
    """

    stop: Why | None
    due: bool
    asked_for: bool
    generation: int
    news: News
    closed: bool = True


class Call(IntEnum):
    """What a rank is at when ranks agree: all must be at the same."""

    STEP, STEP_ASKED, SAVE, END = range(4)

    @property
    def named(self) -> str:
        """As the script has it."""
        return ("run.step()", "run.step() after run.save()", "run.save()", "the run's end")[self]


class Here(NamedTuple):
    """Where a rank is: at the end of which step, with which window, and what it knows of saves.

    `due`: a save is; `free`: for so many steps after this one, none is to wait for the others.
    """

    step: int
    window: Window
    due: bool
    free: int
    generation: int


class _Told(NamedTuple):
    """The numbers that ranks compare, of which the highest over all ranks counts."""

    first: int  # the lowest call, as a negative number
    last: int
    least_step: int  # as a negative number
    most_step: int
    window: int
    stop: int
    due: int
    soon: int
    silent: int  # for how many steps to come nothing need be told, as a negative number
    generation: int
    asked: int
    busy: int
    outcome: int
    commit_ms: int


class Agreement:
    """Compares what each rank sees: its node's wishes, its writer, and on rank 0 whether a save is due.

    While a window of gradients is open nothing is saved; what was due or wished for then is so at its end.

    At a quick step no rank waits for the others: what they tell is looked at after the next one. As long as that shows
    no wish, all go on so; where it shows one, they do not, and agree on what to do. So they act at the same step. Where
    steps are so quick that several pass between two looks for wishes, nothing is told at some of them: at the same ones
    on all ranks, as they have told each other.
    """

    def __init__(self, ranks: Ranks, folder: AttemptFolder) -> None:
        self._ranks = ranks
        self._folder = folder
        self._granted = self._asked = self._due = 0
        self._before = ranks.comparison(len(_Told._fields))  # what is told at a quick step
        self._is_calm = False  # nothing is wanted anywhere, as all ranks know
        self._silent = 0  # steps to come at which nothing is told, as all ranks know
        self._stop = self._save = 0  # this node's wishes, when they were looked for last
        self._looked_at = -math.inf
        self._told_at, self._told_step = -math.inf, 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to agree with."""
        return self._ranks.world == 1

    def is_calm_still(self) -> bool:
        """Whether nothing was wanted when that was looked for last, and it is not to be looked for again yet."""
        return self._is_calm and time.monotonic() - self._looked_at < LOOK_S

    def is_silent(self) -> bool:
        """Whether to go on with the next step, nothing being told at this one, which counts as it is asked.

        UsageError as in `reach`.
        """
        if not self._silent:
            self._look_back()
        if not self._silent:
            return False
        self._silent -= 1
        return True

    def passes(self, here: Here) -> bool:
        """Whether to go on with the next step, nothing being wanted; no rank has waited for what the others say of it.

        False where all ranks have to `reach`. UsageError as there.
        """
        self._look_back()
        if self._is_calm:
            self._before.begun(self._told(here, Call.STEP))
        return self._is_calm

    def reach(self, here: Here, news: News, call: Call = Call.STEP) -> Agreed:
        """Return what holds for this step; a wish holds until `granted`, and so does what was due in a window.

        UsageError, on all ranks, where they are not at the same.
        """
        self._look_back()
        all_of = self._learn(_Told(*self._ranks.highest(*self._told(here, call, news))))
        is_due = bool(self._due)
        self._due = self._due if all_of.window else 0
        return Agreed(
            stop=_STOPS[all_of.stop] if all_of.window != Window.OPEN else None,
            due=not all_of.window and is_due,
            asked_for=not all_of.window and self._asked > self._granted,
            generation=all_of.generation,
            news=News(all_of.busy, all_of.outcome, all_of.commit_ms),
            closed=not all_of.window,
        )

    def stop(self) -> Why | None:
        """Return why to stop, as any node's agent has said by now."""
        (found,) = self._ranks.highest(_STOPS.index(self._folder.stop_asked()))
        return _STOPS[found]

    def granted(self) -> None:
        """Every wish so far is met by the save that begins now."""
        self._granted = max(self._granted, self._asked)

    def seconds_left(self) -> float:
        """Return how long there is for a last save on the node that has the least time."""
        own = min(self._folder.seconds_left(), _FOREVER_S)
        (least,) = self._ranks.highest(-round(1000 * own))
        return math.inf if -least >= 1000 * _FOREVER_S else -least / 1000

    def _told(self, here: Here, call: Call, news: News = _NO_NEWS) -> tuple[int, ...]:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_S or call is not Call.STEP:
            self._looked_at = now
            self._stop, self._save = _STOPS.index(self._folder.stop_asked()), self._folder.save_asked()
        took, steps = now - self._told_at, here.step - self._told_step
        self._told_at, self._told_step = now, here.step
        soon = not here.free or took >= _QUICK_S
        silent = max(0, min(here.free - 1, _MOST_SILENT, int(LOOK_S * steps / max(took, _LEAST_S)) - 1))
        who = -call, call, -here.step, here.step, here.window
        return *who, self._stop, here.due, soon, -silent, here.generation, self._save, *news.numbers()

    def _look_back(self) -> None:
        """Learn what ranks said at the step before. UsageError where they were not at the same."""
        if self._before.is_under_way:
            self._learn(_Told(*self._before.highest()))

    def _learn(self, told: _Told) -> _Told:
        if -told.first != told.last:
            raise UsageError(
                f"one rank is at {Call(-told.first).named} while another is at {Call(told.last).named}",
                hint=_IN_ORDER,
            )
        if -told.least_step != told.most_step:
            raise UsageError(
                f"one rank is at step {-told.least_step} while another is at step {told.most_step}", hint=_IN_ORDER
            )
        self._asked = max(self._asked, told.asked)
        self._due = max(self._due, told.due)
        self._is_calm = not (told.stop or told.soon or self._due or self._asked > self._granted)
        self._silent = -told.silent if self._is_calm else 0
        return told
