"""Data sets on nodes: what is in one, under which name a node keeps it, and what a job's nodes must have."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.untrusted import DATA_SET_BYTES, brief, unpacked
from gpucloud.domain.variables import GPUCLOUD_DATA

HEADROOM = 1.05
"""A disk must have this much of what is still to come: file systems keep a share for themselves."""

RESERVED = ".gpucloud-"
"""How the names begin of what a node keeps beside a set's files: what is under way, and the mark of a whole set."""

_LONGEST_NAME, _LONGEST_PATH = 255, 3500  # bytes: Linux's NAME_MAX, and PATH_MAX with room for the set's folder
_FIRST_STAMP_S = 946_684_800  # 2000-01-01: no file of a data set looks older, none younger than 2008


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of a set: its path below the set's folder, and what proves its bytes.

    From S3 `etag` as listed (with its quotes taken off) and `key`; from a folder of the caller's `sha256`.
    """

    path: str
    size: int
    etag: str = ""
    key: str = ""
    sha256: str = ""

    @property
    def identity(self) -> str:
        """What two files have in common that need be fetched once only."""
        return f"{self.size} {self.sha256 or self.etag}"

    @property
    def stamp_s(self) -> int:
        """The modification time that the file gets once its bytes are proven, in seconds; a partial one has another."""
        return _FIRST_STAMP_S + int(hashlib.sha256(self.identity.encode()).hexdigest()[:7], 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """A source as it was listed: `s3://bucket/prefix` with its bucket's region, or a path of the caller's machine."""

    source: str
    files: tuple[DataFile, ...]
    region: str | None = None

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(file.size for file in self.files)

    @property
    def content(self) -> str:
        """The name of exactly these files, wherever they come from: 64 hex digits."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.identity} {file.path}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWanted:
    """A data set that every node must have: where it comes from, and the folder in which nodes find it.

    `key` names content and target together: a node that has both answers it among its `staged`. `packed` is the set
    (`pack`), for the node. With `below_root` the target is made below the agent's folder (`place_of`).
    """

    key: str
    source: str
    target: str
    content: str
    size: int
    packed: bytes
    below_root: bool = False

    @property
    def in_s3(self) -> bool:
        """Whether nodes fetch it themselves."""
        return self.source.startswith("s3://")


def data_set(source: str, files: Iterable[DataFile], region: str | None = None) -> DataSet:
    """Return the set, its files sorted. UsageError for paths that no folder can hold together."""
    ordered = tuple(sorted(files, key=lambda file: file.path))
    names = {file.path for file in ordered}
    for file in ordered:
        parts = file.path.split("/")
        if any(part in ("", ".", "..") or part.startswith(RESERVED) for part in parts) or "\0" in file.path:
            raise UsageError(
                f"data: {source}: the key {file.key or file.path!r} cannot be a file's path", hint="rename it"
            )
        if _bytes(file.path) > _LONGEST_PATH or any(_bytes(part) > _LONGEST_NAME for part in parts):
            raise UsageError(
                f"data: {source}: {brief(file.path, 60)} is longer than a file's name can be on Linux: {_LONGEST_NAME}"
                f" bytes, {_LONGEST_PATH} with its folders",
                hint="rename it",
            )
        above = next((p for p in ("/".join(parts[:n]) for n in range(1, len(parts))) if p in names), None)
        if above is not None:
            raise UsageError(f"data: {source}: {above!r} is a file and a folder at once", hint="rename one of them")
    if not ordered:
        raise UsageError(f"data: there is nothing at {source}", hint="correct the source under `data:`")
    return DataSet(source=source, files=ordered, region=region)


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogateescape"))


def wanted(found: DataSet, target: str, cloud: Cloud) -> DataWanted:
    """Return what a node is to have of the set. Nodes of the embedded fleet share one machine's `/`, so not there."""
    content, below_root = found.content, cloud is Cloud.LOCAL
    place = target.rstrip("/")
    return DataWanted(
        key=hashlib.sha256(f"{content} {below_root} {place}".encode()).hexdigest(),
        source=found.source,
        target=place,
        content=content,
        size=found.size,
        packed=pack(found),
        below_root=below_root,
    )


def place_of(target: str, root: str, *, below_root: bool) -> str:
    """Return the path at which a node's scripts find a set; `root` is the agent's folder there."""
    return f"{root}/data/at{target.rstrip('/')}" if below_root else target.rstrip("/")


def variables(targets: tuple[str, ...], root: str, *, below_root: bool) -> dict[str, str]:
    """Return where a script finds its sets: GPUCLOUD_DATA the first one's folder, GPUCLOUD_DATA_1, _2, … each one's."""
    places = [place_of(target, root, below_root=below_root) for target in targets]
    numbered = {f"{GPUCLOUD_DATA}_{number}": place for number, place in enumerate(places, 1)}
    return {GPUCLOUD_DATA: places[0], **numbered} if places else {}


def pack(found: DataSet) -> bytes:
    """Return the set as compressed bytes, about 40 for each file."""
    rows = [[f.path, f.size, f.etag, f.key, f.sha256] for f in found.files]
    return zlib.compress(json.dumps({"source": found.source, "region": found.region, "files": rows}).encode(), 6)


def unpack(data: bytes) -> DataSet:
    """Return the set that was packed; ValueError when the bytes are not one."""
    try:
        body = json.loads(unpacked(data, DATA_SET_BYTES))
        rows = [DataFile(path=p, size=s, etag=e, key=k, sha256=h) for p, s, e, k, h in body["files"]]
        return DataSet(source=body["source"], region=body["region"], files=tuple(rows))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a data set: {error!r}") from error


def difference(old: DataSet, new: DataSet) -> str | None:
    """Return what changed at the source since `old` was listed, and what follows, in words; None for nothing.

    A machine that has the set goes on with it, whatever became of its source; a new one gets what is still as it was.
    """
    was = {file.path: file.identity for file in old.files}
    now = {file.path: file.identity for file in new.files}
    changed = sorted(path for path in was.keys() & now.keys() if was[path] != now[path])
    counts = (
        (len(changed), "changed"),
        (len(now.keys() - was.keys()), "new"),
        (len(was.keys() - now.keys()), "gone"),
    )
    said = ", ".join(f"{count} {word}" for count, word in counts if count)
    first = next(iter(changed or sorted(was.keys() ^ now.keys())), None)
    if not said:
        return None
    follows = "it goes on with the files as they were"
    if changed or was.keys() - now.keys():
        what = " or ".join(word for count, word in counts if count and word != "new")
        follows = f"no new machine can get what is {what}, only those that have it go on: put it back"
    return f"{said} (first: {first}) since this job began; {follows}"


def gigabytes(size: int) -> str:
    """Return a size in GB or MB, as people and bills count."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
