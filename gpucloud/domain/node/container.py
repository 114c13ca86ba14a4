"""How a job's container image is run: Docker's and Apptainer's command lines."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.job.spec import ContainerRuntime

OF_THE_CLIENT = frozenset({"HOME", "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD"})
"""Variables by which the engine's own program is found, started and set up: a job's values of them are for its own."""

LABEL = "gpucloud.attempt"
"""The label of every container of ours; its value is the attempt's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageWanted:
    """The image that a node must have; `login` is `user:password` of its registry."""

    reference: str
    runtime: ContainerRuntime
    login: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFact:
    """The image that a node has: by which runtime, and `pinned`, what stands for exactly that content."""

    reference: str
    runtime: ContainerRuntime
    pinned: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A path that is the same inside as outside."""

    path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerRun:
    """The container of one member: what the node's agent needs to make its command line.

    `devices` are the node's GPUs that are the job's, empty for the first `gpus` of all. `home` is a folder of the node
    for what libraries keep, one of the `mounts`.
    """

    name: str
    image: str
    runtime: ContainerRuntime
    devices: tuple[str, ...]
    gpus: int
    mounts: tuple[Mount, ...]
    home: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What only the node knows: its runtime, whether it has NVIDIA's and EFA's devices, the login's ids and name."""

    runtime: ContainerRuntime
    nvidia: bool
    fabric: tuple[str, ...]
    user: int
    group: int
    login: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The variables that are in the container: the `names` with the values that the engine's program has, and others.

    What is in `values` shows in the engine's command line: no secret.
    """

    names: tuple[str, ...]
    values: tuple[tuple[str, str], ...] = ()


def identity(run: ContainerRun, login: str) -> dict[str, str]:
    """Return what an image lacks that does not know the login's number: a home that may be written, and a name.

    Without them Docker says that HOME is `/`, where Hugging Face, torch.hub and Triton cannot keep anything, and
    `getpass.getuser`, which torch.compile asks for its cache, fails.
    """
    return {"HOME": run.home, "USER": login, "LOGNAME": login} if run.home else {}


def container_argv(
    run: ContainerRun, inside: Inside, *, folder: str, directory: str, passed: Passed, argv: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the command that runs `argv` in the container; `folder` is the attempt's, it starts in `directory`.

    Apptainer passes all variables, the login's home and its name by itself.
    """
    if inside.runtime is ContainerRuntime.APPTAINER:
        return _apptainer(run, inside, directory, argv)
    return _docker(run, inside, folder, directory, passed, argv)


def end_argv(run: ContainerRun, runtime: ContainerRuntime) -> tuple[str, ...]:
    """Return the command that ends the container: Docker's is no child of ours; empty where it is."""
    return ("docker", "rm", "--force", run.name) if runtime is ContainerRuntime.DOCKER else ()


def _docker(
    run: ContainerRun, inside: Inside, folder: str, directory: str, passed: Passed, argv: tuple[str, ...]
) -> tuple[str, ...]:
    return (
        *("docker", "run", "--rm", "--pull", "never"),
        *("--name", run.name, "--label", f"{LABEL}={folder}"),
        *("--network", "host", "--ipc", "host", "--user", f"{inside.user}:{inside.group}"),
        *(_docker_gpus(run) if inside.nvidia else ()),
        *(word for device in inside.fabric for word in ("--device", device)),
        *(word for mount in run.mounts for word in ("--volume", _volume(mount))),
        *("--workdir", directory),
        *(word for name in passed.names for word in ("--env", name)),
        *(word for name, value in passed.values for word in ("--env", f"{name}={value}")),
        *("--entrypoint", argv[0], run.image, *argv[1:]),
    )


def _docker_gpus(run: ContainerRun) -> tuple[str, ...]:
    # NVIDIA's "User Guide" of the container image for PyTorch asks for these limits: pinned memory, and big stacks.
    # Docker reads --gpus as CSV, so that a list of devices needs quotes of its own.
    devices = run.devices or tuple(str(index) for index in range(run.gpus))
    return ("--gpus", f'"device={",".join(devices)}"', "--ulimit", "memlock=-1", "--ulimit", "stack=67108864")


def _volume(mount: Mount) -> str:
    return f"{mount.path}:{mount.path}:ro" if mount.read_only else f"{mount.path}:{mount.path}"


def _apptainer(run: ContainerRun, inside: Inside, directory: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    return (
        *("apptainer", "exec", *(("--nv",) if inside.nvidia else ())),
        *(word for mount in run.mounts for word in ("--bind", _volume(mount))),
        *("--pwd", directory, run.image, *argv),
    )
