"""What `logs` writes before the output of each attempt, and which lines of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpucloud.cli import asking
from gpucloud.usecases.attemptrecords import LogPart
from tests.unit.worlds import opened, state

STATE = state(attempts=(opened("a", "b", number=1, first_step=1), opened("a", number=2)))


def part(attempt: int) -> LogPart:
    return LogPart(attempt=attempt, rank=0, offset=0, key=f"{attempt}")


class Stored:
    def stored_state(self) -> Any:
        return STATE


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(asking, "tell", lines.append)
    return lines


class Writer:
    """Notes what is written, and that a line was left when another attempt began."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, part: LogPart, data: bytes) -> None:
        self.lines.append(data.decode())

    def end(self) -> None:
        if self.lines:
            self.lines.append("(ended)")


def shown_to(lines: list[str], tail: int | None) -> asking._Shown:
    return asking._Shown(asker=Stored(), writer=Writer(lines), as_json=False, tail=tail)  # type: ignore[arg-type]


def test_each_attempts_output_has_a_line_before_it(written: list[str]) -> None:
    shown = shown_to(written, None)
    for number, data in ((1, b"one\n"), (1, b"two\n"), (2, b"three\n")):
        shown.take(part(number), data)
    assert written == [
        "── attempt 1, 2 nodes, from step 1 ──",
        "one\n",
        "two\n",
        "(ended)",
        "── attempt 2, 1 node ──",
        "three\n",
    ]


def test_a_tail_is_of_what_was_there_and_all_that_follows_comes(written: list[str]) -> None:
    shown = shown_to(written, 2)
    shown.take(part(1), b"one\ntwo\n 1%\r99%\rthree\n")
    assert written == []
    shown.caught_up()
    shown.take(part(1), b"four\nfive\nsix\n")
    assert written == ["── attempt 1, 2 nodes, from step 1 ──", "two\n", " 1%\r99%\rthree\n", "four\nfive\nsix\n"]
