"""The jobs that come along run plainly, without gpucloud's commands, and learn something."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpucloud.domain.checkpoint.protection import Outcome
from gpucloud.store import open_store
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.checkpoint.comparing import compared

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "templates" / "jobs"


TORCHRUN = ("-m", "torch.distributed.run")


def run(tmp_path, *command, fails=False, **variables):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout


def test_the_library_loads_neither_boto3_nor_anything_of_the_command_line(tmp_path):
    code = "import sys, gpucloud.resume; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(run(tmp_path, "-c", code).split())
    assert "torch" in loaded
    assert not loaded & {"boto3", "botocore", "paramiko", "typer", "rich", "pydantic", "yaml"}


@pytest.mark.slow  # a whole training
def test_digits_are_told_apart_and_a_finished_run_is_not_run_again(tmp_path):
    first = run(tmp_path, *TORCHRUN, "--nproc-per-node=2", JOBS / "digits" / "train.py")
    assert float(re.search(r"test accuracy ([\d.]+)", first)[1]) >= 0.95
    again = run(tmp_path, JOBS / "digits" / "train.py")
    assert "epoch" not in again
    assert again.splitlines()[-1] == first.splitlines()[-1]


@pytest.mark.slow  # a training
def test_a_text_is_learnt_and_continued(tmp_path):
    script = JOBS / "chargpt" / "train.py"
    out = run(tmp_path, script, "--steps", "50")
    assert float(re.search(r"step 50 of 50: loss ([\d.]+)", out)[1]) < 3.6
    assert len(out) > 300


def killed_and_calm(tmp_path, ranks, script, *words):
    """Run the first 6 steps of a template undisturbed, and once more killed after step 4; return how they compare."""
    command = (*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", JOBS / script / "train.py", *words)
    shelves = []
    for name in ("calm", "killed"):
        place = {"GPUCLOUD_STORE": str(tmp_path / name), "GPUCLOUD_CHECKPOINT_EVERY": "steps:2"}
        place["GPUCLOUD_CHECKPOINT_KEEP"] = "9"
        if name == "killed":
            run(tmp_path, *command, fails=True, GPUCLOUD_TRIAL="6:4", **place)
            run(tmp_path, *command, GPUCLOUD_TRIAL="6", GPUCLOUD_ATTEMPT="2", **place)
        else:
            run(tmp_path, *command, GPUCLOUD_TRIAL="6", **place)
        shelves.append(StoredCheckpoints(store=open_store(place["GPUCLOUD_STORE"]), prefix="", keep=9))
    return compared(*shelves)


@pytest.mark.slow  # three starts of torchrun
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "script", "words"),
    [
        (2, "images", ("--samples", "640", "--epochs", "1", "--workers", "1")),
        (3, "images", ("--samples", "640", "--epochs", "1", "--dtype", "fp16", "--parts", "3", "--batch", "48")),
        (2, "backoff", ("--pretend", "12")),
        (3, "backoff", ("--batch", "48", "--pretend", "5")),
        (2, "gpt", ("--recompute",)),
        (2, "tensorparallel", ()),
        (4, "tensorparallel", ()),
        (2, "hf-trainer", ()),
        (3, "hf-trainer", ()),
        (2, "lightning", ()),
        (3, "lightning", ()),
        (2, "accelerate", ()),
        (3, "accelerate", ()),
        (2, "sft-lora", ()),
        (2, "dcp", ()),
        (3, "dcp", ()),
    ],
)
def test_a_template_that_is_killed_ends_with_the_same_bits(tmp_path, ranks, script, words):
    verdict = killed_and_calm(tmp_path, ranks, script, *words)
    assert (verdict.outcome, verdict.step, verdict.parts) == (Outcome.EQUAL, 6, ())
    assert verdict.resumed_from in {2, 4}  # the save of the step at which it died may not have counted yet
    assert verdict.compared > 20


THERE_ALREADY = ("self.checkpointer.load(", "self.checkpointer.save(", "print(", "accelerator.print(")
"""How lines begin that torchtitan's own manager takes as well, or that only tell something."""


