"""The process that a launch becomes on this node: its environment, container and image; and its ranks, asked to end."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import pwd
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gpucloud.agent.network import carrying
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.container import (
    OF_THE_CLIENT,
    ContainerRun,
    ImageFact,
    ImageWanted,
    Inside,
    Passed,
    container_argv,
    end_argv,
    identity,
)
from gpucloud.domain.node.hardware import gpu_defaults, on_interface, threads
from gpucloud.domain.node.status import WRITING, Launch
from gpucloud.domain.variables import GPUCLOUD_ATTEMPT_DIR, GPUCLOUD_NODE
from gpucloud.system import processes
from gpucloud.system.processes import locked
from gpucloud.system.wholefile import read_text, write_whole

MARK = GPUCLOUD_ATTEMPT_DIR
"""The variable that every process of an attempt bears, with the attempt's folder."""

# By this mark the embedded fleet ends what a node started, when the node is taken: Docker's processes are no children.
_MARKS = (GPUCLOUD_NODE,)

_NVIDIA = Path("/proc/driver/nvidia/version")
_FABRIC = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """What is started; `given` are the variables that this launch adds to the agent's own environment.

    `end` is the command that ends what is no child of ours, empty for nothing.
    """

    argv: tuple[str, ...]
    given: Mapping[str, str]
    end: tuple[str, ...]

    def shown(self, launch: Launch) -> str:
        """Return the launch as JSON without the values of its hidden variables: `launch.json`."""
        env = {name: None if name in launch.hidden else value for name, value in sorted(self.given.items())}
        record = {"version": 1, "argv": self.argv, "directory": launch.directory, "env": env, "end": self.end}
        return json.dumps(record, indent=1) + "\n"


def compose(launch: Launch, folder: Path) -> Composed:
    """Return what the launch is on this node. What the node's own environment says beats what we only propose."""
    nvidia, fabric = _NVIDIA.exists(), _fabric()
    proposed = {
        **_interfaces(launch),
        **threads(launch.sharing, processes.cpus()),
        **(gpu_defaults(str(folder), efa=bool(fabric)) if nvidia else {}),
    }
    given = {
        **{name: value for name, value in proposed.items() if name not in os.environ},
        **dict(launch.env),
        MARK: str(folder),
    }
    if launch.container is None:
        return Composed(argv=(*launch.wrapper, *launch.argv), given=given, end=())
    inside = Inside(
        runtime=chosen_runtime(launch.container.runtime),
        nvidia=nvidia,
        fabric=fabric,
        user=os.getuid(),
        group=os.getgid(),
        login=_login(),
    )
    return _contained(launch, launch.container, inside, folder, given)


