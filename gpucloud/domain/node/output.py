"""A script's output: the exception that ended it, lines that are written over, and when its lines were written.

The output is written by whatever ran on a machine: what is made of it is one line, and short.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.untrusted import LOG_TIMES_BYTES, in_one_line

_READ = 1 << 16
"""Characters of the output's end that are looked at."""
_LONGEST = 200
"""Characters of the exception's words that are kept."""
_LONGEST_UNSAVED = 400  # with the path of what was to be written, and how that is mended
_LONGEST_PATH = 80

_RANK = re.compile(r"^(?:\[rank\d+\]: ?)")  # torch writes it before each line of a traceback
_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'^\s+File "([^"]+)", line (\d{1,9})')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*|:?)")
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): .*")
_CODE = re.compile(r"/code/[0-9a-f]{40,64}/(?=[^/])")
_WORD = re.compile(r"[^\s\"':]+")  # looked at once: a script may write megabytes without a space
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3")
_UNSAVED = re.compile(
    r"gpucloud: ((?:rank \d{1,6} could not save step (\d{1,18})|the last checkpoint could not be saved): .+)"
)
_LEFT_UNSAVED = re.compile(r"gpucloud: (its last checkpoint is not saved: .+)")  # a script that ended well
_UNCOMMITTED = re.compile(r"StoreError: the final checkpoint, of step \d{1,18}, could not be committed")
_FULL_STORE = re.compile(
    r"(?:rank \d{1,6} could not save step \d{1,18}|its last checkpoint is not saved): .*"
    r"(?:(?:No space left on device|Disk quota exceeded) \(free some [a-z ]+ there, or name another store"
    r"|\((?:QuotaExceeded|XMinioAdminBucketQuotaExceeded|XMinioStorageFull)\))"
)
# What the other ranks say when one of them is gone: gloo's and NCCL's words, as torch 2.6 to 2.13 raises them, and
# those of any broken connection, which is a peer's where torch raises it: a ConnectionError is a script's own.
_OF_LIBRARIES = r"gloo/transport|DistBackendError|NCCL (?:error|communicator)|Timed out waiting .* for (?:send|recv)"
_BROKEN = r"Connection (?:closed|reset) by peer|Broken pipe"
_PEER_LOST = re.compile(rf"{_OF_LIBRARIES}|{_BROKEN}")
_OF_PEERS = re.compile(
    rf".*(?:{_OF_LIBRARIES})|[\w.]*(?:RuntimeError|\bDist\w*Error|\bUnavailableError):.*(?:{_BROKEN})"
)
_END = 8000  # of a rank's output: what it said just before
_TAKEN = re.compile("address already in use", re.IGNORECASE)
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([A-Za-z_]\w{0,63})(?:\.[\w.]*)?'")
_UNSET = re.compile(r"(?:NameError: name|UnboundLocalError: [a-z ]{0,40}variable) '([A-Za-z_]\w{0,63})'")
_PACKAGES = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules whose package on PyPI has another name."""


def failure_of(output: str, rank: int) -> str | None:
    """Return what ended a script in one line, such as `ValueError: no such rate (train.py:3, rank 0)`.

    None where the output ends with no exception of Python.
    """
    lines = [_RANK.sub("", line) for line in output[-_READ:].splitlines()]
    start = _last_traceback(lines)
    if start is None:
        return None
    end = next((at for at in range(start, len(lines)) if lines[at].strip() and not lines[at][0].isspace()), None)
    if end is None or not _EXCEPTION.fullmatch(lines[end]):
        return None
    words = _cut(in_one_line(lines[end]).rstrip(":"), _LONGEST)
    frames = [(found[1], found[2]) for line in lines[start:end] if (found := _FRAME.match(line))]
    place = _place(frames)
    return f"{words} ({place}, rank {rank})" if place else f"{words} (rank {rank})"


def unsaved_of(output: str, saved: int = 0) -> str | None:
    """Return what could not be saved last, and why, as is said at the output's end; None for no step after `saved`."""
    found = [match for line in output[-_READ:].splitlines() if (match := _UNSAVED.match(line))]
    newer = [match[1] for match in found if match[2] is None or int(match[2]) > saved]
    return _cut(in_one_line(newer[-1]), _LONGEST_UNSAVED) if newer else None


