"""A whole small job over SSH servers that are not ours, quick because it needs no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.standins.own_hosts import own_hosts
from tests.standins.quick_fleet import QuickFleet


@pytest.mark.slow  # the same job runs over our own server in every change
@pytest.mark.engine(name="openssh")
def test_a_job_runs_whole_over_openssh_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    with own_hosts(tmp_path / "hosts", 2, openssh=True) as hosts:
        line = QuickFleet(tmp_path / "cli")
        file = Path(line.quick_job(steps=20, step_s=0.05))
        file.write_text(file.read_text() + hosts.section())
        answer = line.run("train", str(file))
        assert answer.code == 0, answer.stderr
        assert line.history() == [[1, 0]]
        assert [row for row in line.lines(0) if row.startswith("step ")] == [f"step {n + 1}" for n in range(20)]
        assert [(hosts.left(at), hosts.processes(at), hosts.taken(at)) for at in range(2)] == [([], [], [])] * 2
