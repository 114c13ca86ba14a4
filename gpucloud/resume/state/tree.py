"""State as JSON with its tensors apart (nothing is pickled), and tensors that ranks share: who has which part."""

from __future__ import annotations

import base64
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import Box, Chunk
from gpucloud.domain.checkpoint.objects import Tensor
from gpucloud.domain.errors import UsageError
from gpucloud.resume.ranks import Ranks

Tensors = dict[str, torch.Tensor]


class Name(str):
    """A tensor's name, where the tensor itself is not wanted."""

    __slots__ = ()


_PLAIN = frozenset((type(None), bool, int, float, str))
_KIND = "$"


def encode(value: Any, name: str, tensors: Tensors) -> Any:
    """Return the value as JSON; its tensors are added to `tensors` (not copied) under names that begin with `name`.

    Raises UsageError, with the place in the value, for what JSON and tensors cannot hold.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a": {"b": …}, "a.b": …}
            name += "'"
        tensors[name] = _dense(value, name)
        return {_KIND: "tensor", "name": name, **_place_of(value)}
    if isinstance(value, dict):
        return _encode_dict(value, name, tensors)
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):  # as the 625 words of Python's random are, which a GPU would wait for
            items = list(value)
        else:
            items = [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, bytes):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
    return _encode_numpy(value, name)


def decode(value: Any, tensors: Tensors) -> Any:
    """Return what `encode` was given, tuples and key types too; KeyError without a tensor, ValueError otherwise."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(item, tensors) for key, item in value.items()}
    return _decode_kind(value, tensors)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return what `encode` returned, with other names for some of its tensors."""
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_KIND) == "tensor":
        return {**value, "name": names.get(value["name"], value["name"])}
    return {key: renamed(item, names) for key, item in value.items()}


def bare(value: Any, own: str, names: Set[str]) -> Any:
    """Return what `encode` returned, where of these tensors nothing is told but their names, less `own` before them."""
    if not names:
        return value
    if isinstance(value, list):
        return [bare(item, own, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_KIND) == "tensor" and (name := str(value.get("name")).removeprefix(own)) in names:
        return {_KIND: "tensor", "name": name}
    return {key: bare(item, own, names) for key, item in value.items()}


def leaves(value: Any) -> Iterator[str]:
    """Yield the names of tensors in what `decode` returned with `Name`s in place of them."""
    if isinstance(value, Name):
        yield str(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)


def is_sharded(tensor: Any) -> bool:
    """Whether this is a tensor that ranks hold together (DTensor); without importing what that is made of."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def _encode_dict(value: dict[Any, Any], name: str, tensors: Tensors) -> Any:
    items = [(key, encode(item, f"{name}.{key}", tensors)) for key, item in value.items()]
    if not isinstance(value, Counter) and all(type(key) is str and key != _KIND for key in value):
        return dict(items)
    kind = "counter" if isinstance(value, Counter) else "dict"
    return {_KIND: kind, "items": [[encode(key, name, tensors), item] for key, item in items]}


def _decode_kind(value: dict[str, Any], tensors: Tensors) -> Any:
    kind = value[_KIND]
    if kind == "tensor":
        return _placed(tensors[value["name"]], value)
    if kind == "bytes":
        return base64.b64decode(value["data"])
    if kind == "numpy":
        return _decode_numpy(value)
    if kind == "tuple":
        return tuple(decode(item, tensors) for item in value["items"])
    if kind not in {"dict", "counter"}:
        raise ValueError(f"{kind!r} is no kind of value")
    pairs = {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
    return Counter(pairs) if kind == "counter" else pairs


def _place_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what bytes do not say of a tensor: its strides where they are not row-major, and that a GPU has it."""
    if is_sharded(tensor):
        return {}
    strides = strides_of(tensor)
    return {**({"strides": list(strides)} if strides else {}), **({"gpu": True} if tensor.is_cuda else {})}


def _placed(tensor: Any, told: Mapping[str, Any]) -> Any:
    """Return the tensor as it lay, on this rank's GPU where one had it. ValueError for strides that cannot be."""
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor) or tensor.is_meta:
        return tensor
    if told.get("gpu") is True and not tensor.is_cuda and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensor = tensor.cuda()
    return laid_out(tensor, tuple(map(int, told["strides"]))) if "strides" in told else tensor


