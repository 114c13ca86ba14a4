"""Which parts of objects make a whole tensor, and where each stretch of bytes goes."""

import itertools
import json
import random

import pytest

from gpucloud.domain.checkpoint.chunks import Chunk, chunks_of, covering, stretches
from gpucloud.domain.checkpoint.objects import entries_of, header_bytes, placed, read_header, start_of


def box(offset, extent, *, shape=(4, 6), number=0, begin=0):
    size = 2
    for n in extent:
        size *= n
    return Chunk(
        of="w", dtype="F16", shape=shape, offset=offset, extent=extent, number=number, begin=begin, end=begin + size
    )


def test_a_whole_tensor_is_one_stretch():
    assert [(s.source, s.target, s.length) for s in stretches(box((0, 0), (4, 6), begin=10), 0, 1000)] == [(10, 0, 48)]


def test_rows_of_a_tensor_are_one_stretch():
    assert [(s.source, s.target, s.length) for s in stretches(box((2, 0), (2, 6)), 0, 1000)] == [(0, 24, 24)]


def test_columns_of_a_tensor_are_a_stretch_a_row():
    found = [(s.source, s.target, s.length) for s in stretches(box((1, 2), (2, 3)), 0, 1000)]
    assert found == [(0, 16, 6), (6, 28, 6)]


def test_only_the_stretches_of_the_bytes_that_are_there_come():
    found = [(s.source, s.target, s.length) for s in stretches(box((1, 2), (2, 3), begin=100), 104, 108)]
    assert found == [(104, 20, 2), (106, 28, 2)]


def test_a_number_without_dimensions_is_one_stretch():
    assert [(s.source, s.target, s.length) for s in stretches(box((), (), shape=(), begin=7), 0, 100)] == [(7, 0, 2)]


def test_chunks_of_any_cut_in_any_pieces_put_the_tensor_together_again():
    dice = random.Random(5)
    for _ in range(60):
        shape = tuple(dice.randint(1, 5) for _ in range(dice.randint(1, 4)))
        cuts = [sorted({0, n, *(dice.randint(0, n) for _ in range(2))}) for n in shape]
        edges = [list(itertools.pairwise(cut)) for cut in cuts]
        whole = bytearray(2 * _count(shape))
        expected = bytes(dice.randbytes(len(whole)))
        boxes = [
            box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends), shape=shape, number=i)
            for i, ends in enumerate(itertools.product(*edges))
        ]
        for one in covering(boxes):
            data = b"".join(
                expected[2 * _flat(index, shape) : 2 * _flat(index, shape) + 2]
                for index in itertools.product(*(range(o, o + n) for o, n in zip(one.offset, one.extent, strict=True)))
            )
            step = dice.randint(1, 7)
            for first in range(0, len(data), step):
                for s in stretches(one, first, first + step):
                    whole[s.target : s.target + s.length] = data[s.source : s.source + s.length]
        assert whole == expected


def test_a_replica_is_taken_once():
    assert covering([box((0, 0), (4, 6)), box((0, 0), (4, 6), number=1)]) == (box((0, 0), (4, 6)),)


@pytest.mark.parametrize(
    ("boxes", "says"),
    [
        ([box((0, 0), (2, 6))], "missing"),
        ([box((0, 0), (3, 6)), box((2, 0), (2, 6))], "overlap"),
        ([box((0, 0), (2, 6)), box((1, 0), (2, 6))], "overlap"),
        ([box((0, 0), (4, 6)), box((0, 0), (2, 6), shape=(2, 6))], "different tensors"),
    ],
)
def test_parts_that_do_not_make_a_tensor_are_told(boxes, says):
    with pytest.raises(ValueError, match=says):
        covering(boxes)


def header(shards, tensors=(("a", "F32", (2, 2)),)):
    data = header_bytes(entries_of(placed(tensors)), {"shards": json.dumps(shards)})
    return read_header(data, len(data) + 16)


def test_what_a_tensor_is_a_part_of_is_in_the_metadata():
    (one,) = chunks_of(3, header({"a": {"of": "w", "shape": [4, 2], "offset": [2, 0]}}))
    assert (one.of, one.shape, one.offset, one.extent, one.number) == ("w", (4, 2), (2, 0), (2, 2), 3)


@pytest.mark.parametrize(
    "shard",
    [
        {"of": "w", "shape": [4], "offset": [0]},
        {"of": "w", "shape": [3, 2], "offset": [2, 0]},
        {"of": "w", "shape": [4, 2], "offset": [-1, 0]},
        {"of": "w", "shape": [4.0, 2], "offset": [0, 0]},
        {"of": "w", "shape": [4, 2]},
        [1],
    ],
)
def test_a_part_that_makes_no_sense_is_refused(shard):
    with pytest.raises(ValueError, match="part"):
        chunks_of(0, header({"a": shard}))


def test_a_header_is_read_as_it_was_made_and_ends_at_a_multiple_of_eight():
    tensors = placed([("small", "I8", (3,)), ("wide", "F64", (2,)), ("none", "F32", (0, 4))])
    data = header_bytes(entries_of(tensors), {"format": "pt"})
    found = read_header(data, len(data) + 19)
    assert [(t.name, t.begin, t.end) for t in found.tensors] == [("wide", 0, 16), ("none", 16, 16), ("small", 16, 19)]
    assert (found.metadata, found.start % 8, start_of(data[:8], 1000)) == ({"format": "pt"}, 0, found.start)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8 + b"{}",
        b"\x02" + bytes(7) + b"[]",
        b"\x02" + bytes(7) + b"{ ",
        b"\x0a" + bytes(7) + b'{"a": 1}  ',
        header_bytes(entries_of(placed([("a", "F32", (8,))])), {}),
        header_bytes(entries_of(placed([("a", "F32", (1,))])), {}).replace(b"F32", b"F99"),
        header_bytes(entries_of(placed([("a", "F32", (1,))])), {}).replace(b"[0,4]", b"[0,3]"),
        header_bytes(entries_of(placed([("a", "F32", (1,))])), {}).replace(b"[1]", b"[-1]"),
    ],
)
def test_bytes_that_are_not_in_the_layout_are_refused(data):
    with pytest.raises(ValueError, match=r".+"):
        read_header(data, max(len(data), 8) + 4)


def _count(shape):
    n = 1
    for size in shape:
        n *= size
    return n


def _flat(index, shape):
    place = 0
    for at, size in zip(index, shape, strict=True):
        place = place * size + at
    return place
