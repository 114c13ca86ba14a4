"""Boxes of a tensor: what two of them have in common, and where its elements lie."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """The elements from `offset` on, `extent` of them in each dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return where this box lies in one that holds it."""
        starts = [at - begin for at, begin in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + n) for start, n in zip(starts, self.extent, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return what both boxes hold; None when that is nothing."""
    begins = tuple(map(max, one.offset, other.offset))
    ends = tuple(
        min(a + m, b + n) for a, m, b, n in zip(one.offset, one.extent, other.offset, other.extent, strict=True)
    )
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return None
    return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))


def span(inner: Box, outer: Box) -> range:
    """Return the numbers, in row-major order of `outer`, from its first element of `inner` to its last one."""
    first = last = 0
    for places, size in zip(inner.within(outer), outer.extent, strict=True):
        first, last = first * size + places.start, last * size + places.stop - 1
    return range(first, last + 1)
