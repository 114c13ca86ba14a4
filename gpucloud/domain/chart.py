"""A chart as data: what is drawn where, whoever draws it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through (x, y); `upper`, if given, holds a second y each, up to which the space is shaded."""

    label: str
    points: tuple[tuple[float, float], ...]
    upper: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One panel. The axes' labels name their units; `limit` is a labelled line across, such as a budget."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: tuple[str, float] | None = None
