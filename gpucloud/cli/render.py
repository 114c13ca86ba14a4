"""How answers, the story and errors are written, and the small words that all answers share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, JobFileError
from gpucloud.domain.offer import Pool
from gpucloud.domain.shown import in_one_line, lines_of, set_off
from gpucloud.domain.state import Quarantine

VERSION = 1
_COMMAND = re.compile(r"(##|##vso)\[")


def say(text: str) -> None:
    """Write an answer."""
    sys.stdout.write("\n".join(lines_of(text)) + "\n")
    sys.stdout.flush()


def say_json(answer: dict[str, Any], *, is_one_of_many: bool = False) -> None:
    """Write an answer as one JSON object: for people on a terminal over many lines, for programs on one.

    One of many is always on one line. What would be a command to a CI runner is escaped, and reads the same.
    """
    indent = 2 if sys.stdout.isatty() and not is_one_of_many else None
    say(_COMMAND.sub(r"\1\\u005b", json.dumps({"version": VERSION, **answer}, indent=indent)))


def tell(text: str) -> None:
    """Write a piece of the story, all but its first line set off, for words of others may be in it.

    Where nobody can read it any more (a closed terminal), go on without.
    """
    try:
        sys.stderr.write(set_off(text) + "\n")
        sys.stderr.flush()
    except OSError:
        silence()


def silence() -> None:
    """Have the story go nowhere from now on: its terminal or pipe is gone, and what waits in a buffer must not fail."""
    with contextlib.suppress(OSError, ValueError):
        if sys.__stderr__ is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())


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


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns, two spaces apart."""
    lines = [[in_one_line(cell) for cell in row] for row in rows]
    columns = [_padded(column) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def usd(amount: Decimal) -> str:
    """Return money as JSON has it: a decimal string, eight places at the most, no exponent."""
    text = format(amount, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def pool_json(pool: Pool) -> dict[str, str]:
    """Return a pool's three words."""
    return {"instance_type": pool.instance_type, "zone": pool.zone, "market": pool.market.value}


def quarantine_json(one: Quarantine) -> dict[str, Any]:
    """Return a bad node as an object."""
    return {"node": one.node_id, "why": one.why, "at": codec.plain(one.at)}


def _padded(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) for cell in column]
