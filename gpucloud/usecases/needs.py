"""What a job needs of its nodes, from its file and the files that this names."""

from __future__ import annotations

from collections.abc import Mapping

from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.container import ImageWanted
from gpucloud.domain.data import DataWanted
from gpucloud.domain.job import Job, Launcher
from gpucloud.domain.launch import launcher_of
from gpucloud.domain.layer import BOTO3, nested_files, requirement_files, setup_digest, setup_files
from gpucloud.domain.machine.wanting import machine_wanted
from gpucloud.domain.torchwheels import TORCH, names_torch


def wanted_for(  # noqa: PLR0913  each by its name
    job: Job,
    *,
    package: str,
    code: str,
    secrets: Mapping[str, str],
    store_url: str,
    power_off: tuple[str, ...],
    data: tuple[DataWanted, ...] = (),
) -> Wanted:
    """Return what the job needs of a node where its code lies at `code`; reads the files that `setup` names.

    `package` is the SHA-256 of ours. What the job pays for, and which GPUs a node has, is added by `gate.of_node`.
    """
    # An image brings its own Python; what stages data from S3, or keeps a script's directory there, runs outside of it.
    saves_outside = job.image is None or job.checkpoint.directory is not None
    boto3 = (store_url.startswith("s3://") and saves_outside) or any(one.in_s3 for one in data)
    torchrun = job.image is None and launcher_of(job) is Launcher.TORCHRUN
    torch = torchrun and not _brings_torch(job)
    return Wanted(
        package=package,
        code=code,
        setup=job.setup,
        setup_digest=_digest(job, code, boto3=boto3, torch=torch),
        env=(*job.env, *secrets.items()),
        torchrun=torchrun,
        image=_image(job, secrets),
        gpus=job.resources.gpus,
        asks_for_gpus=bool(job.resources.gpu) or job.resources.vram_gib is not None,
        machine=machine_wanted(job),
        power_off=power_off,
        boto3=boto3,
        data=data,
        torch=torch,
        conda=job.conda,
        pip_mirror=job.mirrors.pip,
        torch_mirror=job.mirrors.torch,
    )


def builds_in_code(job: Job) -> bool:
    """Whether what is installed depends on where the code lies: it must be there first."""
    return job.setup is not None or job.conda is not None


def _digest(job: Job, code: str, *, boto3: bool, torch: bool) -> str:
    setup = job.setup or ""
    requirements = (*((BOTO3,) if boto3 else ()), *((TORCH,) if torch else ()))
    conda = (job.code / job.conda).read_bytes() if job.conda else None
    by_conda = nested_files(job.conda, conda.decode(errors="replace")) if job.conda and conda else ()
    files = _files(job, (*setup_files(setup), *by_conda))
    return setup_digest(setup, files, code, env=job.env, requirements=requirements, conda=conda)


def _image(job: Job, secrets: Mapping[str, str]) -> ImageWanted | None:
    if job.image is None:
        return None
    login = secrets.get(job.container.login) if job.container.login else None
    return ImageWanted(reference=job.image, runtime=job.container.runtime, login=login)


def _files(job: Job, names: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    """Return what the files hold, and those that they name in their turn; what is no file is left out."""
    found: dict[str, bytes] = {}
    left = list(names)
    while left:
        name = left.pop(0)
        if name not in found and (job.code / name).is_file():
            found[name] = (job.code / name).read_bytes()
            left += nested_files(name, found[name].decode("utf-8", errors="replace"))
    return tuple(found.items())


def _brings_torch(job: Job) -> bool:
    """Whether the job's own files install torch: then its version is theirs."""
    setup = job.setup or ""
    named = (*requirement_files(setup), *((job.conda,) if job.conda else ()))
    texts = [setup, *(data.decode("utf-8", errors="replace") for _, data in _files(job, named))]
    return any(names_torch(text) for text in texts)
