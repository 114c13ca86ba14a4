"""Measures a code sync of 2,000 files and 100 MB to an embedded node: `python -m tests.bench.bench_sync`."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpucloud.adapters.ssh.shell import SshShell
from tests.fakes.nodes import embedded_server

FILES, FILE_BYTES = 2_000, 50_000
FIRST_LIMIT_S, UNCHANGED_LIMIT_S, CHANGED_LIMIT_S = 6.0, 0.3, 2.0
SETTLED_S = 2.5  # hashes of files younger than two seconds are not trusted, as after a check-out


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        code = folder / "code"
        make_tree(code)
        with embedded_server(folder / "node") as server:
            shell = SshShell(server.key_file, python=sys.executable, cache=folder / "cache")
            host = shell.host(server.node)
            first_s = timed(lambda: host.sync(code, "code"))
            time.sleep(SETTLED_S)
            host.sync(code, "code")
            unchanged_s = min(timed(lambda: host.sync(code, "code")) for _ in range(5))
            (code / "folder0" / "file0.py").write_text("changed")
            changed_s = timed(lambda: host.sync(code, "code"))
            shell.close()
    good = figure("sync_first_s", first_s, FIRST_LIMIT_S)
    good &= figure("sync_unchanged_s", unchanged_s, UNCHANGED_LIMIT_S)
    good &= figure("sync_one_file_changed_s", changed_s, CHANGED_LIMIT_S)
    return 0 if good else 1


def make_tree(root: Path) -> None:
    numbers = random.Random(0)
    for number in range(FILES):
        path = root / f"folder{number % 40}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(numbers.randbytes(FILE_BYTES))
    os.sync()


def timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def figure(name: str, value: float, limit: float) -> bool:
    good = value <= limit
    print(f"FIGURE {name} {value:.3f} {limit} {'pass' if good else 'fail'}")
    return good


if __name__ == "__main__":
    sys.exit(main())
