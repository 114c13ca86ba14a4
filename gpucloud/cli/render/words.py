"""How answers, the story and errors are written, and the small words that all answers share."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from itertools import zip_longest
from typing import Any, TextIO

from gpucloud.cli.help import GROUPS
from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, Interrupted, JobFileError
from gpucloud.domain.job.quantities import format_size, format_span
from gpucloud.domain.market.scenario import Recovery
from gpucloud.domain.offer import Pool
from gpucloud.domain.state.state import Quarantine
from gpucloud.domain.untrusted import in_one_line, lines_of, set_off

VERSION = 1
_ID = re.compile(r"\bi-[0-9a-f]{17}\b")
_SHORT_ID = 10
_LEAST_ROOM = 16
_LONGEST_FIGURE = 24  # in letters: `1234.50 of 12000.00 USD`
_USUAL_COLUMNS = 80
_MOST_WAITING, _ENDS_S = 4096, 3.0
"""Of pieces of the story that a terminal has not taken yet, and how long its end waits for them."""
_TOKEN = re.compile(
    rf"gpucloud (?:{'|'.join(name for commands in GROUPS.values() for name in commands)})\b[^·;,`]*[^\s·;,`][;,]?"
    r"|(?:[^\s`]*`[^`]*`)+\S*|\S+"
)
"""A word; a command, and what stands between backticks, with what touches it, is one."""
_COMMAND = re.compile(r"(##|##vso)\[")


def say(text: str) -> None:
    """Write an answer."""
    sys.stdout.write("\n".join(lines_of(text)) + "\n")
    sys.stdout.flush()


def say_words(text: str) -> None:
    """Write an answer for people: on a terminal, a line that has no room goes on between words."""
    width = width_of(sys.stdout)
    say("\n".join(folded(line, width) for line in lines_of(text)))


def as_argument(called: str) -> str:
    """Return what means a job for programs, which pass it as one word: people read it as their shell does."""
    return shlex.split(called)[0]


def say_json(answer: dict[str, Any], *, is_one_of_many: bool = False) -> None:
    """Write an answer as one JSON object: for people on a terminal over many lines, for programs on one.

    One of many is always on one line. What would be a command to a CI runner is escaped, and reads the same.
    """
    indent = 2 if sys.stdout.isatty() and not is_one_of_many else None
    say(_COMMAND.sub(r"\1\\u005b", json.dumps({"version": VERSION, **answer}, indent=indent)))


def tell(text: str) -> None:
    """Write a piece of the story, all but its first line set off, for words of others may be in it.

    On a terminal, lines go on between words; a hint stays one line, for it is copied. Where nobody can read it any more
    (a closed terminal), go on without.
    """
    try:
        width = width_of(sys.stderr)
        sys.stderr.write("\n".join(folded(line, width) for line in set_off(text).split("\n")) + "\n")
        sys.stderr.flush()
    except OSError:
        silence()


def silence() -> None:
    """Have the story go nowhere from now on: its terminal or pipe is gone, and what waits in a buffer must not fail."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())


class Aside:
    """Standard error that holds nobody up: a thread writes it, and what finds no room is left out.

    A terminal that is stopped (Ctrl-S), a pager or a pipe that nobody reads takes nothing any more, for hours perhaps:
    who supervises a job goes on. Use as a context; at its end what still waits has a moment to be written.
    """

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._waiting: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._write_for_ever, name="stderr", daemon=True)

    def __getattr__(self, name: str) -> Any:
        """All but writing is as it was: whether it is a terminal, how wide, of which encoding."""
        return getattr(self._stream, name)

    def __enter__(self) -> Aside:
        """Take the place of standard error, where that is a file of this process."""
        if self._stream is sys.__stderr__ and self._stream is not None:
            self._stream.flush()
            self._thread.start()
            sys.stderr = self
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        if self._thread.is_alive():
            sys.stderr = self._stream
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_ENDS_S)
                self._thread.join(_ENDS_S)

    def write(self, text: str) -> int:
        """Have the text written."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits here for more."""

    def _write_for_ever(self) -> None:
        # Not by the stream: at the process's end its lock would be held by a thread that still writes.
        number, encoding = self._stream.fileno(), self._stream.encoding
        while (text := self._waiting.get()) is not None:
            data = text.encode(encoding, "backslashreplace")
            try:
                while data:
                    data = data[os.write(number, data) :]
            except OSError:
                silence()


def tell_error(error: GpucloudError) -> None:
    """Write an error as people read it: what is wrong, then the hint."""
    for line in error.message.splitlines() if isinstance(error, JobFileError) else (f"error: {error.message}",):
        tell(line)
    if error.hint:
        tell(f"hint: {error.hint}")


