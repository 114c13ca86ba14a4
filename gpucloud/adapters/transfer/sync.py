"""A folder on a node made equal to the code folder here: read into a manifest, only missing contents sent."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.transfer import receiver
from gpucloud.domain.errors import NodeError, RemoteCommandFailed, StoreError, UsageError
from gpucloud.domain.job.code import FILE, FOLDER, LINK, PROGRAM, RESULTS_MARK, Entry, IgnoreRules, Manifest, manifest
from gpucloud.domain.node.bootstrap.wanted import LARGEST_CODE_BYTES
from gpucloud.domain.untrusted import landing_of
from gpucloud.ports import Host
from gpucloud.wholefile import write_whole

_ROUNDS = 4
_BATCH_BYTES = 16 << 20
_LIMIT_S = 600.0  # for one batch; a node that went silent ends the call long before


def sync_tree(host: Host, root: Path, target: str, *, python: str = "python3", cache: Path | None = None) -> str:
    """Make `<target>/<sha256 of the manifest>` on `host` equal to the tree at `root`; return that path.

    One round trip when nothing changed. Files that a job added to the remote tree stay; files of the tree that it
    changed are put right. The newest four trees below `target` are kept, and the attempt's. `cache` is a folder for
    hashes of local files.
    Raises UsageError (the folder cannot be sent), RemoteCommandFailed (no Python, no room there), HostUnreachable.
    """
    hashes = HashCache(cache, root)
    changed = ""
    for _ in range(_ROUNDS):
        try:
            tree = read_tree(root, hashes)
            _Transfer(host, root, target, tree, python).make()
        except TreeChanged as error:
            changed = str(error)
        else:
            return f"{target}/{tree.sha256}"
    raise _restless(changed)


def whole_code(root: Path, *, limit: int, cache: Path | None = None) -> tuple[str, bytes | None]:
    """Return the tree's name, and what the receiver reads to make it from nothing; None for more than `limit` bytes.

    Raises UsageError: the folder cannot be read, or changes all the time.
    """
    hashes = HashCache(cache, root)
    changed = ""
    for _ in range(_ROUNDS):
        try:
            tree = read_tree(root, hashes)
            contents = {entry.sha256: entry for entry in tree.entries if entry.sha256 is not None}
            if sum(entry.size for entry in tree.entries) > limit:
                return tree.sha256, None
            blobs = [(entry.sha256 or "", read_content(root, entry)) for entry in contents.values()]
        except TreeChanged as error:
            changed = str(error)
        else:
            return tree.sha256, _request(_packed(tree), blobs)
    raise _restless(changed)


def make_tree(folder: Path, sha256: str, stored: Callable[[], bytes]) -> Path:
    """Return the tree of that hash below `folder` here, made of what `whole_code` gave where it is not there yet.

    What was changed in it since is put right. Raises StoreError for what is not that tree, and what `stored` raises.
    """
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise StoreError(f"{sha256!a:.80} names no tree of code", hint="`gpucloud train FILE` pins it anew")
    if (why := _refusal(folder, sha256, b"")) is not None:
        why = _refusal(folder, sha256, stored())
    if why is None:
        return folder / sha256
    raise StoreError(
        f"the code in the store is not the tree {sha256:.12}…: {why}", hint="`gpucloud train FILE` pins it anew"
    )


def _refusal(folder: Path, sha256: str, request: bytes) -> str | None:
    """Return why the request does not make the tree; None where it stands."""
    most = str(LARGEST_CODE_BYTES)
    argv = (sys.executable, "-I", "-S", "-c", inspect.getsource(receiver), str(folder), sha256, most)
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(argv, input=request, capture_output=True, check=False)
    try:
        if done.returncode == 0 and json.loads(done.stdout).get("ready") is True:
            return None
    except ValueError:
        pass
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or "files of it are missing"


def _restless(changed: str) -> UsageError:
    return UsageError(
        f"code: {changed} changes while it is sent", hint="name what your tools write all the time in .gpucloudignore"
    )


class _Transfer:
    def __init__(self, host: Host, root: Path, target: str, tree: Manifest, python: str) -> None:
        self._host, self._root, self._tree = host, root, tree
        program = inspect.getsource(receiver)
        # -I: the node's home folder must not be able to shadow a module. -S: nothing of site is needed.
        self._argv = (python, "-I", "-S", "-c", program, target, tree.sha256)

    def make(self) -> None:
        missing = self._ask(b"")
        if missing is None:
            return
        packed = _packed(self._tree)
        missing = self._ask(_request(packed, []))
        for _ in range(_ROUNDS):
            if missing is None:
                return
            missing = self._send(packed, missing)
        raise NodeError(
            f"{self._host.node.id}: the code tree loses files while it is built",
            hint="is something cleaning up on the node?",
        )

    def _send(self, packed: bytes, missing: list[str]) -> list[str] | None:
        batches = list(_batches(self._tree, missing))
        for batch in batches[:-1]:
            self._ask(_request(b"", self._contents(batch)))
        return self._ask(_request(packed, self._contents(batches[-1]) if batches else []))

    def _contents(self, batch: list[Entry]) -> list[tuple[str, bytes]]:
        return [(entry.sha256 or "", read_content(self._root, entry)) for entry in batch]

    def _ask(self, request: bytes) -> list[str] | None:
        """Return None when the tree stands, else the contents that are missing (none named: the manifest is)."""
        completed = self._host.run(self._argv, stdin=request, timeout_s=_LIMIT_S)
        try:
            answer = json.loads(completed.stdout) if completed.exit_code == 0 else None
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            why = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise RemoteCommandFailed(
                f"{self._host.node.id}: code sync failed ({completed.exit_code}): {why or 'no answer'}",
                hint="the node needs python3 (3.10 or newer) and room in its home folder",
            )
        return None if answer.get("ready") is True else self._known(answer.get("missing"))

    def _known(self, missing: object) -> list[str]:
        """Return the contents that the node says it lacks; the tree has them, or the answer is none."""
        contents = {entry.sha256 for entry in self._tree.entries}
        if not isinstance(missing, list) or not all(
            isinstance(sha256, str) and sha256 in contents for sha256 in missing
        ):
            raise RemoteCommandFailed(
                f"{self._host.node.id}: it lacks what the code does not have", hint="is its python3 what it should be?"
            )
        return missing


def _packed(tree: Manifest) -> bytes:
    rows = [[entry.path, entry.size, entry.mtime_ns, entry.mode, entry.sha256] for entry in tree.entries]
    return zlib.compress(json.dumps(rows).encode(), 1)


def _request(packed: bytes, contents: list[tuple[str, bytes]]) -> bytes:
    blobs = [[sha256, len(content)] for sha256, content in contents]
    header = json.dumps([len(packed), blobs]).encode()
    return b"".join([header, b"\n", packed, *(content for _, content in contents)])


def _batches(tree: Manifest, missing: list[str]) -> Iterator[list[Entry]]:
    """Split what is missing, each content once, so that a killed sync has sent something for good."""
    by_content = {entry.sha256: entry for entry in tree.entries}
    batch: list[Entry] = []
    size = 0
    for entry in (by_content[sha256] for sha256 in missing):
        if batch and size + entry.size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch


# Reads a code folder on this machine into a manifest, hashing only what may have changed.


IGNORE_FILES = (".gitignore", ".gpucloudignore")  # the second one may take back what the first one says
LARGEST_FILE_BYTES = 1 << 30  # code, not data sets
_SETTLED_NS = 2_000_000_000  # the coarsest time stamps in use (FAT) step by 2 s
_CHUNK_BYTES = 1 << 20


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


def _walk(root: Path) -> Iterator[_Found]:
    queue = [("", IgnoreRules())]
    while queue:
        folder, above = queue.pop()
        with os.scandir(root / folder) as listing:
            items = list(listing)
        rules = _with_ignore_files(above, folder, items)
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


def _with_ignore_files(rules: IgnoreRules, folder: str, items: list[os.DirEntry[str]]) -> IgnoreRules:
    here = {item.name: item for item in items if item.name in IGNORE_FILES and item.is_file()}
    for name in IGNORE_FILES:
        if name in here:
            text = Path(here[name].path).read_text(encoding="utf-8-sig", errors="surrogateescape")
            rules = rules.with_file(folder, text)
    return rules


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
    digest = hashlib.sha256()
    with (root / found.path).open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    sha256 = digest.hexdigest()
    cache.put(found.path, found.status, sha256)
    return sha256


def _link_target(root: Path, link: Path) -> str:
    """Return the target as the node's link must have it: relative, and inside the folder."""
    target = link.readlink()
    real = os.path.realpath(link)
    if real != str(root) and not real.startswith(f"{root}{os.sep}"):
        name = link.relative_to(root)
        raise UsageError(
            f"code: the link {name} -> {target} leaves {root}",
            hint=f"copy what it names into the folder, or add `/{name}` to .gpucloudignore",
        )
    # A target may come back in after it left (`../code/x`): on the node the folder has another name.
    if landing_of(str(link.relative_to(root)), str(target)) is not None:
        return str(target)
    return os.path.relpath(real, os.path.realpath(link.parent))


def _identity(status: os.stat_result) -> list[int | str]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
