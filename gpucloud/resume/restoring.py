"""Finds the newest checkpoint that every rank can read whole, and tells of it beforehand."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gpucloud.domain.checkpoint.chunks import OWN, Box, Chunk, chunks_of, overlap, span
from gpucloud.domain.checkpoint.manifest import Commit, Level, Manifest, manifest_bytes, read_manifest
from gpucloud.domain.checkpoint.objects import ITEM_BYTES, LENGTH_BYTES, PART_BYTES, Header, covering, start_of
from gpucloud.domain.errors import CheckpointUnreadable
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import HINT, Ranks, asked, shortage
from gpucloud.resume.reading import (
    Contents,
    Held,
    Saved,
    Whole,
    content,
    header_of,
    hold,
    inside,
    owner_of,
    room_for,
    shapes_only,
    whole_of,
)
from gpucloud.resume.settings import read_settings
from gpucloud.resume.state.state import Content, TrainingState
from gpucloud.resume.state.tree import DTYPES, Layout
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints, all_damaged

# Bytes that are as their manifest says and still no checkpoint, whoever wrote them: JSON of other shapes or nested
# without end, tensors that torch refuses.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_REFUSED = (*_UNREADABLE, RuntimeError)  # torch's, of shapes that cannot be: no memory is asked for where this counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint in this rank's memory, as bytes that can be read more than once; `seconds` is what that took.

    `held` are the objects that this rank has read, by their number in the manifest: all, or a share of them. With
    `layouts`, they are all there, but filled only where this rank needs them.
    """

    manifest: Manifest
    held: Mapping[int, Held]
    headers: Mapping[int, Header]
    ranks: Ranks
    seconds: float
    spread: bool = False
    layouts: Mapping[str, Layout] | None = None

    @property
    def commit(self) -> Commit:
        """Which one."""
        return self.manifest.commit

    @property
    def files(self) -> tuple[tuple[str, memoryview], ...]:
        """The objects that this rank has read, with their names."""
        keys = ((self.manifest.pieces[number].key, held.data) for number, held in self.held.items())
        return tuple((key.rpartition("/")[2], data) for key, data in keys)

    def content(self, rank: int) -> Content:
        """Return what the rank needs, in memory of its own; where objects are spread, all ranks ask together."""
        owners = [owner_of(piece) for piece in self.manifest.pieces]
        place = whole_of(self.held) if self.layouts is None else placed_by(self.layouts, self.held)
        shared = self._exchanged if self.spread else place
        return content(Contents(self.headers, owners, shared), rank, self.held, place)

    def saved(self, rank: int) -> Saved:
        """Return what it says of what it holds for the rank."""
        owners = [owner_of(piece) for piece in self.manifest.pieces]
        return Contents(self.headers, owners, shapes_only).saved(rank)

    def check(self, rank: int) -> None:
        """See whether this makes a checkpoint: raises what a broken one raises, without moving any data."""
        owners = [owner_of(piece) for piece in self.manifest.pieces]
        found = content(Contents(self.headers, owners, shapes_only), rank, self.held)
        found.shared("modules")
        found.shared("optimizers")
        self.saved(rank)

    def _exchanged(self, _name: str, parts: list[Chunk]) -> torch.Tensor:
        """Return a tensor on this rank's GPU; whoever holds a part of it sends that to all."""
        dtype = DTYPES[parts[0].dtype]
        tensor = torch.empty(parts[0].shape, dtype=dtype, device=self.ranks.device)
        for chunk in parts:
            part = tensor if len(parts) == 1 else torch.empty(chunk.extent, dtype=dtype, device=tensor.device)
            reader = chunk.number % self.ranks.world
            if reader == self.ranks.rank:
                part.copy_(self.held[chunk.number].tensor(chunk))
            if part.numel():
                dist.broadcast(part.reshape(-1).view(torch.uint8), src=reader)
            if part is not tensor:
                tensor[inside(chunk)] = part
        # Step counts that an optimizer keeps on the CPU are found there; one that wants them on the GPU moves them.
        return tensor.cpu() if tensor.numel() == 1 else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """What a run would go on from: the step, the epoch of the last batch (from 0, None without a loader of the run's),
    what the script had put into `run.values`, and what a resume can promise.
    """

    step: int
    epoch: int | None
    values: Mapping[str, Any]
    level: Level


