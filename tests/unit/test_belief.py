"""When a machine that does not answer is believed to be dead."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest

from gpucloud.domain.node.node import PeerReport, peer_report_of
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason, Interruption, InterruptionKind
from gpucloud.domain.supervision.action import CloseAttempt, NoteInterruptions, OpenAttempt, Replace, Wait
from gpucloud.domain.supervision.membership import believed_dead, vouched_for
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules
from tests.unit.worlds import NOW, gone, opened, part, snapshot, state, up

LIMITS = Limits(silent=timedelta(seconds=3), alone=timedelta(seconds=60))
GOAL, RULES = Goal(nodes=2, budget_usd=Decimal(1)), Rules(limits=LIMITS)


def during(*nodes, **changes):
    return snapshot(*nodes, state=state(attempts=(opened(*(n.node.id for n in nodes)),)), **changes)


@pytest.mark.parametrize(
    ("silent", "word", "impaired", "dead"),
    [
        (0.0, PeerReport.NOTHING, False, False),
        (2.9, PeerReport.DEAD, False, False),
        (3.0, PeerReport.DEAD, False, True),
        (3.0, PeerReport.NOTHING, False, False),
        (3.0, PeerReport.ALIVE, False, False),
        (59.9, PeerReport.NOTHING, False, False),
        (60.0, PeerReport.NOTHING, False, True),
        (600.0, PeerReport.ALIVE, False, False),
        (2.9, PeerReport.NOTHING, True, False),
        (3.0, PeerReport.NOTHING, True, True),
        (3.0, PeerReport.ALIVE, True, True),
    ],
)
def test_with_a_peer_that_answers_a_second_witness_or_patience_decides(silent, word, impaired, dead):
    node = up("b", part(1), silent=silent, peer_report=word, impaired=impaired)
    assert believed_dead(node, during(up("a", part(1)), node), LIMITS) is dead


@pytest.mark.parametrize(
    ("silent", "word", "impaired", "dead"),
    [
        (3.0, PeerReport.DEAD, False, False),  # said before the peer went silent too
        (9999.0, PeerReport.DEAD, False, False),
        (9999.0, PeerReport.NOTHING, False, False),
        (3.0, PeerReport.NOTHING, True, True),
    ],
)
def test_all_silent_at_once_means_that_we_are_offline_and_only_the_cloud_is_believed(silent, word, impaired, dead):
    node = up("b", part(1), silent=silent, peer_report=word, impaired=impaired)
    assert believed_dead(node, during(up("a", part(1), silent=silent), node), LIMITS) is dead


@pytest.mark.parametrize(("silent", "dead"), [(59.9, False), (60.0, True)])
def test_the_only_machine_is_believed_dead_after_a_longer_time(silent, dead):
    node = up("a", part(1), silent=silent)
    assert believed_dead(node, during(node, gone("z")), LIMITS) is dead


def test_a_machine_that_a_witness_vouches_for_is_left_alone_in_an_attempt():
    node = up("b", part(1, step=5), silent=120, peer_report=PeerReport.ALIVE)
    world = during(up("a", part(1, step=5)), node)
    assert decide(GOAL, world, RULES) == Wait(why="running")
    assert vouched_for(world, LIMITS) == (node,)


def test_between_attempts_a_machine_that_we_cannot_reach_for_long_is_replaced_alive_or_not():
    alive = {"peer_report": PeerReport.ALIVE}
    assert decide(GOAL, snapshot(up("a"), up("b", silent=59, **alive)), RULES) == Wait(why="bootstrap")
    assert decide(GOAL, snapshot(up("a"), up("b", silent=60, **alive)), RULES) == Replace(node_ids=("b",))
    assert decide(GOAL, snapshot(up("a"), up("b")), RULES) == OpenAttempt(number=1, node_ids=("a", "b"))


def test_a_script_that_failed_beside_a_silent_machine_is_judged_when_the_witness_had_time():
    failed, silent = up("a", part(1, Outcome.FAILED)), up("b", part(1, Outcome.FAILED), silent=1)
    early = during(failed, silent, failed_for=timedelta(seconds=6.9))
    late = replace(early, failed_for=timedelta(seconds=7))
    vouched = during(failed, replace(silent, peer_report=PeerReport.ALIVE), failed_for=timedelta(seconds=1))
    assert isinstance(decide(GOAL, early, RULES), Wait)
    assert decide(GOAL, late, RULES) == CloseAttempt(reason=ExitReason.USER_ERROR)
    assert decide(GOAL, vouched, RULES) == CloseAttempt(reason=ExitReason.USER_ERROR)


def test_a_machine_that_is_believed_dead_is_written_down_before_anything_is_done():
    world = during(up("a", part(1)), up("b", part(1), silent=3, peer_report=PeerReport.DEAD))
    frozen = Interruption(node_id="b", kind=InterruptionKind.FROZEN, attempt=1, noticed_at=NOW)
    assert decide(GOAL, world, RULES) == NoteInterruptions(interruptions=(frozen,))


@pytest.mark.parametrize(
    ("code", "said", "word"),
    [(0, "alive\n", PeerReport.ALIVE), (0, "dead\n", PeerReport.DEAD), (0, "nothing\n", PeerReport.NOTHING),
    (0, "", PeerReport.NOTHING),
     (1, "dead\n", PeerReport.NOTHING), (0, "Traceback …", PeerReport.NOTHING)],
)  # fmt: skip
def test_only_a_clean_answer_of_a_peer_is_a_word(code, said, word):
    assert peer_report_of(code, said) is word
