"""Packages: commands for apt and dpkg, NVIDIA's repositories with their pinned keys, and which drivers there are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpucloud.domain.node.machine.facts import Ask, Download, MachineFacts, MachineStep, Run, Source

# Ubuntu's archive by any of its names: archive., security., ports., and those of regions and clouds before them.
_ARCHIVE = re.compile(r"https?://(?:[\w-]+\.)*(?:archive|security|ports)\.ubuntu\.com/ubuntu(?:-ports)?/?(?=\s|$)")
# needrestart would restart services while the machine is being made; a lock is waited for, never broken.
_APT = (
    "env", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_MODE=a", "apt-get", "-q", "-y",
    "-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3",
    # dpkg asks by itself about a configuration file that its owner changed, and ends where nobody can answer.
    "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold",
)  # fmt: skip
_CONFIGURE = (
    "env",
    "DEBIAN_FRONTEND=noninteractive",
    "dpkg",
    "--force-confdef",
    "--force-confold",
    "--configure",
    "-a",
)
_WRITE = 'umask 022; cat >"$1.new" && mv -f "$1.new" "$1"'


def install(*packages: str, replacing: bool = False) -> Run:
    """Return the command that installs the packages; `replacing`: held ones and newer ones give way to them."""
    change = ("--allow-change-held-packages", "--allow-downgrades") if replacing else ()
    return Run(argv=(*_APT, "install", "--no-install-recommends", *change, *packages))


def simulate(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that says what installing them would do; it changes nothing and needs no right."""
    change = ("--allow-change-held-packages", "--allow-downgrades")
    return ("apt-get", "-s", "-y", "install", "--no-install-recommends", *change, *packages)


def simulated(output: str) -> tuple[tuple[str, str], ...]:
    """Return the packages with their versions in the output of `simulate`."""
    return tuple(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", output, flags=re.MULTILINE))


def hold(*packages: str) -> Run:
    """Return the command after which upgrades leave the packages alone."""
    return Run(argv=("apt-mark", "hold", *packages))


def write(path: str, text: str) -> Run:
    """Return the command that puts a file in its place, whole."""
    return Run(argv=("sh", "-c", _WRITE, "sh", path), text=text)


def before_apt(facts: MachineFacts, mirror: str | None) -> MachineStep | None:
    """Return what must be done before apt can be asked: repair, the mirror, fresh lists; None when nothing."""
    if (repair := repaired(facts)) is not None:
        return repair
    moved = tuple(source for source in facts.sources if _mirrored(source, mirror) != source.text)
    if moved:
        return MachineStep(
            name="mirror",
            why=f"packages come from {mirror}",
            commands=tuple(write(source.path, _mirrored(source, mirror)) for source in moved),
        )
    if facts.listed != facts.sources_digest:
        return MachineStep(
            name="lists",
            why="apt's lists are older than a day or than its sources",
            commands=(Run(argv=(*_APT, "update")),),
            lists=True,
        )
    return None


def repaired(facts: MachineFacts) -> MachineStep | None:
    """Return the step after a kill in the middle of an installation; None when dpkg has nothing half-way."""
    broken = [p.name for p in facts.packages if p.state not in ("installed", "config-files", "not-installed")]
    if facts.dpkg_interrupted or broken:
        why = f"dpkg was interrupted{': ' + ', '.join(broken) if broken else ''}"
        # A package that dpkg cannot configure alone, apt may: what it depends on did not arrive.
        configure = Run(argv=_CONFIGURE, passes=(0, 1))
        return MachineStep(name="dpkg", why=why, commands=(configure, Run(argv=(*_APT, "-f", "install"))))
    return None


def unasked(facts: MachineFacts, sets: tuple[tuple[str, ...], ...]) -> Ask | None:
    """Return the question that is still open about these sets."""
    open_ = tuple(packages for packages in sets if facts.answer(packages) is None)
    return Ask(sets=open_) if open_ else None


def _mirrored(source: Source, mirror: str | None) -> str:
    return _ARCHIVE.sub(mirror, source.text) if mirror else source.text


# NVIDIA's own package repositories: the key is pinned by its fingerprint, the key's file by what apt is told.


SUPPORTED = (("ubuntu", "22.04"), ("ubuntu", "24.04"))
"""Where gpucloud installs system software; elsewhere it only looks."""

_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}  # NVIDIA's names for them
# What NVIDIA's own package for its CUDA repository puts there, so that it may come later and finds itself.
_KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
_CUDA_KEY = "EB693B3035CD5710E231E123A4B469963BF863CC"
_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
_PREFERENCE = "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n"
_TOOLKIT_KEYRING = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
_TOOLKIT_KEY = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
_TOOLKIT = "https://nvidia.github.io/libnvidia-container"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repository:
    name: str
    key_url: str
    fingerprint: str
    keyring: str
    list_path: str
    line: str
    preference: str = ""


