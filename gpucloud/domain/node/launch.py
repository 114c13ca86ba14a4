"""The command line and environment of every member of an attempt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gpucloud.domain.checkpoint.layouts import Additions, KeepOrder, Rule, additions_of
from gpucloud.domain.codec import plain, to_json
from gpucloud.domain.job.data import variables
from gpucloud.domain.job.spec import NOT_IN_FILE, CheckpointPolicy, Cloud, Job, Launcher, OnNotice, Resources
from gpucloud.domain.node.container import ContainerRun, Mount
from gpucloud.domain.node.hardware import on_interface
from gpucloud.domain.node.member import (
    AttemptStart,
    CommandLine,
    Member,
    Place,
    Script,
    attempt_folder,
    launcher_of,
    parse_run,
    runs_in_shell,
    workers_per_node,
)
from gpucloud.domain.node.status import Launch
from gpucloud.domain.variables import (
    GPUCLOUD_ATTEMPT,
    GPUCLOUD_ATTEMPT_DIR,
    GPUCLOUD_ATTEMPT_SECRET,
    GPUCLOUD_CHECKPOINT_DIRECTORY,
    GPUCLOUD_CHECKPOINT_EVERY,
    GPUCLOUD_CHECKPOINT_KEEP,
    GPUCLOUD_CHECKPOINTS,
    GPUCLOUD_CODE,
    GPUCLOUD_JOB,
    GPUCLOUD_JOB_BIN,
    GPUCLOUD_JOB_PYTHON,
    GPUCLOUD_PROFILE_STEPS,
    GPUCLOUD_RANKS,
    GPUCLOUD_RECIPE,
    GPUCLOUD_RESUME_ARGS,
    GPUCLOUD_STORE,
    GPUCLOUD_TRIAL,
    GPUCLOUD_WORLDS,
)


def launches(
    job: Job, start: AttemptStart, places: tuple[Place, ...], secrets: Mapping[str, str]
) -> tuple[Launch, ...]:
    """Return one launch per member, in rank order; see `launch_of`."""
    return tuple(launch_of(rank, job, start, places, secrets) for rank in range(len(places)))


def launch_of(
    rank: int, job: Job, start: AttemptStart, places: tuple[Place, ...], secrets: Mapping[str, str]
) -> Launch:
    """Return the launch of the member of that rank; member 0's private address is the rendezvous.

    Static rendezvous by IP without restarts: torchrun's elasticity hangs when a node joins again, so that a new
    membership is always a new attempt.
    """
    form, launcher = parse_run(job.run), launcher_of(job)
    member = Member(form=form, launcher=launcher, job=job, start=start, places=places, rank=rank, secrets=secrets)
    return Launch(
        attempt=start.number,
        argv=argv_of(member),
        directory=member.place.code,
        env=env_of(member),
        address=member.place.node.private_address,
        hidden=tuple(sorted((*secrets, SECRET))),
        container=_container(member),
        wrapper=wrapper_of(member),
        metrics=job.metrics,
        passed=tuple(name for name, _ in _additions(job).variables),
        sharing=sharing(job, len(places)),
        outputs=bool(job.outputs),
    )


def _container(member: Member) -> ContainerRun | None:
    job, place, number = member.job, member.place, member.start.number
    if job.image is None:
        return None
    store = urlsplit(member.start.store_url)
    home = f"{place.root}/home"  # of the node and not of the attempt: what was downloaded into it is there for the next
    local_store = (Mount(path=unquote(store.path)),) if store.scheme in ("", "file") else ()
    return ContainerRun(
        name=f"gpucloud-{job.name}-{number}-{member.rank}",
        image=place.image or job.image,
        runtime=job.container.runtime,
        devices=place.node.devices[: job.resources.gpus],
        gpus=job.resources.gpus,
        home=home,
        mounts=(
            Mount(path=place.code),
            Mount(path=home),
            Mount(path=attempt_folder(place.root, number)),
            Mount(path=place.package, read_only=True),
            *(Mount(path=target) for _, target in job.data),
            *local_store,
        ),
    )


# The command line of a member, for each launcher.


# $0 is the folder of the job's Python, so that `python` and what `setup` installed are found; each worker's output is
# a file of its own, so that a rank's traceback is not mixed with the others' and no pipe breaks with the connection.
_WORKER = 'PATH="$0:$PATH"; export PATH; exec "$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1'

# mpirun gives every node the same line, so that what differs from node to node is in variables; the ranks get the
# names that torch and gpucloud.resume read. A rank that saved and left must not look like a failure: mpirun would kill
# the others in the middle of their leaving.
_MPI_WORKER = """RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
TMPDIR=${GPUCLOUD_TMPDIR:-/tmp}; export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE TMPDIR
cd "$GPUCLOUD_CODE" || exit
"$@" >>"$GPUCLOUD_ATTEMPT_DIR/rank-$RANK.log" 2>&1; code=$?
test $code = 75 && test -e "$GPUCLOUD_ATTEMPT_DIR/left-$RANK.json" && exit 0; exit $code"""
_MPI_SCRIPT = 'exec "$GPUCLOUD_JOB_PYTHON" -u "$@"'

# The embedded fleet's is torchrun with a store that the network does not reach (gpucloud.probe.torchrun).
_TORCHRUN, _LOCAL_TORCHRUN = "torch.distributed.run", "gpucloud.probe.torchrun"

# A member that never comes would else be waited for 10 minutes; slow disks need most of this for their first import.
RENDEZVOUS_TIMEOUT_S = 300

# Where gpucloud.resume is used, it marks the steps by cudaProfilerStart and Stop; any other code is watched for ten
# seconds after half a minute. Either way the script goes on (nsys's guide, "CLI Profile Command Switch Options").
_NSYS = """command -v nsys >/dev/null 2>&1 || exec "$@"
mkdir -p "$GPUCLOUD_ATTEMPT_DIR/profile"
if grep -rqsF --include='*.py' gpucloud .
then window='--capture-range=cudaProfilerApi --capture-range-end=stop'; else window='--delay=30 --duration=10'; fi
exec nsys profile --force-overwrite=true --sample=none --kill=none $window \\
  --output="$GPUCLOUD_ATTEMPT_DIR/profile/rank-$RANK" "$@\""""


