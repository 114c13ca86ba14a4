"""The driver: whether it answers and will do; else loaded, installed by the best way there is, or awaiting a reboot."""

from __future__ import annotations

import re

from gpucloud.domain.node.hardware import branch_of, is_older
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    Ask,
    Decision,
    MachineFacts,
    MachineStep,
    MachineWanted,
    Reboot,
    Run,
    Stuck,
)
from gpucloud.domain.node.machine.packages import (
    DEFAULT_BRANCH,
    SUPPORTED,
    before_apt,
    branch_refused,
    cuda,
    install,
    open_modules,
    unasked,
    upstream,
)

_NEEDED_BYTES = (
    3 << 30
)  # 319 MB come and 676 MB are unpacked from Ubuntu 24.04's archive; modules compiled: 1.1 GB more
_MODULES = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")


def driver_decision(facts: MachineFacts, wanted: MachineWanted) -> Decision | None:
    """Return what is next for the driver; None when it answers and is the one that will do."""
    fault = _fault(facts, wanted)
    if fault is None:
        return None
    if not facts.gpu_ids and not facts.gpus:
        return Stuck(
            what="no NVIDIA GPU on this machine's PCI bus", hint="take machines with GPUs, or leave out `gpu:`"
        )
    mended = _mended(facts, wanted, fault)
    if mended is not None:
        return mended
    if not wanted.install:
        return Stuck(what=fault, hint=_by_hand(facts, wanted))
    return _refused(facts, wanted, fault) or _installed(facts, wanted, fault)


def branch_for(wanted: MachineWanted) -> str:
    """Return the branch that is installed where none is there."""
    return wanted.branch or branch_of(wanted.version) or DEFAULT_BRANCH


def _fault(facts: MachineFacts, wanted: MachineWanted) -> str | None:
    if facts.gpus:
        return _unwanted(facts.driver, wanted)
    if facts.gpus is None:
        return "no NVIDIA driver: no `nvidia-smi`"
    return f"nvidia-smi failed: {facts.gpu_fault}" if facts.gpu_fault else "nvidia-smi lists no GPU"


def _unwanted(version: str, wanted: MachineWanted) -> str | None:
    """Return why that driver will not do."""
    if wanted.branch and branch_of(version) != wanted.branch:
        return f"driver {version} is there, {wanted.branch} is wanted"
    if wanted.least_driver and is_older(version, wanted.least_driver):
        return f"driver {version} is too old: {wanted.least_driver} is the least that will do"
    return None


def _mended(facts: MachineFacts, wanted: MachineWanted, fault: str) -> Decision | None:
    """Return how the driver on the disk comes to run; None when there is none, or it is not the one."""
    here = dict(facts.modules)
    if (version := here.get(facts.kernel)) is None:
        # An older kernel is not the one that would start.
        others = [k for k, v in facts.modules if _unwanted(v, wanted) is None and is_older(facts.kernel, k)]
        newest = max(others, key=lambda kernel: [int(part) for part in re.findall(r"\d+", kernel)], default=None)
        return Reboot(why=f"the driver's modules are for kernel {newest}") if newest is not None else None
    if _unwanted(version, wanted) is not None or facts.gpus is None:
        return None
    if not facts.loaded:
        return _load(facts, version)
    if facts.loaded != version:
        return _reload(facts, version)
    # Module and disk agree, and still it does not answer: a GPU that hangs may come back with the machine.
    return Reboot(why=fault) if facts.gpu_fault else None


def _load(facts: MachineFacts, version: str) -> Decision:
    if "module" not in facts.tried:
        # nouveau, where a stock kernel has it, sits on the GPUs; on a machine without it this fails, and that is fine.
        commands = (
            Run(argv=("modprobe", "-r", "nouveau"), passes=(0, 1)),
            Run(argv=("modprobe", "nvidia"), passes=(0, 1)),
            Run(argv=("modprobe", "nvidia_uvm"), passes=(0, 1)),
        )
        return MachineStep(name="module", why=f"driver {version} is installed and not loaded", commands=commands)
    if facts.secure_boot and facts.rebooted_for:
        return Stuck(
            what="the driver's module does not load: Secure Boot is on, and the module may not be signed",
            hint="turn Secure Boot off, or take Ubuntu's kernel: its modules are signed",
        )
    return Reboot(why="the driver's module does not load")


