"""gpucloud's own folder for a user (keys, known jobs, Terraform's work), and what travels with the package."""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import json
import os
import pwd
import shutil
import socket
import stat
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import gpucloud
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.errors import GpucloudError, StoreError, UsageError
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.node.node import Fleet
from gpucloud.domain.state.order import OrderMark
from gpucloud.domain.supervision.strays import Owner
from gpucloud.domain.variables import GPUCLOUD_HOME, GPUCLOUD_SSH_KEY
from gpucloud.store import ObjectStore
from gpucloud.store.directory import AWAY_HINT, DirectoryStore, user_path
from gpucloud.system.processes import locked
from gpucloud.system.wholefile import write_whole

_RESERVE = 4 * 2**20
"""What ending a job, or a new order for it, writes, several times over."""
_ELSEWHERE = "have GPUCLOUD_HOME name another folder"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder `GPUCLOUD_HOME`, else the platform's folder for user data. Made on first use, for its owner only."""

    root: Path

    @property
    def store(self) -> str:
        """The store of jobs that name none."""
        return str(self.root / "store")

    @property
    def cloud(self) -> Path:
        """The embedded cloud's folder."""
        return self.root / "cloud"

    @property
    def terraform(self) -> Path:
        """Where Terraform works, a folder for each cluster."""
        return self.root / "terraform"

    @property
    def tools(self) -> Path:
        """Programs that gpucloud fetched."""
        return self.root / "tools"

    @property
    def catalog(self) -> Path:
        """Machines and list prices as AWS last told them."""
        return self.root / "catalog.json"

    @property
    def layers(self) -> Path:
        """What jobs' `setup` made, shared by the nodes of the embedded fleet."""
        return self.root / "layers"

    def key(self, job: str) -> Path:
        """The private SSH key of the job's cluster, which opens no other; made here, or out of `named_key`."""
        return self.root / "keys" / ("named" if self.named_key is not None else "made") / job

    @property
    def named_key(self) -> Path | None:
        """The private key that GPUCLOUD_SSH_KEY names: those of clusters are made from it, alike on every machine."""
        named = os.environ.get(GPUCLOUD_SSH_KEY)
        return user_path(named, GPUCLOUD_SSH_KEY) if named else None

    @property
    def signing(self) -> Path:
        """The user's signing key, and the list of keys that are trusted."""
        return self.root / "signing"

    @property
    def identity(self) -> str:
        """What tells this folder from every other one: made once, by chance."""
        path = self.root / "identity"
        with writing(path):
            if not path.is_file():
                write_whole(path, f"{uuid.uuid4().hex}\n")
            return path.read_text().strip()

    def fleet(self) -> Fleet:
        """Return what the groups of this folder's embedded fleet are named after."""
        return Fleet(identity=self.identity, host=socket.gethostname(), home=str(self.root))

    @property
    def order_marks(self) -> OrderMarks:
        """The newest orders that were seen from here."""
        return OrderMarks(self.root / "orders", give_room=partial(self.give_reserve, whole=False))

    def log(self, job: str) -> Path:
        """What the background supervisor of the job says."""
        return self.root / "logs" / f"{job}.log"

    @property
    def sightings(self) -> Path:
        """When strays were first seen as such."""
        return self.root / "sightings.json"

    def nowhere(self, job: str) -> Path:
        """Where a job's file is said to be whose own is not here."""
        return self.root / "specs" / job / "gpucloud.yaml"

    def has_folder_of(self, file: Path) -> bool:
        """Whether the folder of a job file is here, for results to come home to: nobody would find them elsewhere.

        The file tells: where its disk is not mounted, a folder may be there still.
        """
        there = os.path.isfile(file)  # noqa: PTH113  this never raises
        return there and not file.is_relative_to(self.root / "specs")

    def require_room(self, least: int) -> None:
        """Have room set aside by which a job can be ended on a full disk. StoreError where less than that is free.

        What is full is found so before any machine is rented.
        """
        with writing(self._reserve):
            free = shutil.disk_usage(self.root).free
        if not has_room(free, least):
            raise StoreError(
                f"{self.root}: {format_size(free)} free, {format_size(least)} is the least that works",
                hint=f"free some space there, or {_ELSEWHERE}",
            )
        if not self._reserve.is_file() or self._reserve.stat().st_size < _RESERVE:
            with writing(self._reserve), self._reserve.open("wb") as file:
                _fill(file.fileno(), _RESERVE)

    def give_reserve(self, *, whole: bool = True) -> None:
        """Give the room back that was set aside, where the disk is full, for a job's end; for orders a part, once."""
        with contextlib.suppress(OSError):  # no home, none to give; one that may not be written to keeps it
            if shutil.disk_usage(self.root).free < _RESERVE // (1 if whole else 4):
                os.truncate(self._reserve, min(self._reserve.stat().st_size, 0 if whole else 3 * _RESERVE // 4))

    @property
    def _reserve(self) -> Path:
        return self.root / "reserve"

    def remember(self, job: KnownJob) -> None:
        """Add the job to the known ones."""
        path = self._index / f"{job.name}.json"
        with writing(path):
            write_whole(path, json.dumps(_entry(job)))

    def clear(self, job: KnownJob) -> None:
        """Remove what is here of a job that is being deleted, all but its entry: its log, the key made for it."""
        if not self.means_another(job):
            made = self.root / "keys" / "made" / job.name
            for path in (self.log(job.name), made, made.with_name(f"{made.name}.pub")):
                path.unlink(missing_ok=True)
        self.order_marks.forget(job.store, job.name)

    def forget(self, job: KnownJob) -> None:
        """Remove the entry of a job that is deleted."""
        if not self.means_another(job):
            (self._index / f"{job.name}.json").unlink(missing_ok=True)

    def means_another(self, job: KnownJob) -> bool:
        """Whether the job's name means one of another store here: what is kept by the name alone is that one's."""
        named = self.find(job.name)
        return named is not None and named.store != job.store

    def known(self, beginning: str = "") -> tuple[KnownJob, ...]:
        """Return every known job whose name begins so, by name."""
        paths = sorted(self._index.glob(f"{beginning}*.json")) if self._index.is_dir() else []
        return tuple(self._read(path) for path in paths)

    def require_same(self, store: ObjectStore, jobs: Iterable[KnownJob]) -> ObjectStore:
        """Return the store, which is away where its folder is not the one that these jobs are in."""
        if not isinstance(store, DirectoryStore):
            return store
        there = [one for one in jobs if one.store == store.url and one.store_identity is not None]
        hint = self._hint_of_away(there) if there else AWAY_HINT
        identities = (one.store_identity for one in there if one.store_identity is not None)
        store.expect(identities, hint, partial(self._objects_in, store.url))
        return store

    def _hint_of_away(self, jobs: list[KnownJob]) -> str:
        ways = " and ".join(f"gpucloud rm {one.name} --forget" for one in jobs)
        return f"{AWAY_HINT}; if it is lost for good, {ways} forget{'s' if len(jobs) == 1 else ''} what was in it"

    def _objects_in(self, url: str) -> dict[str, str]:
        """Return where which store has the objects of each known job that is at this address."""
        with contextlib.suppress(StoreError):  # of a damaged entry all else that reads it says so
            there = [one for one in self.known() if one.store == url]
            return {f"jobs/{one.name}": one.store_identity for one in there if one.store_identity is not None}
        return {}

    def find(self, name: str) -> KnownJob | None:
        """Return the known job of that name."""
        path = self._index / f"{name}.json"
        return self._read(path) if path.is_file() else None

    @property
    def _index(self) -> Path:
        return self.root / "index"

    def _read(self, path: Path) -> KnownJob:
        try:
            entry = json.loads(path.read_text())
            return KnownJob(
                name=path.stem,
                store=entry["store"],
                file=Path(entry["file"]),
                cloud=Cloud(entry.get("cloud", "local")),
                profile=entry.get("profile"),
                store_identity=entry.get("store_identity"),
            )
        except (ValueError, KeyError) as error:
            raise StoreError(f"{path} is damaged", hint=f"remove it: rm {path}") from error


@dataclass(frozen=True, slots=True)
class OrderMarks:
    """The newest orders that were seen from this home, a file a run in a folder of theirs. Implements `Marks`."""

    root: Path
    give_room: Callable[[], None] = lambda: None

    def seen(self, store: str, job: str) -> OrderMark | None:
        """Return the mark of the newest order of a run that was seen here."""
        path = self._path(store, job)
        try:
            return from_json(OrderMark, path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} is damaged", hint=f"remove it: rm {path}") from error

    def raise_to(self, store: str, job: str, mark: OrderMark) -> None:
        """Keep the mark of the newest order of a run; one that is there and newer stays."""
        self.give_room()  # nobody goes by an order that cannot be noted: who supervises the job would end with it
        path = self._path(store, job)
        with writing(path), locked(path.with_suffix(".lock")):
            known = self.seen(store, job)
            if known is None or known < mark:
                write_whole(path, to_json(mark), lasting=True)

    def forget(self, store: str, job: str) -> None:
        """Remove the mark of a run that is deleted: a new one of its name begins with order 1."""
        self._path(store, job).unlink(missing_ok=True)

    def _path(self, store: str, job: str) -> Path:
        return self.root / f"{hashlib.sha256(f'{store} {job}'.encode()).hexdigest()[:32]}.json"


def has_room(free: int, least: int) -> bool:
    """Whether a disk with so many bytes free has room for that and for what a job's end writes."""
    return free >= least + _RESERVE


def temporary_files() -> Path:
    """Return where programs are told to put temporary files."""
    return Path(os.environ.get("TMPDIR") or "/tmp")  # noqa: S108  # nosec B108


def require_disk(what: str, folder: Path, elsewhere: str) -> None:
    """Raise StoreError where the disk that the folder is on, or is to be on, is full; `what` a job keeps there."""
    with contextlib.suppress(OSError):  # what may not be looked at, or is no folder, is told by who writes there
        free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
        if not has_room(free, 0):
            raise StoreError(
                f"{folder}, {what}: {format_size(free)} free", hint=f"free some space there, or {elsewhere}"
            )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have the file's folder, and StoreError for what cannot be written there."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        hint = f"free some space there, or {_ELSEWHERE}" if error.errno == errno.ENOSPC else _ELSEWHERE
        raise StoreError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _fill(descriptor: int, size: int) -> None:
    """Have blocks of that size, not a hole."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.write(descriptor, os.urandom(size))


def _entry(job: KnownJob) -> dict[str, str | None]:
    return {
        "store": job.store,
        "file": str(job.file),
        "cloud": job.cloud.value,
        "profile": job.profile,
        "store_identity": job.store_identity,
    }


def open_home() -> Home:
    """Return this user's folder, made if need be.

    StoreError when it cannot be made, UsageError for one that others may write to: what lies there is obeyed.
    """
    named = os.environ.get(GPUCLOUD_HOME)
    root = user_path(named, GPUCLOUD_HOME).absolute() if named else _platform_data() / "gpucloud"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {root}: {error.strerror}", hint="GPUCLOUD_HOME names another") from error
    _refuse_open(root)
    _leave_out(root)
    return Home(root.resolve())  # as it was looked at: a link on the way may lead elsewhere by and by


def _leave_out(root: Path) -> None:
    """Keep a new folder, with its keys, out of a code folder around it that is sent to machines, and out of git.

    One that holds anything yet may be somebody's code itself.
    """
    with contextlib.suppress(OSError):
        if not any(root.iterdir()):
            (root / ".gitignore").write_text("# gpucloud's own folder: keys and state, for its owner only\n*\n")


def _refuse_open(root: Path) -> None:
    """Refuse a folder that somebody else may write to, or put another in the place of, as sshd does.

    Whoever may write to a folder on the way, that of a link too, decides where the next command ends up.
    """
    real = root.resolve()
    for folder in _on_the_way(root):
        status = folder.lstat()
        is_link = stat.S_ISLNK(status.st_mode)
        may_be_anyones = os.geteuid() == 0 and folder != real and not is_link
        if status.st_uid not in (0, os.geteuid()) and not may_be_anyones:
            raise UsageError(f"{folder} belongs to another user", hint="GPUCLOUD_HOME names a folder of your own")
        if is_link:
            continue  # its own mode says nothing
        sticky = folder != real and status.st_mode & stat.S_ISVTX  # /tmp: others cannot move what is ours there
        if not sticky and _others_may_write(status):
            raise UsageError(
                f"others may write to {folder}, and what lies there is obeyed", hint=f"chmod go-w {folder}"
            )


def _on_the_way(path: Path) -> Iterator[Path]:
    """Yield every folder and link that the system goes through to a folder, and the folder, each by its real path."""
    at, parts = Path(path.anchor), list(path.parts[:0:-1])
    yield at
    while parts:
        part = parts.pop()
        at = at.parent if part == ".." else at / part
        yield at
        if at.is_symlink():
            target = at.readlink()
            parts += [part for part in target.parts[::-1] if part != target.anchor]
            at = Path(target.anchor) if target.is_absolute() else at.parent


def _others_may_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """Return whether nobody else is in the group: many systems give each user one of their own, and umask 002."""
    if gid == 0:
        return True
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _platform_data() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")


# When strays were first seen, in one file of the user's own folder.


class SightingsFile:
    """Implements `Sightings`. A damaged file counts as none: everything is then seen for the first time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, owner: Owner) -> dict[str, datetime]:
        """Return what was kept for this owner."""
        kept = self._all().get(_key(owner), {})
        try:
            return {key: datetime.fromisoformat(at) for key, at in kept.items()}
        except (ValueError, TypeError, AttributeError):
            return {}

    def save(self, owner: Owner, first_seen: Mapping[str, datetime]) -> None:
        """Keep it; what other owners have stays."""
        kept = {**self._all(), _key(owner): {key: at.isoformat() for key, at in first_seen.items()}}
        with writing(self._path):
            write_whole(self._path, json.dumps(kept))

    def _all(self) -> dict[str, dict[str, str]]:
        try:
            kept = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}


def _key(owner: Owner) -> str:
    return f"{owner.account} {owner.store}"


# Finds the folders that travel with the package: `terraform/` and `templates/`.


def bundled(*parts: str) -> Path:
    """Return the path of a bundled file or folder, as in `bundled("terraform", "local")`.

    A wheel holds it in `gpucloud/bundled/`; a checkout, or an editable install of one, at the repository's root.
    """
    package = Path(gpucloud.__file__).resolve().parent
    for root in (package / "bundled", package.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise GpucloudError(
        f"this installation of gpucloud lacks {'/'.join(parts)}",
        hint="install gpucloud anew, from a wheel or a whole checkout",
    )
