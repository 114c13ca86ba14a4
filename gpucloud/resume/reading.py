"""A checkpoint's objects in memory, verified; what a rank takes from them, and whether it is what was saved."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import OWN, STAGES, Chunk, chunks_of
from gpucloud.domain.checkpoint.manifest import Manifest, Piece
from gpucloud.domain.checkpoint.objects import (
    NOTHING,
    Fingerprint,
    Header,
    UnknownType,
    fingerprint,
    of_header,
    parsed,
    read_header,
    size_of,
)
from gpucloud.domain.errors import CheckpointUnreadable
from gpucloud.domain.job.quantities import format_size
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state.state import TIED, Content, Present
from gpucloud.resume.state.tree import DTYPES, Name, Shares, Tensors, bare, chunk_at, decode, is_sharded, local
from gpucloud.store import parts as store_parts
from gpucloud.store.checkpoints import Checkpoints

Whole = Callable[[str, list[Chunk]], torch.Tensor]
"""Puts the tensor of a name together from chunks."""


@dataclass(frozen=True, slots=True)
class Held:
    """One object's bytes, and what its header says."""

    data: memoryview
    memory: torch.Tensor
    header: Header

    def tensor(self, chunk: Chunk) -> torch.Tensor:
        """Return a tensor that shares the object's memory."""
        return chunk_at(self.memory, chunk)


def hold(checkpoints: Checkpoints, manifest: Manifest, wanted: Sequence[int]) -> dict[int, Held] | None:
    """Return the wanted objects, by their number in the manifest; None when one is missing or not as written.

    Raises StoreError, ValueError when bytes that are as written are no checkpoint, and CheckpointUnreadable when they
    are one that cannot be read here.
    """
    if any(piece.size == 0 for piece in manifest.pieces):
        return None
    # Fresh pages of the kernel's: nothing is set to zero by us, and torch and the store see the same bytes.
    room = {number: room_for(manifest.pieces[number]) for number in wanted}
    views = {number: memoryview(memory) for number, memory in room.items()}
    if not checkpoints.read([(manifest.pieces[number], views[number]) for number in wanted]):
        return None
    return {
        number: Held(views[number], torch.frombuffer(room[number], dtype=torch.uint8), header_of(views[number]))
        for number in wanted
    }


def room_for(piece: Piece) -> mmap.mmap:
    """Return memory for an object; CheckpointUnreadable where there is none."""
    try:
        return mmap.mmap(-1, piece.size)
    except (OSError, MemoryError) as error:
        raise CheckpointUnreadable(
            f"there is no memory for the {format_size(piece.size)} of {piece.key}: {error}",
            hint="a machine with more memory, or fewer ranks on it",
        ) from error


def header_of(data: memoryview, size: int | None = None) -> Header:
    """Return what `read_header` does; CheckpointUnreadable for types of tensors that only others know."""
    try:
        return read_header(data, size)
    except UnknownType as error:
        raise CheckpointUnreadable(
            f"the newest checkpoint cannot be read: {error}",
            hint="go on with the gpucloud that saved it, or a newer one",
        ) from error


def owner_of(piece: Piece) -> int:
    """Return the rank that wrote an object."""
    return int(piece.key.rpartition("/")[2].split("-")[1])