def peek() -> Peek | None:
    """Return what `init` will go on from, None at a first start; nothing is loaded, so that it is quick.

    Ask it before the model is built, on any rank, as for the model's configuration. Where the objects of that
    checkpoint turn out to be damaged, `init` takes the one before. Raises UsageError where none can be read, StoreError
    when the store does not answer.
    """
    settings = read_settings()
    damaged: list[Commit] = []
    checkpoints = Checkpoints(open_store(settings.store), settings.prefix, keep=settings.keep)
    for manifest in checkpoints.candidates(damaged.append):
        notes = manifest.notes
        return Peek(step=manifest.commit.step, epoch=notes.epoch, values=notes.values, level=manifest.promise.level)
    if damaged:
        raise all_damaged(len(damaged))
    return None


def find(checkpoints: Checkpoints, ranks: Ranks, state: TrainingState | None = None) -> Restored | None:
    """Return the newest checkpoint whose every object is whole, on all ranks the same; None without one.

    Damaged ones are passed over with a line to the user. Where ranks hold the `state` together, each reads what it
    needs, and only damage to that counts. Raises UsageError where every one is damaged, CheckpointUnreadable for one
    that cannot be read here, StoreError when the store does not answer: an outage is no damage.
    """
    began = time.monotonic()
    passed = 0

    def pass_over(commit: Commit) -> None:
        nonlocal passed
        passed += 1
        say(f"the checkpoint of step {commit.step} is damaged: passed over")

    candidates = checkpoints.candidates(pass_over) if ranks.rank == 0 else iter(())
    while True:
        proposed = next(candidates, None)
        data = ranks.shared(manifest_bytes(proposed) if proposed else b"")
        if not data:
            (lost,) = ranks.highest(passed)
            if lost:
                raise all_damaged(lost)
            return None
        manifest = read_manifest(data)
        if state is not None and state.sharded:
            found = _read_partly(checkpoints, manifest, ranks, began, state)
        else:
            found = _read(checkpoints, manifest, ranks, began)
        if found is not None:
            return found
        if ranks.rank == 0:
            pass_over(manifest.commit)


def spreads(ranks: Ranks) -> bool:
    """Whether each rank reads its share of the objects, and gets the rest from the others.

    It does where the ranks' own network is that of their GPUs: the way from a store is tens of times narrower. Over
    gloo it is the same network, or memory as fast as the store's cache: then each reads all, and waits for none.
    """
    return ranks.world > 1 and ranks.device.type == "cuda"


