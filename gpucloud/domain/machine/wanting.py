"""What a job file asks of its machines' system software."""

from __future__ import annotations

from gpucloud.domain.hardware.drivers import least_driver
from gpucloud.domain.job import Cloud, ContainerRuntime, DriverPolicy, Job
from gpucloud.domain.machine import MachineWanted

_NEWEST_CUDA = "13.0"  # of PyPI's wheels of PyTorch 2.13: what a job gets that names no other
_OLDEST_CUDA = "11.8"  # of any wheel of PyTorch 2: a driver that runs not even that runs no job


def machine_wanted(job: Job) -> MachineWanted | None:
    """Return what the job wants of a machine below Python; None when it wants nothing, and on the embedded fleet.

    gpucloud installs on rented machines unless the job says `keep`, and on the user's own hosts where it names the
    driver's branch; elsewhere it only looks.
    """
    if job.cloud is Cloud.LOCAL:
        return None
    rented = job.cloud is Cloud.AWS
    branch = job.machine.driver if job.machine.driver not in [policy.value for policy in DriverPolicy] else ""
    install = bool(branch) or (rented and job.machine.driver != DriverPolicy.KEEP.value)
    asked = bool(job.resources.gpu) or job.resources.vram_gib is not None
    divided = job.machine.mig is not None or job.machine.mps
    gpus = job.resources.gpus if rented or asked or branch or divided else 0
    runtime = _runtime(job)
    if not gpus and not runtime and not job.machine.exporter:
        return None
    least = "" if branch else least_driver(_NEWEST_CUDA if install else _OLDEST_CUDA)
    return MachineWanted(
        install=install,
        branch=branch,
        least_driver=least or "",
        gpus=gpus,
        asked=asked or divided,
        mig=job.machine.mig,
        mps=job.machine.mps,
        exporter=job.machine.exporter,
        runtime=runtime,
        efa=rented,
        apt_mirror=job.mirrors.apt,
    )


def _runtime(job: Job) -> str:
    if job.image is None:
        return ""
    match job.container.runtime:
        case ContainerRuntime.AUTO | ContainerRuntime.DOCKER | ContainerRuntime.APPTAINER as runtime:
            return runtime.value
