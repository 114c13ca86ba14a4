"""The first boot of an embedded node: its user data, run beside the process that it becomes, and what that may be.

`python -m gpucloud.adapters.local.first_boot run NODE-FOLDER COMMAND…`: the user data is a child of COMMAND, and so is
ended with it. `… fit STORE CLUSTER` is the user data where a job drives itself, and what a machine image's first boot
script is elsewhere: the node fetches its record and makes itself fit by it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.domain.node.bootstrap.wanted import NodeRecord, parse_record, record_key
from gpucloud.store import ObjectStore, open_store
from gpucloud.system import processes
from gpucloud.system.retries import Retry
from gpucloud.system.wholefile import write_whole

_BOOT = Retry(first_s=2.0, factor=1.0, tries=5)


def user_data(store: str, cluster: str) -> str:
    """Return the shell script by which a node makes itself fit; the same arguments give the same text."""
    words = shlex.join(("-m", "gpucloud.adapters.local.first_boot", "fit", store, cluster))
    return f'#!/bin/sh\nexec "$GPUCLOUD_PYTHON" {words}\n'


def become(folder: Path, command: list[str]) -> None:
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


def boot(store: ObjectStore, cluster: str, home: Path) -> int:
    """Make this node fit and return 0, else the exit code of the last try: a supervisor may do better."""
    code, tries = 1, _BOOT.begin()
    while True:
        try:
            code = _by_record(store, cluster, home)
        except (GpucloudError, ValueError, OSError) as error:
            sys.stderr.write(f"{error}\n")
        else:
            if code == 0:
                return 0
        if not tries.again():
            return code


def _by_record(store: ObjectStore, cluster: str, home: Path) -> int:
    stored = store.get(record_key(cluster))
    if stored is None:
        raise StoreError(f"{record_key(cluster)} is not in {store.url}")
    record = parse_record(stored.data)
    package = home / ".gpucloud" / "boot.zip"
    package.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    package.write_bytes(_object(store, record.package.key))
    argv = (sys.executable, "-I", str(package), "bootstrap", "--root", str(package.parent))
    return subprocess.run(argv, input=_given(store, record, stored.data), check=False).returncode


def _given(store: ObjectStore, record: NodeRecord, line: bytes) -> bytes:
    code = _object(store, record.code.key) if record.code is not None else b""
    return line + b"\n" + code


def _object(store: ObjectStore, key: str) -> bytes:
    stored = store.get(key)
    if stored is None:
        raise StoreError(f"{key} is not in {store.url}")
    return stored.data


if __name__ == "__main__":
    if sys.argv[1] == "run":
        become(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(boot(open_store(sys.argv[2]), sys.argv[3], Path.home()))
