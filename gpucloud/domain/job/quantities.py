"""Money, spans of time and sizes, as people write and read them."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from decimal import ROUND_UP, Decimal

from gpucloud.domain.untrusted import quoted

_LARGEST_USD = Decimal(100_000_000)
_LONGEST = timedelta(days=366)
_LARGEST_COUNT = 10**18
_LARGEST_SIZE = 1024**5  # 1 PiB

_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,12})?"
_USD = re.compile(rf"(?:({_NUMBER}) ?USD|\$ ?({_NUMBER}))", re.IGNORECASE)
_SPAN_PART = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)", re.IGNORECASE)
_SIZE = re.compile(rf"({_NUMBER}) ?([KMGTkmgt]i?B|B)")

_COUNT = re.compile(rf"({_NUMBER})(?:e([0-9]{{1,2}})| ?([KMBT]))?", re.IGNORECASE)
_COUNT_UNITS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}

_CENTURY_S = 36525 * 86400.0
_SECOND, _MINUTE, _HOUR, _DAY = 1, 60, 3600, 86400
_DAYS_FROM = 3 * _DAY  # half an hour more or less says too little of a deadline in a day
_SPAN_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), _SECOND),
    **dict.fromkeys(("m", "min", "minute", "minutes"), _MINUTE),
    **dict.fromkeys(("h", "hr", "hour", "hours"), _HOUR),
    **dict.fromkeys(("d", "day", "days"), _DAY),
}
_SIZE_UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


def parse_usd(text: str) -> Decimal:
    """Return a sum of US dollars, 0 to 1,000,000, from "20 USD" or "$20"; ValueError says the right form."""
    match = _USD.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'{quoted(text)} is not a sum of money: write it like "20 USD" or "0.5 USD"')
    usd = Decimal(match[1] or match[2])
    if usd > _LARGEST_USD:
        raise ValueError(f"{quoted(text)} is too much: the most is {_LARGEST_USD} USD")
    return usd


def parse_span(text: str) -> timedelta:
    """Return a span of at most 366 days from "12h", "90 min", "2d 3h" or "1h30m"; ValueError says the right form."""
    parts = _SPAN_PART.findall(text)
    rest = _SPAN_PART.sub("", text).strip()
    units = [_SPAN_UNITS.get(unit.lower()) for _, unit in parts]
    known = [unit for unit in units if unit is not None]
    if not parts or rest or len(known) < len(units) or known != sorted(set(known), reverse=True):
        raise ValueError(f'{quoted(text)} is not a span of time: write it like "12h", "90 min", "30s" or "2d 3h"')
    microseconds = sum(Decimal(number) * unit * 1_000_000 for (number, _), unit in zip(parts, known, strict=True))
    if microseconds > _LONGEST // timedelta(microseconds=1):
        raise ValueError(f"{quoted(text)} is too long: the longest span is {_LONGEST.days}d")
    return timedelta(microseconds=int(microseconds))


def parse_size(text: str) -> int:
    """Return bytes, at most 1 PiB, from "40 GiB" or "500 MB" (powers of 1000); ValueError says the right form."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'{quoted(text)} is not a size: write it like "40 GiB" or "512 MiB"')
    size = Decimal(match[1]) * _SIZE_UNITS[match[2].lower()]
    if size > _LARGEST_SIZE:
        raise ValueError(f"{quoted(text)} is too large: the largest size is 1024 TiB")
    if size != int(size):
        raise ValueError(f"{quoted(text)} is not a whole number of bytes")
    return int(size)


def parse_gib(text: str) -> int:
    """Return whole GiB from "40 GiB"; ValueError says the right form."""
    size = parse_size(text)
    if size % 1024**3:
        raise ValueError(f'{quoted(text)} is not a whole number of GiB: write it like "40 GiB"')
    return size // 1024**3


def parse_count(text: str) -> int:
    """Return how many, 1 to 10^18, from "7B", "350M", "1.5e9" or "1024"; ValueError says the right form."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'{quoted(text)} is not a number of things: write it like "7B", "350M" or "1024"')
    count = Decimal(match[1]) * Decimal(10) ** (int(match[2]) if match[2] else _COUNT_UNITS[(match[3] or "").upper()])
    if not 1 <= count <= _LARGEST_COUNT or count != int(count):
        raise ValueError(f"{quoted(text)} is not a whole number from 1 to 10^18")
    return int(count)


def counted(count: int, thing: str) -> str:
    """Return "1 machine" or "2 machines"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def format_usd(usd: Decimal) -> str:
    """Return "20.00 USD" or "0.0312 USD": two digits after the point, more where a small sum needs them."""
    return f"{usd:.{_places(usd)}f} USD"