def error_json(error: GpucloudError) -> dict[str, Any]:
    """Return an error as an object."""
    problems = codec.plain(error.problems) if isinstance(error, JobFileError) else []
    return {
        "error": {
            "code": error.code,
            "exit_code": error.exit_code,
            "message": error.message,
            "hint": error.hint,
            "problems": problems,
        }
    }


def error_fields(error: GpucloudError) -> dict[str, Any]:
    """Return what an entry of an answer says of what could not be read, beside what that is."""
    return {"error": error.code, "exit_code": error.exit_code, "message": error.message, "hint": error.hint}


def left(exit_code: int, why: str, *, as_json: bool, hint: str | None = None) -> int:
    """Return the exit code of a command that its user left, with an object in place of the answer for programs."""
    if as_json:
        say_error(Interrupted(why, exit_code=exit_code, hint=hint))
    return exit_code


def say_error(error: GpucloudError) -> None:
    """Answer with an error as one JSON object, if anybody reads that still: Ctrl-C ends the next in a pipe, too."""
    try:
        say_json(error_json(error))
    except OSError:
        let_go_of_stdout()


def let_go_of_stdout() -> None:
    """Have what is yet to be written go nowhere: Python would complain once more while it closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def width_of(stream: TextIO) -> int | None:
    """Return how many columns the terminal has that is written to, None for what is no terminal."""
    if not stream.isatty():
        return None
    told = os.environ.get("COLUMNS", "")
    try:
        own = int(told) if told.isdigit() else os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        own = 0
    return own or _USUAL_COLUMNS


def folded(line: str, width: int | None, indent: str | None = None) -> str:
    """Return the line in as many as a terminal so wide has room for, broken between words; as it is for no terminal.

    What is copied from it stays right: what stands between backticks is not broken, nor is a hint. `indent` is what
    the others begin with, two columns more than the first without it.
    """
    if width is None or len(line) <= width or line.startswith("hint: "):
        return line
    blank = line[: len(line) - len(line.lstrip())]
    indent = f"{blank}  " if indent is None else indent
    told, at = [blank], len(blank)
    for word in _TOKEN.finditer(line):
        gap = line[at : word.start()]
        if told[-1].strip() and len(told[-1]) + len(gap) + len(word[0]) > width:
            told.append(indent + word[0])
        else:
            told[-1] += gap + word[0]
        at = word.end()
    return "\n".join(told)


def table(rows: Sequence[Sequence[str]], spare: Sequence[str] = ()) -> str:
    """Return rows in columns, two spaces apart; machines' ids are short where a terminal has no room for them whole.

    `spare` are heads of columns that go then, in that order.
    """
    return fitted(rows, width_of(sys.stdout), spare)


def fitted(rows: Sequence[Sequence[str]], width: int | None, spare: Sequence[str] = ()) -> str:
    """Return rows in columns for so wide a terminal, None for no terminal.

    What does not fit has ids of ten characters, if those tell machines apart, then goes without the spare columns, then
    cells go on between words in lines of their own, the last column's first; at last each row is a part of its own.
    """
    lines = [[in_one_line(cell) for cell in row] for row in rows]
    if width is not None and _width(lines) > width:
        lines = with_short_ids(lines)
    for head in spare:
        if width is not None and lines and head in lines[0] and _width(lines) > width:
            at = lines[0].index(head)
            lines = [[*line[:at], *line[at + 1 :]] for line in lines]
    if width is not None and _width(lines) > width and len(lines[0]) > 1:
        rooms = _rooms(lines, width)
        if rooms is None and len(lines[0]) > 2:
            return "\n\n".join(_as_part(lines[0], line, width) for line in lines[1:])
        lines = [cells for line in lines for cells in _in_rooms(line, rooms)] if rooms is not None else lines
    columns = [_padded(column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _rooms(lines: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """Return how wide each column is so that all fit, no word broken; None where words are too long for that.

    Figures stay in one line with their units where there is room for that.
    """
    columns = list(zip(*lines, strict=True))
    rooms, last = [max(map(len, column)) for column in columns], len(columns) - 1
    over = _width(lines) - width
    for longest in (_LONGEST_FIGURE, 0):
        least = [max(_least(cell, longest) for cell in column) for column in columns]
        if sum(least) <= sum(rooms) - over:
            break
    else:
        return None
    for floor in (max(least[-1], _LEAST_ROOM), least[-1]):
        while over > 0:
            spare = [room - (floor if at == last else least[at]) for at, room in enumerate(rooms)]
            at = last if spare[last] > 0 else max(range(len(rooms)), key=lambda at: spare[at])
            if spare[at] <= 0:
                break
            rooms[at], over = rooms[at] - 1, over - 1
    return rooms


def _least(cell: str, longest: int) -> int:
    """Return how much room the cell needs, which is not broken where it is a figure no longer than that."""
    if len(cell) <= longest and any(map(str.isdigit, cell)):
        return len(cell)
    return max((len(word[0]) for word in _TOKEN.finditer(cell)), default=0)


def _in_rooms(line: Sequence[str], rooms: Sequence[int]) -> list[list[str]]:
    told = [folded(cell, room, "").split("\n") for cell, room in zip(line, rooms, strict=True)]
    return [list(cells) for cells in zip_longest(*told, fillvalue="")]


def _as_part(heads: Sequence[str], line: Sequence[str], width: int) -> str:
    """Return a row as lines of its cells, each behind its column's head."""
    room = max(map(len, heads)) + 4
    cells = [(head, cell) for head, cell in zip(heads[1:], line[1:], strict=True) if cell]
    return "\n".join(
        [f"{heads[0]} {line[0]}", *(folded(f"  {head:<{room - 2}}{cell}", width, " " * room) for head, cell in cells)]
    )


