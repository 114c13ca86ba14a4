"""Fingerprints of tensors: the same wherever they are worked out, and those of parts add up."""

from __future__ import annotations

import struct

import pytest
import torch

from gpucloud.domain.checkpoint.objects import (
    NOTHING,
    Fingerprint,
    blank,
    entries_of,
    fingerprint,
    header_bytes,
    of_header,
    parsed,
    place,
    placed,
    read_header,
    written,
)
from gpucloud.resume.reading import fingerprint_of, on_device
from gpucloud.resume.state.tree import DTYPES, NAMES

SHAPES = [(), (0,), (5,), (3, 4), (7, 3, 5), (2, 3, 4, 5), (1, 9), (9, 1)]


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    torch.manual_seed(0)
    values = torch.randn(shape).mul(100)
    if dtype is torch.bool:
        return values > 0
    if dtype in (torch.uint8, torch.uint32, torch.uint64):
        return values.abs().to(torch.uint8).to(dtype)
    return values.to(dtype)


def by_its_definition(tensor: torch.Tensor) -> Fingerprint:
    """Word by word, as the domain's text says it."""
    total = by_first = by_last = 0
    width = {8: "4h", 4: "2h", 2: "h", 1: "b"}[tensor.element_size()]
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    numbers = list(struct.iter_unpack(f"<{width}", raw))
    shape = tuple(tensor.shape) or (1,)
    for at, number in enumerate(numbers):
        first, last = at // (len(numbers) // shape[0]), at % shape[-1]
        for word in number:
            total, by_first, by_last = total + word, by_first + (first + 1) * word, by_last + (last + 1) * word
    return fingerprint(total, by_first, by_last)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_a_fingerprint_is_the_same_by_either_way_and_in_any_order_of_memory(name: str, shape: tuple[int, ...]) -> None:
    tensor = some(DTYPES[name], shape)
    expected = by_its_definition(tensor)
    lying = [tensor]
    if len(shape) > 1:
        lying.append(tensor.transpose(0, -1).contiguous().transpose(0, -1))
    if len(shape) == 4:
        lying.append(tensor.contiguous(memory_format=torch.channels_last))
    for one in lying:
        assert fingerprint_of(one) == on_device(one) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_fingerprints_of_parts_add_up_to_that_of_the_whole(dtype: torch.dtype) -> None:
    tensor = some(dtype, (6, 4, 8))
    whole = fingerprint_of(tensor)
    assert fingerprint_of(tensor[:2]) + fingerprint_of(tensor[2:], (2, 0, 0)) == whole
    assert fingerprint_of(tensor[..., :3]) + on_device(tensor[..., 3:], 0, 3) == whole
    assert fingerprint_of(tensor[2:2], (2, 0, 0)) == NOTHING


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "shape", [(3 * 2**17 + 5,), (3001, 7, 3), (3, 2, 2**16 + 1), (2**16 + 1, 9), (600, 1025)], ids=str
)
def test_short_rows_are_read_together_and_long_ones_in_pieces(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(-(2**50), 2**50, shape).view(torch.float64).to(dtype)
    offset = (7, *[0] * (len(shape) - 2), 11)[-len(shape) :]
    assert fingerprint_of(tensor, offset) == on_device(tensor, offset[0], offset[-1])


def changes() -> list[tuple[str, torch.Tensor]]:
    tensor = some(torch.float32, (4, 6))
    one = tensor.clone()
    one[2, 3] = torch.nextafter(one[2, 3], torch.tensor(1e9))
    return [
        ("the least change of a number", one),
        ("its sign", torch.where(torch.arange(6) == 2, -tensor, tensor)),
        ("two rows exchanged", tensor[[1, 0, 2, 3]]),
        ("two columns exchanged", tensor[:, [0, 1, 2, 4, 3, 5]]),
    ]


@pytest.mark.parametrize("changed", [c[1] for c in changes()], ids=[c[0] for c in changes()])
def test_a_change_changes_it(changed: torch.Tensor) -> None:
    assert fingerprint_of(changed) != fingerprint_of(some(torch.float32, (4, 6)))


def test_an_object_carries_them_where_its_writer_finds_them() -> None:
    tensors = {"a": some(torch.float32, (2, 3)), "b": some(torch.int64, (4,))}
    places = placed((name, NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items())
    entries = entries_of(places)
    data = bytearray(header_bytes(entries, {**blank(2), "own": "{}"}, 4096) + bytes(places[-1].end))
    assert of_header(read_header(data)) is None, "nobody has filled them in"
    room = place(data, 2)
    assert room is not None
    assert place(data, 3) is None
    found = tuple(fingerprint_of(tensors[tensor.name]) for tensor in read_header(data).tensors)
    data[room] = written(found)
    assert of_header(read_header(data)) == found
    assert place(header_bytes(entries, {"own": "{}"}, 4096), 2) is None


@pytest.mark.parametrize("text", ["", "0" * 23, "g" * 24])
def test_other_texts_are_no_fingerprint(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal" if len(text) == 24 else "is no fingerprint"):
        parsed(text)
