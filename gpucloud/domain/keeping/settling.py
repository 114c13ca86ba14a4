"""When a set of files has come to rest: pure, over one listing after the other."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.keeping.listing import FileSet, Listing, Signature

Content = tuple[tuple[str, Signature], ...]


_State = tuple[Content, tuple[tuple[str, tuple[str, ...]], ...]]
"""Of a set: its files, and what the pointers beside it name."""


@dataclass(slots=True)
class _Seen:
    state: _State
    since_s: float


class Settling:
    """Remembers what each set was and since when; times are seconds of any clock that never goes back."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, _Seen] = {}
        self._taken: dict[str, _State] = {}
        self._newest_ns = 0

    def look(self, sets: tuple[FileSet, ...], listing: Listing, now_s: float) -> tuple[FileSet, ...]:
        """Return the complete sets that are new and at rest, the newest first."""
        present = {one.name: (one.content(listing), one.named) for one in sets}
        self._seen = {
            name: seen if (seen := self._seen.get(name)) and seen.state == state else _Seen(state, now_s)
            for name, state in present.items()
        }
        ready = [one for one in sets if self._is_ready(one, listing, now_s)]
        return tuple(sorted(ready, key=lambda one: (one.written_ns(listing), one.step or 0), reverse=True))

    def unsettled(self, sets: tuple[FileSet, ...], listing: Listing) -> bool:
        """Whether something is being written, or was, and is not taken: worth waiting for at the end."""
        return any(self._is_new(one, listing) for one in sets)

    def take(self, one: FileSet, content: Content) -> None:
        """This content is not to be offered again, nor is any that was written before it."""
        self._taken[one.name] = content, one.named
        self._newest_ns = max((self._newest_ns, *(about.mtime_ns for path, about in content if path in one.paths)))

    def take_all(self, sets: tuple[FileSet, ...], listing: Listing) -> None:
        """What is there now is nothing new."""
        for one in sets:
            self._taken[one.name] = one.content(listing), one.named

    def _is_ready(self, one: FileSet, listing: Listing, now_s: float) -> bool:
        at_rest = now_s - self._seen[one.name].since_s >= self._settle_s
        return one.complete and at_rest and self._is_new(one, listing)

    def _is_new(self, one: FileSet, listing: Listing) -> bool:
        known = self._taken.get(one.name) == (one.content(listing), one.named)
        return bool(one.paths) and not known and one.written_ns(listing) >= self._newest_ns
