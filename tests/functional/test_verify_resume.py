"""Trials of resuming: a few steps undisturbed, the same killed in the middle, compared by all that was saved."""

import json
import os
import random
import signal
from types import SimpleNamespace

import pytest
import torch

from gpucloud.cli.commands import verifying
from gpucloud.domain.checkpoint.manifest import Commit, Why
from gpucloud.domain.checkpoint.objects import read_header
from gpucloud.domain.checkpoint.protection import Outcome, Verdict
from gpucloud.domain.errors import StoreError
from gpucloud.resume.ranks import Ranks
from gpucloud.resume.restoring import find
from gpucloud.resume.state.tree import tensor_at
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints, restorable
from gpucloud.usecases.checkpoint.comparing import compared
from gpucloud.usecases.checkpoint.pulling import Puller, planned, write
from tests.commandline import command_line, until
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.standins.made_checkpoints import Made, state
from tests.standins.saved_runs import PREFIX, SavedRun, forking


@pytest.fixture(scope="module", autouse=True)
def fork():
    with forking():
        yield


def stored_checkpoints(run):
    return StoredCheckpoints(store=open_store(run.url), prefix=PREFIX, keep=8)


def test_a_script_that_resumes_to_the_bit_is_found_equal_and_ends_after_its_few_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_TRIAL", "6")
    calm = SavedRun(tmp_path / "calm", ranks=2, steps=40, keep=8)
    assert calm.attempt() == [0, 0]
    monkeypatch.setenv("GPUCLOUD_TRIAL", "6:3")
    killed = SavedRun(tmp_path / "killed", ranks=2, steps=40, keep=8)
    assert killed.attempt() == [-9, -9]
    left = [json.loads((killed.folder / f"attempt-1-{rank}" / f"left-{rank}.json").read_text()) for rank in (0, 1)]
    assert [(one["rank"], one["step"], one["committed_step"]) for one in left] == [(0, 3, 2), (1, 3, 2)]
    assert killed.attempt() == [0, 0]

    verdict = compared(stored_checkpoints(calm), stored_checkpoints(killed))

    assert (verdict.outcome, verdict.step, verdict.resumed_from, verdict.parts) == (Outcome.EQUAL, 6, 2, ())
    assert verdict.compared > 20
    there = stored_checkpoints(killed).standing()
    assert [one.commit for one in there] == [Commit(2, 6), Commit(2, 4), Commit(1, 2)]
    assert {one.sound.why for one in there} == {Why.TRIAL}


def own_dice(seed):
    """A script whose losses have a factor from a generator that nobody saves."""

    def hook(_rank):
        dice, real = random.Random(seed), torch.nn.functional.cross_entropy
        torch.nn.functional.cross_entropy = lambda x, y: real(x, y) * (1 + 0.1 * dice.random())

    return hook


@pytest.mark.parametrize(
    ("seed", "outcome", "step", "loss_step"),
    [(0, Outcome.DIFFERENT, 4, 3), (None, Outcome.NOT_DETERMINISTIC, 2, 1)],
)
def test_a_script_with_dice_of_its_own_is_told_what_differs_and_from_which_loss_on(
    tmp_path, monkeypatch, seed, outcome, step, loss_step
):
    monkeypatch.setenv("GPUCLOUD_TRIAL", "6")
    calm = SavedRun(tmp_path / "calm", steps=40, keep=8)
    assert calm.attempt(own_dice(seed)) == [0]
    monkeypatch.setenv("GPUCLOUD_TRIAL", "6:3")
    killed = SavedRun(tmp_path / "killed", steps=40, keep=8)
    assert [killed.attempt(own_dice(seed)), killed.attempt(own_dice(seed))] == [[-9], [0]]

    verdict = compared(stored_checkpoints(calm), stored_checkpoints(killed))

    assert (verdict.outcome, verdict.step, verdict.resumed_from) == (outcome, step, 2)
    assert "model.first.weight" in verdict.parts
    assert [part for part in verdict.parts if part.startswith("optimizer.state.") and part.endswith("exp_avg")]
    assert not [part for part in verdict.parts if "randomness" in part or part.startswith("rank 0: losses")]
    assert (verdict.loss.step, verdict.loss.rank) == (loss_step, 0)
    assert verdict.loss.calm != verdict.loss.killed


@pytest.fixture
def two():
    return MemoryStore(JumpingClock()), MemoryStore(JumpingClock())


def saved(store, generation, step, *, seed=0, base=None, generators=0):
    one = Made(store, PREFIX, Commit(1, step), seed)
    metadata = state(one)
    if generators:
        one.seed = generators
        one.tensor("rank.randomness.torch", "U8", (5,))
    one.commit = Commit(generation, step)
    one.put([list(one.tensors), ["rank.randomness.torch"]], metadata, base=base)


def verdict_of(two):
    calm, killed = (StoredCheckpoints(store=store, prefix=PREFIX, keep=8) for store in two)
    return compared(calm, killed)


def test_what_differs_first_is_named_with_its_rank(two):
    for store, wrong in zip(two, (0, 7), strict=True):
        saved(store, 1, 2)
        saved(store, 2 if wrong else 1, 4, generators=wrong, base=Commit(1, 2) if wrong else None)
        saved(store, 2 if wrong else 1, 6, seed=wrong, base=Commit(1, 2) if wrong else None)
    verdict = verdict_of(two)
    assert (verdict.outcome, verdict.step, verdict.resumed_from) == (Outcome.DIFFERENT, 4, 2)
    assert verdict.parts == ("rank 0: randomness.torch", "rank 1: randomness.torch")


