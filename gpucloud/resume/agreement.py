"""What all ranks agree on at a step, in one exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpucloud.domain.manifest import Why
from gpucloud.resume.folder import AttemptFolder
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.saving import News
from gpucloud.resume.windows import Window

_FOREVER_S = 10.0**7
_STOPS = (None, Why.STOP, Why.BUDGET, Why.NOTICE)
"""As ranks tell each other; where nodes have different reasons, the one that leaves the least time holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """The same on all ranks: why to stop, whether to save (due, or wished for by a node), the generation.

    `news` is how the save under way goes on.
    """

    stop: Why | None
    due: bool
    wished: bool
    generation: int
    news: News


class Agreement:
    """Compares what each rank sees: its node's wishes, its writer, and on rank 0 whether a save is due.

    While a window of gradients is open nothing is saved; what was due or wished for then is so at its end.
    """

    def __init__(self, ranks: Ranks, folder: AttemptFolder) -> None:
        self._ranks = ranks
        self._folder = folder
        self._granted = self._wished = self._due = 0

    def reach(self, *, due: bool, generation: int, news: News, window: Window) -> Agreed:
        """Return what holds for this step; a wish holds until `granted`, and so does what was due in a window."""
        told = (window, _STOPS.index(self._folder.stop_asked()), int(due), generation, self._folder.save_asked())
        found, stop, due_now, agreed_generation, wish, *rest = self._ranks.highest(*told, *news.numbers())
        self._wished = max(self._wished, wish)
        due_now = max(self._due, due_now)
        self._due = due_now if found else 0
        return Agreed(
            stop=_STOPS[stop] if found != Window.OPEN else None,
            due=not found and bool(due_now),
            wished=not found and self._wished > self._granted,
            generation=agreed_generation,
            news=News(*rest),
        )

    def stop(self) -> Why | None:
        """Return why to stop, as any node's agent has said by now."""
        (found,) = self._ranks.highest(_STOPS.index(self._folder.stop_asked()))
        return _STOPS[found]

    def granted(self) -> None:
        """Every wish so far is met by the save that begins now."""
        self._granted = max(self._granted, self._wished)

    def seconds_left(self) -> float:
        """Return how long there is for a last save on the node that has the least time."""
        own = min(self._folder.seconds_left(), _FOREVER_S)
        (least,) = self._ranks.highest(-round(1000 * own))
        return math.inf if -least >= 1000 * _FOREVER_S else -least / 1000
