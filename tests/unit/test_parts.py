"""Objects cut into parts: nothing copied, nothing lost, one CRC32 a part."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.checkpoint.objects import Sums, bytes_in, count_of, covering, crc32_of, cut, sums_of

PART = 10


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", PART)


def test_pieces_are_cut_where_parts_end_and_not_copied():
    first, second = bytearray(b"0123456"), bytearray(b"789abcdefghijklmn")
    found = list(cut((memoryview(first), memoryview(b""), memoryview(second))))
    assert [[bytes(view) for view in part] for part in found] == [[b"0123456", b"789"], [b"abcdefghij"], [b"klmn"]]
    second[0] = ord("X")
    assert bytes(found[0][1]) == b"X89"


def test_a_part_that_is_full_is_followed_by_no_empty_one():
    assert [bytes_in(part) for part in cut((memoryview(bytes(20)),))] == [10, 10]
    assert list(cut(())) == []
    assert list(cut((memoryview(b""),))) == []


def test_sums_are_those_of_the_parts():
    assert sums_of((memoryview(b"0123456"), memoryview(b"789ab"))) == Sums(
        size=12, crc32=(zlib.crc32(b"0123456789"), zlib.crc32(b"ab"))
    )
    assert sums_of(()) == Sums(size=0, crc32=())


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_parts_are_counted(size, count):
    assert count_of(size) == count


@pytest.mark.parametrize(
    ("at", "length", "numbers"),
    [
        (0, 0, []), (25, 0, []), (0, 1, [0]), (0, 10, [0]), (0, 11, [0, 1]), (9, 2, [0, 1]), (10, 10, [1]),
        (35, 30, [3, 4, 5, 6]),
    ],
)  # fmt: skip
def test_the_parts_that_cover_a_range_are_named(at, length, numbers):
    assert list(covering(at, length)) == numbers


@given(st.lists(st.binary(max_size=35), max_size=8))
def test_whatever_the_pieces_are_the_parts_make_the_same_object(pieces):
    views = tuple(memoryview(piece) for piece in pieces)
    whole = b"".join(pieces)
    found = [b"".join(part) for part in cut(views)]
    assert b"".join(found) == whole
    assert all(len(part) == PART for part in found[:-1])
    assert [crc32_of(part) for part in cut(views)] == [zlib.crc32(part) for part in found]
    assert len(found) == count_of(len(whole)) == len(sums_of(views).crc32)
