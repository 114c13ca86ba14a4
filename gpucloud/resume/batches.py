"""How batches are handed out, the run's own and those of a loader of the script's: which come next, what a step was
made of, and when a `for` ends.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from gpucloud.domain.errors import UsageError
from gpucloud.resume.state import randomness
from gpucloud.resume.state.randomness import Stand


class Position(NamedTuple):
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
    same_seed = ""  # on all ranks, and how a script sees to it
    firm: tuple[str, ...] = ()
    """The rules that must be as before for a run to go on; of others it is told that it is less than exact."""

    ends_elsewhere = False  # a loop that is not the script's knows when its training is over
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

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, str]:
        """Continue from a position; return which rules were others there, by their names as `before → now`."""
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
        if len(self._taken) < 2 and self.handed.batch != self.length:  # an epoch's last step may be made of fewer
            self._taken = (*self._taken, self.untrained)
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
        self.handed = at._replace(over=True)
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


# A loader of the script's own, continued at its next batch: exactly where its source allows it, and told where not.


Summed = tuple[Any, int]
"""A batch, and a sum by which it, or all until it, can be told from others."""


class Source(Protocol):
    """Where a wrapped loader's batches come from. `lacks` says why a resume may be less than exact, "" if nothing."""

    loader: Any
    kind: str  # how it is continued, in words
    lacks: str
    can_wait: bool  # another thread may ask for its state while the script waits for a batch

    @property
    def rules(self) -> Mapping[str, Any]:
        """What must be the same for the same batches to come again."""
        ...

    def first(self) -> dict[str, Any]:
        """Return what an epoch that begins now depends on, beside the global generators."""
        ...

    def put(self, first: Mapping[str, Any]) -> None:
        """Have the next epoch begin so."""
        ...

    def open(self, epoch: int, used: int, first: Mapping[str, Any]) -> tuple[Iterator[Summed], int]:
        """Begin an epoch for which all was put, and return the batches after those `used`, with the last one's sum.

        The global generators are as they were when the epoch began.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what of it a checkpoint must have beside that, after the last step."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Take it back; what it says holds for the next `open`."""
        ...


