"""The next step on the way of a machine to what a job wants of it."""

from __future__ import annotations

import re

from gpucloud.domain.node.machine import MachineWanted
from gpucloud.domain.node.machine.containers import container_decision, exporter_decision
from gpucloud.domain.node.machine.decisions import Ask, Decision, MachineStep, Ready, Reboot, Run, Stuck
from gpucloud.domain.node.machine.driver import driver_decision
from gpucloud.domain.node.machine.fabric import (
    efa_decision,
    fabric_decision,
    mig_decision,
    mps_decision,
    persistence_decision,
)
from gpucloud.domain.node.machine.facts import MachineFacts
from gpucloud.domain.node.machine.packages import hold, repaired

# What must not move under a driver that runs: its own packages, and the kernel that its modules were made for.
_HELD = re.compile(
    r"(lib)?nvidia-|linux-(modules|objects|signatures)-nvidia-|cuda-drivers|nvlsm$|"
    r"linux-((image|headers|modules)-)?(\d|aws|azure|gcp|generic|oracle|ibm|gke|nvidia|virtual)"
)
_FOR_GPUS = (driver_decision, fabric_decision, efa_decision, persistence_decision, mig_decision, mps_decision)
_FOR_ALL = (container_decision, exporter_decision)


def next_step(facts: MachineFacts, wanted: MachineWanted) -> Decision:
    """Return what is next: `Ready` when nothing is missing. Applied again and again, it ends in Ready or Stuck."""
    if facts.cloud_init_runs and wanted.install and "cloud-init" not in facts.tried:
        # 2: done, with faults that it got over; 1: it failed, and what it was to bring is looked for below.
        wait = Run(argv=("cloud-init", "status", "--wait"), plain=True, passes=(0, 1, 2))
        return MachineStep(name="cloud-init", why="cloud-init is at work", commands=(wait,))
    for_gpus = wanted.gpus and (wanted.asked or facts.gpu_ids)
    for decide in (_kept_decision, *(_FOR_GPUS if for_gpus else ()), *_FOR_ALL):
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
