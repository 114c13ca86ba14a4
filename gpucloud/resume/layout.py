"""Types and tensors of the safetensors layout as torch's: the rules are `gpucloud.domain.safetensors`."""

from __future__ import annotations

import torch

from gpucloud.domain.chunks import Chunk
from gpucloud.domain.safetensors import Tensor

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
