"""What of this machine goes to nodes: files and folders as they are, and code as a manifest with hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from gpucloud.domain import codec
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.code import FILE, FOLDER, LINK, PROGRAM, RESULTS_MARK, Entry, IgnoreRules, Manifest, manifest
from gpucloud.domain.state.state import Attempt, MissingOutput
from gpucloud.domain.untrusted import landing_of
from gpucloud.system.wholefile import write_whole

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A file of this machine and what it becomes on a node; `sha256` where it is known already."""

    local: Path
    path: str
    size: int
    mode: int
    mtime_ns: int
    sha256: str = ""


def sent(local: Path, path: str) -> Sent:
    """Return a local file as one to be sent to a path."""
    status = local.stat()
    mode = stat.S_IMODE(status.st_mode) & 0o777
    return Sent(local=local, path=path, size=status.st_size, mode=mode, mtime_ns=status.st_mtime_ns)


def local_tree(folder: Path, below: str) -> tuple[tuple[Sent, ...], tuple[tuple[str, str], ...]]:
    """Return the files of a folder and its links, to be sent `below` a path. UsageError for a link that leads out."""
    files, links = [], []
    real = Path(os.path.realpath(folder))
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder).as_posix()
        name = f"{below}/{inner}" if below else inner
        if path.is_symlink():
            target = _link_inside(real, real / inner)
            if target is None:
                raise UsageError(f"the link {path} leads out of {folder}", hint="copy what it names into the folder")
            links.append((name, target))
        elif path.is_file():
            files.append(sent(path, name))
    return tuple(files), tuple(links)


