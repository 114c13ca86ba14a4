"""What happened to a job, one typed value each: its kinds, what names it in the store, how it reads as JSON.

An event is made where the job's state changes (`domain/supervision/happened`), and stored with that state until it has
an object of its own (`usecases/jobstore/events`): whoever comes next puts what a killed supervisor did not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any

from gpucloud.domain import codec
from gpucloud.domain.untrusted import in_one_line

MOST_PENDING, MOST_PENDING_BYTES = 1000, 256 << 10
"""Of events that wait for a store that takes none; a job of months has some hundreds in all."""
_NO_NAME = re.compile(r"[^a-z0-9._]+")
_LONGEST_NAME, _LONGEST_SHOWN, _LONGEST_KIND = 150, 400, 40


class EventKind(str, Enum):
    """Every kind, by the word that people and programs read; `about` says of each what it tells."""

    SUBMITTED = "submitted"
    PLANNED = "planned"
    WAITING = "waiting"
    MACHINES = "machines"
    MACHINES_ENDED = "machines_ended"
    UNHEALTHY = "unhealthy"
    ATTEMPT = "attempt"
    STARTED = "started"
    MILESTONE = "milestone"
    CHECKPOINT = "checkpoint"
    INTERRUPTED = "interrupted"
    RESUMED = "resumed"
    HUNG = "hung"
    IDLE = "idle"
    ATTEMPT_ENDED = "attempt_ended"
    BUDGET = "budget"
    DEADLINE = "deadline"
    ENDED = "ended"

    @property
    def about(self) -> str:
        """What an event of this kind tells, in a line of the handbook."""
        return _ABOUT[self]


_ABOUT = {
    EventKind.SUBMITTED: "the run was ordered, or goes on after it had ended",
    EventKind.PLANNED: "the machines that it is to have: type, zone, market, and the highest price of each (`usd`)",
    EventKind.WAITING: "no capacity (`reason`): a pool refused, gives no machine, or a cheaper one is waited for",
    EventKind.MACHINES: "machines came (`nodes`)",
    EventKind.MACHINES_ENDED: "machines ended, and why (`reason`)",
    EventKind.UNHEALTHY: "a machine takes no part any more, or was given up, and why",
    EventKind.ATTEMPT: "an attempt begins on its machines",
    EventKind.STARTED: "its first step: how long the start took (`seconds`), and its parts (`parts`)",
    EventKind.MILESTONE: "each tenth of the steps (`percent`); without a total, steps 1, 10, 100, 1000 and so on",
    EventKind.CHECKPOINT: "the first checkpoint of an attempt, and each whose time was not simply due (`reason`)",
    EventKind.INTERRUPTED: "machines are taken, or are gone (`reason`): at which `step`, and which is `saved`",
    EventKind.RESUMED: "the first new step after that, and how long there was none (`seconds`)",
    EventKind.HUNG: "an attempt is ended that makes no step any more",
    EventKind.IDLE: "an attempt is ended whose GPUs are idle, as `idle:` says",
    EventKind.ATTEMPT_ENDED: "an attempt ended: why (`reason`), at which `step`, which is `saved`, and how long it was",
    EventKind.BUDGET: "50, 80 or 100 `percent` of the budget (`usd`) are spent; 100 also where it ends the job before",
    EventKind.DEADLINE: "the deadline will be missed as things stand, and why",
    EventKind.ENDED: "the job ended: why (`reason`), and the exit code of `train` (`code`)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job, told once. `kind` is a word of `EventKind`; a newer gpucloud has others."""

    kind: str
    at: datetime
    """When, as whoever saw it knew it, by the store's clock."""
    job: str
    which: str
    """What makes it one among those of its kind: an attempt, a machine, a percentage, a time."""
    message: str
    attempt: int | None = None
    nodes: tuple[str, ...] = ()
    step: int | None = None
    saved: int | None = None
    """The newest step, or save, that was in the store."""
    percent: int | None = None
    seconds: float | None = None
    parts: tuple[tuple[str, float], ...] = ()
    """What `seconds` consist of, in their order, each by name."""
    usd: Decimal | None = None
    reason: str | None = None
    code: int | None = None

    @property
    def name(self) -> str:
        """What names it among the job's events: the same for whoever saw it, and fit for a key whoever wrote it."""
        found = (_NO_NAME.sub("-", word.lower()).strip("-._") for word in (self.kind, self.which))
        return ".".join(word or "-" for word in found)[:_LONGEST_NAME]

    @property
    def shown_kind(self) -> str:
        """Its kind, in one line, whoever wrote it; words of a newer gpucloud as they are."""
        return in_one_line(self.kind[:_LONGEST_KIND])

    @property
    def shown(self) -> str:
        """What it says, in one line: machines of the job may have written it."""
        return in_one_line(self.message[:_LONGEST_SHOWN])


def event_json(event: Event) -> dict[str, Any]:
    """Return what programs read of it: `kind`, `at`, `job`, `id`, `message`, and what else is known of it."""
    told = codec.plain(event)
    head = {"kind": told["kind"], "at": told["at"], "job": told["job"], "id": event.name, "message": event.shown}
    rest = {key: value for key, value in told.items() if key not in {*head, "which"} and value not in (None, [])}
    return head | rest | ({"parts": dict(event.parts)} if event.parts else {})


_KEPT_FIRST = (EventKind.ENDED, EventKind.BUDGET, EventKind.INTERRUPTED)
_RANKS = {
    **{kind.value: 1 for kind in EventKind},
    **{kind.value: 0 for kind in _KEPT_FIRST},
    EventKind.MILESTONE.value: 2,
}


def rank_of(kind: str) -> int:
    """Return how early events of a kind are kept, or read, where not all can be: the end first, unknown ones last."""
    return _RANKS.get(kind, 3)


def within_bounds(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return those events that a state may have waiting, in their order: by their kinds, then the newest ones."""
    sizes = [len(codec.to_json(one)) for one in events]
    if len(events) <= MOST_PENDING and sum(sizes) <= MOST_PENDING_BYTES:
        return events
    kept: set[int] = set()
    left = MOST_PENDING_BYTES
    for at in sorted(range(len(events)), key=lambda at: (rank_of(events[at].kind), -at)):
        if len(kept) < MOST_PENDING and sizes[at] <= left:
            kept.add(at)
            left -= sizes[at]
    return tuple(one for at, one in enumerate(events) if at in kept)


_PLACES = {kind.value: place for place, kind in enumerate(EventKind)}


def in_order(event: Event) -> tuple[datetime, int, str]:
    """Return what events are sorted by: their time, then their kind as above, unknown ones last, then their name."""
    return event.at, _PLACES.get(event.kind, len(_PLACES)), event.name
