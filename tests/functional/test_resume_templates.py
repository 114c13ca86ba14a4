"""The jobs that come along run plainly, without gpucloud's commands, and learn something."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "templates" / "jobs"


def run(tmp_path, *command):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_loads_neither_boto3_nor_anything_of_the_command_line(tmp_path):
    code = "import sys, gpucloud.resume; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(run(tmp_path, "-c", code).split())
    assert "torch" in loaded
    assert not loaded & {"boto3", "botocore", "paramiko", "typer", "rich", "pydantic", "yaml"}


@pytest.mark.slow  # a whole training
def test_digits_are_told_apart_and_a_finished_run_is_not_run_again(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    first = run(tmp_path, *torchrun, JOBS / "digits" / "train.py")
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
