"""Whether a script's state, after it was put back, is what was saved: its values by fingerprints, all else as it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.objects import NOTHING, Fingerprint, fingerprint, parsed
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state.sharded import Shares, local
from gpucloud.resume.state.state import TIED, Present
from gpucloud.resume.state.tree import Tensors
from gpucloud.store import integrity

_SHOWN = 60
_SETTINGS = ".param_groups."  # a script may set a learning rate before each step
Prints = Mapping[str, Fingerprint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint says of what it holds: as JSON, with the fingerprints of its tensors.

    `shared` is of all ranks, `own` is one rank's. None where whoever wrote it could not tell them.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    shared_prints: Prints | None
    own_prints: Prints | None


def unlike(saved: Saved, put: Put, ranks: Ranks, shares: Shares | None) -> str:
    """Return in words the first thing that is not as it was saved, on any rank; empty where all is.

    All ranks ask together; `shares` says whose the parts of sharded tensors are.
    """
    now = put.now
    shared = put.prints(now.shared) if shares is None else _prints_together(now.shared, ranks, shares)
    tree = {key: value for key, value in now.shared_tree.items() if key != TIED or key in saved.shared}
    found = "" if shares is not None and ranks.rank else _unlike(saved.shared, tree)
    found = found or _other_values(saved.shared_prints, shared)
    found = found or _unlike(saved.own, now.own_tree) or _other_values(saved.own_prints, put.prints(now.own))
    told = [text.decode() for text in ranks.gathered(found.encode())]
    return next((f"{text} (rank {rank})" if ranks.world > 1 else text for rank, text in enumerate(told) if text), "")


class Put:
    """What was put back, held to be looked at again before the first step: by then the script may have changed it."""

    def __init__(self, now: Present) -> None:
        self.now = now
        self._tensors = _held(now)
        self._versions = {name: _version(tensor) for name, tensor in self._tensors.items()}
        self._prints = _prints_of(self._tensors)

    def prints(self, names: Iterable[str]) -> Prints | None:
        """Return the fingerprints of what this rank holds of those; None without NumPy."""
        return {name: self._prints[name] for name in names} if self._prints is not None else None

    def changed(self, now: Present) -> str:
        """Return in words what this rank has otherwise by now; empty where all is as it was."""
        for name, tensor in _held(now).items():
            if _SETTINGS in name:
                continue
            before = self._tensors.get(name)
            same = before is not None and _place(before) == _place(tensor)
            if same and _version(tensor) == self._versions[name]:
                continue
            prints = _prints_of({name: tensor}) if before is not None and self._prints is not None else None
            if prints is None or self._prints is None or prints[name] != self._prints[name]:
                return f"the script changed {name} between resume.init and the first batch"
        return ""


def _held(now: Present) -> Tensors:
    return {name: local(tensor) for name, tensor in {**now.shared, **now.own}.items()}


def _version(tensor: torch.Tensor) -> int | None:
    """Return how often it was changed, as it counts itself; None for one of inference mode, which does not."""
    return None if tensor.is_inference() else tensor._version  # noqa: SLF001


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _unlike(saved: Any, now: Any) -> str:
    difference = next(_differences(saved, json.loads(json.dumps(now)), ""), None)
    if difference is None:
        return ""
    where, before, after = difference
    if where.startswith(f"{TIED}."):
        return f"{where.removeprefix(f'{TIED}.')} shares its memory with others than as it was saved"
    return f"{where} was saved as {_brief(before)}, and is {_brief(after)}"


def _differences(saved: Any, now: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield where two JSON values differ; a number that is none is like itself."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in saved | now:
            yield from _differences(saved.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, pair in enumerate(zip(saved, now, strict=True)):
            yield from _differences(*pair, f"{where}.{number}")
    elif saved != now and not (saved != saved and now != now):  # noqa: PLR0124  NaN
        yield where, saved, now


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _other_values(saved: Prints | None, now: Prints | None) -> str:
    if saved is None or now is None:
        return "its values could not be compared with what was saved: NumPy is missing"
    name = next((name for name, one in now.items() if saved.get(name, one) != one), None)
    return f"{name} has other values than were saved" if name is not None else ""


def _prints_of(tensors: Tensors) -> Prints | None:
    try:
        return {name: fingerprint_of(tensor) for name, tensor in tensors.items()}
    except ImportError:
        return None


def _prints_together(tensors: Tensors, ranks: Ranks, shares: Shares) -> Prints | None:
    """Return those of tensors of which each rank has parts: of each part one rank tells."""
    mine, shards = shares.mine(tensors)
    offsets = {name: shard["offset"] for name, shard in json.loads(shards).items()}
    try:
        parts: dict[str, str] | None = {n: str(fingerprint_of(t, offsets.get(n, ()))) for n, t in mine.items()}
    except ImportError:
        parts = None
    whole: dict[str, Fingerprint] = {}
    for text in ranks.gathered(json.dumps(parts).encode()):
        theirs = json.loads(text)
        if theirs is None:
            return None
        for name, one in theirs.items():
            whole[name] = whole.get(name, NOTHING) + parsed(one)
    return whole


# Fingerprints of the tensors that a script has, on the CPU and on a GPU.


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
    return integrity.of_words(integrity.words_of(array), first, last)


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
