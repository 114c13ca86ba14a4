"""What the user's `~/.ssh/config` says of a host, of the few words that matter here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import paramiko
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
