"""The ways by which a driver comes, as sets of packages: the better ones first."""

from __future__ import annotations

import re

from gpucloud.domain.machine.facts import AptAnswer, MachineFacts
from gpucloud.domain.machine.versions import open_modules, upstream

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
