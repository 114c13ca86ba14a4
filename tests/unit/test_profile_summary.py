from __future__ import annotations

import json

import pytest

from gpucloud.domain.node.use import parse_summary, summary_lines
from gpucloud.resume.profiling import busy_share


def summary(**changes):
    operators = [
        {"name": "aten::mm", "calls": 10, "cpu_seconds": 0.05, "gpu_seconds": 0.3},
        {"name": "nccl:all_reduce", "calls": 5, "cpu_seconds": 0.01, "gpu_seconds": 0.1},
    ]
    said = {
        "version": 1, "rank": 0, "steps": 5, "seconds": 0.5, "gpu_busy": 0.82, "data_loading": 0.031,
        "operators": operators, **changes,
    }  # fmt: skip
    return parse_summary(json.dumps(said).encode())


def test_the_summary_names_the_step_the_shares_and_the_operators_on_the_gpu():
    assert summary_lines(summary()) == (
        "profile of rank 0: 5 steps of 100.0 ms, GPU busy 82 %, waiting for data 3 %",
        "    60 % GPU    60.00 ms a step  aten::mm",
        "    20 % GPU    20.00 ms a step  nccl:all_reduce",
    )


def test_without_a_gpu_the_cpus_time_is_shown():
    lines = summary_lines(summary(gpu_busy=None, data_loading=None), most=1)
    assert lines == ("profile of rank 0: 5 steps of 100.0 ms", "    10 % CPU    10.00 ms a step  aten::mm")


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([], 0.0),
        ([(0, 500_000)], 0.5),
        ([(0, 400_000), (200_000, 600_000)], 0.6),
        ([(600_000, 800_000), (0, 100_000), (0, 50_000)], 0.3),
    ],
)
def test_a_gpu_is_busy_while_anything_runs_on_it_overlaps_counted_once(spans, share):
    assert busy_share(spans, 1.0) == pytest.approx(share)
