"""Passes a rank's samples through the model in parts that fit into its memory, and makes one step of them."""

import gc

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# What running out of memory is called where it is no OutOfMemoryError: by cuBLAS, cuDNN, and on the CPU.
OTHER_NAMES = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")


class MicroBatch:
    """How many samples a rank passes through the model at once; the step and its samples stay what they are.

    `size` begins with the rank's whole share of the global batch, or with what is given. When any rank runs out of
    memory, it halves on all of them, and the step begins anew: torch's generators and the model's buffers as they
    were, no gradients.
    Hand it to `resume.init` (`micro=…`), so that a resumed run goes on with the size, for rounding depends on it; on
    another kind of device it is found anew.

    `model` is the module itself, not wrapped: ranks talk only after all of them came through, so that none waits for
    one that ran out. Its weights are made rank 0's here; gradients are averaged over ranks by `backward`.
    """

    def __init__(self, model, *, size=None):
        check(model)
        self.size = size
        self._model = model
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._agreed = False
        if self._world > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor, src=0)

    def backward(self, batch, loss_of):
        """Return this rank's mean loss; the model's gradients are those of the mean over the global batch.

        `loss_of` gets a part of the batch (tensors in tuples, lists and dicts, cut in their first dimension), returns
        its mean loss, and may be called again for samples that it had already. Call this on all ranks, with as many
        samples on each and without gradients. Raises ValueError when a single sample does not fit.
        """
        share = samples_of(batch)
        if not self._agreed:
            self._agreed, self.size = True, -self._highest(-min(self.size or share, share))
        before = generators(), [buffer.clone() for buffer in self._model.buffers()]
        loss = self._passed(batch, share, loss_of)
        while self._highest(int(loss is None)):
            self._rewind(*before)
            self._halve(share)
            loss = self._passed(batch, share, loss_of)
        self._average()
        return loss

    def state_dict(self):
        """Return the size, and the device that it was found on."""
        return {"size": self.size, "device": device()}

    def load_state_dict(self, state):
        """Go on with that size, if it was found on such a device."""
        if state["device"] == device():
            self.size = state["size"]
        self._agreed = False

    def _highest(self, number):
        """Return the highest number that any rank gave."""
        if self._world == 1:
            return number
        told = torch.tensor(number, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(told, dist.ReduceOp.MAX)
        return int(told)

    def _passed(self, batch, share, loss_of):
        """Return the mean loss of the whole batch, its gradients made; None if memory ran out."""
        total = None
        try:
            for begin in range(0, share, self.size):
                end = min(begin + self.size, share)
                loss = loss_of(part_of(batch, begin, end)) * ((end - begin) / share)
                loss.backward()
                total = loss.detach() if total is None else total + loss.detach()
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not any(name in str(error) for name in OTHER_NAMES):
                raise
            return None  # the error, whose traceback holds what fills the memory, ends here
        return total

    def _rewind(self, states, buffers):
        put_back(states)
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _halve(self, share):
        if self.size == 1:
            raise ValueError(
                "a single sample does not fit into the memory of every rank: choose GPUs with more memory (vram_gib),"
                " or checkpoint activations (torch.utils.checkpoint)"
            )
        before, self.size = self.size, -(-self.size // 2)
        if self._world == 1 or dist.get_rank() == 0:
            print(f"out of memory: {self.size} of {share} samples at once from now on, not {before}", flush=True)

    def _average(self):
        if self._world == 1:
            return
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # it took no part here, and may have on another rank
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad /= self._world


def check(model):
    """Refuse a model whose forward or backward pass waits for other ranks."""
    sharded = any(hasattr(parameter, "full_tensor") for parameter in model.parameters())
    talking = any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())
    if isinstance(model, DistributedDataParallel) or sharded or talking:
        raise ValueError(
            "MicroBatch was given a model whose ranks wait for each other inside a pass: one that runs out of memory"
            " would leave the others waiting; give it the plain module, for it averages gradients itself"
        )


def samples_of(batch):
    """Return how many samples a batch has: its first tensor's first dimension."""
    while not isinstance(batch, torch.Tensor):
        values = list(batch.values()) if isinstance(batch, dict) else batch
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"a batch is a {type(batch).__name__}, which cannot be cut into parts")
        batch = values[0]
    return len(batch)


def part_of(batch, begin, end):
    """Return those samples of a batch, in the same tuples, lists and dicts."""
    if isinstance(batch, dict):
        return {key: part_of(value, begin, end) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(part_of(value, begin, end) for value in batch))
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], (str, bytes)):
        return type(batch)(part_of(value, begin, end) for value in batch)
    return batch[begin:end]


def generators():
    """Return the states of torch's generators, on which dropout depends."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def put_back(states):
    """Put the generators back into these states."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])


def device():
    """Return what memory depends on: the GPU's model, or the CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
