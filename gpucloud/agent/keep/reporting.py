"""What the keeper says: to the user, and to the node's agent."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.agentstatus import UNTOLD
from gpucloud.domain.manifest import Why
from gpucloud.wholefile import read_text, write_whole


class Reporting:
    """The attempt's folder, as the agent reads it. A full disk silences what is said, never what is done."""

    def __init__(self, folder: Path, *, rank: int, first_step: int = 1) -> None:
        self.first_step = first_step
        self._folder = folder
        self._log = folder / f"rank-{rank}.log"
        self._leads = rank == 0
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Tell the user, in the output of the first rank; on other nodes in the launcher's."""
        line = f"gpucloud: {text}\n"
        if not self._leads:
            sys.stderr.write(line)
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(line)
        except OSError:
            sys.stderr.write(line)

    def say_once(self, text: str) -> None:
        """Tell the user, unless this was told before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def progress(self, committed: int) -> None:
        """Say which step is in the store, 0 for none: on the first rank's node, whose word it is."""
        if not self._leads:
            return
        self._write(
            "progress.json",
            {
                "step": committed,
                "first_step": self.first_step,
                "phase": UNTOLD,
                "committed_step": committed or None,
                "written_at": time.time(),
            },
        )

    def saving(self, seconds: float) -> None:
        """Say how long it takes from a file at rest to its commit, as the first rank's node knows it."""
        if not self._leads:
            return
        self._write("saving.json", {"seconds": seconds, "step": None})

    def barred(self, why: str) -> None:
        """Say that what was saved could not be read here and now, so that the script was not begun."""
        self._write("barred-0.json", {"why": why})

    def stop(self) -> datetime | None:
        """Return until when the script may take to leave; None while nobody wants it to."""
        text = read_text(self._folder / "stop.json")
        if text is None:
            return None
        try:
            return datetime.fromisoformat(json.loads(text)["at"])
        except (ValueError, KeyError, TypeError):
            return datetime.now(timezone.utc)

    def why_stop(self) -> Why:
        """Return what the script is to leave for, STOP where that is not told."""
        try:
            return Why(json.loads(read_text(self._folder / "stop.json") or "")["reason"])
        except (ValueError, KeyError, TypeError):
            return Why.STOP

    def _write(self, name: str, content: dict[str, object]) -> None:
        try:
            write_whole(self._folder / name, json.dumps(content))
        except OSError as error:
            sys.stderr.write(f"{name}: {error}\n")
