"""The steps that make a node fit, in their order: when each is needed, its commands, and what no step can mend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import NodeError
from gpucloud.domain.job.data import DataWanted
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.node.bootstrap.facts import Facts, package_path
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.gate.report import ENDPOINTS, LASTS, GateOrder, GateWanted, gate_digest
from gpucloud.domain.node.layer import BOTO3, TORCH, LayerOrder, suffices, why_no_gpu
from gpucloud.domain.node.machine.facts import digest
from gpucloud.domain.untrusted import in_one_line

REBOOT_WANTED = 101
"""The exit code of a command after which the node must boot anew before it can go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a step runs on the node; with `reboots`, exit code 101 asks for a reboot and for the command once more."""

    argv: tuple[str, ...]
    stdin: bytes = b""
    timeout_s: float = 60.0
    reboots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change: `needed` says why it must be made, or None; after `commands`, fresh facts must answer None.

    The facts are not asked again where the commands' own success says as much (`proves_itself`).
    """

    name: str
    proves_itself: bool = False
    needed: Callable[[Facts, Wanted], str | None]
    commands: Callable[[Facts, Wanted], tuple[Command, ...]]


# The step that gives a machine its driver and system software.


# Modules that are compiled take four minutes on two old cores, EFA's installer as long; a lock may be waited for too.
_MACHINE_TIMEOUT_S = 3600.0


def _machine_needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.machine is None:
        return None
    if facts.machine is None:
        return "its system software was not looked at since it booted"
    if facts.machine.digest != digest(wanted.machine):
        return "the job wants other system software"
    # The driver may have gone since: an upgrade under our feet, a GPU that fell off the bus.
    return facts.gpu_fault if wanted.machine.gpus else None


def _machine_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.machine is None:
        return ()
    argv = (facts.python, package_path(facts.root, wanted.package), "machine")
    return (Command(argv=argv, stdin=to_json(wanted.machine).encode(), timeout_s=_MACHINE_TIMEOUT_S, reboots=True),)


MACHINE = Step(name="machine", needed=_machine_needed, commands=_machine_commands)


# The step that makes the job's own Python environment.


_LAYER_TIMEOUT_S = 3600.0


def layer_hint(wanted: Wanted) -> str:
    """Return what to do about a layer that could not be made."""
    if wanted.setup is not None:
        return "mend `setup:` in the job file"
    if wanted.conda is not None:
        return f"mend {wanted.conda}, or install micromamba on the node's image"
    if wanted.torch:
        return f"let the nodes reach PyPI and PyTorch's index, name `mirrors:`, or take an image with {TORCH}"
    return f"let the nodes reach PyPI, or take an image whose Python has {BOTO3}: the store in S3 needs it"


def _layer_needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.layer is None or facts.layer.ready:
        return None
    if wanted.setup is not None or wanted.conda is not None:
        return "setup has not run here"
    return "the script needs torch" if wanted.torch and facts.torch is None else "the store needs boto3"


def _layer_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.layer is None:
        return ()
    order = LayerOrder(
        wanted=wanted.layer,
        setup=wanted.setup or "",
        code=wanted.code,
        conda=wanted.conda or "",
        env=wanted.env,
        pip_mirror=wanted.pip_mirror,
        torch_mirror=wanted.torch_mirror,
    )
    return (
        Command(
            argv=(facts.python, package_path(facts.root, wanted.package), "layer"),
            stdin=to_json(order).encode(),
            timeout_s=_LAYER_TIMEOUT_S,
        ),
    )


LAYER = Step(name="setup", needed=_layer_needed, commands=_layer_commands)


# The bootstrap's step for a job's container image: when it is needed, and what the node is told.


IMAGE_HINT = "correct `image:`, or name the secret with its registry's user:password in `container: {login: …}`"


def image_reason(facts: Facts, wanted: Wanted) -> str | None:
    """Return why the image must be pulled, None when it is there or none is wanted."""
    if wanted.image is None:
        return None
    return None if facts.image and facts.image.reference == wanted.image.reference else "the image is not here"


