"""Text of others, made fit to be shown: no terminal control, one line where one is meant, secrets masked.

What runs on a machine chooses its output, its names and its errors. A terminal obeys some of what it is given: it puts
text into the clipboard, tells what was typed, or shows other words than a file has.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from urllib.parse import quote, quote_plus

_COLOUR = r"\x1b\[[0-9;:]*m"
_OBEYED = (
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # title, clipboard, links
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c\n]*(?:\x1b\\|\x9c)?"  # strings for the terminal itself
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor, screen, modes, questions
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"  # right to left; lines that are none
    r"|[\ud800-\udfff]"
)
_ANY = re.compile(_OBEYED)
_ANY_BUT_COLOURS = re.compile(f"({_COLOUR})|{_OBEYED}")


_LINE_ENDS = re.compile(r"\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
"""What any reader takes for the end of a line: a terminal, a CI runner (a lone CR), an editor."""

_COMMANDS = re.compile(r"^(\s*)(?=::)|(?<=##)(?=\[|vso\[)")
"""GitHub's commands to its runner begin with `::`, white space before it or not; older ones and Azure's with `##[` and
`##vso[`, wherever in a line they stand."""


def lines_of(text: str) -> list[str]:
    """Return the text's lines: nothing in them is obeyed, and none is a command to a CI runner.

    Such a command hides words, or has the runner listen no longer.
    """
    if text.isascii() and text.isprintable() and "::" not in text and "##" not in text:
        return [text]
    return [_COMMANDS.sub(_spoilt, plain(line)) for line in _LINE_ENDS.split(text)]


def set_off(text: str) -> str:
    """Return the text with every line but the first set off, so that none of others' begins where ours do."""
    first, *rest = lines_of(text)
    return "\n".join([first, *(line if line[:1] in ("", " ", "\t") else f"  {line}" for line in rest)])


def in_one_line(text: str) -> str:
    """Return the text with its lines one after the other in one."""
    return " ".join(line for line in lines_of(text) if line)


def _spoilt(command: re.Match[str]) -> str:
    return f"{command[1]}| " if command[1] is not None else " "


def plain(text: str) -> str:
    """Return the text without anything that a terminal obeys; lines and tabs stay."""
    return text if text.isascii() and text.isprintable() else _ANY.sub("", text)


def coloured(text: str) -> str:
    """Return output for a terminal: its colours stay, and end with it; a line that is written over is one more."""
    lines = re.sub(r"\r+\n", "\n", text).replace("\r", "\n")
    kept = _ANY_BUT_COLOURS.sub(lambda found: found[1] or "", lines)
    return f"{kept}\x1b[0m" if "\x1b[" in kept else kept


# A user's own text as it stands in a message: on one line, printable, not too long.


def quoted(text: str) -> str:
    """Return the text in quotes, on one line, shortened when it is long."""
    return f'"{brief(text)}"'


def brief(text: str, most: int = 40) -> str:
    """Return the text on one line, shortened when it is long."""
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else "�" for c in shown)


# Secrets that a script prints, taken out of what is kept and shown.


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
