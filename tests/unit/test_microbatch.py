"""A step is the same step however its samples are grouped, and groups halve when memory runs out."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from tests.standins.ports import free_port

SOURCE = Path(__file__).resolve().parents[2] / "templates" / "jobs" / "backoff" / "microbatch.py"
MicroBatch = runpy.run_path(str(SOURCE))["MicroBatch"]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def batch(count: int = 10) -> Pair:
    generator = torch.Generator().manual_seed(1)
    return Pair(torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator))


def make_model(*, noisy: bool = False) -> nn.Module:
    torch.manual_seed(0)
    extra = [nn.BatchNorm1d(8), nn.Dropout(0.5)] if noisy else []
    return nn.Sequential(nn.Linear(4, 8), *extra, nn.Tanh(), nn.Linear(8, 1))


class Memory:
    """A loss that runs out of memory for more than `fits` samples; remembers how many it was given each time."""

    def __init__(self, model: nn.Module, fits: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self.model, self.fits, self.error, self.given = model, fits, error, []

    def __call__(self, part: Pair) -> torch.Tensor:
        self.given.append(len(part.x))
        loss = mse_loss(self.model(part.x), part.y)
        if len(part.x) > self.fits:
            raise self.error("DefaultCPUAllocator: can't allocate memory")
        return loss


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_parts_make_the_gradients_and_the_loss_of_the_whole() -> None:
    whole, parted = make_model(), make_model()
    loss = mse_loss(whole(batch().x), batch().y)
    loss.backward()
    memory = Memory(parted, fits=4)
    told = MicroBatch(parted, size=4).backward(batch(), memory)
    assert memory.given == [4, 4, 2]  # the last part is smaller, and weighs less
    torch.testing.assert_close(told, loss.detach())
    torch.testing.assert_close(gradients(parted), gradients(whole))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_step_that_ran_out_of_memory_begins_anew_with_parts_of_half_the_size(error: type[RuntimeError]) -> None:
    model = make_model()
    memory = Memory(model, fits=3, error=error)
    micro = MicroBatch(model)
    micro.backward(batch(), memory)
    assert memory.given == [10, 5, 3, 3, 3, 1]
    assert micro.size == 3
    model.zero_grad()
    micro.backward(batch(), memory)
    assert memory.given[6:] == [3, 3, 3, 1]


def test_such_a_step_is_bit_for_bit_the_one_that_had_the_size_from_the_start() -> None:
    """Also its dropout, and the means that batch normalization has seen."""
    lucky, unlucky = make_model(noisy=True), make_model(noisy=True)
    torch.manual_seed(5)
    MicroBatch(lucky, size=5).backward(batch(), Memory(lucky, fits=5))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    MicroBatch(unlucky).backward(batch(), Memory(unlucky, fits=5))
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(gradients(unlucky), gradients(lucky))
    for one, other in zip(unlucky.buffers(), lucky.buffers(), strict=True):
        assert torch.equal(one, other)


def test_memory_that_runs_out_in_a_later_part_leaves_no_gradients_of_the_earlier_ones() -> None:
    model, calm = make_model(), make_model()
    calls = []

    def loss_of(part: Pair) -> torch.Tensor:
        calls.append(len(part.x))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return mse_loss(model(part.x), part.y)

    MicroBatch(model, size=5).backward(batch(), loss_of)
    MicroBatch(calm, size=3).backward(batch(), Memory(calm, fits=3))
    assert calls == [5, 5, 3, 3, 3, 1]
    assert torch.equal(gradients(model), gradients(calm))


def test_other_errors_are_passed_on() -> None:
    model = make_model()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        MicroBatch(model).backward(batch(), lambda part: mse_loss(model(part.x[:, :3]), part.y))


def test_a_single_sample_that_does_not_fit_is_told_with_what_to_do() -> None:
    model = make_model()
    with pytest.raises(ValueError, match=r"a single sample does not fit.*more memory"):
        MicroBatch(model).backward(batch(), Memory(model, fits=0))


def test_a_resumed_run_goes_on_with_the_size_and_finds_it_anew_on_another_device() -> None:
    micro, same, other = (MicroBatch(make_model()) for _ in range(3))
    micro.backward(batch(), Memory(micro._model, fits=3))
    assert micro.state_dict() == {"size": 3, "device": "cpu"}
    same.load_state_dict(micro.state_dict())
    other.load_state_dict({"size": 3, "device": "NVIDIA L4"})
    for resumed, given in ((same, [3, 3, 3, 1]), (other, [10])):
        memory = Memory(resumed._model, fits=10)
        resumed.backward(batch(), memory)
        assert memory.given == given


def test_a_size_beyond_the_share_is_the_share() -> None:
    model = make_model()
    micro = MicroBatch(model, size=64)
    memory = Memory(model, fits=5)
    micro.backward(batch(), memory)
    assert memory.given == [10, 5, 5]


def test_batches_are_cut_wherever_they_keep_their_tensors() -> None:
    model, seen = make_model(), []
    tree = {"x": batch().x, "rest": [batch().y, (torch.arange(10),)]}

    def loss_of(part: dict) -> torch.Tensor:
        seen.append(part["rest"][1][0].tolist())
        return mse_loss(model(part["x"]), part["rest"][0])

    MicroBatch(model, size=6).backward(tree, loss_of)
    assert seen == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="a batch is a str, which cannot be cut"):
        MicroBatch(model).backward("batch", loss_of)


def test_a_model_whose_ranks_wait_for_each_other_is_refused() -> None:
    with pytest.raises(ValueError, match="would leave the others waiting"):
        MicroBatch(nn.Sequential(nn.SyncBatchNorm(3)))


def test_all_ranks_agree_when_one_runs_out_of_memory() -> None:
    ends = [os.pipe(), os.pipe()]
    port = free_port()
    children = [_fork(rank, port, ends[rank][1]) for rank in (0, 1)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    told = [os.read(read, 10_000).decode() for read, _ in ends]
    whole = make_model()
    mse_loss(whole(batch().x), batch().y).backward()
    wanted = gradients(whole)
    # Five samples on each rank; three do not fit on rank 1.
    assert [text.partition(";")[0] for text in told] == ["[5, 3, 2, 2, 2, 1]", "[5, 3, 2, 2, 1]"]
    for text in told:
        found = torch.tensor([float(number) for number in text.partition(";")[2].split()])
        torch.testing.assert_close(found, wanted)


def _fork(rank: int, port: int, into: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        model = make_model()
        if rank == 1:  # weights are made rank 0's
            nn.init.zeros_(model[0].weight)
        memory = Memory(model, fits=5 if rank == 0 else 2)
        micro = MicroBatch(model)
        micro.backward(Pair(*(one[rank::2] for one in batch())), memory)
        text = " ".join(str(number) for number in gradients(model).tolist())
        os.write(into, f"{memory.given};{text}".encode())
        dist.destroy_process_group()
        code = 0
    finally:
        os._exit(code)
