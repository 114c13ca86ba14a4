"""`--help`: every command in one group, with a line that is never cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from gpucloud.adapters.home import Home
from gpucloud.cli.app import app
from gpucloud.cli.help import EXAMPLES, GROUPS, named
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import KnownJob


def test_every_command_stands_in_one_group_with_a_short_summary() -> None:
    summaries = [(name, about) for commands in GROUPS.values() for name, about in commands.items()]
    assert sorted(name for name, _ in summaries) == sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert [about for _, about in summaries if len(about) > 50] == []


def test_the_groups_are_shown_whole_with_the_first_commands_as_an_example() -> None:
    told = CliRunner().invoke(app, ["--help"]).stdout
    assert "Example: gpucloud init && gpucloud plan && gpucloud train" in told
    assert (
        "Start:\n  init         Write a job file\n  plan         What would be rented, its cost and its end\n" in told
    )
    assert "..." not in told.partition("Start:")[2]


@pytest.mark.parametrize("command", ["offers", "simulate", "logs", "gc", "train"])
def test_no_option_speaks_of_python_types(command: str) -> None:
    told = CliRunner().invoke(app, [command, "--help"]).stdout
    assert [line for line in told.splitlines() if " <" in line] == []
    assert ("Example: " in told) == (command in EXAMPLES)


def test_examples_are_of_commands_that_there_are() -> None:
    command = get_command(app)
    assert isinstance(command, click.Group) or hasattr(command, "commands")
    assert set(EXAMPLES) - {"gpucloud"} <= set(command.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_gpucloud(shell: str) -> None:
    told = CliRunner().invoke(app, ["completion", shell])
    assert told.exit_code == 0
    assert f"_GPUCLOUD_COMPLETE=complete_{shell}" in told.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("gpucloud st", ["status"]),
        ("gpucloud offers --sort g", ["gpu-price"]),
        ("gpucloud status ", ["digits", "digits.yaml", "runs/"]),
        ("gpucloud train runs/o", ["runs/other.yml"]),
    ],
)
def test_commands_choices_jobs_and_job_files_are_completed(words: str, completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("digits.yaml", "train.py", "runs/other.yml"):
        (tmp_path / name).touch()
    Home(tmp_path / ".home").remember(KnownJob(name="digits", store="/nowhere", file=tmp_path / "digits.yaml"))
    asks = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_GPUCLOUD_COMPLETE": "complete_bash"}
    main = "import sys; sys.argv = ['gpucloud']; from gpucloud.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main], env={**os.environ, **asks, "GPUCLOUD_HOME": str(tmp_path / ".home")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == completed


@pytest.mark.parametrize("name", ["\\$(id)", "a`id`", "a'b", 'a"b', "a\nb", "a\x1b[2Jb", "*", "a;b", "a\udcffb"])
def test_names_that_a_shell_would_read_as_more_than_a_name_are_not_completed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zsh evaluates what it is answered: a file of a folder that somebody else wrote must not become a command."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / ".home"))
    monkeypatch.chdir(tmp_path)
    for one in (f"{name}.yaml", "what I train (2).yaml", "größer-1.5_b.yaml", "with space.yaml"):
        (tmp_path / one).touch()
    (tmp_path / f"{name}x").mkdir()
    assert named("") == ["größer-1.5_b.yaml", "with space.yaml"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("ls", "gpucloud status lists all jobs"),
        ("stop digits", "gpucloud down JOB saves and ends a job, gpucloud train JOB goes on with it"),
        ("help", "gpucloud --help"),
        ("help local kill", "gpucloud local kill --help"),
    ],
)
def test_words_of_other_tools_are_answered_with_what_is_meant(words: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    "usage",
    [
        "gpucloud status [OPTIONS] [JOB|FILE]",
        "gpucloud cost [OPTIONS] [JOB|FILE]...",
        "gpucloud budget [OPTIONS] [JOB|FILE] [SUM]",
        "gpucloud ssh [OPTIONS] [JOB|FILE] [COMMAND]...",
        "gpucloud cp [OPTIONS] FROM TO",
        "gpucloud init [OPTIONS] [NAME]",
        "gpucloud local kill [OPTIONS] [NODE|JOB|FILE]",
        "gpucloud local shortage [OPTIONS] TIME",
        "gpucloud keys add [OPTIONS] NAME KEY",
        "gpucloud completion [OPTIONS] SHELL",
    ],
)
def test_a_usage_names_what_is_given_in_capitals_and_one_pair_of_brackets(usage: str) -> None:
    words = usage.partition(" [OPTIONS]")[0].split()[1:]
    assert CliRunner().invoke(app, [*words, "--help"], prog_name="gpucloud").stdout.splitlines()[0] == f"Usage: {usage}"


@pytest.mark.parametrize("group", ["local", "quota", "keys", "catalog", "iam", "ci", "tools"])
def test_no_summary_of_a_group_is_cut(group: str) -> None:
    told = CliRunner().invoke(app, [group, "--help"]).stdout
    assert "Commands:" in told
    assert "..." not in told.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["train", "up"])
def test_an_option_that_begins_a_run_anew_elsewhere_is_answered_with_the_one_here(command: str) -> None:
    told = CliRunner().invoke(app, [command, "--restart"])
    assert isinstance(told.exception, UsageError)
    assert told.exception.message == "there is no option '--restart'"
    assert (told.exception.hint or "").startswith("--again begins a new run after success, an error or its deadline")
