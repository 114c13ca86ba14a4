"""When to save: how often, and only where a step that changes the weights ends."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gpucloud.domain.errors import UsageError

INTERRUPTED_EVERY_S = 7200.0
"""Assumed mean time between interruptions, until one is measured: cautious for spot GPU pools."""

FIRST_SAVE_S = 2.0
"""A fresh job saves this early, so that its first minutes are not lost and a store that refuses is found out."""

_LEAST_S = 1.0
_ALL = 10**6  # steps: more than anybody asks about
_ANEW_FITS = 1.25  # times what a save takes: for another writer to start, and for a store that was quicker before


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """At most one of the two is set; neither means auto."""

    every_s: float | None = None
    every_steps: int | None = None

    def falls_on(self, step: int) -> bool:
        """Whether a save is due after this step by its number."""
        return self.every_steps is not None and step % self.every_steps == 0

    def free_after(self, step: int) -> int:
        """Return for how many steps after this one no save is due by its number."""
        return _ALL if self.every_steps is None else self.every_steps - step % self.every_steps - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the decision looks at, in seconds; `cost_s` is what training lost by the last save.

    `upload_s` is how long that save took beside the training, until it counted.
    """

    step: int
    since_start_s: float
    since_save_s: float
    cost_s: float
    anything_saved: bool
    upload_s: float = 0.0


def read_cadence(text: str) -> Cadence:
    """Return the cadence of `auto`, a number of seconds, or `steps:100`. Raises UsageError."""
    if text == "auto":
        return Cadence()
    kind, _, count = text.rpartition(":")
    try:
        if kind == "steps" and int(count) > 0:
            return Cadence(every_steps=int(count))
        if not kind and 0 < float(count) < math.inf:
            return Cadence(every_s=float(count))
    except ValueError:
        pass
    raise UsageError(f"cannot save every {text!r}", hint="write auto, a number of seconds, or steps:100")


def is_due(cadence: Cadence, moment: Moment) -> bool:
    """Whether to save after this step.

    Auto is Young's interval sqrt(2 × cost × time between interruptions), never shorter than the save itself.

    It knows no prices, which is nothing for what is small. But 84 GB (7B parameters with AdamW) from 8 × H100 at 26 USD
    an hour, saved every 2.5 minutes over 84 hours, cost 199 USD in S3 beside 2,835 for the machines, and 81 at every 6
    minutes: `plan` names the `every:` that costs least where it saves more than a fifth.
    """
    if cadence.every_steps is not None:
        return cadence.falls_on(moment.step)
    if cadence.every_s is not None:
        return moment.since_save_s >= cadence.every_s
    if not moment.anything_saved and moment.since_start_s >= FIRST_SAVE_S:
        return moment.since_save_s >= FIRST_SAVE_S
    interval = max(moment.cost_s, moment.upload_s, math.sqrt(2 * moment.cost_s * INTERRUPTED_EVERY_S), _LEAST_S)
    return moment.since_save_s >= interval


def is_better_anew(*, save_s: float, gone_s: float, left_s: float) -> bool:
    """Whether to give up a save under way for `gone_s`, for one of the newest step; `left_s` is all the time there is.

    So it is where a save, which took `save_s` before, has time enough, but not after the one under way.
    """
    both_s = max(0.0, save_s - gone_s) + save_s
    return save_s > 0 and both_s > left_s >= _ANEW_FITS * save_s


# Where a step that changes the weights ends: gradients gathered over several steps until then are in no checkpoint.


_UNSEEN_STEPS = 64
"""After so many steps, an optimizer that was not seen to step is one that cannot be seen."""

_TIMES_LONGER = 4
"""A window that is open for so many times the longest one may be none: replays of a CUDA graph are not seen."""

_STATE_OF = "_get_fsdp_state"
"""What modules have that `fully_shard` was given."""


class Window(IntEnum):
    """Whether a checkpoint of this step lacks gathered gradients: unknown as long as no optimizer was seen to step.

    A long window is open for longer than those that were seen: who is asked to leave waits no more for its end.
    """

    CLOSED, UNKNOWN, LONG, OPEN = range(4)


_Used = dict[int, tuple[weakref.ref[Any], int]]
"""By the ids of parameters, the gradients that an optimizer has stepped with, as they were then."""