def end_recorded(folder: Path) -> tuple[str, ...]:
    """Return the command that ends what an attempt left beside its processes, from its `launch.json`."""
    try:
        return tuple(json.loads((folder / "launch.json").read_text())["end"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _contained(launch: Launch, run: ContainerRun, inside: Inside, folder: Path, given: Mapping[str, str]) -> Composed:
    names = {*given, *launch.passed, *(name for name in _MARKS if name in os.environ)}
    values: dict[str, str] = {}
    if inside.runtime is ContainerRuntime.DOCKER:
        if given.get("CUDA_VISIBLE_DEVICES") == ",".join(run.devices):
            names.discard("CUDA_VISIBLE_DEVICES")  # inside, the devices that were handed in are counted from 0
        open_ones = {name: value for name, value in given.items() if name not in launch.hidden}
        ours = {name: value for name, value in identity(run, inside.login).items() if name not in given}
        values = {**ours, **{name: value for name, value in open_ones.items() if name in OF_THE_CLIENT}}
    argv = container_argv(
        run,
        inside,
        folder=str(folder),
        directory=launch.directory,
        passed=Passed(names=tuple(sorted(names - values.keys())), values=tuple(sorted(values.items()))),
        argv=launch.argv,
    )
    rest = {name: value for name, value in given.items() if name not in values}
    return Composed(argv=(*launch.wrapper, *argv), given=rest, end=end_argv(run, inside.runtime))


def _login() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"


def _interfaces(launch: Launch) -> dict[str, str]:
    """Return the variables that name the interface of collectives, unless the node or the launch says otherwise.

    Without them gloo takes what the host's name resolves to, which on many images is 127.0.1.1.
    """
    interface = carrying(launch.address) if launch.address else None
    return on_interface(interface) if interface else {}


def _fabric() -> tuple[str, ...]:
    """Return EFA's devices: AWS's driver names them `efa_0` or `rdmap…s…` and is called `efa`."""
    try:
        found = [d for d in _FABRIC.iterdir() if (d / "device" / "driver").resolve().name == "efa"]
    except OSError:
        return ()
    verbs = sorted(Path("/dev/infiniband").glob("uverbs*")) if found else []
    return tuple(str(path) for path in verbs)


# The job's container image on this node: pulled once, and from then on named by its content.

_HUB = "https://index.docker.io/v1/"  # Docker's own name for its registry in config.json


def image_fact(root: Path, reference: str) -> ImageFact | None:
    """Return how the image was pulled here; None when it was not, or is gone since."""
    text = read_text(_record(root, reference))
    try:
        found = from_json(ImageFact, text) if text is not None else None
    except Malformed:
        return None
    return found if found is not None and _is_there(found) else None


def pull_image(root: Path, wanted: ImageWanted) -> str | None:
    """Have the image; return None, or the runtime's own words when it cannot be had. May be repeated and killed."""
    record = _record(root, wanted.reference)
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    runtime = chosen_runtime(wanted.runtime)
    with locked(record.with_suffix(".lock")):
        if image_fact(root, wanted.reference) is not None:
            return None
        try:
            pinned = _docker(wanted) if runtime is ContainerRuntime.DOCKER else _apptainer(record, wanted)
        except _Refused as refused:
            return str(refused)
        write_whole(record, to_json(ImageFact(reference=wanted.reference, runtime=runtime, pinned=pinned)))
        return None


class _Refused(Exception):
    pass


def _docker(wanted: ImageWanted) -> str:
    """Pull by Docker; what was built or loaded on the node is taken as it is. The login lives as long as the pull."""
    if _said(["docker", "image", "inspect", "--format", "{{.Id}}", wanted.reference], {}) is None:
        with tempfile.TemporaryDirectory() as config:
            env = {}
            if wanted.login is not None:
                path = Path(config, "config.json")
                entry = {"auth": base64.b64encode(wanted.login.encode()).decode()}
                write_whole(path, json.dumps({"auths": {registry_of(wanted.reference): entry}}))
                env = {"DOCKER_CONFIG": config}
            _run(["docker", "pull", "--quiet", wanted.reference], env)
    template = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    return _run(["docker", "image", "inspect", "--format", template, wanted.reference], {})


def _apptainer(record: Path, wanted: ImageWanted) -> str:
    """Make one file of the image, named by the reference's hash; a reference with a path is a file already."""
    if wanted.reference.startswith("/"):
        return wanted.reference
    target, beside = record.with_suffix(".sif"), record.with_suffix(".new.sif")
    env = {}
    if wanted.login is not None:
        user, _, password = wanted.login.partition(":")
        env = {"APPTAINER_DOCKER_USERNAME": user, "APPTAINER_DOCKER_PASSWORD": password}
    source = wanted.reference if "://" in wanted.reference else f"docker://{wanted.reference}"
    _run(["apptainer", "pull", "--force", str(beside), source], env)
    beside.replace(target)
    return str(target)


def registry_of(reference: str) -> str:
    """Return the registry's name in Docker's config.json (distribution/reference: a first part with `.` or `:`)."""
    first, slash, _ = reference.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else _HUB


def _is_there(found: ImageFact) -> bool:
    if found.runtime is ContainerRuntime.APPTAINER:
        return Path(found.pinned).exists()
    return _said(["docker", "image", "inspect", "--format", "{{.Id}}", found.pinned], {}) is not None


def _run(argv: list[str], env: dict[str, str]) -> str:
    """Return the last line of the command's output. Raises _Refused with its complaint."""
    try:
        done = subprocess.run(
            argv, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise _Refused(f"{argv[0]}: {error.strerror}; the image needs Docker or Apptainer on the node") from error
    if done.returncode != 0:
        raise _Refused(done.stderr.strip() or f"{argv[0]} ended with exit code {done.returncode}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def _said(argv: list[str], env: dict[str, str]) -> str | None:
    try:
        return _run(argv, env)
    except _Refused:
        return None


def _record(root: Path, reference: str) -> Path:
    return root / "images" / f"{hashlib.sha256(reference.encode()).hexdigest()[:16]}.json"


# Which container runtime this node uses.


def chosen_runtime(wanted: ContainerRuntime) -> ContainerRuntime:
    """Return the runtime; AUTO is Apptainer where only that is, else Docker."""
    if wanted is not ContainerRuntime.AUTO:
        return wanted
    alone = shutil.which("docker") is None and shutil.which("apptainer") is not None
    return ContainerRuntime.APPTAINER if alone else ContainerRuntime.DOCKER


# The ranks of an attempt before they are killed: asked where they are (Python's own account of every thread, in each
# rank's output), asked to end what they write, and looked at for what that is.

# The variables that tell a rank, by what started it: torchrun (accelerate, Lightning), mpirun, or ourselves.
_RANK = "RANK="
_OF_A_RANK = ("TORCHELASTIC_RUN_ID=", "OMPI_COMM_WORLD_RANK=", _RANK)
_SHELLS = ("sh", "dash", "bash", "zsh", "ash")
# Launchers that end their script by the signal, send it on, or delete what they were to make.
_ENDING = ("torchrun", "torch.distributed", "accelerate", "deepspeed", "make", "gmake", "just", "uv", "pdm", "poetry")
_NO_CORE = 1  # bytes; core(5): a limit of 1 keeps the kernel from feeding a core dump to a program, too


def ask_for_stacks(folder: Path) -> tuple[int, ...]:
    """Send SIGABRT to every process of a rank and return their pids; one that is stopped is let go on for it.

    With PYTHONFAULTHANDLER (`domain.launch.environment`) Python then writes the stack of every thread to its standard
    error, whatever it waits for, and ends. Any other program just ends. In containers too: their processes are seen
    from outside, by the attempt's mark.
    """
    found = told_of(folder)
    for pid in found:
        with contextlib.suppress(OSError, ValueError):
            _without_core(pid)
        for number in (signal.SIGABRT, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
    return found


def told_of(folder: Path) -> tuple[int, ...]:
    """Return the pids of the attempt's ranks that are alive, with what they started: launchers are no ranks."""
    return tuple(pid for pid in processes.marked(MARK, str(folder)) if processes.has_variable(pid, _RANK))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """Of an attempt's ranks: what has a handler, rank by rank (None where that cannot be seen), and all scripts."""

    heeding: tuple[tuple[int, ...], ...] | None
    scripts: tuple[int, ...]


def signalled(folder: Path, number: signal.Signals, code: Path, wrapper: int | None = None) -> Signalled:
    """Return which processes of the attempt are scripts, and which of these have a handler for the signal.

    A script is what runs a file of the code folder, unless that is a shell, or the same file runs above it. So neither
    what launches one (accelerate, deepspeed) nor a service (wandb, Ray) nor a worker is a script. Where a rank runs no
    such file, scripts are the program itself, what a shell runs, and what runs a program that the one above it names
    among its words (`nsys profile simulate`). Of two with a handler the upper one is asked, for what is below it is its
    own to end. So is a program with one that runs such files and names none: a trainer that is installed, with helpers.
    Where none has one, what launched them is asked, save what would just end them, and last a shell, for its trap.
    `wrapper` is a process of ours, and no rank.
    """
    listing = {process.pid: process for process in processes.listing()}
    told, below = listing.keys() & told_of(folder), dict[int, list[int]]()
    for pid in told:
        below.setdefault(listing[pid].parent, []).append(pid)
    heeding, scripts = list[tuple[int, ...]](), list[int]()
    for rank in _ranks(folder, wrapper, listing):
        tree = {pid for pid in told if pid == rank or rank in _above(pid, listing)}
        having = {pid for pid in tree if processes.handles(pid, number)}
        of_code = {*_of_code(rank, code.resolve(), below)}
        found = of_code or {*_launched(rank, below)}
        over = {above for pid in of_code for above in _above(pid, listing) if not _is_shell(above)} & having
        over = {pid for pid in over if of_code.isdisjoint((pid, *_above(pid, listing)))}
        launching = {pid for pid in over if not any(Path(w).name.startswith(_ENDING) for w in _words(pid)[:1])}
        own = {pid for pid in launching if not any(_named(pid, below))}
        shells = {pid for pid in having if _is_shell(pid)}
        if number is not signal.SIGTERM:  # for a trap at its exit alone, bash handles all signals that would end it
            shells = {pid for pid in shells if not processes.handles(pid, signal.SIGVTALRM)}
        asked = _outermost(found & having, listing) + _outermost(own, listing)
        if asked := asked or _outermost(launching, listing) or _outermost(shells, listing):
            heeding.append(asked)
        scripts += found or (rank,)
    return Signalled(heeding=tuple(heeding) if processes.shows_handlers() else None, scripts=tuple(scripts))


def _ranks(folder: Path, wrapper: int | None, listing: Mapping[int, processes.Process]) -> tuple[int, ...]:
    ours = {pid for pid in processes.marked(MARK, str(folder)) if pid in listing and pid != wrapper}
    for variable in _OF_A_RANK:
        if bearing := {pid for pid in ours if processes.has_variable(pid, variable)}:
            return _outermost(bearing, listing)
    return ()


def _outermost(pids: set[int], listing: Mapping[int, processes.Process]) -> tuple[int, ...]:
    return tuple(pid for pid in sorted(pids) if pids.isdisjoint(_above(pid, listing)))


def _above(pid: int, listing: Mapping[int, processes.Process]) -> Iterator[int]:
    while (pid := listing[pid].parent) in listing:
        yield pid


def _of_code(pid: int, code: Path, below: Mapping[int, Sequence[int]], above: tuple[Path, ...] = ()) -> Iterator[int]:
    file = None if _is_shell(pid) else _file(pid, code)
    if file is not None and file not in above:
        yield pid
    for child in below.get(pid, ()):
        yield from _of_code(child, code, below, above if file is None else (*above, file))


def _launched(pid: int, below: Mapping[int, Sequence[int]]) -> Iterator[int]:
    if not _is_shell(pid):
        yield pid
    for child in below.get(pid, ()) if _is_shell(pid) else _named(pid, below):
        yield from _launched(child, below)


def _named(pid: int, below: Mapping[int, Sequence[int]]) -> Iterator[int]:
    itself, *others = [Path(word).name for word in _words(pid)] or [""]
    own = {*others} - {itself, ""}
    rest = list(below.get(pid, ()))
    while rest:
        child = rest.pop()
        if (words := _words(child)) and Path(words[0]).name in own:
            yield child
        else:
            rest += below.get(child, ())


def _is_shell(pid: int) -> bool:
    return processes.program(pid) in _SHELLS


def _file(pid: int, code: Path) -> Path | None:
    """Return the file of the code folder that the process runs; None for any other, also of an environment there."""
    is_python = processes.program(pid).startswith("python")
    word = next(iter(_words(pid)), "") if is_python else processes.executable(pid)
    module = word.replace(".", "/")
    names = (word, f"{word}/__main__.py", f"{module}.py", f"{module}/__main__.py")
    for base, name in itertools.product((Path(processes.directory(pid)), code), names):  # it may have left the latter
        with contextlib.suppress(OSError, ValueError):
            path = (base / name).resolve()
            if path.is_file() and path.is_relative_to(code):
                inside = itertools.takewhile(lambda folder: folder != code, path.parents)
                return None if any((folder / "pyvenv.cfg").exists() for folder in inside) else path
    return None


def _words(pid: int) -> tuple[str, ...]:
    """Return the command line of the process, from the script on where an interpreter runs one."""
    words, program = processes.command(pid), processes.program(pid)
    if not (program in _SHELLS or program.startswith("python")):
        return words
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in ("-W", "-X") else 1
    return words[at:]


def _without_core(pid: int) -> None:
    """A core of a process that holds a GPU's buffers takes minutes to write, and nobody asked for it."""
    if sys.platform.startswith("linux"):
        resource.prlimit(pid, resource.RLIMIT_CORE, (_NO_CORE, _NO_CORE))


_MOST_WRITTEN = 100


Writing = Mapping[int, tuple[str, ...]]
"""Which files each process was writing, by its pid."""


def ask_to_end(folder: Path, code: Path, wrapper: int | None = None) -> tuple[frozenset[int], Writing]:
    """Send SIGTERM to the scripts that have a handler for it and return their pids: any other it would just end.

    What a script has started is its own to end, also where it has no handler. With them come the files that processes
    without a handler are writing: what the asked end in their turn, as a launcher does, breaks off too.
    """
    deaf = {pid: processes.writing(pid) for pid in told_of(folder) if not processes.handles(pid, signal.SIGTERM)}
    asked = frozenset(itertools.chain(*signalled(folder, signal.SIGTERM, code, wrapper).heeding or ()))
    for pid in asked:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    return asked, deaf


def note_writing(folder: Path, before: Writing = MappingProxyType({})) -> None:
    """Write down which files the ranks are writing: they are killed in the middle, and the files may be torn.

    So may those that were being written `before`: who wrote them is gone since, or broke off when another went.
    """
    found = sorted({path for pid in told_of(folder) for path in processes.writing(pid)}.union(*before.values()))
    with contextlib.suppress(OSError):  # a full disk keeps nobody from being killed
        write_whole(folder / WRITING, json.dumps(found[:_MOST_WRITTEN]))
