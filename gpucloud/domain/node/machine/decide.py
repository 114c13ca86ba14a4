"""The next step on the way of a machine to what a job wants: its driver, how GPUs are joined, what runs containers."""

from __future__ import annotations

import re

from gpucloud.domain.node.hardware import branch_of
from gpucloud.domain.node.machine.driver import SUBNET_MANAGER, driver_decision
from gpucloud.domain.node.machine.facts import (
    Ask,
    Decision,
    Download,
    MachineFacts,
    MachineStep,
    MachineWanted,
    MigInstance,
    Ready,
    Reboot,
    Run,
    Stuck,
)
from gpucloud.domain.node.machine.packages import (
    SUPPORTED,
    before_apt,
    cuda,
    hold,
    install,
    repaired,
    toolkit,
    unasked,
    upstream,
)

# What must not move under a driver that runs: its own packages, and the kernel that its modules were made for.
_HELD = re.compile(
    r"(lib)?nvidia-|linux-(modules|objects|signatures)-nvidia-|cuda-drivers|nvlsm$|"
    r"linux-((image|headers|modules)-)?(\d|aws|azure|gcp|generic|oracle|ibm|gke|nvidia|virtual)"
)


def next_step(facts: MachineFacts, wanted: MachineWanted) -> Decision:
    """Return what is next: `Ready` when nothing is missing. Applied again and again, it ends in Ready or Stuck."""
    if facts.cloud_init_runs and wanted.install and "cloud-init" not in facts.tried:
        # 2: done, with faults that it got over; 1: it failed, and what it was to bring is looked for below.
        wait = Run(argv=("cloud-init", "status", "--wait"), plain=True, passes=(0, 1, 2))
        return MachineStep(name="cloud-init", why="cloud-init is at work", commands=(wait,))
    for_gpus = wanted.gpus and (wanted.asked or facts.gpu_ids)
    gpus = (driver_decision, fabric_decision, efa_decision, persistence_decision, mig_decision, mps_decision)
    for decide in (_kept_decision, *(gpus if for_gpus else ()), container_decision, exporter_decision):
        decision = decide(facts, wanted)
        if decision is not None:
            return _allowed(decision, facts, wanted)
    return Ready(versions=_versions(facts))


def _kept_decision(facts: MachineFacts, wanted: MachineWanted) -> MachineStep | None:
    """Finish and hold what we installed: an upgrade of the driver under a running job ends the job."""
    if not facts.installed_by_us or not wanted.install:
        return None
    if (repair := repaired(facts)) is not None:  # a driver may run that is only half installed
        return repair
    loose = tuple(p.name for p in facts.packages if _HELD.match(p.name) and p.state == "installed" and not p.held)
    why = "upgrades would replace the driver"
    return MachineStep(name="hold", why=why, commands=(hold(*loose),)) if loose else None


def _allowed(decision: Decision, facts: MachineFacts, wanted: MachineWanted) -> Decision:
    match decision:
        case Reboot(why=why) if not wanted.install:
            return Stuck(what=f"a reboot is needed: {why}", hint="sudo reboot; gpucloud does not reboot your machines")
        case Reboot(why=why) if why == facts.rebooted_for:
            return Stuck(what=f"{why}, even after a reboot", hint="replace the machine, or look at `dmesg` there")
        case MachineStep(why=why) if not wanted.install:
            return Stuck(what=why, hint="`machine: {driver: 580}`: gpucloud may change the machine's system software")
        case MachineStep(why=why) | Reboot(why=why) if not facts.privilege:
            return Stuck(
                what=f"{why}; changing that needs root, and `sudo -n` asks for a password",
                hint="let the user use sudo without a password, or log in as root",
            )
        case MachineStep() | Ask() | Reboot() | Ready() | Stuck():
            return decision


def _versions(facts: MachineFacts) -> tuple[tuple[str, str], ...]:
    found = {
        "os": f"{facts.os} {facts.release}",
        "kernel": facts.kernel,
        "driver": facts.driver,
        "fabric_manager": facts.fabric_manager,
        "efa": facts.efa,
        "docker": facts.docker,
        "container_toolkit": facts.toolkit,
        "apptainer": facts.apptainer,
        "installed": "gpucloud" if facts.installed_by_us else "",
    }
    return tuple((name, version) for name, version in found.items() if version)


# How GPUs and machines are joined (fabric manager, EFA), kept and divided (persistence, MIG, MPS).


_SERVICE = "nvidia-fabricmanager"
_START = (Run(argv=("systemctl", "enable", _SERVICE)), Run(argv=("systemctl", "restart", _SERVICE)))
# AWS, "Elastic Fabric Adapter", release notes; its key: "Get started with EFA and NCCL", step "verify the signature".
_EFA_VERSION = "1.51.0"
_EFA = "https://efa-installer.amazonaws.com"
_EFA_KEY = "4E9091BCBB97A96B26B15E59A05480B1DD2D3CCC"
_UNPACK = (
    'cd "$1" && rm -rf aws-efa-installer && tar -xzf efa.tar.gz && cd aws-efa-installer && ./efa_installer.sh -y -g'
)


