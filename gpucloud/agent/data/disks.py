"""The disks of this node that may hold data sets."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.hardware import Disk, Speed
from gpucloud.domain.variables import GPUCLOUD_DATA_ROOT

FOLDER = "gpucloud-data"
# Where images and sites mount a fast disk for work: AWS's Deep Learning AMI, DGX OS, and what people call it.
_USUAL = ("/opt/dlami/nvme", "/raid", "/scratch", "/local_scratch", "/mnt", "/mnt/nvme", "/mnt/scratch", "/local")
_NETWORK = {"nfs", "nfs4", "cifs", "fuse", "lustre", "ceph", "tmpfs", "ramfs", "efs", "9p", "beegfs", "gpfs"}
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_INSTANCE_STORE = "Amazon EC2 NVMe Instance Storage"


def disks(root: Path, *, below_root: bool) -> tuple[Disk, ...]:
    """Return where sets may lie: the agent's own folder, and mounted disks of the machine unless `below_root`.

    GPUCLOUD_DATA_ROOT names the one folder instead. Network and memory file systems do not count, nor disks on which
    somebody else could put or exchange what a job trains on: where that is so of the folder that is named, NodeError.
    """
    given = os.environ.get(GPUCLOUD_DATA_ROOT)
    if given:
        return (_named(Path(given)),)
    own = _disk(root / "data" / "sets", root)
    if below_root:
        return (own,)
    return (*(_disk(point / FOLDER, point) for point, rented in _mounted() if _is_ours(point, rented=rented)), own)


def _named(point: Path) -> Disk:
    point.mkdir(0o755, parents=True, exist_ok=True)
    if not _is_ours(point, rented=False):
        raise NodeError(
            f"others may put or exchange what lies in {point / FOLDER}",
            hint=f"chmod go-w {point} {point / FOLDER}, or have GPUCLOUD_DATA_ROOT name a folder of your own",
        )
    return _disk(point / FOLDER, point)


def _mounted() -> Iterator[tuple[Path, bool]]:
    """Yield where disks are mounted that are for work, and whether each came with a rented machine: nobody else's."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if kind.split(".")[0] in _NETWORK:
            continue
        point = point.replace("\\040", " ")
        rented = device.startswith("/dev/") and _is_instance_store(_block(device))
        if rented or point in _USUAL:
            yield Path(point), rented


def _is_ours(point: Path, *, rented: bool) -> bool:
    """Whether a folder of our own is there, or could be made: only we can write into it, and nobody can exchange it.

    Where all may write, one of its name may be somebody else's, with sets in it that look whole.
    """
    folder = point / FOLDER
    try:
        if not (rented or _keeps_names(point)) or not (os.path.lexists(folder) or _made(folder, rented=rented)):
            return False
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & _BY_OTHERS


def _keeps_names(folder: Path) -> bool:
    """Whether nobody but us and root can rename what we have in it."""
    found = folder.stat()
    return found.st_uid in {0, os.getuid()} and bool(not found.st_mode & _BY_OTHERS or found.st_mode & stat.S_ISVTX)


def _made(folder: Path, *, rented: bool) -> bool:
    """Make the folder; on a rented machine's own disk by root. What is there is never changed.

    On a user's own hosts root is not asked: a refusal is reported to their administrator.
    """
    try:
        folder.mkdir(mode=0o755)
    except FileExistsError:
        return True
    except OSError:
        if not rented:
            return False
        ours = f"{os.getuid()}:{os.getgid()}"
        return _run("mkdir", "-m", "755", str(folder)) and _run("chown", "-h", ours, str(folder))
    return True


def _run(*argv: str) -> bool:
    try:
        return subprocess.run(["sudo", "-n", *argv], capture_output=True, check=False).returncode == 0
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
