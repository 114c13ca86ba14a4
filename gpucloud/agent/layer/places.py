"""Where layers, the tools that make them and their caches lie."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Folders that all jobs of a login share; GPUCLOUD_LAYERS moves them together, so that nodes can share them."""

    layers: Path
    tools: Path
    cache: Path

    def folder(self, key: str) -> Path:
        """Return where the layer of that name lies."""
        return self.layers / key


def places(environ: Mapping[str, str] = os.environ) -> Places:
    """Return this login's places."""
    shared = environ.get("GPUCLOUD_LAYERS")
    if shared:
        return Places(layers=Path(shared), tools=Path(shared) / ".bin", cache=Path(shared) / ".cache")
    home = Path("~/.gpucloud").expanduser()
    return Places(layers=home / "layers", tools=home / "bin", cache=home / "cache")


def platform_name() -> str:
    """Return what wheels are built for here, such as `linux-x86_64`."""
    return f"{sys.platform}-{platform.machine()}"
