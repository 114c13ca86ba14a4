"""Tensors that ranks hold together (DTensor: FSDP2, tensor parallelism): who writes which part, who needs which.

What is written where is decided by the planner of torch's distributed checkpoints (DCP): of replicas one is written,
by the rank with the least so far. Bytes, headers, hashes and the manifest are as for every other checkpoint.

Steps in vain after a resume (`run`) are for DDP alone: it groups gradients anew after its first backward pass. FSDP2's
groups are those of its `fully_shard` calls, so that every step sums in one order.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import Box
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state.tree import DTYPES, NAMES, Tensors, is_sharded

REPLICATED = "replicated"
"""The arrangement of tensors that every rank has whole."""

Mine = tuple[Tensors, str]
"""What a rank writes: tensors by name, and which of them are parts of what, as a header's `shards` says it."""

_Row = tuple[str, str, list[int], list[int], list[int], str]  # name, kind, offset, extent, whole shape, type
_SHARD = "SHARD"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, sharing its memory."""
    with torch.no_grad():
        return _local(tensor)


def arrangement(tensors: Iterable[Any]) -> str:
    """Return in words how ranks hold the tensors: two that differ sum in another order."""
    found = {f"{tuple(t.device_mesh.shape)} {t.placements}" for t in tensors if is_sharded(t)}
    return "sharded " + ", ".join(sorted(found)) if found else REPLICATED


@dataclass(frozen=True, slots=True)
class Layout:
    """How this rank holds a tensor like this one; `box` is its part."""

    like: Any
    box: Box

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of that shape can be held so."""
        return tuple(self.like.shape) == tuple(shape)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return room for this rank's part, where that belongs."""
        return torch.empty(self.box.extent, dtype=dtype, device=local(self.like).device)

    def held(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor of which this is the rank's part."""
        like = self.like
        held: torch.Tensor = importlib.import_module("torch.distributed.tensor").DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return held


def layout_of(tensor: Any) -> Layout:
    """Return how this rank holds the tensor, which must be one that `is_sharded`."""
    if tensor.device_mesh.get_coordinate() is None:  # this rank has no part in it
        return Layout(tensor, Box((0,) * tensor.dim(), (0,) * tensor.dim()))
    (chunk,) = tensor.__create_chunk_list__()
    return Layout(tensor, Box(tuple(chunk.offsets), tuple(chunk.sizes)))


def fitted(value: Any, target: Any) -> Any:
    """Return the value as `target` wants it: this rank's part of a whole tensor where the target is one of parts."""
    if not is_sharded(target) or not isinstance(value, torch.Tensor) or is_sharded(value):
        return value
    layout = layout_of(target)
    if not layout.fits(tuple(value.shape)):
        return value  # it does not fit; that is said where it is loaded
    whole = Box((0,) * value.dim(), tuple(value.shape))
    return layout.held(layout.empty(value.dtype).copy_(value[layout.box.within(whole)]))


class Unplanned(Exception):
    """The ranks would have to agree anew on who writes what."""


class Shares:
    """What this rank writes of sharded tensors: planned by all ranks together, once while names and shapes stay."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._dcp = _Dcp()
        self._signature: Any = None
        self._mine: tuple[frozenset[str], str] = frozenset(), "{}"

    def mine(self, tensors: Tensors, *, alone: bool = False) -> Mine:
        """Return this rank's part; all ranks ask together.

        With `alone` each does by itself, as it was planned before. Raises Unplanned where that does not hold any more.
        """
        signature = [(name, t.dtype, t.shape, getattr(t, "placements", None)) for name, t in tensors.items()]
        if alone and signature != self._signature:
            raise Unplanned
        (changed,) = (0,) if alone else self._ranks.highest(int(signature != self._signature))
        if changed:
            self._mine = self._planned(tensors)
            self._signature = signature
        names, shards = self._mine
        with torch.no_grad():
            return {name: _local(tensor) for name, tensor in tensors.items() if name in names}, shards

    def _planned(self, tensors: Tensors) -> tuple[frozenset[str], str]:
        planner = self._dcp.planner(tensors, is_coordinator=self._ranks.rank == 0)
        told = json.dumps([_row(item) for item in planner.create_local_plan().items])
        heard = [json.loads(text) for text in self._ranks.gathered(told.encode())]
        plans, _ = planner.create_global_plan([self._dcp.plan(rows) for rows in heard])
        mine = [_row(item) for item in plans[self._ranks.rank].items]
        shards = {name: {"of": name, "shape": of, "offset": at} for name, kind, at, _, of, _ in mine if kind == _SHARD}
        return frozenset(row[0] for row in mine), json.dumps(shards)


class _Dcp:
    """DCP's classes, imported where tensors are sharded; and its plans from what ranks tell each other in JSON."""

    def __init__(self) -> None:
        self._default = importlib.import_module("torch.distributed.checkpoint.default_planner")
        self._planner = importlib.import_module("torch.distributed.checkpoint.planner")
        self._metadata = importlib.import_module("torch.distributed.checkpoint.metadata")

    def planner(self, tensors: Tensors, *, is_coordinator: bool) -> Any:
        """Return a planner for tensors by name."""
        planner = self._default.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=is_coordinator)
        return planner

    def plan(self, rows: list[_Row]) -> Any:
        """Return the plan of which these are the parts; empty ones are left out."""
        return self._planner.SavePlan([self._item(*row) for row in rows if all(row[3]) or not all(row[4])])

    def _item(self, name: str, kind: str, offset: list[int], extent: list[int], shape: list[int], dtype: str) -> Any:
        chunk = self._metadata.ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(extent))
        return self._planner.WriteItem(
            index=self._metadata.MetadataIndex(name, offset),
            type=self._planner.WriteItemType[kind],
            tensor_data=self._planner.TensorWriteData(
                chunk=chunk,
                properties=self._metadata.TensorProperties(dtype=DTYPES[dtype]),
                size=torch.Size(shape),
            ),
        )


def _local(tensor: Any) -> torch.Tensor:
    # Without gradients asked for, this is quick; autograd's way to it would take ten times as long.
    mine: torch.Tensor = tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()
    return mine


def _row(item: Any) -> _Row:
    data = item.tensor_data
    dtype = NAMES[data.properties.dtype]
    return item.index.fqn, item.type.name, list(data.chunk.offsets), list(data.chunk.sizes), list(data.size), dtype
