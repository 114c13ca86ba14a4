"""Removing layers that nobody uses any more."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from gpucloud.agent.layer.places import Places

KEPT = 4
"""So many layers stay, the ones that were asked for last."""

# Processes of another PID namespace cannot be seen, but whoever runs a layer has asked for it at its node's start.
_UNUSED_S = 7 * 86400.0


def collect(places: Places, keep: str) -> tuple[str, ...]:
    """Remove old layers and return their names; `keep`, the newest, and what is or may be in use stay."""
    ready = sorted(places.layers.glob("*/ready.json"), key=_asked_for, reverse=True)
    removed = []
    for file in ready[KEPT:]:
        folder = file.parent
        if folder.name != keep and time.time() - _asked_for(file) > _UNUSED_S and not _is_used(folder):
            removed += [folder.name] if _remove(places, folder) else []
    return tuple(removed)


def _asked_for(ready: Path) -> float:
    try:
        return ready.stat().st_mtime
    except OSError:
        return 0.0


def _is_used(folder: Path) -> bool:
    """Whether a process here was started from the layer: its name is in the command line or in PATH."""
    name = os.fsencode(str(folder))
    for process in Path("/proc").glob("[0-9]*"):
        for part in ("cmdline", "environ"):
            try:
                if name in (process / part).read_bytes():
                    return True
            except OSError:
                continue
    return False


def _remove(places: Places, folder: Path) -> bool:
    """Remove the layer unless it is being made again; the mark goes first, so that a rest is no layer."""
    with (places.layers / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        (folder / "ready.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        (places.layers / f"{folder.name}.log").unlink(missing_ok=True)
    return True
