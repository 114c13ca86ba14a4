"""The process that a launch becomes on this node: its whole environment, and the container around it."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.attempt.image import chosen_runtime
from gpucloud.agent.network import carrying
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.collectives import gpu_defaults, on_interface, threads
from gpucloud.domain.node.container import (
    OF_THE_CLIENT,
    ContainerRun,
    Inside,
    Passed,
    container_argv,
    end_argv,
    identity,
)
from gpucloud.domain.node.status import Launch
from gpucloud.domain.variables import GPUCLOUD_ATTEMPT_DIR, GPUCLOUD_NODE

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
        return Composed(argv=(*launch.keeper, *launch.argv), given=given, end=())
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
    names = {*given, *(name for name in _MARKS if name in os.environ)}
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
    return Composed(argv=(*launch.keeper, *argv), given=rest, end=end_argv(run, inside.runtime))


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
