"""What the keeper of a script's directory is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from gpucloud.domain.job import OnNotice
from gpucloud.domain.keeping.layouts import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOrder:
    """One member's directory, and where its checkpoints go: `prefix` in `store`, `keep` of them.

    Every member puts the newest back; that of `rank` 0 alone is kept. `code`, `directory` and the attempt's `folder`
    are absolute paths; `first_rank` is the first of the member's own ranks among all.
    """

    code: str
    directory: str
    rule: Rule
    on_notice: OnNotice
    settle: timedelta
    store: str
    prefix: str
    attempt: int
    keep: int
    rank: int
    folder: str
    first_rank: int
