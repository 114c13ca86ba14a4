"""How answers, the story and errors are written, and the small words that all answers share."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from gpucloud.domain import codec
from gpucloud.domain.errors import GpucloudError, JobFileError
from gpucloud.domain.offer import Pool
from gpucloud.domain.state import Quarantine

VERSION = 1


def say(text: str) -> None:
    """Write an answer."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say_json(answer: dict[str, Any]) -> None:
    """Write an answer as one JSON object: for people on a terminal over many lines, for programs on one."""
    say(json.dumps({"version": VERSION, **answer}, indent=2 if sys.stdout.isatty() else None))


def tell(text: str) -> None:
    """Write a piece of the story."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def error_text(error: GpucloudError) -> str:
    """Return an error as people read it: what is wrong, then the hint."""
    lines = [f"error: {error.message}" if not isinstance(error, JobFileError) else error.message]
    return "\n".join([*lines, f"hint: {error.hint}"] if error.hint else lines)


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
    columns = [_padded(column) for column in zip(*rows, strict=True)]
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
