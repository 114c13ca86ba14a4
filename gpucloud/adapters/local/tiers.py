"""Whether this machine lets its user have nodes of tier A: found out by making one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from gpucloud.adapters.local import node, place
from gpucloud.adapters.local.records import Tier
from gpucloud.adapters.local.switch import METADATA_ADDRESS, Switch
from gpucloud.domain.errors import ProvisionError, UsageError

VARIABLE = "GPUCLOUD_LOCAL_TIER"

_LIMIT_S = 20.0
_HINT = f"{VARIABLE}=b needs no namespaces"
# What a node must find: it is alone in its process table, has its own link, and answers where EC2's metadata is.
_LOOK = f"""
import os, socket
socket.create_connection(({METADATA_ADDRESS!r}, 80), timeout=5).close()
assert os.getppid() == 1, "there are other processes"
assert "eth0" in dict((name, index) for index, name in socket.if_nameindex()), "there is no link"
"""


def wanted_tier(environ: dict[str, str] | os._Environ[str]) -> Tier | None:
    """Return the tier that GPUCLOUD_LOCAL_TIER asks for; None where it is not set. `auto` is A where that works.

    UsageError for anything else.
    """
    word = environ.get(VARIABLE, "")
    if word == "auto":
        return Tier.B if missing_right() else Tier.A
    try:
        return Tier(word) if word else None
    except ValueError:
        raise UsageError(f"{VARIABLE} is {word!r}", hint=f"{VARIABLE}=a, b or auto") from None


def require_own_spaces() -> None:
    """Return when nodes of tier A can run here; ProvisionError, with what is in the way, when they cannot."""
    why = missing_right()
    if why is not None:
        raise ProvisionError(f"this machine does not let you have nodes of tier A: {why}", hint=_HINT)


@cache
def missing_right() -> str | None:
    """Return what keeps nodes of tier A from running here, None if nothing does; makes one, once in this process."""
    if not sys.platform.startswith("linux"):
        return "only Linux has namespaces"
    try:
        switch = Switch()
    except ProvisionError as error:
        return error.message
    try:
        return _try_on(switch)
    except (OSError, ProvisionError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        switch.close()


def _try_on(switch: Switch) -> str | None:
    """Run a command as a node does; return what it complained of."""
    address = place.private_address(())
    port = switch.plug(address)
    reader, writer = os.pipe()
    space = place.OwnSpace(network=port.network, user=port.user, address=address, home_mib=1)
    try:
        with tempfile.TemporaryDirectory() as folder, port.metadata:
            home = Path(folder) / "home"
            home.mkdir()
            options = ("--folder", folder, "--home", str(home), "--parent-pipe", str(reader))
            done = subprocess.run(
                (*space.argv(), *options, "--", sys.executable, "-I", "-S", "-c", _LOOK),
                pass_fds=(*space.descriptors, reader),
                env={**os.environ, **node.import_path()},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
    finally:
        for descriptor in (reader, writer, *space.descriptors):
            os.close(descriptor)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["a node does not start"])[-1]
