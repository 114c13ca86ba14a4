"""Objects under keys, in a directory or in S3, behind one contract; here is the one place that picks one by its URL."""

from __future__ import annotations

import errno
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gpucloud.domain.checkpoint.objects import PART_BYTES, Sums
from gpucloud.domain.errors import StoreError
from gpucloud.store.checkpoints import newest_commit
from gpucloud.store.contract import Conflict, ObjectStore, Stored, TooLarge, TooMany, get_small, put_once
from gpucloud.store.directory import DirectoryStore, user_path
from gpucloud.store.s3 import S3Store
from gpucloud.store.s3client import error_code, is_full

__all__ = [
    "PART_BYTES",
    "Conflict",
    "ObjectStore",
    "Stored",
    "Sums",
    "TooLarge",
    "TooMany",
    "get_small",
    "is_refused",
    "lasts",
    "newest_commit",
    "open_store",
    "put_once",
    "takes_nothing",
]

_CLOSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_MENDED_BY_SOMEBODY = (*_CLOSED, errno.EFBIG, errno.EACCES, errno.EPERM)
_CLOSED_CODES = {"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"}
_UNWILLING = {
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "NotSignedUp", "NoSuchBucket", "EntityTooLarge",
    *_CLOSED_CODES,
    "KMS.DisabledException", "KMS.NotFoundException", "KMS.KMSInvalidStateException", "KMS.InvalidKeyUsageException",
}  # fmt: skip
"""As S3 and servers like it say that the same will be refused again."""


def open_store(url: str, *, profile: str | None = None, bytes_per_s: float | None = None) -> ObjectStore:
    """Return the store at `url` (`s3://bucket/prefix`, `file:///path` or a path); StoreError for any other scheme.

    `file:///path#identity` is that very store: it is away where the folder has none of that identity.
    `profile` is the AWS profile that opens it, else what the environment says. `bytes_per_s` bounds how fast large
    objects go up to S3.
    """
    scheme, _, rest = url.partition("://")
    if not rest:
        if not url or scheme != url:
            raise StoreError(f"{url!r} names no store", hint="write s3://bucket/prefix, file:///path or a path")
        return DirectoryStore(user_path(url, "the store"))
    if scheme == "s3":
        return S3Store(url, profile=profile, bytes_per_s=bytes_per_s)
    if scheme == "file" and rest.startswith("/"):
        parts = urlsplit(url)
        return DirectoryStore(Path(unquote(parts.path)), (parts.fragment,) if parts.fragment else ())
    raise StoreError(f"{url!r} names no store", hint="write s3://bucket/prefix, file:///path or a path")


def lasts(error: BaseException) -> bool:
    """Whether what failed will be refused until somebody mends that: the store, or the disk, is full, or forbids it.

    All else may pass, as far as is known: the job tries it with one more attempt. Credentials may be renewed, or
    others' be given to that one.
    """
    cause = error.__cause__ if isinstance(error, StoreError) else error
    told = getattr(cause, "errno", None) in _MENDED_BY_SOMEBODY or error_code(cause) in _UNWILLING
    return told or is_full(cause)


def takes_nothing(error: BaseException) -> bool:
    """Whether the store, or the disk, is full or read-only: it takes a write of nobody."""
    cause = error.__cause__
    return getattr(cause, "errno", None) in _CLOSED or error_code(cause) in _CLOSED_CODES or is_full(cause)


def is_refused(error: BaseException) -> bool:
    """Whether S3 says that this caller may not do that: others may, as the job's machines."""
    return error_code(error.__cause__) in {"AccessDenied", "403"}
