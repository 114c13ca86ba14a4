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
from functools import cache
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
    value: T = _value(kind, data, kind.__name__)
    return value


def plain(value: object) -> Any:  # noqa: PLR0911  (one flat match)
    """Return the value as what `json` writes: dictionaries, lists, strings, numbers."""
    if type(value) in _AS_IT_IS:  # most values are: asked first, a state is written a third quicker
        return value
    match value:
        case Enum():
            return value.value
        case datetime():
            return value.isoformat()
        case timedelta():
            return value // timedelta(microseconds=1)
        case PurePath():
            return str(value)
        case Decimal():
            return format(value, "f")
        case bytes():
            return base64.b64encode(value).decode()
        case float() if not math.isfinite(value):
            return str(value)
        case tuple():
            return [plain(item) for item in value]
        case _ if is_dataclass(value):
            return {name: plain(getattr(value, name)) for name in _names(value)}
        case _:
            return value


def _names(value: object) -> tuple[str, ...]:
    kind: Any = type(value)
    return _fields(kind)


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _value(kind: Any, data: object, path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return None if data is None else _value(_without_none(kind), data, path)
    if origin is tuple:
        return _tuple(get_args(kind), data, path)
    if is_dataclass(kind):
        return _record(kind, data, path)
    if issubclass(kind, Enum):
        return _parsed(kind, data, path)
    if kind in _READ:
        return _READ[kind](data, path)
    if type(data) is not kind:  # `type`, because a bool is an int to isinstance
        raise Malformed(f"{path}: expected {kind.__name__}, found {_shown(data)}")
    return data


def _without_none(kind: Any) -> Any:
    (only,) = (argument for argument in get_args(kind) if argument is not NoneType)
    return only


def _tuple(arguments: tuple[Any, ...], data: object, path: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise Malformed(f"{path}: expected a list, found {_shown(data)}")
    kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(data):
        raise Malformed(f"{path}: expected {len(kinds)} items, found {len(data)}")
    return tuple(_value(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True)))


def _record(kind: Any, data: object, path: str) -> Any:
    if not isinstance(data, dict):
        raise Malformed(f"{path}: expected an object, found {_shown(data)}")
    hints = _hints(kind)
    missing = [f.name for f in fields(kind) if f.name not in data and f.default is f.default_factory is MISSING]
    if missing:
        raise Malformed(f"{path}: {', '.join(missing)} missing")
    names = [field.name for field in fields(kind) if field.name in data]
    return kind(**{name: _value(hints[name], data[name], f"{path}.{name}") for name in names})


@cache
def _hints(kind: type) -> dict[str, Any]:
    """Kept, for a class never changes: evaluating the annotations anew was two thirds of reading a status."""
    return get_type_hints(kind)


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
