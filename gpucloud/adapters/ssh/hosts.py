"""What the user's own OpenSSH files say of a host: `~/.ssh/config` and accepted host keys."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import ConfigParseError


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
