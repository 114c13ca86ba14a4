"""`docs`: which page or section a topic means, and how it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gpucloud
from gpucloud.adapters.handbook import Page, find, page, pages, translations
from gpucloud.cli.app import app
from gpucloud.cli.commands import reading
from gpucloud.cli.help import GROUPS
from gpucloud.domain.errors import GpucloudError, UsageError

MONEY = (
    "# Money\n\nWhat it costs.\n\n## Before\n\n```sh\n## no heading\n```\n\n### By hour\n\ntext\n\n## After\n\nmore\n"
)
KNOWN = (
    page("money", MONEY),
    page("own-machines", "# On your own\n\nHow to train at home.\n\n## Hosts\n\nnames\n"),
    page("markets-and-deadlines", "# Markets\n\nHow to be on time.\n\n## After\n\n### Cost\n\nall\n"),
)


def meant(topic: str) -> tuple[str, str | None]:
    found = find(KNOWN, topic)
    return found.name, found.section


def asked(*words: str) -> str:
    done = CliRunner().invoke(app, ["docs", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize(
    ("topic", "found"),
    [
        ("money", ("money", None)),
        ("own machines", ("own-machines", None)),
        ("deadlines", ("markets-and-deadlines", None)),
        ("mon", ("money", None)),
        ("Before", ("money", "Before")),
        ("by-h", ("money", "By hour")),
        ("cost", ("markets-and-deadlines", "Cost")),
    ],
)
def test_a_topic_is_a_page_a_word_of_its_name_or_a_heading(topic: str, found: tuple[str, str | None]) -> None:
    assert meant(topic) == found


def test_a_section_ends_where_the_next_of_its_level_begins() -> None:
    before = "## Before\n\n```sh\n## no heading\n```\n\n### By hour\n\ntext\n"
    assert find(KNOWN, "before") == Page(name="money", section="Before", answers="What it costs.", text=before)
    assert find(KNOWN, "by hour").text == "### By hour\n\ntext\n"


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("mony", "did you mean gpucloud docs money?"),
        ("machnes", "did you mean gpucloud docs machines?"),
        ("befor us", "did you mean gpucloud docs before?"),
        ("m", "gpucloud docs money · gpucloud docs own-machines · gpucloud docs markets-and-deadlines"),
        ("zzz", "gpucloud docs lists the pages"),
        ("", "gpucloud docs lists the pages"),
        ("---", "gpucloud docs lists the pages"),
    ],
)
def test_a_topic_that_means_none_or_several_is_refused_with_the_nearest(topic: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        find(KNOWN, topic)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("topic", "name"),
    [
        *(("zh", "zh"), ("ZH", "zh"), ("中文", "zh"), ("中文说明", "zh")),
        *(("zh/getting-started", "zh-getting-started"), ("zh getting", "zh-getting-started")),
        *(("getting-started", "getting-started"), ("getting", "getting-started"), ("aws", "aws")),
    ],
)
def test_a_translation_is_meant_by_its_own_name_alone(topic: str, name: str) -> None:
    found = find((*pages(), *translations()), topic)
    assert (found.name, found.section) == (name, None)


def test_the_list_names_the_chinese_pages_and_they_are_shown() -> None:
    assert "\nzh " in asked()
    assert asked("zh").startswith("# gpucloud 中文说明")


@pytest.mark.parametrize("command", [name for group in GROUPS.values() for name in group])
def test_a_command_s_name_is_a_topic(command: str) -> None:
    found = find(pages(), command)
    assert (found.name, found.section) == ("commands", command)


def test_a_heading_that_two_pages_have_is_named_with_both() -> None:
    with pytest.raises(UsageError, match="'after' may mean several pages") as refused:
        find(KNOWN, "after")
    assert refused.value.hint == "gpucloud docs money · gpucloud docs markets-and-deadlines"


def test_without_a_topic_each_page_is_one_line() -> None:
    first, *rest = asked().splitlines()
    assert first.startswith("getting-started          How to run gpucloud for the first time, ")
    assert [line.split()[0] for line in rest] == [one.name for one in (*pages()[1:], *translations())]


def test_in_a_pipe_a_page_is_its_own_text() -> None:
    assert asked("money") == next(one.text for one in pages() if one.name == "money")
    assert asked("exit", "codes").startswith("## Exit codes\n\n| code | ")


def test_as_json_a_page_comes_with_its_text() -> None:
    assert json.loads(asked("--json"))["pages"][6]["name"] == "aws"
    told = json.loads(asked("exit", "codes", "--json"))
    assert (told["version"], told["name"], told["section"]) == (1, "commands", "Exit codes")
    assert told["text"].startswith("## Exit codes\n")


def test_on_a_terminal_markdown_is_set_no_wider_than_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "width_of", lambda _: 60)
    assert reading.docs(["money"], as_json=False) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    assert "## " not in shown
    assert "How the budget holds" in shown


def test_on_a_terminal_what_is_copied_stays_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "width_of", lambda _: 60)
    assert reading.docs(["aws"], as_json=False) == 0
    line = "gpucloud train train.yaml --cloud aws       # or `cloud: aws` in the file"
    assert line in capsys.readouterr().out.splitlines()


def test_a_broken_installation_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpucloud, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(GpucloudError, match=r"this installation of gpucloud lacks docs/getting-started\.md"):
        pages()
