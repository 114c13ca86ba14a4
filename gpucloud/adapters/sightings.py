"""When strays were first seen, in one file of the user's own folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from gpucloud.adapters.home import writing
from gpucloud.domain.strays import Owner
from gpucloud.wholefile import write_whole


class SightingsFile:
    """Implements `Sightings`. A damaged file counts as none: everything is then seen for the first time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, owner: Owner) -> dict[str, datetime]:
        """Return what was kept for this owner."""
        kept = self._all().get(_key(owner), {})
        try:
            return {key: datetime.fromisoformat(at) for key, at in kept.items()}
        except (ValueError, TypeError, AttributeError):
            return {}

    def save(self, owner: Owner, first_seen: Mapping[str, datetime]) -> None:
        """Keep it; what other owners have stays."""
        kept = {**self._all(), _key(owner): {key: at.isoformat() for key, at in first_seen.items()}}
        with writing(self._path):
            write_whole(self._path, json.dumps(kept))

    def _all(self) -> dict[str, dict[str, str]]:
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}


def _key(owner: Owner) -> str:
    return f"{owner.account} {owner.store}"
