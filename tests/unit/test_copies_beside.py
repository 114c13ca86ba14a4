"""Saves from a GPU, with a stand-in for it that does what is queued only when it must: at the optimizer's next step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gpucloud.domain.checkpoint.objects import SUM_BYTES, read_header, sums_at
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.save import capture as copying
from gpucloud.resume.save.capture import REPLACED, TOUCHED, Capture
from gpucloud.resume.state.state import TrainingState
from gpucloud.resume.state.tree import tensor_at
from gpucloud.store.writing import Torn, put_fingerprints

EXTRA: dict[str, Any] = {"position": 7, "randomness": torch.tensor([3, 1, 4])}


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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
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


class Average:
    """Of the weights' sums: an object of the script that every step changes in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"mean": torch.zeros(2), "seen": [0]}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def step(self) -> None:
        self.state["mean"] += 1
        self.state["seen"][0] += 1


class Training:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.average = Average()
        parts = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        self.capture = Capture(TrainingState(parts), Ranks())
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 8)).sum().backward()
        self.average.step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> None:
        self.capture.begin(EXTRA)

    def written(self, part: str = "shared") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """The object as its writer would find it: its tensors, and the JSON of a part."""
        memory = self.capture.save_buffer.tensor(0, self.capture.size)
        header = read_header(memoryview(memory.numpy()))
        tensors = {tensor.name: tensor_at(memory, header.start, tensor).clone() for tensor in header.tensors}
        return tensors, json.loads(header.metadata[part])

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


def test_what_other_objects_had_at_the_save_is_written_and_what_the_rank_has_of_its_own(gpu: Gpu) -> None:
    training = Training()
    for seen in (1, 2, 3):
        training.save()
        training.step()
        assert training.capture.spoilt() == ""
        tensors, own = training.written("own")
        assert tensors["rank.others.average.mean"].tolist() == [seen, seen]
        assert own["others"]["average"]["seen"] == [seen]
        assert (own["position"], tensors["rank.randomness"].tolist()) == (7, [3, 1, 4])


def test_tensors_that_other_objects_have_from_now_on_or_no_more_are_saved_at_once(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    training.average.state["variance"] = torch.tensor([5.0])
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["rank.others.average.variance"].tolist() == [5.0]
    del training.average.state["variance"]
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert "rank.others.average.variance" not in training.written()[0]


def test_a_buffer_that_is_another_tensor_now_is_saved_at_once(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    training.model[1].running_mean = torch.full((8,), 2.5)
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["rank.buffers.model.1.running_mean"].tolist() == [2.5] * 8


def test_the_first_buffer_of_a_module_costs_one_save(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    training.model[0].register_buffer("scale", torch.tensor([7.0]))
    training.save()
    training.step()
    assert training.capture.spoilt() == REPLACED
    training.save()
    training.step()
    assert training.capture.spoilt() == ""
    assert training.written()[0]["rank.buffers.model.0.scale"].tolist() == [7.0]


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


def torn(training: Training) -> str | None:
    """What the writer says of the copy, as it finds it and the GPU's sums in the arena."""
    capture, begin = training.capture, sums_at(training.capture.size)
    data = memoryview(capture.save_buffer.tensor(0, capture.size).numpy()).cast("B")
    sums = capture.save_buffer.tensor(begin, begin + SUM_BYTES * capture.summed)
    try:
        put_fingerprints(data, memoryview(sums.numpy()).cast("B").cast("q"))
    except Torn as error:
        return str(error)
    return None


def test_a_change_that_no_tensor_counts_is_found_by_what_the_gpu_had_before_it(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.step()
    assert (training.capture.spoilt(), torn(training)) == ("", None)
    training.save()
    for parameter in training.model.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    training.step()
    assert training.capture.spoilt() == ""
    assert "model.0.bias was changed while it was copied" in (torn(training) or "")
    training.capture.mistrust()
    before = training.now()
    training.save()
    for parameter in training.model.parameters():
        parameter.data.zero_()
    training.step()
    assert (training.capture.spoilt(), torn(training)) == ("", None)
    assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()


def test_a_change_of_what_was_copied_before_it_leaves_the_copy_as_it_was(gpu: Gpu) -> None:
    training = Training()
    before = training.now()
    training.save()
    gpu.do_all()
    for parameter in training.model.parameters():
        parameter.data.zero_()
    training.step()
    assert (training.capture.spoilt(), torn(training)) == ("", None)
    assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()


def test_a_change_of_what_an_optimizer_keeps_is_found_too(gpu: Gpu) -> None:
    training = Training()
    training.save()
    training.optimizer.state[training.model[0].weight]["exp_avg"].data.add_(1)
    training.step()
    assert training.capture.spoilt() == ""
    assert "optimizer.state." in (torn(training) or "")


def test_where_no_optimizer_is_seen_to_step_nothing_goes_on_before_the_copy_is_made(gpu: Gpu) -> None:
    """As in a CUDA graph: its replays call no hook, and count no versions."""
    training = Training()
    for _ in range(3):
        before = training.now()
        training.capture.begin(EXTRA, steps_are_seen=False)
        assert gpu.query(), "what comes next is queued behind the copy"
        for parameter in training.model.parameters():
            parameter.data.zero_()
        assert (training.capture.spoilt(), torn(training)) == ("", None)
        assert training.written()[0]["model.0.weight"].tolist() == before["model.0.weight"].tolist()
        training.step()
