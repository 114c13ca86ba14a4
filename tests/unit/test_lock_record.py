from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.domain.node.bootstrap.facts import Facts, Layer, attempt_lock, lock_record
from gpucloud.domain.node.bootstrap.steps import findings
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.gate.report import GateWanted
from gpucloud.domain.node.hardware import Gpu
from gpucloud.usecases.supervise.prepare import ready_line

FACTS = Facts(
    python="/usr/bin/python3", version=(3, 12, 3), torch=None, root="/home/me/.gpucloud", package="zip", cpus=8,
    free_bytes=1 << 40, time=datetime(2026, 11, 21, tzinfo=timezone.utc), boot_id="b", gpu_fault=None,
    gpus=(Gpu(index=0, uuid="GPU-1", name="NVIDIA L4", memory_mib=23034, driver="570.172.08"),),
    agent_package="zip", agent_busy=False, packages=("PyYAML==6.0.1",),
    layer=Layer(
        key="k", python="/l/bin/python", ready=True, torch="2.11.0+cu128", torch_cuda="12.8", torch_backend="auto",
        uv="0.13.9", packages=("numpy==2.4.0", "torch==2.11.0+cu128"),
    ),
)  # fmt: skip
WANTED = Wanted(
    package="zip", code="/c", setup="pip install numpy", setup_digest="d", env=(("TOKEN", "s3cret"),), torchrun=True,
    gpus=1, asks_for_gpus=True, torch=True,
)  # fmt: skip


def test_the_record_names_everything_that_the_jobs_python_is_made_of_and_no_secret():
    record = lock_record(FACTS, WANTED)
    named = {name: record[name] for name in ("torch", "torch_cuda", "torch_backend", "uv", "packages", "base_packages")}
    assert named == {
        "torch": "2.11.0+cu128",
        "torch_cuda": "12.8",
        "torch_backend": "auto",
        "uv": "0.13.9",
        "packages": ["numpy==2.4.0", "torch==2.11.0+cu128"],
        "base_packages": ["PyYAML==6.0.1"],
    }
    assert "s3cret" not in json.dumps(record)


def test_nodes_that_are_made_alike_stand_together_in_an_attempts_lock():
    locks = {"n1": {"a": 1}, "n2": {"a": 2}, "n3": {"a": 1}}
    assert attempt_lock(locks, {"n1": {"facts": 0.2}}) == {
        "version": 1,
        "machines": [{"nodes": ["n1", "n3"], "lock": {"a": 1}}, {"nodes": ["n2"], "lock": {"a": 2}}],
        "seconds": {"n1": {"facts": 0.2}},
    }


def test_how_long_a_node_took_is_told_by_phase_where_it_took_long():
    assert ready_line((("facts", 0.04), ("package", 0.31), ("agent", 0.2), ("setup", 3.52))) == (
        "ready in 4.1 s (package 0.3, agent 0.2, setup 3.5)"
    )
    assert ready_line((("facts", 0.2), ("package", 0.3))) is None


@pytest.mark.parametrize(
    ("changes", "wanted", "told"),
    [
        ({"gpus": None}, {}, ["no NVIDIA device: CPU, gloo"]),
        ({"gpus": None, "on_the_bus": 8}, {}, ["8 NVIDIA devices and no driver: CPU, gloo"]),
        ({"gpus": (), "gpu_fault": "exit\ncode 9", "on_the_bus": 8}, {}, ["nvidia-smi failed: exit code 9: CPU, gloo"]),
        ({"gpus": (), "on_the_bus": 8}, {}, ["8 NVIDIA devices, hidden from the job: CPU, gloo"]),
        ({}, {}, ["1 GPU, unchecked: the job file asks for none by `gpu:` or `vram_gib:`"]),
        ({"stand_in": True}, {}, []),
        ({}, {"gate": GateWanted(gpus=1)}, []),
    ],
)
def test_a_node_is_told_by_what_there_is_and_not_by_what_its_driver_says_alone(changes, wanted, told):
    asked = replace(WANTED, asks_for_gpus=False, **wanted)
    assert list(findings(replace(FACTS, **changes), asked, timedelta(0))) == told
