"""Where a step that changes the weights ends: gradients gathered over several steps until then are in no checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

_UNSEEN_STEPS = 64
"""After so many steps, an optimizer that was never seen to step is one that cannot be seen."""

_LONGEST_STEPS = 1024
"""Over how many steps gradients are gathered at most."""


class Window(IntEnum):
    """Whether a checkpoint of this step lacks gathered gradients; unknown, as long as no optimizer was seen to step."""

    CLOSED, UNKNOWN, OPEN = range(3)


class Windows:
    """Watches torch's optimizers; without one, every step is the end of its window."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._stepped = self._seen = False
        self._open = 0
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._has_stepped)

    def now(self) -> Window:
        """Return how this step ends; called once for each."""
        self._open = 0 if self._stepped or not self._gathered() else self._open + 1
        self._stepped = False
        if self._open == 0 or self._open > (_LONGEST_STEPS if self._seen else _UNSEEN_STEPS):
            return Window.CLOSED
        return Window.OPEN if self._seen else Window.UNKNOWN

    def _gathered(self) -> bool:
        groups = (group for optimizer in self._optimizers for group in optimizer.param_groups)
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def _has_stepped(self, *_: Any) -> None:
        self._stepped = self._seen = True