def cuda(facts: MachineFacts) -> MachineStep | None:
    """Return the step that adds NVIDIA's repository of drivers; None when apt knows it.

    Source: NVIDIA, "Driver installation guide", Ubuntu, network repository.
    """
    if any("developer.download.nvidia.com/compute/cuda/repos" in source.text for source in facts.sources):
        return None
    distribution = f"ubuntu{facts.release.replace('.', '')}"
    architecture = _ARCHITECTURES[facts.arch]
    place = f"{_CUDA}/{distribution}/{architecture}"
    repository = _Repository(
        name="nvidia-repository",
        key_url=f"{place}/3bf863cc.pub",
        fingerprint=_CUDA_KEY,
        keyring=_KEYRING,
        list_path=f"/etc/apt/sources.list.d/cuda-{distribution}-{architecture}.list",
        line=f"deb [signed-by={_KEYRING}] {place}/ /\n",
        preference=_PREFERENCE,
    )
    return _added(repository, "Ubuntu's archive has no driver that fits")


def toolkit(facts: MachineFacts) -> MachineStep | None:
    """Return the step that adds NVIDIA's repository of the container toolkit; None when apt knows it.

    Source: NVIDIA, "Container Toolkit", installation guide.
    """
    if any("libnvidia-container" in source.text for source in facts.sources):
        return None
    repository = _Repository(
        name="toolkit-repository",
        key_url=f"{_TOOLKIT}/gpgkey",
        fingerprint=_TOOLKIT_KEY,
        keyring=_TOOLKIT_KEYRING,
        list_path="/etc/apt/sources.list.d/nvidia-container-toolkit.list",
        line=f"deb [signed-by={_TOOLKIT_KEYRING}] {_TOOLKIT}/stable/deb/$(ARCH) /\n",
    )
    return _added(repository, "no NVIDIA container toolkit")


def _added(repository: _Repository, why: str) -> MachineStep:
    key = f"{repository.name}.gpg"
    preference = (write("/etc/apt/preferences.d/cuda-repository-pin-600", repository.preference),)
    return MachineStep(
        name=repository.name,
        why=why,
        downloads=(Download(url=repository.key_url, name=key, fingerprint=repository.fingerprint),),
        commands=(
            Run(argv=("install", "-D", "-m", "644", f"{{folder}}/{key}", repository.keyring)),
            *(preference if repository.preference else ()),
            # The source comes last: with it apt knows the repository, and needs all of the above.
            write(repository.list_path, repository.line),
        ),
    )


# Which drivers there are for a machine: what its packages are called, what a GPU's generation allows.


DEFAULT_BRANCH = "580"
"""Installed where the job names none: the oldest that runs PyPI's wheels of PyTorch, and the newest that Volta has."""

# Device ids as the PCI ID database lists them: TU102 begins at 1e02, GV100 ends at 1dff; GB100 begins at 2900.
_FIRST_TURING = 0x1E00
_FIRST_BLACKWELL = 0x2900
_LAST_BRANCH_BEFORE_TURING = 580  # NVIDIA, "Driver lifecycle": Maxwell, Pascal and Volta end with R580


def upstream(package_version: str) -> str:
    """Return the driver version in a package's: `580.178.04` in `1:580.178.04-0ubuntu0.24.04.1`."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)+)", package_version)
    return match[1] if match else package_version


def open_modules(device_ids: tuple[int, ...]) -> bool:
    """Whether the open kernel modules drive all of these GPUs: Turing and newer; Blackwell has no others.

    Source: NVIDIA, "Transitioning to open-source GPU kernel modules".
    """
    return all(device >= _FIRST_TURING for device in device_ids)


def branch_refused(branch: str, device_ids: tuple[int, ...]) -> str | None:
    """Return why no driver of the branch can drive these GPUs; None when it can."""
    number = int(branch)
    oldest, newest = min(device_ids, default=_FIRST_TURING), max(device_ids, default=_FIRST_TURING)
    if oldest < _FIRST_TURING and number > _LAST_BRANCH_BEFORE_TURING:
        return f"driver {branch} does not know GPUs older than Turing (PCI device 10de:{oldest:04x}); 580 is the last"
    if oldest < _FIRST_TURING and newest >= _FIRST_BLACKWELL:
        return "no driver drives Blackwell and GPUs older than Turing in one machine"
    return None
