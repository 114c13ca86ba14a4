"""Runs a node's user data beside the process that it becomes.

`python -m gpucloud.adapters.local.first_boot NODE-FOLDER COMMAND…`: the user data is a child of COMMAND, and so is
ended with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpucloud.system import processes
from gpucloud.system.wholefile import write_whole


def main(folder: Path, command: list[str]) -> None:
    """Start the user data and become `command`."""
    processes.adopt_orphans()  # holds across exec: what the user data leaves behind meanwhile stays below `command`
    if os.fork() == 0:
        # The sockets and pipes are the command's: held here, they would outlive it.
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if sys.platform == "darwin" else 1024)
        run(folder)
        os._exit(0)
    os.execv(command[0], command)  # noqa: S606  (without a shell: that is the point)


def run(folder: Path) -> None:
    """Run `user-data` in the node's home; its output is in `user-data.log`, its exit code in `user-data.exit`."""
    with (folder / "user-data.log").open("wb") as log:
        ended = subprocess.run(
            ["/bin/sh", str(folder / "user-data")], stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    write_whole(folder / "user-data.exit", str(ended.returncode))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
