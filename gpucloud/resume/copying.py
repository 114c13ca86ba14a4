"""Copies a rank's share of the state into its arena: from the CPU at once, from a GPU beside the next step.

A copy from a GPU runs on a stream of its own during the next forward and backward pass. Parameters and what optimizers
keep do not change meanwhile: the optimizer's next step waits for it on the GPU, the training thread never does. All
else (buffers, other objects) could be changed by anything, so what the GPU does next waits for those copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from gpucloud.resume.layout import size_of
from gpucloud.resume.plan import SMALL_BYTES, Pair

_GATHERED_BYTES = 64 * 2**20  # of GPU memory, for small tensors that travel together


class Copier:
    """Copies; `optimizers` are those whose steps change what is shared."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._beside: _Beside | None = None
        self._optimizers = tuple(optimizers)

    def copy(self, own: Iterable[Pair], shared: Iterable[Pair]) -> None:
        """Begin to copy; what is on the CPU is copied when this returns."""
        own, shared = _copied(own), _copied(shared)
        if own or shared:
            self._beside = self._beside or _Beside(self._optimizers)
            self._beside.copy(own, shared)

    def under_way(self) -> bool:
        """Whether it is not all there yet; never waits."""
        return self._beside is not None and self._beside.under_way()

    def wait(self) -> None:
        """Wait until it is all there."""
        if self._beside is not None:
            self._beside.wait()

    def torn(self) -> bool:
        """Whether something changed a tensor while it was copied: then the copy is worth nothing."""
        return self._beside is not None and self._beside.torn()


class _Beside:
    """Copies from one GPU, on a stream of its own."""

    def __init__(self, optimizers: tuple[Any, ...]) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._torn = False
        self._waits = not optimizers
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def copy(self, own: list[Pair], shared: list[Pair]) -> None:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        self._torn = False
        with torch.cuda.stream(self._stream):
            _send(own)
            current.wait_event(self._stream.record_event())
            _send(shared)
            self._done = self._stream.record_event()
        if self._waits:
            current.wait_event(self._done)
        else:
            self._versions = [(tensor, tensor._version) for _, tensor in shared]  # noqa: SLF001  public in C++ alone

    def under_way(self) -> bool:
        return self._done is not None and not self._done.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def torn(self) -> bool:
        self._compare()
        self._waits = self._waits or self._torn  # once is enough: from now on everything waits
        return self._torn

    def _before_step(self, *_: Any) -> None:
        if self._done is not None and self._versions:
            self._compare()
            torch.cuda.current_stream().wait_event(self._done)

    def _compare(self) -> None:
        """Look at the versions that tensors count of themselves; from the optimizer's step on, changes are allowed."""
        self._torn = self._torn or any(tensor._version != version for tensor, version in self._versions)  # noqa: SLF001
        self._versions = []


def _copied(pairs: Iterable[Pair]) -> list[Pair]:
    """Copy what is on the CPU, and return the rest."""
    rest = []
    for into, tensor in pairs:
        if tensor.is_cuda:
            rest.append((into, tensor))
        else:
            into.copy_(tensor)
    return rest


def _send(pairs: list[Pair]) -> None:
    """Queue the copies: a large tensor by itself, small ones that lie beside each other together."""
    for run in _runs(pairs):
        into, tensor = run[0]
        if len(run) > 1:
            size = sum(one.numel() for _, one in run)
            into = into.as_strided((size,), (1,))
            tensor = torch.cat([one.reshape(-1) for _, one in run])
        into.copy_(tensor, non_blocking=True)
        for _, one in run:
            one.record_stream(torch.cuda.current_stream())


def _runs(pairs: list[Pair]) -> Iterator[list[Pair]]:
    def key(pair: Pair) -> tuple[torch.dtype, bool]:
        return pair[1].dtype, size_of(pair[1]) <= SMALL_BYTES

    for (_, small), found in itertools.groupby(pairs, key):
        run: list[Pair] = []
        size = 0
        for pair in found:
            size += size_of(pair[1])
            if run and not (small and size <= _GATHERED_BYTES and _beside(run[-1][0], pair[0])):
                yield run
                run, size = [], size_of(pair[1])
            run.append(pair)
        if run:
            yield run


def _beside(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() + size_of(one) == other.data_ptr()