@pytest.mark.parametrize(
    ("script", "lines"),
    [("hf-trainer", 2), ("sft-lora", 2), ("lightning", 2), ("accelerate", 4), ("dcp", 3)],
)
def test_of_a_script_over_a_framework_few_lines_are_gpuclouds(script, lines):
    tree = ast.parse((JOBS / script / "train.py").read_text())
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    imports = [one for one in statements if isinstance(one, ast.ImportFrom) and one.module.startswith("gpucloud")]
    brought = {"run", "checkpointer", *(alias.name for one in imports for alias in one.names)}
    uses = [one for one in statements if not brought.isdisjoint(named_in(one))]
    uses = [one for one in uses if not ast.unparse(one).startswith(THERE_ALREADY)]
    assert len(imports) + len(uses) == lines, [ast.unparse(one) for one in uses]


def named_in(statement):
    """Yield the names and attributes in a statement, without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            for node in ast.walk(child):
                if isinstance(node, ast.Name | ast.Attribute):
                    yield node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.slow  # whole trainings
@pytest.mark.timeout(900)
def test_shapes_are_told_apart_by_the_averaged_model(tmp_path):
    out = run(tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node=2", JOBS / "images" / "train.py")
    assert float(re.search(r"test accuracy ([\d.]+)", out)[1]) >= 0.9


@pytest.mark.slow  # whole trainings
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ranks", "script", "words", "last", "held"),
    [
        (2, "gpt", ("--steps", "60"), 5.0, 1 / 2),
        (4, "tensorparallel", ("--steps", "60"), 3.5, 1 / 4),
    ],
)
def test_models_in_parts_learn_and_no_rank_holds_more_than_its_share(tmp_path, ranks, script, words, last, held):
    command = (*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", JOBS / script / "train.py", *words)
    out = run(tmp_path, *command)
    assert float(re.search(r"step 60 of 60: loss ([\d.]+)", out)[1]) < last
    mine, whole = map(int, re.search(r"(\d+) of (\d+) parameters on this rank", out).groups())
    assert mine / whole == pytest.approx(held, rel=0.05)


@pytest.mark.slow  # two trainings
@pytest.mark.timeout(900)
def test_a_gpt_goes_on_where_it_was_on_another_number_of_ranks(tmp_path):
    script = JOBS / "gpt" / "train.py"
    every = {"GPUCLOUD_CHECKPOINT_EVERY": "steps:5"}
    first = (*TORCHRUN, "--standalone", "--nproc-per-node=2", script)
    run(tmp_path, *first, "--steps", "20", fails=True, GPUCLOUD_TRIAL="20:10", **every)
    out = run(tmp_path, script, "--steps", "20", **every)
    assert "step 20 of 20: loss" in out
    assert "step 5 of 20" not in out


def test_a_step_in_parts_has_the_gradients_of_a_step_at_once():
    images = importlib.import_module("templates.jobs.images.train")
    batch = next(iter(torch.utils.data.DataLoader(images.Shapes(10, seed=0, augment=False), batch_size=10)))
    found = []
    for parts in (1, 4):
        torch.manual_seed(0)
        model = images.make_model().eval()  # batch normalization sees parts, so that training differs by design
        images.passes(model, *batch, torch.float32, torch.amp.GradScaler("cpu", enabled=False), parts)
        found.append(torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()]))
    torch.testing.assert_close(*found)


def test_pictures_are_the_same_for_the_same_seed_and_only_augmentation_draws():
    images = importlib.import_module("templates.jobs.images.train")
    one, other = images.Shapes(8, seed=3, augment=True), images.Shapes(8, seed=3, augment=True)
    torch.manual_seed(1)
    picture, kind = one[5]
    torch.manual_seed(1)
    again, same = other[5]
    assert torch.equal(picture, again)
    assert kind == same
    assert not torch.equal(picture, other[5][0])


def test_windows_of_tokens_lie_beside_each_other_and_a_file_of_them_is_mapped(tmp_path, monkeypatch):
    gpt = importlib.import_module("templates.jobs.gpt.train")
    torch.arange(50_000, 50_030).to(torch.uint16).numpy().tofile(tmp_path / "tokens.bin")
    monkeypatch.setenv("GPUCLOUD_DATA", str(tmp_path))
    windows = gpt.Windows(256, 8)
    assert len(windows) == 3
    assert [half.tolist() for half in windows[2]] == [[*range(50_016, 50_024)], [*range(50_017, 50_025)]]
    monkeypatch.delenv("GPUCLOUD_DATA")
    monkeypatch.chdir(tmp_path / "..")
    invented = gpt.Windows(256, 8).tokens
    assert (len(invented), int(invented.max()) < 256) == (100_001, True)
