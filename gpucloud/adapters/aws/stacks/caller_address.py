"""How the caller reaches machines by SSH: from which addresses it may come, and with what through Session Manager.

The addresses are the caller's own, unless GPUCLOUD_SSH_CIDR says otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import urllib.request
from collections.abc import Callable, Mapping

from gpucloud.domain.errors import ProvisionError, ToolMissing, UsageError

_ASKED = "https://checkip.amazonaws.com"
_TIMEOUT_S = 5.0
_HINT = "set GPUCLOUD_SSH_CIDR to the addresses that SSH comes from, such as 203.0.113.7/32"


def ssh_cidr(env: Mapping[str, str] | None = None, *, url: str = _ASKED) -> str:
    """Return GPUCLOUD_SSH_CIDR, else this machine's public IPv4 address with /32.

    UsageError when the variable is no range, ProvisionError when nobody can be asked.
    """
    named = (os.environ if env is None else env).get("GPUCLOUD_SSH_CIDR")
    if named:
        return _checked(named)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as reply:  # noqa: S310  a constant
            said = reply.read(100).decode("ascii", errors="replace").strip()
        return f"{ipaddress.IPv4Address(said)}/32"
    except (OSError, ValueError) as error:
        raise ProvisionError(f"cannot learn this machine's public address from {url}: {error}", hint=_HINT) from error


def require_session_tools(find: Callable[[str], str | None] = shutil.which) -> None:
    """Raise ToolMissing where the two programs are not here that lead to machines through Session Manager."""
    missing = [name for name in ("aws", "session-manager-plugin") if find(name) is None]
    if missing:
        raise ToolMissing(
            f"machines without a public address are reached through Session Manager, and {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} not on PATH",
            hint="install the AWS CLI and its Session Manager plugin (AWS Systems Manager user guide), or take machines"
            " with one EFA interface at the most",
        )


def _checked(cidr: str) -> str:
    try:
        network = ipaddress.IPv4Network(cidr if "/" in cidr else f"{cidr}/32")
    except ValueError as error:
        raise UsageError(f"GPUCLOUD_SSH_CIDR: {error}", hint=_HINT) from error
    if network.prefixlen < 8:
        raise UsageError(f"GPUCLOUD_SSH_CIDR: {network} is nearly the whole internet", hint=_HINT)
    return str(network)
