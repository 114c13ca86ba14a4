"""`events` over the real command line: what a drilled job on the embedded fleet tells, and from where."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from datetime import datetime

import pytest

from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.commandline import command_line, until
from tests.faults.happenings import wrong_events


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path) as found:
        yield found


def events_of(line, *options):
    answer = line.run("events", "small", "--json", *options)
    assert answer.code == 0, answer.stderr
    return [json.loads(one) for one in answer.stdout.splitlines()]


def test_a_drilled_job_tells_each_of_its_events_once_and_a_follower_reads_them_to_the_end(line):
    training = line.start("train", line.job(), "--drill")
    until(lambda: line.state() is not None, "the job is there")
    follower = subprocess.Popen(
        line.argv("events", "small", "-f", "--json"), env=line.env, cwd=line.folder, stdout=subprocess.PIPE, text=True
    )

    assert training.wait(timeout=120) == 0
    followed = [json.loads(one) for one in follower.communicate(timeout=60)[0].splitlines()]

    told = events_of(line)
    assert {one["id"] for one in followed} == {one["id"] for one in told}
    assert [one["at"] for one in told] == sorted(one["at"] for one in told)
    assert [one["kind"] for one in told[:3]] == ["submitted", "planned", "machines"]
    counts = Counter(one["kind"] for one in told)
    assert (
        counts["submitted"] == counts["planned"] == counts["interrupted"] == counts["resumed"] == counts["ended"] == 1
    )
    assert counts["attempt"] == counts["started"] == counts["attempt_ended"] == 2
    (taken,), (again,) = ([one for one in told if one["kind"] == kind] for kind in ("interrupted", "resumed"))
    assert (taken["reason"], taken["attempt"], again["attempt"]) == ("notice", 1, 2)
    (left,) = (one for one in told if one["kind"] == "attempt_ended" and one["attempt"] == 1)
    assert (left["reason"], again["step"]) == ("interrupted", left["saved"] + 1)
    between = datetime.fromisoformat(again["at"]) - datetime.fromisoformat(taken["at"])
    assert 0 < again["seconds"] <= between.total_seconds() + 5
    (end,) = (one for one in told if one["kind"] == "ended")
    assert (end["reason"], end["code"]) == ("succeeded", 0)
    jobs = JobStore(open_store(str(line.home / "store")), "small")
    assert list(wrong_events(jobs.load()[0], jobs.events.read())) == []

    words = line.run("events", "small")
    assert [row.split()[2] for row in words.stdout.splitlines()] == [one["kind"] for one in told]
    assert line.run("rm", "small", "--with-checkpoints", "--yes").code == 0
    assert jobs.events.read() == ()
