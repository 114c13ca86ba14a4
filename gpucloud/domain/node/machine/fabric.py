"""How GPUs and machines are joined (fabric manager, EFA), kept and divided (persistence, MIG, MPS)."""

from __future__ import annotations

from gpucloud.domain.node.hardware.gpus import branch_of
from gpucloud.domain.node.machine import MachineWanted
from gpucloud.domain.node.machine.decisions import Decision, Download, MachineStep, Reboot, Run, Stuck
from gpucloud.domain.node.machine.driver import SUBNET_MANAGER
from gpucloud.domain.node.machine.facts import MachineFacts, MigInstance
from gpucloud.domain.node.machine.packages import SUPPORTED, before_apt, cuda, install, unasked, upstream

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