def argv_of(member: Member) -> tuple[str, ...]:
    """Return the words that the node's agent starts; no secret is among them."""
    match member.launcher:
        case Launcher.TORCHRUN | Launcher.AUTO:
            return _torchrun(member)
        case Launcher.MPI:
            return _mpi(member)
        case Launcher.TENSORFLOW | Launcher.PLAIN:
            return (*_worker(member), *_profiled(member), *_words(member))


def _torchrun(member: Member) -> tuple[str, ...]:
    return (
        *(member.python, "-m", _LOCAL_TORCHRUN if member.job.cloud is Cloud.LOCAL else _TORCHRUN),
        *("--nnodes", str(len(member.places)), "--node-rank", str(member.rank)),
        *("--nproc-per-node", str(member.job.resources.gpus)),
        *("--master-addr", member.master, "--master-port", str(member.start.port)),
        *("--rdzv-conf", f"timeout={RENDEZVOUS_TIMEOUT_S}"),
        *("--max-restarts", "0", "--monitor-interval", "0.1", "--no-python"),
        # Without `--`, argparse takes the script's own `--m 3` for an ambiguous option of torchrun.
        *("--", *_worker(member), *_profiled(member), *_words(member)),
    )


def _mpi(member: Member) -> tuple[str, ...]:
    script = ("/bin/sh", "-c", _MPI_SCRIPT, "python") if isinstance(member.form, Script) else ()
    return (
        *(member.python, member.place.package, "mpi"),
        *("--rank", str(member.rank), "--nodes", str(len(member.places))),
        *("--slots", str(member.job.resources.gpus), "--head", member.master, "--port", str(member.start.port)),
        *("--", "/bin/sh", "-c", _MPI_WORKER, "worker", *_profiled(member), *script, *member.form.words),
    )


def _worker(member: Member) -> tuple[str, ...]:
    folder = "/usr/local/bin" if member.job.image else str(PurePosixPath(member.place.python).parent)
    return ("/bin/sh", "-c", _WORKER, folder)


def _profiled(member: Member) -> tuple[str, ...]:
    return ("/bin/sh", "-c", _NSYS, "nsys") if member.start.profile_steps else ()


def _words(member: Member) -> tuple[str, ...]:
    match member.form:
        case Script(words=words):
            return (member.python, "-u", *words)
        case CommandLine(words=words):
            return words


# The words that start the watcher of a script's own checkpoint directory, before the launcher's own.


def wrapper_of(member: Member) -> tuple[str, ...]:
    """Return the words, none for a job that names no directory. Outside of a container: an image need not have us."""
    job, place, start = member.job, member.place, member.start
    kept = job.checkpoint.directory
    if kept is None:
        return ()
    ranks, nodes = workers_per_node(job), len(member.places)
    order = KeepOrder(
        code=place.code,
        directory=str(PurePosixPath(place.code) / kept.path),
        rule=Rule(
            layout=kept.layout,
            done_file=kept.done_file,
            ranks=ranks,
            nodes=nodes,
            per_node=kept.per_node and nodes > 1,
            node=member.rank,
        ),
        on_notice=kept.on_notice,
        settle=kept.settle,
        store=start.store_url,
        prefix=start.checkpoints,
        attempt=start.number,
        keep=job.checkpoint.keep,
        rank=member.rank,
        folder=attempt_folder(place.root, start.number),
        first_rank=member.rank * ranks,
        additions=_additions(job),
        save=start.save,
        upload=start.upload,
        outputs=() if kept.per_node and nodes > 1 else job.outputs,
        brings=bool(job.outputs),
    )
    return (place.python, place.package, "keep", "--root", place.root, "--order", to_json(order), "--")


