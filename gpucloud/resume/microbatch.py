"""Passes a rank's samples through the model in parts that fit into its memory, and makes one step of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpucloud.domain.errors import UsageError
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state import randomness
from gpucloud.resume.state.tree import size_of

_BUCKET_BYTES = 64 * 2**20
# What running out of memory is called where it is no OutOfMemoryError: by cuBLAS, cuDNN, and on the CPU.
_OTHER_NAMES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")


class MicroBatch:
    """How many samples a rank passes through the model at once; the step and its samples stay what they are.

    `size` begins with the rank's whole share of the global batch, or with what is given. When any rank runs out of
    memory, it halves on all of them, and the step begins anew: generators and buffers as they were, no gradients.
    Hand it to `init` (`micro=…`), so that a resumed run goes on with the size, for rounding depends on it; on another
    kind of device it is found anew.

    `model` is the module itself, not wrapped: ranks talk only after all of them came through, so that none waits for
    one that ran out. Its weights are made rank 0's here; gradients are averaged over ranks by `backward`.
    """

    def __init__(self, model: torch.nn.Module, *, size: int | None = None) -> None:
        _check(model)
        self.size = size
        self._model = model
        self._ranks = Ranks()
        self._agreed = False
        if self._ranks.world > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor, src=0)

    def backward(self, batch: Any, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return this rank's mean loss; the model's gradients are those of the mean over the global batch.

        `loss_of` gets a part of the batch (tensors in tuples, lists and dicts, cut in their first dimension), returns
        its mean loss, and may be called again for samples that it had already. Call this on all ranks, with as many
        samples on each and without gradients. Raises UsageError when a single sample does not fit.
        """
        share = _samples(batch)
        self._agree(share)
        generators, buffers = randomness.capture(), [buffer.clone() for buffer in self._model.buffers()]
        while True:
            loss = self._passed(batch, share, loss_of)
            if not self._ranks.highest(int(loss is None))[0] and loss is not None:
                break
            self._rewind(generators, buffers)
            self._halve(share)
        self._average()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the size, and the device that it was found on."""
        return {"size": self.size, "device": self._device()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that size, if it was found on such a device."""
        if state["device"] == self._device():
            self.size = state["size"]
        self._agreed = False

    def _agree(self, share: int) -> None:
        if not self._agreed:
            (least,) = self._ranks.highest(-min(self.size or share, share))
            self._agreed, self.size = True, -least

    def _passed(self, batch: Any, share: int, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        """Return the mean loss of the whole batch, its gradients made; None if memory ran out."""
        size = self.size or share
        total = None
        try:
            for begin in range(0, share, size):
                end = min(begin + size, share)
                loss = loss_of(_part(batch, begin, end)) * ((end - begin) / share)
                loss.backward()  # type: ignore[no-untyped-call]
                total = loss.detach() if total is None else total + loss.detach()
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            return None  # the error, whose traceback holds what fills the memory, ends here
        return total

    def _rewind(self, generators: dict[str, Any], buffers: list[torch.Tensor]) -> None:
        randomness.put_back(generators)
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def _halve(self, share: int) -> None:
        size = self.size or share
        if size == 1:
            raise UsageError(
                "a single sample does not fit into the memory of every rank",
                hint="choose GPUs with more memory (vram_gib), or checkpoint activations (torch.utils.checkpoint)",
            )
        self.size = -(-size // 2)
        if self._ranks.rank == 0:
            say(f"out of memory: {self.size} of a rank's {share} samples at once from now on, not {size}")

    def _average(self) -> None:
        if self._ranks.world == 1:
            return
        for bucket in _buckets(self._model):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self._ranks.world
            begin = 0
            for gradient in bucket:
                end = begin + gradient.numel()
                gradient.copy_(flat[begin:end].view_as(gradient))
                begin = end

    def _device(self) -> str:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _check(model: torch.nn.Module) -> None:
    """Refuse a model whose forward or backward pass waits for other ranks."""
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    talking = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    if isinstance(model, DistributedDataParallel) or sharded or talking:
        raise UsageError(
            "MicroBatch was given a model whose ranks wait for each other inside a pass: one that runs out of memory"
            " would leave the others waiting",
            hint="give it the plain module, for it averages gradients itself; sharded models need a size that fits",
        )


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(name in str(error) for name in _OTHER_NAMES)


def _samples(batch: Any) -> int:
    """Return how many samples a batch has: its first tensor's first dimension."""
    while not isinstance(batch, torch.Tensor):
        values = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(values, (list, tuple)) or not values:
            raise UsageError(
                f"a batch is a {type(batch).__name__}, which cannot be cut into parts",
                hint="have the data set return tensors, or tuples, lists or dicts of them",
            )
        batch = values[0]
    return len(batch)


def _part(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, dict):
        return {key: _part(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_part(value, begin, end) for value in batch))
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], (str, bytes)):
        return type(batch)(_part(value, begin, end) for value in batch)
    return batch[begin:end]


def _buckets(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients, a few MiB of one type at a time; those of parameters that took no part are zero."""
    bucket: list[torch.Tensor] = []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        full = sum(map(size_of, bucket)) + size_of(parameter.grad) > _BUCKET_BYTES
        if bucket and (full or bucket[0].dtype != parameter.grad.dtype):
            yield bucket
            bucket = []
        bucket.append(parameter.grad)
    if bucket:
        yield bucket