def fabric_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return what is next for the fabric manager; None when it runs, or nothing needs it.

    Without it CUDA does not start on NVSwitches; its version must be exactly the driver's.
    Source: NVIDIA, "Fabric Manager user guide".
    """
    if not facts.has_nvswitch or not facts.driver:
        return None
    if upstream(facts.fabric_manager) != facts.driver or _lacks_subnet_manager(facts):
        return _right_version(facts, wanted)
    if facts.fabric_manager_active:
        return None
    why = f"the fabric manager {facts.fabric_manager} does not run"
    if not wanted.install:
        return Stuck(what=why, hint=f"sudo systemctl enable --now {_SERVICE}")
    return MachineStep(name="fabric-service", why=why, commands=_START)


def _lacks_subnet_manager(facts: MachineFacts) -> bool:
    """Whether NVLink's subnet manager is missing; where the fabric is complete, somebody brought it another way."""
    complete = all(gpu.fabric == "Completed" for gpu in facts.gpus or ())
    return facts.bridges > 0 and facts.package(SUBNET_MANAGER[0]) is None and not complete


def efa_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return what is next for EFA; None when it answers, is not wanted, or the machine has no such interface."""
    if not wanted.efa or not facts.has_efa or facts.efa_answers:
        return None
    if facts.efa:
        return Reboot(why=f"EFA {facts.efa} is installed, and no interface answers")
    why = "this machine has EFA interfaces and no software for them"
    if not wanted.install:
        return Stuck(what=why, hint=f"install it from {_EFA}/aws-efa-installer-{_EFA_VERSION}.tar.gz")
    archive = f"{_EFA}/aws-efa-installer-{_EFA_VERSION}.tar.gz"
    return MachineStep(
        name="efa",
        why=why,
        downloads=(
            Download(url=f"{_EFA}/aws-efa-installer.key", name="efa.gpg", fingerprint=_EFA_KEY),
            Download(url=archive, name="efa.tar.gz"),
            Download(url=f"{archive}.sig", name="efa.tar.gz.sig"),
        ),
        commands=(
            Run(argv=("gpgv", "--keyring", "{folder}/efa.gpg", "{folder}/efa.tar.gz.sig", "{folder}/efa.tar.gz")),
            Run(argv=("sh", "-c", _UNPACK, "sh", "{folder}")),
        ),
        installs=True,
    )


def _right_version(facts: MachineFacts, wanted: MachineWanted) -> Decision:
    found = facts.fabric_manager or "none"
    why = f"NVSwitches need a fabric manager {facts.driver}, the driver's version; found {found}"
    if upstream(facts.fabric_manager) == facts.driver:
        why = "these NVSwitches need NVLink's subnet manager (nvlsm) beside the fabric manager"
    branch = branch_of(facts.driver)
    names = ((f"-{branch}",), ("",))  # from branch 590 on packages have no branch in their names
    if not wanted.install or (facts.os, facts.release) not in SUPPORTED:
        return Stuck(what=why, hint=f"sudo apt-get install {_SERVICE}-{branch}={facts.driver}*")
    if (before := before_apt(facts, wanted.apt_mirror)) is not None:
        return before
    beside = SUBNET_MANAGER if facts.bridges else ()
    pin = f"={facts.driver}*"
    with_nscq = tuple((f"{_SERVICE}{s}{pin}", f"libnvidia-nscq{s}{pin}", *beside) for (s,) in names)
    sets = with_nscq + tuple((f"{_SERVICE}{s}{pin}", *beside) for (s,) in names)
    if (ask := unasked(facts, sets)) is not None:
        return ask
    answers = (facts.answer(packages) for packages in sets)
    chosen = next((a.packages for a in answers if a is not None and a.installs is not None), None)
    if chosen is not None:
        commands = (install(*chosen, replacing=True), *_START)
        return MachineStep(name="fabric-manager", why=why, commands=commands, installs=True, packages=chosen)
    return cuda(facts) or Stuck(
        what=f"{why}; no archive has it", hint="`machine: {driver: 580}`: driver and fabric manager come together then"
    )


# How GPUs are kept and divided: persistence, MIG, MPS.


# Services that hold a GPU open keep MIG mode from changing (NVIDIA, "Multi-Instance GPU user guide").
_MAY_FAIL = (0, 1, 2, 3, 6, 19, 255)  # nothing to take away, or it is in use: what is left is looked at again
_HOLDERS = ("nvidia-dcgm", "dcgm-exporter", "nvidia-persistenced")


def persistence_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return the step after which the driver stays loaded between jobs; None when it does, or refused to once."""
    if not wanted.install or "persistence" in facts.tried or all(gpu.persistence for gpu in facts.gpus or ()):
        return None
    service = Run(argv=("systemctl", "start", "nvidia-persistenced"), passes=(0, 1, 4, 5))
    commands = (*((service,) if facts.systemd else ()), Run(argv=("nvidia-smi", "-pm", "1"), passes=(0, 1, 3)))
    return MachineStep(name="persistence", why="the driver unloads between jobs", commands=commands)


