"""Loops in torchtitan's way count a step before they ask for its batch; a checkpoint has the last one that is done."""

from __future__ import annotations

import numpy
import torch
from torch import nn

from gpucloud.frameworks.dcp import Checkpointer, _Done
from tests.prove.disturbing import ended_with, noticed_at
from tests.standins import framework_training
from tests.standins.saved_runs import SavedRun, forking


def of_two_ranks(folder, *settings):
    arguments = ("--framework", "dcp", "--settings", *settings)
    return SavedRun(folder, ranks=2, steps=12, every=2, script=framework_training.main, arguments=arguments)


def test_a_step_that_is_counted_ahead_of_its_batch_makes_no_resume_less_than_exact(tmp_path):
    with forking():
        whole, run = of_two_ranks(tmp_path / "whole"), of_two_ranks(tmp_path / "noticed")
        assert whole.attempt() == [0, 0], whole.said()
        assert run.attempt(noticed_at(7)) == [75, 75], run.said()
        assert run.attempt() == [0, 0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert {one["level"] for one in ended_with(run)} == {"exact"}


class Count:
    step = 0

    def __init__(self):
        self.seen = torch.zeros(3)

    def state_dict(self):
        return {"step": torch.tensor(self.step), "seen": [self.seen]}

    def load_state_dict(self, state):
        self.step, (self.seen,) = int(state["step"]), state["seen"]


def loop():
    torch.manual_seed(0)
    model, count = nn.Linear(1, 1), Count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.arange(9.0)[:, None])
    checkpointer = Checkpointer(
        dataloader=data,
        model_parts=[model],
        optimizers=[optimizer],
        states={"train_state": count, "average": nn.Linear(1, 1), "noise": torch.Generator()},
        total_steps=6,
    )
    return model, count, optimizer, checkpointer


def test_a_checkpoint_between_two_steps_has_the_count_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "steps:100")
    model, count, optimizer, checkpointer = loop()
    checkpointer.load()
    batches = iter(checkpointer.dataloader)
    for _ in range(3):
        count.step += 1
        count.seen += 1  # in place
        model(next(batches)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(count.step)
    count.step += 1
    count.seen += 1
    assert checkpointer.run is not None
    checkpointer.run.save()  # as a notice does that comes while a batch is waited for
    checkpointer.run._decider.settle()
    assert checkpointer.run.committed_step == 3

    _, again, _, other = loop()
    assert other.load()
    assert set(other.run._state.modules) == {"model.0", "average"}
    assert (other.run.steps_done, again.step, again.seen.tolist()) == (3, 3, [3.0] * 3)


class Mixed:
    def __init__(self):
        self.numbers, self.large = {"seen": numpy.zeros(2), "deep": [{"at": 1}]}, torch.zeros(5000)

    def state_dict(self):
        return {**self.numbers, "large": self.large}

    def load_state_dict(self, state):
        self.numbers = state


def test_what_the_loop_changes_ahead_of_its_batch_is_kept_as_the_last_step_left_it():
    mixed = Mixed()
    done = _Done(mixed)
    done.done()
    mixed.numbers["seen"] += 1
    mixed.numbers["deep"][0]["at"] = 2
    mixed.large += 1
    state = done.state_dict()
    assert (state["seen"].tolist(), state["deep"], state["large"][0]) == ([0, 0], [{"at": 1}], 1)
