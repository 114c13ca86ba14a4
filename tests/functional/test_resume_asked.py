"""What a script asks of its run by itself: what is there before it begins, a save, the best one, its weights."""

import json
import math

import pytest
import torch
from torch import nn

from gpucloud import resume
from gpucloud.domain.checkpoint.manifest import Commit, Level
from gpucloud.domain.checkpoint.objects import read_header
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.resume.state.tree import tensor_at
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints, metric_of
from tests.functional.resuming import DATA, begin, job, train
from tests.functional.test_resume_run import committed, reasons

__all__ = ["job"]  # a fixture


def test_a_first_start_has_nothing_to_peek_at_and_leaves_nothing_behind(job):
    assert resume.peek() is None
    assert not (job / "store").exists()


def test_a_script_knows_what_it_goes_on_from_before_it_builds_its_model(job):
    run, *parts = begin()
    run.values["config"] = {"width": 2, "name": "small"}
    train(run, *parts, steps=7)  # of 5 a epoch; the save of step 6 is the newest
    assert resume.peek() == resume.Peek(
        step=6, epoch=1, values={"config": {"width": 2, "name": "small"}}, level=Level.EXACT
    )


def test_to_peek_reads_no_tensor(job):
    train(*begin(), steps=3)
    for path in (job / "store").glob("jobs/x/checkpoints/data/**/*.safetensors"):
        path.unlink()
    assert resume.peek().step == 2


def test_where_every_manifest_is_damaged_peek_says_what_init_will(job):
    train(*begin(), steps=3)
    for path in (job / "store").glob("jobs/x/checkpoints/commit/*/*.json"):
        path.write_bytes(b"torn")
    with pytest.raises(UsageError, match="none of the 1 checkpoints that are there can be used"):
        resume.peek()


def test_the_values_of_a_run_are_there_again_as_they_were_at_the_step_that_is_resumed(job):
    run, model, optimizer = begin()
    for (batch,) in run.loader(DATA, global_batch=4):
        model(batch).square().sum().backward()
        optimizer.step()
        run.values["seen"] = run.steps_done + 1
        run.step()
        if run.steps_done == 5:
            break
    run._decider._finish()
    assert begin()[0].values == {"seen": 4}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": nn.Linear(1, 1)}, "run.values cannot be saved: Object of type Linear is not JSON serializable"),
        ({"text": "x" * 70_000}, "run.values has 68.4 KiB, of 64 KiB that it may have"),
    ],
)
def test_values_that_are_none_of_json_or_too_large_are_refused_when_they_would_be_saved(job, values, said):
    run, *parts = begin()
    run.values.update(values)
    with pytest.raises(UsageError) as refused:
        train(run, *parts, steps=3)
    assert said in str(refused.value)


def adversaries(**others):
    torch.manual_seed(0)
    models = {"maker": nn.Linear(2, 2), "judge": nn.Linear(2, 1)}
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models.values()]
    schedulers = tuple(torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers)
    run = resume.init(model=models, optimizer=optimizers, scheduler=schedulers, total_steps=100, **others)
    return run, models, optimizers, schedulers