class Wrapped(Batches):
    """The batches of a loader that the script made; a `for` ends with the epoch, as that loader's does.

    What the loader has is found here too, as `sampler` and `dataset`. `alike` are further rules.
    """

    by_epoch = True
    same_seed = "DistributedSampler(dataset, seed=0): the same on all ranks"

    def __init__(
        self,
        source: Source,
        world: int,
        lower: Callable[[str], None],
        tell: Callable[[str], None] = lambda _text: None,
        alike: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._source = source
        self._world, self._is_of_others = world, False
        self._tell, self._lower, self._alike = tell, lower, alike
        self._first: dict[str, Any] | None = None  # of the epoch that was opened last
        self._stream: Iterator[Summed] | None = None
        self._at = Position()  # the stream's next batch
        self._window: list[tuple[Any, int, Stand | None]] = []  # handed out since the last step
        self._sum = self._trained_sum = 0

    def __len__(self) -> int:
        """The number of batches in an epoch. TypeError where nobody knows."""
        return len(self._source.loader)

    def __getattr__(self, name: str) -> Any:
        if "_source" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._source.loader, name)

    @property
    def length(self) -> int | None:
        """How many batches an epoch has; None where nobody knows."""
        return length_of(self._source.loader)

    @property
    def rules(self) -> Mapping[str, Any]:
        """What decides which samples make which step: the same on all ranks and in all attempts of an exact run."""
        return {"batches": self.length, "kind": self._source.kind, **self._source.rules, **self._alike}

    def state_dict(self) -> dict[str, Any]:
        """Return the position, how its epoch began, and the source's own state."""
        place = self.trained
        if place.batch and not place.over and self._first is not None:
            first = self._first
        else:  # the next epoch begins as the generators are then
            begun = self._first if self._stream is not None and self._at.epoch == place.epoch else None
            first = {"generators": None, "source": begun["source"] if begun else self._source.first()}
        return {
            "epoch": place.epoch,
            "used": place.batch,
            "over": place.over,
            "first": first,
            "sum": self._trained_sum,
            "world": self._world,
            "source": self._source.state(),
            "rules": dict(self.rules),
        }

    def load_state_dict(self, state: dict[str, Any]) -> dict[str, str]:
        """Continue from a position; return which rules were others there, by their names as `before → now`."""
        before = state["rules"]["kind"] if "rules" in state else "from run.loader"
        if before != self._source.kind:
            raise UsageError(
                f"the run's batches are continued {self._source.kind}, and came {before} before",
                hint="give run.wrap what it had before, or the job file another `name:` to begin at step 0",
            )
        used = state["used"] * state["world"] // self._world  # each rank's share of what all were trained on
        self._is_of_others = state["world"] != self._world
        # A script has another sampler, or other shares, on another number of ranks: no rule can be held against it.
        self.firm = () if self._is_of_others else ("loader", "sampler", "seed", "shuffle", "samples", "batch_size")
        self._continue_from(Position(state["epoch"], used, over=state["over"]))
        self._first, self._trained_sum = state["first"], state["sum"]
        self._source.load(state["source"])
        if not state["used"] or state["over"]:
            self._source.put(state["first"]["source"])
        return changed(state["rules"], self.rules)

    def stepped(self) -> None:
        """Say that a step was made of all that was handed out."""
        super().stepped()
        self._window.clear()
        self._trained_sum = self._sum
        if self._source.lacks:
            self._lower(self._source.lacks)

    def go_back(self, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Hand out again what came since the last step."""
        self.handed, self.untrained, self._again = self.trained, 0, True

    def _open(self, start: Position) -> Iterator[Any]:
        window, self._window = self._window, []
        if self._stream is not None and self._at == Position(start.epoch, start.batch + len(window)):
            return itertools.chain(self._replayed(window), self._watched(self._stream))
        self._window = window if start != self.trained else []
        if start.batch:
            here = randomness.here()
            self._stream = self._opened(start)
            here.put_back()
        else:  # what is drawn to begin an epoch is drawn once, and the next epoch is another
            self._first = {"generators": randomness.capture(), "source": self._source.first()}
            self._stream, _ = self._source.open(start.epoch, 0, self._first["source"])
        self._at = start
        return self._watched(self._stream)

    def _opened(self, start: Position) -> Iterator[Summed]:
        """Begin the epoch as it was begun, and go on after what was trained on."""
        first = self._first
        assert first is not None  # noqa: S101  an epoch that is gone on with was begun, here or before
        randomness.put_back(first["generators"])
        began = time.monotonic()
        self._source.put(first["source"])
        stream, last = self._source.open(start.epoch, start.batch, first["source"])
        if last != self._trained_sum and not self._is_of_others:
            self._lower("the data came in another order than before, or is other data: what comes next is another, too")
        if (took := time.monotonic() - began) > 1:
            self._tell(f"{start.batch} batches of epoch {start.epoch} were passed over, in {took:.0f} s")
        return stream

    def _watched(self, stream: Iterator[Summed]) -> Iterator[Any]:
        for batch, self._sum in stream:
            after = None if self._at.batch else randomness.here()
            self._at = Position(self._at.epoch, self._at.batch + 1)
            self._window.append((batch, self._sum, after))
            yield batch
        self._stream = None

    def _close(self) -> None:
        self._stream = None
        self._window.clear()

    def _replayed(self, window: list[tuple[Any, int, Stand | None]]) -> Iterator[Any]:
        for batch, self._sum, after in window:
            if after is not None:
                after.put_back()
            self._window.append((batch, self._sum, after))
            yield batch


def length_of(thing: Any) -> int | None:
    """Return its length, None where it has none."""
    try:
        return len(thing)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return which rules were others, by their names as `before → now`."""
    return {name: f"{before.get(name)} → {value}" for name, value in now.items() if before.get(name) != value}
