"""What a job wants of a machine's own software, what the machine says of it, and what it is told to do next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from gpucloud.domain.codec import to_json
from gpucloud.domain.job.spec import Cloud, ContainerRuntime, DriverPolicy, Job
from gpucloud.domain.node.hardware import Gpu, least_driver


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineWanted:
    """What a job wants of a machine below Python.

    `install`: gpucloud may install and change system software; else it only looks. `branch` is the driver's, such as
    `580`, empty for any that is not older than `least_driver`, such as `580.65.06`. `version` is the driver that an
    earlier node of the job got: it is taken where it can still be had. `gpus` is 0 for a job that wants no driver;
    unless the job `asked` for GPUs, a machine that has none needs none. `runtime` is `docker`, `apptainer`, `auto`
    (what is there, else Docker) or empty.
    """

    install: bool
    branch: str
    least_driver: str
    gpus: int
    asked: bool = True
    version: str = ""
    mig: str | None = None
    mps: bool = False
    exporter: bool = False
    runtime: str = ""
    efa: bool = False
    apt_mirror: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFact:
    """How a machine was left on this boot: the digest of the `MachineWanted` that was met, and the versions found."""

    digest: str
    versions: tuple[tuple[str, str], ...] = ()


def digest(wanted: MachineWanted) -> str:
    """Return what names the wish; the version, which is taken only where a driver is installed, does not count."""
    return hashlib.sha256(to_json(replace(wanted, version="")).encode()).hexdigest()


NVIDIA = 0x10DE
AMAZON = 0x1D0F
_BRIDGE = 0x0680
_DISPLAY = (0x0300, 0x0302)
_FIRST_EFA = 0xEFA0


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A device on the PCI bus, whether a driver knows it or not; `kind` is the upper two bytes of its class."""

    vendor: int
    device: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that dpkg knows: its version, its state (`installed`, `half-configured`, …) and whether it is held."""

    name: str
    version: str
    state: str = "installed"
    held: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AptAnswer:
    """What apt said of a set of packages: what it would install, or, where `installs` is None, why it would not."""

    packages: tuple[str, ...]
    installs: tuple[tuple[str, str], ...] | None
    said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that tells apt where packages come from."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MigRoom:
    """How many more devices of a MIG profile fit on a GPU now."""

    gpu: int
    profile: str
    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigInstance:
    """A part that a GPU is cut into now: its profile, and its number there."""

    gpu: int
    profile: str
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What a machine is and has. Empty or None: not there.

    `privilege` is `root`, `sudo` (without a password) or empty. `gpus` and `gpu_fault` are what `nvidia-smi` answers
    (None and None: there is no `nvidia-smi`). `docker_needs_root`: Docker answers root alone, `login` is in no group of
    its. `loaded` is the version of the module in the running kernel, `modules`
    what lies on the disk, by kernel. `runfile`: the driver came from NVIDIA's `.run` installer. `bridges` counts
    ConnectX bridges to NVSwitches (B200 and later), `switches` what the driver lists as NVSwitches. `asked` is what
    apt answered since something was last changed, `listed` the digest of `sources` at apt's last update. `marks` are
    our own notes of earlier runs: `installed` and, after a reboot that we asked for, its reason.
    """

    os: str
    release: str
    codename: str
    arch: str
    kernel: str
    privilege: str
    systemd: bool
    free_bytes: int
    cloud_init_runs: bool = False
    secure_boot: bool = False
    packages: tuple[Package, ...] = ()
    dpkg_interrupted: bool = False
    sources: tuple[Source, ...] = ()
    sources_digest: str = ""
    listed: str = ""
    pci: tuple[PciDevice, ...] = ()
    gpus: tuple[Gpu, ...] | None = None
    gpu_fault: str | None = None
    loaded: str = ""
    modules: tuple[tuple[str, str], ...] = ()
    runfile: bool = False
    switches: int = 0
    bridges: int = 0
    fabric_manager: str = ""
    fabric_manager_active: bool = False
    mig_pending: tuple[int, ...] = ()
    mig: tuple[MigRoom, ...] = ()
    mig_instances: tuple[MigInstance, ...] = ()
    mps: bool = False
    docker: str = ""
    docker_answers: bool = False
    docker_needs_root: bool = False
    docker_has_nvidia: bool = False
    apptainer: str = ""
    toolkit: str = ""
    login: str = ""
    exporter: bool = False
    efa: str = ""
    efa_answers: bool = False
    asked: tuple[AptAnswer, ...] = ()
    installed_by_us: bool = False
    rebooted_for: str = ""
    tried: tuple[str, ...] = field(default=())

    @property
    def gpu_ids(self) -> tuple[int, ...]:
        """The PCI device ids of the NVIDIA GPUs."""
        return tuple(d.device for d in self.pci if d.vendor == NVIDIA and d.kind in _DISPLAY)

    @property
    def has_nvswitch(self) -> bool:
        """Whether GPUs are joined by NVSwitches, which need a fabric manager; known before a driver is there."""
        return bool(self.switches or self.bridges) or any(d.vendor == NVIDIA and d.kind == _BRIDGE for d in self.pci)

    @property
    def has_efa(self) -> bool:
        """Whether there is an EFA interface."""
        return any(d.vendor == AMAZON and d.device & 0xFFF0 == _FIRST_EFA for d in self.pci)

    @property
    def driver(self) -> str:
        """The version of the driver that answers; empty when none does."""
        return self.gpus[0].driver if self.gpus else ""

    def package(self, name: str) -> Package | None:
        """Return the package if it is installed; what dpkg left half-way is not."""
        return next((p for p in self.packages if p.name == name and p.state == "installed"), None)

    def answer(self, packages: tuple[str, ...]) -> AptAnswer | None:
        """Return what apt said of the set; None when it was not asked."""
        return next((a for a in self.asked if a.packages == packages), None)


