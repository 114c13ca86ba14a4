"""What a node says of itself: what it is asked, how its commands answer, what a later node must have to be the same."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.container import ImageFact
from gpucloud.domain.node.gate.report import GateFact
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.node.layer import LayerWanted
from gpucloud.domain.node.machine.facts import MachineFact
from gpucloud.domain.untrusted import in_one_line, lines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the node's `facts` command is asked, on its standard input.

    `layer` is what the job wants of its Python, None if it takes the base's as it is. `data` are the keys of data sets,
    `image` the job's container image. `visit`: a supervisor asks, and not the node itself.
    """

    layer: LayerWanted | None = None
    data: tuple[str, ...] = ()
    image: str = ""
    visit: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The job's own environment; `torch` and `boto3` are their versions for its Python.

    `torch_cuda` is what its torch was built for, None: the CPU; `torch_backend` whose builds uv was to take.
    `uv` is the version that was there for it, None: pip did. `packages` is what was installed into it, as `pip freeze`
    says it.
    """

    key: str
    python: str
    ready: bool
    torch: str | None
    boto3: str | None = None
    torch_cuda: str | None = None
    torch_backend: str = ""
    uv: str | None = None
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a node is and has, from one call of the package's `facts`.

    `python` is the base interpreter (GPUCLOUD_PYTHON on the node, else `python3`), `torch` and `boto3` their versions
    there, `torch_cuda` the CUDA of that torch, `packages` what the base has; `package` is the SHA-256 of the zip that
    answered; `gpus` is None where there is no `nvidia-smi`, `gpu_fault` is what it said when it failed, and
    `on_the_bus` how many NVIDIA devices there are, whatever their driver says;
    `stand_in` says that they are named by an emulated machine and not there;
    `agent_package` is the zip of the agent that runs, if one does. `machine` is how its driver and system software were
    left on this boot, `gate` what its last check on this boot said, `staged` the keys of the data sets that are whole,
    `image` the job's image if it was pulled. `boots_itself`: its own bootstrap is under way.
    `controller_package` is the zip of the job's driver, if one runs.
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
    torch_cuda: str | None = None
    packages: tuple[str, ...] = ()
    machine: MachineFact | None = None
    staged: tuple[str, ...] = ()
    gate: GateFact | None = None
    image: ImageFact | None = None
    boots_itself: bool = False
    stand_in: bool = False
    controller_package: str | None = None
    on_the_bus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """A node without our package, or whose Python is too old to read it; `python` is None where there is none."""

    python: str | None
    version: tuple[int, ...] | None


def parse_facts(stdout: bytes) -> Facts | Bare:
    """Return what the node answered; the last line counts (a login banner may come first). Raises Malformed."""
    lines = stdout.strip().splitlines()
    last = lines[-1] if lines else b""
    try:
        return from_json(Facts, last)
    except Malformed:
        return from_json(Bare, last)


# Asking a node for its facts, and putting the package there that answers.


PROBE_LIMIT_S = 120.0
"""How long facts may take: an nvidia-smi that does not answer is a fact, and has a minute of its own (`smi`)."""

# $1 is the package's SHA-256, $2 the agent's folder from the home; the question comes on standard input. One round trip
# answers everything; a package that cannot run (a damaged disk) is as good as none.
PROBE = """\
py="${GPUCLOUD_PYTHON:-python3}"; root="$HOME/$2"; zip="$root/lib/gpucloud-$1.zip"
command -v "$py" >/dev/null || { echo '{"python": null, "version": null}'; exit 0; }
[ -f "$zip" ] && "$py" "$zip" facts --root "$root" && exit 0
exec "$py" -c 'import sys, json; print(json.dumps({"python": sys.executable, "version": sys.version_info[:3]}))'
"""

# The rename comes after the hash: a connection that breaks in the middle leaves no package behind.
_RECEIVE = """\
import hashlib, os, sys
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != sys.argv[1]:
    sys.exit("the package arrived torn")