def play(run, models, optimizers, schedulers, steps):
    for (batch,) in run.loader(DATA, global_batch=4):
        for model, optimizer, scheduler in zip(models.values(), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
        run.step()
        if run.steps_done == steps:
            break
    run._decider._finish()
    return [parameter.tolist() for model in models.values() for parameter in model.parameters()]


def test_lists_tuples_and_dicts_of_models_optimizers_and_schedulers_are_continued(job):
    whole = play(*adversaries(), steps=9)
    run, *_ = again = adversaries()
    assert run.steps_done == 8
    assert run.level is Level.EXACT
    assert play(*again, steps=9) == whole
    with pytest.raises(UsageError, match=r"init\(noise\.1=…\) was given a int, which has no state"):
        adversaries(noise=[torch.Generator(), 7])


@pytest.fixture
def seldom(job, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "steps:1000")
    return job


def steps(run, model, optimizer, until, after=lambda _step: None, within=lambda _step: None):
    """Train; `after` is called between steps, `within` ahead of a step's end, both with its number."""
    for (batch,) in run.loader(DATA, global_batch=4):
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        within(run.steps_done + 1)
        run.step()
        after(run.steps_done)
        if run.steps_done == until:
            break
    run._decider._finish()


def test_a_script_saves_when_it_asks_beside_the_training_and_no_step_twice(seldom):
    run, *parts = begin()
    flying = []

    def ask(step):
        if step in (3, 5):
            run.save()
            run.save()
            flying.append(run._decider._saver.in_flight)

    steps(run, *parts, until=7, after=ask)
    assert flying == [True, True]
    assert reasons(seldom) == {3: "asked", 5: "asked"}


def test_a_save_that_is_asked_for_waits_for_the_one_under_way_and_is_of_its_own_step(job):
    run, *parts = begin()  # saves every second step
    steps(run, *parts, until=3, after=lambda step: run.save() if step == 3 else None)
    assert reasons(job) == {2: "due", 3: "asked"}


def test_a_save_that_is_asked_for_in_the_midst_of_a_step_is_of_that_steps_end(seldom):
    run, *parts = begin()
    steps(run, *parts, until=4, within=lambda step: run.save() if step == 3 else None)
    assert committed(seldom) == [3]


def test_a_save_that_is_asked_for_amid_gathered_gradients_waits_for_the_optimizer(seldom):
    run, model, optimizer = begin()
    for number, (batch,) in enumerate(run.loader(DATA, global_batch=4), 1):
        model(batch).square().sum().backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        run.step()
        if number == 4:
            run.save()
        if number == 8:
            break
    run._decider._finish()
    assert committed(seldom) == [6]


def test_what_resumes_from_a_save_that_was_asked_for_after_an_evaluation_is_exact(seldom):
    def evaluate(step):
        if step == 3:
            torch.rand(7)
            run.save()

    run, *parts = begin()
    steps(run, *parts, until=6, after=evaluate)
    whole = [parameter.tolist() for parameter in parts[0].parameters()]
    run, *parts = begin()
    assert (run.steps_done, run.level) == (3, Level.EXACT)
    steps(run, *parts, until=6)
    assert [parameter.tolist() for parameter in parts[0].parameters()] == whole


def called_best(job):
    store = open_store(str(job / "store"))
    found = (job / "store").glob("jobs/x/checkpoints/best/*/*.json")
    return {int(p.stem): metric_of(store, "jobs/x/checkpoints", Commit(int(p.parent.name), int(p.stem))) for p in found}


METRICS = {1: 0.5, 3: 0.8, 5: 0.7, 6: math.nan, 7: 0.8, 9: 0.75}


def test_the_best_by_the_scripts_metric_stays_beside_the_newest_until_there_is_a_better_one(job):
    run, *parts = begin()  # of those that are due every second step, three are kept
    steps(run, *parts, until=12, after=lambda step: run.save(best=METRICS[step]) if step in METRICS else None)
    run._decider.close()
    assert committed(job) == [3, 8, 10, 12]
    assert called_best(job) == {3: 0.8}
    run, *parts = begin()
    steps(run, *parts, until=17, after=lambda step: run.save(best=0.79 if step == 13 else 0.9) if step > 12 else None)
    run._decider.close()
    assert called_best(job) == {14: 0.9}
    assert 3 not in committed(job)


def test_a_checkpoint_that_was_saved_anyway_is_called_the_best_and_not_saved_twice(job):
    run, *parts = begin()
    steps(run, *parts, until=4, after=lambda step: run.save(best=step) if step == 4 else None)
    assert reasons(job) == {2: "due", 4: "due"}
    run.done()
    assert called_best(job) == {4: 4.0}


def test_a_resumed_run_calls_what_it_began_from_the_best_where_it_finds_it_so(job):
    steps(*begin(), until=4)
    run, *parts = begin()
    run.save(best=0.5)
    steps(run, *parts, until=13, after=lambda step: run.save(best=0.4))
    run._decider.close()
    assert committed(job)[0] == 4
    assert called_best(job) == {4: 0.5}


def test_a_save_that_failed_is_not_the_best(job):
    run, *parts = begin()

    def lose(step):
        if step == 3:
            run.save(best=1.0)
            run._decider._saver._dispatch._writer.kill()
        if step == 5:
            run.save(best=0.5)

    steps(run, *parts, until=6, after=lose)
    run.done()
    assert called_best(job) == {5: 0.5}


def test_where_one_rank_alone_asks_for_a_save_all_are_told(job, monkeypatch):
    run, *parts = begin()

    def asks_too(first, *rest):
        return (0, *rest)  # the other rank is at run.step()

    def ask(step):
        if step == 3:
            monkeypatch.setattr(run._ranks, "highest", asks_too)
            with pytest.raises(UsageError, match=r"one rank is at run.step\(\) while another is at run.save\(\)"):
                run.save()
            monkeypatch.undo()

    steps(run, *parts, until=3, after=ask)


def test_what_an_abandoned_attempt_called_the_best_is_not_the_best_of_this_one(job):
    steps(*begin(), until=4)
    store = Checkpoints(open_store(str(job / "store")), "jobs/x/checkpoints", keep=3)
    store.generation = 1
    store.call_best(Commit(1, 4), 9.0)  # and the next began at step 2
    (job / "store/jobs/x/checkpoints/commit/000001/000000004.json").rename(job / "aside")
    run, *parts = begin()
    (job / "aside").rename(job / "store/jobs/x/checkpoints/commit/000001/000000004.json")
    assert run.steps_done == 2
    steps(run, *parts, until=9, after=lambda step: run.save(best=1.0) if step == 3 else None)
    run._decider.close()
    assert committed(job) == [2, 3, 4, 6, 8]


class Configured(nn.Linear):
    class config:  # noqa: N801  as transformers' models have one
        @staticmethod
        def to_dict():
            return {"model_type": "linear", "width": 2}


def exporting():
    torch.manual_seed(0)
    model = nn.Sequential(Configured(2, 2), nn.BatchNorm1d(2))
    model.tied = model[0].weight
    return resume.init(model=[model, Configured(2, 2).to(torch.bfloat16)], total_steps=1), model


def test_weights_are_exported_as_torch_reads_them(job):
    run, model = exporting()
    run.export(job / "results" / "weights.pt", of="model.0")  # the folder is made, as the one of safetensors is
    read = torch.load(job / "results" / "weights.pt", weights_only=True)
    assert list(read) == list(model.state_dict())
    model.load_state_dict(read)


def test_weights_are_exported_as_a_folder_with_the_models_configuration(job):
    run, model = exporting()
    run.export(job / "out", of="model.0", config={"width": 7})
    assert json.loads((job / "out" / "config.json").read_text()) == {"width": 7}
    data = (job / "out" / "model.safetensors").read_bytes()
    header = read_header(data)
    assert header.metadata == {"format": "pt"}
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    read = {tensor.name: tensor_at(memory, header.start, tensor) for tensor in header.tensors}
    assert sorted(read) == sorted(model.state_dict())
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())
    run.export(job / "other", of="model.1")
    assert json.loads((job / "other" / "config.json").read_text()) == {"model_type": "linear", "width": 2}
    assert read_header((job / "other" / "model.safetensors").read_bytes()).tensors[0].dtype == "BF16"


def test_what_cannot_be_exported_is_refused(job):
    run, _ = exporting()
    with pytest.raises(UsageError, match="the run has no module 'model'") as refused:
        run.export(job / "weights.pt")
    assert "one of model.0, model.1" in refused.value.hint
    (job / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*: Not a directory"):
        run.export(job / "file" / "weights.pt", of="model.0")
    assert list(job.glob(".*")) == []
