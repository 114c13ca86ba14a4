"""Objects under keys, in a directory or in S3, behind one contract.

`open_store(url)` returns an `ObjectStore`; a plain path or `file:///…` is a directory, `s3://bucket/prefix` is S3.
"""

from __future__ import annotations

from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums
from gpucloud.store.checkpoints import newest_commit
from gpucloud.store.contract import Conflict, ObjectStore, Stored, TooLarge, TooMany, get_small, put_once
from gpucloud.store.opening import open_store

__all__ = [
    "PART_BYTES",
    "Conflict",
    "ObjectStore",
    "Stored",
    "Sums",
    "TooLarge",
    "TooMany",
    "get_small",
    "newest_commit",
    "open_store",
    "put_once",
]
