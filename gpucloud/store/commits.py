"""The newest committed checkpoint under a prefix, as a supervisor sees it."""

from __future__ import annotations

import contextlib
import hashlib

from gpucloud.domain.manifest import Commit, commit_key, generation_key, read_base, read_manifest, restore_order
from gpucloud.store.contract import ObjectStore, get_small


def newest_commit(store: ObjectStore, prefix: str) -> tuple[int, str] | None:
    """Return the step and the SHA-256 (hex) of the manifest that a restore would try first; None without one.

    The manifest is verified, its objects are not. Raises StoreError.
    """
    for commit in restore_order(listed(store, prefix), lambda generation: base_of(store, prefix, generation)):
        stored = get_small(store, under(prefix, commit_key(commit)))
        if stored is None:
            continue
        with contextlib.suppress(ValueError):
            if read_manifest(stored.data).commit == commit:
                return commit.step, hashlib.sha256(stored.data).hexdigest()
    return None


def listed(store: ObjectStore, prefix: str) -> tuple[str, ...]:
    """Return the keys of all generations and manifests, without the prefix."""
    cut = len(under(prefix, ""))
    return tuple(key[cut:] for kind in ("gen/", "commit/") for key in store.list(under(prefix, kind)))


def base_of(store: ObjectStore, prefix: str, generation: int) -> Commit | None:
    """Return the commit that a generation began from; None when it had none or its record is damaged."""
    stored = get_small(store, under(prefix, generation_key(generation)))
    if stored is not None:
        with contextlib.suppress(ValueError):
            return read_base(stored.data)
    return None


def under(prefix: str, key: str) -> str:
    """Return the key below the prefix; an empty prefix adds nothing."""
    return f"{prefix.strip('/')}/{key}" if prefix.strip("/") else key
