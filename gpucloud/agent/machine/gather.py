"""What this machine says of its system software: read from files where they say it, asked of programs where not."""

from __future__ import annotations

import grp
import os
import platform
import pwd
import re
import shutil
import subprocess
from pathlib import Path

from gpucloud.agent.facts import Notes, sources_digest
from gpucloud.domain.node.machine.decide import EXPORTER
from gpucloud.domain.node.machine.facts import (
    AptAnswer,
    MachineFacts,
    MachineWanted,
    MigInstance,
    MigRoom,
    Package,
    PciDevice,
    Source,
)
from gpucloud.system import smi
from gpucloud.system.processes import answered

_NVIDIA_OR_KERNEL = re.compile(
    r"^(lib)?(nvidia|cuda-drivers|nvlsm|docker|apptainer)|^linux-(image|headers|modules|objects|signatures|aws|azure|"
    r"gcp|generic|oracle|ibm|gke|virtual)"
)
_TOLD_GPUS = re.compile(r"^\s*Runtimes:.*\bnvidia\b|nvidia\.com/gpu", re.MULTILINE)
_MARKER = re.compile(r"SW_MNG")  # NVSwitches of B200 and later are reached through ConnectX ports that say so in VPD
# `|   0  MIG 1g.5gb          19       13          6:1     |` of `nvidia-smi mig -lgi` (MIG user guide).
_MIG_INSTANCE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+(\d+)\s+\d+:\d+\s+\|", re.MULTILINE)
_MIG_LINE = re.compile(r"^\|\s+(\d+)\s+MIG (\S+)\s+\d+\s+(\d+)/(\d+)", re.MULTILINE)


def gather(wanted: MachineWanted, notes: Notes, asked: tuple[AptAnswer, ...], tried: tuple[str, ...]) -> MachineFacts:
    """Return the facts; what the job does not want is not asked for."""
    release = _os_release()
    gpus, fault = smi.gpus({}) if wanted.gpus else (None, None)
    packages, interrupted = _packages()
    sources = _sources()
    kernel = platform.release()
    containers = bool(wanted.runtime) or wanted.exporter
    login = pwd.getpwuid(os.getuid()).pw_name
    alone = ask("docker", "info")[0] if containers else 127
    docker = _docker(wanted, "info") if containers else (127, "")
    return MachineFacts(
        os=release.get("ID", ""),
        release=release.get("VERSION_ID", ""),
        codename=release.get("VERSION_CODENAME", ""),
        arch=platform.machine(),
        kernel=kernel,
        privilege=_privilege(wanted),
        systemd=Path("/run/systemd/system").is_dir(),
        free_bytes=shutil.disk_usage("/").free,
        cloud_init_runs=_cloud_init_runs(),
        secure_boot=_secure_boot(),
        packages=packages,
        dpkg_interrupted=interrupted,
        sources=sources,
        sources_digest=sources_digest(sources),
        listed=notes.listed(),
        pci=() if smi.are_stand_ins() else _pci(),
        gpus=gpus,
        gpu_fault=fault,
        loaded=_loaded(),
        modules=_modules(kernel, working=bool(gpus)),
        runfile=shutil.which("nvidia-uninstall") is not None,
        switches=len(names("/proc/driver/nvidia-nvswitch/devices")),
        bridges=_bridges(wanted),
        fabric_manager=version("nv-fabricmanager", "--version"),
        fabric_manager_active=answer("systemctl", "is-active", "nvidia-fabricmanager") == "active",
        mig_pending=_mig_pending() if wanted.mig else (),
        mig=_mig_rooms() if wanted.mig else (),
        mig_instances=mig_instances(answer("nvidia-smi", "mig", "-lgi")) if wanted.mig else (),
        mps=_runs("nvidia-cuda-mps"),
        docker=version("docker", "--version") if containers else "",
        docker_answers=docker[0] == 0,
        docker_needs_root=docker[0] == 0 and alone != 0 and not in_group("docker", login),
        docker_has_nvidia=_docker_has_nvidia(wanted, docker[1]),
        login=login,
        apptainer=version("apptainer", "--version") if containers else "",
        toolkit=version("nvidia-ctk", "--version") if containers else "",
        exporter=wanted.exporter and bool(_docker(wanted, "ps", "-q", "--filter", f"name=^{EXPORTER}$")[1].strip()),
        efa=_efa_version() if wanted.efa else "",
        efa_answers=wanted.efa and bool(answer("fi_info", "-p", "efa", "-t", "FI_EP_RDM")),
        asked=asked,
        installed_by_us=notes.installed(),
        rebooted_for=notes.rebooted_for(),
        tried=tried,
    )


