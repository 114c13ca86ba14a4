"""Secrets that a script prints, taken out of what is kept and shown."""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from urllib.parse import quote, quote_plus

LEAST = 8
"""Characters: shorter values stand in too much that is no secret."""
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def words_of(secrets: Iterable[str]) -> tuple[bytes, ...]:
    """Return what gives the secrets away, the longest first: each value, each line of one that has several, and both as
    JSON, URLs, shells, base64 and hex write them; values under `LEAST` characters are left out."""
    found = {word.strip() for secret in secrets for word in (secret, *secret.splitlines())}
    written = {form for word in found if len(word) >= LEAST for form in (word.encode(), *_forms(word))}
    return tuple(sorted((w for w in written if len(w) >= LEAST), key=lambda word: (-len(word), word)))


def _forms(word: str) -> Iterator[bytes]:
    """Give the word as other programs write it down."""
    for text in (
        json.dumps(word)[1:-1],
        json.dumps(word, ensure_ascii=False)[1:-1],
        repr(word)[1:-1],
        quote(word, safe=""),
        quote(word),
        quote_plus(word),
        shlex.quote(word),
        shlex.quote(word)[1:-1],
        re.sub(r"([^\w@%+=:,./-])", r"\\\1", word),  # bash's printf %q
    ):
        yield text.encode()
        yield re.sub(r"%[0-9A-F]{2}", lambda m: m[0].lower(), text).encode()
    data = word.encode()
    yield data.hex().encode()
    yield data.hex().upper().encode()
    yield from _base64(data)


def _base64(data: bytes) -> Iterator[bytes]:
    """Give the data as base64 has it, alone, in lines, and in the middle of something longer, as in `user:password`."""
    for written in (
        base64.b64encode(data),
        *base64.encodebytes(data).splitlines(),
        *map(partial(_inner, data), range(3)),
    ):
        yield written
        yield written.translate(_URL_SAFE)


def _inner(data: bytes, before: int) -> bytes:
    """Return the part of the base64 of `data` behind so many bytes that is the same whatever stands around it."""
    whole = base64.b64encode(bytes(before) + data).rstrip(b"=")
    return whole[(0, 2, 3)[before] : len(whole) - ((before + len(data)) % 3 != 0)]


def masked(data: bytes, words: tuple[bytes, ...]) -> bytes:
    """Return the data with stars for every word; its length stays, so that offsets in a file hold."""
    for word in words:
        if word in data:
            data = data.replace(word, b"*" * len(word))
    return data
