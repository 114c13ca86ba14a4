"""A checkpoint of any number of ranks is read by any other, whole tensors and parts of them alike."""

import json
import os

import pytest
import torch
from torch import nn

from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise
from gpucloud.domain.checkpoint.objects import Tensor, entries_of, header_bytes, read_header
from gpucloud.resume import restoring
from gpucloud.resume.reading import Contents, Held, whole_of
from gpucloud.resume.run import Run
from gpucloud.resume.save.writer import Plan, SaveBuffer
from gpucloud.resume.state.state import TrainingState
from gpucloud.resume.state.tree import share
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.standins.saved_runs import SavedRun, forking


class Alone:
    """Ranks that need not hear of each other: what they would say is the same."""

    device = torch.device("cpu")

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def highest(self, *numbers):
        return numbers

    def shared(self, data):
        return Alone.said if self.rank else data

    def gathered(self, data):
        return (data,) * self.world


def training(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def written(store, model, optimizer, world):
    """Have each rank of `world` write its object, and commit them; each rank's own part says who it is."""
    checkpoints = Checkpoints(store, "", keep=3)
    checkpoints.begin(base=None, attempt=1)
    commit = Commit(checkpoints.generation, 7)
    pieces = []
    for rank in range(world):
        found = TrainingState({"model": model, "optimizer": optimizer}).collect(rank, world, {"me": torch.tensor(rank)})
        tensors = found.shared | found.own
        save_buffer = SaveBuffer()
        plan = Plan(tensors, save_buffer, header=0)
        plan.head(found.metadata)
        for into, tensor in plan.pairs(tensors):
            into.copy_(tensor)
        data = memoryview(save_buffer.tensor(0, plan.size).numpy())
        pieces.append(checkpoints.upload(commit, f"rank-{rank:05d}-of-{world:05d}.safetensors", data))
    checkpoints.commit(Manifest(commit=commit, world=world, promise=Promise(), pieces=tuple(pieces)))


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_every_rank_finds_all_that_is_shared_and_its_own_part_or_the_firsts(tmp_path, before, after):
    store = open_store(str(tmp_path))
    model, optimizer = training(1)
    written(store, model, optimizer, before)
    for rank in range(after):
        other, other_optimizer = training(2)
        checkpoints = Checkpoints(store, "", keep=3)
        Alone.said = store.get("commit/000001/000000007.json").data
        content = restoring.find(checkpoints, Alone(rank, after)).content(rank)
        assert content.own["me"].item() == content.own_rank == (rank if rank < before else 0)
        TrainingState({"model": other, "optimizer": other_optimizer}).fit(content, 7)
        assert same(model.state_dict(), other.state_dict())
        assert same(optimizer.state_dict()["state"], other_optimizer.state_dict()["state"])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def test_each_tensor_is_written_by_one_rank_and_the_shares_are_alike():
    tensors = {str(n): torch.zeros(n) for n in range(1, 40)}
    shares = [share(tensors, rank, 3) for rank in range(3)]
    assert sorted(name for one in shares for name in one) == sorted(tensors)
    sizes = [sum(map(torch.numel, one.values())) for one in shares]
    assert sum(sizes) == 780
    assert max(sizes) - min(sizes) <= 2


def parts_of(whole, cuts):
    """Return headers and objects in which each rank has some rows of a tensor."""
    held = {}
    for number, (begin, end) in enumerate(cuts):
        rows = whole[begin:end].contiguous()
        part = Tensor(name=f"w.{number}", dtype="F32", shape=tuple(rows.shape), begin=0, end=rows.nbytes)
        shard = {"of": "model.w", "shape": list(whole.shape), "offset": [begin, 0]}
        metadata = {"shards": json.dumps({part.name: shard}), "own": "{}"}
        if number == 0:
            metadata["shared"] = json.dumps({"modules": {"model": {"w": {"$": "tensor", "name": "model.w"}}}})
        data = bytearray(header_bytes(entries_of([part]), metadata) + rows.numpy().tobytes())
        memory = torch.frombuffer(data, dtype=torch.uint8)
        held[number] = Held(memoryview(data), memory, read_header(data))
    return held


def test_a_tensor_in_parts_is_put_together():
    whole = torch.arange(24.0).reshape(6, 4)
    held = parts_of(whole, [(0, 2), (2, 3), (3, 6)])
    headers = {number: one.header for number, one in held.items()}
    found = Contents(headers, [0, 1, 2], whole_of(held)).shared("modules")
    assert torch.equal(found["model"]["w"], whole)


@pytest.mark.parametrize("cuts", [[(0, 2), (3, 6)], [(0, 2), (1, 3), (3, 6)]])
def test_a_tensor_of_which_a_part_is_missing_or_there_twice_is_no_checkpoint(cuts):
    held = parts_of(torch.arange(24.0).reshape(6, 4), cuts)
    headers = {number: one.header for number, one in held.items()}
    with pytest.raises(ValueError, match=r"part of model\.w is missing"):
        Contents(headers, list(held), whole_of(held)).shared("modules")


@pytest.mark.slow  # launches of three ranks
def test_ranks_that_each_read_a_share_and_get_the_rest_from_each_other_end_with_the_same_bits(tmp_path):
    def spread(rank):
        restoring.spreads = lambda ranks: ranks.world > 1

    def leave(rank):
        goes_on = Run.step

        def step(self, **said):
            goes_on(self, **said)
            if self.steps_done == 5:
                self._decider._finish()
                os._exit(3)

        Run.step = step

    with forking():
        whole = SavedRun(tmp_path / "whole", ranks=3, steps=8)
        assert whole.attempt() == [0, 0, 0], whole.said()
        cut = SavedRun(tmp_path / "cut", ranks=3, steps=8)
        assert cut.attempt(leave) != [0, 0, 0]
        assert cut.attempt(spread) == [0, 0, 0], cut.said()
        assert json.loads((cut.folder / "result-0.json").read_text())["started"] == 4
        assert cut.digests() == whole.digests()
