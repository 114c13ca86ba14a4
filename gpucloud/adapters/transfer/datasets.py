"""Where data sets come from: buckets, and folders of this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpucloud.adapters.transfer.copying import Copier
from gpucloud.adapters.transfer.localfiles import HashCache, Sent, local_tree, sent, sha256_of
from gpucloud.domain.errors import NodeError, UsageError
from gpucloud.domain.job.data import DataFile, DataSet, DataWanted, data_set, unpack
from gpucloud.ports import Host
from gpucloud.store.s3client import Objects

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
        files = tuple(self._sent(Path(wanted.source), known[path]) for path in missing)
        Copier(host, folder, python=self._python).send(files)

    def _listed_in_s3(self, source: str) -> DataSet:
        objects = Objects(source, profile=self._profile)
        try:
            region = objects.region()
            return data_set(source, objects.listed(), region)
        finally:
            objects.close()

    def _sent(self, source: Path, file: DataFile) -> Sent:
        local = source / file.path if source.is_dir() else source
        if not local.is_file() or local.stat().st_size != file.size:
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
