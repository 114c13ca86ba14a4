"""Measures what checkpoints cost, all candidates side by side: `python -m tests.bench checkpoints`.

What a save takes from the training thread, beside a copy of the same bytes; then saves and verified loads of large
states, beside the bare disk. Each limit is a ratio of this run, for the machine itself is the same for all.
"""

from __future__ import annotations

from tests.bench import bench_stall, bench_transport


def main() -> int:
    return max([bench_stall.main(), bench_transport.main()])


if __name__ == "__main__":
    raise SystemExit(main())