class Contents:
    """What a checkpoint says, once all headers are known; `whole` finds the tensor of a name that all ranks share."""

    def __init__(self, headers: Mapping[int, Header], owners: Sequence[int], whole: Whole) -> None:
        self._headers = headers
        self._whole = whole
        self._number_of = {owner: number for number, owner in enumerate(owners)}
        self._parts: dict[str, list[Chunk]] = {}
        for number in sorted(headers):
            for chunk in chunks_of(number, headers[number]):
                if not chunk.of.startswith(OWN):
                    self._parts.setdefault(chunk.of, []).append(chunk)
        self._trees = json.loads(headers[self._number_of[0]].metadata["shared"])

    def named(self, kind: str) -> dict[str, Any]:
        """Return the states of that kind with names in place of tensors."""
        states: dict[str, Any] = decode(self._trees[kind], _Lookup(Name))
        return states

    def shared(self, kind: str) -> dict[str, Any]:
        """Return the states of that kind; ValueError or KeyError when a part of one is missing."""
        states: dict[str, Any] = decode(self._trees[kind], _Lookup(self._tensor))
        return states

    def own(self, rank: int, held: Mapping[int, Held], place: Whole) -> tuple[dict[str, Any], int]:
        """Return the own part of the rank, or of rank 0 where that rank was not there, and whose it is.

        `place` takes a tensor from what is held. It is given the name that the tensor would have if ranks held it
        together: they may do that now.
        """
        owner = rank if rank in self._number_of else 0
        number = self._number_of[owner]
        chunks = {chunk.of: chunk for chunk in chunks_of(number, held[number].header) if chunk.of.startswith(OWN)}
        tree = json.loads(held[number].header.metadata["own"])

        def tensor(name: str) -> torch.Tensor:
            if name not in chunks:
                return self._tensor(name)
            return place(name.removeprefix(OWN), [chunks[name]])

        part = decode(tree, _Lookup(tensor))
        if not isinstance(part, dict):
            raise ValueError("a rank's own part is no table")  # noqa: TRY004  it is the file that is wrong
        return part, owner

    def saved(self, rank: int) -> Saved:
        """Return what the checkpoint says of what it holds for the rank. ValueError where that makes no sense."""
        number = self._number_of[rank if rank in self._number_of else 0]
        shared: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Fingerprint]] = {}
        own: dict[str, Fingerprint] = {}
        for other, header in self._headers.items():
            prints = of_header(header)
            for chunk, one in zip(chunks_of(other, header), prints or (), strict=bool(prints)):
                if not chunk.of.startswith(OWN):
                    shared.setdefault(chunk.of, {})[chunk.offset, chunk.extent] = one  # replicas are alike
                elif other == number:
                    own[chunk.of] = one
        tree = json.loads(self._headers[number].metadata["own"])
        headers = self._headers.values()
        told = all(of_header(header) is not None for header in headers)
        return Saved(
            shared=self._trees,
            own={key: tree[key] for key in ("buffers", "others", *((STAGES,) if STAGES in tree else ()))},
            prints={**{n: sum(p.values(), NOTHING) for n, p in shared.items()}, **own} if told else None,
            together=frozenset(s["of"] for h in headers for s in json.loads(h.metadata.get("shards", "{}")).values()),
        )

    def _tensor(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        first = parts[0]
        if any((chunk.shape, chunk.dtype) != (first.shape, first.dtype) for chunk in parts):
            raise ValueError(f"the parts of {name} are of different tensors")
        if sum(chunk.end - chunk.begin for chunk in parts) != size_of(first.dtype, first.shape):
            raise ValueError(f"a part of {name} is missing")
        tensor: torch.Tensor = self._whole(name, parts)
        return tensor


def whole_of(held: Mapping[int, Held]) -> Whole:
    """Return what puts a tensor together, in memory of its own, from objects that are all here."""

    def whole(_name: str, parts: list[Chunk]) -> torch.Tensor:
        if len(parts) == 1:
            return held[parts[0].number].tensor(parts[0]).clone()
        tensor = torch.empty(parts[0].shape, dtype=DTYPES[parts[0].dtype])
        for chunk in parts:
            tensor[inside(chunk)] = held[chunk.number].tensor(chunk)
        return tensor

    return whole


def inside(chunk: Chunk) -> tuple[slice, ...]:
    """Return where the chunk lies in its whole tensor, as an index of that."""
    return tuple(slice(o, o + n) for o, n in zip(chunk.offset, chunk.extent, strict=True))


def shapes_only(_name: str, parts: list[Chunk]) -> torch.Tensor:
    """Return a tensor without data: to see whether a checkpoint makes sense."""
    return torch.empty(parts[0].shape, dtype=DTYPES[parts[0].dtype], device="meta")


def content(contents: Contents, rank: int, held: Mapping[int, Held], place: Whole | None = None) -> Content:
    """Return what the rank needs; `place` puts together what is the rank's own, whole if left out."""
    own, owner = contents.own(rank, held, place or whole_of(held))
    return Content(shared=contents.shared, own=own, own_rank=owner)


class _Lookup(dict[str, Any]):
    """Finds each tensor when it is asked for."""

    def __init__(self, find: Callable[[str], Any]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, name: str) -> Any:
        return self._find(name)


# Whether a script's state, after it was put back, is what was saved: its values by fingerprints, all else as it is.


_SHOWN = 60
_SETTINGS = ".param_groups."  # a script may set a learning rate before each step
Prints = Mapping[str, Fingerprint]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint says of what it holds: as JSON, with the fingerprints of its tensors.

    `shared` is of all ranks, `own` is one rank's. `prints` are of both, None where whoever wrote it could not tell
    them. `together` names the tensors that ranks held together.
    """

    shared: Mapping[str, Any]
    own: Mapping[str, Any]
    prints: Prints | None
    together: frozenset[str]


def unlike(saved: Saved, put: Put, ranks: Ranks, shares: Shares | None) -> str:
    """Return in words the first thing that is not as it was saved, on any rank; empty where all is.

    All ranks ask together; `shares` says whose the parts of sharded tensors are. A tensor that ranks held together may
    be whole on each of them now, or the other way round: what it holds is to be the same.
    """
    now = put.now
    together = saved.together | {name for name, tensor in now.shared.items() if is_sharded(tensor)}
    shared = put.prints(now.shared) if shares is None else _prints_together(now.shared, ranks, shares)
    tree = {key: value for key, value in now.shared_tree.items() if key != TIED or key in saved.shared}
    found = "" if shares is not None and ranks.rank else _unlike(saved.shared, tree, together)
    found = found or _other_values(saved.prints, shared)
    found = found or _unlike(saved.own, now.own_tree, together) or _other_values(saved.prints, put.prints(now.own))
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


def _unlike(saved: Any, now: Any, together: Set[str]) -> str:
    saved, now = (bare(tree, OWN, together) for tree in (saved, json.loads(json.dumps(now))))
    difference = next(_differences(saved, now, ""), None)
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
    name = next((name for name, one in now.items() if saved.get(name, saved.get(_elsewhere(name), one)) != one), None)
    return f"{name} has other values than were saved" if name is not None else ""


def _elsewhere(name: str) -> str:
    """Return what a tensor of all ranks is called as a rank's own, and the other way round."""
    return name.removeprefix(OWN) if name.startswith(OWN) else OWN + name


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
    return store_parts.of_words(store_parts.words_of(array), first, last)


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
