"""What was put back is compared with what was saved, before the first step: what differs is named, and no `exact`."""

import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gpucloud import resume
from gpucloud.domain.checkpoint.manifest import Level
from gpucloud.resume.state.state import TrainingState
from gpucloud.store import parts
from tests.functional.resuming import begin, job, train
from tests.standins.saved_runs import SavedRun, forking

__all__ = ["job"]  # a fixture


class Average:
    """Averages of weights in an object of the script's own; `put_back` is how it takes its state."""

    def __init__(self, put_back=lambda value: value):
        self.values = {"weight": torch.arange(12.0).reshape(3, 4).add(0.1).t()}
        self.updates = 7
        self.put_back = put_back

    def state_dict(self):
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state):
        self.values = {name: self.put_back(value) for name, value in state["values"].items()}
        self.updates = state["updates"]


def resumed(job, average):
    """A run that goes on with this object, after two steps with a faithful one; and what it says of itself."""
    train(*begin(average=Average()), steps=2)
    run, _, _ = begin(average=average)
    assert run.steps_done == 2
    run.loader(torch.utils.data.TensorDataset(torch.zeros(20, 2)), global_batch=4)
    return run


def test_what_is_put_back_as_it_was_is_exact(job):
    assert resumed(job, Average()).level is Level.EXACT


def test_what_was_made_in_inference_mode_is_compared_too(job):
    def put_back(value):
        with torch.inference_mode():
            return value.clone()

    run = resumed(job, Average(put_back))
    next(iter(run._feed.loader))
    assert run.level is Level.EXACT


@pytest.mark.parametrize(
    ("put_back", "said"),
    [
        (lambda value: value.half().float(), "others.average.values.weight has other values than were saved"),
        (lambda value: value.flip(0), "others.average.values.weight has other values than were saved"),
        (lambda value: -value, "others.average.values.weight has other values than were saved"),
        (lambda value: value.contiguous(), "others.average.values.weight"),
        (lambda value: value.double(), "others.average.values.weight"),
        (lambda value: value[:2], "others.average.values.weight"),
    ],
    ids=["rounded", "turned round", "negated", "in another order of memory", "of another type", "cut"],
)
def test_what_an_object_makes_of_its_state_is_said_and_is_not_exact(job, capsys, put_back, said):
    run = resumed(job, Average(put_back))
    assert run.level is Level.BEST_EFFORT
    assert said in capsys.readouterr().err


def test_a_number_that_an_object_forgets_is_named(job, capsys):
    class Forgetful(Average):
        def load_state_dict(self, state):
            super().load_state_dict({**state, "updates": 0})

    assert resumed(job, Forgetful()).level is Level.BEST_EFFORT
    assert "others.average.updates was saved as 7, and is 0" in capsys.readouterr().err


def test_a_model_that_changes_its_weights_as_it_loads_them_is_named(job, capsys):
    train(*begin(), steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))

    def scaled(module, _):
        module[0].weight.data.mul_(1.001)

    model.register_load_state_dict_post_hook(scaled)
    run = resume.init(model=model, optimizer=torch.optim.AdamW(model.parameters()), total_steps=1000)
    assert run.level is Level.BEST_EFFORT
    assert "model.0.weight has other values than were saved" in capsys.readouterr().err


def sharded():
    """Two steps, or what comes after them."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = resume.init(model=model, optimizer=optimizer, total_steps=4)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    run._decider._finish()
    dist.barrier()


def test_a_part_of_a_sharded_weight_that_one_rank_changes_is_found(tmp_path, monkeypatch):
    apply = TrainingState.apply

    def to_the_log(rank):
        monkeypatch.setattr(sys, "stderr", sys.__stderr__)

    def changing(rank):
        to_the_log(rank)

        def applied(self, content):
            apply(self, content)
            if rank == 1:
                self._modules["model"].weight.detach().to_local()[1].add_(1)

        monkeypatch.setattr(TrainingState, "apply", applied)

    run = SavedRun(tmp_path / "run", ranks=2, script=sharded)
    with forking():
        assert [run.attempt(), run.attempt(changing)] == [[0, 0], [0, 0]]
        assert "best_effort, not exact: model.weight has other values than were saved" in run.said()
        assert run.attempt(to_the_log) == [0, 0]
    assert "resumed from step 4" in run.said()
    assert "values" not in run.said()


class Shadow:
    """A copy of a weight, which the ranks hold together where they hold the weight so."""

    def __init__(self, weight):
        self.shadow = weight.detach().clone()

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow.copy_(state["shadow"])


def shadowed():
    """A step of a model that several ranks hold together, and one rank has whole."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Conv2d(6, 5, 2)
    model = fully_shard(model) if dist.is_initialized() else model.to(memory_format=torch.channels_last)
    average = Shadow(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = resume.init(model=model, optimizer=optimizer, total_steps=4, average=average)
    for (x,) in run.loader(torch.utils.data.TensorDataset(torch.ones(8, 6, 2, 2)), global_batch=2):
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            average.shadow.lerp_(model.weight.detach(), 0.1)
        run.step()
        break
    run.done()
    print(f"this resume promises {run.level.value}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def shadows(tmp_path):
    with forking():
        yield SavedRun(tmp_path / "run", ranks=2, every=1, script=shadowed)


def on(run, ranks, hook=lambda rank: None):
    run.ranks = ranks
    assert run.attempt(hook) == [0] * ranks, run.said()
    return run.said()


def test_what_ranks_held_together_is_as_it_was_saved_where_one_has_it_whole_and_the_other_way_round(shadows):
    assert [re.findall("promises (.*)", on(shadows, ranks)) for ranks in (2, 1, 2)] == [
        ["exact"],
        ["same_samples"],
        ["same_samples"],
    ]


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_value_is_found_also_where_ranks_begin_or_cease_to_hold_a_tensor_together(shadows, monkeypatch, ranks):
    def put_back(self, state):
        self.shadow.copy_(state["shadow"] + 1)

    before, after = ranks
    on(shadows, before)
    said = on(shadows, after, lambda rank: monkeypatch.setattr(Shadow, "load_state_dict", put_back))
    assert "best_effort, not exact: others.average.shadow has other values than were saved" in said.replace("rank.", "")


def test_without_numpy_where_it_goes_on_nothing_is_called_exact(job, monkeypatch, capsys):
    def missing(*_):
        raise ImportError

    train(*begin(), steps=2)
    monkeypatch.setattr(parts, "of_words", missing)
    assert begin()[0].level is Level.BEST_EFFORT
    assert "NumPy is missing" in capsys.readouterr().err
