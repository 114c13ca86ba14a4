"""The host keys of AWS machines: what each published under its role's name, else what its console shows."""

from __future__ import annotations

import base64
import binascii
import math
import re
import threading
import time
from collections.abc import Callable

from gpucloud.store import ObjectStore

CONSOLE_AFTER_S = 30.0
CONSOLE_EVERY_S = 10.0

_CONSOLES_A_SECOND = 8  # AWS counts this call against the whole account
_LISTING_LASTS_S = 0.5
_BLOCK = re.compile(r"-----BEGIN SSH HOST KEY KEYS-----\r?\n(.*?)-----END SSH HOST KEY KEYS-----", re.DOTALL)
_INSTANCE_ID = re.compile(r"i-[0-9a-f]{1,32}")
_ED25519_BYTES = 51  # its name and its 32 bytes, each with its length before it
_KIND = "ssh-ed25519"


class HostKeys:
    """The Ed25519 host keys of one cluster's machines. Thread-safe; machines asked for at once cost one listing.

    `role_id` is the cluster's role, when it is known: a key that another role published is then refused. `console`
    returns a machine's console output, None or empty while there is none; it is asked for a machine that has told no
    key for `console_after_s`, and then every `CONSOLE_EVERY_S` at most. What was found is remembered by instance id:
    an address is used again, an id never.
    """

    def __init__(
        self,
        store: ObjectStore,
        cluster: str,
        *,
        role_id: str | None = None,
        console: Callable[[str], str | None] | None = None,
        console_after_s: float = CONSOLE_AFTER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._folder = hosts_folder(cluster)
        self._role_id = role_id
        self._console = console
        self._console_after_s = console_after_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._listing: tuple[float, tuple[str, ...]] = (-math.inf, ())
        self._due: dict[str, float] = {}
        self._asked: list[float] = []

    def of(self, instance_id: str) -> str | None:
        """Return `ssh-ed25519 AAAA…`, None while the machine has told none. Raises what the store and console raise."""
        if instance_id not in self._known:
            found = self._published(instance_id) or self._shown(instance_id)
            if found is None:
                return None
            self._known[instance_id] = found
        return self._known[instance_id]

    def _published(self, instance_id: str) -> str | None:
        if _INSTANCE_ID.fullmatch(instance_id) is None:
            return None
        stored = [self._store.get(name) for name in self._names(instance_id)]
        keys = {key for one in stored if one is not None and (key := parse(one.data))}
        # Two roles that speak for one machine: without the role's id nobody can say which of them lies.
        return keys.pop() if len(keys) == 1 else None

    def _names(self, instance_id: str) -> tuple[str, ...]:
        if self._role_id is not None:
            return (f"{self._folder}{self._role_id}:{instance_id}",)
        return tuple(name for name in self._listed() if name.endswith(f":{instance_id}"))

    def _listed(self) -> tuple[str, ...]:
        with self._lock:
            if self._monotonic() - self._listing[0] >= _LISTING_LASTS_S:
                names = tuple(self._store.list(self._folder))
                self._listing = (self._monotonic(), names)
            return self._listing[1]

    def _shown(self, instance_id: str) -> str | None:
        if self._console is None or not self._is_due(instance_id):
            return None
        text = self._console(instance_id)
        return from_console(text) if text else None

    def _is_due(self, instance_id: str) -> bool:
        """Whether the console may be asked now, and note that it is."""
        with self._lock:
            now = self._monotonic()
            due = self._due.setdefault(instance_id, now + self._console_after_s)
            self._asked = [at for at in self._asked if now - at < 1]
            if now < due or len(self._asked) >= _CONSOLES_A_SECOND:
                return False
            self._due[instance_id] = now + CONSOLE_EVERY_S
            self._asked.append(now)
            return True


def hosts_folder(cluster: str) -> str:
    """Return the prefix below which a cluster's machines publish their keys."""
    return f"clusters/{cluster}/hosts/"


def parse(data: bytes) -> str | None:
    """Return the key in what a machine published: one line, an Ed25519 key, at most a comment; None for all else."""
    try:
        text = data.decode("ascii").removesuffix("\n")
    except UnicodeDecodeError:
        return None
    words = text.split(" ")
    if len(words) not in {2, 3} or words[0] != _KIND or any(char.isspace() for word in words for char in word):
        return None
    return f"{_KIND} {words[1]}" if _is_ed25519(words[1]) else None


def from_console(text: str) -> str | None:
    """Return the Ed25519 key that cloud-init printed; None when the block is not whole yet, or two of them differ."""
    found = {
        key
        for block in _BLOCK.findall(text)
        for line in block.splitlines()
        if (key := parse(line.strip().encode("ascii", errors="replace")))
    }
    return found.pop() if len(found) == 1 else None


def _is_ed25519(word: str) -> bool:
    try:
        data = base64.b64decode(word, validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(data) == _ED25519_BYTES and data.startswith(b"\x00\x00\x00\x0bssh-ed25519\x00\x00\x00\x20")
