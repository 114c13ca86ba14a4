"""Trainings whose loop is a framework's, over gloo: noticed or killed they end with the bits of undisturbed ones."""

from __future__ import annotations

import argparse
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning import pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.frameworks.accelerate import resumable as over_accelerate
from gpucloud.frameworks.dcp import Checkpointer
from gpucloud.frameworks.huggingface import resumable
from gpucloud.frameworks.lightning import Resumable
from tests.prove.disturbing import ended_with, killed_at, noticed_at
from tests.standins import framework_training
from tests.standins.saved_runs import SavedRun, forking


@pytest.fixture(autouse=True)
def can_fork():
    with forking():
        yield


def training(folder, *settings, framework="huggingface", ranks=1, every=2, script=framework_training.main):
    arguments = ("--framework", framework, "--settings", *settings)
    return SavedRun(folder, ranks=ranks, steps=12, every=every, script=script, arguments=arguments)


def test_a_trainer_leaves_at_the_end_of_an_epoch_and_goes_on_with_the_bits_of_one_that_nothing_disturbed(tmp_path):
    whole, run = training(tmp_path / "whole", "evaluation"), training(tmp_path / "noticed", "evaluation")
    assert whole.attempt() == [0], whole.said()
    assert run.attempt(noticed_at(6)) == [75], run.said()
    assert run.restored().commit.step == 6
    assert run.attempt() == [0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert ended_with(run)[0]["level"] == "exact"
    # A run that is over trains no more.
    assert run.attempt() == [0], run.said()
    assert ended_with(run)[0]["digests"]["model"] == ended_with(whole)[0]["digests"]["model"]


def test_three_ranks_of_a_trainer_that_are_killed_in_an_epoch_of_steps_in_parts_end_with_the_same_bits(tmp_path, capfd):
    whole = training(tmp_path / "whole", "accumulation", "collation", ranks=3, every=4)
    run = training(tmp_path / "killed", "accumulation", "collation", ranks=3, every=4)
    assert whole.attempt() == [0, 0, 0], whole.said()
    assert run.attempt(killed_at(9)) == [-9, -9, -9]
    assert run.attempt() == [0, 0, 0], run.said()
    assert re.search(
        "resumed from step [48], exact", capfd.readouterr().err
    )  # the newest save may not have counted yet
    assert ended_with(run) == ended_with(whole)
    assert {one["level"] for one in ended_with(run)} == {"exact"}


def test_a_checkpoint_that_turns_out_to_be_damaged_is_passed_over_by_a_trainer(tmp_path, capfd):
    whole, run = training(tmp_path / "whole"), training(tmp_path / "damaged")
    assert whole.attempt() == [0], whole.said()
    assert run.attempt(killed_at(9)) == [-9]
    newest = run.restored()
    (piece,) = newest.manifest.pieces
    file = Path(run.url) / "jobs/saved/checkpoints" / piece.key
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    before = run.restored().commit.step
    assert before < newest.commit.step
    assert run.attempt() == [0], run.said()
    assert f"resumed from step {before}, exact" in capfd.readouterr().err
    assert ended_with(run) == ended_with(whole)


def test_a_lightning_trainer_leaves_at_the_end_of_an_epoch_and_goes_on_with_the_same_bits(tmp_path):
    settings = ("evaluation", "often", "accumulation")
    whole = training(tmp_path / "whole", *settings, framework="lightning")
    run = training(tmp_path / "noticed", *settings, framework="lightning")
    assert whole.attempt() == [0], whole.said()
    assert run.attempt(noticed_at(6)) == [75], run.said()
    assert run.restored().commit.step == 6
    assert run.attempt(noticed_at(8)) == [75], run.said()
    assert run.attempt() == [0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert ended_with(run)[0]["level"] == "exact"
    # A run that is over trains no more.
    assert run.attempt() == [0], run.said()
    assert ended_with(run)[0]["digests"]["model"] == ended_with(whole)[0]["digests"]["model"]


def test_three_ranks_of_a_lightning_trainer_that_are_killed_in_an_epoch_end_with_the_same_bits(tmp_path):
    whole = training(tmp_path / "whole", "collation", framework="lightning", ranks=3, every=4)
    run = training(tmp_path / "killed", "collation", framework="lightning", ranks=3, every=4)
    assert whole.attempt() == [0, 0, 0], whole.said()
    assert run.attempt(killed_at(9)) == [-9, -9, -9]
    assert run.attempt() == [0, 0, 0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert {one["level"] for one in ended_with(run)} == {"exact"}


def test_three_ranks_over_accelerate_that_are_killed_as_they_gather_gradients_end_with_the_same_bits(tmp_path):
    settings = {"framework": "accelerate", "ranks": 3, "every": 1}
    whole = training(tmp_path / "whole", "accumulation", "collation", **settings)
    run = training(tmp_path / "noticed", "accumulation", "collation", **settings)
    assert whole.attempt() == [0, 0, 0], whole.said()
    assert run.attempt(noticed_at(8)) == [75, 75, 75], run.said()
    assert run.attempt() == [0, 0, 0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert {one["level"] for one in ended_with(run)} == {"exact"}


def test_two_ranks_that_hold_a_model_together_in_torchtitans_way_leave_and_end_with_the_same_bits(tmp_path):
    whole = training(tmp_path / "whole", framework="dcp", ranks=2)
    run = training(tmp_path / "noticed", framework="dcp", ranks=2)
    assert whole.attempt() == [0, 0], whole.said()
    assert run.attempt(noticed_at(7)) == [75, 75], run.said()
    assert run.restored().commit.step == 7
    assert run.attempt() == [0, 0], run.said()
    assert ended_with(run) == ended_with(whole)
    assert {one["level"] for one in ended_with(run)} == {"exact"}


def test_a_checkpointer_refuses_steps_that_are_not_counted_where_it_puts_them_back(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    model = torch.nn.Linear(1, 1)
    loader = torch.utils.data.DataLoader(torch.ones(4, 1))
    checkpointer = Checkpointer(
        model_parts=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], dataloader=loader
    )
    with pytest.raises(UsageError, match="nothing was loaded before the first step"):
        checkpointer.save(1)
    assert not checkpointer.load()
    next(iter(checkpointer.dataloader))
    with pytest.raises(UsageError, match="this is step 5, and the run has done 0"):
        checkpointer.save(5)
    with pytest.raises(UsageError, match="has loaded already"):
        checkpointer.load()


def test_models_that_the_accelerator_has_not_prepared_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    accelerator = Accelerator(cpu=True)
    model, other = accelerator.prepare(torch.nn.Linear(1, 1)), torch.nn.Linear(1, 1)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(4)))
    with pytest.raises(UsageError, match="has prepared 1 models, and resumable was given others"):
        over_accelerate(accelerator, other, loader)
    with pytest.raises(UsageError, match="has prepared 1 models, and resumable was given others"):
        over_accelerate(accelerator, [model, other], loader)
    AcceleratorState._reset_state(reset_partial_state=True)


def changing_weights_after_a_resume():
    """Train on two ranks, of which a resumed run changes a weight before its first batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    args, _ = parser.parse_known_args()
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = resume.init(model=model, optimizer=optimizer, total_steps=args.steps)
    if run.steps_done:
        torch.nn.init.ones_(model.module.weight)
    for batch in run.loader(torch.ones(8, 1), global_batch=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.step()
    run.done()
    (args.out / f"result-{run.rank}.json").write_text(json.dumps({"level": run.level.value}))


def test_weights_that_two_ranks_change_between_a_resume_and_the_first_batch_leave_nothing_exact(tmp_path):
    run = training(tmp_path / "run", ranks=2, script=changing_weights_after_a_resume)
    assert run.attempt(noticed_at(4)) == [75, 75], run.said()
    assert run.attempt() == [0, 0], run.said()
    assert ended_with(run) == [{"level": "best_effort"}] * 2


class Constant(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, _):
        return (self.weight * torch.as_tensor(batch).float()).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)  # and no schedule


def test_a_lightning_trainer_without_schedules_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    options = {"plugins": [LightningEnvironment()], "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=[Resumable()], accelerator="cpu", max_steps=3, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning calls what torch will do without, and has advice
        trainer.fit(Constant(), torch.utils.data.DataLoader(range(8)))
    assert trainer.global_step == 3
    assert resume.peek().step == 3


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(8)


@pytest.mark.parametrize(
    ("data", "options", "said", "hint"),
    [
        ({"a": range(4), "b": range(4)}, {}, "this training has several", "ConcatDataset"),
        (torch.utils.data.DataLoader(Endless()), {}, "nobody knows how many batches", "__len__"),
        (range(4), {"reload_dataloaders_every_n_epochs": 1}, "makes the loader anew", "set_epoch"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # what Lightning has to say of such data
def test_what_lightning_cannot_go_on_with_is_refused_with_the_way_out(tmp_path, monkeypatch, data, options, said, hint):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    options |= {"plugins": [LightningEnvironment()], "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=[Resumable()], accelerator="cpu", **options)
    with pytest.raises(UsageError, match=said) as refused:
        trainer.fit(Constant(), data)
    assert hint in refused.value.hint


def a_trainer(folder, **options):
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **options)
    return Trainer(model=torch.nn.Linear(2, 2), args=arguments, train_dataset=[{"x": 1}])


def test_what_a_trainer_cannot_go_on_with_is_refused_with_the_way_out(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    with pytest.raises(UsageError, match="auto_find_batch_size") as refused:
        resumable(a_trainer(tmp_path, auto_find_batch_size=True))
    assert "per_device_train_batch_size" in refused.value.hint
    with pytest.raises(UsageError, match=r"begins at step 0, and trainer\.train") as refused:
        resumable(a_trainer(tmp_path)).train(resume_from_checkpoint="out/checkpoint-3")
    assert "from_pretrained" in refused.value.hint
