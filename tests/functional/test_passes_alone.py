"""A job that nobody supervises but single passes of `reconcile`, as a cron or CI schedule makes them.

Each pass is a process of its own: what a decision needs from earlier passes is in the job's state, or nowhere.
"""

from __future__ import annotations

import pytest

from gpucloud.domain.errors import RemoteCommandFailed
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.fakes.fleet_shell import FleetHost
from tests.faults.process import run
from tests.faults.rig import GROUP, JOB, Outside
from tests.faults.strikes import Blow, Strikes

_EVERY_S = 60
_UNDER_WAY = 150
"""The call at which `train` is killed: its attempt has begun."""


def state(outside):
    loaded = JobStore(outside.store, JOB).load()
    assert loaded is not None
    return loaded[0]


def a_pass(outside):
    strikes = Strikes()
    return run(("reconcile", JOB), outside.over(strikes), strikes)


@pytest.fixture
def abandoned(tmp_path):
    """A job whose supervisor was killed when its attempt had just begun."""
    outside = Outside(tmp_path)
    key = tmp_path / "home" / "keys" / "made" / JOB
    key.parent.mkdir(parents=True)
    key.write_text("the cluster's")
    for at in range(_UNDER_WAY, _UNDER_WAY + 400):
        strikes = Strikes(blow=Blow.KILL, at=at)
        run(("train", str(outside.file)), outside.over(strikes), strikes)
        if state(outside).attempt is not None and all(outside.fleet.machine(i).part for i in members(outside)):
            return outside
        assert not state(outside).status.ended
    pytest.fail("no attempt began")


def members(outside):
    attempt = state(outside).attempt
    return [member.node_id for member in attempt.members] if attempt is not None else []


def passes_until_over(outside, most=12):
    for number in range(1, most + 1):
        ended = a_pass(outside)
        if state(outside).status.ended and state(outside).torn_down:
            return number
        assert ended.code in (0, 20), ended.stderr
        outside.pass_by(_EVERY_S)
    pytest.fail(f"not over after {most} passes: {ended.stderr[-600:]}")


def test_a_job_that_only_passes_look_after_trains_to_its_end(abandoned):
    passes_until_over(abandoned)
    assert state(abandoned).exit_reason is ExitReason.SUCCEEDED
    assert not abandoned.cloud.describe(GROUP).alive
    assert abandoned.breaches == []


def test_a_script_that_failed_is_closed_by_passes_alone(abandoned):
    for node_id in members(abandoned):
        abandoned.fleet.machine(node_id).end(Outcome.FAILED)
    assert passes_until_over(abandoned, most=3) <= 3
    assert (state(abandoned).exit_reason, state(abandoned).exit_code) == (ExitReason.USER_ERROR, 20)


def test_what_one_pass_saw_first_the_next_one_counts_from(abandoned):
    first, second = members(abandoned)
    abandoned.fleet.machine(first).end(Outcome.LEFT)
    abandoned.fleet.machine(second).part = None  # its agent says that it runs, and it never ends
    assert a_pass(abandoned).code == 0
    since = state(abandoned).attempts[0].broken_at
    assert since is not None
    abandoned.pass_by(_EVERY_S)
    a_pass(abandoned)
    assert (state(abandoned).attempts[0].broken_at, state(abandoned).attempts[0].ending_reason) == (
        since,
        ExitReason.LOST,
    )


def test_ranks_are_heard_to_their_end_though_whoever_takes_over_cannot_prepare_a_machine(abandoned, monkeypatch):
    _, second = members(abandoned)
    real = FleetHost.sync

    def sync(host, *arguments, **named):
        if host.node.id == second:
            raise RemoteCommandFailed(f"{second}: no space left on device", hint=None)
        return real(host, *arguments, **named)

    monkeypatch.setattr(FleetHost, "sync", sync)
    strikes = Strikes()
    ended = run(("train", str(abandoned.file)), abandoned.over(strikes), strikes)
    assert ended.code == 0, ended.stderr
    assert [one.reason for one in state(abandoned).attempts] == [ExitReason.SUCCEEDED]
