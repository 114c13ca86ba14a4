"""Sums of what a GPU has, made there, by which the rank's writer sees whether what was copied is that."""

from __future__ import annotations

import torch

from gpucloud.resume.layout import size_of

Run = tuple[torch.Tensor, list[torch.Tensor]]
"""A place in the arena, and the tensors that travel there together; flat, where they are several."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Sums:
    """Where the sums go: behind the object, in its arena (`gpucloud.domain.fingerprints`)."""

    def __init__(self, memory: torch.Tensor, begin: int, runs: list[Run]) -> None:
        """`memory` has 64-bit numbers; `begin` is the address of the object's first byte, where places in it begin."""
        self.count = len(runs)
        self._memory = memory
        self._stretches = [_Stretch(run, begin) for run in runs]
        self._told = torch.tensor([one.told for one in self._stretches], dtype=torch.int64).reshape(-1)
        self._there: torch.Tensor | None = None

    def send(self) -> None:
        """Have the GPU's current stream sum all that will be copied, and bring the sums to where they go."""
        if not self.count:
            return
        if self._there is None:
            self._there = torch.empty(self.count, dtype=torch.int64, device=self._stretches[0].device)
        for stretch, slot in zip(self._stretches, self._there.unbind(), strict=True):
            words = stretch.words()
            every = tuple(range(words.dim()))
            if words.device == slot.device:
                torch.sum(words, dim=every, dtype=torch.int64, out=slot)
            else:  # a model that lies on several GPUs of one process
                slot.copy_(words.sum(dim=every, dtype=torch.int64))
        self._memory[: 3 * self.count] = self._told
        self._memory[3 * self.count : 4 * self.count].copy_(self._there, non_blocking=True)


class _Stretch:
    """Tensors that lie beside each other in the arena, as words of whole numbers that are summed."""

    def __init__(self, run: Run, begin: int) -> None:
        into, self._tensors = run
        at = into.data_ptr() - begin
        self.device = self._tensors[0].device
        self._words = words_of(self._tensors[0]) if len(self._tensors) == 1 else None
        size = sum(map(size_of, self._tensors))
        width = self._words.element_size() if self._words is not None else _width(size)
        self.told = (at, at + size, width)

    def words(self) -> torch.Tensor:
        if self._words is not None:
            return self._words
        gathered = torch.cat(self._tensors)
        return gathered.view(_WORDS[_width(size_of(gathered))])


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as whole numbers as wide as it allows, with which a GPU is quickest."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        return tensor.view(_WORDS[tensor.element_size()])
    flat = tensor.reshape(-1)
    return flat.view(_WORDS[_width(size_of(flat), flat.data_ptr(), int(flat.storage_offset()) * flat.element_size())])


def _width(*numbers: int) -> int:
    return next(width for width in _WORDS if all(number % width == 0 for number in numbers))
