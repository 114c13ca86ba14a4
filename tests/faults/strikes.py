"""Counts what a process asks of the outside, and strikes at the n-th call: before it is made, or after it was."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Killed(BaseException):
    """The process is gone: it runs no cleanup that anybody outside could see, and makes no call any more."""


class Blow(str, Enum):
    """What strikes. `TWICE` is Ctrl-C, and again at the next call."""

    KILL = "SIGKILL"
    INT = "SIGINT"
    TERM = "SIGTERM"
    HUP = "SIGHUP"
    TWICE = "SIGINT-SIGINT"


_NUMBERS = {
    Blow.KILL: signal.SIGKILL,
    Blow.INT: signal.SIGINT,
    Blow.TERM: signal.SIGTERM,
    Blow.HUP: signal.SIGHUP,
    Blow.TWICE: signal.SIGINT,
}


@dataclass(slots=True)
class Strikes:
    """One process's calls. `look` is called at each, before and after; `at` counts from 1, None for no strike.

    `dead` is the exit code that a shell would tell of the process once it was killed, 0 before.
    """

    blow: Blow = Blow.KILL
    at: int | None = None
    after: bool = False
    look: Callable[[str], None] = lambda _: None
    calls: list[str] = field(default_factory=list)
    struck: int = 0
    dead: int = 0

    @property
    def changing(self) -> tuple[int, ...]:
        """The numbers of the calls that may change something outside, or let time pass."""
        return tuple(number for number, call in enumerate(self.calls, 1) if not call.startswith("!"))

    def around(self, name: str, do: Callable[[], Any]) -> Any:
        """Make the call and return its result, unless the process is dead or dies of it."""
        if self.dead:
            raise Killed
        self.calls.append(name)
        self.look(name)
        if self._is_due(len(self.calls), after=False):
            self._strike()
        number = len(self.calls)
        try:
            return do()
        finally:  # a call that was refused is over too
            self.look(name)
            if self._is_due(number, after=True):
                self._strike()

    def _is_due(self, number: int, *, after: bool) -> bool:
        if self.blow is Blow.TWICE and self.struck == 1:
            return True
        return self.struck == 0 and number == self.at and after == self.after

    def _strike(self) -> None:
        self.struck += 1
        number = _NUMBERS[self.blow]
        if self.blow is Blow.KILL or signal.getsignal(number) is signal.SIG_DFL:
            self.dead = 128 + _NUMBERS[self.blow]  # no handler: the kernel ends the process
            raise Killed
        signal.raise_signal(number)


class Counted:
    """Stands before an object of the outside: calls of the named methods are counted, the rest is passed through.

    What a method named in `inside` returns is outside too: its own methods are counted.
    """

    def __init__(self, strikes: Strikes, kind: str, inner: object, names: Names, inside: Inside | None = None) -> None:
        self._strikes, self._kind, self._inner = strikes, kind, inner
        self._names, self._inside = frozenset(names), inside or {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._names:
            return found

        def call(*arguments: object, **named: object) -> object:
            said = describe(self._kind, name, arguments)
            result = self._strikes.around(said, lambda: found(*arguments, **named))
            return Counted(self._strikes, name, result, self._inside[name]) if name in self._inside else result

        return call


Names = tuple[str, ...]
Inside = dict[str, Names]


def describe(kind: str, name: str, arguments: tuple[object, ...]) -> str:
    """Return the call in a few words; `!` marks one that only reads."""
    what = arguments[0] if arguments else ""
    if name == "run" and isinstance(what, tuple):
        changes = what[1:2] == ("-I",) or what[-1].endswith("desired.json") or "hashlib" in what[2:3][-1:].__str__()
        return f"{kind}.run {_brief(what)}" if changes else f"!{kind}.run {_brief(what)}"
    reads = name in READS
    return f"{'!' if reads else ''}{kind}.{name} {what if isinstance(what, str) else ''}".rstrip()


READS = frozenset({"get", "list", "find", "describe", "offers", "prices", "host"})


def _brief(argv: tuple[str, ...]) -> str:
    return " ".join(word.split("\n")[0][-40:] for word in argv)[:60]
