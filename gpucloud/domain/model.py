"""The model that a job trains, as far as its memory and its time need it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpucloud.domain.quantities import format_count

USUAL_MFU_PERCENT = 35
USUAL_MFU_RECOMPUTED_PERCENT = 26
"""Of a training that computes its activations again: 6 of 8 operations are the model's own."""


class Precision(str, Enum):
    """What the model computes in; the 16-bit ones are mixed precision, with weights kept in 32 bits beside."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"  # as Transformer Engine does it: matrix products in 8 bits, everything else as in bf16


class Optimizer(str, Enum):
    """What updates the weights."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"  # with momentum
    ADAFACTOR = "adafactor"
    ADAM8BIT = "adam8bit"


class Strategy(str, Enum):
    """How the model lies on several GPUs."""

    DDP = "ddp"  # whole on each
    FSDP = "fsdp"  # weights, gradients and optimizer state sharded over all of them (ZeRO-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The job file's `model:` section.

    `tokens` are those of the whole training. `mfu_percent` is model FLOPs utilisation: the share of the GPUs' peak
    that the model's own arithmetic reaches, what is computed again not counted. From `seq` on it is the shape of a
    transformer: tokens of a sequence, sequences on each GPU at a time, width, depth, words; None is not known, and
    `recompute` whether activations are computed again in the backward pass.
    """

    params: int
    precision: Precision = Precision.BF16
    optimizer: Optimizer = Optimizer.ADAMW
    strategy: Strategy = Strategy.DDP
    tokens: int | None = None
    mfu_percent: int = USUAL_MFU_PERCENT
    seq: int | None = None
    batch: int = 1
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    recompute: bool = False

    def __str__(self) -> str:
        words = (format_count(self.params), self.precision.value, self.optimizer.value, self.strategy.value)
        return " ".join((*words, "recomputed") if self.recompute else words)
