"""How batches are handed out: which come next, what a step was made of, and when a `for` ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Position:
    """The next batch: its epoch, and its number there. `over`: the epoch is known to have none from there on."""

    epoch: int = 0
    batch: int = 0
    over: bool = False


class Batches:
    """What a script takes its batches from; subclasses know how an epoch is opened at one of its batches.

    `handed` is where the script is, `trained` where the last step left it, which is what a checkpoint keeps. Another
    `for` begins after the last step: what was only looked at comes again. `by_epoch`: a `for` ends with the epoch.
    The callables are the run's, which sets them.
    """

    by_epoch = False
    one_iterator = False  # a second `for` ends the first: they share their workers

    def __init__(self) -> None:
        self.handed = self.trained = Position()
        self.trained_batches = 0  # by this attempt
        self.untrained = 0
        self._taken: tuple[int, ...] = ()
        self._newest: object = None
        self._again = self._is_over = False
        self.begin: Callable[[], None] = lambda: None
        self.asked: Callable[[bool], None] = lambda _first: None
        self.opened: Callable[[], None] = lambda: None
        self.over: Callable[[], None] = lambda: None
        self.ended: Callable[[], bool] = lambda: False
        self.waited: Callable[[float], None] = lambda _seconds: None
        self.wait: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch handed out last."""
        return max(0, self.handed.epoch - (not self.handed.batch and not self.handed.over))

    @property
    def rules(self) -> Mapping[str, Any]:
        """What decides which samples make which step: the same on all ranks and in all attempts of an exact run."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """How many batches an epoch has; None where nobody knows."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what else it takes to go on from there."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> tuple[str, ...]:
        """Continue from a position; return which rules were others there, each as `name before → now`."""
        raise NotImplementedError

    def _open(self, start: Position) -> Iterator[Any]:
        """Return the batches from there to the end of the epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """Yield batches from the one after the last step on."""
        if self._is_over and self.by_epoch:  # saved when the epoch was over: what the script does then is to be done
            self._is_over = False
            self.begin()
            return
        start = self._start()
        if not self.untrained:
            self.handed = self.trained = start
        before, began, this = (self.handed, self.untrained), self.trained, object()
        try:
            yield from self._all(this, start)
        finally:
            only_looked_at = self.trained == began and not (start.batch and self.handed.over)
            if self._newest is this and only_looked_at:  # perhaps in the midst of a step
                self.handed, self.untrained = before
            if self.ended():
                self._close()
        self.begin()  # for a run that was finished already: what follows finds the generators as they were

    def enter(self, epoch: int) -> None:
        """Have the next `for` be of that epoch; what is left of one before is left out."""
        if self.handed.epoch < epoch:
            self._is_over = False
            self.handed = Position(epoch)
            if not self.untrained:
                self.trained = self.handed

    def stepped(self) -> None:
        """Say that a step was made of all that was handed out."""
        self._taken = (*self._taken, self.untrained)[:2]
        self.trained_batches += self.untrained
        self.trained, self.untrained = self.handed, 0

    @property
    def ahead(self) -> int:
        """How many batches the script took before its first step that this was not made of, as the second shows."""
        return max(0, self._taken[0] - self._taken[1]) if len(self._taken) > 1 else 0

    def go_back(self, state: dict[str, Any]) -> None:
        """Hand out again, when the next batch is asked for, what came since that state was loaded."""
        self.load_state_dict(state)
        self._again = True

    def _close(self) -> None:
        """Let go of what batches came from: there are no more."""

    def _continue_from(self, position: Position) -> None:
        self.handed = self.trained = position
        self.untrained = 0
        self._is_over = position.over

    def _start(self) -> Position:
        """Return where the next `for` begins."""
        place = self.handed if self.handed.over or self.handed.epoch > self.trained.epoch else self.trained
        return Position(place.epoch + 1) if place.over else place

    def _all(self, this: object, start: Position) -> Iterator[Any]:
        anew = start == self.trained
        while not self.ended():
            self._again, self._newest = False, this
            self.begin()
            self.asked(not start.batch)
            batches = self._open(start)
            self.opened()
            at = start
            for batch in self._timed(batches):
                at = Position(at.epoch, at.batch + 1)
                self.handed = at
                self.untrained, anew = 1 + (0 if anew else self.untrained), False
                yield batch
                if self._again or self.ended() or (self.one_iterator and self._newest is not this):
                    break
            else:
                if self._end(at):
                    return
                at = Position(at.epoch + 1)
            start = self.trained if self._again else at
            anew = self._again

    def _end(self, at: Position) -> bool:
        """Say that the epoch is over, and return whether the `for` is."""
        if not self.by_epoch:
            return False
        self.over()
        self.handed = replace(at, over=True)
        if not self.untrained:
            self.trained = self.handed
        return True

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and tell how long each was waited for."""
        first = True
        while True:
            if not first:
                self.asked(False)  # noqa: FBT003
            first = False
            asked = time.monotonic()
            try:
                with self.wait:
                    batch = next(batches)
            except StopIteration:
                return
            self.waited(time.monotonic() - asked)
            yield batch
