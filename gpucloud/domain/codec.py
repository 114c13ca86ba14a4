"""Frozen dataclasses as JSON text and back, strictly: anything but what `to_json` wrote is `Malformed`.

What outlives a process is read by older and newer gpuclouds. A key that this one does not know is refused, for whoever
wrote it meant something by it, and the next write would drop it; a class with a `version` is refused by that first, in
one line that names both. Messages of a moment, which are never written again, are read with `of_any_version`.
"""

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

from gpucloud.domain.untrusted import DIGITS, EARLIEST_YEAR, LATEST_YEAR, in_calendar

T = TypeVar("T")
_AS_IT_IS = frozenset({str, int, bool, NoneType})
_BEFORE, _BEHIND, _LONG = 60, 200, 300  # digits before and behind a sum's point, and of its text
_REPEATED = 1024
"""How many values are kept that were read last: what is large is so by repeating itself."""
_TOO_LARGE = 10**DIGITS


class Malformed(ValueError):
    """The text is not the value that was expected; the message names the path."""


def to_json(value: object) -> str:
    """Return one line of JSON, which `from_json` reads as an equal value; ValueError for one that it would not read.

    Bytes become base64, spans whole microseconds, a float that is not finite "nan" or "inf".
    """
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


class Unknown(Enum):
    """What is done about a key that this gpucloud does not know."""

    REFUSED = "refused"
    IGNORED = "passed over"


class OtherVersion(Malformed):
    """Another gpucloud wrote the text, and means something else by it."""


def from_json(kind: type[T], text: str | bytes, *, of_any_version: bool = False) -> T:
    """Return the value that `text` holds. Raises Malformed, OtherVersion before anything else is looked at.

    With `of_any_version` keys that this gpucloud does not know are passed over.
    """
    try:
        data = json.loads(text, parse_int=_int)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{kind.__name__}: {error}") from error
    _require_version(kind, data)
    unknown = Unknown.IGNORED if of_any_version else Unknown.REFUSED
    read = _reader(kind, unknown)  # type: ignore[arg-type]  # mypy takes a TypeVar's class for one without a hash
    try:
        value: T = read(data)
    except _Unfit as unfit:
        raise Malformed(f"{kind.__name__}{unfit.path}: {unfit.what}") from unfit
    except RecursionError as error:  # a class may hold itself
        raise Malformed(f"{kind.__name__}: {error}") from error
    return value


def plain(value: object) -> Any:
    """Return the value as what `json` writes: dictionaries, lists, strings, numbers.

    Raises ValueError for a number that nobody could read again.
    """
    kind: Any = type(value)
    if kind is int and not -_TOO_LARGE < value < _TOO_LARGE:
        raise ValueError(f"a number of more than {DIGITS} digits cannot be stored")
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


def _require_version(kind: Any, data: object) -> None:
    if not is_dataclass(kind) or not isinstance(data, dict):
        return
    known = next((field.default for field in fields(kind) if field.name == "version"), MISSING)
    if type(known) is not int:
        return
    found = data.get("version", 0)
    if found != known or type(found) is not int:
        raise OtherVersion(f"version {_shown(found)}, and this gpucloud knows version {known}")


