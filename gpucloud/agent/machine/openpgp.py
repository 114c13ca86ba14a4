"""The fingerprint of an OpenPGP key, so that a key from the network can be told from any other."""

from __future__ import annotations

import base64
import hashlib
import re

_ARMOR = re.compile(
    rb"-----BEGIN PGP PUBLIC KEY BLOCK-----.*?\r?\n\r?\n(.*?)\r?\n(?:=[\w+/]{4}\r?\n)?-----END", re.DOTALL
)
_PUBLIC_KEY = 6


def binary(key: bytes) -> bytes:
    """Return the key without its armor; one that has none as it is. ValueError for an armor that is torn."""
    if not key.lstrip().startswith(b"-----BEGIN"):
        return key
    found = _ARMOR.search(key.lstrip())
    if found is None:
        raise ValueError("not an OpenPGP public key")
    return base64.b64decode(found[1])


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of the first key in binary form, version 4: RFC 4880, sections 4.2 and 12.2."""
    body = _first_packet(key)
    if body[0] != 4:
        raise ValueError(f"an OpenPGP key of version {body[0]}")
    return hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body, usedforsecurity=False).hexdigest().upper()


def _first_packet(key: bytes) -> bytes:
    if len(key) < 6 or not key[0] & 0x80:
        raise ValueError("not an OpenPGP public key")
    if key[0] & 0x40:  # new format
        tag, length, start = key[0] & 0x3F, *_new_length(key)
    else:
        size = 1 << (key[0] & 3)
        tag, length, start = (key[0] >> 2) & 0xF, int.from_bytes(key[1 : 1 + size], "big"), 1 + size
    body = key[start : start + length]
    if tag != _PUBLIC_KEY or len(body) != length or not body:
        raise ValueError("not an OpenPGP public key")
    return body


def _new_length(key: bytes) -> tuple[int, int]:
    if key[1] < 192:
        return key[1], 2
    if key[1] < 224:
        return ((key[1] - 192) << 8) + key[2] + 192, 3
    return int.from_bytes(key[2:6], "big"), 6
