"""Frozen dataclasses to JSON and back, strictly.

Times are ISO 8601 UTC, money is a decimal string, enums are their values, tuples are lists; what does not fit
raises `ValueError` naming the field. Unknown fields are ignored, so that an older program reads a newer state.
"""

from __future__ import annotations

import dataclasses
import json
import types
from datetime import datetime, timezone
from decimal import Decimal, InvalidOperation
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Json = Any  # what json.loads returns


def dumps(value: object) -> bytes:
    """Return the value as JSON bytes, keys in the order of its fields."""
    return json.dumps(plain(value), separators=(",", ":")).encode()


def loads(kind: type[T], data: bytes) -> T:
    """Return the value of type `kind` that `dumps` wrote; ValueError when it is torn or of another shape."""
    return value_of(kind, json.loads(data))


def plain(value: object) -> Json:
    """Return the value as what `json` writes: dictionaries, lists, strings, numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Decimal):
        return format(value, "f")
    if isinstance(value, datetime):
        return value.astimezone(timezone.utc).isoformat().replace("+00:00", "Z")
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def value_of(kind: type[T], data: Json) -> T:
    """Return `data`, as `json` read it, as a value of type `kind`."""
    result: T = _decode(kind, data, kind.__name__)
    return result


def _decode(kind: Any, data: Json, path: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_optional(kind, data, path)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, path)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, path)
    try:
        return _decode_scalar(kind, data)
    except (TypeError, ValueError, InvalidOperation) as error:
        raise ValueError(f"{path}: {data!r} is not a {getattr(kind, '__name__', kind)}") from error


def _decode_optional(kind: Any, data: Json, path: str) -> Any:
    if data is None:
        return None
    inner = next(arm for arm in get_args(kind) if arm is not types.NoneType)
    return _decode(inner, data, path)


def _decode_tuple(arms: tuple[Any, ...], data: Json, path: str) -> Any:
    if not isinstance(data, list):
        raise ValueError(f"{path}: {data!r} is not a list")  # noqa: TRY004  (one error type for bad data)
    if len(arms) == 2 and arms[1] is Ellipsis:
        return tuple(_decode(arms[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(arms) != len(data):
        raise ValueError(f"{path}: {len(data)} items where {len(arms)} are wanted")
    return tuple(_decode(arm, item, path) for arm, item in zip(arms, data, strict=True))


def _decode_record(kind: Any, data: Json, path: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{path}: {data!r} is not an object")  # noqa: TRY004
    hints = get_type_hints(kind)
    known = {
        f.name: _decode(hints[f.name], data[f.name], f"{path}.{f.name}")
        for f in dataclasses.fields(kind)
        if f.name in data
    }
    try:
        return kind(**known)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _decode_scalar(kind: Any, data: Json) -> Any:
    if kind is Decimal and isinstance(data, str):
        return Decimal(data)
    if kind is datetime and isinstance(data, str):
        return datetime.fromisoformat(data.replace("Z", "+00:00"))
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    if kind not in (str, int, float, bool) or type(data) is not kind:
        raise TypeError(kind)
    return data
