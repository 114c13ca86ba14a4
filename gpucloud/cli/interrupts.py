"""Ctrl-C and termination: asked about on a terminal, obeyed at once elsewhere."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gpucloud.cli.render.onlookers import Onlooker
from gpucloud.cli.render.words import tell
from gpucloud.domain.state.state import ExitReason

_STOP = "[s]top the job ({stopping}), "
SAVES = "saves first"
_DETACH = "[d]etach (it goes on), "
_CONTINUE = "or [c]ontinue? "
_CONTINUE_BY_LINE = "or [c]ontinue, then Enter? "
_BLANK = " \t\r\n\x04"  # with Ctrl-D, as a terminal gives it that gives single keys
_ANSWER_WITHIN_S = 60.0
_WITHDRAWN_FOR_S = 1.0
"""How long somebody may take to see that there is nothing to answer any more."""

Detaching = Callable[[], str | None]
"""Returns what somebody should know before he detaches, in one line."""

Stopping = Callable[[], str]
"""Returns what becomes of the work when the job is stopped now, in words for the question."""


class Leave(BaseException):
    """The user leaves; the job is left as it is. `exit_code` is 130 or 143.

    No Exception: a signal may come inside a library that takes every Exception for a failure of its own and tries
    again, as botocore does for a call under way.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Detach(Exception):
    """The user leaves, and the job is to go on by itself."""


class Interrupts:
    """What the user's signals mean; `wanted_end` is asked at every pass. Without `asks`, any of them leaves now.

    Detach is only raised with `detaches`: where the command has something that could go on without it. It returns what
    is to be known before the question, None for nothing. `stopping` returns what becomes of the work then.
    """

    def __init__(
        self,
        onlooker: Onlooker,
        *,
        asks: bool = True,
        detaches: Detaching | None = None,
        stopping: Stopping = lambda: SAVES,
    ) -> None:
        self._onlooker = onlooker
        self._asks = asks
        self._detaches = detaches
        self._stopping, self._stop = stopping, ""
        self._pressed = 0
        self._asked_at: float | None = None
        self._left: Leave | None = None
        self._end: ExitReason | None = None
        self._keys = _Keys()
        self._is_over = False

    def wanted_end(self) -> ExitReason | None:
        """Return why the user wants the job to end, None if not. Raises Leave or Detach."""
        if self._left is not None:
            raise self._left  # it was raised where Python lets nothing through: in a finalizer, in a callback
        if self._pressed and self._asked_at is None and self._end is None:
            self._ask()
        if self._asked_at is not None:
            self._hear(self._asked_at)
        return self._end

    def press(self, number: int, frame: FrameType | None) -> None:
        """Take a signal: the first Ctrl-C on a terminal is a question, any other leaves now."""
        del frame
        if self._is_over:  # there is nothing left to leave
            return
        if number != signal.SIGINT or self._pressed or self._end is not None or not self._can_ask():
            self._left = Leave(128 + number)
            raise self._left
        self._pressed += 1

    def close(self, *, failed: bool = False) -> None:
        """Take back a question that nobody answered: the job has come to its end, or to an error, meanwhile."""
        if self._asked_at is None:
            self._keys.end()
            return
        self._asked_at = None
        tell("")
        if self._left is None:
            tell("it stopped before an answer, for this:" if failed else "done before an answer: nothing is to choose")
            self._is_over = True
            self._keys.outlast()
        self._keys.end()
        self._onlooker.go_on()

    def _can_ask(self) -> bool:
        return self._asks and sys.stdin.isatty() and sys.stderr.isatty()

    def _ask(self) -> None:
        self._onlooker.pause()
        if self._detaches is not None and (line := self._detaches()) is not None:
            tell(line)
        self._stop = _STOP.format(stopping=self._stopping())
        self._asked_at = time.monotonic()
        self._keys.begin()
        self._prompt()

    def _prompt(self) -> None:
        with contextlib.suppress(OSError):
            last = _CONTINUE if self._keys.one_by_one else _CONTINUE_BY_LINE
            sys.stderr.write(self._stop + (_DETACH if self._detaches is not None else "") + last)
            sys.stderr.flush()

    def _hear(self, since: float) -> None:
        """Take the answer if it is there: the job is seen to meanwhile, and a question does not stand for ever."""
        word = _typed()
        if word is None and time.monotonic() - since < _ANSWER_WITHIN_S:
            return
        answer = self._meant(word) if word else ""
        if self._keys.one_by_one and word:
            tell(word[0])  # nothing else shows what was typed
        if answer is None:
            self._prompt()
            return
        if not word:
            tell("")
            if word is None:
                tell("no answer: the job goes on")
        self._keys.end()
        self._pressed, self._asked_at = 0, None
        self._onlooker.go_on()
        if answer == "d":
            raise Detach
        if answer == "s":
            self._end = ExitReason.STOPPED

    def _meant(self, typed: str) -> str | None:
        """Return the first answer in what was typed, None for none."""
        answers = ("s", "c", *(("d",) if self._detaches is not None else ()))
        return next((line.strip()[0] for line in typed.splitlines() if line.strip().startswith(answers)), None)


class _Keys:
    """Has a terminal give each key as it is typed, and not show it; what can give lines only stays as it is."""

    def __init__(self) -> None:
        self._before: list[Any] | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether a key is read without Enter."""
        return self._before is not None

    def begin(self) -> None:
        """Forget what was typed before the question; Ctrl-C stays the signal that it is."""
        with contextlib.suppress(OSError, ValueError, termios.error):
            terminal = sys.stdin.fileno()
            if self._before is not None or os.tcgetpgrp(terminal) != os.getpgrp():
                return  # in the background, whoever changes the terminal is stopped
            before = termios.tcgetattr(terminal)
            changed = [*before[:3], before[3] & ~(termios.ICANON | termios.ECHO), *before[4:6], [*before[6]]]
            changed[6][termios.VMIN], changed[6][termios.VTIME] = 1, 0
            termios.tcsetattr(terminal, termios.TCSAFLUSH, changed)
            self._before = before

    def outlast(self) -> None:
        """Take for a moment what is typed in answer to a question that was withdrawn just now: the shell gets none."""
        until = time.monotonic() + _WITHDRAWN_FOR_S
        with contextlib.suppress(OSError, ValueError):
            while self.one_by_one and (left := until - time.monotonic()) > 0:
                if select.select([sys.stdin], [], [], left)[0] and not os.read(sys.stdin.fileno(), 1024):
                    return

    def end(self) -> None:
        """Put the terminal back as it was; what was typed and not read goes to no other program."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, ValueError, termios.error):
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSAFLUSH, before)


@contextmanager
def obeyed(
    onlooker: Onlooker, *, asks: bool = True, detaches: Detaching | None = None, stopping: Stopping = lambda: SAVES
) -> Iterator[Interrupts]:
    """Have signals mean what `Interrupts` says while the block runs."""
    interrupts = Interrupts(onlooker, asks=asks, detaches=detaches, stopping=stopping)
    before = {number: signal.signal(number, interrupts.press) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupts
    except BaseException:
        interrupts.close(failed=True)
        raise
    finally:
        interrupts.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _typed() -> str | None:
    """Return what was typed, None before there is something; what is no terminal any more says nothing."""
    try:
        if not select.select([sys.stdin], [], [], 0)[0]:
            return None
        return os.read(sys.stdin.fileno(), 1024).decode(errors="replace").strip(_BLANK).lower()
    except (OSError, ValueError):
        return ""
