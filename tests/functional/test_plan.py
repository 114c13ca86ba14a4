"""`gpucloud plan` as it is called: without an AWS account, on the embedded fleet, and into a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commandline import CommandLine, command_line

JOB = """\
name: small
cloud: aws
run: sleep 1
resources: {gpus: 1, gpu: T4, market: auto, regions: [us-east-1]}
budget: 50 USD
deadline: 16h
work: 12h
"""


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        for name in [name for name in found.env if name.startswith("AWS_")]:
            del found.env[name]
        found.env |= {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
        yield found


def job(line: CommandLine, text: str = JOB) -> str:
    file = line.folder / "small.yaml"
    file.write_text(text)
    return str(file)


def test_without_an_account_the_catalogs_prices_make_the_plan(line):
    answer = line.run("plan", job(line), "--plot", str(line.folder / "cost.svg"))

    assert answer.code == 0, answer.stderr
    assert "planned by the catalog's prices instead" in answer.stderr
    assert "on-demand prices of 2026-07-20 (" in answer.stderr
    assert "machines   1 × g4dn.xlarge spot in us-east-1, 1 worker" in answer.stdout
    assert "; the deadline is after 16 h\n" in answer.stdout
    assert "quota: not known without AWS credentials" in answer.stdout
    drawn = Path(line.folder / "cost.svg").read_text()
    assert "deadline (hours)" in drawn
    assert "cost (USD)" in drawn


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_number_that_must_move(line):
    answer = line.run("plan", job(line, JOB.replace("deadline: 16h", "deadline: 12h")), "--json")

    assert answer.code == 2
    assert answer.json["error"]["code"] == "plan_refused"
    assert answer.json["error"]["hint"].startswith("deadline: 12h 29min (5 min of it for network and group), or")


def test_a_model_that_is_too_large_is_refused_with_the_number_that_must_move(line):
    text = JOB.replace("work: 12h", "model: {params: 7B}")
    answer = line.run("plan", job(line, text))

    assert answer.code == 2
    assert (
        "7.0B bf16 adamw ddp over 1 GPU needs 112.0 GB states + 14.0 GB working + 13.6 GB margin = 139.6 GB of each"
        in answer.stderr
    )
    assert "hint: nodes: 10, with model: {strategy: fsdp}\n" in answer.stderr


def test_on_the_embedded_fleet_nothing_is_taken(line):
    local = JOB.replace("cloud: aws", "cloud: local").replace("gpu: T4, market: auto, regions: [us-east-1]", "nodes: 1")
    told = line.run("plan", job(line, local), "--json").json

    assert told["work_s"] == 43200.0
    assert told["outlook"]["windows"] == 0
    assert told["quotas"] == []
