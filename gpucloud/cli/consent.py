"""Consent to delete: `--yes` on the command line, or a yes of whoever sits there."""

from __future__ import annotations

import sys

from gpucloud.cli.render.words import tell


def is_meant(command: str) -> bool:
    """Ask whoever sits there whether what was just told is to be deleted; elsewhere say the command that does it."""
    if not sys.stdin.isatty():
        tell(f"nothing is deleted: {command}")
        return False
    sys.stderr.write("delete it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
