"""Resumes a sharded model on this machine's GPUs, bit for bit: `python -m tests.bench gpu_sharded`. Needs 2 GPUs.

FSDP2 and tensor parallelism over NCCL: killed in step 5 and resumed, against a run that was not; then what FSDP2 saved
is restored by DDP, and what that saved by FSDP2. A minute or two; needs torch alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpucloud.system import smi
from tests.bench.figures import figure

SCRIPT = Path(__file__).resolve().parents[1] / "functional" / "train_sharded.py"
WAYS = ("fsdp", "tp")
OTHERS = ("ddp", "fsdp", "tp")


def main() -> int:
    """Print the figures; 1 when one of them is over its limit."""
    gpus = len(smi.gpus()[0] or ())
    if gpus < 2:
        sys.exit("this benchmark needs a machine with at least 2 NVIDIA GPUs")
    good = True
    with tempfile.TemporaryDirectory() as name:
        for way in WAYS:
            differ = differing(Path(name) / way, way, gpus)
            good &= figure(f"gpu_{way}_ranks_with_other_bits", differ, limit=0)
        differ = exchanged(Path(name) / "fsdp-killed", gpus)
        good &= figure("gpu_tensors_changed_by_another_way", differ, limit=0)
    return 0 if good else 1


def differing(folder: Path, way: str, gpus: int) -> int:
    """Return how many ranks of a killed run end with other bits than those of an unbroken one."""
    unbroken, killed = folder.with_name(f"{way}-unbroken"), folder.with_name(f"{way}-killed")
    train(unbroken, way, gpus)
    train(killed, way, gpus, "--die-at", "5", dies=True)
    train(killed, way, gpus)
    pairs = [(result(unbroken, rank), result(killed, rank)) for rank in range(gpus)]
    print(way, "resumed from", pairs[0][1]["started"], pairs[0][1]["level"], flush=True)
    return sum(one["digest"] != other["digest"] or other["started"] != 4 for one, other in pairs)


def exchanged(folder: Path, gpus: int) -> int:
    """Return how many tensors another way restored otherwise than they were saved."""
    import torch  # noqa: PLC0415 - late: other benchmarks do without

    changed = 0
    for steps, way in enumerate(OTHERS, 7):
        saved = torch.load(folder / "states.pt")[1]
        train(folder, way, gpus, "--steps", str(steps))
        restored = torch.load(folder / "states.pt")[0]
        print(way, "restored", len(restored), "tensors:", result(folder, 0)["level"], flush=True)
        changed += sum(not torch.equal(saved[name], restored[name]) for name in saved)
    return changed


def train(folder: Path, way: str, gpus: int, *arguments: str, dies: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "--"]
    command += [str(SCRIPT), "--device", "cuda", "--way", way, "--out", str(folder), *arguments]
    env = {
        **os.environ,
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "GPUCLOUD_STORE": str(folder / "store"),
        "GPUCLOUD_CHECKPOINT_EVERY": "steps:2",
    }
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if (found.returncode != 0) != dies:
        sys.exit(f"{way}: exit code {found.returncode}\n{found.stderr[-6000:]}")


def result(folder: Path, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"result-{rank}.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
