"""This rank's share of the state at one step, as one object in memory that its writer reads."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.ranks import Ask, NoMemory, Ranks, asked, free_memory, sharing, shortage
from gpucloud.resume.save.writer import SMALL_BYTES, Pair, Plan, Run, SaveBuffer, Sums
from gpucloud.resume.state.modules import Homes
from gpucloud.resume.state.state import Collected, Groups, TrainingState
from gpucloud.resume.state.tree import Shares, Tensors, Unplanned, size_of

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
    """Copies into one buffer, again and again: a capture must be written before the next one begins.

    Collecting the names and places of a thousand tensors takes milliseconds in which a GPU would have nothing to do.
    While they stay where they were, the copies are queued at once, and the rest is done ahead of the optimizer's step.
    """

    def __init__(self, state: TrainingState, ranks: Ranks) -> None:
        self.save_buffer = SaveBuffer(_gpu())
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
        self.save_buffer.close()
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
                hint="build the whole model on every rank, or give resume.init the PipelineStage: model=stage",
            )

    def _planned(self, found: Collected) -> Plan:
        tensors = found.shared | found.own
        if self._plan is None or not self._plan.fits(tensors):
            header = sum(map(len, found.metadata.values()))
            self._require_memory(sum(map(size_of, tensors.values())) + header)
            self._plan = Plan(tensors, self.save_buffer, header=header)
        return self._plan

    def _require_memory(self, size: int) -> None:
        """Raise NoMemory where the buffer cannot grow to that size, ahead of it; before the first one, on all ranks."""
        wanted = max(0, size - self.save_buffer.size)
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


# Copies a rank's share of the state into its buffer: from the CPU at once, from a GPU beside the next step.
#
# A copy from a GPU runs on a stream of its own during the next forward and backward pass. Parameters and what
# optimizers keep do not change meanwhile: the optimizer's next step waits for it on the GPU, the training thread never
# does. All else (buffers, other objects) could be changed by anything, so what the GPU does next waits for those
# copies. So it does for all of them where no optimizer's step is seen, as in a CUDA graph.
#
# That nothing has changed what was copied is not believed: before the GPU does anything else it sums what it has
# (`gpucloud.resume.save.writer`), and the rank's writer compares that with what it was given.


_GATHERED_BYTES = 64 * 2**20  # of GPU memory, for small tensors that travel together

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Route:
    """How some tensors get into the buffer; good for every save while they stay where they are."""

    here: list[Pair]
    far: list[torch.Tensor]
    runs: list[Run]


def route(pairs: Iterable[Pair]) -> Route:
    """Return how they travel: those of the CPU one by one, from a GPU large ones so, and small neighbours together."""
    found = list(pairs)
    here = [pair for pair in found if not _is_far(pair[1])]
    far = [pair for pair in found if _is_far(pair[1])]
    return Route(here, [tensor for _, tensor in far], [_together(run) for run in _runs(far)])


class Copier:
    """Copies; `optimizers` are those whose steps change what is shared; `before_step` is called ahead of the first.

    By then the GPU has the next forward and backward pass to do, and the training thread has time.
    """

    def __init__(self, optimizers: Iterable[Any], before_step: Callable[[], None] = lambda: None) -> None:
        self._beside: _Beside | None = None
        self._optimizers = tuple(optimizers)
        self._before_step = before_step

    def copy(self, own: Route, shared: Route, sums: Sums, *, steps_are_seen: bool = True) -> None:
        """Begin to copy; what is on the CPU is copied when this returns.

        `steps_are_seen`: an optimizer's step was seen to end the step that is saved.
        """
        for into, tensor in (*own.here, *shared.here):
            _put(into, tensor)
        if own.runs or shared.runs:
            self._beside = self._beside or _Beside(self._optimizers, self._before_step)
            self._beside.copy(own, shared, sums, waits=not steps_are_seen)

    def calls_back(self) -> bool:
        """Whether a copy of what is shared is followed by `before_step`, if the optimizer makes a step."""
        return self._beside is not None and not self._beside.waits

    def under_way(self) -> bool:
        """Whether it is not all there yet; never waits."""
        return self._beside is not None and self._beside.under_way()

    def wait(self) -> None:
        """Wait until it is all there."""
        if self._beside is not None:
            self._beside.wait()

    def torn(self) -> bool:
        """Whether something was seen to change a tensor while it was copied: then the copy is worth nothing."""
        return self._beside is not None and self._beside.torn()

    def mistrust(self) -> None:
        """From now on have all that the GPU does next wait: a copy was torn."""
        if self._beside is not None:
            self._beside.waits = True


class _Beside:
    """Copies from one GPU, on a stream of its own; `waits`: what the GPU does next waits for all of it."""

    def __init__(self, optimizers: tuple[Any, ...], before_step: Callable[[], None]) -> None:
        self.waits = not optimizers
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._torn = False
        self._sent: tuple[Route, ...] = ()
        self._before_step = before_step
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._step_comes)

    def copy(self, own: Route, shared: Route, sums: Sums, *, waits: bool) -> None:
        current = torch.cuda.current_stream()
        sums.send()
        self._stream.wait_stream(current)
        self._torn = False
        self._sent = (own, shared)  # kept alive: the allocator knows nothing of this stream's use of them
        with torch.cuda.stream(self._stream):
            if own.runs:
                _send(own)
                current.wait_event(self._stream.record_event())
            _send(shared)
            self._done = self._stream.record_event()
        if waits or self.waits:
            current.wait_event(self._done)
            self._versions = []
        else:
            self._versions = [(tensor, tensor._version) for tensor in shared.far]  # noqa: SLF001  public in C++ alone

    def under_way(self) -> bool:
        return self._done is not None and not self._done.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def torn(self) -> bool:
        self._compare()
        self._sent = ()
        self.waits = self.waits or self._torn  # once is enough: from now on everything waits
        return self._torn

    def _step_comes(self, *_: Any) -> None:
        if torch.cuda.is_current_stream_capturing():  # into a graph: of its steps nothing will be seen
            self.waits = True
        elif self._done is not None and self._versions:
            self._before_step()
            self._compare()
            torch.cuda.current_stream().wait_event(self._done)

    def _compare(self) -> None:
        """Look at the versions that tensors count of themselves; from the optimizer's step on, changes are allowed."""
        self._torn = self._torn or any(tensor._version != version for tensor, version in self._versions)  # noqa: SLF001
        self._versions = []