def image_order(wanted: Wanted) -> bytes:
    """Return what the node is told; it may hold the registry's password, so it travels on standard input."""
    assert wanted.image is not None  # noqa: S101  the step is needed only with one
    return to_json(wanted.image).encode()


# The step that lets a node with GPUs through the gate: once a boot, Python and driver.


GATE = "gate"
_GATE_TIMEOUT_S = 400.0


def gate_command(python: str, package: str, order: GateOrder) -> Command:
    """Return the command that checks a node; exit code 14 and its findings where it is not fit."""
    return Command(argv=(python, package, "gate"), stdin=to_json(order).encode(), timeout_s=_GATE_TIMEOUT_S)


def may_ask_root(wanted: Wanted) -> bool:
    """Whether the login may use sudo there: where gpucloud only looks, a refusal is reported to an administrator."""
    return wanted.machine is not None and wanted.machine.install


def endpoints(wanted: Wanted) -> tuple[tuple[str, str], ...]:
    """Return what the job itself says of the store's endpoint; of its environment nothing else, which has secrets."""
    return tuple(pair for pair in wanted.env if pair[0] in ENDPOINTS)


def _gate_needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.gate is None:
        return None
    if facts.gate is None:
        return "its GPUs were not checked on this boot, or something was reported of them since"
    if facts.gate.digest != _digest(facts, wanted, wanted.gate):
        return "its GPUs, its driver or what the job wants of them are not those of the last check"
    if facts.time - facts.gate.at > LASTS:
        return f"its GPUs were checked {(facts.time - facts.gate.at).days} days ago"
    return None


def _gate_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.gate is None:
        return ()
    order = GateOrder(
        wanted=wanted.gate,
        digest=_digest(facts, wanted, wanted.gate),
        python=job_python(facts),
        devices=wanted.devices,
        store=wanted.store_endpoint,
        env=endpoints(wanted),
        sudo=may_ask_root(wanted),
    )
    return (gate_command(facts.python, package_path(facts.root, wanted.package), order),)


def _digest(facts: Facts, wanted: Wanted, gate: GateWanted) -> str:
    return gate_digest(gate, job_python(facts), facts.gpus or (), wanted.devices)


GATE_STEP = Step(name=GATE, needed=_gate_needed, commands=_gate_commands)


# The step that has every data set of the job whole on the node.


_SLOWEST_BYTES_PER_S = 10e6
_BASE_TIMEOUT_S = 600.0


def lacking(facts: Facts, wanted: Wanted) -> tuple[DataWanted, ...]:
    """Return the sets that the node does not have."""
    return tuple(one for one in wanted.data if one.key not in facts.staged)


def data_command(do: str, one: DataWanted, facts: Facts, wanted: Wanted) -> Command:
    """Return the command for one set: `stage`, or `place` and `finish` (see `agent/data/staging.py`)."""
    order = {"key": one.key, "content": one.content, "target": one.target, "below_root": one.below_root}
    asked = to_json({"do": do, "order": order, "env": wanted.env if one.in_s3 else ()})
    return Command(
        argv=(job_python(facts), package_path(facts.root, wanted.package), "data", "--root", facts.root),
        stdin=asked.encode() + b"\n" + one.packed,
        timeout_s=_BASE_TIMEOUT_S + one.size / _SLOWEST_BYTES_PER_S,
    )


def _data_needed(facts: Facts, wanted: Wanted) -> str | None:
    sets = lacking(facts, wanted)
    return f"{sets[0].source} is not whole at {sets[0].target}" if sets else None


def _data_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    return tuple(data_command("stage", one, facts, wanted) for one in lacking(facts, wanted) if one.in_s3)


DATA = Step(name="data", needed=_data_needed, commands=_data_commands)


# The step that has a job's controller run on the node; of jobs that drive themselves.


_CONTROLLER_TIMEOUT_S = 900.0  # an interpreter that can drive may have to be made first


def _controller_needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.controller is None:
        return None  # one that runs ends by itself when its order is withdrawn
    if facts.controller_package is None:
        return "no controller runs"
    return None if facts.controller_package == wanted.package else "the controller runs another version"


