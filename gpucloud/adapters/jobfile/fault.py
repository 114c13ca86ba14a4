"""What is wrong with a job file, before it is known how the file is called."""

from __future__ import annotations

from dataclasses import dataclass

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where something stands, counted from 1, and what is written there, or that it is "a list" or "a mapping"."""

    line: int
    column: int
    text: str = ""
    scalar: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, at a key or a value."""

    path: Path
    location: Location
    message: str
    hint: str | None = None


class Unreadable(Exception):
    """The file cannot be read any further: one fault and no document."""

    def __init__(self, line: int, column: int, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.fault = Fault(path=(), location=Location(line=line, column=column), message=message, hint=hint)


class Refused(ValueError):
    """A value that its key does not take: a sentence that begins with the value, and perhaps a hint."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class Wanted(ValueError):
    """A value of the wrong kind; the argument says what is wanted, as in "a whole number"."""