def _additions(job: Job) -> Additions:
    """Return what the watcher adds to the launch: only a shell's line has words elsewhere than at its end."""
    added = additions_of(job.checkpoint.directory)
    if not added.words or not runs_in_shell(job):
        return added
    return Additions(variables=(*added.variables, (GPUCLOUD_RESUME_ARGS, " ".join(added.words))))


# The environment of a member: the user's variables, ours where the user says nothing, and the ranks.


SECRET = GPUCLOUD_ATTEMPT_SECRET
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
        GPUCLOUD_STORE: start.store_url,
        GPUCLOUD_CHECKPOINTS: start.checkpoints,
        GPUCLOUD_CHECKPOINT_EVERY: _cadence(job.checkpoint),
        GPUCLOUD_CHECKPOINT_KEEP: str(job.checkpoint.keep),
        GPUCLOUD_RECIPE: recipe(job, place.code),
        GPUCLOUD_JOB: job.name,
        GPUCLOUD_ATTEMPT: str(start.number),
        GPUCLOUD_ATTEMPT_DIR: attempt_folder(place.root, start.number),
        **variables(tuple(target for _, target in job.data), place.root, below_root=job.cloud is Cloud.LOCAL),
        **({GPUCLOUD_CHECKPOINT_DIRECTORY: job.checkpoint.directory.path} if job.checkpoint.directory else {}),
        **({GPUCLOUD_RESUME_ARGS: ""} if GPUCLOUD_RESUME_ARGS in dict(_additions(job).variables) else {}),
        **({GPUCLOUD_TRIAL: job.trial} if job.trial else {}),
        **({GPUCLOUD_PROFILE_STEPS: str(start.profile_steps)} if start.profile_steps else {}),
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
                GPUCLOUD_RANKS: _local_ranks(member),
                "PET_SHUTDOWN_TIMEOUT": str(_shutdown_s(member.job)),
                **({GPUCLOUD_WORLDS: _worlds(member.job.resources)} if member.job.resources.is_range else {}),
            }
        case Launcher.MPI:
            return _mpi_environment(member)
        case Launcher.PLAIN:
            return _once(member)
        case Launcher.TENSORFLOW:
            return {**_once(member), "TF_CONFIG": _tf_config(member)}


REACHES_SCRIPT = ("run", "launcher", "setup", "image", "conda", "env", "data")
"""The keys of a job file that reach its script: with another value of one, a resume is not exact."""


_UNREAD_BY_SCRIPTS = (
    *("budget_usd", "deadline", "policy", "idle", "hold", "tags"),
    *("cloud", "aws", "ssh", "store", "secrets"),  # they may be others where a known job is gone on with
)
"""The keys of a job file beside its script of which it is taken that no script computes with them."""


def reaching(job: Job, code_sha256: str) -> tuple[str, ...]:
    """Return the keys that reach its script: of a file that lies in the code, which a script can read, almost all.

    A trial has another name and budget than what its script can read there, and than the trial that it is compared to.
    """
    if job.own_code_sha256 in ("", code_sha256) or job.trial:
        return REACHES_SCRIPT
    return tuple(one.name for one in fields(Job) if one.name not in (*_UNREAD_BY_SCRIPTS, *NOT_IN_FILE, "code"))


def recipe(job: Job, code: str) -> str:
    """Return what a script is made of, as JSON: what a resume compares, for it is exact with the very same alone.

    Its code by its tree's hash, the job file apart where that is known, its command line, and the rest of the job file
    that reaches it by a hash of that.
    """
    tree = PurePosixPath(code).name
    names = {*reaching(job, tree)} - {"run"}
    said = json.dumps(_said(job, (one for one in fields(Job) if one.name in names)), sort_keys=True)
    settings = hashlib.sha256(said.encode()).hexdigest()
    tree = job.own_code_sha256 or tree
    return json.dumps({"code": tree[:12], "run": job.run, "settings": settings[:12]})


def script_of(job: Job) -> str:
    """Return what tells the job's script, and how it is started, from any other, by a hash: orders differ in less."""
    said = _said(job, (one for one in fields(Job) if one.name in (*REACHES_SCRIPT, "own_code_sha256")))
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]


def _said(value: Any, among: Iterable[Field[Any]] | None = None) -> Any:
    """Return the values that are no defaults, by their names: a key that comes with a later version changes nothing."""
    if not is_dataclass(value):
        return plain(value)
    found = ((one, getattr(value, one.name)) for one in (fields(value) if among is None else among))
    return {one.name: _said(said) for one, said in found if said != _default_of(one)}


def _default_of(one: Field[Any]) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


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


def _mpi_environment(member: Member) -> dict[str, str]:
    return {
        "NODE_RANK": str(member.rank),
        "MASTER_ADDR": member.master,
        "MASTER_PORT": str(member.start.port),
        GPUCLOUD_CODE: member.place.code,
        GPUCLOUD_JOB_PYTHON: member.python,
        **({} if member.job.image else {GPUCLOUD_JOB_BIN: str(PurePosixPath(member.place.python).parent)}),
        **({GPUCLOUD_RANKS: _local_ranks(member)} if isinstance(member.form, Script) else {}),
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