def _dense(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if tensor.dtype not in NAMES:
        raise UsageError(
            f"cannot save {name}: no checkpoint has a form for {tensor.dtype}",
            hint="keep it in one of " + ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in NAMES)),
        )
    if is_sharded(tensor):
        return tensor  # its parts are looked at where it is shared out
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError(
            f"cannot save {name}: a {'meta' if tensor.is_meta else tensor.layout} {type(tensor).__name__}",
            hint="give `init` dense tensors that hold data",
        )
    return tensor.detach()


def _encode_numpy(value: Any, name: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and not value.dtype.hasobject:
        data = base64.b64encode(value.tobytes()).decode()
        scalar = isinstance(value, numpy.generic)
        return {_KIND: "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "data": data, "scalar": scalar}
    raise UsageError(
        f"cannot save {name}: a {type(value).__name__}",
        hint="let its state_dict() return tensors, numbers, strings, lists and dicts",
    )


def _decode_numpy(value: dict[str, Any]) -> Any:
    import numpy as np  # noqa: PLC0415 - late: a script without NumPy never comes here

    array = np.frombuffer(base64.b64decode(value["data"]), dtype=value["dtype"]).reshape(value["shape"]).copy()
    return array[()] if value["scalar"] else array


# Types and tensors of the safetensors layout as torch's: the rules are `gpucloud.domain.checkpoint.objects`.


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_at(memory: torch.Tensor, start: int, tensor: Tensor) -> torch.Tensor:
    """Return the tensor of an object that lies in memory (uint8), whose tensors begin at `start`; see `chunk_at`."""
    return _at(memory, start + tensor.begin, start + tensor.end, tensor.dtype, tensor.shape)


def chunk_at(memory: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return the chunk of an object that lies in memory (uint8), sharing it; where that is crooked, not sharing it."""
    return _at(memory, chunk.begin, chunk.end, chunk.dtype, chunk.extent)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the tensor's strides where they are not row-major, as `channels_last` is; None also where it has holes."""
    strides = tuple(tensor.stride())
    return strides if not tensor.is_contiguous() and _is_dense(tuple(tensor.shape), strides) else None


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor with these strides. ValueError where they leave holes or let numbers lie on each other."""
    if not _is_dense(tuple(tensor.shape), strides):
        raise ValueError(f"no tensor of {tuple(tensor.shape)} has the strides {strides}")
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes."""
    return tensor.numel() * tensor.element_size()


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether each number has one place, and there are no others."""
    if len(shape) != len(strides):
        return False
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _at(memory: torch.Tensor, begin: int, end: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = DTYPES[name]
    flat = memory[begin:end]
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)


# Tensors that ranks hold together (DTensor: FSDP2, tensor parallelism): who writes which part, who needs which.
#
# What is written where is decided by the planner of torch's distributed checkpoints (DCP): of replicas one is written,
# by the rank with the least so far. Bytes, headers, hashes and the manifest are as for every other checkpoint.
#
# Steps in vain after a resume (`run`) are for DDP alone: it groups gradients anew after its first backward pass.
# FSDP2's groups are those of its `fully_shard` calls, so that every step sums in one order.


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


def share(tensors: Tensors, rank: int, world: int) -> Tensors:
    """Return the rank's share of replicated tensors: the largest first, each to the rank with the least so far."""
    if world == 1:
        return tensors
    loads = [0] * world
    mine: Tensors = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-size_of(item[1]), item[0])):
        least = loads.index(min(loads))
        loads[least] += size_of(tensor)
        if least == rank:
            mine[name] = tensor
    return mine
