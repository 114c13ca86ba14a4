"""The SSH host keys of embedded nodes."""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


@dataclass(frozen=True, slots=True)
class HostKey:
    """An Ed25519 pair: the private half as an OpenSSH file, the public one as `ssh-ed25519 AAAA…`."""

    private: bytes
    public: str


def new_host_key() -> HostKey:
    """Return a fresh pair."""
    key = Ed25519PrivateKey.generate()
    return HostKey(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
    )
