"""A wish to stop that comes while a script evaluates: the step before is saved, where every rank is in a pause."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume
from gpucloud.domain.errors import UsageError
from gpucloud.resume.run import Run
from gpucloud.resume.save import deciding
from gpucloud.resume.state import randomness
from tests.functional.resuming import DATA, begin, job, train
from tests.functional.test_resume_run import committed, reasons
from tests.standins.saved_runs import PREFIX, SavedRun, forking

__all__ = ["job"]
_SOON_S = 30.0


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SOON_S
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def ask_to_stop(reason: str = "notice") -> None:
    folder = Path(os.environ["GPUCLOUD_ATTEMPT_DIR"])
    at = '"2126-01-01T00:00:00+00:00"' if reason == "notice" else "null"
    (folder / ".stop").write_text(f'{{"reason": "{reason}", "at": {at}}}')
    (folder / ".stop").replace(folder / "stop.json")


@pytest.mark.parametrize("reason", ["notice", "user"])
def test_the_last_step_is_saved_while_the_script_evaluates(job, reason):
    run, model, optimizer = begin(total_steps=9)
    train(run, model, optimizer, steps=3)
    with run.phase("evaluate"):
        for parameter in model.parameters():  # as for averaged weights: torch does not see this
            parameter.data.zero_()
        assert committed(job) == [2]
        ask_to_stop(reason)
        until(lambda: committed(job) == [2, 3])
    assert reasons(job)[3] == {"notice": "notice", "user": "stop"}[reason]
    again, restored, _ = begin(total_steps=9)
    assert again.steps_done == 3
    assert all(parameter.abs().sum() > 0 for parameter in restored.parameters())


def test_a_run_that_was_saved_while_it_evaluated_goes_on_as_if_it_had_never_been(job):
    run, model, optimizer = begin(total_steps=7)
    whole = train(run, model, optimizer)
    run.done()
    for path in sorted((job / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run, model, optimizer = begin(total_steps=7)
    first = train(run, model, optimizer, steps=3)
    with run.phase("evaluate"):
        ask_to_stop()
        until(lambda: committed(job) == [2, 3])
        torch.rand(100)
    (job / "attempt" / "stop.json").unlink()
    run, model, optimizer = begin(total_steps=7)
    assert first + train(run, model, optimizer) == whole
    assert run.level.value == "exact"


def test_without_a_wish_nothing_is_written_and_training_goes_on(job):
    run, model, optimizer = begin(total_steps=9)
    loader = run.loader(DATA, global_batch=4)
    for (batch,) in loader:
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        with run.phase("evaluate"), run.phase("in it"):
            pass
        with run.phase("and again"):
            pass
    run.done()
    assert committed(job)[-1] == 9
    assert set(reasons(job).values()) <= {"due", "last"}


@pytest.mark.parametrize("begun", ["the optimizer stepped", "a batch was handed out", "nothing is saved yet"])
def test_what_lies_between_two_steps_is_saved_as_neither(job, monkeypatch, begun):
    monkeypatch.setattr(deciding, "_LOOK_S", 0.01)
    run, model, optimizer = begin(total_steps=9)
    loader = run.loader(DATA, global_batch=4)
    for (batch,) in loader:
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if begun == "nothing is saved yet":
            break
        if begun == "a batch was handed out" and run.steps_done == 3:
            break
        optimizer.step()
        if begun == "the optimizer stepped" and run.steps_done == 3:
            break
        run.step(loss=loss)
        run._decider._finish()
    with run.phase("evaluate"):
        ask_to_stop()
        time.sleep(0.2)
    assert committed(job) == ([] if begun == "nothing is saved yet" else [2])


def test_a_phase_within_a_phase_ends_no_pause_but_its_own(job):
    run, model, optimizer = begin(total_steps=9)
    train(run, model, optimizer, steps=3)
    with run.phase("evaluate"):
        with run.phase("sample"):
            pass
        ask_to_stop()
        until(lambda: committed(job) == [2, 3])


def test_a_save_under_way_when_a_phase_begins_counts_before_it_ends(job):
    run, model, optimizer = begin(total_steps=9)
    for (batch,) in run.loader(DATA, global_batch=4):
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if run.steps_done == 2:
            break
    assert run.committed_step == 0
    with run.phase("evaluate"):
        ask_to_stop()
        until(lambda: run.committed_step == 2)


def test_where_no_thread_is_to_be_had_a_phase_is_as_it_was(job, monkeypatch):
    def none(_: object) -> None:
        raise RuntimeError("can't start new thread")

    run, model, optimizer = begin(total_steps=9)
    train(run, model, optimizer, steps=3)
    monkeypatch.setattr(deciding.threading.Thread, "start", none)
    with run.phase("evaluate"):
        ask_to_stop()
    assert not run._decider._saver.in_flight


def test_what_a_phase_raises_is_what_comes_out_of_it(job):
    run, model, optimizer = begin(total_steps=9)
    train(run, model, optimizer, steps=3)
    with pytest.raises(UsageError, match="of the script"), run.phase("evaluate"):
        raise UsageError("of the script", hint="")
    assert run._pauses._thread is None


# A script that waits for a batch


class Stalling(torch.utils.data.Dataset):
    """Draws for every sample; while `stall` is there, and a stop was not saved for, the sample of that batch waits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        drawn = torch.rand(2)
        while (self.folder / "stall").exists() and not (self.folder / "over").exists():
            time.sleep(0.01)
        return (torch.tensor([2.0 * index, 1.0]) + drawn,)