def _reload(facts: MachineFacts, version: str) -> Decision:
    why = f"driver {facts.loaded} is loaded and {version} installed"
    if "reload" in facts.tried:
        return Reboot(why=why)
    commands = (
        Run(argv=("modprobe", "-r", *_MODULES), passes=(0, 1)),
        Run(argv=("modprobe", "nvidia"), passes=(0, 1)),
        Run(argv=("modprobe", "nvidia_uvm"), passes=(0, 1)),
    )
    return MachineStep(name="reload", why=why, commands=commands)


def _refused(facts: MachineFacts, wanted: MachineWanted, fault: str) -> Stuck | None:
    if (facts.os, facts.release) not in SUPPORTED:
        return Stuck(
            what=f"{fault}; gpucloud installs them on Ubuntu 22.04 and 24.04, and this is {facts.os} {facts.release}",
            hint=f"install NVIDIA's driver {branch_for(wanted)} by hand, or take Ubuntu 24.04",
        )
    if (refusal := branch_refused(branch_for(wanted), facts.gpu_ids)) is not None:
        return Stuck(what=refusal, hint="`machine: {driver: 580}`, or newer GPUs")
    if facts.free_bytes < _NEEDED_BYTES:
        free = facts.free_bytes / 2**30
        return Stuck(
            what=f"{fault}; installing one needs 3 GiB, and {free:.1f} GiB are free on /", hint="take a larger disk"
        )
    return None


def _installed(facts: MachineFacts, wanted: MachineWanted, fault: str) -> Decision:
    if facts.runfile and not any(p.name.startswith("nvidia-utils") for p in facts.packages):
        command = Run(argv=("nvidia-uninstall", "--silent"))
        return MachineStep(name="runfile", why=f"{fault}; it came from a .run installer", commands=(command,))
    if (before := before_apt(facts, wanted.apt_mirror)) is not None:
        return before
    branch = branch_for(wanted)
    version = wanted.version if branch_of(wanted.version) == branch else ""
    sets = from_ubuntu(facts, branch, version)
    if (ask := unasked(facts, sets)) is not None:
        return ask
    chosen = _first(facts, sets)
    exact = chosen is not None and any("=" in package for package in chosen)
    if chosen is not None and (exact or not version):
        return _install(fault, chosen)
    # The archive has no driver, or another version than the job's other nodes run: NVIDIA's repository keeps them all.
    return _from_nvidia(facts, wanted, fault, chosen)


def _from_nvidia(
    facts: MachineFacts, wanted: MachineWanted, fault: str, otherwise: tuple[str, ...] | None
) -> MachineStep | Ask | Stuck:
    if (added := cuda(facts)) is not None:
        return added
    branch = branch_for(wanted)
    version = wanted.version if branch_of(wanted.version) == branch else ""
    sets = pinnings(branch, version)
    if not any(facts.package(name) for packages in sets for name in packages):
        if (ask := unasked(facts, sets)) is not None:
            return ask
        if (pinning := _first(facts, sets)) is not None:
            why = f"NVIDIA's repository is kept to {branch}"
            return MachineStep(name="pinning", why=why, commands=(install(*pinning),), installs=True)
    packages = from_nvidia(facts)
    if (ask := unasked(facts, (packages,))) is not None:
        return ask
    answer = facts.answer(packages)
    if answer is not None and answer.installs is not None:
        return _install(fault, packages)
    if otherwise is not None:
        return _install(fault, otherwise)
    return Stuck(
        what=f"{fault}, and neither Ubuntu's archive nor NVIDIA's has driver {branch} for kernel {facts.kernel}: "
        f"{answer.said if answer else ''}",
        hint="name another branch in `machine: {driver: …}`, or take an image that has the driver",
    )


def _first(facts: MachineFacts, sets: tuple[tuple[str, ...], ...]) -> tuple[str, ...] | None:
    answers = [(packages, facts.answer(packages)) for packages in sets]
    return next((names for names, answer in answers if answer is not None and fits(answer, facts.kernel)), None)


def _install(fault: str, packages: tuple[str, ...]) -> MachineStep:
    command = install(*packages, replacing=True)
    return MachineStep(name="driver", why=fault, commands=(command,), installs=True, packages=packages)


