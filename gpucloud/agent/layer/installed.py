"""What is installed for an interpreter, read from metadata; nothing is imported, which for torch takes seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from gpucloud.wholefile import read_text

_METADATA = re.compile(r"(.+?)-(\d[^-]*)(?:-py[\d.]+)?\.(?:dist|egg)-info")


def installed_version(package: str, path: Iterable[str]) -> str | None:
    """Return the version of the package that an interpreter with this `sys.path` would import."""
    prefix = f"{package}=="
    return next((line[len(prefix) :] for line in _distributions(path) if line.startswith(prefix)), None)


def freeze(path: Iterable[str]) -> tuple[str, ...]:
    """Return `name==version` for everything on the path, sorted; the first of a name counts, as it does for import."""
    found: dict[str, str] = {}
    for line in _distributions(path):
        found.setdefault(re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(), line)
    return tuple(sorted(found.values(), key=str.lower))


def torch_cuda(path: Iterable[str]) -> str | None:
    """Return the CUDA that the torch on the path was built for, such as `13.0`; None: for the CPU, or no torch."""
    for folder in path:
        text = read_text(Path(folder or ".") / "torch" / "version.py")
        if text is not None:
            m = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return m[1] if m else None
    return None


def _distributions(path: Iterable[str]) -> Iterable[str]:
    for folder in path:
        try:
            names = sorted(os.listdir(folder or "."))
        except OSError:
            continue  # a zip, or a place that is not there
        for name in names:
            m = _METADATA.fullmatch(name)
            if m is not None:
                yield f"{m[1]}=={m[2]}"