def fed(run, model, optimizer, job, steps=None):
    """Train, stalling after so many steps until the last one is saved; return the losses."""
    losses = []
    for (batch,) in run.loader(Stalling(job), global_batch=4):
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        run.step(loss=loss)
        run._decider._finish()
        if run.steps_done == steps:
            (job / "stall").touch()
            ask_to_stop()
            threading.Thread(target=goes_on_when_saved, args=(job, steps)).start()
        elif (job / "over").exists():
            break
    return losses


def goes_on_when_saved(job: Path, step: int) -> None:
    with contextlib.suppress(AssertionError):
        until(lambda: step in committed(job))
    (job / "over").touch()


def test_the_last_step_is_saved_while_the_script_waits_for_a_batch(job, monkeypatch):
    monkeypatch.setattr(deciding, "_STALL_S", 0.2)
    monkeypatch.setenv("GPUCLOUD_CHECKPOINT_EVERY", "steps:100")
    run, model, optimizer = begin(total_steps=9)
    whole = fed(run, model, optimizer, job)
    run.done()
    for path in sorted((job / "store").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run, model, optimizer = begin(total_steps=9)
    with pytest.raises(SystemExit):
        fed(run, model, optimizer, job, steps=5)
    assert committed(job)[0] == 5
    for path in (job / "store").glob("jobs/x/checkpoints/commit/*/*.json"):
        if int(path.stem) > 5:  # that of the step that was done after all
            path.unlink()
    for name in ("attempt/stop.json", "stall", "over"):
        (job / name).unlink()
    run, model, optimizer = begin(total_steps=9)
    assert (run.steps_done, fed(run, model, optimizer, job)) == (5, whole[5:])


def test_what_is_kept_is_captured_as_it_will_be_again_by_whoever_asks():
    torch.manual_seed(1)
    before = randomness.capture()
    with randomness.kept():
        torch.rand(3)
        with randomness.kept():
            torch.rand(3)
            found: list[dict[str, object]] = []
            thread = threading.Thread(target=lambda: found.append(randomness.capture()))
            thread.start()
            thread.join()
    assert torch.equal(found[0]["torch"], before["torch"])
    assert found[0]["python"] == before["python"]
    torch.rand(1)
    assert not torch.equal(randomness.capture()["torch"], before["torch"])


# Several ranks


def script() -> None:
    """Train six steps on two ranks, with a phase after the third: CASE says who does what in it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--sharded", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 3))
    if args.sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run = resume.init(model=model, optimizer=optimizer, total_steps=args.steps)
    for (batch,) in run.loader(DATA, global_batch=4):
        loss = model(batch).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if run.steps_done == 2:
            run._decider._finish()
        if run.steps_done == 3:
            CASES[args.case](run, model)
    run.done()


def third_counts() -> bool:
    return (Path(os.environ["GPUCLOUD_STORE"]) / PREFIX / "commit" / "000001" / "000000003.json").exists()


def all_evaluate(run: Run, model: nn.Module) -> None:
    with run.phase("evaluate"):
        if run.rank == 1:
            ask_to_stop()
        until(third_counts)


def one_evaluates_and_one_waits(run: Run, model: nn.Module) -> None:
    with run.phase("evaluate"):
        if run.rank == 0:
            ask_to_stop()
            until(third_counts)
        dist.barrier()


def one_evaluates_alone(run: Run, model: nn.Module) -> None:
    if run.rank == 0:
        with run.phase("evaluate"):
            ask_to_stop()
            time.sleep(1.5)


def one_goes_on_before_it_is_asked(run: Run, model: nn.Module) -> None:
    with run.phase("evaluate"):
        if run.rank == 0:
            time.sleep(0.3)
            ask_to_stop()
            time.sleep(1.5)


def one_comes_as_the_other_goes_on(run: Run, model: nn.Module) -> None:
    deciding._LOOK_S = 0.001
    for again in range(40):
        with run.phase("evaluate"):
            if run.rank == 0 and not again:
                ask_to_stop()
            time.sleep(0.003 * run.rank)


CASES: dict[str, Callable[[Run, nn.Module], None]] = {
    one.__name__: one
    for one in (
        all_evaluate,
        one_evaluates_and_one_waits,
        one_evaluates_alone,
        one_goes_on_before_it_is_asked,
        one_comes_as_the_other_goes_on,
    )
}


@pytest.mark.parametrize(
    ("case", "sharded", "third"),
    [
        ("all_evaluate", False, True),
        ("all_evaluate", True, True),
        ("one_evaluates_and_one_waits", False, True),
        ("one_evaluates_alone", False, False),
        ("one_goes_on_before_it_is_asked", False, False),
        ("one_comes_as_the_other_goes_on", False, None),
    ],
)
def test_ranks_save_the_step_together_or_not_at_all(tmp_path, case, sharded, third):
    arguments = ("--case", case, *(("--sharded",) if sharded else ()))
    run = SavedRun(tmp_path / "run", ranks=2, script=script, arguments=arguments)

    def to_its_log(_: int) -> None:
        sys.stderr = sys.__stderr__

    with forking():
        assert run.attempt(to_its_log) == [75, 75], run.said(0) + run.said(1)
    steps = sorted(int(path.stem) for path in (run.folder / "store" / PREFIX / "commit").glob("*/*.json"))
    assert steps in ([2, 4], [3, 4], [2, 3, 4])
    if third is not None:
        assert (3 in steps) is third
    with forking():
        assert run.attempt(to_its_log) == [0, 0], run.said(0) + run.said(1)
    assert "resumed from step 4, exact" in run.said()