def test_runs_that_differ_before_the_resume_are_not_deterministic(two):
    for store, wrong in zip(two, (0, 7), strict=True):
        saved(store, 1, 2, seed=wrong)
        saved(store, 2 if wrong else 1, 4, base=Commit(1, 2) if wrong else None)
    assert (verdict_of(two).outcome, verdict_of(two).step) == (Outcome.NOT_DETERMINISTIC, 2)


@pytest.mark.parametrize("outcome", [Outcome.NOT_DETERMINISTIC, Outcome.DIFFERENT])
def test_a_log_that_is_written_into_the_code_folder_is_no_fault_of_the_script(outcome):
    verdict = Verdict(
        outcome=outcome, step=2, resumed_from=2, compared=9, parts=("rank 0: surroundings.code",), loss=None
    )
    assert verifying.verdict_text(verdict).startswith(
        "nothing is proved: the files of the code folder changed between the runs"
    )
    assert verifying.hint_of(verdict).endswith("as a log, counts as code: keep it out by .gpucloudignore")


def test_a_script_that_ended_before_it_was_killed_proves_nothing(two):
    for store in two:
        saved(store, 1, 2)
    assert verdict_of(two).outcome is Outcome.NOT_RESUMED


def test_no_other_run_is_a_trial(tmp_path):
    assert "GPUCLOUD_TRIAL" not in os.environ
    run = SavedRun(tmp_path / "run", steps=10)
    assert run.attempt() == [0]
    assert run.restored().commit == Commit(1, 10)


def test_a_pulled_folder_is_resumed_from_and_an_export_has_the_models_own_state_dict(tmp_path):
    run = SavedRun(tmp_path / "run", ranks=2, steps=4)
    assert run.attempt() == [0, 0]
    here = stored_checkpoints(run)
    manifest = restorable(None, here.standing())
    Puller(stored_checkpoints=here, target=DirectoryStore(tmp_path / "pulled")).pull(manifest, lambda size: None)

    found = find(Checkpoints(DirectoryStore(tmp_path / "pulled"), "", keep=3), Ranks())

    assert found.commit == Commit(1, 4)
    plan = planned(here, manifest, everything=False, about={})
    write(here, manifest, plan, tmp_path / "w.safetensors")
    data = (tmp_path / "w.safetensors").read_bytes()
    header = read_header(memoryview(data))
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    exported = {tensor.name: tensor_at(memory, header.start, tensor) for tensor in header.tensors}
    content = found.content(0)
    weights = content.shared("modules")["model"] | content.own["buffers"]["model"]
    assert set(exported) == set(weights) - {"calls"}  # a buffer that no state_dict has
    assert all(torch.equal(exported[name], weights[name]) for name in exported)


@pytest.mark.slow  # two whole jobs, one of them with two attempts
@pytest.mark.timeout(900)
def test_the_command_proves_it_for_a_users_own_script_and_says_what_the_library_is_missing_for(tmp_path):
    with command_line(tmp_path) as line:
        file = line.job(steps=40)
        answer = line.run("train", file, "--verify-resume", "--verify-steps", "6", "--json", limit_s=700)
        assert answer.code == 0, answer.stderr
        assert (answer.json["outcome"], answer.json["step"], answer.json["resumed_from"]) == ("equal", 6, 2)
        calm, killed = answer.json["runs"]
        assert f"two short runs of 6 steps: {calm}, and {killed}, killed after 3" in answer.stderr
        assert "each may cost 0.50 USD at the most: both stay inside 1.00 USD" in answer.stderr
        assert line.nodes(calm) == line.nodes(killed) == []
        assert line.run("checkpoints", killed, "--json").json["checkpoints"] == []

        (line.folder / "code" / "train.py").write_text("print('no library')\n")
        answer = line.run("train", file, "--verify-resume")
        assert (answer.code, "imports gpucloud.resume" in answer.stderr) == (2, True)


def test_a_trial_that_an_error_broke_off_is_ended_and_the_error_told(monkeypatch):
    def fail(_begun, *, asks):
        raise StoreError("the store is away")

    ended = []
    begun = SimpleNamespace(name="small-1-calm", known="known")
    monkeypatch.setattr(verifying, "begin", lambda *_: begun)
    monkeypatch.setattr(verifying, "run", fail)
    monkeypatch.setattr(verifying, "end_unsaved", lambda _, known: ended.append(known))
    trial = verifying._Trial(cloud=None, read=None, jobs=())

    with pytest.raises(StoreError, match="the store is away"):
        trial._run(None)
    assert ended == ["known"]


@pytest.mark.slow  # half a job
@pytest.mark.timeout(900)
def test_ctrl_c_ends_a_trial_and_leaves_neither_machines_nor_checkpoints(tmp_path):
    with command_line(tmp_path) as line:
        process = line.start("train", line.job(steps=400, step_s=0.1), "--verify-resume", "--verify-steps", "300")

        def run():
            return next((line.home / "store" / "jobs").glob("small-*-calm"), None)

        def commits():
            return run() and list(run().glob("checkpoints/commit/*/*.json"))

        until(commits, "a checkpoint of the first run", 600)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(600) == 130
        name = run().name
        said = (tmp_path / "err").read_text()
        assert f"ending {name} as it stands" in said
        assert "no checkpoint of the trial is left" in said
        assert line.nodes(name) == []
        assert line.run("checkpoints", name, "--json").json["checkpoints"] == []