def _read(checkpoints: Checkpoints, manifest: Manifest, ranks: Ranks, began: float) -> Restored | None:
    """Return the checkpoint if all ranks could read it."""
    spread = spreads(ranks)
    held = None
    size = sum(manifest.pieces[number].size for number in _wanted(manifest, ranks, spread=spread))
    # What is read is put together in memory of its own, kind by kind, unless it goes to a GPU tensor by tensor.
    _require_memory(manifest, ranks, size if spread else size + size // 2)
    with contextlib.suppress(*_UNREADABLE):
        held = hold(checkpoints, manifest, _wanted(manifest, ranks, spread=spread))
    if _on_any(ranks, held is None) or held is None:
        return None
    headers = _all_headers(held, ranks) if spread else {number: one.header for number, one in held.items()}
    found = Restored(
        manifest=manifest,
        held=held,
        headers=headers,
        ranks=ranks,
        seconds=time.monotonic() - began,
        spread=spread,
    )
    return found if _makes_sense(found, ranks) else None


def _read_partly(
    checkpoints: Checkpoints, manifest: Manifest, ranks: Ranks, began: float, state: TrainingState
) -> Restored | None:
    """Return the checkpoint if every rank could read what it needs of it."""
    if any(piece.size == 0 for piece in manifest.pieces):
        return None
    rooms = Rooms(checkpoints, manifest)
    layouts = state.layouts()
    found = None
    headers: Mapping[int, Header] | None = None
    needed: list[tuple[int, int]] | None = None
    with contextlib.suppress(*_UNREADABLE):
        headers = all_headers(rooms, manifest, ranks)
        if headers is not None:
            owners = [owner_of(piece) for piece in manifest.pieces]
            layouts |= state.layouts_kept(Contents(headers, owners, shapes_only).named("optimizers"))
            needed = list(parts_needed(headers, layouts, _own(owners, ranks.rank)))
    parts = ((manifest.pieces[number].size, part * PART_BYTES) for number, part in set(needed or ()))
    _require_memory(manifest, ranks, sum(min(PART_BYTES, size - begin) for size, begin in parts))
    with contextlib.suppress(*_UNREADABLE):
        if headers is not None and needed is not None and rooms.read(needed):
            found = Restored(
                manifest=manifest,
                held=rooms.held(headers),
                headers=headers,
                ranks=ranks,
                seconds=time.monotonic() - began,
                layouts=layouts,
            )
    if _on_any(ranks, found is None) or found is None:
        return None
    return found if _makes_sense(found, ranks) else None


def _require_memory(manifest: Manifest, ranks: Ranks, wanted: int) -> None:
    """Raise CheckpointUnreadable, on all ranks alike, where there is no memory to read so much of it."""
    if short := shortage(asked(ranks, wanted)):
        raise CheckpointUnreadable(
            f"there is no memory to read the checkpoint of step {manifest.commit.step}: {short}", hint=HINT
        )


def _makes_sense(found: Restored, ranks: Ranks) -> bool:
    """Whether it is a checkpoint to all ranks."""
    broken = False
    try:
        found.check(ranks.rank)
    except _REFUSED:
        broken = True
    return not _on_any(ranks, broken)


def _own(owners: Sequence[int], rank: int) -> int:
    """Return the number of the rank's own object, or of rank 0's where it had none."""
    return owners.index(rank if rank in owners else 0)


def _wanted(manifest: Manifest, ranks: Ranks, *, spread: bool) -> list[int]:
    """Return the objects that this rank reads; its own, or rank 0's where it had none, is always among them."""
    numbers = range(len(manifest.pieces))
    if not spread:
        return list(numbers)
    owners = [owner_of(piece) for piece in manifest.pieces]
    return sorted({_own(owners, ranks.rank), *(number for number in numbers if number % ranks.world == ranks.rank)})


def _all_headers(held: Mapping[int, Held], ranks: Ranks) -> dict[int, Header]:
    texts = {number: bytes(one.data[: one.header.start]).decode("latin-1") for number, one in held.items()}
    sizes = {number: len(one.data) for number, one in held.items()}
    headers: dict[int, Header] = {}
    for told in ranks.gathered(json.dumps([texts, sizes]).encode()):
        others, lengths = json.loads(told)
        for number, text in others.items():
            headers[int(number)] = header_of(memoryview(text.encode("latin-1")), lengths[number])
    return headers


def _on_any(ranks: Ranks, wrong: bool) -> bool:  # noqa: FBT001
    return bool(ranks.highest(int(wrong))[0])


# Reads of a checkpoint what one rank needs: headers together with the others, then the parts that hold its tensors.


class Rooms:
    """Memory for a checkpoint's objects in which only those parts are filled (and take room) that are read."""

    def __init__(self, checkpoints: Checkpoints, manifest: Manifest) -> None:
        self._checkpoints = checkpoints
        self._pieces = manifest.pieces
        self._memory = [room_for(piece) for piece in manifest.pieces]
        self._views = [memoryview(memory) for memory in self._memory]
        self._read: set[tuple[int, int]] = set()

    def read(self, wanted: Iterable[tuple[int, int]]) -> bool:
        """Read parts, each as (object, part); those that are here already are not read again. False for damage."""
        missing = sorted(set(wanted) - self._read)
        views = [self._views[number][part * PART_BYTES : (part + 1) * PART_BYTES] for number, part in missing]
        triples = zip(missing, views, strict=True)
        if not self._checkpoints.read_parts((self._pieces[n], part, view) for (n, part), view in triples):
            return False
        self._read.update(missing)
        return True

    def read_heads(self, numbers: Iterable[int]) -> dict[int, str] | None:
        """Return how these objects begin, up to their tensors; None for damage."""
        heads = {}
        for number in numbers:
            if not self.read([(number, 0)]):
                return None
            view = self._views[number]
            start = start_of(view[:LENGTH_BYTES], len(view))
            if not self.read((number, part) for part in covering(0, start)):
                return None
            heads[number] = bytes(view[:start]).decode("latin-1")
        return heads

    def held(self, headers: Mapping[int, Header]) -> dict[int, Held]:
        """Return the objects as `reading` takes them."""
        return {
            number: Held(view, torch.frombuffer(memory, dtype=torch.uint8), headers[number])
            for number, (view, memory) in enumerate(zip(self._views, self._memory, strict=True))
        }


def all_headers(rooms: Rooms, manifest: Manifest, ranks: Ranks) -> dict[int, Header] | None:
    """Return every object's header; each rank reads its share of them and tells the others. None for damage."""
    heads = None
    try:
        heads = rooms.read_heads(range(ranks.rank, len(manifest.pieces), ranks.world))
    except ValueError:
        heads = None
    told = [json.loads(text) for text in ranks.gathered(json.dumps(heads).encode())]
    if None in told:
        return None
    sizes = [piece.size for piece in manifest.pieces]
    return {
        int(number): header_of(memoryview(text.encode("latin-1")), sizes[int(number)])
        for one in told
        for number, text in one.items()
    }


def parts_needed(headers: Mapping[int, Header], layouts: Mapping[str, Layout], own: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of objects, as (object, part), that hold what a rank needs: its share of what it holds together
    with others, all else that is shared whole, and the object `own` as far as that is a rank's own.
    """
    for number, header in headers.items():
        for chunk in chunks_of(number, header):
            if chunk.of.startswith(OWN) and number != own:
                continue
            yield from ((number, part) for part in _parts(chunk, _box_in(chunk, layouts)))


def placed_by(layouts: Mapping[str, Layout], held: Mapping[int, Held]) -> Whole:
    """Return what puts a tensor together as this rank holds it, from the parts that are here."""
    whole = whole_of(held)

    def placed(name: str, parts: list[Chunk]) -> torch.Tensor:
        first = parts[0]
        layout = layouts.get(name)
        if layout is None or not layout.fits(first.shape):
            return whole(name, parts)
        mine = layout.empty(DTYPES[first.dtype])
        for chunk in parts:
            box = Box(chunk.offset, chunk.extent)
            both = overlap(box, layout.box)
            if both is not None:
                mine[both.within(layout.box)] = held[chunk.number].tensor(chunk)[both.within(box)]
        return layout.held(mine)

    return placed


def _box_in(chunk: Chunk, layouts: Mapping[str, Layout]) -> Box | None:
    """Return what a rank needs of a chunk; None when that is nothing."""
    box = Box(chunk.offset, chunk.extent)
    layout = layouts.get(chunk.of)
    return overlap(box, layout.box) if layout is not None and layout.fits(chunk.shape) else box


def _parts(chunk: Chunk, wanted: Box | None) -> range:
    """Return the numbers of the parts from the first byte that is wanted to the last.

    Of rows that are wanted by halves, all comes: they are shorter than a part, nearly always.
    """
    if wanted is None or chunk.begin == chunk.end:
        return range(0)
    found = span(wanted, Box(chunk.offset, chunk.extent))
    item = ITEM_BYTES[chunk.dtype]
    return covering(chunk.begin + found.start * item, len(found) * item)
