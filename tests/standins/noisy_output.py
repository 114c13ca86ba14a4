"""A worker that writes lines of many lengths, each with its own number, and what its output must be afterwards."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Iterator

_LENGTHS = (0, 1, 80, 200, 1000, 5000)

# TOTAL bytes and what the last line needs; it waits while it is AHEAD bytes before what the file TAKEN tells.
WRITER = f"""
import os, random, time
chance, total, number, done = random.Random(7), int(os.environ["TOTAL"]), 0, 0
def far_ahead():
    with open(os.environ["TAKEN"]) as file:
        return done - int(file.read() or 0) > int(os.environ["AHEAD"])
with open(1, "wb", buffering=1 << 16, closefd=False) as out:
    while done < total:
        done += out.write(b"%d %s\\n" % (number, b"x" * chance.choice({_LENGTHS})))
        number += 1
        while number % 1000 == 0 and far_ahead():
            time.sleep(0.1)
"""
_SAID = re.compile(rb"\((\d+) bytes of output came faster than they could be read\)\n")


def lines() -> Iterator[bytes]:
    """Yield what the writer writes, for ever."""
    chance, number = random.Random(7), 0
    while True:
        yield b"%d %s\n" % (number, b"x" * chance.choice(_LENGTHS))
        number += 1


def wrong_lines(where: str, pieces: Iterable[bytes], total: int) -> int:
    """Return how many lines are not, one after the other, the writer's; say so on stderr."""
    written, wrong, number, size, rest = lines(), 0, 0, 0, b""
    for piece in pieces:
        found = (rest + piece).split(b"\n")
        rest = found.pop()
        for line in found:
            wrong += line + b"\n" != next(written)
            number += 1
            size += len(line) + 1
    wrong += bool(rest) + (size < total)
    if wrong:
        sys.stderr.write(f"logs: {where}: {wrong} of {number} lines are wrong, {size} of {total} bytes\n")
    return wrong


def unsaid(where: str, pieces: Iterable[bytes], total: int) -> tuple[int, int]:
    """Return how many bytes are missing without a word or are not the writer's, and how many a line says are lost."""
    written, lost, wrong = _Written(total), 0, 0
    for line in _split(pieces):
        said = _SAID.fullmatch(line)
        if said:
            lost += int(said[1])
            written.skip(int(said[1]))
        else:
            wrong += len(line) if line != written.take(len(line)) else 0
    wrong += written.skip(sys.maxsize)
    if wrong:
        sys.stderr.write(f"logs: {where}: {wrong} bytes are wrong or missing, {lost} were said to be lost\n")
    return wrong, lost


def _split(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *found, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in found)
    if rest:
        yield rest


class _Written:
    """The writer's output from its beginning, which is taken away piece by piece."""

    def __init__(self, total: int) -> None:
        self._lines, self._left, self._ready = lines(), total, b""

    def take(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        while len(self._ready) < size and self._left > 0:
            self._ready += self._line()
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken

    def skip(self, size: int) -> int:
        """Pass over the next bytes, and return how many they were: fewer at the end."""
        passed = 0
        while passed + len(self._ready) < size and self._left > 0:
            passed += len(self._ready)
            self._ready = self._line()
        return passed + len(self.take(size - passed))

    def _line(self) -> bytes:
        line = next(self._lines)
        self._left -= len(line)
        return line
