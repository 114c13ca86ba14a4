"""A node's words that stand still are of an earlier time: its agent cannot write, or is dead."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.cli.render.use import step_words
from gpucloud.domain.node.status import status_to_json
from gpucloud.domain.state.state import CheckpointRef, ExitReason
from gpucloud.ports import Completed
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.condition import Silence
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.look import visited
from tests.fakes.shell import FakeShell
from tests.faults.process import run
from tests.faults.rig import JOB, Outside
from tests.faults.strikes import Strikes
from tests.unit.test_condition import told
from tests.unit.worlds import NOW, part, up


@pytest.mark.parametrize(
    ("supervisor", "heartbeats", "asked", "answers"),
    [
        (None, [1, 2], 2, True),  # it goes on
        (None, [1, 1], 2, False),  # the disk is full, or the agent is dead: what it said was so once
        ("process 1 on vm", [1, 1], 1, True),  # whoever supervises sees to it
    ],
)
@pytest.mark.parametrize("silent", [False, True])
def test_words_that_stand_still_are_no_answer(
    tmp_path: Path, supervisor: str | None, heartbeats: list[int], asked: int, answers: bool, silent: bool
) -> None:
    node = up("a", part(1, step=10, total_steps=400))
    assert node.status is not None
    said = [status_to_json(replace(node.status, heartbeat=heartbeat)).encode() for heartbeat in heartbeats]
    report = replace(told(node, supervisor=supervisor), nodes=(replace(node.node, host_key="key"),))
    if silent:  # who supervises it hears nothing of it
        report = replace(report, silences=(Silence(node_id="a", since=NOW - timedelta(minutes=5)),))
        asked, answers = 2, heartbeats[0] != heartbeats[1]
    pauses: list[float] = []

    def answer(*_: object) -> Completed:
        return Completed(exit_code=0, stdout=said[len(pauses)], stderr=b"")

    found = visited(report, FakeShell(tmp_path, answer), pauses.append)
    assert [one.status is not None for one in found.standing] == [answers]
    assert len(pauses) + 1 == asked
    assert step_words(found)[0].startswith("step 10 of 400" if answers else "step 385 of ")


@pytest.mark.parametrize(
    ("supervisor", "is_open", "step"),
    [(None, True, 12), ("process 1 on vm", True, 2), (None, False, 2)],
)
def test_a_checkpoint_that_came_after_the_supervisor_died_is_found_in_the_store(
    tmp_path: Path, supervisor: str | None, is_open: bool, step: int
) -> None:
    outside, strikes = Outside(tmp_path), Strikes()
    run(("train", str(outside.file)), outside.over(strikes), strikes)
    asker: Any = SimpleNamespace(jobs=JobStore(outside.store, JOB))
    known = told(up("a", part(1, step=12)), supervisor=supervisor)
    if not is_open:
        known = replace(known, attempts=(replace(known.attempts[-1], reason=ExitReason.STOPPED),))
    known = replace(known, checkpoint=CheckpointRef(step=2, sha256="0" * 64))
    found = Asker.with_stored_checkpoint(asker, known)
    assert found.checkpoint is not None
    assert found.checkpoint.step == step
