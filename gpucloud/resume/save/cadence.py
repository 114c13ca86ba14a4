"""When to save: pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpucloud.domain.errors import UsageError

INTERRUPTED_EVERY_S = 7200.0
"""Assumed mean time between interruptions, until one is measured: cautious for spot GPU pools."""

FIRST_SAVE_S = 2.0
"""A fresh job saves this early, so that its first minutes are not lost and a store that refuses is found out."""

_LEAST_S = 1.0
_ANEW_FITS = 1.25  # times what a save takes: for another writer to start, and for a store that was quicker before


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """At most one of the two is set; neither means auto."""

    every_s: float | None = None
    every_steps: int | None = None


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
        return moment.step % cadence.every_steps == 0
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