def mig_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return what is next until every GPU is divided by the wanted profile; None when it is, or none is wanted.

    Source: NVIDIA, "Multi-Instance GPU user guide".
    """
    if wanted.mig is None:
        return None
    off = tuple(gpu.index for gpu in facts.gpus or () if not gpu.mig)
    if off:
        return _mig_mode(facts, wanted, off)
    rooms = tuple(room for room in facts.mig if room.profile == wanted.mig)
    if not rooms:
        known = ", ".join(sorted({room.profile for room in facts.mig})) or "none"
        return Stuck(
            what=f"these GPUs have no MIG profile {wanted.mig}; they have {known}", hint="change `machine.mig`"
        )
    others = tuple(one for one in facts.mig_instances if one.profile != wanted.mig)
    if others:
        return _mig_cleared(facts, wanted, others)
    free = tuple(room for room in rooms if room.free)
    if not free or "mig" in facts.tried:
        return None
    if not wanted.install:
        return Stuck(what="the GPUs are not divided", hint=f"sudo nvidia-smi mig -cgi {wanted.mig} -C")
    commands = tuple(
        Run(argv=("nvidia-smi", "mig", "-i", str(room.gpu), "-cgi", ",".join([room.profile] * room.free), "-C"))
        for room in free
    )
    return MachineStep(name="mig", why=f"GPUs have room for {wanted.mig}", commands=commands)


def _mig_cleared(facts: MachineFacts, wanted: MachineWanted, others: tuple[MigInstance, ...]) -> Decision:
    """Parts of another profile are taken away where nobody uses them: a job would get them as if they were its own.

    The driver takes away none that a program holds.
    """
    gpus = sorted({one.gpu for one in others})
    parts = ", ".join(
        f"GPU {gpu} into {' + '.join(sorted(one.profile for one in others if one.gpu == gpu))}" for gpu in gpus
    )
    what = f"{wanted.mig} is wanted, and MIG cuts {parts}"
    used = [gpu.index for gpu in facts.gpus or () if gpu.index in gpus and gpu.processes]
    if used or "mig-clear" in facts.tried:
        return Stuck(what=f"{what}, which somebody uses", hint="wait until it is free, or take another host")
    if not wanted.install:
        hint = "; ".join(f"sudo nvidia-smi mig -dci -i {gpu} && sudo nvidia-smi mig -dgi -i {gpu}" for gpu in gpus)
        return Stuck(what=what, hint=hint)
    numbers = {gpu: [one.number for one in others if one.gpu == gpu] for gpu in gpus}
    commands = tuple(
        command
        for gpu in gpus
        for number in numbers[gpu]
        for command in (
            Run(argv=("nvidia-smi", "mig", "-dci", "-i", str(gpu), "-gi", str(number)), passes=_MAY_FAIL),
            Run(argv=("nvidia-smi", "mig", "-dgi", "-i", str(gpu), "-gi", str(number)), passes=_MAY_FAIL),
        )
    )
    return MachineStep(name="mig-clear", why=what, commands=commands)


def mps_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return the step that starts the Multi-Process Service; None when it runs, or is not wanted."""
    if not wanted.mps or facts.mps:
        return None
    why = "the Multi-Process Service does not run"
    if not wanted.install:
        return Stuck(what=why, hint="sudo nvidia-cuda-mps-control -d")
    return MachineStep(name="mps", why=why, commands=(Run(argv=("nvidia-cuda-mps-control", "-d")),))


def _mig_mode(facts: MachineFacts, wanted: MachineWanted, off: tuple[int, ...]) -> Decision:
    why = f"MIG is off on GPU {', '.join(str(index) for index in off)}"
    if not wanted.install:
        return Stuck(what=why, hint="sudo nvidia-smi -mig 1")
    if "mig-mode" in facts.tried or set(off) <= set(facts.mig_pending):
        return Reboot(why=f"{why}, and is on after the next boot")
    stop = Run(argv=("systemctl", "stop", *_HOLDERS), passes=(0, 1, 5))
    commands = tuple(Run(argv=("nvidia-smi", "-i", str(index), "-mig", "1"), passes=(0, 1, 3)) for index in off)
    return MachineStep(name="mig-mode", why=why, commands=(*((stop,) if facts.systemd else ()), *commands))


# What runs containers with GPUs: Docker with NVIDIA's toolkit, Apptainer; DCGM's exporter in one.


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
