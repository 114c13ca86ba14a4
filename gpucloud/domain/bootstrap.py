"""Bootstrap as facts and steps: what a node must have for a job, and the commands that give it what it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import NodeError
from gpucloud.domain.layer import BOTO3, suffices

MINIMUM_PYTHON = (3, 10)
MINIMUM_FREE_BYTES = 1 << 30
_TOLERATED_SKEW = timedelta(seconds=2)
_SETUP_TIMEOUT_S = 3600.0
# The cloud's schedule ends the group at that time, and may take a minute: a node that went before would be replaced.
_POWER_OFF_AFTER_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA device, as `nvidia-smi` lists it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The environment that the job's `setup` fills; `torch` and `boto3` are their versions for its Python."""

    key: str
    python: str
    ready: bool
    torch: str | None
    boto3: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node is and has, from one call of the package's `facts`.

    `python` is the base interpreter (GPUCLOUD_PYTHON on the node, else `python3`), `torch` and `boto3` their versions
    there;
    `package` is the SHA-256 of the zip that answered; `gpus` is None where there is no `nvidia-smi`, and
    `gpu_fault` is what it said when it failed; `agent_package` is the zip of the agent that runs, if one does.
    """

    python: str
    version: tuple[int, ...]
    torch: str | None
    root: str
    package: str
    free_bytes: int
    cpus: int
    time: datetime
    boot_id: str
    gpus: tuple[Gpu, ...] | None
    gpu_fault: str | None
    agent_package: str | None
    agent_busy: bool
    layer: Layer | None
    boto3: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """A node without our package, or whose Python is too old to read it; `python` is None where there is none."""

    python: str | None
    version: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job needs of every node. `env` may hold secrets: it travels on standard input only.

    `power_off` is the command by which a node ends itself after its paid time, empty for none; `boto3` says that the
    job's store needs it.
    """

    package: str
    code: str
    setup: str | None
    setup_digest: str
    env: tuple[tuple[str, str], ...]
    torchrun: bool
    gpus: int
    asks_for_gpus: bool
    power_off: tuple[str, ...] = ()
    boto3: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a step runs on the node."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change: `needed` says why it must be made, or None; after `commands`, fresh facts must answer None.

    The facts are not asked again where the commands' own success says as much (`proves_itself`).
    """

    name: str
    proves_itself: bool = False
    needed: Callable[[Facts, Wanted], str | None]
    commands: Callable[[Facts, Wanted], tuple[Command, ...]]


# $1 is the package's SHA-256, $2 and $3 an option that names the job's layer. One round trip answers everything; a
# package that cannot run (a damaged disk) is as good as none.
_PROBE = """\
py="${GPUCLOUD_PYTHON:-python3}"; zip="$HOME/.gpucloud/lib/gpucloud-$1.zip"
command -v "$py" >/dev/null || { echo '{"python": null, "version": null}'; exit 0; }
[ -f "$zip" ] && "$py" "$zip" facts "$2" "$3" && exit 0
exec "$py" -c 'import sys, json; print(json.dumps({"python": sys.executable, "version": sys.version_info[:3]}))'
"""

# The rename comes after the hash: a connection that breaks in the middle leaves no package behind.
_RECEIVE = """\
import hashlib, os, sys
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != sys.argv[1]:
    sys.exit("the package arrived torn")