def cause(texts: Mapping[int, str], rank: int, saved: int = 0) -> str | None:
    """Return what ended the scripts in one line, and beside it what could not be saved after the step `saved`.

    That stands first where they failed for it, or merely lost a peer.
    """
    failure = failure_of(texts[rank], rank)
    if failure is None:
        left = [match[1] for line in texts[rank][-_END:].splitlines() if (match := _LEFT_UNSAVED.match(line))]
        return _cut(in_one_line(left[-1]), _LONGEST_UNSAVED) if left else None
    unsaved = next((said for text in texts.values() if (said := unsaved_of(text[-_END:], saved)) is not None), None)
    if unsaved is None:
        return failure
    follows = _UNCOMMITTED.search(failure) is not None or _is_of_peers(failure)
    return f"{unsaved}; then {failure}" if follows else f"{failure}; {unsaved}"


def store_was_full(cause: str) -> bool:
    """Whether what ended the scripts, in one line, is that the job's store was full: none of them is wrong."""
    return _FULL_STORE.match(cause) is not None


def first_to_fail(texts: Mapping[int, str]) -> int:
    """Return the rank whose output names a cause of its own; ranks that only lost a peer failed because of it."""
    return min(texts, key=lambda rank: (_lost_a_peer(texts[rank], rank), not texts[rank], rank))


def _lost_a_peer(output: str, rank: int) -> bool:
    failure = failure_of(output, rank)
    if failure is not None and _PEER_LOST.search(failure) is not None:
        return _is_of_peers(failure)
    return _PEER_LOST.search(output[-4000:]) is not None


def _is_of_peers(failure: str) -> bool:
    return _OF_PEERS.match(failure) is not None


def port_was_taken(launcher: str) -> bool:
    """Whether a launcher says that another program has the port at which its ranks were to meet.

    In the words of torch 2.4 and later, of torch before, and of Python.
    """
    return _TAKEN.search(launcher) is not None


def advice_for(failure: str, *, resumed: bool = False) -> str | None:
    """Return the edit of job file or script that may help a script that failed so; None where none is known.

    A `resumed` one may have gone on behind an epoch's last step, where its loop over batches has nothing left.
    """
    missing = _MODULE.match(failure)
    if missing is not None:
        return f"setup: uv pip install {_PACKAGES.get(missing[1], missing[1])}"
    unset = _UNSET.match(failure) if resumed else None
    return f"saved at an epoch's last step, it goes on behind the loop: set {unset[1]} ahead of it" if unset else None


def without_code_folder(text: str) -> str:
    """Return output with files of the job's code by their paths in it: a machine keeps them below two long hashes."""
    return _WORD.sub(_without_folder, text) if "/code/" in text else text


def _without_folder(found: re.Match[str]) -> str:
    word = found[0]
    first = word.find("/")
    ends = [code.end() for code in _CODE.finditer(word) if code.start() > first]
    return f"{word[:first]}{word[ends[-1] :]}" if ends else word


def _last_traceback(lines: Sequence[str]) -> int | None:
    """Return where the frames of the last traceback begin; a script with a syntax error has no header before them."""
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].strip() == _HEADER and not (at and lines[at - 1].startswith("Exception ignored in")):
            return at + 1
        if _SYNTAX.fullmatch(lines[at]):
            first = _frame_before(lines, at)
            if first is not None and (not first or lines[first - 1].strip() != _HEADER) and not _in_block(lines, first):
                return first
    return None


def _frame_before(lines: Sequence[str], at: int) -> int | None:
    frames = (k for k in range(at - 1, max(-1, at - 5), -1) if _FRAME.match(lines[k]))
    return next(frames, None)


def _in_block(lines: Sequence[str], at: int) -> bool:
    """Whether that frame is one of a traceback's: then this has a header, and all before it counts."""
    return next((line.strip() == _HEADER for line in reversed(lines[:at]) if not line[:1].isspace()), False)


def _place(frames: Sequence[tuple[str, str]]) -> str | None:
    """Return the innermost place in the job's own code, else outside of libraries, else any."""
    own = [frame for frame in frames if _CODE.search(frame[0]) and not _LIBRARY.search(_relative(frame[0]))]
    ours = own or [frame for frame in frames if not _LIBRARY.search(frame[0])] or list(frames)
    if not ours:
        return None
    path, line = ours[-1]
    relative = _relative(path) if own else path.rsplit("/", 1)[-1]
    return f"{_cut(in_one_line(relative), _LONGEST_PATH)}:{line}"


def _relative(path: str) -> str:
    return _CODE.split(path)[-1]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# Output in which lines are written over, such as progress bars: what stands, and what still moves.


_MOVES = re.compile(r"(\r|\n|\x1b\[\d{0,9}[AB])")
_BEGUN = re.compile(r"(?:\x1b(?:\[\d{0,9})?|)\Z")  # whose rest may follow
_MOST_ROWS = 64  # a script that goes up farther is not followed


LONGEST = 1 << 20
"""Characters of a line that are shown: one that never ends is not kept for ever."""


