"""Runs every benchmark, or those named: `python -m tests.bench [aws_up …]`.

Each prints FIGURE lines, and the exit code is 1 if one fails.
"""

from __future__ import annotations

import sys

from tests.bench import (
    bench_aws_traffic,
    bench_aws_up,
    bench_checkpoints,
    bench_cost,
    bench_gpu,
    bench_gpu_memory,
    bench_gpu_saves,
    bench_gpu_sharded,
    bench_help,
    bench_main_job,
    bench_notice,
    bench_policies,
    bench_reading,
    bench_simulate,
    bench_stall,
    bench_sync,
    bench_transport,
)

BENCHES = {
    "help": bench_help.main,
    "sync": bench_sync.main,
    "main_job": bench_main_job.main,
    "aws_up": bench_aws_up.main,
    "aws_traffic": bench_aws_traffic.main,
    "reading": bench_reading.main,
    "checkpoints": bench_checkpoints.main,
    "simulate": bench_simulate.main,
    "cost": bench_cost.main,
}

# Parts of `checkpoints`, what takes minutes, and what needs a machine with GPUs.
ON_REQUEST = {
    "policies": bench_policies.main,
    "notice": bench_notice.main,
    "stall": bench_stall.main,
    "transport": bench_transport.main,
    "gpu": bench_gpu.main,
    "gpu_memory": bench_gpu_memory.main,
    "gpu_saves": bench_gpu_saves.main,
    "gpu_sharded": bench_gpu_sharded.main,
}

if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in {**BENCHES, **ON_REQUEST}]
    if unknown:
        sys.exit(f"there is no benchmark {unknown[0]}: {', '.join([*BENCHES, *ON_REQUEST])}")
    sys.exit(max([{**BENCHES, **ON_REQUEST}[name]() for name in sys.argv[1:] or BENCHES]))