def sha256_of(path: Path) -> str:
    """Return the hash of a local file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


# Code: a folder read into a manifest, hashing only what may have changed.


IGNORE_FILES = (".gitignore", ".gpucloudignore")  # the second one may take back what the first one says
LARGEST_FILE_BYTES = 1 << 30  # code, not data sets
_SETTLED_NS = 2_000_000_000  # the coarsest time stamps in use (FAT) step by 2 s


class TreeChanged(Exception):
    """The folder changed while it was read; read it again."""


class HashCache:
    """Hashes of files by path, valid while size, times and inode stay. `folder` None keeps them in memory only."""

    def __init__(self, folder: Path | None, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
        self._file = folder / f"tree-{name}.json" if folder else None
        self._known: dict[str, list[int | str]] = self._load()
        self._used: dict[str, list[int | str]] = {}

    def get(self, path: str, status: os.stat_result) -> str | None:
        """Return the hash of the file at `path` if the file is the one that was hashed."""
        known = self._known.get(path)
        if known is None or known[:-1] != _identity(status):
            return None
        self._used[path] = known
        return str(known[-1])

    def put(self, path: str, status: os.stat_result, sha256: str) -> None:
        """Remember a hash, unless the file is so young that a later write might leave the same times."""
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._used[path] = [*_identity(status), sha256]

    def save(self) -> None:
        """Keep what was used since it was loaded; forget the rest. That it cannot be written is no error."""
        changed = self._used != self._known
        self._known, self._used = self._used, {}
        if self._file is None or not changed:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(self._known))

    def _load(self) -> dict[str, list[int | str]]:
        if self._file is None:
            return {}
        try:
            known = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def read_tree(root: Path, cache: HashCache) -> Manifest:
    """Return the manifest of the folder `root` without what its ignore files name, and without results that came home.

    Links inside the folder stay links. Raises UsageError for a link that leaves the folder, a socket, pipe or
    device, a file above 1 GiB and what cannot be read; TreeChanged when a file went away meanwhile.
    """
    if not root.is_dir():
        raise UsageError(f"code: {root} is not a folder", hint="set `code:` to the folder that holds your script")
    real_root = Path(os.path.realpath(root))
    try:
        tree = manifest(tuple(_entry(real_root, found, cache) for found in _walk(real_root)))
    except FileNotFoundError as gone:
        raise TreeChanged(str(gone.filename)) from gone
    except OSError as error:
        raise UsageError(
            f"code: cannot read {error.filename}: {error.strerror}",
            hint="name it in .gpucloudignore if nodes do not need it",
        ) from error
    cache.save()
    return tree


def read_content(root: Path, entry: Entry) -> bytes:
    """Return the bytes of a file or the target of a link. Raises TreeChanged when they are not the hashed ones."""
    real_root = Path(os.path.realpath(root))
    path = real_root / entry.path
    try:
        content = os.fsencode(_link_target(real_root, path)) if entry.mode == LINK else path.read_bytes()
    except OSError as error:
        raise TreeChanged(entry.path) from error
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise TreeChanged(entry.path)
    return content


@dataclass(frozen=True, slots=True)
class _Found:
    path: str
    status: os.stat_result


def kept_at_home_by(root: Path, path: str) -> str | None:
    """Return the ignore file, relative to the code folder, or the rule, by which one of its files is not sent."""
    rules, folder, parts = IgnoreRules(), "", path.split("/")
    for at, name in enumerate(parts):
        rules = _with_ignore_files(rules, root, folder)
        place, is_folder = f"{folder}/{name}" if folder else name, at < len(parts) - 1
        if rules.ignored(place, is_folder=is_folder):
            return _naming(root, place, is_folder=is_folder)
        folder = place
    return None


def place_in_code(root: Path, place: Path) -> str | None:
    """Return where a file or folder lies in the code folder that is sent with it; None for one that is no code."""
    own, root = Path(os.path.realpath(place)), Path(os.path.realpath(root))
    if not own.is_relative_to(root) or own == root:
        return None
    path = own.relative_to(root).as_posix()
    results = any((root / folder / RESULTS_MARK).exists() for folder in accumulate(path.split("/"), "{}/{}".format))
    inside = f"{path}/{RESULTS_MARK}" if own.is_dir() else path
    return None if results or kept_at_home_by(root, inside) is not None else path


def _naming(root: Path, path: str, *, is_folder: bool) -> str:
    """Return the nearest ignore file that alone keeps the path at home."""
    folders = ["", *accumulate(path.split("/")[:-1], "{}/{}".format)]
    for folder in reversed(folders):
        for name, text in reversed([*_ignore_files(root / folder)]):
            if IgnoreRules().with_file(folder, text).ignored(path, is_folder=is_folder):
                return f"{folder}/{name}" if folder else name
    return "gpucloud"


def _walk(root: Path) -> Iterator[_Found]:
    queue = [("", IgnoreRules())]
    while queue:
        folder, above = queue.pop()
        with os.scandir(root / folder) as listing:
            items = list(listing)
        rules = _with_ignore_files(above, root, folder)
        kept = 0
        for item in items:
            path = f"{folder}/{item.name}" if folder else item.name
            is_folder = item.is_dir(follow_symlinks=False)
            if rules.ignored(path, is_folder=is_folder):
                continue
            kept += 1
            if is_folder and (root / path / RESULTS_MARK).exists():
                continue  # a folder that has nothing else is none that a script needs empty
            if is_folder:
                queue.append((path, rules))
            else:
                yield _Found(path, item.stat(follow_symlinks=False))
        if folder and not kept:
            yield _Found(folder, (root / folder).lstat())


def _with_ignore_files(rules: IgnoreRules, root: Path, folder: str) -> IgnoreRules:
    for _, text in _ignore_files(root / folder):
        rules = rules.with_file(folder, text)
    return rules


def _ignore_files(folder: Path) -> Iterator[tuple[str, str]]:
    for name in IGNORE_FILES:
        if (folder / name).is_file():
            yield name, (folder / name).read_text(encoding="utf-8-sig", errors="surrogateescape")


def _entry(root: Path, found: _Found, cache: HashCache) -> Entry:
    status, path = found.status, found.path
    mode, size, sha256 = FOLDER, 0, None
    if stat.S_ISREG(status.st_mode):
        mode, size = (PROGRAM if status.st_mode & 0o100 else FILE), status.st_size
        sha256 = cache.get(path, status) or _hashed(root, found, cache)
    elif stat.S_ISLNK(status.st_mode):
        target = os.fsencode(_link_target(root, root / path))
        mode, size, sha256 = LINK, len(target), hashlib.sha256(target).hexdigest()
    elif not stat.S_ISDIR(status.st_mode):
        raise UsageError(f"code: {path} is a socket, pipe or device", hint=f"add `/{path}` to .gpucloudignore")
    return Entry(path=path, size=size, mtime_ns=status.st_mtime_ns, mode=mode, sha256=sha256)


def _hashed(root: Path, found: _Found, cache: HashCache) -> str:
    if found.status.st_size > LARGEST_FILE_BYTES:
        size_gib = found.status.st_size / (1 << 30)
        raise UsageError(
            f"code: {found.path} is {size_gib:.1f} GiB; code is synced, data is staged",
            hint=f"add `/{found.path}` to .gpucloudignore and name it under `data:`",
        )
    sha256 = sha256_of(root / found.path)
    cache.put(found.path, found.status, sha256)
    return sha256


def _link_target(root: Path, link: Path) -> str:
    """Return the target as the node's link must have it: relative, and inside the folder."""
    target = _link_inside(root, link)
    if target is None:
        name = link.relative_to(root)
        raise UsageError(
            f"code: the link {name} -> {link.readlink()} leaves {root}",
            hint=f"copy what it names into the folder, or add `/{name}` to .gpucloudignore",
        )
    return target


