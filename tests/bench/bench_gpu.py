"""Measures a DDP job on this machine's GPUs: `python -m tests.bench gpu`. Needs 2 GPUs; with 4, nodes have two each.

The same script under plain torchrun and under gpucloud, alternating, over the same number of GPUs of one node; then a
job over two nodes that is interrupted, against one that is not, bit for bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from gpucloud.system import smi
from tests.bench.figures import figure
from tests.commandline import ROOT, CommandLine, command_line

ROUNDS = 3
SLOWDOWN_LIMIT = 1 / 0.995
SCRIPT = ROOT / "tests" / "bench" / "gpu" / "train.py"
# What the caller set for NCCL on this machine holds in the job as well: its nodes inherit nothing.
KEPT = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "TORCH_", "NVSHMEM_"))}
SPEED = "--steps 420 --layers 12"  # shorter runs differ by 5 % among themselves
JOB = """\
name: {name}
cloud: local
resources: {{nodes: {nodes}, gpus: {gpus}}}
gate: quick
code: {code}
run: train.py {arguments}
checkpoint: {{every: 1000000 steps}}
budget: 100 USD
env: {{{env}}}
"""


def main() -> int:
    found = smi.gpus()[0] or ()
    if len(found) < 2:
        sys.exit("this benchmark needs a machine with at least 2 NVIDIA GPUs")
    print(f"{len(found)} × {found[0].name}, driver {found[0].driver}")
    nodes = 2
    with tempfile.TemporaryDirectory() as name, command_line(Path(name)) as line:
        good = throughput(line, len(found))
        good &= exactness(line, nodes, len(found) // nodes)
    return 0 if good else 1


def throughput(line: CommandLine, gpus: int) -> bool:
    plain, ours = [], []
    for number in range(ROUNDS):
        plain.append(tokens_per_s(torchrun(gpus, line.folder / f"plain-{number}")))
        ours.append(tokens_per_s(train(line, "speed", 1, gpus, SPEED)))
    print("torchrun", plain, "gpucloud", ours, flush=True)
    figure("gpu_torchrun_tokens_per_s", median(plain))
    figure("gpu_gpucloud_tokens_per_s", median(ours))
    figure("gpu_torchrun_spread", max(plain) / min(plain))
    return figure("gpu_slowdown_to_torchrun", median(plain) / median(ours), SLOWDOWN_LIMIT)


def exactness(line: CommandLine, nodes: int, gpus: int) -> bool:
    """Deterministic kernels; NCCL's own order of sums is fixed by the ring for a given number of ranks."""
    arguments = "--steps 60 --width 512 --layers 8 --exact"
    whole = state(train(line, "whole", nodes, gpus, arguments))
    cut = train(line, "cut", nodes, gpus, arguments, "--drill")
    assert "interrupted" in cut, cut
    return figure("gpu_resumed_runs_that_differ", float(state(cut) != whole), 0)


def torchrun(gpus: int, store: Path) -> str:
    """The script saves at its end alone, as the job does."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", str(SCRIPT)]
    saving = {"GPUCLOUD_STORE": str(store), "GPUCLOUD_CHECKPOINT_EVERY": "steps:1000000"}
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **saving}
    return subprocess.run([*argv, *SPEED.split()], env=env, capture_output=True, text=True, check=True).stdout


def train(line: CommandLine, name: str, nodes: int, gpus: int, arguments: str, *options: str) -> str:
    env = ", ".join(f'{key}: "{value}"' for key, value in KEPT.items())
    job = line.folder / f"{name}.yaml"
    job.write_text(JOB.format(name=name, nodes=nodes, gpus=gpus, code=SCRIPT.parent, arguments=arguments, env=env))
    answer = line.run("train", str(job), *options)
    assert answer.code == 0, answer.stderr
    return answer.stderr + answer.stdout


def tokens_per_s(output: str) -> float:
    m = re.search(r"tokens_per_s (\d+)", output)
    assert m, output
    return float(m[1])


def state(output: str) -> str:
    m = re.search(r"state sha256 (\w+)", output)
    assert m, output
    return m[1]


if __name__ == "__main__":
    sys.exit(main())
