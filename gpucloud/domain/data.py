"""Data sets on nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWanted:
    """A data set: where it comes from (`s3://bucket/prefix`, or a path), and the folder in which nodes find it."""

    key: str
    source: str
    target: str
