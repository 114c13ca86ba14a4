"""Judged calls, kept: what whole runs asked of IAM, each kind of call once: policies are then judged without a run."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.iam.judge import Need

if TYPE_CHECKING:
    from tests.lab.aws.permissions import Judged

FILE = Path(__file__).parent / "recorded.json.gz"
_ALIKE = (
    (r"AROA[A-Z0-9]+", "AROAX"),
    (r"(?<![0-9a-f])(?!123456789012)[0-9a-f]{8,}", "0"),
    (r"(?<!\d)\d{2,6}(?!\d)", "0"),
)


def kept(by: str, judged: Iterable[Judged]) -> list[list[Any]]:
    """Return the calls as JSON, each kind once: ids and numbers tell no two apart."""
    lines = {alike(json.dumps([by, alike(one.call), [_written(need) for need in one.needs]])) for one in judged}
    return [json.loads(line) for line in sorted(lines)]


def write(rows: Iterable[list[Any]]) -> None:
    """Keep the rows, each once."""
    lines = sorted({json.dumps(row) for row in rows})
    text = json.dumps([json.loads(line) for line in lines], separators=(",", ":"))
    FILE.write_bytes(gzip.compress(text.encode(), mtime=0))


def read() -> list[tuple[str, str, tuple[Need, ...]]]:
    """Return who called, what, and what it needed."""
    return parsed(json.loads(gzip.decompress(FILE.read_bytes())))


def parsed(rows: Iterable[list[Any]]) -> list[tuple[str, str, tuple[Need, ...]]]:
    """Return the rows as `read` does, those that were never written too."""
    return [
        (by, call, tuple(Need(action=a, arn=r, kind=k, context=_read(c)) for a, r, k, c in all_))
        for by, call, all_ in rows
    ]


def alike(text: str) -> str:
    """Return the text as recorded: without what differs from run to run."""
    for pattern, instead in _ALIKE:
        text = re.sub(pattern, instead, text)
    return text


def _written(need: Need) -> list[Any]:
    return [need.action, need.arn, need.kind, dict(need.context)]


def _read(context: dict[str, Any]) -> dict[str, str | tuple[str, ...]]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in context.items()}
