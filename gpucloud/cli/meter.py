"""How far something of known size is: redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time

from gpucloud.cli.render import tell
from gpucloud.domain.quantities import format_size

_DRAWN_S, _TOLD_S = 0.2, 10.0


class Meter:
    """Counts bytes, from any thread, and shows them as a context; nothing is shown of what is quick."""

    def __init__(self, word: str, total: int) -> None:
        self._word = word
        self._total = total
        self._done = 0
        self._drawn = False
        self._lock = threading.Lock()
        self._began = self._shown = time.monotonic()

    def moved(self, size: int) -> None:
        """Take in so many bytes more."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._shown >= (_DRAWN_S if sys.stderr.isatty() else _TOLD_S):
                self._shown = now
                self._show()

    def __enter__(self) -> Meter:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the line that was drawn."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        speed = self._done / max(time.monotonic() - self._began, 0.001)
        text = f"{self._word} {format_size(self._done)} of {format_size(self._total)}, {format_size(int(speed))}/s"
        if sys.stderr.isatty():
            self._drawn = True
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
        else:
            tell(text)
