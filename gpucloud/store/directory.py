"""The object store in a directory: each object is a plain file, written whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums, bytes_in
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.untrusted import most_of
from gpucloud.store.contract import (
    RESERVED,
    Conflict,
    Heard,
    Pieces,
    StoreAway,
    Stored,
    TooLarge,
    checked,
    unheard,
    within,
)
from gpucloud.store.parts import read_parts, write_parts
from gpucloud.system.processes import try_lock

_LOCKS = f"{RESERVED}locks"
_MARKER = "gpucloud-store"
"""No hidden file: those are left behind where `store/*` is copied."""
_HIDDEN_MARKER = f"{RESERVED}store"
"""Where the marker was before; read, and no more written."""
AWAY_HINT = "mount it again, or put it, or a link to it, back where it was"
_LOCK_LIMIT_S = 10.0
_LOCK_POLL_S = 0.002
_HINTS = {
    errno.ENOSPC: "free some space there, or name another store",
    errno.EDQUOT: "free some of your quota there, or name another store",
    errno.EACCES: "make the directory writable for this user, or name another store",
    errno.EPERM: "make the directory writable for this user, or name another store",
    errno.EROFS: "the file system is read-only: name another store",
}
_OUTAGES = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN)
"""What a folder on another machine answers while that is away."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Of a link between two files of this user in one folder: what FUSE, exFAT and drives of clouds answer."""


