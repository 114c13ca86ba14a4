"""What joins GPUs and machines: the fabric manager of NVSwitches, EFA between machines on AWS."""

from __future__ import annotations

from gpucloud.domain.hardware.drivers import branch_of
from gpucloud.domain.machine import MachineWanted
from gpucloud.domain.machine.apt import before_apt, install, unasked
from gpucloud.domain.machine.decisions import Decision, Download, MachineStep, Reboot, Run, Stuck
from gpucloud.domain.machine.facts import MachineFacts
from gpucloud.domain.machine.repositories import SUPPORTED, cuda
from gpucloud.domain.machine.versions import upstream
from gpucloud.domain.machine.ways import SUBNET_MANAGER

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