def _link_inside(root: Path, link: Path) -> str | None:
    """Return a link's text as it leads inside wherever the folder lies, None if it does not; `root` has no links."""
    target = str(link.readlink())
    real = os.path.realpath(link)
    if real != str(root) and not real.startswith(f"{root}{os.sep}"):
        return None
    # A target may come back in after it left (`../code/x`): on the node the folder has another name.
    if landing_of(str(link.relative_to(root)), target) is not None:
        return target
    return os.path.relpath(real, os.path.realpath(link.parent))


def _identity(status: os.stat_result) -> list[int | str]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


# Results that came home, beside the job file: a mark says that they are no code, and from where which of them came.

_MOST_NOTED = 1 << 16  # the newest count: a folder may have them of many runs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Came:
    """The outputs of an attempt came from the node of its rank 0, all but what is missing.

    Runs of one name come into one folder, and hosts of one's own have the same ids in each: when it began tells them
    apart.
    """

    node_id: str
    attempt: int
    started_at: datetime
    missing: tuple[MissingOutput, ...] = ()
    beside: int = 0
    """How many files lay there then that are none of its run's."""


def mark_results(folder: Path) -> None:
    """Mark what came home as results, where anything has; what cannot be marked is code, as any other folder."""
    with contextlib.suppress(OSError):
        if folder.is_dir():
            (folder / RESULTS_MARK).touch()


@dataclass(slots=True)
class CameNotes:
    """Keeps in the mark which attempts' outputs came: the store may take no word of it before their machine goes."""

    folder: Path
    _seen: list[int | str] = field(default_factory=list)
    _noted: tuple[_Came, ...] = ()

    def note(
        self,
        attempt: Attempt,
        missing: tuple[MissingOutput, ...],
        began: datetime,
        brought: Container[str] = frozenset(),
    ) -> None:
        """Note that the attempt's came, all but what is missing; where that cannot be written, nothing is noted.

        Counted with it are files that lay there when its run began, less those that it `brought` as they were.
        """
        with contextlib.suppress(OSError):
            if self.folder.is_dir():
                beside = sum(1 for name in _lain_since(self.folder, began) if name not in brought)
                with (self.folder / RESULTS_MARK).open("a") as mark:
                    mark.write(f"\n{codec.to_json(replace(_came(attempt), missing=missing, beside=beside))}\n")

    def came(self, attempt: Attempt) -> tuple[MissingOutput, ...] | None:
        """Return what was missing when the attempt's came, None where that is not noted. Asked at each look."""
        found = self._found(attempt)
        return found.missing if found is not None else None

    def beside(self, attempt: Attempt) -> int:
        """Return how many files lay there when the attempt's came that are none of its run's, 0 where nobody knows."""
        found = self._found(attempt)
        return found.beside if found is not None else 0

    def _found(self, attempt: Attempt) -> _Came | None:
        with contextlib.suppress(OSError), (self.folder / RESULTS_MARK).open("rb") as mark:
            seen = _identity(os.fstat(mark.fileno()))
            if seen != self._seen:
                mark.seek(max(0, mark.seek(0, os.SEEK_END) - _MOST_NOTED))
                self._noted, self._seen = tuple(_noted(mark.read(_MOST_NOTED))), seen
            found = [one for one in self._noted if replace(one, missing=(), beside=0) == _came(attempt)]
            return found[-1] if found else None
        return None


def _came(attempt: Attempt) -> _Came:
    return _Came(node_id=attempt.members[0].node_id, attempt=attempt.number, started_at=attempt.started_at)


def _lain_since(folder: Path, began: datetime) -> Iterator[str]:
    """Yield the names of files that nobody has touched since: what arrives keeps its times, but not that of the disk.

    What was set aside meanwhile has another name by that, and was told.
    """
    for base, _, names in os.walk(folder):
        for path in (Path(base, name) for name in names if name != RESULTS_MARK):
            with contextlib.suppress(OSError):
                if path.lstat().st_ctime < began.timestamp():
                    yield path.relative_to(folder).as_posix()


def _noted(mark: bytes) -> Iterator[_Came]:
    for line in mark.splitlines():
        with contextlib.suppress(codec.Malformed):  # cut off, or of another version
            yield codec.from_json(_Came, line)
