"""Where Terraform's providers lie on this machine, so that tests need no registry."""

from __future__ import annotations

import os
from pathlib import Path

REGISTRY = "registry.terraform.io"


def plugin_folder() -> Path | None:
    """Return the folder that holds a mirror of providers: GPUCLOUD_TF_PLUGIN_DIR, else the first usual place."""
    named = os.environ.get("GPUCLOUD_TF_PLUGIN_DIR")
    if named:
        return Path(named)
    places = [Path.home() / ".terraform.d/plugins", Path("/usr/local/share/terraform/plugins")]
    places += [folder for folder in sorted(Path("/").iterdir()) if folder.name not in {"proc", "sys", "dev"}]
    for place in places:
        for candidate in (place, *_below(place)):
            if _readable(candidate / REGISTRY):
                return candidate
    return None


def _below(place: Path) -> list[Path]:
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir())
    except OSError:
        return []


def _readable(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False
