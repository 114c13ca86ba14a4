"""What all ranks agree on at a step, in one exchange."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpucloud.domain.manifest import Why
from gpucloud.resume.folder import AttemptFolder
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.saving import News

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
    """Compares what each rank sees: its node's wishes, its writer, and on rank 0 whether a save is due."""

    def __init__(self, ranks: Ranks, folder: AttemptFolder) -> None:
        self._ranks = ranks
        self._folder = folder
        self._granted = self._wished = 0

    def reach(self, *, due: bool, generation: int, news: News) -> Agreed:
        """Return what holds for this step; a wish holds until `granted`."""
        told = (_STOPS.index(self._folder.stop_asked()), int(due), generation, self._folder.save_asked())
        stop, due_now, agreed_generation, wish, *rest = self._ranks.highest(*told, *news.numbers())
        self._wished = max(self._wished, wish)
        return Agreed(
            stop=_STOPS[stop],
            due=bool(due_now),
            wished=self._wished > self._granted,
            generation=agreed_generation,
            news=News(*rest),
        )

    def granted(self) -> None:
        """Every wish so far is met by the save that begins now."""
        self._granted = max(self._granted, self._wished)

    def seconds_left(self) -> float:
        """Return how long there is for a last save on the node that has the least time."""
        own = min(self._folder.seconds_left(), _FOREVER_S)
        (least,) = self._ranks.highest(-round(1000 * own))
        return math.inf if -least >= 1000 * _FOREVER_S else -least / 1000
