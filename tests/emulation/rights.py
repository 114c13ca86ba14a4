"""Whether this machine lets its user have nodes with namespaces of their own: found out by making one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from gpucloud.adapters.local.ground import Launch
from gpucloud.domain.errors import ProvisionError
from tests.emulation.grounds import inside, private_address
from tests.emulation.switch import METADATA_ADDRESS, Switch

_LIMIT_S = 20.0
# What a node must find: it is alone in its process table, has its own link, and answers where EC2's metadata is.
_LOOK = f"""
import os, socket
socket.create_connection(({METADATA_ADDRESS!r}, 80), timeout=5).close()
assert os.getppid() == 1, "there are other processes"
assert "eth0" in dict((name, index) for index, name in socket.if_nameindex()), "there is no link"
"""


@cache
def missing_right() -> str | None:
    """Return what keeps such nodes from running here, None if nothing does; makes one, once in this process."""
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
    address = private_address(())
    port = switch.plug(address)
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory() as folder, port.metadata:
            home = Path(folder) / "home"
            home.mkdir()
            looking = Launch(
                argv=(sys.executable, "-I", "-S", "-c", _LOOK),
                environment=dict(os.environ),
                folder=Path(folder),
                home=home,
                descriptors=(reader,),
                parent_pipe=reader,
            )
            code = inside(port, looking, address, home_mib=1).start().wait(_LIMIT_S)
            said = (Path(folder) / "console.log").read_text().strip().splitlines()
    finally:
        for descriptor in (reader, writer, *port.descriptors):
            os.close(descriptor)
    return None if code == 0 else (said or ["a node does not start"])[-1]
