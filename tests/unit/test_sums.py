"""What a GPU sums of tensors is what the writer finds in their copies, of any type and shape, wherever they begin."""

from __future__ import annotations

import pytest
import torch

from gpucloud.domain.checkpoint.objects import SUM_BYTES, of_header, read_header, sums_at
from gpucloud.resume.reading import fingerprint_of
from gpucloud.resume.save.capture import route
from gpucloud.resume.save.writer import Plan, SaveBuffer, Sums, words_of
from gpucloud.store.writing import Torn, put_fingerprints

NUMBERS = torch.randn(4096, generator=torch.Generator().manual_seed(0))
TENSORS = {
    "whole": NUMBERS.reshape(64, 64),
    "double": NUMBERS.double(),
    "complex": torch.complex(NUMBERS[:999], NUMBERS[1:1000]),
    "conjugated": torch.complex(NUMBERS[:99], NUMBERS[1:100]).conj(),
    "odd": NUMBERS[:7].bfloat16(),
    "odd-begin": NUMBERS[:101].bfloat16()[1:],
    "half-begin": NUMBERS[1:101],
    "transposed": NUMBERS.reshape(64, 64).half().t(),
    "channels-last": NUMBERS.reshape(4, 4, 16, 16).contiguous(memory_format=torch.channels_last),
    "strided": NUMBERS[::3],
    "bytes": NUMBERS[:1003].mul(9).to(torch.uint8),
    "flags": NUMBERS[:13] > 0,
    "scalar": torch.tensor(3.5),
    "nothing": torch.zeros(0, 3),
    "large": NUMBERS.repeat(100),
}


def copied(tensors: dict[str, torch.Tensor]) -> tuple[SaveBuffer, Plan, int]:
    """An object in memory, with the sums behind it."""
    save_buffer = SaveBuffer()
    plan = Plan(tensors, save_buffer, header=100)
    plan.head({"own": "{}"})
    runs = route(plan.pairs(tensors)).runs
    sums = Sums(plan.sums, plan.begin, runs)
    sums.send()
    for into, those in runs:
        into.copy_(those[0] if len(those) == 1 else torch.cat(those))
    return save_buffer, plan, sums.count


def written(save_buffer: SaveBuffer, plan: Plan, count: int) -> memoryview:
    begin = sums_at(plan.size)
    stretches = save_buffer.tensor(begin, begin + SUM_BYTES * count).view(torch.int64)
    data = memoryview(save_buffer.tensor(0, plan.size).numpy()).cast("B")
    put_fingerprints(data, memoryview(stretches.numpy()))
    return data


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpucloud.resume.save.capture._is_far", lambda tensor: True)


def test_what_was_copied_as_it_was_is_found_to_be_so_and_has_its_fingerprint() -> None:
    header = read_header(written(*copied(TENSORS)))
    found = of_header(header)
    assert found is not None
    names = [tensor.name for tensor in header.tensors]
    assert dict(zip(names, found, strict=True)) == {name: fingerprint_of(TENSORS[name]) for name in names}


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "nothing"])
def test_a_bit_that_was_copied_otherwise_is_found(name: str) -> None:
    save_buffer, plan, count = copied(TENSORS)
    ((into, _),) = plan.pairs({name: TENSORS[name]})
    whole = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[into.element_size()]
    into.view(whole).reshape(-1)[-1:] ^= 1
    with pytest.raises(Torn, match="was changed while it was copied"):
        written(save_buffer, plan, count)


@pytest.mark.parametrize(
    ("name", "width"), [("whole", 8), ("odd", 2), ("odd-begin", 2), ("half-begin", 4), ("transposed", 2), ("flags", 1)]
)
def test_words_are_as_wide_as_memory_allows(name: str, width: int) -> None:
    assert words_of(TENSORS[name]).element_size() == width