def with_short_ids(lines: list[list[str]]) -> list[list[str]]:
    """Return the cells with machines' ids of ten characters, if those tell them apart."""
    ids = {found for line in lines for cell in line for found in _ID.findall(cell)}
    if len({one[:_SHORT_ID] for one in ids}) < len(ids):
        return lines
    return [[_ID.sub(lambda found: found[0][:_SHORT_ID], cell) for cell in line] for line in lines]


def _width(lines: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in zip(*lines, strict=True)) - 2


def usd(amount: Decimal) -> str:
    """Return money as JSON has it: a decimal string, eight places at the most, no exponent."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def usd_or_null(amount: Decimal | None) -> str | None:
    """Return money that may not be known as JSON has it."""
    return None if amount is None else usd(amount)


def undone_text(recovery: Recovery) -> str:
    """Return what an interruption undoes in replays."""
    if recovery.begins_anew:
        return "it saves nothing: whenever its machines go, it begins anew"
    if recovery.notice_s is not None:
        return f"an interruption undoes the {format_span(timedelta(seconds=recovery.notice_s))} of its notice"
    other = "" if recovery.saves_when_asked else ", and so does a change of machines"
    return f"an interruption undoes up to {format_span(timedelta(seconds=recovery.save_s))} of work{other}"


def replayed_usd(amount: Decimal | None) -> str:
    """Return a cost of replays as a cell; of those that came to no end, nobody knows any."""
    return "unfinished" if amount is None else f"{amount:.2f}"


def pool_json(pool: Pool) -> dict[str, str]:
    """Return a pool's three words."""
    return {"instance_type": pool.instance_type, "zone": pool.zone, "market": pool.market.value}


def quarantine_json(one: Quarantine) -> dict[str, Any]:
    """Return a bad node as an object."""
    return {"node": one.node_id, "why": one.why, "at": codec.plain(one.at)}


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]


def is_meant(command: str) -> bool:
    """Ask whoever sits there whether what was just told is to be deleted; elsewhere say the command that does it."""
    if not is_somebody_there():
        tell(f"nothing is deleted: {command}")
        return False
    return is_yes("delete it?")


def is_somebody_there() -> bool:
    """Whether there is anybody who could be asked."""
    return sys.stdin.isatty()


def is_yes(question: str) -> bool:
    """Ask whoever sits there; whatever is no yes is a no."""
    return _answer(f"{question} [y/N] ").lower() in ("y", "yes")


def is_typed(word: str, why: str) -> bool:
    """Have whoever sits there type a word, which nobody does by habit."""
    return _answer(f"{why}, type {word}: ") == word


def _answer(question: str) -> str:
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip()


# How far something of known size is: redrawn on a terminal, a line now and then elsewhere.


_DRAWN_S, _TOLD_S = 0.2, 10.0


class Meter:
    """Counts bytes, from any thread, and shows them as a context; nothing is shown of what is quick."""

    def __init__(self, word: str, total: int) -> None:
        self._word = word
        self._total = total
        self._done = 0
        self._drawn = False
        self._lock = threading.Lock()
        self._began = self._shown = time.monotonic()

    def moved(self, size: int) -> None:
        """Take in so many bytes more."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._shown >= (_DRAWN_S if sys.stderr.isatty() else _TOLD_S):
                self._shown = now
                self._show()

    def __enter__(self) -> Meter:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the line that was drawn."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        speed = self._done / max(time.monotonic() - self._began, 0.001)
        text = f"{self._word} {format_size(self._done)} of {format_size(self._total)}, {format_size(int(speed))}/s"
        if sys.stderr.isatty():
            self._drawn = True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            tell(text)
