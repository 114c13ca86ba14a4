"""Bringing the nodes' history to the store: pieces of whole lines, compressed, each under the offset it starts at."""

from __future__ import annotations

import gzip
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import StoreError
from gpucloud.domain.history import Span
from gpucloud.ports import Clock, Host
from gpucloud.usecases.attemptrecords import DamagedPiece
from gpucloud.usecases.jobstore import JobStore

EVERY = timedelta(minutes=3)
_MOST = 1 << 20  # bytes that one look takes


@dataclass(slots=True)
class _Kept:
    """How far one node's file of one attempt is in the store, and when it was looked at."""

    offset: int
    at: datetime


@dataclass(slots=True)
class HistoryKeeper:
    """Keeps each node's use in the store, every few minutes and when an attempt ends; threads may share it."""

    jobs: JobStore
    clock: Clock
    _kept: dict[tuple[int, str], _Kept] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, host: Host, attempt: int, *, last: bool = False) -> None:
        """Bring what is new, if it is time or this is the `last` look. Raises HostUnreachable.

        What the store refuses waits for the next look: no job ends for its history.
        """
        key, now = (attempt, host.node.id), self.clock.now()
        with self._lock:
            known = self._kept.setdefault(key, _Kept(offset=-1, at=now))
        if not last and now - known.at < EVERY:
            return
        known.at = now
        try:
            if known.offset < 0:  # an earlier supervisor may have kept some
                known.offset = self.jobs.records.history_length(attempt, host.node.id)
            self._bring(host, attempt, known)
        except StoreError:
            known.offset = -1  # only the answer may have been lost: what is there is asked again

    def _bring(self, host: Host, attempt: int, known: _Kept) -> None:
        path = f"{host.node.root}/attempts/{attempt:04d}/metrics.jsonl"
        done = host.run(("sh", "-c", 'tail -c "+$2" "$1" 2>/dev/null | head -c "$3"', "sh", path, *_range(known)))
        said = done.stdout[:_MOST]  # a machine may say more than it was asked for
        whole = said[: said.rfind(b"\n") + 1]
        if whole:
            self.jobs.records.append_history(attempt, host.node.id, known.offset, gzip.compress(whole, mtime=0))
            known.offset += len(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """One node's use during one attempt."""

    attempt: int
    node_id: str
    spans: tuple[Span, ...]


def read_history(jobs: JobStore, attempt: int | None = None) -> tuple[NodeHistory, ...]:
    """Return what the store has, by attempt and node; a piece or a line that is damaged is passed over."""
    found: dict[tuple[int, str], list[Span]] = {}
    for part in jobs.records.history_parts(attempt):
        spans = found.setdefault((part.attempt, part.node_id), [])
        with suppress(DamagedPiece):
            for line in jobs.records.read_history(part).splitlines():
                with suppress(Malformed):
                    spans.append(from_json(Span, line, of_any_version=True))
    return tuple(NodeHistory(attempt=key[0], node_id=key[1], spans=tuple(spans)) for key, spans in found.items())


def _range(known: _Kept) -> tuple[str, str]:
    return str(known.offset + 1), str(_MOST)
