"""What two boxes of a tensor have in common, and where its elements lie."""

import itertools
import random

import pytest

from gpucloud.domain.checkpoint.chunks import Box, overlap, span


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (Box((0, 0), (4, 6)), Box((2, 3), (5, 5)), Box((2, 3), (2, 3))),
        (Box((2, 0), (2, 6)), Box((0, 0), (9, 6)), Box((2, 0), (2, 6))),
        (Box((0, 0), (2, 6)), Box((2, 0), (2, 6)), None),
        (Box((4, 0), (0, 6)), Box((0, 0), (9, 6)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_the_overlap_is_what_both_hold(one, other, both):
    assert overlap(one, other) == overlap(other, one) == both


def test_a_box_within_another_is_told_as_slices_from_its_beginning():
    assert Box((5, 2), (1, 3)).within(Box((4, 2), (3, 4))) == (slice(1, 2), slice(0, 3))


@pytest.mark.parametrize(
    ("inner", "found"),
    [
        (Box((2, 0), (2, 6)), range(12, 24)),  # rows lie together
        (Box((1, 2), (2, 3)), range(8, 17)),  # of columns, what lies between comes too
        (Box((3, 5), (1, 1)), range(23, 24)),
    ],
)
def test_the_span_goes_from_the_first_element_to_the_last(inner, found):
    assert span(inner, Box((0, 0), (4, 6))) == found


def test_the_span_of_a_number_is_itself():
    assert span(Box((), ()), Box((), ())) == range(1)


def test_boxes_of_any_cut_are_found_in_those_of_any_other_cut():
    dice = random.Random(5)
    for _ in range(50):
        shape = [dice.randint(1, 6) for _ in range(dice.randint(1, 3))]
        saved, wanted = _cut(shape, dice), _cut(shape, dice)
        for box in wanted:
            met = [both for one in saved if (both := overlap(one, box)) is not None]
            elements = [index for both in met for index in _indices(both)]
            assert sorted(elements) == sorted(_indices(box))
        for one, box in itertools.product(saved, wanted):
            both = overlap(one, box)
            numbers = [_number(index, one) for index in _indices(both)] if both else []
            assert not numbers or span(both, one) == range(min(numbers), max(numbers) + 1)


def _cut(shape, dice):
    edges = [sorted({0, n, dice.randint(0, n), dice.randint(0, n)}) for n in shape]
    boxes = itertools.product(*(list(itertools.pairwise(cut)) for cut in edges))
    return [Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends)) for ends in boxes]


def _indices(box):
    return list(itertools.product(*(range(at, at + n) for at, n in zip(box.offset, box.extent, strict=True))))


def _number(index, box):
    number = 0
    for at, begin, n in zip(index, box.offset, box.extent, strict=True):
        number = number * n + at - begin
    return number
