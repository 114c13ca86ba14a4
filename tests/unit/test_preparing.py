"""Whose fault it is when a machine could not be prepared."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from gpucloud.domain.errors import HostUnreachable, NodeError
from gpucloud.domain.node.node import EndCause, GroupView, NodeState
from gpucloud.domain.supervision.quarantine import BootstrapTry, Prepared, failures, noted, silences
from gpucloud.domain.supervision.strays import with_intervals
from gpucloud.domain.supervision.transitions import since
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.usecases.supervise.prepare import Prepared as Ready
from tests.fakes.clock import JumpingClock
from tests.unit.worlds import NOW, node, snapshot, state, up

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


def bootstrapper(error):
    clock = JumpingClock()

    def host(asked):
        clock.sleep(TRY_S)
        raise error

    world = SimpleNamespace(shell=SimpleNamespace(host=host), clock=clock)
    return Bootstrapper(
        services=world, watcher=None, pool=AtOnce(), syncs=AtOnce(), data=None, records=None, agent_writer=None
    )


def failed(error, *nodes):
    """Try to prepare one node after the other, which ends with the error; then the cloud lists them as given."""
    one = bootstrapper(error)
    for number in range(len(nodes)):
        one.see(GroupView(exists=True, size=2, armed_until=None, nodes=(node(f"n{number}"),)))
        one.start(f"n{number}", None)
        one.services.clock.sleep(1)
    return failures(noted(state(nodes=with_intervals((), nodes)), one.tries))


def lost(number, cause):
    return node(f"n{number}", state=NodeState.TERMINATED, ended_at=NOW, end_cause=cause)


@pytest.mark.parametrize("cause", [EndCause.INTERRUPTED, EndCause.CRASH, EndCause.SCHEDULE])
def test_machines_that_the_cloud_took_while_they_were_prepared_are_nobodys_failure(cause):
    assert failed(HostUnreachable("gone"), *(lost(number, cause) for number in range(9))) == 0


@pytest.mark.parametrize(("silent", "failures"), [(1, 0), (2, 0), (3, 1), (5, 1), (6, 2)])
def test_of_living_machines_that_did_not_answer_one_after_the_other_three_make_one_failure(silent, failures):
    assert failed(HostUnreachable("silent"), *(node(f"n{number}") for number in range(silent))) == failures


def test_machines_that_a_cut_line_silences_together_are_no_failure():
    one = bootstrapper(HostUnreachable("silent"))
    one.pool = Later()
    one.see(GroupView(exists=True, size=8, armed_until=None, nodes=tuple(node(f"n{number}") for number in range(8))))
    for number in range(8):
        one.start(f"n{number}", None)
    one.pool.run()
    assert len([number for number in range(8) if one.unreachable(f"n{number}")]) == 8
    assert failures(noted(state(), one.tries)) == 0


def test_what_is_under_way_on_a_machine_is_waited_for_before_it_is_cleared_though_not_for_long():
    one = bootstrapper(NodeError("no pip"))
    one.pool, one.agent_writer = Later(), SimpleNamespace(busy=False)
    one.see(GroupView(exists=True, size=1, armed_until=None, nodes=(node("n0"),)))
    one.start("n0", None)
    since = one.services.clock.now()
    one.settle()
    assert timedelta(seconds=15) <= one.services.clock.now() - since < timedelta(seconds=16)
    one.pool.run()
    since = one.services.clock.now()
    one.settle()
    assert one.services.clock.now() == since


def test_a_machine_that_is_tried_again_and_again_is_one_that_did_not_answer():
    one = bootstrapper(HostUnreachable("silent"))
    one.agent_writer = SimpleNamespace(forget=lambda _: None)
    one.see(GroupView(exists=True, size=1, armed_until=None, nodes=(node("n0"),)))
    for _ in range(9):
        one.forget("n0")
        one.start("n0", None)
    written = noted(state(), one.tries)
    assert (silences(written, "n0"), failures(written)) == (9, 0)


def test_a_machine_that_was_given_back_while_it_was_prepared_did_not_fail():
    """Its bill said that it could not be made ready, and two of them would have ended the job."""
    given_back = lost(0, EndCause.CHOICE)
    before = state(nodes=with_intervals((), (given_back, node("n1"))))
    tries = [tried("n0", Prepared.FAILED, 0), tried("n1", Prepared.FAILED, 0)]
    written = noted(before, tries, {"n0"})
    assert [one.unprepared_at is None for one in written.nodes] == [True, False]
    assert [one.node_id for one in written.failed_bootstraps] == ["n1"]


def test_a_machine_that_answers_and_cannot_be_prepared_is_a_failure_at_once():
    assert failed(NodeError("no pip"), node("n0"), node("n1")) == 2


def tried(node_id, how, at, took=10):
    begun = NOW + timedelta(minutes=at)
    return BootstrapTry(node_id=node_id, begun_at=begun, over_at=begun + timedelta(seconds=took), how=how)


@pytest.fixture
def four():
    return state(nodes=with_intervals((), tuple(node(f"n{number}") for number in range(4))))


def test_machines_that_fail_beside_one_another_are_one_failure(four):
    outage = [tried(f"n{number}", Prepared.FAILED, 0, took=60) for number in range(4)]
    assert failures(noted(four, outage)) == 1


def test_a_failure_of_long_ago_is_forgotten_once_a_new_machine_was_ready(four):
    days = [tried("n0", Prepared.FAILED, 0), tried("n1", Prepared.READY, 2), tried("n2", Prepared.FAILED, 7200)]
    assert failures(noted(four, days)) == 1


def test_a_machine_that_each_supervisor_prepares_again_says_nothing_of_those_that_fail(four):
    """As in a schedule of single passes: one machine is fine each time, and each new one beside it fails."""
    written = noted(four, [tried("n0", Prepared.READY, 0)])
    for number, at in ((1, 5), (2, 10)):
        written = noted(written, [tried("n0", Prepared.READY, at), tried(f"n{number}", Prepared.FAILED, at)])
    assert failures(written) == 2


def test_since_when_a_machine_cannot_be_prepared_is_written_down_until_it_has_heard_of_us(four):
    written = noted(four, [tried("n0", Prepared.FAILED, 1), tried("n0", Prepared.FAILED, 9)])
    assert written.nodes[0].unprepared_at == NOW + timedelta(minutes=1)
    ready = noted(written, [tried("n0", Prepared.READY, 10)])
    deaf = up("n0")
    assert since(ready, snapshot(deaf, state=ready), 4).nodes[0].unprepared_at == NOW + timedelta(minutes=1)
    assert since(ready, snapshot(replace(deaf, heard=True), state=ready), 4).nodes[0].unprepared_at is None


def test_a_part_of_a_running_attempt_is_told_its_own_code_and_not_what_was_edited_since():
    """A supervisor died when it had told one machine; the next one has edited code, and tells the other."""
    old, edited = "a" * 64, "b" * 64
    one = bootstrapper(None)
    one.see(GroupView(exists=True, size=2, armed_until=None, nodes=(node("n0"), node("n1"))))
    facts = SimpleNamespace(python="python3", package_path="package.zip", root="/home/me/.gpucloud", image=None)
    for node_id in ("n0", "n1"):
        done = Future()
        done.set_result(Ready(bootstrapped=facts, code=f"/home/me/.gpucloud/code/{edited}"))
        one._work[node_id] = done
    assert one._place("n1", "n0", old).code == f"/home/me/.gpucloud/code/{old}"
    assert one._place("n1", "n0", "../../.ssh").code == f"/home/me/.gpucloud/code/{edited}"
