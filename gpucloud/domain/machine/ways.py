"""The ways by which a driver comes, as sets of packages: the better ones first."""

from __future__ import annotations

from gpucloud.domain.machine.facts import AptAnswer, MachineFacts
from gpucloud.domain.machine.versions import open_modules, upstream


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
    modules = (
        *((f"{prebuilt}-{name}",) for name in (facts.kernel, f"{flavour}-{series}", flavour)),
        (f"linux-headers-{facts.kernel}", f"nvidia-dkms-{branch}-server{kind}"),
    )
    headless = f"nvidia-headless-no-dkms-{branch}-server{kind}"
    fabric = (f"nvidia-fabricmanager-{branch}",) if facts.has_nvswitch else ()
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


def fits(answer: AptAnswer) -> bool:
    """Whether apt would install the set, with a fabric manager, if there is one, at exactly the driver's version.

    Source: NVIDIA, "Fabric Manager user guide": the versions must be the same.
    """
    if answer.installs is None:
        return False
    versions = {name: upstream(version) for name, version in answer.installs}
    fabric = next((v for name, v in versions.items() if name.startswith("nvidia-fabricmanager")), None)
    driver = next((v for name, v in versions.items() if name.startswith("nvidia-utils")), None)
    return fabric is None or fabric == driver
