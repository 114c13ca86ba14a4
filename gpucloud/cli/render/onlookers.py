"""Who looks on while a job is supervised: plain lines for logs and CI, a live display for a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Protocol

from gpucloud.cli.render.bills import money_line
from gpucloud.cli.render.output import MOVING_EVERY_S, FirstRank, Paced
from gpucloud.cli.render.progress import Snapshot, snapshot
from gpucloud.cli.render.words import silence, tell
from gpucloud.domain.job.quantities import format_span
from gpucloud.domain.node.output import without_code_folder
from gpucloud.domain.node.status import UNTOLD

if TYPE_CHECKING:
    from gpucloud.domain.money.ledger import Spend
    from gpucloud.domain.supervision.action import Action
    from gpucloud.domain.supervision.seen import Seen
    from gpucloud.usecases.jobstore.report import JobReport

_PLAIN_EVERY_S = 5.0


class Onlooker(Protocol):
    """A watcher that can be paused while the user is asked something."""

    def __enter__(self) -> Onlooker:
        """Begin to show."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        ...

    def pause(self) -> None:
        """Leave the terminal alone."""
        ...

    def go_on(self) -> None:
        """Show again."""
        ...

    def story(self, line: str) -> None:
        """Something happened."""
        ...

    def tick(self, seen: Seen, action: Action, spend: Spend) -> None:
        """One pass was made."""
        ...

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        ...


class Display(Protocol):
    """Shows a job's report anew at each look."""

    def __enter__(self) -> Display:
        """Begin to show."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop showing."""
        ...

    def show(self, report: JobReport) -> None:
        """Show how it stands now."""
        ...


def display() -> Display:
    """Return the live table of `watch`."""
    from gpucloud.cli.render.live import LiveUse

    return LiveUse()


def onlooker() -> Onlooker:
    """Return the live display on a terminal, plain lines elsewhere."""
    if sys.stderr.isatty():
        from gpucloud.cli.render.live import LiveOnlooker

        return Unshaken(LiveOnlooker())
    return Unshaken(PlainOnlooker())


class Unshaken:
    """Tells an onlooker for as long as it can be told: a terminal that was closed is no reason to leave a job."""

    def __init__(self, told: Onlooker) -> None:
        self._told = told

    def __enter__(self) -> Unshaken:
        """Begin to show."""
        self._tell(self._told.__enter__)
        return self

    def __exit__(self, *why: object) -> None:
        """Stop showing."""
        self._tell(lambda: self._told.__exit__(*why))

    def pause(self) -> None:
        """Leave the terminal alone."""
        self._tell(self._told.pause)

    def go_on(self) -> None:
        """Show again."""
        self._tell(self._told.go_on)

    def story(self, line: str) -> None:
        """Something happened."""
        self._tell(lambda: self._told.story(line))

    def tick(self, seen: Seen, action: Action, spend: Spend) -> None:
        """One pass was made."""
        self._tell(lambda: self._told.tick(seen, action, spend))

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        self._tell(lambda: self._told.output(attempt, rank, text))

    @staticmethod
    def _tell(say: Callable[[], object]) -> None:
        try:
            say()
        except OSError:  # EIO of a terminal that is gone, EPIPE of a reader
            silence()


class PlainOnlooker:
    """One line an event, and one line of progress now and then."""

    def __init__(self) -> None:
        self._said: Snapshot | None = None
        self._at = 0.0
        self._output = FirstRank()
        self._moving = Paced(every_s=MOVING_EVERY_S)

    def __enter__(self) -> PlainOnlooker:
        """Nothing to set up."""
        return self

    def __exit__(self, *_: object) -> None:
        """Write what the script left unfinished."""
        self._write(self._output.end())

    def pause(self) -> None:
        """Nothing to hide."""

    def go_on(self) -> None:
        """Nothing to show again."""

    def story(self, line: str) -> None:
        """Write the line with the time."""
        tell(f"{datetime.now(timezone.utc):%H:%M:%S} {line}")

    def tick(self, seen: Seen, action: Action, spend: Spend) -> None:
        """Write a line of progress when there is some, not more often than every few seconds."""
        self._write_moving()
        now = snapshot(seen, action, spend)
        if now.step is None or now == self._said or time.monotonic() - self._at < _PLAIN_EVERY_S:
            return
        self._said, self._at = now, time.monotonic()
        self.story(line_of(now))

    def output(self, attempt: int, rank: int, text: str) -> None:
        """Write rank 0's lines, and what moves in them now and then; the others' are kept for `gpucloud logs`."""
        if rank == 0:
            self._write(self._moving.untold(self._output.feed(attempt, text)))
            self._write_moving()

    def _write(self, text: str) -> None:
        if text:
            tell("\n".join(f"  | {line}" for line in without_code_folder(text).splitlines()))

    def _write_moving(self) -> None:
        self._write("\n".join(self._moving.due(self._output.moving)))


def line_of(now: Snapshot) -> str:
    """Return progress in one line."""
    parts = [f"{now.phase}: step {now.step}" + (f" of {now.total_steps}" if now.total_steps else "")]
    if now.phase == UNTOLD:
        saved = f"step {now.committed_step} is saved" if now.committed_step else "nothing saved yet"
        parts = [f"{now.phase}: {saved}"]
    if now.loss is not None:
        parts.append(f"loss {now.loss:.4f}")
    if now.gpus:
        parts.append(now.gpus)
    if now.time_left is not None:
        parts.append(f"{format_span(now.time_left)} to go")
    return f"{', '.join(parts)}, spent {money_line(now.spend)}"
