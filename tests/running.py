"""What processes of this machine run."""

from __future__ import annotations

from pathlib import Path


def words_of(pid: int) -> list[str]:
    """Return the process's command line, no words when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []
