"""The zip that this code runs from."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def running_package() -> Path | None:
    """Return the zip that this code was read from; None when it was not read from one."""
    path = Path(sys.argv[0]).absolute()
    return path if path.suffix == ".zip" and path.is_file() else None


def package_sha256(package: Path | None) -> str:
    """Return the hash of the zip; empty for code that was not read from one."""
    return hashlib.sha256(package.read_bytes()).hexdigest() if package else ""