folder = os.path.expanduser("~/.gpucloud/lib")
os.makedirs(folder, mode=0o700, exist_ok=True)
path = os.path.join(folder, "gpucloud-%s.zip" % sys.argv[1])
with open("%s.%d" % (path, os.getpid()), "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
os.replace(file.name, path)
"""


def probe(wanted: Wanted) -> Command:
    """Return the command whose output `parse_probe` reads."""
    layer = ("--setup", wanted.setup_digest if wanted.setup else "")
    if wanted.boto3 and not wanted.setup:
        layer = ("--unless-boto3", wanted.setup_digest)
    return Command(argv=("/bin/sh", "-c", _PROBE, "sh", wanted.package, *layer))


def parse_probe(stdout: bytes) -> Facts | Bare:
    """Return what the node answered; the last line counts (a login banner may come first). Raises Malformed."""
    lines = stdout.strip().splitlines()
    last = lines[-1] if lines else b""
    try:
        return from_json(Facts, last)
    except Malformed:
        return from_json(Bare, last)


def ship(python: str, sha256: str, package: bytes) -> Command:
    """Return the command that puts the package on the node, whole or not at all."""
    return Command(argv=(python, "-c", _RECEIVE, sha256), stdin=package)


def package_path(root: str, sha256: str) -> str:
    """Return where the package lies below the agent's root."""
    return f"{root}/lib/gpucloud-{sha256}.zip"


def require_python(python: str | None, version: tuple[int, ...] | None) -> None:
    """Raise NodeError unless the node's base interpreter can run the package."""
    hint = "install Python 3.10 or newer on the node, or set GPUCLOUD_PYTHON there"
    if python is None or version is None:
        raise NodeError("no python3 on the node", hint=hint)
    if version < MINIMUM_PYTHON:
        found = ".".join(str(part) for part in version)
        raise NodeError(f"{python} is Python {found}; 3.10 is the oldest that works", hint=hint)


def check(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError for what no step can mend: a full disk, a GPU that is missing or does not answer."""
    if facts.free_bytes < MINIMUM_FREE_BYTES:
        raise NodeError(
            f"{facts.root}: {facts.free_bytes / 2**30:.2f} GiB free, 1 GiB is the least that works",
            hint="free some space there, or take nodes with a larger disk",
        )
    if facts.gpu_fault is not None:
        raise NodeError(f"nvidia-smi failed: {facts.gpu_fault}", hint="replace the node, or install its driver again")
    found = len(facts.gpus or ())
    if wanted.asks_for_gpus and found < wanted.gpus:
        raise NodeError(
            f"{found} NVIDIA devices, the job needs {wanted.gpus}",
            hint="lower `resources.gpus`, or leave out `gpu:` and `vram_gib:` to run on the CPU",
        )


def check_torch(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when torchrun would not start: torch is neither in the layer nor in the base interpreter."""
    if wanted.torchrun and facts.torch is None and (facts.layer is None or facts.layer.torch is None):
        raise NodeError(
            f"no torch for {job_python(facts)}",
            hint="setup: pip install torch",
        )


def check_boto3(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when the job's Python could not reach the store: no boto3 that knows conditional writes."""
    found = facts.layer.boto3 if facts.layer else facts.boto3
    if wanted.boto3 and not suffices(found):
        said = f"boto3 {found}; {BOTO3} is needed" if found else "no boto3"
        raise NodeError(f"the store is in S3, and {job_python(facts)} has {said}", hint=f"setup: pip install '{BOTO3}'")


def findings(facts: Facts, skew: timedelta) -> tuple[str, ...]:
    """Return what the user should know of a node that works; `skew` is the node's clock minus the caller's."""
    found = []
    if not facts.gpus:
        found.append("no NVIDIA device: CPU, gloo")
    if abs(skew) > _TOLERATED_SKEW:
        side = "ahead of" if skew > timedelta(0) else "behind"
        found.append(f"the node's clock is {abs(skew).total_seconds():.0f} s {side} this machine's")
    return tuple(found)


def job_python(facts: Facts) -> str:
    """Return the interpreter that runs the job: the layer's, or the base one for a job that needs no layer."""
    return facts.layer.python if facts.layer else facts.python


def lock_record(facts: Facts, wanted: Wanted) -> dict[str, object]:
    """Return what a later node must have to be the same, as JSON values."""
    layer = facts.layer
    return {
        "version": 1,
        "package": facts.package,
        "python": ".".join(str(part) for part in facts.version),
        "torch": layer.torch if layer else facts.torch,
        "setup": wanted.setup,
        "setup_digest": wanted.setup_digest if wanted.setup else None,
        "layer": layer.key if layer else None,
        "gpus": [{"name": g.name, "memory_mib": g.memory_mib, "driver": g.driver} for g in facts.gpus or ()],
    }


def _agent_needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.agent_package is None:
        return "no agent runs"
    # An agent that runs another version is replaced when that costs nothing.
    if facts.agent_package != wanted.package and not facts.agent_busy:
        return "the agent runs another version"
    return None


def _agent_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    zip_path = package_path(facts.root, wanted.package)
    start = (facts.python, "-I", zip_path, "agent", "--root", facts.root, "--replace")
    if not wanted.power_off:
        return (Command(argv=start),)
    return (Command(argv=(*start, "--power-off-after", str(_POWER_OFF_AFTER_S), "--power-off", *wanted.power_off)),)


def _layer_needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.layer is None or facts.layer.ready:
        return None
    return "setup has not run here" if wanted.setup else "the store needs boto3"


def _layer_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    order = {
        "setup": wanted.setup or "",
        "digest": wanted.setup_digest,
        "code": wanted.code,
        "env": dict(wanted.env),
        "boto3": wanted.boto3,
    }
    return (
        Command(
            argv=(facts.python, package_path(facts.root, wanted.package), "layer"),
            stdin=json.dumps(order).encode(),
            timeout_s=_SETUP_TIMEOUT_S,
        ),
    )


STEPS = (
    # The command returns when the agent has written its first status.
    Step(name="agent", needed=_agent_needed, commands=_agent_commands, proves_itself=True),
    Step(name="setup", needed=_layer_needed, commands=_layer_commands),
)
