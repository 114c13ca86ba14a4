"""Numbers that a script prints, by the job file's patterns: which patterns may be used, and what a line says. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Sequence

from gpucloud.domain.node.status import Readings
from gpucloud.domain.untrusted import COUNTED, quoted

STEP, TOTAL_STEPS, LOSS = "step", "total_steps", "loss"
"""The names that mean something beside being shown."""
REPORTED = frozenset({STEP, TOTAL_STEPS, LOSS})
"""What a script that uses gpucloud.resume reports by itself."""

LONGEST_PATTERN = 200
LONGEST_LINE = 1000
"""Characters of a line that are looked at: what searching one takes grows faster than its length."""

_OURS = "gpucloud: "
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[@-Z\\-_])")
_ENDS = re.compile(r"[\r\n]+")
_POINTS = 20  # a step's time is taken over so many looks that saw a new one
_LARGEST = 1e300

Ends = tuple[float, float]
"""The first and the last number that one look has found for a pattern."""


def compiled(pattern: str) -> re.Pattern[str]:
    """Return the pattern, ready; ValueError for one that cannot be used, or that could search one line for ever."""
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{quoted(pattern)} is longer than {LONGEST_PATTERN} characters")
    try:
        found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{quoted(pattern)} is no regular expression: {error}") from error
    if found.groups != 1:
        raise ValueError(rf"{quoted(pattern)} must have one group, the number: (\d+) (others are written (?:…))")
    if _repeats_repeats(pattern):
        raise ValueError(f"{quoted(pattern)} repeats what repeats itself: that can take for ever on one line")
    return found


def _repeats_repeats(pattern: str) -> bool:
    """Whether a group that holds a repetition is repeated, as in `(a+)*`."""
    groups = [False]  # of each that is open: whether it holds a repetition
    text = re.sub(r"\\.|\[\]?[^\]]*\]", "x", re.sub(r"\\[\\\[\]]", "x", pattern))
    at = 0
    while at < len(text):
        one = text[at]
        if one == "(":
            groups.append(False)
            at += len(m[0]) if (m := re.match(r"\(\?(?:P<\w+>|P=\w+|[:=!>]|<[=!])", text[at:])) else 1
            continue
        holds = groups.pop() if one == ")" and len(groups) > 1 else None
        again = re.match(r"[*+]|\{\d*(?:,\d*)?\}", text[at + 1 :])
        if again is not None and holds:
            return True
        groups[-1] |= bool(holds) or (again is not None and not again[0][1:-1].isdecimal())
        at += 1 + (len(again[0]) if again is not None else 0)
    return False


def lines_of(text: str) -> tuple[tuple[str, ...], str]:
    """Return the whole lines, those that a carriage return ends too, without colours; and what is left of the last."""
    *whole, rest = _ENDS.split(text)
    found = (_ANSI.sub("", line[: 2 * LONGEST_LINE])[:LONGEST_LINE] for line in whole)
    return tuple(line for line in found if line and not line.startswith(_OURS)), rest[: 2 * LONGEST_LINE]


def ends_of(pattern: re.Pattern[str], lines: Sequence[str]) -> Ends | None:
    """Return what the first and the last line with a number for the pattern say, `nan` too; None where none has one."""
    last = _first_number(pattern, reversed(lines))
    first = _first_number(pattern, lines) if last is not None else None
    return (first, last) if first is not None and last is not None else None


def _first_number(pattern: re.Pattern[str], lines: Iterable[str]) -> float | None:
    numbers = (_number(match[1]) for line in lines if (match := pattern.search(line)))
    return next((number for number in numbers if number is not None), None)


def _number(text: str | None) -> float | None:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return number if not math.isfinite(number) or abs(number) <= _LARGEST else None


class Printed:
    """The numbers of one attempt, look after look; a step takes what it took on average over the last looks."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._points: deque[tuple[int, float]] = deque(maxlen=_POINTS)
        self._first: int | None = None
        self._longest_s: float | None = None
        self._sources: dict[str, int] = {}

    def take(self, rank: int, found: dict[str, Ends], now_s: float) -> None:
        """Take what one look has found in a rank's output; seconds are of any clock that never goes back.

        Ranks that print the same are not all at one step: each number is taken from the rank that printed it first.
        A script may have made many steps before the first look.
        """
        numbers = {name: last for name, (_, last) in found.items()}
        impossible = {name for name in (STEP, TOTAL_STEPS) if _count(numbers.get(name)) is None}
        numbers = {name: value for name, value in numbers.items() if name not in impossible}
        numbers = {name: value for name, value in numbers.items() if self._sources.setdefault(name, rank) == rank}
        self._values |= numbers
        step = _count(numbers.get(STEP))
        if step is None or (self._points and step == self._points[-1][0]):
            return
        if self._points and step < self._points[-1][0]:
            self._points.clear()  # counted from the beginning again: in another phase, or by another rank
        elif self._points:
            self._longest_s = max(self._longest_s or 0.0, now_s - self._points[-1][1])
        begun = _count(found[STEP][0]) if self._first is None else self._first
        self._first = min(step, begun if begun is not None else step)
        self._points.append((step, now_s))

    def forget(self, name: str) -> None:
        """Nothing more is known of that number."""
        self._values.pop(name, None)
        if name == STEP:
            self._points.clear()

    def readings(self, now_s: float) -> Readings | None:
        """Return how it stands; None before the first number."""
        if not self._values:
            return None
        last = self._points[-1] if self._points else None
        others = (one for one in self._values.items() if one[0] not in REPORTED)
        return Readings(
            step=last[0] if last else None,
            first_step=self._first,
            total_steps=_count(self._values.get(TOTAL_STEPS)),
            loss=self._values.get(LOSS),
            step_seconds=self._step_seconds(),
            longest_s=self._longest_s,
            age_s=now_s - last[1] if last else 0.0,
            values=tuple(sorted(others)),
        )

    def _step_seconds(self) -> float | None:
        if len(self._points) < 2:
            return None
        (first, began_s), (last, ended_s) = self._points[0], self._points[-1]
        return (ended_s - began_s) / (last - first)


def _count(number: float | None) -> int | None:
    return int(number) if number is not None and 0 <= number < COUNTED else None
