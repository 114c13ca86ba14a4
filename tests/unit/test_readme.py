"""README says what is so: its commands, its literal JSON and its job file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import yaml
from typer.main import get_command

from gpucloud.cli.app import app
from gpucloud.cli.render.reports import report_json
from gpucloud.cli.render.words import VERSION
from gpucloud.domain.job.spec import Cloud, ContainerRuntime, Launcher
from gpucloud.domain.money.ledger import Spend
from gpucloud.domain.node.collectives import gpu_defaults, on_interface, threads
from gpucloud.domain.node.container import ContainerRun, identity
from gpucloud.domain.node.launch import launches
from gpucloud.domain.state.state import ExitReason
from gpucloud.usecases.jobstore.report import report
from tests.unit.test_launch import START, job, place
from tests.unit.worlds import opened, seen, state

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_first_two_shell_blocks_are_one_line_each():
    main_job, tests = blocks("sh")[:2]

    assert main_job == "pip install -q '.[local]' && gpucloud train templates/jobs/digits.yaml --drill\n"
    assert tests == "pip install -q '.[dev]' && python -m tests.check\n"


def test_the_literal_json_has_the_keys_that_train_writes():
    (literal,) = (json.loads(text) for text in blocks("json"))
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.5"), promised_usd=Decimal(0))
    attempt = opened("a", reason=ExitReason.SUCCEEDED)
    written = {"version": VERSION, **report_json(report(state(attempts=(attempt,)), spend, (), seen().group, None))}

    assert literal.keys() == written.keys()
    assert literal["attempts"][0].keys() == written["attempts"][0].keys()
    assert literal["spend"].keys() == written["spend"].keys()
    assert Decimal(literal["spend"]["spent_usd"]) + Decimal(literal["spend"]["left_usd"]) == 1


def test_every_command_is_in_the_table_and_every_one_there_exists():
    told = set(re.findall(r"gpucloud (\w+)", README.split("## The commands")[1].split("###")[0]))
    known = set(get_command(app).commands)

    assert told - {"yaml"} <= known
    assert known <= told | {"logs", "cost", "schema", "local"}


def test_every_command_takes_json_but_those_that_write_what_others_read():
    def walk(command, *words):
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, *words, name)
        if not getattr(command, "commands", {}) or command.invoke_without_command:
            yield " ".join(words), [option for one in command.params for option in one.opts]

    without = {words for words, options in walk(get_command(app)) if words and "--json" not in options}
    sentence = README.partition("Every command takes `--json`")[2].partition("others read")[0]

    assert without == {"ssh", "completion", "metrics"} == set(re.findall(r"`(\w+)`", sentence.partition("; but ")[2]))


def test_the_job_files_shown_have_known_keys_only():
    shown = [key for text in blocks("yaml") for key in yaml.safe_load(text)]
    sample = (Path(__file__).resolve().parents[2] / "templates" / "gpucloud.yaml").read_text()

    assert all(re.search(rf"^#?{key}:", sample, re.MULTILINE) for key in shown)


def test_what_a_script_finds_in_its_environment_is_what_launches_set():
    kinds = {
        *(env for launcher in Launcher for env in names_set("train.py", launcher=launcher)),
        *names_set("train.py", cloud=Cloud.AWS, data=(("s3://b/d", "/data"),)),
        *on_interface("eth0"), *gpu_defaults("/a", efa=True), *threads(2, 8), *identity(IN_IMAGE, "ada"),
    }  # fmt: skip
    table = README.partition("A script finds these;")[2].partition("\n\n### ")[0]
    told = {name for row in table.splitlines() if row.startswith("| `") for name in NAME.findall(row.split("|")[1])}

    assert {name for name in told if not name.startswith("GPUCLOUD_")} == {
        name for name in kinds if not name.startswith(("GPUCLOUD_", "PET_"))
    }
    assert told <= kinds


NAME = re.compile(r"`(\w+)`")
IN_IMAGE = ContainerRun(
    name="c", image="i", runtime=ContainerRuntime.DOCKER, devices=(), gpus=1, mounts=(), home="/h/home"
)


def names_set(run, **changes):
    here = place(1)
    here = replace(here, node=replace(here.node, devices=("0",)))
    (only,) = launches(job(run, **changes), START, (here,), {})
    return dict(only.env)


def test_every_way_in_which_a_run_ends_is_named_with_its_exit_code():
    said = README[README.index("How a run or an attempt ended") : README.index("## When nobody looks")]
    assert set(re.findall(r"`([a-z_]+)`", said)) - {"setup"} == {reason.value for reason in ExitReason}
    told = {name: int(code) for name, code in re.findall(r"`([a-z_]+)` \((\d+)", said)}
    assert told == {reason.value: reason.exit_code for reason in ExitReason if not reason.retried}
    assert {reason.exit_code for reason in ExitReason if reason.retried} == {21}
