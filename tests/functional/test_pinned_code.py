"""What an edit of the code folder does to a job that runs: nothing, until `train` is given again."""

from __future__ import annotations

from pathlib import Path

from tests.commandline import until
from tests.standins.quick_fleet import quick_fleet


def test_an_edit_in_mid_run_reaches_no_rank_of_any_attempt(tmp_path: Path) -> None:
    with quick_fleet(tmp_path) as line:
        file = line.quick_job(steps=30, step_s=0.1)
        script = tmp_path / "code" / "train.py"
        script.write_text(script.read_text().replace("import json\n", 'import json\nprint("first code")\n', 1))
        train = line.start("train", file, "--json")
        commits = line.home / "store" / "jobs" / "small" / "checkpoints" / "commit"
        until(lambda: any(commits.rglob("*.json")), "a commit")
        script.write_text(script.read_text().replace("first code", "edited code"))
        line.group.interrupt("gpucloud-small", line.nodes()[-1], notice=False)

        assert train.wait(timeout=120) == 0, (tmp_path / "err").read_text()
        assert len(line.state()["attempts"]) == 2
        said = [[row for row in line.lines(rank) if row.endswith(" code")] for rank in range(2)]
        assert said == [["first code"] * 2] * 2
