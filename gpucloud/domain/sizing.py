"""What a model needs of each GPU's memory, and how long its training takes.

Memory in GB of 10^9 bytes, as ZeRO counts it and as GPUs are sold (an "80 GB" GPU holds at least 80·10^9 bytes):

    states       ZeRO (arXiv:1910.02054, §3.1): in mixed precision 2 bytes a parameter for weights, 2 for gradients,
                 4 for the weights in fp32, and the optimizer's own: 8 for Adam. FSDP divides them by the ranks (its
                 stage 3). fp8 has two 8-bit copies of the weights beside (Transformer Engine: one is transposed).
                 SGD's momentum is 4 bytes, 8-bit Adam's moments 2 (arXiv:2110.02861), Adafactor's sums of rows and
                 columns nothing that counts (arXiv:1804.04235).
    working      DDP with torch's autocast: its buckets, a copy of the fp32 gradients (`gradient_as_bucket_view=False`,
                 the default), and the weights in 16 bits, which autocast keeps for the backward pass. FSDP
                 (arXiv:2304.11277, §3): two gathered layers, the one that computes and the next, and the gradients of
                 one; embedding and head, which belong to no layer, stay gathered, with their gradients.
    activations  Korthikanti et al. (arXiv:2205.05198, eq. 1) without the attention scores, which fused attention does
                 not keep (arXiv:2205.14135): 34·s·b·h bytes a layer where all is in 16 bits; recomputed: 2·s·b·h, and
                 one layer in full. Autocast keeps the sums between the layers, which it adds up and normalises, in 32
                 bits: 39 and 4. Logits: 12·s·b·v, in 32 bits, their logarithms, and the gradient of those.
    margin       a tenth of it all, for fragmentation and what is not named here, 1 GB for CUDA and 1 GB for NCCL.

These are meant to err upwards: on four H200 two GPTs needed 0.82 to 0.98 of it (`python -m tests.bench gpu_memory`).

Time: 6·N·D floating point operations for N parameters and D tokens (Kaplan et al., arXiv:2001.08361, §2.1), at the
stated share of the GPUs' peak (MFU; PaLM, arXiv:2204.02311, appendix B). MFU counts these operations alone, whatever is
computed again: published ones have the loss by recomputing in them (Korthikanti et al., table 5, beside HFU).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from gpucloud.domain.model import Model, Optimizer, Precision, Strategy

GB = 10**9
MOST_NODES = 64
LARGEST_WORLD = MOST_NODES * 16
"""GPUs of the largest job that a job file can name."""

_WEIGHTS = {Precision.BF16: 2 + 4, Precision.FP16: 2 + 4, Precision.FP8: 2 + 4 + 2, Precision.FP32: 4}
_COMPUTED = {Precision.BF16: 2, Precision.FP16: 2, Precision.FP8: 2, Precision.FP32: 4}
_OPTIMIZER = {Optimizer.ADAMW: 8, Optimizer.ADAM: 8, Optimizer.SGD: 4, Optimizer.ADAFACTOR: 0, Optimizer.ADAM8BIT: 2}
_WIDE = 128  # the width over the depth of Llama 7B and 13B, for models whose shape is not known
_CUDA_BYTES = _NCCL_BYTES = 10**9
_LOGIT_BYTES = 3 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one GPU holds while it trains, in bytes; `activations` is None where they cannot be counted."""

    states: int
    working: int
    activations: int | None
    margin: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.working + (self.activations or 0) + self.margin

    def __str__(self) -> str:
        parts = {"states": self.states, "working": self.working, "activations": self.activations, "margin": self.margin}
        terms = [f"{size / GB:.1f} GB {name}" for name, size in parts.items() if size]
        return f"{' + '.join(terms)} = {self.total / GB:.1f} GB"

    def fits(self, vram_gib: int) -> bool:
        """Whether a GPU that is sold with so much memory holds it."""
        return self.total <= vram_gib * GB


def memory(model: Model, ranks: int) -> Memory:
    """Return what each of so many GPUs holds."""
    whole = model.strategy is Strategy.DDP
    states = model.params * state_bytes(model) // (1 if whole else ranks)
    working, activations = _working(model, ranks), _activations(model)
    margin = (states + working + (activations or 0)) // 10 + _CUDA_BYTES + (_NCCL_BYTES if ranks > 1 else 0)
    return Memory(states=states, working=working, activations=activations, margin=margin)


