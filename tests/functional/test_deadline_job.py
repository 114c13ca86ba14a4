"""A job with a deadline over the embedded fleet: where there is no spot machine, it is over in time all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commandline import CommandLine, command_line

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])


@pytest.fixture
def line(tmp_path: Path) -> Iterator[CommandLine]:
    with command_line(tmp_path) as one:
        yield one


@pytest.mark.timeout(330)
def test_without_spot_it_pays_on_demand_before_it_is_too_late(line):
    told = line.run("local", "shortage", "30min").stdout
    assert told.startswith("no spot machines start until ")
    file = line.job(steps=40, step_s=0.05, extra="work: 150s\ndeadline: 240s\npolicy: greedy\n")

    answer = line.run("train", file, "--json", limit_s=500)

    assert answer.code == 0, answer.stderr
    lines = [text for text in answer.stderr.splitlines() if " on demand from " in text]
    assert [text.endswith("left: no time is left for another interruption") for text in lines] == [True]
    charges = line.run("cost", "small", "--json").json["charges"]
    assert {charge["market"] for charge in charges} == {"on_demand"}


def test_a_deadline_that_cannot_be_kept_is_refused_with_the_number_that_must_move(line):
    refused = line.run("train", line.job(extra="work: 20s\ndeadline: 60s\n"), "--json")
    assert refused.code == 2
    assert "hint: deadline: 2min (12.5 s of it for network and group)," in refused.stderr
    assert line.state() is None
