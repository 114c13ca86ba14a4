"""The attempt's folder on the node, through which a script and the agent speak."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpucloud.domain.checkpoint.manifest import Why

_WITH_AN_END = (Why.NOTICE, Why.BUDGET)
_TO_LEAVE_S = 1.0  # for the ranks to end


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Files that appear whole. Without a folder, nothing is written and nobody asks for a stop."""

    path: Path | None

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file. Raises OSError, as on a full disk."""
        if self.path is not None:
            beside = self.path / f".{name}.{os.getpid()}"
            beside.write_text(json.dumps(content))
            beside.replace(self.path / name)

    def tell(self, name: str, content: dict[str, Any]) -> None:
        """Write what only informs: no training ends because a disk is full."""
        with contextlib.suppress(OSError):
            self.write(name, content)

    def stop_asked(self) -> Why | None:
        """Return what this node's agent wants the ranks to save and leave for; None while it does not."""
        if self.path is None or not (self.path / "stop.json").exists():
            return None
        reason = self.stop_reason()
        return Why(reason) if reason in _WITH_AN_END else Why.STOP

    def save_asked(self) -> int:
        """Return the number of the newest wish of this node's agent that the ranks save and go on; 0 without one."""
        try:
            return int(json.loads((self.path / "save.json").read_text())["since"]) if self.path is not None else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def seconds_left(self) -> float:
        """Return how long there is for a last save on this node: until the time that the agent wrote, if that counts.

        A stop that the user wishes has no end; its time is when it was asked for.
        """
        try:
            asked = json.loads((self.path or Path()).joinpath("stop.json").read_text())
            if asked["reason"] not in _WITH_AN_END:
                return math.inf
            at = datetime.fromisoformat(asked["at"])
            return max(0.0, (at - datetime.now(timezone.utc)).total_seconds() - _TO_LEAVE_S)
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf

    def stop_reason(self) -> str:
        """Return why, in one word; `another node` when this node was not asked."""
        try:
            return str(json.loads((self.path or Path()).joinpath("stop.json").read_text())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another node"


def say(text: str) -> None:
    """Tell the user one line of the story."""
    sys.stderr.write(f"gpucloud: {text}\n")
    sys.stderr.flush()
