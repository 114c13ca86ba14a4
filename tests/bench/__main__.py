"""Runs every benchmark: `python -m tests.bench`; each prints FIGURE lines, and the exit code is 1 if one fails."""

from __future__ import annotations

import sys

from tests.bench import bench_help, bench_main_job, bench_sync

if __name__ == "__main__":
    sys.exit(max([bench.main() for bench in (bench_help, bench_sync, bench_main_job)]))
