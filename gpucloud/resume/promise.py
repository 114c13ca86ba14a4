"""How exactly a resumed run continues, and why it may be less than exact."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from gpucloud.domain.manifest import Level, Promise

_SUMS = ("world", "per_node", "arrangement", "threads", "vectors")
"""What changes the order of sums, and nothing else."""


def surroundings(world: int, arrangement: str, env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return what exactness depends on besides the checkpoint; `arrangement` says how ranks hold the state.

    `per_node` ranks share a machine, by which NCCL and gloo choose the order of their sums; on the CPU `threads` and
    the width of its vectors choose that of a matrix product. The launcher tells what the script is made of: its code,
    its command line, and what else of the job file reaches it.
    """
    told = {
        **json.loads(env.get("GPUCLOUD_RECIPE", "{}")),
        "world": world,
        "per_node": env.get("LOCAL_WORLD_SIZE", str(world)),
        "arrangement": arrangement,
        "torch": str(torch.__version__),
    }
    if torch.cuda.is_available():
        precision = torch.get_float32_matmul_precision()
        return {
            **told,
            "device": torch.cuda.get_device_name(),
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "precision": precision,
        }
    if torch.backends.mps.is_available():
        return {**told, "device": "mps"}
    return {
        **told,
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
    }


def tuned() -> Promise:
    """Return what code that `torch.compile` made for a GPU allows, if there is any.

    Inductor chooses among kernels by their speed when it first meets them, and remembers that in a folder. Where it
    chooses anew a sum may be rounded in another order; its deterministic mode does not prevent that (torch 2.11).
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if not torch.cuda.is_available() or not getattr(cache, "modules", None):
        return Promise()
    return Promise(Level.SAME_SAMPLES, "torch.compile chooses its kernels by their speed, on each machine anew")


def promised(before: Mapping[str, Any], now: Mapping[str, Any]) -> Promise:
    """Return what a resume promises."""
    changed = [key for key in now if before.get(key) != now[key]]
    if not changed:
        return Promise()
    level = Level.SAME_SAMPLES if set(changed) <= set(_SUMS) else Level.BEST_EFFORT
    # The arrangement names the world too, where that is what changed, and other machines have other shares of it.
    told = [key for key in changed if key not in ("arrangement", "per_node") or "world" not in changed]
    return Promise(level, ", ".join(f"{key} {before.get(key)} → {now[key]}" for key in told))
