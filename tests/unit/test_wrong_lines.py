"""A command line that cannot be read, and one that is broken off: each is answered, for programs too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from gpucloud.__main__ import main
from gpucloud.cli.commands import training


def _run(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["gpucloud", *words.split()])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("status --jsn --json", "No such option: --jsn", "gpucloud status --help"),
        ("frob --json", "No such command 'frob'.", "gpucloud --help"),
        ("local frob --json", "No such command 'frob'.", "gpucloud local --help"),
        ("cp --json", "Missing argument 'FROM'.", "gpucloud cp --help"),
        ("plan a b --json", "Got unexpected extra argument", "gpucloud plan --help"),
        ("plan --cloud moon --json", "Invalid value for '--cloud'", "gpucloud plan --help"),
        ("logs --json --tail many", "Invalid value for '--tail'", "gpucloud logs --help"),
        ("ls --json", "there is no command 'ls'", "gpucloud status lists all jobs"),
        ("launch train.yaml --json", "there is no command 'launch'", "gpucloud train runs a job"),
        ("cost-report --json", "there is no command 'cost-report'", "gpucloud cost --all"),
        ("trian --json", "No such command 'trian'. Did you mean 'train'?", "gpucloud --help"),
        ("stat --json", "No such command 'stat'. Did you mean 'status'?", "gpucloud --help"),  # not `start`
        ("top --json", "No such command 'top'.", "gpucloud --help"),  # not `stop`
        ("deploy --json", "No such command 'deploy'.", "gpucloud --help"),  # not `destroy`
    ],
)
def test_a_line_that_cannot_be_read_is_one_object_where_json_was_asked_for(
    words: str, message: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer, story = _run(words, monkeypatch, capsys)
    told = json.loads(answer)["error"]
    assert (code, told["code"], told["exit_code"], told["hint"]) == (2, "usage", 2, hint)
    assert message in told["message"]
    assert message in story


@pytest.mark.parametrize("words", ["status --jsn", "ssh digits --json", "ssh digits --frob", "cp", "local"])
def test_without_json_only_the_usage_is_told(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer, story = _run(words, monkeypatch, capsys)
    assert (code, answer) == (2, "")
    assert story.startswith("Usage: gpucloud ")


@pytest.mark.parametrize("words", ["plan --help", "plan --json -h", "--version"])
def test_help_is_an_answer_and_no_error(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer, story = _run(words, monkeypatch, capsys)
    assert (code or 0, story) == (0, "")
    assert answer.startswith(("Usage: gpucloud plan [OPTIONS]", "gpucloud "))


@pytest.mark.parametrize(("words", "objects"), [("plan", 0), ("plan --json", 1), ("train --json", 1)])
def test_ctrl_c_while_planning_is_one_object_and_130(
    words: str, objects: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "read_target", press)
    code, answer, story = _run(words, monkeypatch, capsys)
    told = [json.loads(line)["error"] for line in answer.splitlines()]
    assert (code, story) == (130, "")
    assert [(one["code"], one["exit_code"]) for one in told] == [("interrupted", 130)] * objects


def test_ctrl_c_before_the_line_is_read_is_an_object_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TyperGroup, "parse_args", press)
    code, answer, story = _run("plan --json", monkeypatch, capsys)
    assert (code, json.loads(answer)["error"]["code"], story) == (130, "interrupted", "")


@pytest.mark.parametrize("full", [False, True])
def test_an_error_that_nobody_reads_keeps_its_exit_code(full: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("w") if full else os.fdopen(writer, "w") as gone:
        words = [sys.executable, "-m", "gpucloud", "frob", "--json"]
        done = subprocess.run(words, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (2, False, False)


@pytest.mark.parametrize(
    ("cause", "code", "story"),
    [(None, 130, ""), (EOFError("no data"), 1, "a fault of gpucloud itself: EOFError: no data")],
)
def test_a_question_without_an_answer_ends_as_ctrl_c_and_data_that_end_are_a_fault(
    cause: EOFError | None, code: int, story: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(*_: object, **__: object) -> None:
        raise cause or typer.Abort

    monkeypatch.setattr(training, "read_target", end)
    left, answer, told = _run("plan --json", monkeypatch, capsys)
    assert (left, json.loads(answer)["error"]["exit_code"]) == (code, code)
    assert story in told


@pytest.mark.parametrize("words", ["plan", "train x.yaml", "down", "init", "init --run train.py"])
def test_a_folder_that_was_deleted_under_its_shell_is_said_and_is_no_fault_of_ours(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, story = _run(words, monkeypatch, capsys)
    assert (code, story) == (
        2,
        "error: the folder that this was called in is there no more\nhint: cd to another, then the same command\n",
    )


def test_a_home_below_a_folder_that_was_deleted_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", "home")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, story = _run("status", monkeypatch, capsys)
    assert (code, story.splitlines()[0]) == (2, "error: the folder that this was called in is there no more")
