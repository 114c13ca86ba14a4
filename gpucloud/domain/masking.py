"""Secrets that a script prints, taken out of what is kept and shown."""

from __future__ import annotations

from collections.abc import Iterable

LEAST = 8
"""Characters: shorter values stand in too much that is no secret."""


def words_of(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Return what gives the secrets away: each value, and each line of one that has several, the longest first."""
    found = {word.strip() for secret in secrets for word in (secret, *secret.splitlines())}
    return tuple(sorted((w.encode() for w in found if len(w) >= LEAST), key=lambda word: (-len(word), word)))


def masked(data: bytes, words: tuple[bytes, ...]) -> bytes:
    """Return the data with stars for every word; its length stays, so that offsets in a file hold."""
    for word in words:
        if word in data:
            data = data.replace(word, b"*" * len(word))
    return data
