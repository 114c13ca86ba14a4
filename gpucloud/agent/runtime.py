"""Which container runtime this node uses."""

from __future__ import annotations

import shutil

from gpucloud.domain.job import ContainerRuntime


def chosen_runtime(wanted: ContainerRuntime) -> ContainerRuntime:
    """Return the runtime; AUTO is Apptainer where only that is, else Docker."""
    if wanted is not ContainerRuntime.AUTO:
        return wanted
    alone = shutil.which("docker") is None and shutil.which("apptainer") is not None
    return ContainerRuntime.APPTAINER if alone else ContainerRuntime.DOCKER
