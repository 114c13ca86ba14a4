"""`python3 <zip> data`: one line of JSON, then a packed set; the last line of the answer says what was done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from gpucloud.agent.data.fetching import Fetched, fetch
from gpucloud.agent.facts import MARK, marked, of_mark
from gpucloud.domain.codec import from_json
from gpucloud.domain.errors import GpucloudError, NodeError
from gpucloud.domain.job.data import DataFile, DataSet, gigabytes, place_of, unpack
from gpucloud.domain.job.quantities import counted
from gpucloud.domain.node.hardware import Disk, Speed, choose
from gpucloud.domain.variables import GPUCLOUD_DATA_ROOT
from gpucloud.system import processes
from gpucloud.system.processes import locked
from gpucloud.system.wholefile import read_text, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be done with a set; `env` (secrets may be in it) is what S3 is reached with.

    `stage` does it all, for a set in S3. A set that is sent by the supervisor is `place`d (the answer is JSON: its
    folder, and the paths that are missing there) and `finish`ed.
    """

    do: str
    order: Order
    env: tuple[tuple[str, str], ...] = ()


def main(root: Path, given: BinaryIO, say: Callable[[str], object]) -> int:
    """Carry out what is asked on `given` and return the exit code."""
    asked = from_json(Asked, given.readline())
    found = unpack(given.read())
    os.environ.update(asked.env)
    try:
        match asked.do:
            case "place":
                place = prepare(root, asked.order, found)
                say(json.dumps({"folder": str(place.folder), "missing": [file.path for file in place.missing]}))
            case "finish":
                with _alone(root, asked.order.content):
                    finish(root, asked.order, found, prepare(root, asked.order, found).folder)
                say(f"note: data: {asked.order.target}: {gigabytes(found.size)}, {counted(len(found.files), 'file')}")
            case _:
                say(f"note: {stage(root, asked.order, found)}")
    except GpucloudError as error:
        say(f"{error}; hint: {error.hint}" if error.hint else str(error))
        return 1
    except OSError as error:
        say(f"{error.filename}: {error.strerror}")
        return 1
    return 0


# Stages one data set: placed on the fastest disk, fetched, proven, marked whole, and found under its target.


_BEGUN = ".gpucloud-begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A set that is wanted at `target`; see `domain.data.DataWanted`."""

    key: str
    content: str
    target: str
    below_root: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a set is to lie, and which of its files are not there yet."""

    folder: Path
    missing: tuple[DataFile, ...]


def stage(root: Path, order: Order, found: DataSet) -> str:
    """Have the set whole at its target; return what was done, in one line. Raises NodeError, StoreError."""
    with _alone(root, order.content):
        place = prepare(root, order, found)
        started = time.monotonic()
        done = fetch(found.source, found.region, place.missing, place.folder) if place.missing else Fetched()
        finish(root, order, found, place.folder)
        return told(order, found, done, time.monotonic() - started)


def prepare(root: Path, order: Order, found: DataSet) -> Place:
    """Choose the disk before any byte moves, make the folder, and take over what other sets on the disk have already.

    Raises NodeError where the target cannot be made, and, with the numbers, where there is no room.
    """
    require(Path(place_of(order.target, str(root), below_root=order.below_root)), below_root=order.below_root)
    there = [_with_held(disk, order, found) for disk in disks(root, below_root=order.below_root)]
    disk = choose(tuple(there), found.size)
    if isinstance(disk, str):
        raise NodeError(disk, hint=_room_hint(there))
    folder = Path(disk.folder) / order.content
    folder.mkdir(parents=True, exist_ok=True)
    _begin(folder)
    missing = tuple(file for file in found.files if not is_whole(folder, file))
    siblings = _siblings(folder)
    return Place(folder=folder, missing=tuple(file for file in missing if not _take_over(file, folder, siblings)))


def finish(root: Path, order: Order, found: DataSet, folder: Path) -> None:
    """Mark the set as whole and let its target point there. NodeError when a file is not as it must be."""
    wrong = next((file for file in found.files if not is_whole(folder, file)), None)
    if wrong is not None:
        raise NodeError(f"{folder / wrong.path} is not whole", hint="the same command again")
    files = [[file.path, file.size, file.identity] for file in found.files]
    if marked(folder) != files:
        os.sync()  # what the mark says must hold after a power failure too
        write_whole(folder / MARK, json.dumps({"version": 1, "source": found.source, "files": files}), mode=0o644)
    with contextlib.suppress(FileNotFoundError):
        (folder / _BEGUN).unlink()
    target = Path(place_of(order.target, str(root), below_root=order.below_root))
    link(target, folder, below_root=order.below_root)
    (root / "data").mkdir(parents=True, exist_ok=True)
    write_whole(root / "data" / f"{order.key}.json", json.dumps({"folder": str(folder), "target": str(target)}))


def is_whole(folder: Path, file: DataFile) -> bool:
    """Whether the file is there and as it was when its bytes were proven."""
    try:
        status = (folder / file.path).lstat()
    except OSError:
        return False
    return status.st_size == file.size and status.st_mtime_ns == file.stamp_s * 10**9


def _alone(root: Path, content: str) -> contextlib.AbstractContextManager[None]:
    """Return a lock that one staging of a set holds at a time; another waits and then finds everything there."""
    (root / "data").mkdir(parents=True, exist_ok=True)
    return locked(root / "data" / f"{content}.lock")


def told(order: Order, found: DataSet, done: Fetched, seconds: float) -> str:
    """Return what was done, in one line."""
    if not done.files:
        return f"data: {order.target}: {gigabytes(found.size)} were there"
    rate = done.size / seconds / 1e9 if seconds else 0.0
    line = f"data: {order.target}: {gigabytes(done.size)} in {seconds:.1f} s ({rate:.2f} GB/s)"
    line += f", {counted(done.files, 'file')}"
    kept = len(found.files) - done.files
    line += f", {kept} were there" if kept else ""
    return f"{line}; {done.unproven} proven by their length only" if done.unproven else line


def _with_held(disk: Disk, order: Order, found: DataSet) -> Disk:
    folder = Path(disk.folder) / order.content
    if not folder.is_dir():
        return disk
    held = sum(file.size for file in found.files if is_whole(folder, file))
    return Disk(folder=disk.folder, speed=disk.speed, free=disk.free, held=held)


def _begin(folder: Path) -> None:
    """After a power failure, files that no mark vouches for may have lost bytes in spite of their names."""
    boot = processes.boot_id()
    begun = read_text(folder / _BEGUN)
    if (folder / MARK).exists() or begun == boot:
        return
    if begun is not None:
        shutil.rmtree(folder)
        folder.mkdir()
    write_whole(folder / _BEGUN, boot)


def _siblings(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the files of whole sets on the same disk, by identity: the set's folder, and the path in it."""
    found: dict[str, tuple[Path, str]] = {}
    for mark in folder.parent.glob(f"*/{MARK}"):
        for path, _, identity in filter(None, map(of_mark, marked(mark.parent))):
            found[identity] = (mark.parent, path)
    return found


