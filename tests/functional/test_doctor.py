"""`gpucloud doctor` as a user runs it, on this machine; GPUs are a stand-in nvidia-smi with a genuine recording."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "tests" / "data" / "nvidia_smi" / "h200x4.xml"


def doctor(home, *words, path=""):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CUDA_"))}
    env |= {"GPUCLOUD_HOME": str(home), "HOME": str(home), "PATH": f"{path}{os.environ['PATH']}"}
    argv = [sys.executable, "-m", "gpucloud", "doctor", *words]
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.fixture
def stand_in(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {RECORDED}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return f"{folder}:"


def test_this_machine_without_gpus_is_fit_and_its_tools_are_listed(tmp_path):
    done = doctor(tmp_path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["version"], answer["fit"], answer["gpus"], answer["findings"]) == (1, True, [], [])
    assert [check["name"] for check in answer["machine"]["checks"]] == ["Python", "Terraform", "disk", "AWS"]


def test_gpus_of_a_stand_in_machine_are_a_table(tmp_path, stand_in):
    done = doctor(tmp_path, path=stand_in)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "H200" in line]
    assert len(rows) == 4
    assert rows[0].split()[:3] == ["0", "H200", "580.159.04"]
    assert "gpucloud doctor --full" in done.stderr


def test_a_python_that_would_train_on_the_cpu_beside_stand_in_gpus_is_not_fit(tmp_path, stand_in):
    done = doctor(tmp_path, "--full", path=stand_in)
    assert done.returncode == 14
    assert "is built for the CPU only: the job would train without its GPUs" in done.stdout
    assert "\nnot fit, after " in done.stdout


def test_an_unknown_job_is_named(tmp_path):
    done = doctor(tmp_path, "nosuch")
    assert done.returncode == 2
    assert "no job is called 'nosuch'" in done.stderr