# What a job file asks of its machines' system software.


_NEWEST_CUDA = "13.0"  # of PyPI's wheels of PyTorch 2.13: what a job gets that names no other
_OLDEST_CUDA = "11.8"  # of any wheel of PyTorch 2: a driver that runs not even that runs no job


def machine_wanted(job: Job) -> MachineWanted | None:
    """Return what the job wants of a machine below Python; None when it wants nothing, and on the embedded fleet.

    gpucloud installs on rented machines unless the job says `keep`, and on the user's own hosts where it names the
    driver's branch; elsewhere it only looks.
    """
    if job.cloud is Cloud.LOCAL:
        return None
    rented = job.cloud is Cloud.AWS
    branch = job.machine.driver if job.machine.driver not in [policy.value for policy in DriverPolicy] else ""
    install = bool(branch) or (rented and job.machine.driver != DriverPolicy.KEEP.value)
    asked = bool(job.resources.gpu) or job.resources.vram_gib is not None
    divided = job.machine.mig is not None or job.machine.mps
    gpus = job.resources.gpus if rented or asked or branch or divided else 0
    runtime = _runtime(job)
    if not gpus and not runtime and not job.machine.exporter:
        return None
    least = "" if branch else least_driver(_NEWEST_CUDA if install else _OLDEST_CUDA)
    return MachineWanted(
        install=install,
        branch=branch,
        least_driver=least or "",
        gpus=gpus,
        asked=asked or divided,
        mig=job.machine.mig,
        mps=job.machine.mps,
        exporter=job.machine.exporter,
        runtime=runtime,
        efa=rented,
        apt_mirror=job.mirrors.apt,
    )


def _runtime(job: Job) -> str:
    if job.image is None:
        return ""
    match job.container.runtime:
        case ContainerRuntime.AUTO | ContainerRuntime.DOCKER | ContainerRuntime.APPTAINER as runtime:
            return runtime.value


# What a machine is told to do next: one step, a question to apt, a reboot; or that it is ready, or stuck.


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A command; as root unless `plain`. `text` is its standard input, never a secret. `passes` are exit codes."""

    argv: tuple[str, ...]
    text: str = ""
    plain: bool = False
    passes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file fetched to `name` in the working folder. With `fingerprint` it is an OpenPGP key, kept in binary form.

    It is refused when its first key has another fingerprint.
    """

    url: str
    name: str
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineStep:
    """A change; after it the machine is looked at again, and the same step wanted again is a failure.

    `{folder}` in a command is the working folder with the downloads. `lists`: apt's lists are fresh afterwards.
    `installs`: what it installs is ours to hold. `packages` is the set it was chosen for: when the archive turns out
    not to have it, twice, another way is taken.
    """

    name: str
    why: str
    commands: tuple[Run, ...]
    downloads: tuple[Download, ...] = ()
    lists: bool = False
    installs: bool = False
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Apt is asked what it would do with each of these sets of packages."""

    sets: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reboot:
    """The machine must boot anew; asked for a second time for the same reason, it is stuck."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Nothing is missing; the versions found, by name."""

    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """No step mends this: what is wrong, and one command or edit that does."""

    what: str
    hint: str


Decision = MachineStep | Ask | Reboot | Ready | Stuck