def cut(text: str, length: int) -> str:
    """Return the beginning of a line of that length as it is shown, which says what is left out."""
    return text if length <= len(text) else f"{text}… ({length - len(text)} more characters of this line)"


@dataclass(slots=True)
class BegunLine:
    """A line that has not ended, in the pieces in which it came."""

    _pieces: list[str] = field(default_factory=list)
    _kept: int = 0
    _length: int = 0

    def add(self, piece: str) -> None:
        """Take what comes next of it."""
        self._length += len(piece)
        if kept := piece[: LONGEST - self._kept]:
            self._pieces.append(kept)
            self._kept += len(kept)

    def end(self) -> str:
        """Return the line as it is shown, and begin another one."""
        whole, length = "".join(self._pieces), self._length
        self._pieces, self._kept, self._length = [], 0, 0
        return cut(whole, length)


@dataclass(slots=True)
class _Row:
    text: str = ""
    length: int = 0
    """Of all that was written there; the text is its beginning."""
    over: bool = False
    """Whether what comes next takes the place of the text."""
    moves: bool = False
    """Whether it was ever written over."""

    @property
    def said(self) -> str:
        """The row as it is shown."""
        return cut(self.text, self.length)


def _first() -> list[_Row]:
    return [_Row()]


@dataclass(slots=True)
class Bars:
    """What one rank wrote, as a terminal would show it: rows, and in which of them it writes next.

    tqdm writes a bar over its last state (`\\r`), and goes down and up again for one within another.
    """

    _rows: list[_Row] = field(default_factory=_first)
    _at: int = 0
    _begun: str = ""

    @property
    def moving(self) -> tuple[str, ...]:
        """The rows that may still be written over, as they are now."""
        return tuple(row.said.rstrip() for row in self._rows if (row.moves or row.over) and row.text.strip())

    def feed(self, text: str) -> str:
        """Take what comes next, and return the lines that nothing comes back to any more, each with its end."""
        text = self._begun + text
        self._begun = _BEGUN.findall(text)[0]
        for piece in _MOVES.split(text[: len(text) - len(self._begun)]):
            self._take(piece)
        done, self._rows, self._at = self._rows[: self._at], self._rows[self._at :], 0
        return "".join(f"{row.said}\n" for row in done if row.text.strip() or not row.moves)

    def end(self) -> str:
        """Return what is left, when nothing more comes."""
        left, self._rows, self._at, self._begun = self._rows, _first(), 0, ""
        return "".join(f"{row.said}\n" for row in left if row.text.strip())

    def _take(self, piece: str) -> None:
        row = self._rows[self._at]
        if piece == "\r":
            row.over = True
        elif piece == "\n":
            self._go(self._at + 1)
        elif piece.startswith("\x1b[") and piece[-1:] in ("A", "B"):
            rows = int(piece[2:-1] or 1) if len(piece) < 6 else _MOST_ROWS
            # Down makes one row at the most, as a line's end does: a few bytes are not to be many rows.
            self._go(min(self._at + rows, len(self._rows)) if piece.endswith("B") else self._at - rows)
        elif piece:
            row.moves = row.moves or row.over
            row.text, row.length = ("", 0) if row.over else (row.text, row.length)
            row.text += piece[: LONGEST - len(row.text)]
            row.length, row.over = row.length + len(piece), False

    def _go(self, to: int) -> None:
        back = to < self._at
        self._at = max(0, to)
        while self._at >= len(self._rows):
            self._rows.append(_Row())
        row = self._rows[self._at]
        row.over, row.moves = bool(row.text), row.moves or back


# When output was written: marks of a node's agent, and how they are kept beside the bytes that they date.
#
# Workers write into their files themselves, so nothing stands between a script and its output that could slow it,
# change a byte or lose one. The agent looks at the length of the files anyway; a mark is "what stands before this byte
# was there at that time", and a line's time is that of the first mark behind its end. So what times cost depends on the
# seconds in which something was written and not on lines: 10,000 lines in a second take ten marks, where a stamp before
# each line would take 280 KB, and a script's own bytes stay what they are.
#
# On the node `rank-<n>.times` grows beside `rank-<n>.log`, a line a mark, and is read from a place on just as that is:
#
#     524288 1763983245123
#
# In the store a piece's marks are in its own object, as one line before the bytes: an object of their own would be a
# second request for each piece, and could be missing where the first was kept. `at` is (bytes, milliseconds) from mark
# to mark, without milliseconds where nobody knows; `node` is the place in the node's file at which reading goes on.
#
#     #gpucloud-times {"version":1,"at":[[524288,1763983245123],[1024,100]],"node":40}
#     epoch 1: loss 2.5
#
# A piece without that line has no times.


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
