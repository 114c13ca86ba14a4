"""The first boot of an embedded node whose job drives itself: it fetches its record and makes itself fit by it.

`python -m gpucloud.adapters.local.self_boot STORE CLUSTER` is what a machine image's first boot script is elsewhere.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.domain.node.bootstrap.wanted import NodeRecord, parse_record, record_key
from gpucloud.store import ObjectStore, open_store
from gpucloud.system.retries import Retry

_BOOT = Retry(first_s=2.0, factor=1.0, tries=5)


def user_data(store: str, cluster: str) -> str:
    """Return the shell script; the same arguments give the same text."""
    words = shlex.join(("-m", "gpucloud.adapters.local.self_boot", store, cluster))
    return f'#!/bin/sh\nexec "$GPUCLOUD_PYTHON" {words}\n'


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
    sys.exit(boot(open_store(sys.argv[1]), sys.argv[2], Path.home()))
