"""When output was written: marks of a node's agent, and how they are kept beside the bytes that they date.

Workers write into their files themselves, so nothing stands between a script and its output that could slow it, change
a byte or lose one. The agent looks at the length of the files anyway; a mark is "what stands before this byte was there
at that time", and a line's time is that of the first mark behind its end. So what times cost depends on the seconds in
which something was written and not on lines: 10,000 lines in a second take ten marks, where a stamp before each line
would take 280 KB, and a script's own bytes stay what they are.

On the node `rank-<n>.times` grows beside `rank-<n>.log`, a line a mark, and is read from a place on just as that is:

    524288 1763983245123

In the store a piece's marks are in its own object, as one line before the bytes: an object of their own would be a
second request for each piece, and could be missing where the first was kept. `at` is (bytes, milliseconds) from mark to
mark, without milliseconds where nobody knows; `node` is the place in the node's file at which reading goes on.

    #gpucloud-times {"version":1,"at":[[524288,1763983245123],[1024,100]],"node":40}
    epoch 1: loss 2.5

A piece without that line has no times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.untrusted.bounds import LOG_TIMES_BYTES

MOST_MARKS = 25_000
"""Of a piece: the line that holds them stays below LOG_TIMES_BYTES."""

_HEAD = b"#gpucloud-times "
_LINE = re.compile(rb"^(\d{1,15}) (\d{13}|-)$", re.MULTILINE)  # a line that was cut off is none
_LATEST_MS = 16725225600000  # the end of the calendar, year 2500
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What stands before byte `until`, and behind the mark before, was there at `at_ms`, None where nobody knows.

    `place` is where the mark's line begins in the node's file.
    """

    until: int
    at_ms: int | None
    place: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DatedPiece:
    """Bytes of output with their marks, counted from the first of them; `place` is where the node's file goes on."""

    data: bytes
    marks: tuple[Mark, ...] = ()
    place: int = 0

    def stretches(self) -> Iterator[tuple[bytes, datetime | None]]:
        """Yield the bytes, in pieces that were there at one time each, None for those of which nobody knows."""
        begin = 0
        for mark in self.marks:
            if mark.until > begin:
                yield self.data[begin : mark.until], _time(mark.at_ms)
                begin = mark.until
        if begin < len(self.data):
            yield self.data[begin:], None

    def after(self, count: int) -> DatedPiece:
        """Return the piece without its first bytes."""
        if not count:
            return self
        left = tuple(Mark(until=mark.until - count, at_ms=mark.at_ms) for mark in self.marks if mark.until > count)
        return DatedPiece(data=self.data[count:], marks=left, place=self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """The line before a piece's bytes."""

    version: int = 1
    at: tuple[tuple[int, int | None], ...] = ()
    node: int = 0


def mark_line(until: int, at_ms: int | None) -> bytes:
    """Return a mark as the agent writes it."""
    return b"%d %s\n" % (until, b"-" if at_ms is None else b"%d" % at_ms)


def read_marks(data: bytes, place: int, after: int) -> tuple[tuple[Mark, ...], int]:
    """Return the marks behind byte `after` in what the node's file has from `place` on, and where it goes on.

    A script may write there too: what is no mark, or goes back, is none.
    """
    whole, marks = data.rfind(b"\n") + 1, []
    for found in _LINE.finditer(data, 0, whole):
        until, at_ms = int(found[1]), None if found[2] == b"-" else int(found[2])
        if until > after:
            marks.append(Mark(until=until, at_ms=at_ms, place=place + found.start()))
            after = until
    return tuple(marks), place + whole


def with_times(piece: DatedPiece) -> bytes:
    """Return a piece as it is kept."""
    if not piece.marks and not piece.place and not piece.data.startswith(_HEAD):
        return piece.data
    at: list[tuple[int, int | None]] = []
    until, last = 0, 0
    for mark in piece.marks:
        at.append((mark.until - until, None if mark.at_ms is None else mark.at_ms - last))
        until, last = mark.until, last if mark.at_ms is None else mark.at_ms
    return b"%s%s\n%s" % (_HEAD, to_json(_Times(at=tuple(at), node=piece.place)).encode(), piece.data)


def read_piece(stored: bytes) -> DatedPiece:
    """Return a kept piece; one whose times nobody can read has none, and shows what stands in their place."""
    if not stored.startswith(_HEAD):
        return DatedPiece(data=stored)
    end = stored.find(b"\n", 0, LOG_TIMES_BYTES)
    try:
        times = from_json(_Times, stored[len(_HEAD) : end])
        data = stored[end + 1 :]
        return DatedPiece(data=data, marks=tuple(_marks(times, len(data))), place=max(0, times.node))
    except Malformed:
        return DatedPiece(data=stored)


def _marks(times: _Times, most: int) -> Iterator[Mark]:
    until, last = 0, 0
    for count, span in times.at:
        until, last = until + count, last if span is None else last + span
        if count <= 0 or until > most or not 0 <= last < _LATEST_MS:
            raise Malformed("a mark that cannot be")
        yield Mark(until=until, at_ms=None if span is None else last)


def _time(at_ms: int | None) -> datetime | None:
    return None if at_ms is None else _EPOCH + timedelta(milliseconds=at_ms)
