"""State as JSON with its tensors apart: nothing is pickled, so nothing can be executed on reading."""

from __future__ import annotations

import base64
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpucloud.domain.checkpoint.chunks import Chunk
from gpucloud.domain.checkpoint.objects import Tensor
from gpucloud.domain.errors import UsageError

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