class DirectoryStore:
    """Objects as files below `root`, which may be shared by processes and, over a network file system, machines.

    A file is written beside its place and renamed or linked into it, so a reader meets a whole object or none.
    A write that must find nothing there needs no lock: a link does that. The others to one key are ordered by a lock,
    which few other keys share, since a writer that was stopped (SIGSTOP, Ctrl-Z, a frozen node) keeps what it holds;
    it is waited for 10 s. A version is the file's modification time, made to rise with every write, and its inode.
    Store time is this machine's clock.

    With its first object a store gets an identity, in a file of its root. A root that was there and is gone, or has
    another identity or none any more, as where nothing is mounted, or another disk, is not written to: what is in the
    store is away, and not deleted. One that lacks the file alone, and has a known job's objects, is the store still,
    and gets it anew. A store of which `identities` are given was there before this process.
    """

    def __init__(self, root: Path, identities: Iterable[str] = ()) -> None:
        self.root = root.absolute()
        self.url = self.root.as_uri()
        self._was_there = False
        self._identities = frozenset(identities)
        self._away_hint = AWAY_HINT
        self._known: Callable[[], Mapping[str, str]] = dict

    @property
    def address(self) -> str:
        """The URL by which another process opens this very store, and none that is there in its place."""
        [identity] = self._identities if len(self._identities) == 1 else [self.identity]
        return f"{self.url}#{identity}" if identity is not None else self.url

    @property
    def identity(self) -> str | None:
        """What tells the store that is there from every other one; None where nothing was written yet."""
        for path in (self.root / _MARKER, self.root / _HIDDEN_MARKER):
            with _explained("read", path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if identity := path.read_text(errors="replace").strip():
                    return identity
        return None

    def expect(self, identities: Iterable[str], hint: str, known: Callable[[], Mapping[str, str]] = dict) -> None:
        """Take the store for away where what is there has none of these identities; `hint` is what helps then.

        `known` gives, by their prefixes, of what jobs that are known to be in it which store has the objects.
        """
        self._identities |= frozenset(identities)
        self._away_hint, self._known = hint, known

    def get(self, key: str) -> Stored | None:
        """Return the object, or None when there is none."""
        path = self._path(key)
        with _explained("read", path):
            try:
                with path.open("rb") as file:
                    about = os.fstat(file.fileno())
                    is_small = about.st_size <= most_of(key)
                    data = file.read(about.st_size) if is_small else b""
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._require_root(key)
                return None
        self._was_there = True
        now = datetime.now(timezone.utc)
        modified = datetime.fromtimestamp(about.st_mtime_ns / 1e9, timezone.utc)
        stored = Stored(data=data, version=_version(about), modified=modified, store_time=now)
        if not is_small:
            raise TooLarge(key, about.st_size, stored)
        return stored

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        if_absent: bool = False,
        if_version: str | None = None,
        private: bool = False,
    ) -> str:
        """Write the object whole and durably, and return its version; a condition that fails raises `Conflict`.

        A `private` one can be read by its owner only (mode 0600).
        """
        mode = 0o600 if private else 0o666
        return self._written(key, (memoryview(data),), mode, unheard, if_absent=if_absent, if_version=if_version)[0]

    def write(self, key: str, pieces: Sequence[memoryview], heard: Heard = unheard) -> Sums:
        """Write the pieces, one after the other, as one object, whole and durably, whatever is there."""
        return self._written(key, pieces, 0o666, heard, if_absent=False, if_version=None)[1]

    def read_into(self, key: str, at: int, into: memoryview) -> bool:
        """Fill `into` with the object's bytes from `at` on; False when it is missing or shorter."""
        path = self._path(key)
        with _explained("read", path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._require_root(key)
                return False
            try:
                return read_parts(descriptor, at, into)
            except IsADirectoryError:
                return False
            finally:
                os.close(descriptor)

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return every key that starts with `prefix`, sorted; TooMany for more than `LISTED_KEYS`."""
        folder = prefix.rpartition("/")[0]
        top = self._path(folder) if folder else self.root
        self._require_root(prefix)
        with _explained("list", top):
            keys = (path[len(str(self.root)) + 1 :] for path in files(str(top)))
            return within((key for key in keys if key != _MARKER), prefix)

    def delete(self, key: str) -> None:
        """Remove the object; one that is gone already is no error."""
        path = self._path(key)
        with _explained("remove", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                self._require_root(key)
                return
            sync_folder(path.parent)
        for folder in path.parents:
            if folder == self.root:
                break
            try:
                folder.rmdir()
            except OSError:  # not empty, or another writer is about to fill it
                break

    def is_empty(self) -> bool:
        """Whether nothing was ever written here: the folder is not there, or what is mounted in its place is not."""
        with _explained("list", self.root):
            return not self.root.is_dir() or next(self.root.iterdir(), None) is None

    def _require_root(self, key: str) -> None:
        """Remember which store is there; StoreError where one was, and it is not there, or another is."""
        known, was_there = self._identities, self._was_there  # ahead of the look: another thread may make it meanwhile
        found = self.identity or self._unmarked(key, known)
        if found is not None and (not known or found in known):
            self._identities = frozenset({found})
        elif found is not None:
            raise self._away("is another store than it was")
        elif not self.root.is_dir():
            if known or was_there:
                raise self._away("is not there any more" if was_there else "is not there")
        elif known:
            raise self._away("has nothing of the store that it was")
        self._was_there = self._was_there or found is not None or self.root.is_dir()

    def _unmarked(self, key: str, known: frozenset[str]) -> str | None:
        """Return which store has lost its marker: that which has objects of a known job, of this one's first."""
        own = "/".join(key.split("/")[:2])
        ours = [(own, identity) for identity in known] if "/" in own and len(known) == 1 else []
        for prefix, identity in (*ours, *self._known().items()):
            with _explained("list", self.root / prefix):
                if next(files(str(self.root / prefix)), None) is not None:
                    return identity
        return None

    def _away(self, how: str) -> StoreAway:
        return StoreAway(f"{self.root}, the store's folder, {how}", hint=self._away_hint, may_pass=True)

    def _mark(self, key: str) -> None:
        """Give the store its identity, once, or anew that which it had. One that cannot have one is used as it is."""
        beside = self.root / f"{RESERVED}{secrets.token_hex(8)}.tmp"
        [identity] = self._identities or {secrets.token_hex(16)}
        with contextlib.suppress(OSError):
            descriptor = create(beside, 0o644)
            try:
                os.fchmod(descriptor, 0o644)  # for all who use the store, whatever their umask
                os.write(descriptor, f"{identity}\n".encode())
                os.fsync(descriptor)
                os.link(beside, self.root / _MARKER)
                sync_folder(self.root)
            finally:
                os.close(descriptor)
                beside.unlink(missing_ok=True)
        self._require_root(key)

    def _path(self, key: str) -> Path:
        return self.root / checked(key)

    def _written(
        self, key: str, pieces: Pieces, mode: int, heard: Heard, *, if_absent: bool, if_version: str | None
    ) -> tuple[str, Sums]:
        path = self._path(key)
        self._require_root(key)
        if not (self.root / _MARKER).exists():
            self._mark(key)
        beside = path.with_name(f"{RESERVED}{secrets.token_hex(8)}.tmp")
        with _explained("write", path):
            # What a killed writer leaves of a large object would fill the disk.
            unnamed = create_unnamed(path.parent, mode) if bytes_in(pieces) > PART_BYTES else None
            descriptor = create(beside, mode) if unnamed is None else unnamed
            try:
                try:
                    sums = write_parts(descriptor, pieces, heard)
                    os.fsync(descriptor)
                    if unnamed is not None:
                        name_it(descriptor, beside)
                finally:
                    os.close(descriptor)
                with contextlib.nullcontext() if if_absent else self._locked(key):
                    return _place(beside, path, if_absent=if_absent, if_version=if_version), sums
            finally:
                beside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # flock belongs to the open file, so it excludes threads of one process as well as processes.
        file = self.root / _LOCKS / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:2]
        make_folder(file.parent)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _take(descriptor, file)
            yield
        finally:
            os.close(descriptor)