def _os_release() -> dict[str, str]:
    lines = (line.partition("=") for line in text("/etc/os-release").splitlines())
    return {name: value.strip("\"'") for name, _, value in lines}


def _privilege(wanted: MachineWanted) -> str:
    if os.geteuid() == 0:
        return "root"
    # Where we only look, sudo is not tried: on the user's own hosts a refusal is reported to their administrator.
    return "sudo" if wanted.install and ask("sudo", "-n", "true")[0] == 0 else ""


def _cloud_init_runs() -> bool:
    folder = Path("/run/cloud-init")
    return folder.is_dir() and not any((folder / name).exists() for name in ("result.json", "disabled"))


def _secure_boot() -> bool:
    # The variable holds four bytes of attributes, then 1 for on.
    for path in Path("/sys/firmware/efi/efivars").glob("SecureBoot-*"):
        try:
            return path.read_bytes()[-1:] == b"\1"
        except OSError:
            return False
    return False


def _packages() -> tuple[tuple[Package, ...], bool]:
    """Return the packages that matter, every one that dpkg left half-way, and whether dpkg itself was interrupted."""
    shown = answer("dpkg-query", "-W", "-f", "${Package}\t${Version}\t${db:Status-Status}\t${db:Status-Want}\n")
    rows = (line.split("\t") for line in shown.splitlines())
    packages = tuple(
        Package(name=name, version=number, state=state, held=want == "hold")
        for name, number, state, want in rows
        if _NVIDIA_OR_KERNEL.match(name) or state not in ("installed", "config-files", "not-installed")
    )
    # apt's own test: dpkg's journal of changes that it has not written into its table yet.
    return packages, any(name.isdigit() for name in names("/var/lib/dpkg/updates"))


def _sources() -> tuple[Source, ...]:
    folder = "/etc/apt/sources.list.d"
    listed = (f"{folder}/{name}" for name in names(folder) if name.endswith((".list", ".sources")))
    found = ((path, text(path)) for path in ("/etc/apt/sources.list", *listed))
    return tuple(Source(path=path, text=words) for path, words in found if words)


def _pci() -> tuple[PciDevice, ...]:
    devices = []
    for name in names("/sys/bus/pci/devices"):
        read = [text(f"/sys/bus/pci/devices/{name}/{field}").strip() for field in ("vendor", "device", "class")]
        if all(read):
            vendor, device, kind = (int(value, 16) for value in read)
            devices.append(PciDevice(vendor=vendor, device=device, kind=kind >> 8))
    return tuple(devices)


def _loaded() -> str:
    found = re.search(
        r"(?:Kernel Module|for x86_64|for aarch64)\s+(\d+(?:\.\d+)+)", text("/proc/driver/nvidia/version")
    )
    return found[1] if found else ""


def _modules(kernel: str, *, working: bool) -> tuple[tuple[str, str], ...]:
    """Return the version of the `nvidia` module on the disk, by kernel; of the running one only where it works."""
    kernels = (kernel,) if working else tuple(dict.fromkeys((kernel, *names("/lib/modules"))))
    found = ((name, version("modinfo", "-k", name, "-F", "version", "nvidia")) for name in kernels)
    return tuple((name, number) for name, number in found if number)


def _bridges(wanted: MachineWanted) -> int:
    """Count them by their vital product data, which root alone may read (Linux, drivers/pci/vpd.c: mode 0600)."""
    devices = (f"/sys/class/infiniband/{name}/device/vpd" for name in names("/sys/class/infiniband"))
    return sum(1 for path in devices if _MARKER.search(text(path) or _as_root(wanted, "cat", path)))