def _put(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy on the CPU. With one thread, the C library's way takes a tenth less than torch's."""
    same = into.is_contiguous() and tensor.is_contiguous() and into.dtype == tensor.dtype
    if same and torch.get_num_threads() == 1 and not (tensor.is_conj() or tensor.is_neg()) and type(tensor) in _PLAIN:
        ctypes.memmove(into.data_ptr(), tensor.data_ptr(), size_of(tensor))
    else:
        into.copy_(tensor)


def _is_far(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _send(route: Route) -> None:
    """Queue the copies; those that must be gathered first are early in the route, for they need the GPU's cores."""
    for into, tensors in route.runs:
        into.copy_(tensors[0] if len(tensors) == 1 else torch.cat(tensors), non_blocking=True)


def _together(run: list[Pair]) -> Run:
    into, tensor = run[0]
    if len(run) == 1:
        return into, [tensor]
    size = sum(one.numel() for _, one in run)
    return into.as_strided((size,), (1,)), [one.reshape(-1) for _, one in run]


def _runs(pairs: list[Pair]) -> Iterator[list[Pair]]:
    def key(pair: Pair) -> tuple[torch.dtype, bool]:
        return pair[1].dtype, size_of(pair[1]) <= SMALL_BYTES and pair[1].is_contiguous()

    for (_, small), found in itertools.groupby(pairs, key):
        run: list[Pair] = []
        size = 0
        for pair in found:
            size += size_of(pair[1])
            if run and not (small and size <= _GATHERED_BYTES and _adjacent(run[-1][0], pair[0])):
                yield run
                run, size = [], size_of(pair[1])
            run.append(pair)
        if run:
            yield run


def _adjacent(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() + size_of(one) == other.data_ptr()
