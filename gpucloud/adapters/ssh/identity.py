"""Who is who over SSH: the keys that we offer a host, and what the user's own OpenSSH files say of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import ConfigParseError

from gpucloud.adapters.ssh.failures import LIBRARY_ERRORS
from gpucloud.domain.errors import KeyRefused, NodeError

_USUAL = ("id_ed25519", "id_ecdsa", "id_rsa")
_MOST = 5  # stock sshd: MaxAuthTries 6


class Identity(Protocol):
    """Gives the keys to offer, one after the other."""

    def keys(self) -> contextlib.AbstractContextManager[tuple[paramiko.PKey, ...]]:
        """Give the keys; those of an agent serve inside the block only. Raises NodeError when there is none."""
        ...


class OneKey:
    """A private key without a passphrase, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def keys(self) -> Iterator[tuple[paramiko.PKey, ...]]:
        """Give the key."""
        try:
            key = paramiko.PKey.from_path(self._path)
        except (*LIBRARY_ERRORS, ValueError, TypeError) as error:
            raise NodeError(
                f"cannot use the private key {self._path}: {error}", hint="name a private key without a passphrase"
            ) from error
        yield (key,)


class UserKeys:
    """The user's keys: `path` alone if it is given, else those of the agent and then the usual files in `folder`.

    A key with a passphrase serves through the agent; it is never asked for.
    """

    def __init__(self, path: Path | None = None, folder: Path | None = None) -> None:
        self._path = path
        self._folder = folder or Path.home() / ".ssh"

    @contextlib.contextmanager
    def keys(self) -> Iterator[tuple[paramiko.PKey, ...]]:
        """Give the keys that can be used now, five at the most."""
        with _agent_keys() as held:
            keys = self._usual(held) if self._path is None else (self._named(self._path, held),)
            if not keys:
                names = ", ".join(_USUAL)
                raise NodeError(
                    f"no key to log in with: no agent holds one, and {self._folder} has no usable one ({names})",
                    hint="ssh-add, or `ssh: {key: …}` in the job file",
                )
            yield keys[:_MOST]

    def _usual(self, held: tuple[paramiko.PKey, ...]) -> tuple[paramiko.PKey, ...]:
        found = []
        for name in _USUAL:
            with contextlib.suppress(*LIBRARY_ERRORS, ValueError, TypeError):
                found.append(paramiko.PKey.from_path(self._folder / name))
        known = {key.asbytes() for key in held}
        return (*held, *(key for key in found if key.asbytes() not in known))

    def _named(self, path: Path, held: tuple[paramiko.PKey, ...]) -> paramiko.PKey:
        try:
            return paramiko.PKey.from_path(path)
        except (paramiko.PasswordRequiredException, TypeError) as error:
            public = _public(path)
            for key in held:
                if key.get_base64() == public:
                    return key
            raise KeyRefused(
                f"the private key {path} is locked by a passphrase, and no agent holds it", hint=f"ssh-add {path}"
            ) from error
        except (*LIBRARY_ERRORS, ValueError) as error:
            raise NodeError(f"cannot use the private key {path}: {error}", hint="name a private key's file") from error


@contextlib.contextmanager
def _agent_keys() -> Iterator[tuple[paramiko.PKey, ...]]:
    if not os.environ.get("SSH_AUTH_SOCK"):
        yield ()
        return
    try:
        agent = paramiko.Agent()
    except LIBRARY_ERRORS:
        yield ()
        return
    try:
        yield agent.get_keys()
    finally:
        agent.close()


def _public(path: Path) -> str | None:
    """Return the public half of a key that is locked, from the file beside it."""
    with contextlib.suppress(OSError, IndexError):
        return path.with_name(f"{path.name}.pub").read_text().split()[1]
    return None


# What the user's own OpenSSH files say of a host: `~/.ssh/config` and accepted host keys.


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A host's own configuration; what is None is not said. `jump` is `user@host:port`, or several with commas."""

    address: str | None = None
    user: str | None = None
    port: int | None = None
    jump: str | None = None


def said_of(alias: str, file: Path | None = None) -> Said:
    """Return what the file says of the host that is called `alias`; nothing where it cannot be read."""
    file = file or Path.home() / ".ssh" / "config"
    try:
        found = paramiko.SSHConfig.from_path(str(file)).lookup(alias)
    except (OSError, ConfigParseError, paramiko.SSHException, ImportError, ValueError):
        return Said()
    jump = found.get("proxyjump")
    return Said(
        address=found.get("hostname"),
        user=found.get("user"),
        port=int(found["port"]) if "port" in found else None,
        jump=None if jump in (None, "none") else jump,
    )


# The host keys that the user has accepted already, from OpenSSH's files (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT).


_BEST_FIRST = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")


def usual_files() -> tuple[Path, ...]:
    """Return where OpenSSH keeps them: the user's, and the machine's."""
    return (Path.home() / ".ssh" / "known_hosts", Path("/etc/ssh/ssh_known_hosts"))


def known_key(address: str, port: int, files: Iterable[Path]) -> str | None:
    """Return the host's key as `type base64`, the best type of several; None when none is known, or it is revoked.

    Names and hashed names count; patterns and `@cert-authority` lines are passed over.
    """
    name = address if port == 22 else f"[{address}]:{port}"
    found, revoked = paramiko.HostKeys(), set()
    for line in _lines(files):
        words = line.split()
        if words[0] == "@revoked":
            revoked.add(words[-1] if len(words) < 4 else words[3])
        with contextlib.suppress(paramiko.SSHException, InvalidHostKey):
            entry = None if words[0].startswith("@") else HostKeyEntry.from_line(line)
            if entry is not None and entry.key is not None:
                for known in entry.hostnames or ():
                    found.add(known, entry.key.get_name(), entry.key)
    keys = found.lookup(name)
    for kind in _BEST_FIRST:
        if keys is not None and kind in keys and keys[kind].get_base64() not in revoked:
            return f"{kind} {keys[kind].get_base64()}"
    return None


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        with contextlib.suppress(OSError):
            for line in file.read_text(errors="replace").splitlines():
                if line.strip() and not line.startswith("#"):
                    yield line