folder = os.path.join(os.path.expanduser("~"), sys.argv[2], "lib")
os.makedirs(folder, mode=0o700, exist_ok=True)
path = os.path.join(folder, "gpucloud-%s.zip" % sys.argv[1])
with open("%s.%d" % (path, os.getpid()), "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
os.replace(file.name, path)
"""


def probe(sha256: str, root: str) -> tuple[str, ...]:
    """Return the command that answers with facts, if the package with this hash is there; `question` is its input.

    `root` is the agent's folder, from the login's home (`Node.root`).
    """
    return ("/bin/sh", "-c", PROBE, "sh", sha256, root)


def question(wanted: Wanted, *, visit: bool = True) -> bytes:
    """Return what the node is asked for this job; `visit` says that a supervisor asks."""
    data = tuple(one.key for one in wanted.data)
    image = wanted.image.reference if wanted.image else ""
    return to_json(Asked(layer=wanted.layer, data=data, image=image, visit=visit)).encode()


def ship(python: str, sha256: str, root: str) -> tuple[str, ...]:
    """Return the command that puts the package, its standard input, on the node, whole or not at all."""
    return (python, "-c", _RECEIVE, sha256, root)


def awaiting(python: str, root: str, sha256: str) -> tuple[str, ...]:
    """Return the command that ends when the node's own bootstrap has ended."""
    return (python, package_path(root, sha256), "await", "--root", root)


def package_path(root: str, sha256: str) -> str:
    """Return where the package lies below the agent's root."""
    return f"{root}/lib/gpucloud-{sha256}.zip"


# How a command that a step runs on the node says how it ended: its exit code, and a last line that names why.


REFUSED = 102
"""The exit code of a command that knows why the node will not do: no repetition mends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command said: `said` for the user, a hint if there is one, what it did and the seconds that took."""

    said: str
    hint: str = ""
    steps: tuple[tuple[str, float], ...] = ()


def parse_answer(stdout: bytes) -> Answer | None:
    """Return the answer in the last line; None when there is none."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(Answer, lines[-1]) if lines else None
    except Malformed:
        return None


SETUP_FAILED = 103
"""The exit code of the command that runs the job's own setup, where that failed; its last line is a FailedSetup."""

_SHOWN_LINES, _COMMAND_LETTERS, _LINE_LETTERS = 20, 300, 300

SETUP_LOG_BYTES = 256 << 10
"""Of a failed setup's log that a node hands over: its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedSetup:
    """A command of the job's setup that failed, its exit code, and the end of all that the setup wrote."""

    command: str
    exit_code: int
    log: str

    def __str__(self) -> str:
        return f"`{in_one_line(self.command)[:_COMMAND_LETTERS]}` ended with exit code {self.exit_code}"

    def shown(self) -> str:
        """Return what failed, and the last lines of what it wrote."""
        return "\n".join([f"{self}:", *self.log.splitlines()[-_SHOWN_LINES:]])

    def in_short(self) -> str:
        """Return what failed, and the last line of what it wrote, in one line."""
        last = next((line for line in reversed(lines_of(self.log)) if line.strip()), "")
        return f"{self}: {last.strip()[:_LINE_LETTERS]}" if last else str(self)


def parse_failed_setup(stdout: bytes) -> FailedSetup | None:
    """Return what the last line says of a setup; None when it says something else."""
    lines = stdout.strip().splitlines()
    try:
        return from_json(FailedSetup, lines[-1]) if lines else None
    except Malformed:
        return None


# What a later node must have to be the same.


def lock_record(facts: Facts, wanted: Wanted) -> dict[str, object]:
    """Return what a later node must have to be the same, as JSON values; no secrets, and nothing of this node alone."""
    layer = facts.layer
    machine = facts.machine
    return {
        "version": 1,
        "package": facts.package,
        "python": ".".join(str(part) for part in facts.version),
        "torch": layer.torch if layer else facts.torch,
        "setup": wanted.setup,
        "setup_digest": wanted.setup_digest if wanted.setup else None,
        "conda": wanted.conda,
        "layer": layer.key if layer else None,
        "torch_cuda": layer.torch_cuda if layer else facts.torch_cuda,
        "torch_backend": layer.torch_backend if layer else None,
        "uv": layer.uv if layer else None,
        "packages": list(layer.packages) if layer else [],
        "base_packages": list(facts.packages),
        "image": facts.image.pinned if facts.image else None,
        "machine": dict(machine.versions) if machine else None,
        "gpus": [{"name": g.name, "memory_mib": g.memory_mib, "driver": g.driver} for g in facts.gpus or ()],
        "gate": dict(facts.gate.figures) if facts.gate is not None and wanted.gate is not None else None,
    }


def attempt_lock(locks: dict[str, dict[str, object]], seconds: dict[str, dict[str, float]]) -> dict[str, object]:
    """Return one record for an attempt's nodes: those that are made alike stand together; JSON values.

    `seconds` says how long each phase took, by node.
    """
    machines: list[dict[str, object]] = []
    for node_id, lock in locks.items():
        alike = next((one for one in machines if one["lock"] == lock), None)
        if alike is None:
            machines.append({"nodes": [node_id], "lock": lock})
        else:
            alike["nodes"] = [*_listed(alike["nodes"]), node_id]
    return {"version": 1, "machines": machines, "seconds": {name: dict(took) for name, took in seconds.items()}}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []
