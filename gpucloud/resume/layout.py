"""Tensors as bytes in the safetensors layout, which every tool can open.

Eight bytes with the header's length (little endian), the header as JSON, then the raw tensors
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from typing import Any

import torch

from gpucloud.resume.tree import Tensors

_DTYPES = {
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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def pack(tensors: Tensors, metadata: dict[str, str]) -> memoryview:
    """Return the tensors, from whichever device, and the metadata as one buffer."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        size = size_of(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    buffer = bytearray(8 + len(text) + end)
    struct.pack_into("<Q", buffer, 0, len(text))
    buffer[8 : 8 + len(text)] = text
    place = 8 + len(text)
    for tensor in tensors.values():
        _copy(tensor, buffer, place)
        place += size_of(tensor)
    return memoryview(buffer)


def unpack(data: bytes) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors (on the CPU, their own memory) and the metadata; ValueError when the layout is broken."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        return {name: _tensor(data, 8 + length, entry) for name, entry in header.items()}, metadata
    except (struct.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not in the safetensors layout: {error!r}") from error


def size_of(tensor: torch.Tensor) -> int:
    """Return the number of bytes."""
    return tensor.numel() * tensor.element_size()


def _copy(tensor: torch.Tensor, buffer: bytearray, place: int) -> None:
    # Through the address: Tensor.numpy() would need NumPy and does not know bfloat16.
    whole, size = tensor.cpu().contiguous(), size_of(tensor)
    if size:
        ctypes.memmove((ctypes.c_char * size).from_buffer(buffer, place), whole.data_ptr(), size)


def _tensor(data: bytes, start: int, entry: dict[str, Any]) -> torch.Tensor:
    dtype = _DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > len(data):
        raise ValueError("a tensor's size does not fit its shape")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data[start + begin : start + end]), dtype=dtype).reshape(shape)
