"""How far a script was when it wrote a file by `torch.save`: read from the pickle's opcodes, nothing is unpickled."""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from gpucloud.domain.checkpoint.layouts import COUNTER_HOLDERS, COUNTERS, TORCH_FILES, Counters
from gpucloud.domain.untrusted import COUNTED

_MOST_FILES = 8
_MOST_BYTES = 16 << 20  # of a pickle, which names its tensors and holds none
_MOST_OPCODES = 1_000_000
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # torch stores; what others raise has no name in common
_DAMAGE = (
    *(StopIteration, OSError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, ValueError, LookupError),
    *(OverflowError, MemoryError, RuntimeError),  # the last one for what is encrypted
)
_MARK = object()


def counters_of(folder: Path, paths: Iterable[str]) -> dict[str, Counters]:
    """Return what each of the files tells that tells something."""
    torch_files = [path for path in paths if path.endswith(TORCH_FILES)][:_MOST_FILES]
    return {path: found for path in torch_files if (found := counters_in(folder / path))}


def counters_in(path: Path) -> Counters:
    """Return the counters among the keys of the dict that was saved; none for any other file, damaged or hostile ones.

    Where it has none, they are those of the one dict in it that is named as the training's state and has some.
    `torch.save` of PyTorch 1.6 and later writes a zip with the pickle in `<name>/data.pkl`.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1)
            if archive.getinfo(name).compress_type not in _COMPRESSIONS:
                return {}
            with archive.open(name) as file:
                data = file.read(_MOST_BYTES + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in what never was a text
            return _counters(data) if len(data) <= _MOST_BYTES else {}
    except _DAMAGE:
        return {}


def _counters(data: bytes) -> Counters:
    """Follow the opcodes with a stack on which nothing is anything but a counter, a text, or a dict of such."""
    stack: list[object] = []
    memo: dict[object, object] = {}
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if number >= _MOST_OPCODES:
            return {}
        match opcode.name:
            case "STOP":
                return _told(stack[-1])
            case "MARK":
                stack.append(_MARK)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _put(stack[-1], [key, value])
            case "SETITEMS":
                items = _above_mark(stack)
                _put(stack[-1], items)
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case _:
                _replace(stack, opcode, argument)
    return {}


def _told(saved: object) -> Counters:
    """Return its counters; what more than one dict in it says belongs to nobody knows whom."""
    if not isinstance(saved, dict):
        return {}
    own = {key: value for key, value in saved.items() if type(value) is int}
    below = [value for value in saved.values() if isinstance(value, dict)]
    found = [there for one in below if (there := {key: n for key, n in one.items() if type(n) is int})]
    return own or (found[0] if len(found) == 1 else {})


def _put(target: object, items: list[object]) -> None:
    if not isinstance(target, dict):
        return
    for key, value in zip(items[::2], items[1::2], strict=False):
        if not isinstance(key, str):
            continue
        # A bool is none, nor what no script ever counts to.
        is_count = key in COUNTERS and type(value) is int and 0 <= value < COUNTED
        if is_count or (key in COUNTER_HOLDERS and isinstance(value, dict)):
            target[key] = value


def _above_mark(stack: list[object]) -> list[object]:
    items: list[object] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _replace(stack: list[object], opcode: pickletools.OpcodeInfo, argument: object) -> None:
    """Do to the stack what the opcode's description says of it; what it would make is of no interest."""
    below = opcode.stack_before
    if pickletools.markobject in below:
        _above_mark(stack)
        below = below[: below.index(pickletools.markobject)]
    for _ in below:
        stack.pop()
    made = argument if isinstance(argument, int | str) else None
    stack.extend(made for _ in opcode.stack_after)
