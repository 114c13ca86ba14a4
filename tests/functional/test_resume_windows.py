"""Which steps lack gathered gradients, where FSDP2 keeps them out of sight."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gpucloud.resume.save.cadence import Window, Windows

KINDS = ("float32", "reduced in another type", "replicated", "compiled")


@pytest.fixture(autouse=True)
def lone_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.compiler.reset()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


class Sharded:
    """A model that is sharded block by block, watched like one of a run."""

    def __init__(self, kind):
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        options = {}
        if kind == "reduced in another type":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if kind == "replicated":
            options["mesh"] = init_device_mesh("cpu", (1, 1), mesh_dim_names=("copies", "parts"))
        for block in (*self.inner, self.inner):
            fully_shard(block, **options)
        self.model = torch.compile(self.inner, backend="eager") if kind == "compiled" else self.inner
        self.optimizer = torch.optim.AdamW(self.inner.parameters())
        self.windows = Windows((self.optimizer,), (self.model,))

    def gather(self):
        self.model(torch.ones(2, 4)).float().square().mean().backward()

    def change(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_step_whose_gradients_wait_for_synchronisation_is_open(kind):
    sharded = Sharded(kind)
    found = []
    for number in range(1, 7):
        sharded.inner.set_requires_gradient_sync(number % 3 == 0)
        sharded.gather()
        if number % 3 == 0:
            sharded.change()
        found.append(sharded.windows.now())
    assert found == [Window.UNKNOWN, Window.UNKNOWN, Window.CLOSED, Window.OPEN, Window.OPEN, Window.CLOSED]


def test_a_step_that_the_scaler_leaves_out_is_closed_for_it_gathers_nothing(kind):
    sharded = Sharded(kind)
    found = []
    for left_out in (True, True, False, True):
        sharded.gather()
        sharded.optimizer.zero_grad() if left_out else sharded.change()
        found.append(sharded.windows.now())
    assert found == [Window.CLOSED] * 4


def test_a_step_of_replicated_parts_that_are_summed_within_a_copy_alone_is_open():
    sharded = Sharded("replicated")
    sharded.inner.set_requires_all_reduce(False)
    sharded.gather()
    assert sharded.windows.now() is Window.UNKNOWN


def test_a_torch_that_keeps_gradients_elsewhere_has_saving_wait(monkeypatch):
    sharded = Sharded("float32")
    assert sharded.windows.now() is Window.CLOSED
    monkeypatch.setattr(type(sharded.inner), "_get_fsdp_state", lambda self: object())
    assert sharded.windows.now() is Window.UNKNOWN
