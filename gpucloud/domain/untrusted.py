"""What comes from nodes, scripts and other people: bounded when read, judged when it arrives, cleaned when shown."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from urllib.parse import quote, quote_plus

from gpucloud.domain.errors import LandingRefused

# How much is read at once of what machines say, and of what they or their jobs put into the store.
#
# Whoever runs code there chooses what is said: without a limit, it could fill this machine's memory.


ANSWER_BYTES = 32 << 20
"""Of one command on a machine, output and errors together; copies ask for half of it."""

STATUS_BYTES = 1 << 20
"""Of a machine's status, and of how a part of an attempt was launched: a few KiB where all is well."""

EVENT_BYTES = 256 << 10
"""Of something that happened to a job; that ten thousand machines came has 220 KiB."""

RECORD_BYTES = 16 << 20
"""Of a record in the store: a state, an order, a manifest, a page of bills. Python takes thirty times as much to read
JSON that was made for it; the state of a thousand machines has 1 MiB, the manifest of 10 TiB has 4."""

NOTES_BYTES = 32 << 20
"""Of what is noted beside the bytes of a job's outputs: some 200,000 files."""

LOG_BYTES = 15 << 20
"""Of a piece of a script's output; pieces are written of 1 MiB, larger ones after a failure of the store alone."""

LOG_TIMES_BYTES = 1 << 20
"""Of the line before a piece that says when it was written."""

KEPT_OUTPUT_BYTES = 1 << 30
"""Of the output of all ranks of an attempt on a machine: what that keeps of it on its disk, and a little more, and so
what can be read of it at the attempt's end."""

OBJECT_BYTES = 256 << 20
"""Of an object that is read whole, and is never JSON; larger ones are read in pieces."""

LISTED_KEYS = 1_000_000
"""Of objects that are listed at once: a job of months has some ten thousands."""

HISTORY_BYTES = 16 << 20
"""Of a piece of a machine's use, unpacked; pieces are written of 1 MiB."""

DATA_SET_BYTES = 1 << 30
"""Of the list of a data set, unpacked: some five million files."""

DIGITS = 20
"""Of a whole number: one of 64 bits has no more."""

COUNTED = 10**15
"""Beyond all that a job counts: its steps, attempts, generations, leases and writes."""

MOST_RANKS = 10**6
"""Of one attempt."""

EARLIEST_YEAR, LATEST_YEAR = 1970, 2500
"""Of a time; times are added to and subtracted from, and years end at 9999."""


def in_calendar(at: datetime) -> bool:
    """Whether sums with that time stay within the calendar."""
    return EARLIEST_YEAR <= at.year <= LATEST_YEAR


_MOST = (
    (r"jobs/[^/]+/outputs/files/.*", OBJECT_BYTES),
    (r"jobs/[^/]+/outputs/notes(?:/[^/]+)?\.json", NOTES_BYTES),
    (r"jobs/[^/]+/launches/(?:\d+/)?lock\.json", RECORD_BYTES),
    (r"jobs/[^/]+/events/.*", EVENT_BYTES),
    (r"jobs/[^/]+/(?:status|launches)/.*", STATUS_BYTES),
    (r"jobs/[^/]+/logs/.*", LOG_BYTES + LOG_TIMES_BYTES),
    (r"jobs/[^/]+/metrics/.*", HISTORY_BYTES),
    (r"(?:.*/)?gen/\d+(?:\.start)?\.json", STATUS_BYTES),
    (r"clusters/[^/]+/hosts/.*", STATUS_BYTES),
    (r".*\.(?:json|yaml)", RECORD_BYTES),
)
_KINDS = tuple((re.compile(pattern, re.DOTALL), most) for pattern, most in _MOST)


@lru_cache(1024)
def most_of(key: str) -> int:
    """Return how large an object of that key may be to be read whole, by what is kept there."""
    return next((most for kind, most in _KINDS if kind.fullmatch(key)), OBJECT_BYTES)


def unpacked(data: bytes, most: int) -> bytes:
    """Return what zlib or gzip packed. ValueError for anything else, and for more than `most` bytes."""
    packer = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        found = packer.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(found) > most:
        raise ValueError(f"it unpacks to more than {most} bytes")
    if not packer.eof:
        raise ValueError("it is cut off")
    return found


# What arrives from another machine, judged before a byte of it is written: names, links, sizes, what fits beside what.
#
# Every name comes from where the job's own code runs, and may have been made to lead elsewhere.


STAGING = ".gpucloud-landing-"
"""Folder names that begin so belong to the landing itself."""

