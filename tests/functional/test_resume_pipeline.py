"""Pipelines of torch.distributed.pipelining: each rank holds another stage, and finds its own again."""

from __future__ import annotations

import re
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.resume.state.stages import require_known, share_of, stage_of
from gpucloud.resume.state.state import TrainingState
from gpucloud.store import open_store
from gpucloud.usecases.checkpoint import pulling
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from tests.prove.disturbing import ended_with, killed_at, noticed_at
from tests.standins import framework_training
from tests.standins.saved_runs import PREFIX, SavedRun, forking


@pytest.fixture(autouse=True)
def can_fork():
    with forking():
        yield


def piped(folder, *settings, ranks=2):
    arguments = ("--framework", "pipeline", "--settings", *settings)
    return SavedRun(folder, ranks=ranks, steps=12, every=2, script=framework_training.main, arguments=arguments)


def refused(run):
    """Whether no rank of the next attempt trains: those that have not refused yet are ended with the first that has."""
    return set(run.attempt()) <= {1, -signal.SIGKILL}


@pytest.mark.parametrize("settings", [(), pytest.param(("module",), marks=pytest.mark.slow), ("interleaved", "loader")])
def test_ranks_that_hold_stages_of_equal_names_and_shapes_go_on_with_their_own(tmp_path, settings):
    whole, run = piped(tmp_path / "whole", *settings), piped(tmp_path / "disturbed", *settings)
    assert whole.attempt() == [0, 0], whole.said()
    assert run.attempt(noticed_at(5)) == [75, 75], run.said()
    assert run.attempt(killed_at(9)) == [-9, -9], run.said()
    assert run.attempt() == [0, 0], run.said()
    assert ended_with(run) == ended_with(whole)
    first, second = ended_with(run)
    assert (first["level"], second["level"]) == ("exact", "exact")
    assert first["digests"]["model"] != second["digests"]["model"]
    # Both stages were trained on the same batches, however each rank draws.
    mine, others = ((run.folder / f"seen-{rank}.jsonl").read_text() for rank in range(2))
    assert mine == others


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_another_number_of_stages_is_refused_on_every_rank(tmp_path, capfd, before, after):
    run = piped(tmp_path / "run", ranks=before)
    assert run.attempt() == [0] * before, run.said()
    run.ranks = after
    assert refused(run)
    then, now = (
        rf"has stage \d of {before} here on {before} ranks",
        rf"this script has stage \d of {after} here on {after}",
    )
    assert re.search(f"the checkpoint of step 12 {then}, and {now}", capfd.readouterr().err)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("batched", "RandomSampler draws from each rank's own generator, and ranks of a pipeline read one order"),
        ("unseeded", "RandomSampler draws from each rank's own generator, and ranks of a pipeline read one order"),
        ("apart", "the ranks differ in seed of the sampler: 0 on rank 0, 1 on rank 1"),
    ],
)
def test_a_loader_that_would_give_each_stage_other_batches_is_refused(tmp_path, capfd, setting, told):
    assert refused(piped(tmp_path / "run", setting))
    assert told in capfd.readouterr().err


def test_a_torch_whose_stages_cannot_be_told_is_refused(monkeypatch):
    monkeypatch.delattr("torch.distributed.pipelining.stage._PipelineStageBase")
    with pytest.raises(UsageError, match="cannot be told from other modules in torch"):
        stage_of(nn.Linear(2, 2))


def test_a_stage_that_the_run_takes_for_any_module_is_refused():
    module = nn.Sequential(nn.Linear(2, 2))
    stage = object.__new__(pipelining.PipelineStage)  # without ranks
    stage.submod, stage.stage_index = module, 1
    for given in (module, module[0], nn.ModuleDict({"stage": module})):
        with pytest.raises(
            UsageError, match=r"'model' is of a pipeline's stage 1, and the run does not know it as one"
        ):
            require_known({"model": given}, {})
    require_known({"model": module}, {"model": (1, 2)})
    require_known({"model": nn.Linear(2, 2)}, {})


class Mesh:
    def get_local_rank(self):
        return 3

    def size(self):
        return 4


def test_ranks_of_one_pipeline_are_one_share_and_of_several_the_mesh_says_which():
    two = {"model": (1, 2)}
    assert share_of({}, None, (1, 2)) == (1, 2)
    assert share_of(two, None, (1, 2)) == (0, 1)
    assert share_of({"model.0": (1, 4), "model.1": (3, 4)}, None, (1, 2)) == (0, 1)
    assert share_of(two, Mesh(), (7, 8)) == (3, 4)
    with pytest.raises(UsageError, match="several pipelines train side by side"):
        share_of(two, None, (7, 8))


def test_stages_shared_out_otherwise_on_as_many_ranks_are_refused(tmp_path, capfd):
    run = piped(tmp_path / "run")
    assert run.attempt() == [0, 0], run.said()
    run.arguments = (*run.arguments, "interleaved")
    assert refused(run)
    told = r"has stage (\d) of 2 here on 2 ranks, and this script has stage \1, \d of 4 here on 2"
    assert re.search(told, capfd.readouterr().err)


def test_weights_of_a_stage_alone_are_not_taken_for_the_model(tmp_path):
    run = piped(tmp_path / "run")
    assert run.attempt() == [0, 0], run.said()
    stored = StoredCheckpoints(store=open_store(run.url), prefix=PREFIX, keep=3)
    with pytest.raises(UsageError, match="each rank has a stage of a pipeline"):
        pulling.planned(stored, run.restored().manifest, everything=False, about={})


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_run_exports_no_stage_and_says_how_each_rank_may(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_STORE", str(tmp_path / "store"))
    stage = pipelining.PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    run = resume.init(model=stage)
    with pytest.raises(UsageError, match="'model' is a stage of a pipeline") as refused:
        run.export(tmp_path / "weights.pt")
    assert "on every rank" in refused.value.hint


@pytest.mark.usefixtures("alone")
def test_a_stage_whose_weights_are_sharded_is_refused():
    model = nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    with pytest.raises(UsageError, match="a stage of a pipeline whose weights are sharded"):
        TrainingState({"model": stage})


@pytest.mark.usefixtures("alone")
def test_a_trial_of_a_stage_draws_nothing_and_moves_no_average():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3))
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"))
    TrainingState({"model": stage})
    schedule = pipelining.ScheduleGPipe(stage, 1, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    before = torch.get_rng_state()
    schedule.step(x, target=x)
    trained, drawn = model[0].running_mean.clone(), torch.get_rng_state()
    model[0].reset_running_stats()
    torch.set_rng_state(before)
    model(x)
    assert torch.equal(trained, model[0].running_mean)
    assert torch.equal(drawn, torch.get_rng_state())