def _as_root(wanted: MachineWanted, *words: str) -> str:
    return answer("sudo", "-n", *words) if wanted.install and os.geteuid() != 0 else ""


def _mig_pending() -> tuple[int, ...]:
    shown = answer("nvidia-smi", "--query-gpu=index,mig.mode.pending", "--format=csv,noheader")
    return tuple(int(line.partition(",")[0]) for line in shown.splitlines() if line.endswith(" Enabled"))


def _mig_rooms() -> tuple[MigRoom, ...]:
    found = _MIG_LINE.findall(answer("nvidia-smi", "mig", "-lgip"))
    return tuple(MigRoom(gpu=int(g), profile=p, free=int(free), total=int(total)) for g, p, free, total in found)


def mig_instances(said: str) -> tuple[MigInstance, ...]:
    """Return the parts that `nvidia-smi mig -lgi` lists."""
    found = _MIG_INSTANCE.findall(said)
    return tuple(MigInstance(gpu=int(gpu), profile=profile, number=int(number)) for gpu, profile, number in found)


def _runs(name: str) -> bool:
    return any(text(f"/proc/{pid}/comm").strip().startswith(name) for pid in names("/proc") if pid.isdigit())


def _docker(wanted: MachineWanted, *words: str) -> tuple[int, str]:
    """Return how Docker answered, and what; root asks where the user may not."""
    code, said = ask("docker", *words)
    if code in (0, 127) or not wanted.install or os.geteuid() == 0:
        return code, said if code == 0 else ""
    code, said = ask("sudo", "-n", "docker", *words)
    return code, said if code == 0 else ""


def in_group(name: str, login: str) -> bool:
    """Whether the login is in the group, from its next login on at the latest."""
    try:
        group = grp.getgrnam(name)
        return login in group.gr_mem or pwd.getpwnam(login).pw_gid == group.gr_gid
    except KeyError:
        return False


def tells_of_gpus(info: str) -> bool:
    """Whether `docker info` names NVIDIA's runtime, or GPUs that CDI found (Docker 28.2 and later)."""
    return _TOLD_GPUS.search(info) is not None


def _docker_has_nvidia(wanted: MachineWanted, info: str) -> bool:
    """Whether `--gpus` works: with the toolkit's hook beside a daemon that was started since (moby, nvidia_linux.go).

    What its own configuration or CDI tells is certain. Where we install, that is what we write; where we only look, the
    hook that is there is believed.
    """
    told = "nvidia" in text("/etc/docker/daemon.json") or tells_of_gpus(info)
    return told or (not wanted.install and shutil.which("nvidia-container-runtime-hook") is not None)


def _efa_version() -> str:
    found = re.search(r"installer version:\s*(\S+)", text("/opt/amazon/efa_installed_packages"))
    return found[1] if found else ""


# Short commands whose answer is a fact; what does not answer is not there.


_TIMEOUT_S = 60.0
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/amazon/efa/bin"  # a user's may lack sbin


def environment() -> dict[str, str]:
    """Return the environment of commands: words in English, and the system's programs after the user's own path."""
    return {**os.environ, "LC_ALL": "C.UTF-8", "PATH": f"{os.environ.get('PATH', os.defpath)}:{_PATH}"}


def ask(*argv: str, timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Return the exit code and what the command said; 127 where there is no such command, 124 when it hangs."""
    try:
        done = answered(argv, timeout_s=timeout_s, env=environment(), merged=True)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {timeout_s:g} s"
    except OSError as error:
        return 127, str(error)
    return done.exit_code, done.stdout


def answer(*argv: str) -> str:
    """Return what a command said, stripped; empty when it failed."""
    code, said = ask(*argv)
    return said.strip() if code == 0 else ""


def version(*argv: str) -> str:
    """Return the first thing that looks like a version in what a command says; empty when it failed."""
    found = re.search(r"\d+(?:\.\d+)+", answer(*argv))
    return found[0] if found else ""


def text(path: str) -> str:
    """Return a small file's text; empty when it is not there."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def names(folder: str) -> tuple[str, ...]:
    """Return what lies in the folder, sorted; nothing when it is not there."""
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()