def _controller_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    zip_path = package_path(facts.root, wanted.package)
    argv = (facts.python, "-I", zip_path, "drive", "--root", facts.root)
    return (Command(argv=argv, stdin=to_json(wanted.controller).encode(), timeout_s=_CONTROLLER_TIMEOUT_S),)


# The command returns when the controller has read its order.
CONTROLLER = Step(name="driver", needed=_controller_needed, commands=_controller_commands, proves_itself=True)


# The steps that make a node fit, in their order.


_PULL_TIMEOUT_S = 3600.0  # images with CUDA have 10 GB and more
# The cloud's schedule ends the group at that time, and may take a minute. Only where it did not does a node end itself,
# which lowers its group first, for as long as a minute: one that went alone would be replaced.
_POWER_OFF_AFTER_S = 60


def _agent_needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.agent_package is None:
        return "no agent runs"
    # An agent that runs another version is replaced when that costs nothing.
    if facts.agent_package != wanted.package and not facts.agent_busy:
        return "the agent runs another version"
    return None


def _agent_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    zip_path = package_path(facts.root, wanted.package)
    start: tuple[str, ...] = (facts.python, "-I", zip_path, "agent", "--root", facts.root, "--replace")
    if wanted.machine is not None and wanted.machine.efa and wanted.machine.install:
        start = (*start, "--lock-memory")
    if not wanted.power_off:
        return (Command(argv=start),)
    return (Command(argv=(*start, "--power-off-after", str(_POWER_OFF_AFTER_S), "--power-off", *wanted.power_off)),)


def _image_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    pull = (facts.python, package_path(facts.root, wanted.package), "image", "--root", facts.root)
    return (Command(argv=pull, stdin=image_order(wanted), timeout_s=_PULL_TIMEOUT_S),)


STEPS = (
    MACHINE,
    # The command returns when the agent has written its first status.
    Step(name="agent", needed=_agent_needed, commands=_agent_commands, proves_itself=True),
    Step(name="image", needed=image_reason, commands=_image_commands),
    LAYER,
    DATA,
    GATE_STEP,
    CONTROLLER,
)


# What no step can mend, and what the user should know of a node that works.


MINIMUM_PYTHON = (3, 10)
MINIMUM_FREE_BYTES = 1 << 30
_TOLERATED_SKEW = timedelta(seconds=2)


def require_python(python: str | None, version: tuple[int, ...] | None) -> None:
    """Raise NodeError unless the node's base interpreter can run the package."""
    hint = "install Python 3.10 or newer on the node, or set GPUCLOUD_PYTHON there"
    if python is None or version is None:
        raise NodeError("no python3 on the node", hint=hint)
    if version < MINIMUM_PYTHON:
        found = ".".join(str(part) for part in version)
        raise NodeError(f"{python} is Python {found}; 3.10 is the oldest that works", hint=hint)


