"""What can be seen of a user's scripts without running them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_IMPORTS = re.compile(rb"^\s*(?:import\s+gpucloud\.resume|from\s+gpucloud(?:\.resume)?\s+import)\b", re.MULTILINE)
_LARGEST = 2**20


def imports_resume(code: Path) -> bool:
    """Whether a Python file in the job's code imports `gpucloud.resume`."""
    return any(_IMPORTS.search(path.read_bytes()) is not None for path in _scripts(code))


def _scripts(code: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(code):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= _LARGEST:
                yield path