def state_bytes(model: Model) -> int:
    """Return the bytes of weights, gradients and optimizer state for each parameter."""
    return _WEIGHTS[model.precision] + _COMPUTED[model.precision] + _OPTIMIZER[model.optimizer]


def saved_bytes(model: Model) -> int:
    """Return the size of a checkpoint: the weights in fp32 and the optimizer's state."""
    return model.params * (4 + _OPTIMIZER[model.optimizer])


def least_ranks(model: Model, vram_gib: int) -> int | None:
    """Return over how many such GPUs the model fits at the least; None: over none that a job file can name."""
    return next((ranks for ranks in range(1, LARGEST_WORLD + 1) if memory(model, ranks).fits(vram_gib)), None)


def way_to_fit(model: Model, *, nodes: int, gpus: int, vram_gib: int) -> str:
    """Return what must change for a model that does not fit on such GPUs: the least of the ways that help."""
    for change in ({"strategy": Strategy.FSDP}, {"recompute": True}, {"strategy": Strategy.FSDP, "recompute": True}):
        changed = replace(model, **change)
        if changed != model and (model.seq or "recompute" not in change):
            needed = memory(changed, nodes * gpus)
            if needed.fits(vram_gib):
                return f"model: {{{_written(change)}}} needs {needed.total / GB:.1f} GB a GPU"
    sharded = replace(model, strategy=Strategy.FSDP, recompute=model.seq is not None)
    least = least_ranks(sharded, vram_gib)
    if least is not None and -(-least // gpus) <= MOST_NODES:
        change = {"strategy": Strategy.FSDP, **({"recompute": True} if sharded.recompute else {})}
        return f"nodes: {-(-least // gpus)}, with model: {{{_written(change)}}}"
    most = memory(sharded, MOST_NODES * gpus).total / GB
    return f"a larger GPU: sharded over {MOST_NODES} nodes too, {most:.1f} GB are needed of each"


def training_flops(model: Model, tokens: int) -> float:
    """Return the operations of a training over so many tokens, without those that are made twice."""
    return 6.0 * model.params * tokens


def training_time(model: Model, tokens: int, *, gpus: int, tflops: float) -> timedelta:
    """Return how long that takes on so many GPUs with that peak, each, in the model's precision.

    OverflowError for more than a thousand million days.
    """
    per_second = gpus * tflops * 1e12 * model.mfu_percent / 100
    return timedelta(seconds=training_flops(model, tokens) / per_second)


def shape(model: Model) -> tuple[int, int]:
    """Return width and depth; what is not named follows from N = 12·l·h² (Kaplan et al., §2.1)."""
    if model.hidden is not None:
        return model.hidden, model.layers or max(1, round(model.params / (12 * model.hidden**2)))
    depth = model.layers or max(1, round((model.params / (12 * _WIDE**2)) ** (1 / 3)))
    return max(1, round((model.params / (12 * depth)) ** 0.5)), depth


def _written(keys: Mapping[str, object]) -> str:
    """The keys as a job file has them."""
    return ", ".join(f"{key}: {value.value if isinstance(value, Strategy) else 'true'}" for key, value in keys.items())


def _working(model: Model, ranks: int) -> int:
    computed = _COMPUTED[model.precision]
    if model.strategy is Strategy.DDP:
        buckets = 4 if ranks > 1 else 0
        return model.params * (buckets + (computed if _autocasts(model) else 0))
    width, depth = shape(model)
    outside = 2 * (model.vocab or 0) * width
    return (3 * model.params // depth + 2 * outside) * computed if ranks > 1 else 0


def _activations(model: Model) -> int | None:
    if model.seq is None:
        return None
    width, depth = shape(model)
    words = model.seq * model.batch
    scale = _COMPUTED[model.precision] // 2
    whole, between = (39, 4) if _autocasts(model) else (34 * scale, 2 * scale)
    a_layer = words * width * whole
    layers = words * width * depth * between + a_layer if model.recompute else a_layer * depth
    return layers + _LOGIT_BYTES * words * (model.vocab or 0)


def _autocasts(model: Model) -> bool:
    """Whether the weights stay in 32 bits and are cast where they are used; FSDP gathers them in 16."""
    return model.strategy is Strategy.DDP and _COMPUTED[model.precision] < 4
