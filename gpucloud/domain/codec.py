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
from enum import Enum
from functools import cache, partial
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_AS_IT_IS = frozenset({str, int, bool, NoneType})


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
    value: T = read(data, kind.__name__)
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


@cache
def _reader(kind: Any) -> Callable[[object, str], Any]:
    """Return what reads that kind out of plain values. Kept, for a class never changes: states are large."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        only = _reader(_without_none(kind))
        return lambda data, path: None if data is None else only(data, path)
    if origin is tuple:
        return partial(_tuple, get_args(kind))
    if is_dataclass(kind):
        return partial(_record, kind)
    if issubclass(kind, Enum):
        return partial(_parsed, kind)
    return _READ.get(kind) or partial(_same, kind)


def _without_none(kind: Any) -> Any:
    (only,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return only


def _tuple(arguments: tuple[Any, ...], data: object, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise Malformed(f"{path}: expected a list, found {_shown(data)}")
    kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(data):
        raise Malformed(f"{path}: expected {len(kinds)} items, found {len(data)}")
    return tuple(_reader(kind)(item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _record(kind: Any, data: object, path: str) -> Any:
    if not isinstance(data, dict):
        raise Malformed(f"{path}: expected an object, found {_shown(data)}")
    values, missing = {}, []
    for name, (read, is_needed) in _fields(kind).items():
        if name in data:
            values[name] = read(data[name], f"{path}.{name}")
        elif is_needed:
            missing.append(name)
    if missing:
        raise Malformed(f"{path}: {', '.join(missing)} missing")
    return kind(**values)


@cache
def _fields(kind: Any) -> dict[str, tuple[Callable[[object, str], Any], bool]]:
    """Return what reads each field, and whether it must be there. Made when first read: a class may hold itself."""
    hints = get_type_hints(kind)
    return {
        field.name: (_reader(hints[field.name]), field.default is field.default_factory is MISSING)
        for field in fields(kind)
    }


def _same(kind: type, data: object, path: str) -> Any:
    if type(data) is not kind:  # `type`, because a bool is an int to isinstance
        raise Malformed(f"{path}: expected {kind.__name__}, found {_shown(data)}")
    return data


def _parsed(kind: Any, data: object, path: str) -> Any:
    try:
        return kind(data)
    except ValueError as error:
        raise Malformed(f"{path}: {error}") from error


def _time(data: object, path: str) -> datetime:
    if not isinstance(data, str):
        raise Malformed(f"{path}: expected a time, found {_shown(data)}")
    try:
        time = datetime.fromisoformat(data)
    except ValueError as error:
        raise Malformed(f"{path}: {error}") from error
    if time.tzinfo is None:
        raise Malformed(f"{path}: a time without its zone: {data}")
    return time


def _span(data: object, path: str) -> timedelta:
    if type(data) is not int:
        raise Malformed(f"{path}: expected microseconds, found {_shown(data)}")
    return timedelta(microseconds=data)


def _path(data: object, path: str) -> Path:
    if not isinstance(data, str):
        raise Malformed(f"{path}: expected a path, found {_shown(data)}")
    return Path(data)


def _float(data: object, path: str) -> float:
    if type(data) in (int, float) or data in ("nan", "inf", "-inf"):
        return float(data)  # type: ignore[arg-type]
    raise Malformed(f"{path}: expected a number, found {_shown(data)}")


def _decimal(data: object, path: str) -> Decimal:
    try:
        return Decimal(data) if isinstance(data, str) else Decimal(_float(data, path))
    except InvalidOperation as error:
        raise Malformed(f"{path}: expected a sum, found {_shown(data)}") from error


def _bytes(data: object, path: str) -> bytes:
    try:
        return base64.b64decode(data if isinstance(data, str) else "?", validate=True)
    except binascii.Error as error:
        raise Malformed(f"{path}: expected base64, found {_shown(data)}") from error


def _shown(data: object) -> str:
    return repr(data)[:60]


_READ: dict[Any, Callable[[object, str], Any]] = {
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
