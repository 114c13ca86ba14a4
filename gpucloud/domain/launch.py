"""The command line and environment of every member of an attempt."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpucloud.domain.agentstatus import Launch
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import CheckpointPolicy, Cloud, Job
from gpucloud.domain.node import Node

# $0 is the folder of the job's Python, so that `python` and what `setup` installed are found; each worker's output is
# a file of its own, so that a rank's traceback is not mixed with the others' and no pipe breaks with the connection.
_WORKER = 'PATH="$0:$PATH"; export PATH; exec "$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1'

# Where collectives listen; the agent fills in what the cloud did not say.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# A member that never comes would else be waited for 10 minutes; slow disks need most of this for their first import.
_RENDEZVOUS_TIMEOUT_S = 300
# From SIGTERM to SIGKILL for the ranks of a node where one has left or failed. Given by environment (torchrun reads
# PET_<OPTION>), because torch before 2.9 refuses an option that it does not know.
_SHUTDOWN_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A member: its node, and where bootstrap and sync put things on it (absolute paths)."""

    node: Node
    python: str
    package: str
    code: str
    root: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What is the same for every member; `port` is drawn anew for each attempt, `checkpoints` is a key prefix."""

    number: int
    port: int
    store_url: str
    checkpoints: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A Python script: torchrun starts it once a GPU. Its words arrive byte for byte."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """Anything else: started once a node, with the rank variables set."""

    words: tuple[str, ...]


def parse_run(run: str) -> Script | CommandLine:
    """Return the form of a job's `run:`; UsageError when it cannot be split, or a script's line needs a shell."""
    try:
        words = tuple(shlex.split(run))
    except ValueError as error:
        raise UsageError(f"run: {error}: {run}", hint="close the quote") from error
    if not words:
        raise UsageError("run: is empty", hint="run: train.py")
    if not words[0].endswith(".py"):
        return CommandLine(words=("/bin/sh", "-c", run) if _needs_shell(run) else words)
    if _needs_shell(run):
        raise UsageError(
            f"run: a script is started without a shell, but its line holds characters for one: {run}",
            hint="put 'single quotes' around words with $ ` * ? [ ] { } ~ # | & ; < > ( )",
        )
    return Script(words=words)


def launches(
    job: Job, start: AttemptStart, places: tuple[Place, ...], secrets: Mapping[str, str]
) -> tuple[Launch, ...]:
    """Return one launch per member, in rank order; member 0's private address is the rendezvous.

    Static rendezvous by IP without restarts: torchrun's elasticity hangs when a node joins again, so that a new
    membership is always a new attempt.
    """
    form = parse_run(job.run)
    members = [
        _Member(form=form, job=job, start=start, places=places, rank=rank, secrets=secrets)
        for rank in range(len(places))
    ]
    return tuple(
        Launch(
            attempt=start.number,
            argv=_argv(member),
            directory=member.place.code,
            env=_env(member),
            address=member.place.node.private_address,
        )
        for member in members
    )


def attempt_folder(root: str, number: int) -> str:
    """Return the folder of an attempt below the agent's root."""
    return f"{root}/attempts/{number:04d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """All that decides one member's launch."""

    form: Script | CommandLine
    job: Job
    start: AttemptStart
    places: tuple[Place, ...]
    rank: int
    secrets: Mapping[str, str]

    @property
    def place(self) -> Place:
        return self.places[self.rank]

    @property
    def master(self) -> str:
        return self.places[0].node.private_address


def _argv(member: _Member) -> tuple[str, ...]:
    python = member.place.python
    worker = ("/bin/sh", "-c", _WORKER, str(PurePosixPath(python).parent))
    match member.form:
        case CommandLine(words=words):
            return (*worker, *words)
        case Script(words=words):
            return (
                *(python, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(member.places)), "--node-rank", str(member.rank)),
                *("--nproc-per-node", str(member.job.resources.gpus)),
                *("--master-addr", member.master, "--master-port", str(member.start.port)),
                *("--rdzv-conf", f"timeout={_RENDEZVOUS_TIMEOUT_S}"),
                *("--max-restarts", "0", "--monitor-interval", "0.1", "--no-python"),
                # Without `--`, argparse takes the script's own `--m 3` for an ambiguous option of torchrun.
                *("--", *worker, python, "-u", *words),
            )


def _env(member: _Member) -> tuple[tuple[str, str], ...]:
    job, start, place = member.job, member.start, member.place
    wanted = {"OMP_NUM_THREADS": "1", **dict(job.env), **member.secrets}
    if job.cloud is Cloud.AWS:  # boto3 finds no region on a machine by itself
        wanted.setdefault("AWS_DEFAULT_REGION", place.node.pool.region)
    path = wanted.get("PYTHONPATH")
    ours = {
        "PYTHONPATH": f"{place.package}:{path}" if path else place.package,
        "PYTHONUNBUFFERED": "1",
        **(dict.fromkeys(INTERFACE_VARIABLES, place.node.interface) if place.node.interface else {}),
        **({"CUDA_VISIBLE_DEVICES": ",".join(place.node.devices)} if place.node.devices else {}),
        "GPUCLOUD_STORE": start.store_url,
        "GPUCLOUD_CHECKPOINTS": start.checkpoints,
        "GPUCLOUD_CHECKPOINT_EVERY": _cadence(job.checkpoint),
        "GPUCLOUD_CHECKPOINT_KEEP": str(job.checkpoint.keep),
        "GPUCLOUD_JOB": job.name,
        "GPUCLOUD_ATTEMPT": str(start.number),
        "GPUCLOUD_ATTEMPT_DIR": attempt_folder(place.root, start.number),
    }
    return tuple(sorted({**wanted, **ours, **_ranks(member)}.items()))


def _ranks(member: _Member) -> dict[str, str]:
    match member.form:
        case Script():
            gpus = member.job.resources.gpus
            # What the agent waits for: the last words of exactly these ranks.
            local = " ".join(str(r) for r in range(member.rank * gpus, (member.rank + 1) * gpus))
            return {"GPUCLOUD_RANKS": local, "PET_SHUTDOWN_TIMEOUT": str(_SHUTDOWN_TIMEOUT_S)}
        case CommandLine():
            return {
                "RANK": str(member.rank),
                "WORLD_SIZE": str(len(member.places)),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "NODE_RANK": str(member.rank),
                "MASTER_ADDR": member.master,
                "MASTER_PORT": str(member.start.port),
            }


def _cadence(policy: CheckpointPolicy) -> str:
    if policy.every_steps is not None:
        return f"steps:{policy.every_steps}"
    return "auto" if policy.every is None else f"{policy.every.total_seconds():.15g}"


def _needs_shell(run: str) -> bool:
    """Whether a shell would do more with the text than split it into words."""
    text = re.sub(r"\\.|'[^']*'", "", run, flags=re.DOTALL)
    if "$" in text or "`" in text:
        return True
    return re.search(r"[|&;<>()*?\[\]{}~#\n]|^\s*\w+=", re.sub(r'"[^"]*"', "", text)) is not None
