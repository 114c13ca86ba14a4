"""Whether a script's schedules go on between a step and the next batch: no checkpoint has that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
        moved = self._now() != self._places
        if not self._has_stepped:
            self._ahead = self._ahead or moved
        return moved and not self._ahead

    def _now(self) -> list[Any]:
        return [getattr(one, _PLACE) for one in self._all]
