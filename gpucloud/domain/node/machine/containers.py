"""What runs containers with GPUs: Docker with NVIDIA's toolkit, Apptainer; DCGM's exporter in one."""

from __future__ import annotations

from gpucloud.domain.node.machine import MachineWanted
from gpucloud.domain.node.machine.decisions import Decision, MachineStep, Run, Stuck
from gpucloud.domain.node.machine.facts import MachineFacts
from gpucloud.domain.node.machine.packages import SUPPORTED, before_apt, install, toolkit

# All four at one version (NVIDIA, "Container Toolkit", installation guide).
_TOOLKIT_VERSION = "1.20.1-1"
_TOOLKIT = tuple(
    f"{name}={_TOOLKIT_VERSION}"
    for name in (
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container-tools",
        "libnvidia-container1",
    )
)
_RESTART = Run(argv=("systemctl", "restart", "docker"))
_EXPORTER_IMAGE = "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-distroless"
EXPORTER = "gpucloud-dcgm-exporter"
"""The name of the exporter's container."""


def container_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return what is next for the container runtime; None when it is there, or none is wanted."""
    if wanted.exporter or wanted.runtime == "docker" or (wanted.runtime == "auto" and not facts.apptainer):
        return _docker_decision(facts, wanted)
    if wanted.runtime == "apptainer" and not facts.apptainer:
        return _apptainer_decision(facts, wanted)
    return None


def exporter_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return the step that starts DCGM's exporter on the machine's loopback; None when it runs, or is not wanted.

    Source: the README of NVIDIA's dcgm-exporter.
    """
    if not wanted.exporter or facts.exporter:
        return None
    if not wanted.install:
        return Stuck(what="DCGM's exporter does not run", hint=_ALLOW)
    commands = (
        Run(argv=("docker", "rm", "-f", EXPORTER), passes=(0, 1)),
        Run(
            argv=(
                "docker", "run", "-d", "--name", EXPORTER, "--restart", "unless-stopped", "--gpus", "all",
                "--cap-add", "SYS_ADMIN", "-p", "127.0.0.1:9400:9400", _EXPORTER_IMAGE,
            )
        ),
    )  # fmt: skip
    return MachineStep(name="exporter", why="DCGM's exporter does not run", commands=commands)


def _docker_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    needs_toolkit = wanted.gpus > 0 and not (facts.toolkit and facts.docker_has_nvidia)
    if facts.docker and facts.docker_answers and not needs_toolkit:
        return _login_decision(facts, wanted)
    why = "no Docker" if not facts.docker else "Docker does not know NVIDIA's GPUs"
    if not facts.docker_answers and facts.docker:
        why = "Docker's daemon does not answer"
    if not wanted.install:
        return Stuck(what=why, hint=_ALLOW)
    if facts.docker and not facts.docker_answers:
        return MachineStep(name="docker-service", why=why, commands=(_RESTART,))
    if not facts.docker or not facts.toolkit:
        return _unsupported(facts, why) or before_apt(facts, wanted.apt_mirror) or _packages(facts, why)
    configure = Run(argv=("nvidia-ctk", "runtime", "configure", "--runtime=docker"))
    return MachineStep(name="docker-gpus", why=why, commands=(configure, _RESTART))


def _login_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return the step after which the login may use Docker: the job's containers are started by it, and not by root.

    It counts from the next login on.
    """
    if not facts.docker_needs_root:
        return None
    why = f"{facts.login} may not use Docker"
    if not wanted.install:
        return Stuck(what=why, hint=f"sudo usermod -aG docker {facts.login}")
    return MachineStep(name="docker-group", why=why, commands=(Run(argv=("usermod", "-aG", "docker", facts.login)),))


def _packages(facts: MachineFacts, why: str) -> MachineStep:
    if not facts.docker:
        return MachineStep(name="docker", why=why, commands=(install("docker.io"),))
    added = toolkit(facts)
    return added or MachineStep(name="toolkit", why=why, commands=(install(*_TOOLKIT, replacing=True),), installs=True)


def _apptainer_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision:
    why = "no Apptainer"
    if not wanted.install:
        return Stuck(what=why, hint=_ALLOW)
    if (before := _unsupported(facts, why) or before_apt(facts, wanted.apt_mirror)) is not None:
        return before
    # Apptainer's own documentation, "Install Ubuntu packages": its makers' archive, whose key Launchpad vouches for.
    commands = (
        install("software-properties-common"),
        Run(argv=("add-apt-repository", "-y", "ppa:apptainer/ppa")),
        install("apptainer"),
    )
    return MachineStep(name="apptainer", why=why, commands=commands)


def _unsupported(facts: MachineFacts, why: str) -> Stuck | None:
    if (facts.os, facts.release) in SUPPORTED:
        return None
    return Stuck(
        what=f"{why}; this is {facts.os} {facts.release}, and gpucloud installs on Ubuntu 22.04 and 24.04",
        hint="install it on the machine",
    )


_ALLOW = "install it on the machine; or `machine: {driver: 580}`: gpucloud may change its system software"
