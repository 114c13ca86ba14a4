"""Finds the folders that travel with the package: `terraform/` and `templates/`."""

from __future__ import annotations

from pathlib import Path

import gpucloud
from gpucloud.domain.errors import GpucloudError


def bundled(*parts: str) -> Path:
    """Return the path of a bundled file or folder, as in `bundled("terraform", "local")`.

    A wheel holds it in `gpucloud/bundled/`; a checkout, or an editable install of one, at the repository's root.
    """
    package = Path(gpucloud.__file__).resolve().parent
    for root in (package / "bundled", package.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise GpucloudError(
        f"this installation of gpucloud lacks {'/'.join(parts)}",
        hint="install gpucloud anew, from a wheel or a whole checkout",
    )
