"""What a node's driver keeps below the agent's folder: its lock, its order's place, itself.

drive/lock           held while a driver runs
drive/wanted.json    where its order is (`DriverWanted`)
drive/driver.json    its process, and the package that it runs from
drive/drive.log      what it says
drive/key            the cluster's private SSH key, mode 0600
drive/code/<tree>/   the job's code as it was started, not as its processes left it
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from gpucloud.agent.wholefile import read_text


def folder(root: Path) -> Path:
    """Return the folder, made if need be."""
    made = root / "drive"
    made.mkdir(parents=True, exist_ok=True, mode=0o700)
    return made


def lock(root: Path) -> int | None:
    """Return the driver's lock, held, as a descriptor; None while another one holds it."""
    descriptor = os.open(folder(root) / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def running(root: Path) -> str | None:
    """Return the package of the driver that runs, None when none does."""
    if not (root / "drive" / "lock").exists():
        return None
    held = lock(root)
    if held is not None:
        os.close(held)
        return None
    return str(identity(root).get("package"))


def identity(root: Path) -> dict[str, object]:
    """Return what was written of the driver that was started last."""
    try:
        data = json.loads(read_text(folder(root) / "driver.json") or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