_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much a tree may have of what costs memory, or what no file system takes."""

    entries: int = 500_000
    depth: int = 100
    name_bytes: int = 255
    path_bytes: int = 4000
    file_bytes: int = 1 << 53


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arriving:
    """A file on its way; `name` is its path below the folder that it arrives in."""

    name: str
    size: int
    mode: int = 0o644
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What arrives together. `links` are names with what they say; `folders` names with their modes."""

    files: tuple[Arriving, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    folders: tuple[tuple[str, int], ...] = ()

    def names(self) -> Iterator[str]:
        """Yield the name of everything."""
        yield from (name for name, _ in self.folders)
        yield from (file.name for file in self.files)
        yield from (name for name, _ in self.links)


def judge(tree: Tree, limits: Limits = LIMITS) -> None:
    """Raise LandingRefused for a tree that could lie outside of its folder, or not beside itself.

    A link must name something inside by its text alone, whatever lies there now or later: it goes up first, no farther
    than the top, and then down. What goes up after a name could turn elsewhere once that name is a link.
    """
    count = len(tree.files) + len(tree.links) + len(tree.folders)
    if count > limits.entries:
        raise LandingRefused(f"{count} files, links and folders are to come, and {limits.entries} may")
    for name in tree.names():
        _judge_name(name, limits)
    for file in tree.files:
        if not 0 <= file.size <= limits.file_bytes:
            raise _refused(file.name, "is said to have more bytes than a disk has, or less than none")
    for name, target in tree.links:
        if landing_of(name, target) is None:
            raise _refused(name, f"is a link to {shown(target)}, which leads out, or could")
        if len(os.fsencode(target)) > limits.path_bytes:
            raise _refused(name, "is a link whose text is too long")
    judge_together(tree)


def judge_together(tree: Tree, *, folded: bool = False) -> None:
    """Raise LandingRefused for names of which one would take another's place.

    `folded`: the disk takes names for the same that differ in case or in how their letters are composed.
    """
    alike = fold if folded else str
    taken = {alike(name): name for name, _ in tree.folders}
    if len(taken) < len(tree.folders):
        raise _refused(_twice([alike(name) for name, _ in tree.folders]), "comes twice")
    leaves: dict[str, str] = {}
    for name in (*(file.name for file in tree.files), *(name for name, _ in tree.links)):
        other = taken.get(alike(name), leaves.get(alike(name)))
        if other is not None:
            raise _refused(name, f"comes twice, here as {shown(other)}")
        leaves[alike(name)] = name
    for name in tree.names():
        above = parent_of(name)
        while above and taken.get(alike(above)) != above:
            if alike(above) in leaves:
                raise _refused(above, f"is no folder, and {shown(name)} is to lie in it")
            if alike(above) in taken:
                raise _refused(above, f"comes twice, here as {shown(taken[alike(above)])}")
            taken[alike(above)] = above
            above = parent_of(above)


def fitting(places: Mapping[str, str]) -> tuple[dict[str, Arriving], tuple[str, ...]]:
    """Return files, by their keys, for the places that files may have beside each other, and why the others may not.

    A bucket may have an object where another one would need a folder.
    """
    files: dict[str, Arriving] = {}
    refused: list[str] = []
    taken: set[str] = set()
    for key, name in sorted(places.items(), key=lambda one: one[1]):
        try:
            _judge_name(name, LIMITS)
            above, other = parent_of(name), ""
            while above and not other:
                above, other = parent_of(above), above if above in taken else ""
            if other:
                raise _refused(other, f"is no folder, and {shown(name)} is to lie in it")
        except LandingRefused as error:
            refused.append(error.message)
        else:
            taken.add(name)
            files[key] = Arriving(name=name, size=0)
    return files, tuple(refused)


def landing_of(name: str, target: str) -> list[str] | None:
    """Return the parts of the path below the top that a link names; None when it leads out, or could."""
    if not target or target.startswith("/") or "\0" in target:
        return None
    at, went_down = name.split("/")[:-1], False
    for part in target.split("/"):
        if part == "..":
            if went_down or not at:
                return None
            at.pop()
        elif part not in ("", "."):
            went_down = True
            at.append(part)
    return at


def fold(name: str) -> str:
    """Return what all names have in common that a disk may take for the same."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def parent_of(name: str) -> str:
    """Return the name of the folder that it lies in; empty at the top."""
    return name.rpartition("/")[0]


def shown(name: str) -> str:
    """Return a name as an error shows it: escaped, and not longer than a line or two."""
    text = ascii(name) if any(not char.isprintable() for char in name) else repr(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _judge_name(name: str, limits: Limits) -> None:
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise _refused(name, "is no name below the folder that it arrives in")
    if len(parts) > limits.depth:
        raise _refused(name, f"lies more than {limits.depth} folders deep")
    if any(fold(part).startswith(STAGING) for part in parts):
        raise _refused(name, "is a name of gpucloud's own")
    try:
        sizes = [len(os.fsencode(part)) for part in parts]
    except UnicodeEncodeError:
        raise _refused(name, "is no text that could be a name") from None
    if max(sizes) > limits.name_bytes or sum(sizes) + len(sizes) > limits.path_bytes:
        raise _refused(name, "is too long")


def _twice(names: list[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _refused(name: str, why: str) -> LandingRefused:
    return LandingRefused(f"{shown(name)} {why}")


# Text of others, made fit to be shown: no terminal control, one line where one is meant, secrets masked.
#
# What runs on a machine chooses its output, its names and its errors. A terminal obeys some of what it is given: it
# puts text into the clipboard, tells what was typed, or shows other words than a file has.


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