@cache
def _reader(kind: Any, unknown: Unknown) -> Callable[[object], Any]:
    """Return what reads that kind out of plain values. Kept, for a class never changes: states are large."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        only = _reader(_without_none(kind), unknown)
        return lambda data: None if data is None else only(data)
    if origin is tuple:
        return partial(_tuple, get_args(kind), unknown)
    if is_dataclass(kind):
        return _words_reader(kind, unknown) if _is_of_words(kind) else partial(_record, kind, unknown)
    if issubclass(kind, Enum):
        return partial(_member, kind, {member.value: member for member in kind})
    return _READ.get(kind) or partial(_same, kind)


def _without_none(kind: Any) -> Any:
    (only,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return only


def _tuple(arguments: tuple[Any, ...], unknown: Unknown, data: object) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _Unfit(f"expected a list, found {_shown(data)}")
    alike = arguments[-1] is Ellipsis
    readers = [_reader(arguments[0], unknown)] * len(data) if alike else [_reader(kind, unknown) for kind in arguments]
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


def _words_reader(kind: Any, unknown: Unknown) -> Callable[[object], Any]:
    """Return what reads a record of words alone, once for all that are equal: many charges name a few pools."""
    once = lru_cache(_REPEATED)(lambda items: _record(kind, unknown, dict(items)))

    def read(data: Any) -> Any:
        try:
            return once(tuple(data.items()))
        except (AttributeError, TypeError):  # no object, or one that holds more than words
            return _record(kind, unknown, data)

    return read


def _is_of_words(kind: Any) -> bool:
    return all(hint is str or isinstance(hint, EnumMeta) for hint in _hints(kind).values())


def _record(kind: Any, unknown: Unknown, data: object) -> Any:
    if not isinstance(data, dict):
        raise _Unfit(f"expected an object, found {_shown(data)}")
    values, name = {}, ""
    readers, needed = _fields(kind, unknown)
    try:
        for name, plain_kind, read in readers:
            if name in data:
                item = data[name]
                values[name] = item if type(item) is plain_kind else read(item)
    except _Unfit as unfit:
        unfit.path = f".{name}{unfit.path}"
        raise
    if unknown is Unknown.REFUSED and len(values) < len(data):
        raise _Unfit(f"{', '.join(sorted(_shown(name) for name in data if name not in values)[:3])} not known")
    if len(values) < len(readers) and (missing := [name for name in needed if name not in values]):
        raise _Unfit(f"{', '.join(missing)} missing")
    return kind(**values)


@cache
def _fields(
    kind: Any, unknown: Unknown
) -> tuple[tuple[tuple[str, Any, Callable[[object], Any]], ...], tuple[str, ...]]:
    """Return for each field which plain values stay as they are and what reads others, and which must be there.

    Made when first read: a class may hold itself.
    """
    hints = _hints(kind)
    needed = tuple(field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    names = [field.name for field in fields(kind)]
    readers = tuple((name, _plain_kind(hints[name]), _reader(hints[name], unknown)) for name in names)
    return readers, needed


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain_kind(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType):
        return NoneType
    return kind if kind in _AS_IT_IS else None


def _int(text: str) -> int:
    """Return a whole number; sums with one of thousands of digits would come to no end."""
    if len(text.lstrip("-")) > DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


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
    if not in_calendar(time):
        raise _Unfit(f"a time that cannot be: {data[:60]}")
    return time


_parsed_time = lru_cache(_REPEATED)(datetime.fromisoformat)  # charges of one machine begin and end together


def _span(data: object) -> timedelta:
    if type(data) is not int:
        raise _Unfit(f"expected microseconds, found {_shown(data)}")
    try:
        return timedelta(microseconds=data)
    except OverflowError as error:
        raise _Unfit(f"{data} microseconds are no span") from error


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
        value = Decimal(data) if isinstance(data, str) else Decimal(_float(data))
    except InvalidOperation as error:
        raise _Unfit(f"expected a sum, found {_shown(data)}") from error
    if not _is_sum(value) or (isinstance(data, str) and len(data) > _LONG):
        raise _Unfit(f"expected a sum, found {_shown(data)}")
    return value


def _is_sum(value: Decimal) -> bool:
    return value.is_finite() and -_BEHIND <= value.adjusted() <= _BEFORE


def _written_time(value: datetime) -> str:
    if value.utcoffset() is None:
        raise ValueError(f"the time {value} without its zone cannot be stored")
    if not in_calendar(value):
        raise ValueError(
            f"the time {value.isoformat()} cannot be stored: years are from {EARLIEST_YEAR} to {LATEST_YEAR}"
        )
    return value.isoformat()


def _written_sum(value: Decimal) -> str:
    text = format(value, "f") if _is_sum(value) else ""  # not before: one of 1e999999999 has a gigabyte of zeros
    if not 0 < len(text) <= _LONG:
        raise ValueError(f"{value!r:.60} cannot be stored as a sum")
    return text


def _bytes(data: object) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "?", validate=True)
    except binascii.Error as error:
        raise _Unfit(f"expected base64, found {_shown(data)}") from error


def _shown(data: object) -> str:
    return f"a {type(data).__name__}" if isinstance(data, dict | list) else repr(data)[:60]


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
    datetime: _written_time,
    timedelta: lambda value: value // timedelta(microseconds=1),
    PurePath: str,
    Decimal: _written_sum,
    bytes: lambda value: base64.b64encode(value).decode(),
    float: lambda value: value if math.isfinite(value) else str(value),
    tuple: lambda value: [plain(item) for item in value],
}
