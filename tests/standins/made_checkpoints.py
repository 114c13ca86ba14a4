"""Checkpoints as `gpucloud.resume` lays them out, made without torch: quick, and of any sharding."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from decimal import Decimal

from gpucloud.adapters.home import open_home
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Notes,
    Piece,
    Promise,
    Why,
    commit_key,
    data_key,
    generation_bytes,
    generation_key,
    manifest_bytes,
)
from gpucloud.domain.checkpoint.objects import entries_of, header_bytes, placed, size_of, sums_of
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.offer import Market, Pool
from gpucloud.domain.state.state import JobState
from gpucloud.store import ObjectStore, open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.unit.worlds import put_job


@dataclass
class Made:
    """One checkpoint's tensors, by their names in it: type, shape and bytes; `tensors` are put into `store`."""

    store: ObjectStore
    prefix: str
    commit: Commit
    seed: int = 0
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)

    def tensor(self, name, dtype, shape):
        data = random.Random(f"{self.seed}/{name}/{self.commit}").randbytes(size_of(dtype, shape))
        self.tensors[name] = (dtype, shape, data)
        return {"$": "tensor", "name": name}

    def put(self, ranks, metadata, *, base=None, why=Why.DUE, notes=None):
        """Write objects, record and manifest. Each rank has names, or (name, offset, extent)."""
        pieces = []
        for rank, wanted in enumerate(ranks):
            data = self._object(wanted, metadata if rank == 0 else {"own": "{}"})
            name = f"rank-{rank:05d}-of-{len(ranks):05d}.safetensors"
            key = data_key(self.commit, name)
            self.store.put(f"{self.prefix}/{key}", data)
            sums = sums_of((memoryview(data),))
            pieces.append(Piece(key=key, size=sums.size, crc32=sums.crc32))
        about = {"promise": Promise(), "why": why, "notes": notes or Notes()}
        manifest = Manifest(commit=self.commit, world=len(ranks), pieces=tuple(pieces), **about)
        record = generation_bytes(base=base, owner="test")
        self.store.put(f"{self.prefix}/{generation_key(self.commit.generation)}", record)
        self.store.put(f"{self.prefix}/{commit_key(self.commit)}", manifest_bytes(manifest))
        return manifest

    def _object(self, wanted, metadata):
        shards, entries, parts = {}, [], {}
        for one in wanted:
            name, offset, extent = (one, None, None) if isinstance(one, str) else one
            dtype, shape, data = self.tensors[name]
            label = name
            if offset is not None:
                label = f"{name}@{offset}"
                shards[label] = {"of": name, "shape": list(shape), "offset": list(offset)}
                data = cut(data, dtype, shape, offset, extent)
            entries.append((label, dtype, tuple(extent or shape)))
            parts[label] = data
        tensors = placed(entries)
        head = header_bytes(entries_of(tensors), {**metadata, "shards": json.dumps(shards)})
        return head + b"".join(parts[tensor.name] for tensor in tensors)


def cut(data, dtype, shape, offset, extent):
    """The bytes of a box of a tensor, in its order: row by row, by hand."""
    size = size_of(dtype, ())
    if not shape:
        return data
    row = len(data) // shape[0] if shape[0] else 0
    rows = (data[i * row : (i + 1) * row] for i in range(offset[0], offset[0] + extent[0]))
    if len(shape) == 1:
        return data[offset[0] * size : (offset[0] + extent[0]) * size]
    return b"".join(cut(one, dtype, shape[1:], offset[1:], extent[1:]) for one in rows)


def state(made, *, rows=6, columns=8, second=False):
    """Return the trees of a model (two weights, two buffers, one of them not persistent) with an optimizer."""
    tensor = made.tensor
    modules = {"model": {"w": tensor("model.w", "F32", (rows, columns)), "b": tensor("model.b", "BF16", (3,))}}
    if second:
        modules["ema"] = {"w": tensor("ema.w", "F32", (rows, columns))}
    exp = {"exp_avg": tensor("optimizer.state.0.exp_avg", "F32", (rows, columns)), "step": 7.0}
    optimizers = {"optimizer": {"state": {"$": "dict", "items": [[0, exp]]}, "param_groups": [{"lr": 0.1}]}}
    names = {"model": ["w", "mean", "b"], **({"ema": ["w"]} if second else {})}
    buffers = {
        "model": {
            "mean": tensor("rank.buffers.model.mean", "F64", (4,)),
            "cache": tensor("rank.buffers.model.cache", "I64", (2,)),
        }
    }
    others = {"scheduler": {"last_epoch": 3}, "average": {"shadow": tensor("rank.others.average.shadow", "F32", (2,))}}
    own = {"buffers": buffers, "others": others, "randomness": {"torch": tensor("rank.randomness.torch", "U8", (5,))}}
    shared = {"modules": modules, "optimizers": optimizers, "names": names}
    return {"shared": json.dumps(shared), "own": json.dumps(own)}


def known_job(folder, name):
    """A job of that name with a store in the folder, known here, of which nothing else is left."""
    store = open_store(str(folder / "store"))
    job = JobStore(store, name)
    pool = Pool(instance_type="local", zone="local-a", market=Market.SPOT)
    state = JobState(job=name, pool=pool, cap_usd_per_hour=Decimal(1))
    put_job(job, state)
    open_home().remember(KnownJob(name=name, store=store.url, file=folder / "gone.yaml"))
    return store, job
