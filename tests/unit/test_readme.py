"""README says what is so, in few words: its two commands, its table of commands, what is seen, where the rest is."""

from __future__ import annotations

import re
from pathlib import Path

from gpucloud.adapters.handbook import pages
from gpucloud.cli.help import GROUPS

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language, text=README):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_it_is_read_in_a_few_minutes():
    assert len(README.splitlines()) <= 200


def test_the_first_two_shell_blocks_are_one_line_each():
    main_job, tests = blocks("sh")

    assert main_job == "pip install -q '.[local]' && gpucloud train templates/jobs/digits.yaml --drill\n"
    assert tests == "pip install -q '.[dev]' && python -m tests.check\n"


def test_getting_started_begins_with_the_same_command():
    started = next(page.text for page in pages() if page.name == "getting-started")

    assert blocks("sh", started) == blocks("sh")[:1]


def test_what_is_seen_is_an_excerpt_of_the_whole_in_getting_started():
    started = next(page.text for page in pages() if page.name == "getting-started")
    (excerpt,), (whole,) = blocks("text"), blocks("text", started)
    shown = [line for line in excerpt.splitlines() if line not in ("…", "")]
    rest = iter(whole.splitlines())

    assert [line for line in shown if line not in rest] == []


def test_every_command_is_in_the_table_and_every_one_there_exists():
    rows = re.findall(
        r"^\| `gpucloud (\w+)", README.partition("## The commands")[2].partition("\n## ")[0], re.MULTILINE
    )

    assert rows == [name for commands in GROUPS.values() for name in commands]


def test_the_pages_are_listed_with_what_they_answer():
    rows = [f"| [{page.name}](gpucloud/docs/{page.name}.md) | {page.answers} |" for page in pages()]

    assert "\n".join(rows) in README


def test_its_status_stands_before_what_to_type():
    section_titles = re.findall(r"^## (.+)$", README, re.MULTILINE)

    assert section_titles[:2] == ["Where it stands", "Try it"]
    assert "No job has run on a paid AWS account yet." in README.partition("## Try it")[0]
