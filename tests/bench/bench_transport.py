"""Measures large objects to and from S3 and a disk beside other ways: a part of `python -m tests.bench checkpoints`.

The S3 server is in memory, over bare sockets on loopback, so that it and the client share the cores: the ratios say
what our own work costs. The candidates that are not among our own dependencies are installed into a virtual environment
in the user's cache, or in GPUCLOUD_BENCH_VENV. GPUCLOUD_BENCH_BYTES is the state's size.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.bench.figures import figure
from tests.standins.fast_bucket import in_a_process

ROOT = Path(__file__).resolve().parents[2]
OURS = ("disk", "directory", "torch_save", "dcp", "ours", "boto3")
ON_DISK = ("disk", "directory", "torch_save", "dcp")
OTHERS = {"s3torchconnector": "s3torchconnector", "obstore": "obstore", "crt": "awscrt", "crt_file": "awscrt"}
"""Each by the package that it needs. The CRT is what boto3's own transfers take where it is installed."""

ROUNDS = 3
LIMIT_S = 600

# The most that ours may take of another's time: save 3 times as fast as upload_file, and so on.
CRT_OVER = {"crt": 1 / 1.15, "crt_file": 1 / 1.15}
SAVE_OVER = {"boto3": 1 / 3, "s3torchconnector": 1 / 1.5, **CRT_OVER}
LOAD_OVER = {"boto3": 1 / 2.5, "s3torchconnector": 1 / 2.5, **CRT_OVER}
CPU_S_PER_GB, EXTRA_MIB = 0.6, 64

Measures = dict[str, dict[str, dict[str, float]]]


def main() -> int:
    size = int(os.environ.get("GPUCLOUD_BENCH_BYTES", str(512 << 20)))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    others = dict(_others(Path(os.environ.get("GPUCLOUD_BENCH_VENV", cache / "gpucloud-bench"))))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir=memory) as files,
        in_a_process() as environment,
    ):
        runs = [_round((str(size), disk, files), others, environment) for _ in range(ROUNDS)]
    best = {name: _best([run[name] for run in runs if name in run]) for name in runs[0]}
    return 0 if _told(best, size / 1e9) else 1


def _others(folder: Path) -> Iterator[tuple[str, str]]:
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        # torch and the like are taken from here.
        inside = next(folder.glob("lib/python*/site-packages"))
        (inside / "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    for name, package in OTHERS.items():
        found = subprocess.run([python, "-c", f"import {package}"], capture_output=True)
        if found.returncode:
            found = subprocess.run([python, "-m", "pip", "install", "--quiet", package], capture_output=True, text=True)
        if found.returncode == 0:
            yield name, str(python)
        else:
            sys.stderr.write(f"transport: {name} cannot be installed: {str(found.stderr)[-300:]}\n")


def _round(given: tuple[str, ...], others: dict[str, str], environment: dict[str, str]) -> Measures:
    """Everyone once, one after the other: all meet the same machine."""
    found = {}
    for name in (*OURS, *others):
        command = [others.get(name, sys.executable), "-m", "tests.bench.transport_candidates", name, *given]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode:
            sys.stderr.write(f"transport: {name} failed: {done.stderr[-500:]}\n")
            continue
        found[name] = json.loads(done.stdout)
        sys.stderr.write(f"transport: {name} {done.stdout}")
    return found


def _best(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The least of everything but memory, of which it is the most."""
    return {
        what: {
            "seconds": min(run[what]["seconds"] for run in runs),
            "cpu_s": min(run[what]["cpu_s"] for run in runs),
            "extra_mib": max(run[what]["extra_mib"] for run in runs),
        }
        for what in ("save", "load")
    }


def _told(best: Measures, gigabytes: float) -> bool:
    kept = []
    for name, found in best.items():
        for what, measure in found.items():
            figure(f"transport_{what}_{name}_gb_per_s", gigabytes / measure["seconds"])
            limited = name == "ours"
            kept.append(
                figure(
                    f"transport_{what}_{name}_cpu_s_per_gb",
                    measure["cpu_s"] / gigabytes,
                    CPU_S_PER_GB if limited else None,
                )
            )
            kept.append(
                figure(f"transport_{what}_{name}_extra_mib", measure["extra_mib"], EXTRA_MIB if limited else None)
            )
    for what, limits in (("save", SAVE_OVER), ("load", LOAD_OVER)):
        for name in [name for name in best if name not in ON_DISK and name != "ours"]:
            ratio = best["ours"][what]["seconds"] / best[name][what]["seconds"]
            kept.append(figure(f"transport_{what}_time_over_{name}", ratio, limits.get(name)))
            ratio = best["ours"][what]["cpu_s"] / best[name][what]["cpu_s"]
            kept.append(figure(f"transport_{what}_cpu_over_{name}", ratio, CRT_OVER.get(name)))
        for name in [name for name in ON_DISK if name in best and name != "directory"]:
            ratio = best["directory"][what]["seconds"] / best[name][what]["seconds"]
            figure(f"transport_{what}_directory_time_over_{name}", ratio)
    missing = [name for name in (*OURS, *OTHERS) if name not in best]
    return figure("transport_candidates_not_measured", len(missing), 0) and all(kept)


if __name__ == "__main__":
    sys.exit(main())
