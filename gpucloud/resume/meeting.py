"""Ranks that come together beside their scripts: all of them, or none."""

from __future__ import annotations

from typing import Any

_ON, _OFF = b"on", b"off"


class Meeting:
    """One occasion of that name, which each rank may come to when it likes, or pass by: nobody waits for who went on.

    It takes place once every rank has said that it comes, and never once one that had said so has gone before that. The
    first of the two to be written holds for all: a store compares and sets at once. Raises RuntimeError where the store
    does not answer.
    """

    def __init__(self, name: str, world: int, store: Any) -> None:
        self._calls, self._word = f"{name}/calls", f"{name}/word"
        self._world = world
        self._store = store
        self._has_called = False

    def called(self) -> bool:
        """Whether a rank has said that it comes."""
        return self._has_called or (self._world > 1 and bool(self._store.check([self._calls])))

    def call(self) -> None:
        """Say that this rank comes."""
        if not self._has_called:
            self._has_called = True
            if self._world > 1 and self._store.add(self._calls, 1) == self._world:
                self._store.compare_set(self._word, "", _ON.decode())

    def stands(self) -> bool | None:
        """Whether it takes place; None while that is open."""
        if self._world == 1:
            return True if self._has_called else None
        return bool(self._store.get(self._word) == _ON) if self._store.check([self._word]) else None

    def leave(self) -> bool:
        """Go on, unless it takes place already; return whether it does, and this rank must come."""
        if self._world == 1 or not self._has_called:
            return self._has_called
        return bool(self._store.compare_set(self._word, "", _OFF.decode()) == _ON)
