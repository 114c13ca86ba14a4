"""What a repository's CI is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.domain.vendoring import Forge

if TYPE_CHECKING:
    from gpucloud.adapters.packaging import Installed


def install_pipeline(folder: Path, forges: frozenset[Forge], *, force: bool) -> Installed:
    """Put pipelines and what they install into the repository around `folder`; see `gpucloud.adapters.packaging`."""
    from gpucloud.adapters import packaging

    return packaging.install_pipeline(folder, forges, force=force)
