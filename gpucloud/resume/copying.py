"""Copies a rank's share of the state into its arena: from the CPU at once, from a GPU beside the next step.

A copy from a GPU runs on a stream of its own during the next forward and backward pass. Parameters and what optimizers
keep do not change meanwhile: the optimizer's next step waits for it on the GPU, the training thread never does. All
else (buffers, other objects) could be changed by anything, so what the GPU does next waits for those copies. So it does
for all of them where no optimizer's step is seen, as in a CUDA graph.

That nothing has changed what was copied is not believed: before the GPU does anything else it sums what it has
(`gpucloud.resume.sums`), and the rank's writer compares that with what it was given.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.resume.layout import size_of
from gpucloud.resume.plan import SMALL_BYTES, Pair
from gpucloud.resume.sums import Run, Sums

_GATHERED_BYTES = 64 * 2**20  # of GPU memory, for small tensors that travel together

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Route:
    """How some tensors get into the arena; good for every save while they stay where they are."""

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
