"""The handbook says what is so: its commands, its literal JSON, its job files, its tables."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
import typer
import yaml
from typer.main import get_command

import gpucloud
from gpucloud.adapters.handbook import IN_ORDER, find, pages
from gpucloud.adapters.jobfile.model import JobKeys
from gpucloud.cli.app import app
from gpucloud.cli.help import GROUPS
from gpucloud.cli.render.reports import report_json
from gpucloud.cli.render.words import VERSION
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.job.spec import CheckpointDirectory, CheckpointPolicy, Cloud, ContainerRuntime, Launcher
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.container import ContainerRun, identity
from gpucloud.domain.node.hardware import gpu_defaults, on_interface, threads
from gpucloud.domain.node.launch import launches
from gpucloud.domain.state.state import ExitReason
from gpucloud.usecases.jobstore.report import report
from tests import handbook
from tests.unit.test_launch import START, job, place
from tests.unit.worlds import opened, snapshot, state

PAGES = pages()
README = handbook.FOLDER.parents[1] / "README.md"
FILES = {
    "README": README,
    **{page.name: handbook.FOLDER / f"{page.name}.md" for page in PAGES},
    "site": handbook.FOLDER / "README.md",
    "README in Chinese": handbook.FOLDER / "zh" / "README.md",
    "getting-started in Chinese": handbook.FOLDER / "zh" / "getting-started.md",
    "CHANGELOG": README.with_name("CHANGELOG.md"),
}
TEXTS = {name: file.read_text() for name, file in FILES.items()}
TEXTS["CHANGELOG"] = TEXTS["CHANGELOG"].partition("\n## [0")[0]  # without releases, which say what was so then
IN_CHINESE = [name for name in FILES if name.endswith("in Chinese")]
COMMANDS = TEXTS["commands"]


def blocks(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_list_of_pages_names_every_file_once():
    files = {path.relative_to(handbook.FOLDER).as_posix() for path in handbook.FOLDER.rglob("*.md")}
    assert sorted(IN_ORDER) == sorted(name for name in files if "/" not in name and name != "README.md")
    assert files - set(IN_ORDER) == {"README.md", "zh/README.md", "zh/getting-started.md"}


def test_the_site_has_the_pages_in_their_order_behind_one_that_says_what_they_answer():
    first, *rest, chinese = yaml.safe_load((handbook.FOLDER.parent / "mkdocs.yml").read_text())["nav"]
    rows = [f"| [{page.name}]({page.name}.md) | {page.answers} |" for page in PAGES]

    assert (first, tuple(rest)) == ("README.md", IN_ORDER)
    assert chinese == {"中文": ["zh/README.md", "zh/getting-started.md"]}
    assert "\n".join(rows) in TEXTS["site"]


@pytest.mark.parametrize("name", ["README", "site", "README in Chinese"])
def test_who_reads_that_the_price_is_kept_is_told_at_once_what_is_outside_it(name):
    covered = ["实例", "磁盘", "地址"] if name in IN_CHINESE else ["machines", "disks", "addresses"]
    head = TEXTS[name][:500]

    assert [word for word in (*covered, "S3", "money.md") if word not in head] == []


@pytest.mark.parametrize("name", IN_CHINESE)
def test_what_is_typed_and_seen_in_chinese_is_what_the_english_page_has(name):
    english, chinese = TEXTS[name.removesuffix(" in Chinese")], TEXTS[name]

    assert re.findall(r"^```(\w+)$", chinese, re.MULTILINE) == re.findall(r"^```(\w+)$", english, re.MULTILINE)
    assert typed(chinese) == typed(english)
    assert blocks("text", chinese) == blocks("text", english)
    assert set(command_lines(chinese)) == set(command_lines(english))


def typed(text):
    """Return the lines of the blocks that a shell reads, without what is said beside them."""
    told = [line for language in ("sh", "bash") for block in blocks(language, text) for line in block.splitlines()]
    return [re.sub(r"\s+# .*", "", line) for line in told]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_one_sentence_of_what_it_answers(page):
    title, sentence, _ = page.text.split("\n\n", 2)

    assert re.fullmatch(r"# [A-Z].+", title)
    assert re.fullmatch(r"[A-Z].+[.]", sentence)
    assert ". " not in sentence
    assert page.answers == sentence


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_help_and_keys_in_a_page_are_what_the_program_says_now(page):
    is_so = page.text.split() == handbook.written(page.text).split()  # what differs are thousands of words
    assert is_so, f"docs/{page.name}.md is stale: python -m tests.handbook"


def test_the_help_of_every_command_is_shown_once_under_its_heading():
    shown = handbook.commands_shown(COMMANDS)
    assert sorted(shown) == sorted(["gpucloud", *(f"gpucloud {name}" for name, _ in commands())])
    (told,) = {tuple(re.findall(r"^### ([a-z]+)$", COMMANDS.partition("## A job as JSON")[0], re.MULTILINE))}
    assert told == tuple(name for group in GROUPS.values() for name in group)


def test_the_table_of_keys_has_every_key_of_the_model_in_its_order():
    told = re.findall(r"^\| `([a-z_]+)` \|", TEXTS["job-file"].partition(handbook.KEYS)[2], re.MULTILINE)
    assert told == list(JobKeys.model_fields)
    assert "| `resources.nodes` | a number, 1 to 64 or such as `2-4` | `1` | Machines; of a range" in TEXTS["job-file"]
    assert "| `checkpoint` | a mapping, or `none` |  | " in TEXTS["job-file"]
    assert "| `ssh.hosts[].port` | a number, 1 to 65535 | `22` | SSH's port there. |" in TEXTS["job-file"]
    assert "| `idle.for` | such as `12h`, `90 min`, `2d 3h` | **must be there** | For how long. |" in TEXTS["job-file"]


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_line_is_one_that_gpucloud_takes(name):
    told = [line for line in command_lines(TEXTS[name]) if not understood(line)]
    assert told == []


def test_a_command_line_that_gpucloud_does_not_take_is_found():
    text = "`gpucloud trian`, `gpucloud plan --polt a.svg`, `gpucloud plan`:\n```bash\ngpucloud cp here  # what?\n```\n"
    told = command_lines(text)
    assert told == ["gpucloud trian", "gpucloud plan --polt a.svg", "gpucloud plan", "gpucloud cp here"]
    assert [understood(line) for line in told] == [False, False, True, False]


def test_every_option_that_is_named_is_one_of_some_command():
    known = {
        option for _, command in commands() for one in command.params for option in (*one.opts, *one.secondary_opts)
    }
    theirs = {
        "--part",
        "--layers",
        "--batch",
        "--rounds",
        "--short",
        "--epochs",
        "--changed",
        "--engines",
        "--requeue",  # Slurm's
        "--signal",
        "--version",
        "--debug",
        "--help",
        *("--init", "--load", "--output", "--resume"),  # of users' scripts: `--init_from`, `--output_dir`
    }
    for name, text in TEXTS.items():
        told = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", text)) - theirs
        assert told <= known, name


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_that_are_there(name):
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", TEXTS[name])
    assert [link for link in links if not (FILES[name].parent / link).exists()] == []


def test_topics_that_messages_and_pages_name_are_found():
    sources = [*Path(gpucloud.__file__).parent.rglob("*.py"), README, *handbook.FOLDER.glob("*.md")]
    told = {topic for file in sources for topic in re.findall(r"gpucloud docs ([a-z][a-z-]+)", file.read_text())}
    assert {"scripts-and-checkpoints", "money", "aws"} <= told
    assert [topic for topic in sorted(told - {"lists"}) if not find(PAGES, topic)] == []


def test_the_codes_in_the_table_are_those_that_there_are():
    rows = re.findall(r"^\| ([0-9, ]+) \| ", COMMANDS.partition("## Exit codes")[2], re.MULTILINE)
    told = {int(code) for row in rows for code in row.split(",")}
    ours = {one.exit_code for one in subclasses(GpucloudError)} | {reason.exit_code for reason in ExitReason}
    assert told == ours | {0, 1, 130, 143}, "mend the table below `## Exit codes` in docs/commands.md"


def test_the_literal_json_has_the_keys_that_train_writes():
    (literal,) = (json.loads(text) for text in blocks("json", COMMANDS))
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.5"), promised_usd=Decimal(0))
    attempt = opened("a", reason=ExitReason.SUCCEEDED)
    written = {"version": VERSION, **report_json(report(state(attempts=(attempt,)), spend, (), snapshot().group, None))}

    assert literal.keys() == written.keys()
    assert literal["attempts"][0].keys() == written["attempts"][0].keys()
    assert literal["spend"].keys() == written["spend"].keys()
    assert Decimal(literal["spend"]["spent_usd"]) + Decimal(literal["spend"]["left_usd"]) == 1


def test_every_command_takes_json_but_those_that_write_what_others_read():
    def walk(command, *words):
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, *words, name)
        if not getattr(command, "commands", {}) or command.invoke_without_command:
            yield " ".join(words), [option for one in command.params for option in one.opts]

    without = {words for words, options in walk(get_command(app)) if words and "--json" not in options}
    sentence = COMMANDS.partition("Every command takes `--json`")[2].partition("others read")[0]

    assert without == {"ssh", "completion", "metrics"} == set(re.findall(r"`(\w+)`", sentence.partition("; but ")[2]))


def test_the_job_files_shown_have_known_keys_only():
    shown = [key for page in PAGES for text in blocks("yaml", page.text) for key in yaml.safe_load(text)]
    sample = (Path(__file__).resolve().parents[2] / "templates" / "gpucloud.yaml").read_text()

    assert all(re.search(rf"^#?{key}:", sample, re.MULTILINE) for key in shown)


def test_what_a_script_finds_in_its_environment_is_what_launches_set():
    kinds = {
        *(env for launcher in Launcher for env in names_set("train.py", launcher=launcher)),
        *names_set("train.py", cloud=Cloud.AWS, data=(("s3://b/d", "/data"),)),
        *names_set("python train.py $GPUCLOUD_RESUME_ARGS", checkpoint=RESUMED),
        *on_interface("eth0"), *gpu_defaults("/a", efa=True), *threads(2, 8), *identity(IN_IMAGE, "ada"),
    }  # fmt: skip
    table = COMMANDS.partition("A script finds these;")[2].partition("\n\n## ")[0]
    told = {name for row in table.splitlines() if row.startswith("| `") for name in NAME.findall(row.split("|")[1])}

    assert {name for name in told if not name.startswith("GPUCLOUD_")} == {
        name for name in kinds if not name.startswith(("GPUCLOUD_", "PET_"))
    }
    assert told <= kinds


NAME = re.compile(r"`(\w+)`")
IN_IMAGE = ContainerRun(
    name="c", image="i", runtime=ContainerRuntime.DOCKER, devices=(), gpus=1, mounts=(), home="/h/home"
)


RESUMED = CheckpointPolicy(directory=CheckpointDirectory(path="out", resume_args=("--resume",)))


def names_set(run, **changes):
    here = place(1)
    here = replace(here, node=replace(here.node, devices=("0",)))
    (only,) = launches(job(run, **changes), START, (here,), {})
    return dict(only.env)


def test_every_way_in_which_a_run_ends_is_named_with_its_exit_code():
    said = COMMANDS.partition("### How a run or an attempt ended")[2]
    where = "in docs/commands.md, How a run or an attempt ended"
    assert set(re.findall(r"`([a-z_]+)`", said)) - {"setup"} == {reason.value for reason in ExitReason}, (
        f"left: every lower-case word in backticks {where}, to the page's end; right: ExitReason."
        " Name each reason there, and put no other such word in backticks"
    )
    told = {name: int(code) for name, code in re.findall(r"`([a-z_]+)`\s+\((\d+)", said)}
    assert told == {reason.value: reason.exit_code for reason in ExitReason if not reason.retried}, (
        f"left: what is said {where}; right: ExitReason."
        " Write `name` (code) or `name` (code: …) for each that is not retried"
    )
    assert {reason.exit_code for reason in ExitReason if reason.retried} == {21}


def subclasses(kind):
    yield kind
    for below in kind.__subclasses__():
        yield from subclasses(below)


def commands(command=None, *words):
    """Yield every command with its words, groups too."""
    command = command or get_command(app)
    for name, below in getattr(command, "commands", {}).items():
        yield " ".join((*words, name)), below
        yield from commands(below, *words, name)


def command_lines(text):
    """Return the command lines of gpucloud in a page: in backticks, and in fenced blocks that a shell reads."""
    shells = [line for language in ("sh", "bash") for block in blocks(language, text) for line in block.splitlines()]
    shells += [line[2:] for line in re.findall(r"^\$ gpucloud .+$", text, re.MULTILINE)]
    parts = [part.strip() for line in shells for part in re.sub(r"\s+# .*", "", line).split("&&")]
    in_prose = [" ".join(found.split()) for found in re.findall(r"`(gpucloud [^`]+)`", without_blocks(text))]
    return [line.replace("\\|", "|") for line in (*in_prose, *parts) if line.startswith("gpucloud ")]


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def understood(line):
    """Whether the words are a command with options and arguments that it takes; nothing runs."""
    words = shlex.split(line)[1:]
    if "--help" in words or words[0] in ("--version", "--debug"):
        return True
    command, path = get_command(app), "gpucloud"
    while words and words[0] in getattr(command, "commands", {}):
        path, command = words[0], command.commands[words[0]]
        words = words[1:]
    if path == "gpucloud" or not words:  # no command of ours, or its name alone
        return path != "gpucloud"
    try:
        command.make_context(path, words)
    except (GpucloudError, typer.BadParameter.__base__):  # click's UsageError, wherever typer has it
        return False
    return True
