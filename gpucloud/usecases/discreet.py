"""Who looks on sees no secret of the job, whoever wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpucloud.domain.ledger import Spend
from gpucloud.domain.masking import masked
from gpucloud.domain.supervision.action import Action
from gpucloud.domain.supervision.seen import Seen
from gpucloud.usecases.world import Watcher

_HALVES = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Halves of letters, which a machine's JSON may hold and no text; those between stand for bytes that are no letter."""


@dataclass(frozen=True, slots=True)
class Discreet:
    """A watcher that passes everything on but the `hidden` words: a failed `setup` may have printed one."""

    watcher: Watcher
    hidden: tuple[bytes, ...]

    def story(self, line: str) -> None:
        """Something happened, in one line."""
        self.watcher.story(self._shown(line))

    def tick(self, seen: Seen, action: Action, spend: Spend) -> None:
        """One pass was made."""
        self.watcher.tick(seen, action, spend)

    def output(self, attempt: int, rank: int, text: str) -> None:
        """A rank wrote whole lines, or over the last one."""
        self.watcher.output(attempt, rank, self._shown(text))

    def _shown(self, text: str) -> str:
        whole = _HALVES.sub("\ufffd", text)
        return masked(whole.encode("utf-8", "surrogateescape"), self.hidden).decode("utf-8", "replace")
