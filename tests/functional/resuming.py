"""A small run of one process, as tests of `resume` begin and train it."""

import pytest
import torch
from torch import nn

from gpucloud import resume
from gpucloud.resume.save import agreement


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder of an attempt whose store is beside it; saves every 2 steps, and looks for wishes at each."""
    (tmp_path / "attempt").mkdir()
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("GPUCLOUD_CHECKPOINTS", "jobs/x/checkpoints")
    monkeypatch.setenv("GPUCLOUD_ATTEMPT_DIR", str(tmp_path / "attempt"))
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "steps:2")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(agreement, "LOOK_S", 0.0)
    return tmp_path


DATA = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(20, 2))


def begin(total_steps=1000, width=2, **others):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters())
    run = resume.init(model=model, optimizer=optimizer, total_steps=total_steps, **others)
    return run, model, optimizer


def train(run, model, optimizer, steps=None):
    """Train up to a number of steps (or to the end) and return the losses."""
    losses = []
    for (batch,) in run.loader(DATA, global_batch=4):
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.step(loss=loss)
        if run.steps_done == steps:
            break
    run._decider._finish()
    return losses
