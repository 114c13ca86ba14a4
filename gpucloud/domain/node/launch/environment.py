"""The environment of a member: the user's variables, ours where the user says nothing, and the ranks."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath

from gpucloud.domain.codec import to_json
from gpucloud.domain.job.data import variables
from gpucloud.domain.job.spec import CheckpointPolicy, Cloud, Job, Launcher, OnNotice, Resources
from gpucloud.domain.node.collectives import on_interface
from gpucloud.domain.node.launch.member import Member, Script, attempt_folder, workers_per_node

SECRET = "GPUCLOUD_ATTEMPT_SECRET"  # noqa: S105  the variable's name
"""By this one member proves itself to another; it is taken out of the environment before the user's code runs."""

# From SIGTERM to SIGKILL for the ranks of a node where one has left or failed. Given by environment (torchrun reads
# PET_<OPTION>), because torch before 2.9 refuses an option that it does not know.
_SHUTDOWN_TIMEOUT_S = 5
# A rank without anything to save leaves at once when a script of its own kind is signalled; the one that saves may take
# as long as a notice allows.
_SAVING_S = 110


def env_of(member: Member) -> tuple[tuple[str, str], ...]:
    """Return the variables, by name. `env:` wins over ours, except over what the agent and the ranks rely on."""
    job, start, place = member.job, member.start, member.place
    wanted = {**_defaults(member), **dict(job.env), **member.secrets}
    path = wanted.get("PYTHONPATH")
    ours = {
        "PYTHONPATH": f"{place.package}:{path}" if path else place.package,
        "GPUCLOUD_STORE": start.store_url,
        "GPUCLOUD_CHECKPOINTS": start.checkpoints,
        "GPUCLOUD_CHECKPOINT_EVERY": _cadence(job.checkpoint),
        "GPUCLOUD_CHECKPOINT_KEEP": str(job.checkpoint.keep),
        "GPUCLOUD_RECIPE": recipe(job, place.code),
        "GPUCLOUD_JOB": job.name,
        "GPUCLOUD_ATTEMPT": str(start.number),
        "GPUCLOUD_ATTEMPT_DIR": attempt_folder(place.root, start.number),
        **variables(tuple(target for _, target in job.data), place.root, below_root=job.cloud is Cloud.LOCAL),
        **({"GPUCLOUD_CHECKPOINT_DIRECTORY": job.checkpoint.directory.path} if job.checkpoint.directory else {}),
        **({"GPUCLOUD_TRIAL": job.trial} if job.trial else {}),
        **({"GPUCLOUD_PROFILE_STEPS": str(start.profile_steps)} if start.profile_steps else {}),
    }
    return tuple(sorted({**wanted, **ours, **_ranks(member)}.items()))


def sharing(job: Job, nodes: int) -> int:
    """Return how many processes share the CPUs that a node's agent finds; 0 where one has them all.

    All nodes of the embedded fleet are one machine, and what its user does besides has a share, too.
    """
    workers = workers_per_node(job)
    if job.cloud is Cloud.LOCAL:
        return nodes * workers + 1
    return workers if workers > 1 else 0


def _defaults(member: Member) -> dict[str, str]:
    node = member.place.node
    devices = node.devices[: member.job.resources.gpus]
    return {
        # CUDA counts devices from the fastest on, nvidia-smi, the gate and the metrics by their place on the bus.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONUNBUFFERED": "1",
        **({"KINETO_LOG_LEVEL": "6"} if member.start.profile_steps else {}),  # the profiler's own start and stop
        "PYTHONFAULTHANDLER": "1",  # a rank that hangs is made to tell where (agent.stacks), and one that crashes does
        **(on_interface(node.interface) if node.interface else {}),
        **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
        # boto3 finds no region on a machine by itself.
        **({"AWS_DEFAULT_REGION": node.pool.region} if member.job.cloud is Cloud.AWS else {}),
    }


def _ranks(member: Member) -> dict[str, str]:
    match member.launcher:
        case Launcher.TORCHRUN | Launcher.AUTO:
            return {
                "GPUCLOUD_RANKS": _local_ranks(member),
                "PET_SHUTDOWN_TIMEOUT": str(_shutdown_s(member.job)),
                **({"GPUCLOUD_WORLDS": _worlds(member.job.resources)} if member.job.resources.is_range else {}),
            }
        case Launcher.MPI:
            return _mpi(member)
        case Launcher.PLAIN:
            return _once(member)
        case Launcher.TENSORFLOW:
            return {**_once(member), "TF_CONFIG": _tf_config(member)}


REACHES_SCRIPT = ("run", "launcher", "setup", "image", "conda", "env", "data")
"""The keys of a job file that reach its script: with another value of one, a resume is not exact."""


def recipe(job: Job, code: str) -> str:
    """Return what a script is made of, as JSON: what a resume compares, for it is exact with the very same alone.

    Its code by its tree's hash, its command line, and the rest of the job file that reaches it by a hash of that.
    """
    reaches = tuple(getattr(job, name) for name in REACHES_SCRIPT if name != "run")
    settings = hashlib.sha256(to_json(reaches).encode()).hexdigest()
    return json.dumps({"code": PurePosixPath(code).name[:12], "run": job.run, "settings": settings[:12]})


def _local_ranks(member: Member) -> str:
    """What the agent waits for: the last words of exactly these ranks."""
    gpus = member.job.resources.gpus
    return " ".join(str(r) for r in range(member.rank * gpus, (member.rank + 1) * gpus))


def _worlds(resources: Resources) -> str:
    """On how many ranks the job may train: what cannot be divided so is found at the first start already."""
    return " ".join(str(nodes * resources.gpus) for nodes in range(resources.least, resources.nodes + 1))


def _shutdown_s(job: Job) -> int:
    directory = job.checkpoint.directory
    return _SAVING_S if directory is not None and directory.on_notice is not OnNotice.NONE else _SHUTDOWN_TIMEOUT_S


def _once(member: Member) -> dict[str, str]:
    return {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(len(member.places)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(member.rank),
        "MASTER_ADDR": member.master,
        "MASTER_PORT": str(member.start.port),
    }


def _mpi(member: Member) -> dict[str, str]:
    return {
        "NODE_RANK": str(member.rank),
        "MASTER_ADDR": member.master,
        "MASTER_PORT": str(member.start.port),
        "GPUCLOUD_CODE": member.place.code,
        "GPUCLOUD_JOB_PYTHON": member.python,
        **({} if member.job.image else {"GPUCLOUD_JOB_BIN": str(PurePosixPath(member.place.python).parent)}),
        **({"GPUCLOUD_RANKS": _local_ranks(member)} if isinstance(member.form, Script) else {}),
        **({SECRET: member.start.secret} if len(member.places) > 1 else {}),
    }


def _tf_config(member: Member) -> str:
    """Return the workers in one order on all, and which is ours (TensorFlow, "Multi-worker training with Keras")."""
    workers = [f"{place.node.private_address}:{member.start.port}" for place in member.places]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": member.rank}})


def _cadence(policy: CheckpointPolicy) -> str:
    if policy.every_steps is not None:
        return f"steps:{policy.every_steps}"
    return "auto" if policy.every is None else f"{policy.every.total_seconds():.15g}"
