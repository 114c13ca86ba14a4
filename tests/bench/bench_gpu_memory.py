"""Measures what training holds of each GPU beside what `gpucloud plan` says: `python -m tests.bench gpu_memory`.

GPTs of two sizes by DDP and FSDP, activations kept and recomputed, on this machine's GPUs; half a minute. Needed is
what tensors take at the most, and what CUDA and NCCL take beside; the allocator holds more, which it gives up before it
fails. The plan may not be under what is needed, for what does not fit is to be refused, and over it by a quarter.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from gpucloud.system import smi
from tests.bench.figures import figure

ROOT = Path(__file__).resolve().parents[2]
MOST_OVER = 1.25


def main() -> int:
    """Print the figures; 1 when one of them is over its limit."""
    gpus = len(smi.gpus()[0] or ())
    if not gpus:
        sys.exit("this benchmark needs a machine with an NVIDIA GPU")
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*argv, "-m", "tests.bench.gpu.memory"], env=env, cwd=ROOT, capture_output=True, text=True, check=False
    )
    cases = [json.loads(line) for line in re.findall(r"^MEASURED (.*)$", done.stdout, re.MULTILINE)]
    if done.returncode or not cases:
        sys.exit(f"exit code {done.returncode}\n{done.stderr[-6000:]}")
    kept = True
    for case in cases:
        held = ", ".join(f"{case[part] / 1e9:.1f} GB {part}" for part in ("held", "tensors", "beside"))
        print(f"{case['what']}: {held}; planned {case['plan']}", flush=True)
        needed = case["tensors"] + case["beside"]
        kept &= figure(f"gpu_memory_needed_over_plan_{case['what']}", needed / case["planned"], 1)
        kept &= figure(f"gpu_memory_plan_over_needed_{case['what']}", case["planned"] / needed, MOST_OVER)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
