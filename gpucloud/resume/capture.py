"""This rank's share of the state at one step, as one object in memory that its writer reads."""

from __future__ import annotations

import contextlib
import json
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.arena import Arena
from gpucloud.resume.copying import Copier, Route, route
from gpucloud.resume.layout import size_of
from gpucloud.resume.memory import Ask, NoMemory, asked, free_memory, sharing, shortage
from gpucloud.resume.plan import Plan
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.sharded import Shares, Unplanned
from gpucloud.resume.state import Collected, Groups, Homes, TrainingState
from gpucloud.resume.sums import Sums
from gpucloud.resume.tree import Tensors

TOUCHED = "parameters were changed between run.step() and the optimizer's next step: from now on saves wait"
REPLACED = "the script's tensors are others than at the save before: this save is left out, the next one has them"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Of the save before: where the shared tensors lie and how they travel, what `TrainingState` says of them.

    `own` are the names of the rank's own tensors, `changing` those of them that the next forward pass may change.
    """

    tensors: Tensors
    route: Route
    sums: Sums
    kept: list[int]
    homes: Homes
    own: frozenset[str]
    changing: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """What is still to be done for a save whose copies are queued: nothing in it changes meanwhile."""

    changing: dict[str, Any]
    extra: dict[str, Any]
    groups: Groups


class Capture:
    """Copies into one arena, again and again: a capture must be written before the next one begins.

    Collecting the names and places of a thousand tensors takes milliseconds in which a GPU would have nothing to do.
    While they stay where they were, the copies are queued at once, and the rest is done ahead of the optimizer's step.
    """

    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        self.arena = Arena(_gpu())
        self._state = state
        self._ranks = ranks
        self._shares = Shares(ranks) if state.sharded else None
        self._copier = Copier(state.optimizers, self._complete)
        self._plan: Plan | None = None
        self._known: _Known | None = None
        self._rest: _Rest | None = None
        self._replaced = False
        self._compared = False
        self.summed = 0
        self._sharing = 0  # so many ranks take memory from where this one does; unknown before there was enough

    @property
    def size(self) -> int:
        """The object's, in bytes."""
        return self._plan.size if self._plan else 0

    def prepare(self, extra: dict[str, Any]) -> None:
        """Make memory ready for a state like the present one, beside the training. Raises NoMemory."""
        self._planned(self._collected(extra))

    def begin(self, extra: dict[str, Any], *, steps_are_seen: bool = True, alone: bool = False) -> None:
        """Copy the state as it is now; `extra`, which nobody else has, joins the rank's own part.

        `steps_are_seen`: an optimizer's step was seen to end this one, and will be seen again. With `alone` no other
        rank is asked anything, nor told. Raises UsageError for what has no form, NoMemory where the state has no place;
        Unplanned where the ranks would have to agree first.
        """
        if alone and not (self._compared and self._sharing):
            raise Unplanned
        self._rest, self._replaced = None, False
        if not (steps_are_seen and self._begun_as_before(extra)):
            self._begin_anew(extra, steps_are_seen=steps_are_seen, alone=alone)

    def under_way(self) -> bool:
        """Whether a GPU still copies; never waits."""
        return self._copier.under_way()

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._copier.wait()

    def spoilt(self) -> str:
        """Return why what was copied is worth nothing, or an empty text; once it is all there."""
        self._complete()
        if self._copier.torn():
            return TOUCHED
        return REPLACED if self._replaced else ""

    def mistrust(self) -> None:
        """Copy from now on while nothing else happens: what was copied was not what the GPU had."""
        self._copier.mistrust()

    def close(self) -> None:
        """Give the memory back."""
        self._known = None
        self.arena.close()
        self._plan = None

    def _begun_as_before(self, extra: dict[str, Any]) -> bool:
        """Begin to copy by what the save before knew; False where that does not hold any more."""
        known, plan = self._known, self._plan
        if known is None or plan is None or not self._copier.calls_back() or known.kept != self._state.kept():
            return False
        changing, own = self._state.collect_changing(known.homes)
        if own.keys() != known.changing or not plan.holds(own):
            return False
        self._rest = _Rest(changing=changing, extra=extra, groups=self._state.groups())
        self.summed = known.sums.count
        self._copier.copy(route(plan.pairs(own)), known.route, known.sums)
        return True

    def _begin_anew(self, extra: dict[str, Any], *, steps_are_seen: bool, alone: bool) -> None:
        found = self._collected(extra, alone=alone)
        plan = self._planned(found)
        plan.head(found.metadata)
        shared = route(plan.pairs(found.shared))
        sums = Sums(plan.sums, plan.begin, shared.runs)
        self.summed = sums.count
        self._known = None
        if self._shares is None and shared.far:
            homes = self._state.homes()
            self._known = _Known(
                tensors=found.shared,
                route=shared,
                sums=sums,
                kept=self._state.kept(),
                homes=homes,
                own=frozenset(found.own),
                changing=frozenset(self._state.collect_changing(homes)[1]),
            )
        self._copier.copy(route(plan.pairs(found.own)), shared, sums, steps_are_seen=steps_are_seen)

    def _collected(self, extra: dict[str, Any], *, alone: bool = False) -> Collected:
        found = self._state.collect(self._ranks.rank, self._ranks.world, extra, self._shares, alone=alone)
        if not self._compared:
            self._compared = True
            self._compare(found.names)
        return found

    def _compare(self, names: tuple[str, ...]) -> None:
        """Raise UsageError, on all ranks alike, when they do not have the same tensors: a share would be of nothing."""
        told = zlib.crc32(json.dumps(sorted(names)).encode())
        if self._ranks.highest(told, -told) != (told, -told):
            raise UsageError(
                "the ranks have different models, and what one has alone would be lost",
                hint="build the whole model on every rank: pipeline stages cannot be saved together",
            )

    def _planned(self, found: Collected) -> Plan:
        tensors = found.shared | found.own
        if self._plan is None or not self._plan.fits(tensors):
            header = sum(map(len, found.metadata.values()))
            self._require_memory(sum(map(size_of, tensors.values())) + header)
            self._plan = Plan(tensors, self.arena, header=header)
        return self._plan

    def _require_memory(self, size: int) -> None:
        """Raise NoMemory where the arena cannot grow to that size, ahead of it; before the first one, on all ranks."""
        wanted = max(0, size - self.arena.size)
        first = not self._sharing
        asks = asked(self._ranks, wanted) if first else [Ask(wanted, free_memory())] * self._sharing
        if short := shortage(asks):
            raise NoMemory(short, of_all=first)
        if first:
            self._sharing = sharing(asks, self._ranks.rank)

    def _complete(self) -> None:
        """Add to what is being copied the rest, if that is missing yet: nothing in it has changed so far."""
        rest, known, plan = self._rest, self._known, self._plan
        if rest is None or known is None or plan is None:
            return
        self._rest = None
        found = self._state.collect_rest(self._ranks.rank, self._ranks.world, rest.changing, rest.extra, rest.groups)
        same = (
            _places(found.shared) == _places(known.tensors)
            and self._state.homes() == known.homes
            and known.changing | found.own.keys() == known.own
            and plan.holds(found.own)
        )
        headed = False
        with contextlib.suppress(NoMemory):  # for a header that has grown: nothing may come out of the optimizer's step
            headed = same and plan.head_in_place(found.metadata)
        if not headed:
            self._known, self._replaced = None, True
            return
        for into, tensor in plan.pairs(found.own):
            into.copy_(tensor)


def _places(tensors: Tensors) -> list[tuple[Any, ...]]:
    return [(name, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors.items()]


def _gpu() -> int | None:
    """Return the GPU that this rank uses; None on a CPU. A script has touched it before `init`."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
