"""Where a step that changes the weights ends: gradients gathered over several steps until then are in no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

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


class Windows:
    """Watches torch's optimizers; without one, every step is the end of its window.

    `longest` is that of the windows so far, in steps, other attempts' included; 0 while none was seen to end. `seen`:
    an optimizer was seen to step in the step that `now` was told of last.
    """

    def __init__(self, optimizers: Sequence[Any], modules: Sequence[Any] = (), longest: int = 0) -> None:
        self.longest = longest
        self.seen = False
        self._optimizers = optimizers
        self._sharded = [one for module in modules for one in module.modules() if hasattr(type(one), _STATE_OF)]
        self._stepped = False
        self._open = 0
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._has_stepped)

    @property
    def lacks(self) -> str | None:
        """Why a checkpoint of this step may lack what was gathered before it; None where it lacks nothing."""
        if not self._open:
            return None
        seen = (
            f"its optimizer was last seen to step {self._open} steps ago" if self.longest else "no optimizer was seen"
        )
        return f"gradients may be gathered that no checkpoint has: {seen}"

    @property
    def rests(self) -> bool:
        """Whether nothing of a next step has begun, as far as is seen: the last one stepped, and was told of."""
        return self.seen and not self._stepped and not self._open

    def now(self) -> Window:
        """Return how this step ends; called once for each."""
        if self._stepped:
            self.longest = max(self.longest, self._open + 1)
        self.seen = self._stepped
        self._open = 0 if self._stepped or not self._gathered() else self._open + 1
        self._stepped = False
        usual = _TIMES_LONGER * self.longest
        if self._open == 0 or self._open > max(_UNSEEN_STEPS, usual):
            return Window.CLOSED
        if not self.longest:
            return Window.UNKNOWN
        return Window.OPEN if self._open <= usual else Window.LONG

    def _gathered(self) -> bool:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        if any(parameter.grad is not None for group in groups for parameter in group["params"]):
            return True
        return any(map(_gathers_unseen, self._sharded))

    def _has_stepped(self, *_: Any) -> None:
        self._stepped = True


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
