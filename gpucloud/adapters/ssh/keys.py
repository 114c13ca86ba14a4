"""SSH key pairs: made once, kept private."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from gpucloud.domain.errors import CredentialsError

_MAKES = "ssh-keygen -q -t ed25519 -N '' -f FILE makes one"


def generate_key(path: Path) -> str:
    """Return the public line (`ssh-ed25519 AAAA…`) of the private key at `path`, made if there is none.

    The file is Ed25519 in OpenSSH's format, mode 0600. Of two callers at once, both get the same key.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_once(path, Ed25519PrivateKey.generate())
    private = load_ssh_private_key(path.read_bytes(), password=None)
    return private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode("ascii")


def derive_key(source: Path, cluster: str, target: Path) -> None:
    """Write to `target` the key that the private key at `source` gives to that cluster.

    It is the same one wherever `source` is, opens no other cluster, and says nothing of `source` (HKDF, RFC 5869):
    machines may have it. Raises CredentialsError for a key that is not there, or has a passphrase.
    """
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _beside(target, derived_key(source, f"gpucloud cluster {cluster}")) as whole:
        whole.replace(target)


def derived_key(source: Path, purpose: str) -> Ed25519PrivateKey:
    """Return the key that the private key at `source` gives for a purpose. Raises CredentialsError.

    One that is not there is not made: it would open no machine, and would then pass for the one that does.
    """
    try:
        secret = _secret_of(source.read_bytes())
    except FileNotFoundError as error:
        raise CredentialsError(
            f"GPUCLOUD_SSH_KEY: there is no file {source}",
            hint="the same key wherever a job is supervised from; " + _MAKES,
        ) from error
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CredentialsError(
            f"GPUCLOUD_SSH_KEY: {source} is no private key without a passphrase",
            hint=_MAKES,
        ) from error
    seed = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret)
    return Ed25519PrivateKey.from_private_bytes(seed)


def _secret_of(data: bytes) -> bytes:
    """Return what is secret of a private key, however it is written down."""
    load = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
    key = load(data.strip() + b"\n", password=None)
    return key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())


def _write_once(path: Path, key: Ed25519PrivateKey) -> None:
    with _beside(path, key) as whole, contextlib.suppress(FileExistsError):
        os.link(whole, path)


@contextlib.contextmanager
def _beside(path: Path, key: Ed25519PrivateKey) -> Iterator[Path]:
    """Give a whole file with the key, for its owner only, beside `path`; what is left of it goes."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        yield beside
    finally:
        beside.unlink(missing_ok=True)