class _Watch:
    """One optimizer: for how many steps it gathers by now, and did at most; each has a rhythm of its own.

    Beside others, what one of them has `used` and nobody has cleared is not gathered: its turn may come after theirs.
    """

    def __init__(self, optimizer: Any, longest: int, used: _Used | None) -> None:
        self.longest = longest
        self.open = 0
        self.stepped = False
        self._optimizer = optimizer
        self._used = used
        self.found_nothing = False
        optimizer.register_step_post_hook(self._has_stepped)
        self._is_first = True
        optimizer.register_step_pre_hook(self._steps)

    def ends(self, *, gathers_unseen: bool) -> Window:
        """Return how a step ends for it; called once for each."""
        if self.stepped:
            self.longest = max(self.longest, self.open + 1)
        self.open = 0 if self.stepped or not (gathers_unseen or self._gathered()) else self.open + 1
        self.stepped = False
        if self.open == 0:
            return Window.CLOSED
        usual = _TIMES_LONGER * self.longest
        if self.open > max(_UNSEEN_STEPS, usual):
            return Window.CLOSED
        if not self.longest:
            return Window.UNKNOWN
        return Window.OPEN if self.open <= usual else Window.LONG

    def _gathered(self) -> bool:
        return any(self._is_new(number, gradient) for number, gradient in self._gradients())

    def _is_new(self, number: int, gradient: Any) -> bool:
        used = self._used.get(number) if self._used is not None else None
        return used is None or bool(used[1] != gradient._version) or used[0]() is not gradient  # noqa: SLF001

    def _gradients(self) -> Iterator[tuple[int, Any]]:
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                if (gradient := one.grad) is not None:
                    yield id(one), gradient

    def _steps(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._is_first:
            self._is_first = False
            has_closure = len(arguments) > 1 or bool(named)  # which makes the gradients; the first is the optimizer
            self.found_nothing = not has_closure and next(self._gradients(), None) is None

    def _has_stepped(self, *_: Any) -> None:
        self.stepped = True
        if self._used is not None:
            used, ref = self._used, weakref.ref
            for number, one in self._gradients():
                used[number] = ref(one), one._version  # noqa: SLF001


class Windows:
    """Watches torch's optimizers; without one, every step is the end of its window.

    `longest` is that of the windows so far, in steps, other attempts' included; 0 while none was seen to end. `seen`:
    an optimizer was seen to step in the step that `now` was told of last. `found_nothing`: one had no gradient at its
    first step; then it takes those that were there before.
    """

    def __init__(self, optimizers: Sequence[Any], modules: Sequence[Any] = (), longest: int = 0) -> None:
        self.seen = self.found_nothing = False
        self._longest = longest
        self._unclosed = 0  # steps since one at which no optimizer's window was open
        used: _Used | None = {} if len(optimizers) > 1 else None
        self._watches = [_Watch(optimizer, longest, used) for optimizer in optimizers]
        self._sharded = [one for module in modules for one in module.modules() if hasattr(type(one), _STATE_OF)]

    @property
    def longest(self) -> int:
        """The longest window so far."""
        return max((watch.longest for watch in self._watches), default=self._longest)

    @property
    def lacks(self) -> str | None:
        """Why a checkpoint of this step may lack what was gathered before it; None where it lacks nothing."""
        watch = max(self._watches, key=lambda one: one.open, default=None)
        if watch is None or not watch.open:
            return None
        seen = f"its optimizer was last seen to step {watch.open} steps ago"
        seen = seen if watch.longest else "no optimizer was seen"
        return f"gradients may be gathered that no checkpoint has: {seen}"

    @property
    def rests(self) -> bool:
        """Whether nothing of a next step has begun, as far as is seen: the last one stepped, and was told of."""
        return self.seen and self.is_closed

    @property
    def is_closed(self) -> bool:
        """Whether nothing is gathered, and no optimizer has stepped since the last step was told of."""
        return not any(watch.stepped or watch.open for watch in self._watches)

    def now(self) -> Window:
        """Return how this step ends; called once for each."""
        found, self.seen, waiting = Window.CLOSED, False, False
        for watch in self._watches:
            self.seen = self.seen or watch.stepped
            self.found_nothing = self.found_nothing or watch.found_nothing
            waiting = waiting or not watch.stepped  # all that stepped have used what was gathered
        unseen = waiting and any(map(_gathers_unseen, self._sharded))
        for watch in self._watches:
            if (ends := watch.ends(gathers_unseen=unseen)) > found:
                found = ends
        if not found:
            self._unclosed = 0
            return found
        self._unclosed += 1
        usual = _TIMES_LONGER * self.longest
        if self._unclosed > max(_UNSEEN_STEPS, usual):
            return Window.CLOSED
        return Window.LONG if found is Window.OPEN and self._unclosed > usual else found


def _gathers_unseen(module: Any) -> bool:
    """Whether `fully_shard` keeps gradients of the module where no parameter's `grad` shows them.

    It does between passes without synchronisation (`set_requires_gradient_sync`, `set_requires_all_reduce`), and no
    public name of it tells. In a torch that keeps them elsewhere they count as gathered: saving waits, nothing is lost.
    """
    try:
        state = getattr(module, _STATE_OF)()
        several = hasattr(state, "_fsdp_param_groups")  # the newer torch
        groups = state._fsdp_param_groups if several else [state._fsdp_param_group]  # noqa: SLF001
        return any(_has_gathered(group) for group in groups if group is not None)
    except AttributeError:
        return True


def _has_gathered(group: Any) -> bool:
    kept = [group._partial_reduce_output]  # noqa: SLF001
    for one in group.fsdp_params:
        kept.append(one.unsharded_accumulated_grad)
        if hasattr(one, "_unsharded_param"):  # there is none before the first pass
            kept.append(one._unsharded_param.grad)  # noqa: SLF001
    return any(gradient is not None for gradient in kept)


# Whether a script's schedules go on between a step and the next batch: no checkpoint has that.


_PLACE = "last_epoch"
"""Where torch's schedules count."""


class Schedules:
    """Those among the script's objects. A script whose first batch comes after a step of them takes it ahead of each
    batch, and does so after a resume.
    """

    def __init__(self, others: Iterable[Any]) -> None:
        self._all = [one for one in others if isinstance(getattr(one, _PLACE, None), int)]
        self._places = self._now()
        self._has_stepped = False
        self._ahead = False

    def stepped(self) -> None:
        """A step is done, with all that belongs to it."""
        self._has_stepped = True
        self._places = self._now()

    def late(self) -> bool:
        """Whether one went on since the step before; asked ahead of the first batch of each step."""
        moved = self.moved
        if not self._has_stepped:
            self._ahead = self._ahead or moved
        return moved and not self._ahead

    @property
    def moved(self) -> bool:
        """Whether one went on since the step before."""
        return self._now() != self._places

    def _now(self) -> list[Any]:
        return [getattr(one, _PLACE) for one in self._all]
