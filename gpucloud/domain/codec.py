"""Frozen dataclasses as JSON text and back, strictly: anything but what `to_json` wrote is `Malformed`."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from enum import Enum, EnumMeta
from functools import cache, lru_cache, partial
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_AS_IT_IS = frozenset({str, int, bool, NoneType})
_REPEATED = 1024
"""How many values are kept that were read last: what is large is so by repeating itself."""


class Malformed(ValueError):
    """The text is not the value that was expected; the message names the path."""


def to_json(value: object) -> str:
    """Return one line of JSON. Times must be aware.

    Bytes become base64, spans whole microseconds, a float that is not finite "nan" or "inf"."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def from_json(kind: type[T], text: str | bytes) -> T:
    """Return the value that `text` holds. Raises Malformed."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{kind.__name__}: {error}") from error
    read = _reader(kind)  # type: ignore[arg-type]  # mypy takes a TypeVar's class for one without a hash
    try:
        value: T = read(data)
    except _Unfit as unfit:
        raise Malformed(f"{kind.__name__}{unfit.path}: {unfit.what}") from unfit
    return value


def plain(value: object) -> Any:
    """Return the value as what `json` writes: dictionaries, lists, strings, numbers."""
    kind: Any = type(value)
    return value if kind in _AS_IT_IS else _writer(kind)(value)


@cache
def _writer(kind: Any) -> Callable[[Any], Any]:
    """Return what turns a value of that class into plain ones. Kept, for a class never changes: states are large."""
    if is_dataclass(kind):
        names = tuple(field.name for field in fields(kind))
        return lambda value: {name: plain(getattr(value, name)) for name in names}
    return next((write for base, write in _WRITE.items() if issubclass(kind, base)), lambda value: value)


class _Unfit(Exception):
    """A part of the value is not what was expected; `path` grows on the way out, where nobody waits for it."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.path = ""


@cache
def _reader(kind: Any) -> Callable[[object], Any]:
    """Return what reads that kind out of plain values. Kept, for a class never changes: states are large."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        only = _reader(_without_none(kind))
        return lambda data: None if data is None else only(data)
    if origin is tuple:
        return partial(_tuple, get_args(kind))
    if is_dataclass(kind):
        return _words_reader(kind) if _is_of_words(kind) else partial(_record, kind)
    if issubclass(kind, Enum):
        return partial(_member, kind, {member.value: member for member in kind})
    return _READ.get(kind) or partial(_same, kind)


def _without_none(kind: Any) -> Any:
    (only,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return only


def _tuple(arguments: tuple[Any, ...], data: object) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _Unfit(f"expected a list, found {_shown(data)}")
    alike = arguments[-1] is Ellipsis
    readers = [_reader(arguments[0])] * len(data) if alike else [_reader(kind) for kind in arguments]
    if len(readers) != len(data):
        raise _Unfit(f"expected {len(readers)} items, found {len(data)}")
    values: list[Any] = []
    try:
        for read, item in zip(readers, data, strict=True):
            values.append(read(item))
    except _Unfit as unfit:
        unfit.path = f"[{len(values)}]{unfit.path}"
        raise
    return tuple(values)


def _words_reader(kind: Any) -> Callable[[object], Any]:
    """Return what reads a record of words alone, once for all that are equal: many charges name a few pools."""
    once = lru_cache(_REPEATED)(lambda items: _record(kind, dict(items)))

    def read(data: Any) -> Any:
        try:
            return once(tuple(data.items()))
        except (AttributeError, TypeError):  # no object, or one that holds more than words
            return _record(kind, data)

    return read


def _is_of_words(kind: Any) -> bool:
    return all(hint is str or isinstance(hint, EnumMeta) for hint in _hints(kind).values())


def _record(kind: Any, data: object) -> Any:
    if not isinstance(data, dict):
        raise _Unfit(f"expected an object, found {_shown(data)}")
    values, name = {}, ""
    readers, needed = _fields(kind)
    try:
        for name, plain_kind, read in readers:
            if name in data:
                item = data[name]
                values[name] = item if type(item) is plain_kind else read(item)
    except _Unfit as unfit:
        unfit.path = f".{name}{unfit.path}"
        raise
    if len(values) < len(readers) and (missing := [name for name in needed if name not in values]):
        raise _Unfit(f"{', '.join(missing)} missing")
    return kind(**values)


@cache
def _fields(kind: Any) -> tuple[tuple[tuple[str, Any, Callable[[object], Any]], ...], tuple[str, ...]]:
    """Return for each field which plain values stay as they are and what reads others, and which must be there.

    Made when first read: a class may hold itself.
    """
    hints = _hints(kind)
    needed = tuple(field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    readers = tuple((name, _plain_kind(hints[name]), _reader(hints[name])) for name in (f.name for f in fields(kind)))
    return readers, needed


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain_kind(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return NoneType
    return kind if kind in _AS_IT_IS else None


def _same(kind: type, data: object) -> Any:
    if type(data) is not kind:  # `type`, because a bool is an int to isinstance
        raise _Unfit(f"expected {kind.__name__}, found {_shown(data)}")
    return data


def _member(kind: Any, members: dict[object, Any], data: object) -> Any:
    try:
        return members[data]
    except (KeyError, TypeError):
        raise _Unfit(f"{_shown(data)} is not a valid {kind.__name__}") from None


def _time(data: object) -> datetime:
    if not isinstance(data, str):
        raise _Unfit(f"expected a time, found {_shown(data)}")
    try:
        time = _parsed_time(data)
    except ValueError as error:
        raise _Unfit(str(error)) from error
    if time.tzinfo is None:
        raise _Unfit(f"a time without its zone: {data}")
    return time


_parsed_time = lru_cache(_REPEATED)(datetime.fromisoformat)  # charges of one machine begin and end together


def _span(data: object) -> timedelta:
    if type(data) is not int:
        raise _Unfit(f"expected microseconds, found {_shown(data)}")
    return timedelta(microseconds=data)


def _path(data: object) -> Path:
    if not isinstance(data, str):
        raise _Unfit(f"expected a path, found {_shown(data)}")
    return Path(data)


def _float(data: object) -> float:
    if type(data) in (int, float) or data in ("nan", "inf", "-inf"):
        return float(data)  # type: ignore[arg-type]
    raise _Unfit(f"expected a number, found {_shown(data)}")


def _decimal(data: object) -> Decimal:
    try:
        return Decimal(data) if isinstance(data, str) else Decimal(_float(data))
    except InvalidOperation as error:
        raise _Unfit(f"expected a sum, found {_shown(data)}") from error


def _bytes(data: object) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "?", validate=True)
    except binascii.Error as error:
        raise _Unfit(f"expected base64, found {_shown(data)}") from error


def _shown(data: object) -> str:
    return repr(data)[:60]


_READ: dict[Any, Callable[[object], Any]] = {
    datetime: _time,
    timedelta: _span,
    Path: _path,
    float: _float,
    Decimal: _decimal,
    bytes: _bytes,
}
_WRITE: dict[type, Callable[[Any], Any]] = {
    Enum: lambda value: value.value,
    datetime: datetime.isoformat,
    timedelta: lambda value: value // timedelta(microseconds=1),
    PurePath: str,
    Decimal: lambda value: format(value, "f"),
    bytes: lambda value: base64.b64encode(value).decode(),
    float: lambda value: value if math.isfinite(value) else str(value),
    tuple: lambda value: [plain(item) for item in value],
}