def _take_over(file: DataFile, folder: Path, siblings: dict[str, tuple[Path, str]]) -> bool:
    """Whether the file could be made from one that another set has: a second name for the same bytes.

    A file system bounds the names of one file (ext4: 65,000, which empty labels reach), and the kernel lets nobody link
    a file of somebody else (`protected_hardlinks`): whatever cannot be linked is fetched like any other.
    """
    other, path = siblings.get(file.identity, (folder, ""))
    if not path or not is_whole(other, replace(file, path=path)):
        return False
    place = folder / file.path
    place.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
    try:
        os.link(other / path, place)
    except OSError:
        return False
    return True


def _room_hint(there: list[Disk]) -> str:
    old = [str(mark.parent) for disk in there for mark in Path(disk.folder).glob(f"*/{MARK}")]
    if old:
        return f"rm -r {old[0]} on the node: a set of an earlier job"
    return "take machines with a larger disk: `aws: {disk_gib: …}`, or a type with instance storage"


# The path under which scripts find a set: a link to where it lies.


_OURS = re.compile(r"/(gpucloud-data|data/sets)/[0-9a-f]{64}$")


def require(target: Path, *, below_root: bool) -> None:
    """Raise NodeError when something that is not ours is at the target, or it could not be made."""
    if target.is_symlink():
        if _OURS.search(str(target.readlink())):
            return
        raise NodeError(f"{target} is a link to {target.readlink()}", hint="name another folder under `data:`")
    if target.exists():
        if target.is_dir() and not os.listdir(target):
            return
        raise NodeError(f"{target} is there already and is not empty", hint="name another folder under `data:`")
    if below_root or _writable(target) or _as_root("true"):
        return
    raise NodeError(
        f"{target} cannot be made: {_above(target)} belongs to somebody else, and sudo asks for a password",
        hint=f"name a folder below {Path.home()} under `data:`",
    )


def link(target: Path, folder: Path, *, below_root: bool) -> None:
    """Make the target a link to the folder, in one step where one was there; by sudo where it must be."""
    if target.is_symlink() and str(target.readlink()) == str(folder):
        return
    if below_root or _writable(target):
        _make(target, folder)
        return
    beside = f"{target}.gpucloud-{os.getpid()}"
    made = _as_root("mkdir", "-p", str(target.parent)) and (
        target.is_symlink() or not target.exists() or _as_root("rmdir", str(target))
    )
    made = made and _as_root("ln", "-s", "-T", str(folder), beside)
    if not made or not _as_root("mv", "-T", beside, str(target)):
        raise NodeError(f"{target} cannot be made a link to {folder}", hint="name another folder under `data:`")


def _make(target: Path, folder: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    beside = target.with_name(f".{target.name}.gpucloud-{os.getpid()}")
    beside.symlink_to(folder)
    beside.replace(target)


def _writable(target: Path) -> bool:
    return os.access(_above(target), os.W_OK)


def _above(target: Path) -> Path:
    return next(folder for folder in target.parents if folder.is_dir())


def _as_root(*argv: str) -> bool:
    try:
        return subprocess.run(["sudo", "-n", *argv], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


# The disks of this node that may hold data sets.


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
        return _as_root("mkdir", "-m", "755", str(folder)) and _as_root("chown", "-h", ours, str(folder))
    return True


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
