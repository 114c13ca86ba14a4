"""What a script asks of its run by itself: what is there before it begins, and values of its own."""

import pytest
import torch
from torch import nn

from gpucloud import resume
from gpucloud.domain.checkpoint.manifest import Level
from gpucloud.domain.errors import UsageError
from tests.functional.resuming import DATA, begin, job, train

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
    run._keeper._finish()
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
    run._keeper._finish()
    return [parameter.tolist() for model in models.values() for parameter in model.parameters()]


def test_lists_tuples_and_dicts_of_models_optimizers_and_schedulers_are_continued(job):
    whole = play(*adversaries(), steps=9)
    run, *_ = again = adversaries()
    assert run.steps_done == 8
    assert run.level is Level.EXACT
    assert play(*again, steps=9) == whole
    with pytest.raises(UsageError, match=r"init\(noise\.1=…\) was given a int, which has no state"):
        adversaries(noise=[torch.Generator(), 7])