def _by_hand(facts: MachineFacts, wanted: MachineWanted) -> str:
    branch = branch_for(wanted)
    if (facts.os, facts.release) not in SUPPORTED:
        return f"install NVIDIA's driver {branch} on the machine"
    kind = "-open" if open_modules(facts.gpu_ids) else ""
    flavour = facts.kernel.split("-", 2)[-1]
    packages = (
        f"linux-modules-nvidia-{branch}-server{kind}-{flavour} "
        f"nvidia-headless-no-dkms-{branch}-server{kind} nvidia-utils-{branch}-server"
    )
    return f"sudo apt-get install {packages}; or `machine: {{driver: {branch}}}`: gpucloud may install it"


# The ways by which a driver comes, as sets of packages: the better ones first.


_KERNEL = re.compile(r"^linux-(?:image|modules|objects)-(?:.*-)?(\d+\.\d+)\.\d+-\d+-")
SUBNET_MANAGER = ("nvlsm", "infiniband-diags")
"""What the fabric manager of B200 and later needs (NVIDIA, "Fabric Manager user guide", fourth generation)."""


def from_ubuntu(facts: MachineFacts, branch: str, version: str) -> tuple[tuple[str, ...], ...]:
    """Return the sets of Ubuntu's archive: prebuilt modules, signed for Secure Boot; no compiler, no foreign archive.

    First the modules of the running kernel, which need no reboot; then those of the newest kernel of its series, then
    of its flavour, which bring that kernel. The archive keeps one version of a branch, and apt refuses modules of
    another: of the running kernel they are there only while that kernel is recent. Last come modules that are compiled
    on the machine. With `version` that one is asked for before whatever the archive has.
    """
    kind = "-open" if open_modules(facts.gpu_ids) else ""
    series, _, flavour = facts.kernel.partition("-")
    flavour = flavour.partition("-")[2]
    series = ".".join(series.split(".")[:2])
    prebuilt = f"linux-modules-nvidia-{branch}-server{kind}"
    # Ubuntu's newer kernels for an older release (HWE) go by its name: `linux-modules-nvidia-…-generic-hwe-22.04`.
    names_of_kernels = (facts.kernel, f"{flavour}-{series}", f"{flavour}-hwe-{facts.release}", flavour)
    modules = (
        *((f"{prebuilt}-{name}",) for name in names_of_kernels),
        (f"linux-headers-{facts.kernel}", f"nvidia-dkms-{branch}-server{kind}"),
    )
    headless = f"nvidia-headless-no-dkms-{branch}-server{kind}"
    fabric = (
        (f"nvidia-fabricmanager-{branch}", *(SUBNET_MANAGER if facts.bridges else ())) if facts.has_nvswitch else ()
    )
    return tuple(
        (*names, headless, f"nvidia-utils-{branch}-server{pin}", *fabric)
        for pin in ((f"={version}*", "") if version else ("",))
        for names in modules
    )


def pinnings(branch: str, version: str) -> tuple[tuple[str, ...], ...]:
    """Return the packages by which NVIDIA's repository keeps to one version, or to one branch; installed first.

    Source: NVIDIA, "Driver installation guide", version locking.
    """
    return ((f"nvidia-driver-pinning-{version}",),) * bool(version) + ((f"nvidia-driver-pinning-{branch}",),)


def from_nvidia(facts: MachineFacts) -> tuple[str, ...]:
    """Return the set of NVIDIA's repository: modules that are compiled for the running kernel."""
    return (f"linux-headers-{facts.kernel}", "nvidia-open" if open_modules(facts.gpu_ids) else "cuda-drivers")


def fits(answer: AptAnswer, kernel: str) -> bool:
    """Whether apt would install the set, with a fabric manager, if there is one, at exactly the driver's version.

    Source: NVIDIA, "Fabric Manager user guide": the versions must be the same. A set for an older kernel than the
    running one does not fit: the machine would start the newer one again.
    """
    if answer.installs is None or _is_for_older(answer, kernel):
        return False
    versions = {name: upstream(version) for name, version in answer.installs}
    fabric = next((v for name, v in versions.items() if name.startswith("nvidia-fabricmanager")), None)
    driver = next((v for name, v in versions.items() if name.startswith("nvidia-utils")), None)
    return fabric is None or fabric == driver


def _is_for_older(answer: AptAnswer, kernel: str) -> bool:
    found = [_KERNEL.search(name) for name, _ in answer.installs or ()]
    kernels = {tuple(map(int, match[1].split("."))) for match in found if match is not None}
    running = tuple(int(part) for part in re.findall(r"\d+", kernel)[:2])
    return bool(kernels) and max(kernels) < running
