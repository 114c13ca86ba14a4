"""Outputs that are still in the store when their job is over come home with the commands that say so."""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.home import Home
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.spec import Cloud
from gpucloud.usecases.supervise.usage import bring_profiles
from gpucloud.wiring import Gpucloud
from tests.fakes.nodes import node_at
from tests.fakes.shell import FakeShell
from tests.faults.process import Ended, run
from tests.faults.rig import JOB, Outside
from tests.faults.strikes import Strikes
from tests.unit import worlds

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


@pytest.fixture
def without_key(outside: Outside) -> Outside:
    """The same, and its job file had no `outputs:` when it was started last: an attempt before had."""
    other = Outside(outside.folder / "other")
    assert command(other, "train", str(other.file)).code == 0
    for key in outside.store.list(_ROOT):
        stored = outside.store.get(key)
        assert stored is not None
        other.store.put(key, stored.data)
    key = f"jobs/{JOB}/state.json"
    kept = other.store.get(key)
    assert kept is not None
    state = json.loads(kept.data)
    (last,) = state["attempts"]
    assert last["outputs"] == []
    state["attempts"] = [{**last, "outputs": ["results/"]}, {**last, "number": 2}]
    other.store.put(key, json.dumps(state).encode())
    return other


@pytest.mark.parametrize("words", ["down small", "reconcile small", "reconcile --all", "train small"])
def test_results_that_the_job_file_names_no_more_come_home_too(without_key: Outside, words: str) -> None:
    """`rm` is refused for them and sends to `down`, which did nothing."""
    assert "brought home: " in command(without_key, *words.split()).stderr
    check_whole(without_key.file.parent / "outputs" / JOB)
    assert without_key.store.list(_ROOT) == ()


def test_status_tells_of_results_in_the_store_that_the_job_file_names_no_more(without_key: Outside) -> None:
    assert _WAITING in command(without_key, "status", JOB).stdout
    told = json.loads(command(without_key, "status", JOB, "--json").stdout)
    assert (told["condition"], [one["path"] for one in told["missing_outputs"]]) == ("results_in_store", ["results/"])


@pytest.mark.parametrize("drives", [True, False])
def test_status_tells_of_results_that_a_machine_stored_which_drove_its_job_and_went(
    outside: Outside, drives: bool
) -> None:
    """That they did not come home was told, or nothing, until the job had ended."""
    key = f"jobs/{JOB}/state.json"
    stored = outside.store.get(key)
    assert stored is not None
    told = json.loads(stored.data)
    last = {**told["attempts"][-1], "reason": "interrupted", "outputs_came": True}
    went = {"status": "waiting", "exit_reason": None, "exit_code": None, "ended_at": None, "torn_down": False}
    outside.store.put(key, json.dumps({**told, **went, "drives_itself": drives, "attempts": [last]}).encode())
    line = "outputs: results/ in the job's store: gpucloud down small brings it home once the job has ended, gpucl"
    assert (line in command(outside, "status", JOB).stdout) is drives


def test_status_of_a_job_that_never_had_results_does_not_ask_the_store_for_any(tmp_path: Path) -> None:
    plain = Outside(tmp_path)
    assert command(plain, "train", str(plain.file)).code == 0
    asked: list[str] = []
    listed = plain.store.list
    plain.store.list = lambda prefix: asked.append(prefix) or listed(prefix)  # type: ignore[func-returns-value, method-assign, assignment]
    command(plain, "status", JOB)
    assert not [one for one in asked if "/outputs/" in one]


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


def test_it_is_said_that_they_are_home_where_they_came_and_not_of_a_folder_of_that_name_alone(outside: Outside) -> None:
    folder = outside.file.parent / "outputs" / JOB
    line = f"outputs: results/ is home, in {folder}\n"
    assert line in command(outside, "down", JOB).stdout
    assert line in command(outside, "status", JOB).stdout
    shutil.rmtree(folder)
    (folder / "results").mkdir(parents=True)  # another run's, or this one's on another computer
    assert " home, in " not in command(outside, "status", JOB).stdout
    assert " home, in " not in command(outside, "down", JOB).stdout


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
    assert f"{copies} copies what is in its store: its job file is not here\n" in command(outside, "status", JOB).stdout
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


@pytest.mark.parametrize("file", ["moved/digits.yaml", "unmounted/digits.yaml", "home/specs/digits/gpucloud.yaml"])
def test_results_and_profiles_go_to_the_store_where_their_job_file_is_not(tmp_path: Path, file: str) -> None:
    """A pass over a store's jobs in a runner, or a folder that was moved, or is away: nobody would find them there.

    What an older gpucloud made of a job whose file was not here is no home either.
    """
    (tmp_path / "home" / "specs" / "digits").mkdir(parents=True)
    (tmp_path / "unmounted").mkdir()
    store = f"file://{tmp_path}/store"
    job = worlds.job(source=tmp_path / file, store=store, cloud=Cloud.LOCAL, outputs=("w.pt",))
    services = Gpucloud(Home(tmp_path / "home")).services(job, "digits", goes_on=False)
    host, code = FakeShell(tmp_path / "homes").host(node_at(22, None)), tmp_path / "code"
    code.mkdir()
    (code / "w.pt").write_text("weights")
    waiting = services.stored_outputs
    assert waiting is not None
    waiting.bring_home(host, str(code), 1)

    for bring in (
        lambda: services.outputs.bring_home(host, str(code), 2),
        lambda: services.outputs.bring_profile(host, 2),
    ):
        with pytest.raises(StoreError, match="is not here"):
            bring()
    assert "jobs/digits/outputs/files/attempt-1/w.pt" in services.store.list("jobs/digits/outputs")
    assert not (tmp_path / "moved").exists()
    assert not [*(tmp_path / "home" / "specs" / "digits").iterdir(), *(tmp_path / "unmounted").iterdir()]


class Profiled:
    def __init__(self, error: StoreError | None = None) -> None:
        self.error = error

    def bring_profile(self, *_: object) -> tuple[str, ...]:
        if self.error is not None:
            raise self.error
        return ("jobs/digits/outputs/files/attempt-1/profile/attempt-1/rank-0.json",)


def test_a_profile_that_finds_no_place_at_home_goes_to_the_store() -> None:
    ways: Any = Profiled(StoreError("/moved/small.yaml is not here")), SimpleNamespace(host=lambda _: None)
    told = list(bring_profiles(*ways, (node_at(22, None),), 1, stored=Profiled()))  # type: ignore[arg-type]
    assert told[1].endswith(" comes home when the job has ended; where it cannot yet, `gpucloud down JOB` tries again")
    ways = Profiled(StoreError("full")), SimpleNamespace(host=lambda _: None)
    told = list(bring_profiles(*ways, (node_at(22, None),), 1, stored=Profiled(StoreError("full"))))  # type: ignore[arg-type]
    assert told[1] == "it could not be put into the store either: full"
