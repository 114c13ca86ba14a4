"""Measures what `gpucloud checkpoints` does with large checkpoints: verifies, pulls and exports them.

`python -m tests.bench.bench_reading [BYTES]`: from a folder, and from an S3 server in memory that shares the cores.
Each runs in a process of its own, whose memory may grow by the parts that move at once and a little more, however large
the checkpoint is. `export_columns` is of tensors of which each rank has some columns: the most stretches to put
together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Piece,
    Promise,
    commit_key,
    data_key,
    generation_bytes,
    generation_key,
    manifest_bytes,
    read_manifest,
)
from gpucloud.domain.checkpoint.objects import PART_BYTES, entries_of, header_bytes, placed
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.parts import THREADS
from gpucloud.usecases.checkpoint import pulling
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.checkpoint.pulling import Puller
from tests.bench import transport_candidates
from tests.bench.figures import figure
from tests.standins.fast_bucket import in_a_process

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "jobs/large/checkpoints"
WORK = ("verify", "pull", "export", "export_columns")
RANKS, TENSORS, COLUMNS = 2, 8, 4096
TRIES = 2  # the first warms up
LIMIT_S = 600
EXTRA_MIB = THREADS * PART_BYTES / 2**20 + 64

Work = Callable[[], None]


def main() -> int:
    given = sys.argv[1:] if sys.argv[0].endswith("bench_reading.py") else []
    if len(given) > 1:
        return _work(*given)
    size = int(float(given[0])) if given else 1 << 30
    kept = []
    with tempfile.TemporaryDirectory() as disk, in_a_process() as environment:
        for kind, url in (("directory", f"{disk}/store"), ("s3", "s3://bucket/large")):
            disk_s = _run("disk", url, disk, str(size), environment)["seconds"]
            for work in WORK:
                found = _run(work, url, disk, str(size), environment)
                name, gigabytes = f"reading_{kind}_{work}", found["bytes"] / 1e9
                figure(f"{name}_gb_per_s", gigabytes / found["seconds"])
                figure(f"{name}_time_over_disk", found["seconds"] / disk_s)
                figure(f"{name}_cpu_s_per_gb", found["cpu_s"] / gigabytes)
                kept.append(figure(f"{name}_extra_mib", found["extra_mib"], EXTRA_MIB))
    return 0 if all(kept) else 1


def _run(work: str, url: str, disk: str, size: str, environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__)), work, url, disk, size]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"reading: {work} from {url} failed")
    return dict(json.loads(done.stdout))


def _work(work: str, url: str, disk: str, size: str) -> int:
    """Make the checkpoint, do the work several times, and print what that took; `disk` only writes as many bytes."""
    store, folder = open_store(url), Path(disk)
    manifest = _made(store, int(size), columns=work == "export_columns")
    stored_checkpoints = StoredCheckpoints(store=store, prefix=PREFIX, keep=3)
    measured = transport_candidates._measured(_of(work)(stored_checkpoints, folder), tries=TRIES)
    print(json.dumps({"bytes": sum(piece.size for piece in manifest.pieces), **measured}))
    return 0


def _of(work: str) -> Callable[[StoredCheckpoints, Path], Work]:
    return {"verify": _verify, "pull": _pull, "disk": _disk}.get(work, _export)


def _disk(stored_checkpoints: StoredCheckpoints, folder: Path) -> Work:
    block = memoryview(bytearray(PART_BYTES))
    size = sum(piece.size for piece in _manifest(stored_checkpoints).pieces)

    def write() -> None:
        with (folder / "plain").open("wb", buffering=0) as file:
            for at in range(0, size, PART_BYTES):
                file.write(block[: size - at])
            os.fsync(file.fileno())

    return write


def _verify(stored_checkpoints: StoredCheckpoints, _folder: Path) -> Work:
    def verify() -> None:
        assert stored_checkpoints.verify(_manifest(stored_checkpoints).pieces) == ()

    return verify


def _pull(stored_checkpoints: StoredCheckpoints, folder: Path) -> Work:
    def pull() -> None:
        target = DirectoryStore(Path(tempfile.mkdtemp(dir=folder)))
        pulled = Puller(stored_checkpoints=stored_checkpoints, target=target).pull(
            _manifest(stored_checkpoints), lambda size: None
        )
        assert pulled.fetched == pulled.size

    return pull


def _export(stored_checkpoints: StoredCheckpoints, folder: Path) -> Work:
    def export() -> None:
        manifest = _manifest(stored_checkpoints)
        plan = pulling.planned(stored_checkpoints, manifest, everything=False, about={})
        pulling.write(stored_checkpoints, manifest, plan, folder / "w.safetensors")
        assert plan.tensors == RANKS * TENSORS

    return export


def _manifest(stored_checkpoints: StoredCheckpoints) -> Manifest:
    found = stored_checkpoints.store.get(f"{PREFIX}/{commit_key(Commit(1, 10))}")
    assert found is not None
    return read_manifest(found.data)


def _made(store: ObjectStore, size: int, *, columns: bool) -> Manifest:
    """Write a checkpoint of two ranks: whole tensors on each, or the half of each tensor's columns."""
    commit, pieces = Commit(1, 10), []
    rows = size // (RANKS * TENSORS * COLUMNS * 4)
    for rank in range(RANKS):
        parts = {
            f"model.w{n}": ((rows, COLUMNS // RANKS), (0, rank * COLUMNS // RANKS))
            if columns
            else ((rows, COLUMNS), None)
            for n in (range(RANKS * TENSORS) if columns else range(rank * TENSORS, (rank + 1) * TENSORS))
        }
        tensors = placed((name, "F32", extent) for name, (extent, _) in parts.items())
        shards = {
            name: {"of": name, "shape": (rows, COLUMNS), "offset": offset}
            for name, (_, offset) in parts.items()
            if offset is not None
        }
        head = header_bytes(entries_of(tensors), {**_trees(rank), "shards": json.dumps(shards)})
        body = _bytes(sum(tensor.end - tensor.begin for tensor in tensors))
        key = data_key(commit, f"rank-{rank:05d}-of-{RANKS:05d}.safetensors")
        sums = store.write(f"{PREFIX}/{key}", (memoryview(head), body))
        pieces.append(Piece(key=key, size=sums.size, crc32=sums.crc32))
        del body
    manifest = Manifest(commit=commit, world=RANKS, promise=Promise(), pieces=tuple(pieces))
    store.put(f"{PREFIX}/{generation_key(1)}", generation_bytes(base=None, owner="bench"))
    store.put(f"{PREFIX}/{commit_key(commit)}", manifest_bytes(manifest))
    return manifest


def _trees(rank: int) -> dict[str, str]:
    weights = {f"w{n}": {"$": "tensor", "name": f"model.w{n}"} for n in range(RANKS * TENSORS)}
    shared = {"modules": {"model": weights}, "optimizers": {}, "names": {"model": list(weights)}}
    return {
        "own": json.dumps({"buffers": {"model": {}}, "others": {}}),
        **({"shared": json.dumps(shared)} if not rank else {}),
    }


def _bytes(size: int) -> memoryview:
    found = memoryview(bytearray(size))
    block = os.urandom(1 << 20)
    for at in range(0, size, len(block)):
        stop = min(at + len(block), size)
        found[at:stop] = block[: stop - at]
    return found


if __name__ == "__main__":
    sys.exit(main())
