"""Saves from a GPU, with a stand-in for it that does what is queued only when it must: at the optimizer's next step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpucloud.domain.safetensors import read_header
from gpucloud.resume import copying
from gpucloud.resume.capture import REPLACED, TOUCHED, Capture
from gpucloud.resume.layout import tensor_at
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.state import TrainingState

EXTRA: dict[str, Any] = {"position": 7}


class Gpu:
    """Copies are made when someone waits for them: what changed by then would be torn."""

    def __init__(self) -> None:
        self.queued: list[Callable[[], Any]] = []

    def do_all(self, *_: Any) -> None:
        while self.queued:
            self.queued.pop(0)()

    def wait_stream(self, other: Any) -> None:
        """One stream is all there is."""

    wait_event = synchronize = do_all

    def record_event(self) -> Gpu:
        return self

    def query(self) -> bool:
        return not self.queued


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    standing = Gpu()
    monkeypatch.setattr(copying, "_is_far", lambda tensor: tensor.is_floating_point() and tensor.dim() > 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: standing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: standing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def send(route: copying.Route) -> None:
        for into, tensors in route.runs:
            standing.queued.append(
                lambda into=into, tensors=tensors: into.copy_(
                    tensors[0].detach() if len(tensors) == 1 else torch.cat(tensors)
                )
            )

    monkeypatch.setattr(copying, "_send", send)
    return standing


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.capture = Capture(TrainingState({"model": self.model, "optimizer": self.optimizer}), Ranks())
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        self.capture.begin(EXTRA)

    def written(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The object as its writer would find it."""
        memory = self.capture.arena.tensor(0, self.capture.size)
        header = read_header(memoryview(memory.numpy()))
        tensors = {tensor.name: tensor_at(memory, header.start, tensor).clone() for tensor in header.tensors}
        return tensors, json.loads(header.metadata["shared"])

    def now(self) -> dict[str, torch.Tensor]:
        return {f"model.{name}": value.detach().clone() for name, value in self.model.named_parameters()}


def test_the_state_of_the_save_is_written_and_not_that_of_the_step_after(gpu: Gpu) -> None:
    training = Training()
    for _ in range(3):  # the first save is made in full; those after it know where everything lies
        before, mean = training.now(), training.model[1].running_mean.clone()
        training.save()
        training.step()
        assert training.capture.spoilt() == ""
        tensors, _ = training.written()
        assert {name: tensors[name].tolist() for name in before} == {n: v.tolist() for n, v in before.items()}
        assert tensors["rank.buffers.model.1.running_mean"].tolist() == mean.tolist()


def test_a_learning_rate_set_for_the_next_step_is_not_the_one_saved(gpu: Gpu) -> None:
    training = Training()
    for rate in (0.1, 0.2, 0.3):
        training.save()
        training.optimizer.param_groups[0]["lr"] = rate + 0.1
        training.step()
        assert training.capture.spoilt() == ""
        (group,) = training.written()[1]["optimizers"]["optimizer"]["param_groups"]
        assert round(group["lr"], 1) == rate


def test_a_save_without_a_step_after_it_is_whole(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    before = training.now()
    training.save()
    training.capture.wait()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()


def test_weights_in_other_memory_than_before_cost_one_save(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    training.model[0].weight.data = training.model[0].weight.data.clone()
    training.save()
    training.step()
    assert training.capture.spoilt() == REPLACED
    before = training.now()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()


def test_optimizer_state_that_is_new_is_saved_at_once(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    kept = training.optimizer.state[training.model[0].weight]["exp_avg"].clone()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["optimizer.state.model.0.weight.exp_avg"].tolist() == kept.tolist()


def test_a_change_behind_the_optimizers_back_is_noticed_and_waited_for_afterwards(gpu: Gpu) -> None:
    training = Training()
    training.save()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    training.step()
    assert training.capture.spoilt() == TOUCHED
    before = training.now()
    training.save()
    with torch.no_grad():
        training.model[0].weight.add_(1)
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()
