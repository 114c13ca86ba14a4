"""A user's own text as it stands in a message: on one line, printable, not too long."""

from __future__ import annotations


def quoted(text: str) -> str:
    """Return the text in quotes, on one line, shortened when it is long."""
    return f'"{brief(text)}"'


def brief(text: str, most: int = 40) -> str:
    """Return the text on one line, shortened when it is long."""
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else "�" for c in shown)
