"""The disks of this node that may hold data sets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpucloud.domain.hardware.disks import Disk, Speed

FOLDER = "gpucloud-data"
# Where images and sites mount a fast disk for work: AWS's Deep Learning AMI, DGX OS, and what people call it.
_USUAL = ("/opt/dlami/nvme", "/raid", "/scratch", "/local_scratch", "/mnt", "/mnt/nvme", "/mnt/scratch", "/local")
_NETWORK = {"nfs", "nfs4", "cifs", "fuse", "lustre", "ceph", "tmpfs", "ramfs", "efs", "9p", "beegfs", "gpfs"}
_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"


def disks(root: Path, *, below_root: bool) -> tuple[Disk, ...]:
    """Return where sets may lie: the agent's own folder, and mounted disks of the machine unless `below_root`.

    GPUCLOUD_DATA_ROOT names the one folder instead. Network and memory file systems do not count.
    """
    given = os.environ.get("GPUCLOUD_DATA_ROOT")
    if given:
        return (_disk(Path(given) / FOLDER, Path(given)),)
    own = _disk(root / "data" / "sets", root)
    if below_root:
        return (own,)
    return (*(_disk(point / FOLDER, point) for point in _mounted() if _usable(point)), own)


def _mounted() -> Iterator[Path]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if kind.split(".")[0] in _NETWORK:
            continue
        point = point.replace("\\040", " ")
        if point in _USUAL or (device.startswith("/dev/") and _is_instance_store(_block(device))):
            yield Path(point)


def _usable(point: Path) -> bool:
    """Whether our folder is there, or can be made; on machines where we may be root without a password, by root."""
    folder = point / FOLDER
    if os.access(folder if folder.exists() else point, os.W_OK):
        return True
    make = ["sudo", "-n", "install", "-d", "-m", "755", "-o", str(os.getuid()), "-g", str(os.getgid())]
    try:
        return subprocess.run([*make, str(folder)], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _disk(folder: Path, above: Path) -> Disk:
    above.mkdir(parents=True, exist_ok=True)
    return Disk(folder=str(folder), speed=_speed(above), free=shutil.disk_usage(above).free)


def _speed(folder: Path) -> Speed:
    device = os.stat(folder).st_dev  # noqa: PTH116  one call
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve().name
    if _is_instance_store(block):
        return Speed.LOCAL_NVME
    rotates = [_read(f"/sys/block/{disk}/queue/rotational") for disk in _disks_below(block)]
    return Speed.SPINNING if "1" in rotates else Speed.SOLID


def _is_instance_store(block: str) -> bool:
    below = _disks_below(block)
    return bool(below) and all(_read(f"/sys/block/{disk}/device/model") == _INSTANCE_STORE for disk in below)


def _disks_below(block: str) -> tuple[str, ...]:
    """Return the disks that a partition, an array (md) or a mapped volume (dm) stands on."""
    slaves = Path(f"/sys/class/block/{block}/slaves")
    if slaves.is_dir() and (names := sorted(os.listdir(slaves))):
        return tuple(disk for name in names for disk in _disks_below(name))
    whole = re.sub(r"^(nvme\d+n\d+)p\d+$|^([shv]d[a-z]+|xvd[a-z]+)\d+$", lambda m: m[1] or m[2], block)
    return (whole,) if whole else ()


def _block(device: str) -> str:
    return Path(device).resolve().name


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