def _take(descriptor: int, file: Path) -> None:
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise StoreError(
                f"another process has held {file} for {_LOCK_LIMIT_S:g} s; one that is stopped keeps it",
                hint=f"end or continue that process: `fuser {file}` names it",
            )
        time.sleep(_LOCK_POLL_S)


def _place(beside: Path, path: Path, *, if_absent: bool, if_version: str | None) -> str:
    try:
        there = path.stat()
    except FileNotFoundError:
        there = None
    if if_version is not None and (there is None or _version(there) != if_version):
        raise Conflict(str(path))
    # Two writes within one tick of the file system's clock, in a reused inode, would otherwise look alike.
    moment = max(time.time_ns(), there.st_mtime_ns + 1 if there else 0)
    os.utime(beside, ns=(moment, moment))
    version = _version(beside.stat())
    if if_absent:
        try:
            os.link(beside, path)
        except FileExistsError:
            raise Conflict(str(path)) from None
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StoreError(
                f"the file system of {path.parent} has no hard links, by which one of two writers wins",
                hint="name a store on another file system, or s3://BUCKET/PREFIX",
            ) from error
    else:
        beside.replace(path)
    sync_folder(path.parent)
    return version


def _version(about: os.stat_result) -> str:
    return f"{about.st_mtime_ns:x}-{about.st_ino:x}"


@contextlib.contextmanager
def _explained(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "check that the store's directory exists and is healthy")
        away = error.errno in _OUTAGES
        raise StoreError(f"cannot {verb} {path}: {error.strerror}", hint=hint, may_pass=away) from error


def user_path(written: str | Path, what: str) -> Path:
    """Return the path that a user wrote, `~` and `~name` being home folders. UsageError where nobody has that name."""
    try:
        return Path(written).expanduser()
    except RuntimeError as error:
        user = Path(written).parts[0]
        raise UsageError(f"{what} is in {user}, and there is no such user here", hint="write the whole path") from error


# Folders of the directory store: made durably, looked through, and new files in them.


_OPEN_FILES = Path("/proc/self/fd")
_TRIES = 20
_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}  # network file systems, old kernels


def create(path: Path, mode: int) -> int:
    """Return a new file, open for writing; its folder is made if need be."""
    for _ in range(_TRIES):
        # `delete` takes empty folders away, so a folder just made may be gone again.
        with contextlib.suppress(FileNotFoundError):
            make_folder(path.parent)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    raise FileNotFoundError(errno.ENOENT, "the folder vanishes again and again", str(path.parent))


def create_unnamed(folder: Path, mode: int) -> int | None:
    """Return a new file without a name, open for writing, which is gone when its writer dies; None where there is none.

    `name_it` gives it one.
    """
    if not hasattr(os, "O_TMPFILE") or not _OPEN_FILES.is_dir():
        return None
    for _ in range(_TRIES):
        try:
            make_folder(folder)
            return os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in _NO_UNNAMED:
                return None
            raise
    return None


def name_it(descriptor: int, path: Path) -> None:
    """Give the unnamed file its name. Raises OSError."""
    opened = os.open(_OPEN_FILES, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Only with a folder does Python have the link followed to the file that is open (bpo-37612).
        os.link(str(descriptor), path, src_dir_fd=opened, follow_symlinks=True)
    finally:
        os.close(opened)


def files(top: str) -> Iterator[str]:
    """Yield the path of every file below; none where there is no folder."""
    try:
        entries = list(os.scandir(top))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.startswith(RESERVED):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from files(entry.path)
        else:
            yield entry.path


def make_folder(folder: Path) -> None:
    """Make the folder and those above it, durably; one that is there is no error."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make what was done in the folder durable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
