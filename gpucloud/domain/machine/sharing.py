"""How GPUs are kept and divided: persistence, MIG, MPS."""

from __future__ import annotations

from gpucloud.domain.machine import MachineWanted
from gpucloud.domain.machine.decisions import Decision, MachineStep, Reboot, Run, Stuck
from gpucloud.domain.machine.facts import MachineFacts, MigInstance

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