def format_most(usd: Decimal) -> str:
    """Return the sum as `format_usd` writes it, rounded up: a sum that is the most is no less than it says."""
    return format_usd(usd.quantize(Decimal(1).scaleb(-_places(usd)), ROUND_UP))


def _places(usd: Decimal) -> int:
    places = 2
    if usd and abs(usd) < 1 and (usd * 10**2) % 1 != 0:
        places = max(2, 2 - usd.adjusted())
        if abs(round(usd, places)) >= 1:
            places = 2
    return places


def in_cents(usd: Decimal) -> str:
    """Return the sum rounded up to cents, as it is written in front of its unit."""
    return f"{Decimal(math.ceil(usd * 100)) / 100:.2f}"


def span_of(seconds: float) -> timedelta:
    """Return so many seconds, at most a century of them: scripts and machines say how many, and no sum may overflow."""
    return timedelta(seconds=0.0 if math.isnan(seconds) else min(max(seconds, -_CENTURY_S), _CENTURY_S))


def format_moment(at: datetime, now: datetime | None, *, seconds: bool = True) -> str:
    """Return "12:30:00 UTC", with its day before it where that is another than today; `now` None where today is meant.

    Without `seconds`: "12:30 UTC".
    """
    day = f"{at:%Y-%m-%d} " if now is not None and at.date() != now.date() else ""
    return f"{day}{at:%H:%M:%S} UTC" if seconds else f"{day}{at:%H:%M} UTC"


def format_span(span: timedelta) -> str:
    """Return "4.2 s", "12 min 5 s", "28 h 32 min" or "4 d 3 h": two units, days from three of them on."""
    if span < timedelta(0):
        return f"-{format_span(-span)}"
    tenths = round(span / timedelta(milliseconds=100))
    if tenths < _MINUTE * 10:
        whole, tenth = divmod(tenths, 10)
        return f"{whole}.{tenth} s" if tenth else f"{whole} s"
    if (seconds := round(span.total_seconds())) < _HOUR:
        return _two(seconds, _MINUTE, "min", "s")
    if (minutes := round(seconds / _MINUTE)) < _DAYS_FROM // _MINUTE:
        return _two(minutes, _HOUR // _MINUTE, "h", "min")
    return _two(round(seconds / _HOUR), _DAY // _HOUR, "d", "h")


def format_hours(span: timedelta) -> str:
    """Return "60 h" or "48.4 h": as deadlines are spoken of, in hours however many; "45 min" below two."""
    return f"{round(span / timedelta(hours=1), 1):g} h" if span >= timedelta(hours=2) else format_span(span)


def written_span(span: timedelta) -> str:
    """Return "48h 24min": as `parse_span` reads it, rounded up to whole minutes."""
    hours, minutes = divmod(-(-span // timedelta(minutes=1)), 60)
    return " ".join([*([f"{hours}h"] if hours else []), *([f"{minutes}min"] if minutes or not hours else [])])


def format_size(size: int) -> str:
    """Return "512 B", "1.5 KiB" or "40 GiB": powers of 1024, at most one digit after the point."""
    if abs(size) < 1024:
        return f"{size} B"
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    value, unit = Decimal(size) / 1024, next(units)
    # 1023.95 would be shown as 1024.0: it belongs to the next unit.
    while abs(value) >= Decimal("1023.95") and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def format_count(count: int) -> str:
    """Return "7.0B", "350M" or "1024": three digits at most from a million on."""
    for letter, power in (("T", 12), ("B", 9), ("M", 6)):
        # 999.5 would be shown as 1000: it belongs to the next unit.
        if count >= 0.9995 * 10**power:
            value = count / 10**power
            return f"{value:.{1 if value < 99.95 else 0}f}{letter}"
    return str(count)


def _two(count: int, per: int, large: str, small: str) -> str:
    whole, rest = divmod(count, per)
    return f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