def check(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError for what no step can mend: a full disk, a driver that does not answer a job without a gate."""
    if facts.free_bytes < MINIMUM_FREE_BYTES:
        raise NodeError(
            f"{facts.root}: {facts.free_bytes / 2**30:.2f} GiB free, 1 GiB is the least that works",
            hint="free some space there, or take nodes with a larger disk",
        )
    if facts.gpu_fault is not None and wanted.gate is None:
        raise NodeError(f"nvidia-smi failed: {facts.gpu_fault}", hint="replace the node, or install its driver again")


def check_torch(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when torchrun would not start: torch is neither in the layer nor in the base interpreter."""
    if wanted.torchrun and facts.torch is None and (facts.layer is None or facts.layer.torch is None):
        raise NodeError(
            f"no torch for {job_python(facts)}",
            hint="setup: uv pip install torch",
        )


def check_torch_build(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when the job's torch cannot use the GPUs that it asked for: it would run on the CPU."""
    reason = _idle_gpus(facts, wanted)
    if reason is not None and wanted.asks_for_gpus:
        is_bases = facts.layer is None or (facts.layer.torch, facts.layer.torch_cuda) == (facts.torch, facts.torch_cuda)
        again = "--reinstall " if is_bases else ""  # else uv is content with what the base has
        raise NodeError(reason, hint=f"setup: uv pip install {again}torch --torch-backend auto")


def check_boto3(facts: Facts, wanted: Wanted) -> None:
    """Raise NodeError when the job's Python could not reach the store: no boto3 that knows conditional writes."""
    found = facts.layer.boto3 if facts.layer else facts.boto3
    if wanted.boto3 and not suffices(found):
        said = f"boto3 {found}; {BOTO3} is needed" if found else "no boto3"
        hint = f"setup: uv pip install '{BOTO3}'"
        raise NodeError(f"the store is in S3, and {job_python(facts)} has {said}", hint=hint)


def findings(facts: Facts, wanted: Wanted, skew: timedelta) -> tuple[str, ...]:
    """Return what the user should know of a node that works.

    `skew` is the node's clock minus the caller's, zero unless that is wrong.
    """
    found = []
    idle = None if wanted.asks_for_gpus else _idle_gpus(facts, wanted)
    if not facts.gpus:
        found.append(f"{_no_gpu(facts)}: CPU, gloo")
    if idle is not None:
        found.append(f"{idle}: the job runs on the CPU")
    elif facts.gpus and wanted.gate is None and not facts.stand_in:
        many = counted(len(facts.gpus), "GPU")
        found.append(f"{many}, unchecked: the job file asks for none by `gpu:` or `vram_gib:`")
    found += facts.gate.remarks if facts.gate is not None and wanted.gate is not None else ()
    if skew:
        side = "ahead of" if skew > timedelta(0) else "behind"
        found.append(f"the node's clock is {abs(skew).total_seconds():.0f} s {side} this machine's")
    return tuple(found)


def _no_gpu(facts: Facts) -> str:
    if facts.gpu_fault is not None:
        return f"nvidia-smi failed: {in_one_line(facts.gpu_fault)}"
    if not facts.on_the_bus or facts.stand_in:
        return "no NVIDIA device"
    many = counted(facts.on_the_bus, "NVIDIA device")
    return f"{many} and no driver" if facts.gpus is None else f"{many}, hidden from the job"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A node's clock minus the caller's, by the middle of the question for it, and how unsure that leaves it.

    A busy node answers late, and may have read its clock at any moment of that time.
    """

    ahead: timedelta
    unsure: timedelta

    @property
    def wrong_by(self) -> timedelta:
        """Zero unless the clock differs by more than is unsure, and by more than anything minds."""
        return self.ahead if abs(self.ahead) - self.unsure > _TOLERATED_SKEW else timedelta(0)


def clock_reading(asked_at: datetime, told: datetime, answered_at: datetime) -> ClockReading:
    """Return what the node's `told` says of its clock, asked and answered at these times of the caller's."""
    half = (answered_at - asked_at) / 2
    return ClockReading(ahead=told - (asked_at + half), unsure=half)


def surest(*readings: ClockReading | None) -> ClockReading | None:
    """Return the reading by the shortest question; None without any."""
    return min((one for one in readings if one is not None), key=lambda one: one.unsure, default=None)


def _idle_gpus(facts: Facts, wanted: Wanted) -> str | None:
    """Why a script under torchrun would leave this node's GPUs unused; None where it would not, or was told to."""
    torch, cuda = (facts.layer.torch, facts.layer.torch_cuda) if facts.layer else (facts.torch, facts.torch_cuda)
    hidden = dict(wanted.env).get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if not facts.gpus or facts.stand_in or torch is None or hidden or not wanted.torchrun:
        return None
    return why_no_gpu(torch, cuda, _driver(facts))


def _driver(facts: Facts) -> str:
    return facts.gpus[0].driver if facts.gpus else ""


def job_python(facts: Facts) -> str:
    """Return the interpreter that runs the job: the layer's, or the base one for a job that needs no layer."""
    return facts.layer.python if facts.layer else facts.python
