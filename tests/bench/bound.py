"""What a job would have cost at the least, had the whole market been known: an exact dynamic program in NumPy.

No policy can do better on a recording, so that the distance to it is all that there was to win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_NEVER = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Spans in ticks. `beside`: ticks that spot machines can boot beside on-demand ones; `free`: see `Terms`."""

    work: int
    slack: int
    changeover: int
    beside: int = 0
    free: int = 0


def least_costs(up: npt.NDArray[np.bool_], price: Floats, rules: Rules) -> Floats:
    """Return the least cost of each window, in ticks of on-demand machines.

    `up` and `price` (a part of on demand) are by window, tick and zone.
    """
    span = rules.work + rules.slack
    windows, _, zones = up.shape
    program = _Program(windows, zones, rules)
    lives = np.full((windows, zones), span)
    for tick in range(span - 1, -1, -1):
        lives = np.where(up[:, tick], lives + 1, 0)
        program.step(span - tick, up[:, tick], price[:, tick], lives)
    return program.idle[:, -1]


class _Program:
    """Costs still to come by window and slack (one place to the right: place 0 is a slack below zero).

    `idle`; `steady` by the boot left; `young` spot machines by zone and age, the last of any age; `pairs` the same
    beside on-demand machines that work. Spot machines that are to be taken so young that they are free are kept until
    then: what follows is as if idle at that tick, which `_known` keeps.
    """

    def __init__(self, windows: int, zones: int, rules: Rules) -> None:
        self._rules = rules
        columns = rules.slack + 2
        self.idle = _blank(windows, columns)
        self.steady = _blank(windows, rules.changeover + 1, columns)
        self.young = _blank(windows, zones, rules.changeover + 1, columns)
        self.pairs = _blank(windows, zones, rules.beside + 1, columns)
        self._known = _blank(rules.free + 1, windows, columns)

    def step(self, left: int, up: npt.NDArray[np.bool_], price: Floats, lives: Ints) -> None:
        """Go one tick further from the deadline; `lives` is for how many ticks each zone is still up."""
        d, beside = self._rules.changeover, self._rules.beside
        there, p = up[:, :, None], price[:, :, None]
        rented = np.where(there, p + self.young[:, :, 1, :-1], _NEVER).min(axis=1)
        rented = np.minimum(rented, self._free(left, lives, 0))
        best = np.minimum(np.minimum(self.idle[:, :-1], rented), 1 + self.steady[:, d - 1, :-1])
        alone = np.minimum(best, 1 + self.steady[:, 0, 1:])
        older = np.concatenate([self.young[:, :, 1:], self.young[:, :, -1:]], axis=2)
        kept = np.concatenate([older[:, :, :d, :-1], older[:, :, d:, 1:]], axis=2) + p[..., None]
        going = np.concatenate([alone[:, None], np.minimum(best[:, None], 1 + self.steady[:, :-1, :-1])], axis=1)
        if beside:
            both = np.where(there, 1 + p + self.pairs[:, :, 1, 1:], _NEVER).min(axis=1)
            for ticks in range(1, beside + 1):
                both = np.minimum(both, self._free(left, lives, ticks))
            going[:, 0] = np.minimum(alone, both)
            self.pairs[..., 1:] = self._pairs(there, p, kept, going[:, 0])
        self.idle[:, 1:] = best
        self.steady[:, :, 1:] = going
        gone = np.broadcast_to(best[:, None, None], kept.shape)
        self.young[..., 1:] = np.where(there[..., None], np.minimum(kept, gone), gone)
        for values in (self.idle, self.steady, self.young, self.pairs):
            values[..., left + 1 :] = 0
        self._known[left % len(self._known)] = self.idle

    def _free(self, left: int, lives: Ints, beside: int) -> Floats:
        """The least with spot machines launched now that will be taken uncharged, the first ticks beside others."""
        boot = np.maximum(np.minimum(lives, self._rules.changeover) - beside, 0)
        left_then = left - lives
        taken = (lives < self._rules.free) & (lives > beside) & (left_then > 0)
        places = np.arange(1, self._rules.slack + 2) - boot[..., None]
        windows = np.arange(len(lives))[:, None, None]
        then = self._known[left_then[..., None] % len(self._known), windows, np.maximum(places, 0)]
        works_still = taken[..., None] & (places <= left_then[..., None])
        return np.where(works_still, beside + then, _NEVER).min(axis=1)

    def _pairs(self, there: npt.NDArray[np.bool_], p: Floats, kept: Floats, alone: Floats) -> Floats:
        beside = self._rules.beside
        longer = np.concatenate([self.pairs[:, :, 1:, 1:], np.full_like(self.pairs[:, :, :1, 1:], _NEVER)], axis=2)
        going = np.minimum(kept[:, :, : beside + 1], 1 + p[..., None] + longer)
        alone = np.broadcast_to(alone[:, None, None], going.shape)
        return np.where(there[..., None], np.minimum(going, alone), alone)


def _blank(*shape: int) -> Floats:
    values = np.zeros(shape)
    values[..., 0] = _NEVER
    return values
