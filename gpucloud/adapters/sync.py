"""Makes a folder on a node equal to the code folder here, sending only contents that the node does not have."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.adapters import receiver
from gpucloud.adapters.worktree import HashCache, TreeChanged, read_content, read_tree
from gpucloud.domain.bootstrap.noderecord import LARGEST_CODE_BYTES
from gpucloud.domain.errors import NodeError, RemoteCommandFailed, StoreError, UsageError
from gpucloud.domain.tree import Entry, Manifest
from gpucloud.ports import Host

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
