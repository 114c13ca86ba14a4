"""Whose fault it is when a machine could not be prepared."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.domain.node import EndCause, GroupView, NodeState
from gpucloud.usecases.prepare import Preparer
from tests.fakes.clock import JumpingClock
from tests.unit.worlds import NOW, node

TRY_S = 20


class AtOnce:
    """An executor that does it before it answers."""

    def submit(self, work, *arguments):
        done = Future()
        try:
            done.set_result(work(*arguments))
        except NodeError as error:
            done.set_exception(error)
        return done


class Later(AtOnce):
    """One that does what it was given when it is told to."""

    def __init__(self):
        self._given = []

    def submit(self, work, *arguments):
        done = Future()
        self._given.append((done, work, arguments))
        return done

    def run(self):
        for done, work, arguments in self._given:
            done.set_exception(AtOnce.submit(self, work, *arguments).exception())


def preparer(error):
    clock = JumpingClock()

    def host(asked):
        clock.sleep(TRY_S)
        raise error

    world = SimpleNamespace(shell=SimpleNamespace(host=host), clock=clock)
    return Preparer(world=world, watcher=None, pool=AtOnce(), syncs=AtOnce(), data=None, records=None, teller=None)


def failed(error, *nodes):
    """Try to prepare one node after the other, which ends with the error; then the cloud lists them as given."""
    one = preparer(error)
    for number in range(len(nodes)):
        one.see(GroupView(exists=True, size=2, armed_until=None, nodes=(node(f"n{number}"),)))
        one.start(f"n{number}", None)
        one.world.clock.sleep(1)
    one.see(GroupView(exists=True, size=2, armed_until=None, nodes=nodes))
    return one.failures


def lost(number, cause):
    return node(f"n{number}", state=NodeState.TERMINATED, ended_at=NOW, end_cause=cause)


@pytest.mark.parametrize("cause", [EndCause.INTERRUPTED, EndCause.CRASH, EndCause.SCHEDULE])
def test_machines_that_the_cloud_took_while_they_were_prepared_are_nobodys_failure(cause):
    assert failed(HostUnreachable("gone"), *(lost(number, cause) for number in range(9))) == 0


@pytest.mark.parametrize(("silent", "failures"), [(1, 0), (2, 0), (3, 1), (5, 1), (6, 2)])
def test_of_living_machines_that_did_not_answer_one_after_the_other_three_make_one_failure(silent, failures):
    assert failed(HostUnreachable("silent"), *(node(f"n{number}") for number in range(silent))) == failures


def test_machines_that_a_cut_line_silences_together_are_no_failure():
    one = preparer(HostUnreachable("silent"))
    one.pool = Later()
    one.see(GroupView(exists=True, size=8, armed_until=None, nodes=tuple(node(f"n{number}") for number in range(8))))
    for number in range(8):
        one.start(f"n{number}", None)
    one.pool.run()
    assert len([number for number in range(8) if one.unreachable(f"n{number}")]) == 8
    assert one.failures == 0


def test_a_machine_that_is_tried_again_and_again_is_one_that_did_not_answer():
    one = preparer(HostUnreachable("silent"))
    one.teller = SimpleNamespace(forget=lambda _: None)
    one.see(GroupView(exists=True, size=1, armed_until=None, nodes=(node("n0"),)))
    for _ in range(9):
        one.forget("n0")
        one.start("n0", None)
    assert (one.silences("n0"), one.failures) == (9, 0)


def test_a_machine_that_answers_and_cannot_be_prepared_is_a_failure_at_once():
    assert failed(NodeError("no pip"), node("n0"), node("n1")) == 2
