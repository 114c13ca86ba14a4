"""Outputs that are still in the store when their job is over come home with the commands that say so."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.process import Ended, run
from tests.faults.rig import JOB, Outside
from tests.faults.strikes import Strikes

_ROOT = f"jobs/{JOB}/outputs"
_WAITING = f"gpucloud down {JOB} brings home what is in its store\n"


def command(outside: Outside, *words: str) -> Ended:
    strikes = Strikes()
    return run(words, outside.over(strikes), strikes)


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    """A job that has ended and is torn down, with its outputs in the store: there was no room at home."""
    found = Outside(tmp_path)
    found.job = replace(found.job, outputs=("results/",))
    ended = command(found, "train", str(found.file))
    assert ended.code == 0, ended.stderr
    notes = [
        ["results", {"mode": 0o755}],
        ["results/model", {"mode": 0o640, "mtime_ns": 10**18, "size": 7}],
        ["results/last", {"link": "model"}],
    ]
    found.store.put(f"{_ROOT}/notes.json", json.dumps({"paths": notes}).encode())
    found.store.put(f"{_ROOT}/files/results/model", b"weights")
    return found


def check_whole(folder: Path) -> None:
    model = folder / "results" / "model"
    assert (model.read_bytes(), stat.S_IMODE(model.stat().st_mode)) == (b"weights", 0o640)
    assert (folder / "results" / "last").readlink() == Path("model")


@pytest.mark.parametrize("words", ["down small", "reconcile small", "reconcile --all", "train small"])
def test_they_come_home_with_every_command_that_sees_to_the_job_and_once(outside: Outside, words: str) -> None:
    assert "brought home: " in command(outside, *words.split()).stderr
    check_whole(outside.file.parent / "outputs" / JOB)
    assert outside.store.list(_ROOT) == ()
    assert "brought home: " not in command(outside, *words.split()).stderr


def test_status_names_the_command_that_brings_them_and_changes_nothing(outside: Outside) -> None:
    assert _WAITING in command(outside, "status", JOB).stdout
    assert json.loads(command(outside, "status", JOB, "--json").stdout)["condition"] == "results_in_store"
    assert outside.store.list(_ROOT)
    command(outside, "down", JOB)
    assert _WAITING not in command(outside, "status", JOB).stdout
    assert json.loads(command(outside, "status", JOB, "--json").stdout)["condition"] == "ended"


def test_what_cannot_come_home_stays_in_the_store_and_the_commands_that_help_are_named(outside: Outside) -> None:
    (outside.file.parent / "outputs").write_text("in the way")
    ended = command(outside, "down", JOB)
    assert ended.code == 0
    assert f"`gpucloud down {JOB}` tries again, `gpucloud cp -r {JOB}:@store/outputs FOLDER`" in ended.stderr
    assert outside.store.list(_ROOT)


@pytest.mark.parametrize("is_there", [False, True])
def test_cp_copies_them_as_the_script_wrote_them_and_leaves_them_there(outside: Outside, is_there: bool) -> None:
    target = outside.folder / "here"
    if is_there:
        target.mkdir()
    ended = command(outside, "cp", "-r", f"{JOB}:@store/outputs", str(target))
    assert (ended.code, ended.stdout) == (0, "2 files, 7 B copied\n"), ended.stderr
    check_whole(target / "outputs" if is_there else target)
    assert outside.store.list(_ROOT)


def test_what_nobody_noted_is_copied_bare_and_damaged_notes_say_how(outside: Outside) -> None:
    outside.store.put(f"{_ROOT}/notes.json", b"{")
    target = outside.folder / "here"
    refused = command(outside, "cp", "-r", f"{JOB}:@store/outputs", str(target))
    assert refused.code == 15
    assert f"gpucloud cp -r {JOB}:@store/outputs/files FOLDER" in refused.stderr
    assert command(outside, "cp", "-r", f"{JOB}:@store/outputs/files", str(target)).code == 0
    assert (target / "results" / "model").read_bytes() == b"weights"


def test_no_pass_brings_outputs_to_where_there_is_no_folder_of_their_job(outside: Outside) -> None:
    outside.home.remember(replace(outside.home.known()[0], file=outside.folder / "elsewhere" / "small.yaml"))
    command(outside, "reconcile", "--all")
    assert outside.store.list(_ROOT)
    assert not (outside.folder / "elsewhere").exists()


def test_results_whose_folder_was_moved_are_told_and_deleted_by_a_word_of_their_own_alone(outside: Outside) -> None:
    outside.home.remember(replace(outside.home.known()[0], file=outside.folder / "elsewhere" / "small.yaml"))
    copies = f"gpucloud cp -r {JOB}:@store/outputs FOLDER"
    told = command(outside, "status", JOB, "--json").stdout
    assert json.loads(told)["condition"] == "results_in_store"
    assert json.loads(told)["missing_outputs"][0]["why"] == f"in the job's store: {copies} copies it"
    assert (
        f"{copies} copies what is in its store: its own folder is not here\n" in command(outside, "status", JOB).stdout
    )
    ended = command(outside, "down", JOB)
    assert (ended.code, f"`{copies}` copies them" in ended.stderr) == (0, True)
    refused = command(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (refused.code, f"hint: {copies} copies them; gpucloud rm {JOB} --with-outputs" in refused.stderr) == (
        2,
        True,
    )
    assert outside.store.list(_ROOT)
    assert command(outside, "rm", JOB, "--with-checkpoints", "--with-outputs", "--yes").code == 0
    assert outside.store.list(f"jobs/{JOB}/") == ()
