"""The command line of a member, for each launcher."""

from __future__ import annotations

from pathlib import PurePosixPath

from gpucloud.domain.checkpoint.directory.layouts import KeepOrder, Rule
from gpucloud.domain.codec import to_json
from gpucloud.domain.job.spec import Cloud, Launcher
from gpucloud.domain.node.launch.member import CommandLine, Member, Script, attempt_folder, workers_per_node

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

# The embedded fleet's is torchrun with a store that the network does not reach (gpucloud.probe.telling).
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


# The words that start the keeper of a script's own checkpoint directory, before the launcher's own.


def keeper_of(member: Member) -> tuple[str, ...]:
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
    )
    return (place.python, place.package, "keep", "--root", place.root, "--order", to_json(order), "--")
