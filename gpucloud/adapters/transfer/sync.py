"""What a job brings to its nodes: its code, a folder there made equal to the one here; and its data sets.

Code is read into a manifest, and only missing contents are sent. Data sets come from buckets, which are listed here and
read by the nodes themselves, and from folders of this machine.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpucloud.adapters.transfer.copying import Copier, NodeProgram, batches, program_argv, request
from gpucloud.adapters.transfer.localfiles import (
    HashCache,
    Sent,
    TreeChanged,
    local_tree,
    read_content,
    read_tree,
    sent,
    sha256_of,
)
from gpucloud.domain import codec
from gpucloud.domain.errors import NodeError, StoreError, UsageError
from gpucloud.domain.job.code import LARGEST_CODE_BYTES, Entry, Manifest, WholeCode
from gpucloud.domain.job.data import DataFile, DataSet, DataWanted, data_set, unpack
from gpucloud.ports import Host
from gpucloud.store.s3client import Objects
from gpucloud.system.processes import last_line

_ROUNDS = 4


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


def whole_code(root: Path, *, limit: int, apart: str = "", cache: Path | None = None) -> WholeCode:
    """Return the tree by its name, and what the receiver reads to make it of nothing; none for more than `limit` bytes.

    `apart` is the path in it of the job file, which is no code; empty where it lies elsewhere.
    Raises UsageError: the folder cannot be read, or changes all the time.
    """
    hashes = HashCache(cache, root)
    changed = ""
    for _ in range(_ROUNDS):
        try:
            tree = read_tree(root, hashes)
            contents = {entry.sha256: entry for entry in tree.entries if entry.sha256 is not None}
            if sum(entry.size for entry in tree.entries) > limit:
                return WholeCode(sha256=tree.sha256, own_sha256=tree.without(apart).sha256, packed=None)
            blobs = [(entry.sha256 or "", read_content(root, entry)) for entry in contents.values()]
        except TreeChanged as error:
            changed = str(error)
        else:
            packed = _request(_packed(tree), blobs)
            return WholeCode(sha256=tree.sha256, own_sha256=tree.without(apart).sha256, packed=packed)
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


def _refusal(folder: Path, sha256: str, stored: bytes) -> str | None:
    """Return why what is stored does not make the tree; None where it stands."""
    asked = request(str(folder), "", "tree", name=sha256, most_bytes=LARGEST_CODE_BYTES)
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(program_argv(sys.executable), input=asked + stored, capture_output=True, check=False)
    try:
        if done.returncode == 0 and codec.from_json(_Stands, done.stdout).ready:
            return None
    except codec.Malformed:
        pass
    return last_line(done.stderr) or "files of it are missing"


def _restless(changed: str) -> UsageError:
    return UsageError(
        f"code: {changed} changes while it is sent", hint="name what your tools write all the time in .gpucloudignore"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stands:
    """What a node says of a tree: that it stands, or what is missing (none named: the manifest)."""

    ready: bool
    missing: tuple[str, ...]


class _Transfer:
    def __init__(self, host: Host, root: Path, target: str, tree: Manifest, python: str) -> None:
        self._node, self._root, self._tree = host.node.id, root, tree
        self._program = NodeProgram(host, target, python=python)

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
            f"{self._node}: the code tree loses files while it is built", hint="is something cleaning up on the node?"
        )

    def _send(self, packed: bytes, missing: tuple[str, ...]) -> tuple[str, ...] | None:
        """Send each content once, in batches, so that a killed sync has sent something for good."""
        by_content = {entry.sha256: entry for entry in self._tree.entries}
        lacking = [by_content[sha256] for sha256 in dict.fromkeys(missing)]
        grouped = list(batches(lacking, lambda entry: entry.size, most=len(lacking)))
        for batch in grouped[:-1]:
            self._ask(_request(b"", self._contents(batch)))
        return self._ask(_request(packed, self._contents(grouped[-1]) if grouped else []))

    def _contents(self, batch: list[Entry]) -> list[tuple[str, bytes]]:
        return [(entry.sha256 or "", read_content(self._root, entry)) for entry in batch]

    def _ask(self, given: bytes) -> tuple[str, ...] | None:
        """Return None when the tree stands, else the contents that it lacks: it has them, or this is no answer."""
        said = self._program.ask(_Stands, "tree", given, name=self._tree.sha256, most_bytes=None)
        if not {*said.missing} <= {entry.sha256 for entry in self._tree.entries}:
            raise self._program.untrue("it lacks what the code does not have")
        return None if said.ready else said.missing


def _packed(tree: Manifest) -> bytes:
    rows = [[entry.path, entry.size, entry.mtime_ns, entry.mode, entry.sha256] for entry in tree.entries]
    return zlib.compress(json.dumps(rows).encode(), 1)


def _request(packed: bytes, contents: list[tuple[str, bytes]]) -> bytes:
    blobs = [[sha256, len(content)] for sha256, content in contents]
    header = json.dumps([len(packed), blobs]).encode()
    return b"".join([header, b"\n", packed, *(content for _, content in contents)])


# Where data sets come from: buckets, and folders of this machine.


_READ_ONLY = 0o444


class Sources:
    """Implements `DataSets`. `profile` is the AWS profile that may list the buckets; `cache` keeps hashes of files."""

    def __init__(self, *, profile: str | None = None, python: str = "python3", cache: Path | None = None) -> None:
        self._profile = profile
        self._python = python
        self._cache = cache
        self._found: dict[str, DataSet] = {}

    def listed(self, source: str) -> DataSet:
        """Return what is there now; a bucket is asked once in the life of this object.

        UsageError for nothing, StoreError naming the permission that is missing.
        """
        if not source.startswith("s3://"):
            return self._hashed(Path(source))
        if source not in self._found:
            self._found[source] = self._listed_in_s3(source)
        return self._found[source]

    def send(self, host: Host, wanted: DataWanted, folder: str, missing: tuple[str, ...]) -> None:
        """Send files into `folder` on the host, each proven there. UsageError for one that is not what it was.

        NodeError where the host lacks what the data set does not have.
        """
        known = {file.path: file for file in unpack(wanted.packed).files}
        if not known.keys() >= set(missing):
            raise NodeError(f"{host.node.id}: it lacks files that the data set does not have")
        hashes = HashCache(self._cache, Path(wanted.source))
        files = tuple(self._sent(Path(wanted.source), known[path], hashes) for path in missing)
        Copier(host, folder, python=self._python).send(files)

    def _listed_in_s3(self, source: str) -> DataSet:
        objects = Objects(source, profile=self._profile)
        try:
            region = objects.region()
            return data_set(source, objects.listed(), region)
        finally:
            objects.close()

    def _sent(self, source: Path, file: DataFile, hashes: HashCache) -> Sent:
        local = source / file.path if source.is_dir() else source
        status = local.stat() if local.is_file() else None
        if (
            status is None
            or status.st_size != file.size
            or (hashes.get(file.path, status) or sha256_of(local)) != file.sha256
        ):
            raise UsageError(
                f"data: {local} is not what it was when the job began", hint="put it back, or give the job another name"
            )
        stamp_ns = file.stamp_s * 10**9
        return replace(sent(local, file.path), sha256=file.sha256, mode=_READ_ONLY, mtime_ns=stamp_ns)

    def _hashed(self, source: Path) -> DataSet:
        if source.is_file():
            return data_set(str(source), [_file(sent(source, source.name), sha256_of(source))])
        if not source.is_dir():
            raise UsageError(f"data: there is nothing at {source}", hint="correct the source under `data:`")
        files, links = local_tree(source, "")
        if links:
            raise UsageError(f"data: {source / links[0][0]} is a link", hint="put the file itself there")
        hashes = HashCache(self._cache, source)
        rows = []
        for one in files:
            status = one.local.stat()
            sha256 = hashes.get(one.path, status) or sha256_of(one.local)
            hashes.put(one.path, status, sha256)
            rows.append(_file(one, sha256))
        hashes.save()
        return data_set(str(source), rows)


def _file(one: Sent, sha256: str) -> DataFile:
    return DataFile(path=one.path, size=one.size, sha256=sha256)
