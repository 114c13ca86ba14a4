"""Fingerprints of the tensors that a script has, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpucloud.domain.fingerprints import NOTHING, Fingerprint, fingerprint
from gpucloud.store import fingerprinting

_WHOLE = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def fingerprint_of(tensor: torch.Tensor, offset: Sequence[int] = ()) -> Fingerprint:
    """Return the tensor's; of a part, that begins at `offset`, what it adds to the whole's.

    ImportError without NumPy, on the CPU.
    """
    first, last = (offset[0], offset[-1]) if offset else (0, 0)
    tensor = _plain(tensor)
    if tensor.is_cuda:
        return on_device(tensor, first, last)
    array = tensor.view(_WHOLE[tensor.element_size()]).numpy()
    return fingerprinting.of_words(fingerprinting.words_of(array), first, last)


def on_device(tensor: torch.Tensor, first: int = 0, last: int = 0) -> Fingerprint:
    """Return the same, worked out where the tensor is."""
    if not tensor.numel():
        return NOTHING
    words = _with_words(tensor.reshape(tensor.shape or (1,)))
    rows = words.flatten(1).sum(1, dtype=torch.int64)
    columns = rows if words.dim() == 2 else words.flatten(0, -3).sum((0, 2), dtype=torch.int64)
    sums = torch.stack((rows.sum(), _weighted(rows, first), _weighted(columns, last)))
    return fingerprint(*sums.tolist())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _with_words(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.view(_WHOLE[tensor.element_size()]).unsqueeze(-1)
    return whole if tensor.element_size() == 1 else whole.view(torch.int16)


def _weighted(sums: torch.Tensor, begin: int) -> torch.Tensor:
    return (sums * torch.arange(begin + 1, begin + 1 + len(sums), device=sums.device)).sum()
