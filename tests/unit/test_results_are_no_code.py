"""Results that came home lie beside the job file, in the code folder: they are no code of the next start."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from gpucloud.adapters.transfer.localfiles import CameNotes, HashCache, mark_results, read_tree
from gpucloud.domain.job.code import RESULTS_MARK
from gpucloud.domain.state.state import MissingOutput
from tests.unit.worlds import NOW, opened


def code(root: Path) -> tuple[str, list[str]]:
    tree = read_tree(root, HashCache(None, root))
    return tree.sha256, [entry.path for entry in tree.entries]


def test_the_code_is_the_same_before_and_after_results_came_home(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    before = code(tmp_path)
    results = tmp_path / "outputs" / "digits"
    (results / "results").mkdir(parents=True)
    (results / "results" / "m.pt").write_bytes(b"weights")
    assert code(tmp_path) != before

    mark_results(results)
    assert code(tmp_path) == before
    (tmp_path / "outputs" / "mine.txt").write_text("of the user's own\n")
    assert code(tmp_path)[1] == ["outputs/mine.txt", "train.py"]


def test_where_nothing_came_home_there_is_nothing_to_mark(tmp_path: Path) -> None:
    mark_results(tmp_path / "outputs" / "digits")
    assert list(tmp_path.iterdir()) == []


def test_of_which_attempt_results_came_is_kept_beside_them(tmp_path: Path) -> None:
    missing = (MissingOutput(path="results/b", why="was left out", attempt=2),)
    CameNotes(tmp_path / "outputs").note(opened("i-1"), (), NOW)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / RESULTS_MARK).write_bytes(b"\xff\n{")  # as a full disk cuts it off
    one, two = opened("i-1"), opened("i-2", number=2)
    reader = CameNotes(tmp_path)
    assert reader.came(one) is None
    for attempt, without in ((one, ()), (two, ()), (two, missing)):
        CameNotes(tmp_path).note(attempt, without, NOW)
    asked = (one, replace(one, number=2), two, opened("i-3", number=3))
    assert [reader.came(each) for each in asked] == [(), None, missing, None]


def test_what_came_of_another_run_of_the_name_says_nothing_of_this_one_on_the_same_host(tmp_path: Path) -> None:
    notes, before = CameNotes(tmp_path), opened("10.0.0.7-1")
    notes.note(before, (), NOW)
    assert notes.came(replace(before, started_at=before.started_at + timedelta(hours=3))) is None


def test_the_newest_notes_count_in_a_folder_that_has_those_of_many_runs(tmp_path: Path) -> None:
    many = tuple(MissingOutput(path=f"results/{n}", why="was left out") for n in range(100))
    notes = CameNotes(tmp_path)
    for number in range(1, 200):
        notes.note(opened("i-1", number=number), many, NOW)
    assert (tmp_path / RESULTS_MARK).stat().st_size > 1 << 20
    assert (notes.came(opened("i-1", number=1)), notes.came(opened("i-1", number=199))) == (None, many)
