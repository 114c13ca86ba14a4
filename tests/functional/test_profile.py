"""`train --profile` through the real command line, over two nodes of the embedded fleet."""

from __future__ import annotations

import gzip
import json

import pytest

from tests.commandline import command_line


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def test_a_profile_of_every_rank_comes_home_with_the_steps_that_were_asked_for(line):
    answer = line.run("train", line.job(), "--profile", "--profile-steps", "4", "--json")

    assert answer.code == 0, answer.stderr
    home = line.folder / "outputs" / "small" / "profile" / "attempt-1"
    assert sorted(path.name for path in home.iterdir()) == [
        "rank-0.json.gz", "rank-0.summary.json", "rank-1.json.gz", "rank-1.summary.json",
    ]  # fmt: skip
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((home / f"rank-{rank}.json.gz").read_bytes()))
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 4
        assert any("aten::" in name for name in names)
        summary = json.loads((home / f"rank-{rank}.summary.json").read_text())
        assert (summary["rank"], summary["steps"], summary["gpu_busy"]) == (rank, 4, None)
        assert summary["seconds"] >= 4 * 0.02
        assert 0 < summary["data_loading"] < 1  # a busy machine has it wait for longer
        assert len(summary["operators"]) == 10
    assert "brought home: 2 profiles in" in answer.stderr
    assert "profile of rank 0: 4 steps of " in answer.stderr


@pytest.mark.slow
def test_without_being_asked_nothing_is_recorded(line):
    answer = line.run("train", line.job(), "--json")
    assert answer.code == 0, answer.stderr
    assert not (line.folder / "outputs" / "small" / "profile").exists()
    assert "profile" not in answer.stderr
