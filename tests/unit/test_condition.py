"""What every line about a job says of how it stands: whether it trains, who sees to it, and how old the figures are."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.cli.reports import report_json, report_text
from gpucloud.cli.use import headline
from gpucloud.domain.agentstatus import Outcome
from gpucloud.domain.condition import Condition, condition_of
from gpucloud.domain.ledger import Spend
from gpucloud.domain.state import ExitReason, Interruption, InterruptionKind, JobStatus
from gpucloud.domain.supervision import books
from gpucloud.usecases.report import NodeStanding, report
from tests.unit.worlds import NOW, opened, part, seen, state, up

SPEND = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.011"), promised_usd=Decimal(0))


@pytest.mark.parametrize(
    ("ended", "open_attempt", "trained", "supervised", "machines", "condition"),
    [
        (False, True, False, True, 2, Condition.TRAINING),
        (False, True, False, True, 0, Condition.TRAINING),
        (False, True, False, False, 2, Condition.UNSUPERVISED),
        (False, True, False, False, 0, Condition.LEFT),  # all of them are off by now
        (False, True, True, False, 2, Condition.TRAINED),
        (False, True, True, True, 2, Condition.TRAINED),
        (False, False, False, True, 2, Condition.WAITING),
        (False, False, False, True, 0, Condition.WAITING),
        (False, False, False, False, 2, Condition.LEFT),
        (False, False, False, False, 0, Condition.LEFT),
        (True, False, False, False, 2, Condition.ENDING),
        (True, False, False, False, 0, Condition.ENDED),
    ],
)
def test_a_job_stands_in_one_way(ended, open_attempt, trained, supervised, machines, condition):
    found = condition_of(
        ended=ended, open_attempt=open_attempt, trained=trained, supervised=supervised, machines=machines
    )
    assert found is condition


def told(*nodes, supervisor=None, visited=True, **changes):
    attempt = replace(opened("a", "b", first_step=1, last_step=385), total_steps=768)
    world = seen(*nodes, state=state(job="live", attempts=(attempt,), **changes))
    known = replace(
        report(world.state, SPEND, (), world.group, supervisor),
        signed_by="own",
        last_supervisor="process 20984 on vm",
        written_at=NOW - timedelta(seconds=16),
        looked_at=NOW,
    )
    standing = tuple(NodeStanding(node_id=one.node.id, status=one.status) for one in nodes)
    return replace(known, standing=standing) if visited else known


TRAINS = (up("a", part(1, step=605, total_steps=768)), up("b", part(1)))


def test_a_job_that_nobody_supervises_says_so_with_steps_of_now_and_what_to_do():
    assert report_text(told(*TRAINS)).split("\n\n")[:3] == [
        "live: TRAINING, NOBODY SUPERVISES, step 605 of 768, 10 steps/s, 16.3 s to go",
        "its order is signed by your own key",
        "its supervisor, process 20984 on vm, was last seen at 11:59:44 UTC, 16 s ago\n"
        "nobody replaces a machine that is taken now; all switch themselves off at 12:30:00 UTC\n"
        "go on: gpucloud train live · end it: gpucloud down live",
    ]
    assert "1        2      1–605  running" in report_text(told(*TRAINS))
    assert report_json(told(*TRAINS))["condition"] == "training_unsupervised"


def test_figures_that_no_node_was_asked_for_say_how_old_they_are():
    first = report_text(told(*TRAINS, supervisor="process 1 on vm", visited=False)).splitlines()[0]
    assert first == "live: training, step 385 of 768 as of 11:59:44 UTC, supervised by process 1 on vm"


def test_a_job_whose_ranks_are_done_has_results_that_are_not_home():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    text = report_text(told(*done))
    assert text.startswith("live: trained, its results are not home yet, step 768")
    assert "gpucloud train live brings them home, and ends its machines" in text
    assert headline(told(*done)).startswith("live: trained, its results are not home yet, attempt 1")


def test_results_that_a_supervisor_brings_home_ask_nobody_to_bring_them():
    done = (up("a", part(1, Outcome.DONE, step=768)), up("b", part(1, Outcome.DONE)))
    text = report_text(told(*done, supervisor="process 1 on vm"))
    assert text.startswith("live: trained, its results are not home yet, step 768")
    assert "gpucloud train" not in text.split("\n\n", 2)[2]


def test_an_attempt_that_has_told_no_step_yet_is_running_all_the_same():
    world = seen(up("a", part(1)), up("b", part(1)), state=state(attempts=(opened("a", "b"),)))
    assert report(world.state, SPEND, (), world.group, None).status is JobStatus.RUNNING


def test_a_restart_took_as_long_as_the_nodes_own_steps_say_whoever_looked_late():
    first = replace(opened("a"), reason=ExitReason.INTERRUPTED)
    second = replace(opened("a", number=2), started_at=NOW - timedelta(seconds=50))
    lost = Interruption(node_id="b", kind=InterruptionKind.LOST, attempt=1, noticed_at=NOW - timedelta(seconds=56))
    # 400 steps of 0.1 s since the first one, told 0.1 s ago: it was made 40 s ago.
    nodes = (up("a", part(2, step=401, first_step=1)),)
    recorded = books.record(seen(*nodes, state=state(attempts=(first, second), interruptions=(lost,))))
    (again,) = recorded.interruptions
    assert again.resumed_at == NOW - timedelta(seconds=40.1)
