"""What a job needs of its nodes: from its file and the files that it names, its data sets, and the gate."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import CredentialsError, GateRefused, NodeError, StoreError, UsageError
from gpucloud.domain.job.data import DataSet, DataWanted, difference, gigabytes, wanted
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.job.spec import Cloud, GatePolicy, Job, Launcher
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.container import ImageWanted
from gpucloud.domain.node.gate.report import Checked, GateWanted, failures, is_machines, why
from gpucloud.domain.node.layer import (
    BOTO3,
    TORCH,
    depends_on_tree,
    names_torch,
    nested_files,
    requirement_files,
    setup_digest,
    setup_files,
)
from gpucloud.domain.node.machine.facts import machine_wanted
from gpucloud.domain.node.member import Script, launcher_of, parse_run
from gpucloud.domain.node.node import Node
from gpucloud.ports import DataSets
from gpucloud.usecases.jobstore.jobstore import JobStore


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
    requirements = (*((BOTO3,) if boto3 else ()), *((TORCH,) if torch else ()))
    setup, (files, conda) = job.setup or "", _read_by_setup(job)
    return Wanted(
        package=package,
        code=code,
        setup=job.setup,
        setup_digest=setup_digest(setup, files, code, env=job.env, requirements=requirements, conda=conda),
        of_tree=depends_on_tree(setup, files, conda),
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


def _read_by_setup(job: Job) -> tuple[tuple[tuple[str, bytes], ...], bytes | None]:
    """Return the files that decide what is installed, with what they hold, and what that of conda does."""
    conda = (job.code / job.conda).read_bytes() if job.conda else None
    by_conda = nested_files(job.conda, conda.decode(errors="replace")) if job.conda and conda else ()
    return _files(job, (*setup_files(job.setup or ""), *by_conda)), conda


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


# A job's data sets: listed once, kept in its store, so that every later attempt has exactly the same files.


@dataclass(slots=True)
class JobData:
    """The sets of one job, for all who prepare its nodes at the same time; `story` hears of them once."""

    job: Job
    jobs: JobStore
    sets: DataSets | None
    story: Callable[[str], None]
    _wanted: tuple[DataWanted, ...] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wanted(self) -> tuple[DataWanted, ...]:
        """Return what every node must have; nothing is asked of anybody for a job without data.

        Raises StoreError, CredentialsError, UsageError when a set that was never listed cannot be listed.
        """
        with self._lock:
            if self._wanted is None:
                self._wanted = tuple(
                    wanted(self._pinned(source), target, self.job.cloud) for source, target in self.job.data
                )
            return self._wanted

    def _pinned(self, source: str) -> DataSet:
        kept = self.jobs.data_set(source)
        if self.sets is None:
            raise UsageError(f"data: nobody here can list {source}")
        if kept is None:
            found = self.sets.listed(source)
            self.jobs.keep_data_set(found)
            self.story(
                f"data: {source}: {counted(len(found.files), 'file')}, {gigabytes(found.size)}, staged on every node"
            )
            return found
        self._compare(kept)
        return kept

    def _compare(self, kept: DataSet) -> None:
        """The job goes on with what it began with, as far as its machines have that or can still get it."""
        try:
            changed = difference(kept, self.sets.listed(kept.source)) if self.sets else None
        except (StoreError, CredentialsError, UsageError) as error:
            self.story(f"data: {kept.source} could not be listed again: {error}")
            return
        if changed:
            self.story(f"data: {kept.source}: {changed}")


# The gate as a job has it: what its nodes must show, and what a node that is refused means.


def gate_wanted(job: Job, gpu: str | None) -> GateWanted | None:
    """Return what every node must show; None for a job that neither asks for GPUs nor pays for them (`gpu`)."""
    wanted = job.resources
    if gpu is None and not wanted.gpu and wanted.vram_gib is None:
        return None
    # In a container the job's Python is the image's: what the machine itself shows is looked at.
    own_python = job.image is None
    return GateWanted(
        gpus=wanted.gpus,
        models=(gpu,) if gpu is not None else wanted.gpu,
        vram_gib=wanted.vram_gib,
        full=job.gate is GatePolicy.FULL,
        torch=own_python and isinstance(parse_run(job.run), Script),
    )


def of_node(wanted: Wanted, job: Job, gpu: str | None, node: Node, store_url: str) -> Wanted:
    """Return what is wanted of this very node, by a job that pays for GPUs of the model `gpu` (None: for none)."""
    return replace(of_any_node(wanted, job, gpu, node.pool.region, store_url), devices=node.devices)


def of_any_node(wanted: Wanted, job: Job, gpu: str | None, region: str | None, store_url: str) -> Wanted:
    """Return what is wanted of every node in the region that has its machine for itself."""
    return replace(
        wanted,
        asks_for_gpus=wanted.asks_for_gpus or gpu is not None,
        gate=gate_wanted(job, gpu),
        store_endpoint=store_endpoint(job, store_url, region),
    )


def store_endpoint(job: Job, store_url: str, region: str | None) -> str:
    """Return where the store answers, unless the node or the job names another endpoint; empty for a folder."""
    if not store_url.startswith("s3://"):
        return ""
    env = dict(job.env)
    if job.cloud is not Cloud.AWS:
        region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    suffix = "amazonaws.com.cn" if (region or "").startswith("cn-") else "amazonaws.com"
    return f"https://s3.{region}.{suffix}" if region else f"https://s3.{suffix}"


def refusal(node_id: str, stdout: bytes) -> NodeError:
    """Return the error of a node that the gate refused, with its findings; GateRefused where the fault is its own."""
    checked = parse_checked(stdout)
    failed = failures(checked.findings) if checked is not None else ()
    if checked is None or not failed:
        return NodeError(f"{node_id}: gate: {stdout[-300:].decode(errors='replace')}", hint="run the command again")
    kind = GateRefused if is_machines(failed) else NodeError
    return kind(f"{node_id}: {why(failed)}", hint=failed[0].hint)


def parse_checked(stdout: bytes) -> Checked | None:
    """Return the node's answer, its last line; None for anything else."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(Checked, lines[-1]) if lines else None
    except Malformed:
        return None
