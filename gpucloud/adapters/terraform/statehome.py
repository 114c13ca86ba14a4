"""Where a stack's Terraform state is kept: in the store, beside the record of what was done to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpucloud.domain.errors import StoreError
from gpucloud.store import ObjectStore
from gpucloud.store.directory import DirectoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StateHome:
    """The keys of one stack in a store. `earlier` gives the bytes of former versions of the state, newest first."""

    store: ObjectStore
    name: str
    backend: Mapping[str, Any]
    earlier: Callable[[], Iterable[bytes]] = tuple

    @property
    def state(self) -> str:
        """The key of Terraform's own state."""
        return _state_key(self.name)

    @property
    def lock(self) -> str:
        """The key of Terraform's lock on it, in S3."""
        return f"{self.state}.tflock"

    @property
    def run(self) -> str:
        """The key of the intent: what was begun last."""
        return f"terraform/{self.name}/run.json"

    @property
    def applied(self) -> str:
        """The key of the proof: what the last apply that ended well left."""
        return f"terraform/{self.name}/applied.json"

    @property
    def backend_file(self) -> bytes:
        """What `backend.tf.json` says; no credentials: these come from the environment."""
        return json.dumps({"terraform": {"backend": dict(self.backend)}}, indent=2).encode()


def in_bucket(
    store: ObjectStore,
    name: str,
    *,
    region: str,
    endpoint: str | None,
    earlier: Callable[[], Iterable[bytes]] = tuple,
) -> StateHome:
    """Return the home in an `s3://bucket/prefix` store; `region` is the bucket's, `endpoint` that of an own server."""
    bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
    backend: dict[str, Any] = {
        "bucket": bucket,
        "key": "/".join(filter(None, (prefix, _state_key(name)))),
        "region": region,
        "use_lockfile": True,
        "encrypt": True,
        "skip_region_validation": True,
        "skip_requesting_account_id": True,
    }
    if endpoint:
        backend["use_path_style"] = True
    return StateHome(store=store, name=name, backend={"s3": backend}, earlier=earlier)


def in_directory(store: DirectoryStore, name: str) -> StateHome:
    """Return the home in a store that is a directory."""
    path = store.root / _state_key(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make {path.parent}: {error.strerror}", hint="name another store") from error
    backup = path.with_name(f"{path.name}.backup")

    def earlier() -> Iterator[bytes]:
        if backup.exists():
            yield backup.read_bytes()

    return StateHome(store=store, name=name, backend={"local": {"path": str(path)}}, earlier=earlier)


def _state_key(name: str) -> str:
    return f"terraform/{name}/terraform.tfstate"
