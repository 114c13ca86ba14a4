"""Results that came home lie beside the job file, in the code folder: they are no code of the next start."""

from __future__ import annotations

from pathlib import Path

from gpucloud.adapters.transfer.localfiles import HashCache, came_from, mark_results, note_came, read_tree
from gpucloud.domain.job.code import RESULTS_MARK
from gpucloud.domain.state.state import MissingOutput


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


def test_from_which_machine_results_came_is_kept_beside_them(tmp_path: Path) -> None:
    missing = (MissingOutput(path="results/b", why="was left out", attempt=2),)
    note_came(tmp_path / "outputs", "i-1", 1, ())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / RESULTS_MARK).write_bytes(b"\xff\n{")  # as a full disk cuts it off
    for node, attempt, without in (("i-1", 1, ()), ("i-2", 2, ()), ("i-2", 2, missing)):
        note_came(tmp_path, node, attempt, without)
    asked = (("i-1", 1), ("i-1", 2), ("i-2", 2), ("i-3", 3))
    assert [came_from(tmp_path, *one) for one in asked] == [(), None, missing, None]
