"""How a command that a step runs on the node says how it ended: its exit code, and a last line that names why."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.codec import Malformed, from_json

REFUSED = 102
"""The exit code of a command that knows why the node will not do: no repetition mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command said: `said` for the user, a hint if there is one, what it did and the seconds that took."""

    said: str
    hint: str = ""
    steps: tuple[tuple[str, float], ...] = ()


def parse_answer(stdout: bytes) -> Answer | None:
    """Return the answer in the last line; None when there is none."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(Answer, lines[-1]) if lines else None
    except Malformed:
        return None
