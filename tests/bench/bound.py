"""What a job would have cost at the least, had the whole market been known: an exact dynamic program in NumPy.

No policy can do better on a recording, so that the distance to it is all that there was to win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
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
    paid = np.concatenate([np.zeros((windows, 1, zones)), np.cumsum(price, axis=1)], axis=1)
    program = _Program(windows, zones, rules)
    for tick in range(span - 1, -1, -1):
        ages = np.minimum(np.arange(program.ages), tick)
        refunds = (paid[:, tick, :, None] - np.moveaxis(paid[:, tick - ages], 1, 2)) * (
            np.arange(program.ages) < rules.free
        )
        program.step(span - tick, up[:, tick], price[:, tick], refunds)
    return program.idle[:, -1]


class _Program:
    """Costs still to come by window and slack (one place to the right: place 0 is a slack below zero).

    `idle`; `steady` by the boot left; `young` spot machines by zone and age, the last of any age; `pairs` the same
    beside on-demand machines that work.
    """

    def __init__(self, windows: int, zones: int, rules: Rules) -> None:
        self._rules = rules
        self.ages = max(rules.changeover, rules.free) + 1
        columns = rules.slack + 2
        self.idle = _blank(windows, columns)
        self.steady = _blank(windows, rules.changeover + 1, columns)
        self.young = _blank(windows, zones, self.ages, columns)
        self.pairs = _blank(windows, zones, rules.beside + 1, columns)

    def step(self, left: int, up: npt.NDArray[np.bool_], price: Floats, refunds: Floats) -> None:
        d, beside = self._rules.changeover, self._rules.beside
        there, p = up[:, :, None], price[:, :, None]
        rented = np.where(there, p + self.young[:, :, 1, :-1], _NEVER).min(axis=1)
        best = np.minimum(np.minimum(self.idle[:, :-1], rented), 1 + self.steady[:, d - 1, :-1])
        alone = np.minimum(best, 1 + self.steady[:, 0, 1:])
        older = np.concatenate([self.young[:, :, 1:], self.young[:, :, -1:]], axis=2)
        kept = np.concatenate([older[:, :, :d, :-1], older[:, :, d:, 1:]], axis=2) + p[..., None]
        gone = best[:, None, None, :] - refunds[..., None]
        going = np.concatenate([alone[:, None], np.minimum(best[:, None], 1 + self.steady[:, :-1, :-1])], axis=1)
        if beside:
            both = np.where(there, 1 + p + self.pairs[:, :, 1, 1:], _NEVER).min(axis=1)
            going[:, 0] = np.minimum(alone, both)
            self.pairs[..., 1:] = self._pairs(there, p, kept, going[:, 0], refunds)
        self.idle[:, 1:] = best
        self.steady[:, :, 1:] = going
        self.young[..., 1:] = np.where(there[..., None], np.minimum(kept, best[:, None, None]), gone)
        for values in (self.idle, self.steady, self.young, self.pairs):
            values[..., left + 1 :] = 0

    def _pairs(self, there: npt.NDArray[np.bool_], p: Floats, kept: Floats, alone: Floats, refunds: Floats) -> Floats:
        beside = self._rules.beside
        longer = np.concatenate([self.pairs[:, :, 1:, 1:], np.full_like(self.pairs[:, :, :1, 1:], _NEVER)], axis=2)
        going = np.minimum(kept[:, :, : beside + 1], 1 + p[..., None] + longer)
        lost = alone[:, None, None] - refunds[:, :, : beside + 1, None]
        return np.where(there[..., None], np.minimum(going, alone[:, None, None]), lost)


def _blank(*shape: int) -> Floats:
    values = np.zeros(shape)
    values[..., 0] = _NEVER
    return values
