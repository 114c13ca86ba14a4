"""A job that drives itself: what its machines may decide, what they go by, and which jobs can."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpucloud.adapters.transfer.localfiles import HashCache, read_tree
from gpucloud.adapters.transfer.node_trees import tree
from gpucloud.adapters.transfer.outputs import StoredOutputs, bring_stored_home
from gpucloud.adapters.transfer.sync import whole_code
from gpucloud.agent.drive import controller as module
from gpucloud.agent.drive.controller import Controller
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import GpucloudError, LandingRefused, LeaseHeld, ProvisionError, StoreError
from gpucloud.domain.job.spec import CheckpointPolicy, Cloud, IdlePolicy, Job, Market, MarketPolicy, SshChoices
from gpucloud.domain.money.ledger import Rates, Terms
from gpucloud.domain.node.bootstrap.facts import Facts
from gpucloud.domain.node.bootstrap.steps import CONTROLLER
from gpucloud.domain.node.bootstrap.wanted import ControllerWanted, Wanted
from gpucloud.domain.node.node import EndCause, GroupView, Notice, PeerReport
from gpucloud.domain.node.status import Outcome, Stop
from gpucloud.domain.state.order import Until
from gpucloud.domain.state.state import ExitReason, JobStatus, UsageInterval
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import (
    Arm,
    BringHome,
    CloseAttempt,
    CoolDown,
    Done,
    EndAttempt,
    Finish,
    Move,
    OpenAttempt,
    Pause,
    Prepare,
    Provision,
    Relieve,
    Replace,
    Resize,
    StayOn,
    TearDown,
    Wait,
)
from gpucloud.domain.supervision.reconcile import TIME_IS_OVER, decide
from gpucloud.domain.supervision.self_driving import ORDER_VERSION, DriveOrder, order_key, parse_order, unable, unkept
from gpucloud.domain.supervision.snapshot import DriveTrial, Goal, Homecoming, Readiness, Rules
from gpucloud.domain.supervision.strays import as_listed
from gpucloud.ports import Brought, ClusterSpec
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.services import OwnGroup, OwnProvisioner
from gpucloud.usecases.supervise.act import Announcements
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.fakes.node_group import FakeNodeGroup
from tests.unit.test_reconcile import interruption, running, worlds
from tests.unit.worlds import LATER, NOW, POOL, gone, node, opened, part, put_job, refusal, snapshot, state, up

GOAL = Goal(nodes=2, budget_usd=Decimal(1), self_driving=True)
RULES = Rules()
JOB = Job(
    name="digits",
    run="train.py",
    budget_usd=Decimal("1.5"),
    source=Path("/home/me/digits.yaml"),
    code=Path("/home/me/digits"),
    ssh=SshChoices(key=Path("/home/me/.ssh/id")),
    checkpoint=CheckpointPolicy(every=timedelta(minutes=1.5)),
    deadline=timedelta(hours=12),
    idle=IdlePolicy(below=30, lasting=timedelta(minutes=15)),
    data=(("s3://sets/imagenet", "/data"),),
)
ORDER = DriveOrder(
    version=ORDER_VERSION,
    name="digits-2",
    cluster="gpucloud-digits-2",
    group="gpucloud-digits-2",
    job=JOB,
    store="file:///store",
    region="us-east-2",
    tree="jobs/digits-2/code/ab",
    tree_name="ab",
    package="clusters/gpucloud-digits-2/gpucloud-cd.zip",
    package_sha256="cd",
    rules=RULES,
    terms=Terms(),
    period_s=0.1,
    flush_s=1.0,
    node_python="python3",
    on_demand=(("g4dn.xlarge", Decimal("0.579")),),
    key=b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
)


# What a machine may decide


def test_no_machine_buys_time_or_looks_for_machines_elsewhere_in_any_small_world():
    count = 0
    for name, world in worlds(beside=("ready", "noticed", "interrupted")):
        action = decide(replace(GOAL, idle=JOB.idle), world, RULES)
        later = isinstance(action, Arm) and (world.group.armed_until is None or action.until > world.group.armed_until)
        assert not later, name
        assert not isinstance(action, Provision | Move | CoolDown | TearDown), name
        count += 1
    assert count == 5 * 20 * 3 * 4 * 11


def test_paid_time_that_is_over_leaves_the_job_waiting_and_says_how_it_goes_on():
    soon = snapshot(armed=NOW + timedelta(seconds=59), group_size=2)

    assert decide(GOAL, soon, RULES) == Pause(
        message="unattended time is over; `gpucloud train digits` or `reconcile` goes on"
    )
    assert decide(GOAL, snapshot(up("a"), up("b"), armed=NOW + timedelta(seconds=60)), RULES) == OpenAttempt(
        number=1, node_ids=("a", "b")
    )


def test_results_are_put_into_the_store_before_a_machine_leaves_the_job_waiting():
    ran = state(attempts=(opened("a", "b", reason=ExitReason.INTERRUPTED),))
    over = snapshot(up("a"), up("b"), armed=NOW + timedelta(seconds=59), state=ran)

    assert decide(GOAL, replace(over, homecoming=Homecoming.NO), RULES) == BringHome(
        message=TIME_IS_OVER.format(job="digits")
    )
    at_most = "no longer than 10 min without any of them, and no later than 12:00:59 UTC"
    why = f"waiting for the outputs while they come, {at_most}, when the machines shut themselves off"
    assert decide(GOAL, replace(over, homecoming=Homecoming.ON_THE_WAY), RULES) == Wait(why=why)
    assert decide(GOAL, over, RULES) == Pause(message=TIME_IS_OVER.format(job="digits"))
    came = state(attempts=(opened("a", "b", reason=ExitReason.INTERRUPTED, outputs_came=True),))
    assert decide(GOAL, replace(over, state=came), RULES) == Pause(
        message="unattended time is over; `gpucloud train digits` or `reconcile` goes on;"
        " its results so far are in its store, and come home when it ends"
    )


def test_a_script_with_results_is_asked_earlier_where_nobody_prolongs_the_time():
    rules = replace(
        RULES, prepaid_rule=replace(RULES.prepaid_rule, horizon=timedelta(hours=8), least=timedelta(minutes=10))
    )
    writes = replace(GOAL, has_outputs=True)

    def wanted(seconds, goal=writes, leaves_s=20.0):
        node = up("a", part(1))
        node = replace(node, status=replace(node.status, leaves_s=leaves_s))
        return decide(goal, running(node, up("b", part(1)), armed=NOW + timedelta(seconds=seconds)), rules)

    asked = EndAttempt(how=Stop.SAVE, reason=ExitReason.INTERRUPTED)
    assert (wanted(139), wanted(140)) == (asked, Wait(why="running"))
    assert (wanted(119, leaves_s=None), wanted(121, leaves_s=None)) == (asked, Wait(why="running"))
    mute = replace(writes, saves_nothing=True)  # it would not hear that it is to leave
    why = "its script saves nothing, and is ended in time for its outputs to come home"
    ends = EndAttempt(how=Stop.KILL, reason=ExitReason.INTERRUPTED, message=why)
    assert (wanted(119, mute), wanted(121, mute)) == (ends, Wait(why="running"))
    assert wanted(139, replace(writes, has_outputs=False)) == Wait(why="running")
    assert not isinstance(wanted(139, replace(writes, self_driving=False)), EndAttempt)
    assert wanted(601, leaves_s=3600.0) == Wait(why="running")  # by when there is a start left, none is asked


def test_a_script_that_does_not_hear_of_the_end_leaves_its_results_half_of_their_time_unless_it_saves():
    rules = replace(
        RULES, prepaid_rule=replace(RULES.prepaid_rule, horizon=timedelta(hours=8), least=timedelta(minutes=10))
    )
    writes = replace(GOAL, has_outputs=True)

    def wanted(asked, left, goal=writes, leaves_s=None, phase="train"):
        """What is done so many seconds after the order, with so many left."""
        node = up("a", part(1, step=7, phase=phase))
        node = replace(node, status=replace(node.status, leaves_s=leaves_s))
        ends = {"ending_reason": ExitReason.INTERRUPTED, "ending_at": NOW - timedelta(seconds=asked)}
        world = running(node, up("b", part(1)), armed=NOW + timedelta(seconds=left))
        ending = replace(world.state.attempts[-1], ordered=Stop.SAVE, **ends)
        return decide(goal, replace(world, state=replace(world.state, attempts=(ending,))), rules)

    why = "what the script wrote needs the time that is left, and it did not leave in"
    killed = EndAttempt(how=Stop.KILL, reason=ExitReason.INTERRUPTED, message=f"{why} 1 min")
    assert (wanted(59, 60), wanted(60, 59)) == (Wait(why="running"), killed)
    assert wanted(70, 49, phase="save") == Wait(why="running")
    assert wanted(70, 49, replace(writes, saves_alone=True)) == Wait(why="running")  # its wrapper ends it
    assert wanted(99, 120, leaves_s=100.0) == Wait(why="running")  # as long as a step and a save of it take
    assert wanted(100, 119, leaves_s=100.0) == replace(killed, message=f"{why} 1 min 40 s")
    assert wanted(60, 59, replace(writes, self_driving=False)) != killed


def test_ranks_that_saved_at_the_end_of_the_paid_time_are_interrupted_while_there_is_budget_and_else_at_its_end():
    left = (up("a", part(1, Outcome.LEFT)), up("b", part(1, Outcome.LEFT)))
    with_budget = running(*left, payable_until=LATER + timedelta(hours=8))
    without = running(*left, payable_until=None)

    assert decide(GOAL, with_budget, RULES) == CloseAttempt(reason=ExitReason.INTERRUPTED)
    assert decide(GOAL, without, RULES) == CloseAttempt(reason=ExitReason.BUDGET)
    assert decide(GOAL, snapshot(payable_until=None), RULES) == Finish(reason=ExitReason.BUDGET)


def test_a_refusal_is_waited_out_because_the_group_refills_itself():
    world = snapshot(up("a"), refusals=(refusal(),), short_for=timedelta(hours=1))
    assert decide(GOAL, world, RULES) == Wait(why="bootstrap")


def test_a_level_that_was_lowered_is_set_again():
    assert decide(GOAL, snapshot(group_size=0), RULES) == Resize(size=2)


def test_a_machine_that_is_frozen_is_replaced():
    world = snapshot(up("a"), up("b", silent=9, peer_report=PeerReport.DEAD))
    assert decide(GOAL, world, RULES) == Replace(node_ids=("b",))


def test_another_machine_is_asked_for_early_only_within_the_time_that_is_armed():
    nodes = (up("a", part(1)), up("b", part(1), notice=True))
    paid = running(*nodes, interruptions=(interruption("b"),))
    dear = running(*nodes, interruptions=(interruption("b"),), payable_with_another=LATER - timedelta(minutes=9))

    assert decide(GOAL, paid, RULES) == Relieve(node_id="b")
    assert decide(GOAL, dear, RULES) == Wait(why="running")
    assert decide(replace(GOAL, self_driving=False), dear, RULES) == Arm(until=LATER - timedelta(minutes=9))


def test_a_shut_off_that_promises_too_much_is_moved_closer_and_one_that_promises_too_little_stays():
    nodes = (up("a", part(1)), up("b", part(1)))
    sooner, later = LATER - timedelta(minutes=1), LATER + timedelta(hours=7)
    rules = replace(RULES, prepaid_rule=replace(RULES.prepaid_rule, horizon=timedelta(hours=8)))

    assert decide(GOAL, running(*nodes, payable_until=sooner), rules) == Arm(until=sooner)
    assert decide(GOAL, running(*nodes, payable_until=later), rules) == Wait(why="running")
    assert decide(replace(GOAL, self_driving=False), running(*nodes, payable_until=later), rules) == Arm(until=later)


def test_a_machine_leaves_the_teardown_of_an_ended_job_to_whoever_comes_from_outside():
    ended = snapshot(up("a"), state=state(status=JobStatus.SUCCEEDED, exit_reason=ExitReason.SUCCEEDED))

    assert decide(GOAL, ended, RULES) == Done()
    assert decide(replace(GOAL, self_driving=False), ended, RULES) == TearDown()


# When nobody outside is needed any more

ABLE = DriveTrial(number=3, refused=None)
NOT_ALLOWED = DriveTrial(number=3, refused="AccessDenied: s3:PutObject")


def launched(*nodes, began=0.0, **changes):
    began_at = NOW - timedelta(minutes=began)
    goal = Goal(nodes=2, budget_usd=Decimal(1), number=3, until=Until.LAUNCHED, began_at=began_at)
    world = snapshot(*nodes, **changes)
    return decide(goal, replace(world, state=replace(world.state, order_number=3)), RULES)


def test_a_job_goes_by_itself_when_its_new_machines_are_listed_behind_a_shut_off_and_one_has_shown_its_right():
    new = {"launched_at": NOW, "readiness": Readiness.NO}

    assert launched(up("a", trial=ABLE, **new), up("b", **new)) == Done()
    assert launched(up("a", **new)) == Prepare(node_ids=("a",))
    assert launched(armed=None, group_size=0) == Arm(until=LATER)
    assert launched(group_size=0) == Resize(size=2)


def test_a_machine_from_before_has_its_driver_only_when_it_was_prepared():
    assert launched(up("a", trial=ABLE), up("b", readiness=Readiness.NO)) == Prepare(node_ids=("b",))
    assert launched(up("a"), up("b", trial=ABLE)) == Done()


@pytest.mark.parametrize(
    "trial", [None, DriveTrial(number=2, refused=None), NOT_ALLOWED], ids=["nothing", "an older order", "not yet"]
)
def test_nobody_leaves_before_a_machine_has_shown_that_it_can_drive(trial):
    assert not isinstance(launched(up("a", trial=trial), up("b")), Done | StayOn)


def test_who_was_to_leave_stays_once_a_right_is_still_refused_after_the_time_in_which_the_cloud_gives_it():
    early = launched(up("a", trial=NOT_ALLOWED), up("b"), began=1.9)
    assert not isinstance(early, StayOn)
    assert launched(up("a"), up("b", trial=NOT_ALLOWED), began=2).why == (
        "b may not do what driving the job needs: AccessDenied: s3:PutObject"
    )


def test_one_machine_that_can_drive_is_enough_whatever_another_says():
    assert launched(up("a", trial=NOT_ALLOWED), up("b", trial=ABLE), began=9) == Done()


def test_who_was_to_leave_stays_once_no_machine_has_shown_anything_for_as_long_as_the_youngest_may_take():
    def after(minutes):
        ago = NOW - timedelta(minutes=minutes)
        return launched(up("a", launched_at=ago), up("b", launched_at=ago), began=minutes)

    assert not isinstance(after(19), StayOn)
    assert "within 20 min" in after(20).why
    young = up("b", launched_at=NOW - timedelta(minutes=5))
    assert not isinstance(launched(up("a"), young, began=30), StayOn)


def test_what_a_machine_says_of_its_right_moves_no_terminal():
    trial = DriveTrial(number=3, refused="\x1b]0;owned\x07no")
    assert launched(up("a", trial=trial), up("b"), began=5).why == "a may not do what driving the job needs: no"


def test_a_job_that_is_to_drive_itself_later_is_said_to_lack_the_right_once():
    """Who watches `train --unattended` may close the lid at any time."""
    told = Announcements()
    cannot = snapshot(up("a", trial=replace(NOT_ALLOWED, number=0)), up("b"))
    lines = [told.news(Wait(why="x"), cannot, RULES.limits) for _ in range(2)]
    assert lines == [("a could not drive the job without this process: AccessDenied: s3:PutObject",), ()]


class Refusing(MemoryStore):
    """A store in which the machine's role may write what nodes write alone."""

    def put(self, key, data, **conditions):
        if not key.startswith("jobs/digits/status/"):
            raise StoreError(f"AccessDenied: s3:PutObject on {key}")
        return super().put(key, data, **conditions)


@pytest.mark.parametrize("may", [True, False])
def test_a_machine_says_whether_it_may_drive_the_job_and_changes_nothing_by_trying(may):
    clock = JumpingClock(NOW)
    store = MemoryStore(clock)
    jobs = JobStore(store, "digits")
    put_job(jobs, number=4)
    before = store.get("jobs/digits/state.json")
    if not may:
        store.__class__ = Refusing
    groups = FakeNodeGroup(clock)
    machine = SimpleNamespace(store=store, clock=clock, group=lambda _: groups)
    controller = Controller(machine=machine, node="i-1", notice=lambda: None)
    for _ in range(2):
        controller._try(ORDER, JobStore(store, "digits", on_machine=True), state())
    trial = jobs.trial("i-1")
    assert trial.number == 4
    assert (trial.refused is None) is may
    assert may or "s3:PutObject on jobs/digits/state.json" in trial.refused
    assert store.get("jobs/digits/state.json") == before


ENDED = {
    "status": JobStatus.SUCCEEDED,
    "exit_reason": ExitReason.SUCCEEDED,
    "exit_code": ExitReason.SUCCEEDED.exit_code,
}


@pytest.fixture
def controller():
    """A machine's driver beside a job that has ended, and the jobs for which it ended the group."""
    clock, ended = JumpingClock(NOW), []
    jobs = JobStore(MemoryStore(clock), "digits-2")
    put_job(jobs, state(job="digits-2", drives_itself=True, **ENDED))
    machine = SimpleNamespace(store=jobs.store, clock=clock, end_group=lambda order, _: ended.append(order.name))
    return Controller(machine=machine, node="i-1", notice=lambda: None), jobs, ended


def test_a_machine_ends_the_group_of_a_job_that_has_ended_and_keeps_no_lease(controller):
    controller, jobs, ended = controller
    assert controller._is_over(ORDER)
    assert (ended, jobs.load()[0].owner) == (["digits-2"], None)


def test_no_machine_ends_the_group_of_a_job_that_somebody_has_taken_or_goes_on_with(controller):
    """Between its look and its word to the group, a start from outside goes on with the job on new machines."""
    controller, jobs, ended = controller
    with take(jobs, JumpingClock(NOW)) as lease:
        with pytest.raises(LeaseHeld):
            controller._is_over(ORDER)
        lease.write(transitions.reopen(lease.state))
    assert not controller._end(ORDER, jobs)
    assert ended == []


def test_a_machine_that_stood_still_before_its_last_word_ends_nothing_of_whoever_followed_it(controller, monkeypatch):
    controller, jobs, ended = controller
    up, newest = iter([0.0, 60.0]), Orders.newest
    monkeypatch.setattr(module, "take", partial(take, uptime=lambda: next(up, 60.0)))

    def stands_still(self):
        controller.machine.clock.sleep(60)
        take(jobs, controller.machine.clock)
        return newest(self)

    monkeypatch.setattr(Orders, "newest", stands_still)
    with pytest.raises(LeaseHeld):
        controller._end(ORDER, jobs)
    assert ended == []


@pytest.fixture
def pausing(controller, monkeypatch):
    """That driver where its paid time comes to its end: its session leaves the job waiting for a command."""
    controller, jobs, ended = controller
    current, stored = jobs.load()
    waiting = replace(current, status=JobStatus.WAITING, exit_reason=None, exit_code=None, order_number=1)
    jobs.replace(waiting, stored.version)

    def drive(self, order):
        with take(jobs, self.machine.clock, node=self.node) as lease:
            lease.write(replace(lease.state, message=TIME_IS_OVER.format(job=order.name)))
        return lease.state

    monkeypatch.setattr(Controller, "_drive", drive)
    return controller, jobs, ended


@pytest.mark.parametrize("taken", [False, True])
def test_a_machine_that_is_being_taken_leaves_the_job_to_another_and_drives_it_on_where_none_has_it(
    pausing, monkeypatch, taken
):
    controller, jobs, ended = pausing
    controller.machine.period_s = lambda _: 5.0
    controller.notice = lambda: Notice(action="terminate", at=LATER)
    gang = replace(ORDER, job=replace(ORDER.job, resources=replace(ORDER.job.resources, nodes=2)))
    assert not controller._is_over(gang)
    with pytest.raises(module.NodeInterrupted):
        controller._asked(gang)
    monkeypatch.setattr(Controller, "_try", lambda *_: None)
    other = take(jobs, controller.machine.clock, node="i-2") if taken else None
    controller.machine.clock.sleep(10.0)
    if other is not None:
        other.renew()
    assert controller._is_over(gang) is not taken
    assert (ended, controller._asked(gang)) == ([] if taken else ["digits-2"], None)


def test_that_unattended_time_is_over_is_told_no_more_once_somebody_goes_on():
    over = TIME_IS_OVER.format(job="digits")
    ended = {"status": JobStatus.FAILED, "exit_reason": ExitReason.LOST, "exit_code": 21}

    assert transitions.record(snapshot(state=state(message=over))).message is None
    assert transitions.record(snapshot(state=state(message="5 in a row", **ended))).message == "5 in a row"
    told = state(message="no step for 70 s", attempts=(opened("a", "b"),))
    assert transitions.record(snapshot(up("a"), up("b"), state=told)).message == "no step for 70 s"


def test_a_machine_ends_the_group_where_the_job_waits_for_a_command(pausing):
    controller, _, ended = pausing
    assert controller._is_over(ORDER)
    assert ended == ["digits-2"]


@pytest.mark.parametrize("meanwhile", ["taken", "ordered"])
def test_a_job_that_waited_and_goes_on_by_a_command_keeps_its_group(pausing, monkeypatch, meanwhile):
    controller, jobs, ended = pausing
    drive = Controller._drive

    def between(self, order):
        state = drive(self, order)
        if meanwhile == "taken":
            with take(jobs, self.machine.clock):
                pass
        else:
            orders = Orders(jobs=jobs, clock=self.machine.clock)
            orders.change(lambda one: replace(one, budget_usd=2 * one.budget_usd))
        return state

    monkeypatch.setattr(Controller, "_drive", between)
    assert not controller._is_over(ORDER)
    assert ended == []


def test_what_is_no_trial_shows_nothing():
    store = MemoryStore(JumpingClock(NOW))
    store.put("jobs/digits/status/driving/i-1.json", b'{"number": true}')
    assert JobStore(store, "digits").trial("i-1") is None
    assert JobStore(store, "digits").trial("i-2") is None


def test_a_job_is_left_alone_only_when_the_time_that_was_asked_for_is_armed():
    nodes = (up("a", part(1), trial=replace(ABLE, number=0)), up("b", part(1)))
    goal = Goal(nodes=2, budget_usd=Decimal(1), until=Until.LAUNCHED, began_at=NOW)
    rules = replace(RULES, prepaid_rule=replace(RULES.prepaid_rule, horizon=timedelta(hours=8)))
    later = NOW + timedelta(hours=8)

    assert decide(goal, running(*nodes, payable_until=later), rules) == Arm(until=later)
    assert decide(goal, running(*nodes, armed=later, payable_until=later), rules) == Done()


# The order


def test_an_order_arrives_as_it_was_written():
    assert parse_order(to_json(ORDER)) == ORDER
    assert order_key("gpucloud-digits-2") == "clusters/gpucloud-digits-2/drive.json"


def test_an_order_shows_no_key_to_who_prints_it():
    assert "PRIVATE KEY" not in repr(ORDER)


def test_an_order_of_another_version_is_refused():
    with pytest.raises(Malformed, match="version 4"):
        parse_order(to_json(replace(ORDER, version=4)))


@pytest.mark.parametrize(
    "changes",
    [
        {"period_s": float("nan")},
        {"period_s": 0.0},
        {"period_s": float("inf")},
        {"flush_s": -1.0},
        {"flush_s": 1e300},
        {"on_demand": (("g4dn.xlarge", Decimal("-0.01")),)},
        {"terms": Terms(rates=(Rates(region="r", address_usd_per_hour=Decimal(-1)),))},
        {"terms": Terms(disk_gib=-1)},
    ],
)
def test_an_order_that_no_user_can_have_written_is_refused(changes):
    with pytest.raises(Malformed):
        parse_order(to_json(replace(ORDER, **changes)))


@pytest.mark.parametrize("written", ['"NaN"', '"Infinity"', '"1E+999999"', '"' + "9" * 5000 + '"', "true", "null"])
def test_a_price_of_an_order_is_a_sum(written):
    with pytest.raises(Malformed):
        parse_order(to_json(ORDER).replace('"0.579"', written))


def test_spans_and_paths_are_read_strictly():
    assert to_json(IdlePolicy(below=1, lasting=timedelta(seconds=1.5))) == '{"below":1,"lasting":1500000}'
    with pytest.raises(Malformed, match="lasting: expected microseconds"):
        from_json(IdlePolicy, '{"below":1,"lasting":1.5}')
    with pytest.raises(Malformed, match="key: expected a path"):
        from_json(SshChoices, '{"key":7}')


def test_an_order_in_a_folder_is_for_its_owner_only(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    store.put("clusters/c/drive.json", b"{}", private=True)
    store.put("clusters/c/drive.json", b"{1}", private=True)
    assert (tmp_path / "store" / "clusters" / "c" / "drive.json").stat().st_mode & 0o777 == 0o600


SECRET = "secrets are not in the store, and a later machine needs HF_TOKEN"


@pytest.mark.parametrize(
    ("changes", "store", "fits", "why"),
    [
        ({}, "s3://bucket", True, None),
        ({"cloud": Cloud.SSH}, "/store", True, "own hosts are not refilled by any cloud"),
        ({"cloud": Cloud.LOCAL}, "s3://bucket", True, "machines of the embedded fleet have no credentials for S3"),
        ({"secrets": ("HF_TOKEN",)}, "s3://bucket", True, SECRET),
        ({"data": (("/home/me/set", "/data"),)}, "s3://bucket", True, "data: /home/me/set lies on this machine"),
        ({}, "s3://bucket", False, "the code is larger than 64 MiB"),
    ],
)  # fmt: skip
def test_a_job_that_needs_the_callers_machine_cannot_drive_itself(changes, store, fits, why):
    found = unable(replace(replace(JOB, cloud=Cloud.AWS), **changes), store, code_fits=fits)
    assert (found and found.why) == why
    assert found is None or found.hint


BY_TOMORROW = replace(
    JOB, cloud=Cloud.AWS, deadline=timedelta(hours=12), resources=replace(JOB.resources, market=MarketPolicy.AUTO)
)


@pytest.mark.parametrize(
    ("job", "market", "says"),
    [
        (BY_TOMORROW, Market.SPOT, True),
        (BY_TOMORROW, Market.ON_DEMAND, False),  # what it has is what keeps a deadline
        (replace(BY_TOMORROW, deadline=None), Market.SPOT, False),
        (replace(BY_TOMORROW, resources=replace(JOB.resources, market=MarketPolicy.SPOT)), Market.SPOT, False),
    ],
)
def test_it_is_said_that_machines_change_over_to_none_on_demand_for_a_deadline(job, market, says):
    found = unkept(job, market)
    assert (found is not None and "for its deadline of 12 h: it keeps spot machines, and may be late" in found) is says


def test_the_code_of_a_machine_is_the_tree_that_was_sent(tmp_path):
    code = tmp_path / "code"
    (code / "deep").mkdir(parents=True)
    (code / "train.py").write_text("print(1)\n")
    (code / "run.sh").write_text("true\n")
    (code / "run.sh").chmod(0o755)
    (code / "deep" / "link").symlink_to("../train.py")
    (code / ".gitignore").write_text("*.log\n")
    (code / "old.log").write_text("not sent\n")
    whole = whole_code(code, limit=1 << 20)
    name, request = whole.sha256, whole.packed
    stored = tmp_path / "request"
    stored.write_bytes(request)
    with stored.open("rb") as given:
        tree(tmp_path / "node", name, given)
    arrived = tmp_path / "node" / name

    assert read_tree(arrived, HashCache(None, arrived)).sha256 == name


# The driver's step


PLACE = ControllerWanted(store="/store", order="clusters/c/drive.json")
WANTED = Wanted(
    package="ab", code="", setup=None, setup_digest="", env=(), torchrun=False, gpus=1, asks_for_gpus=False,
    controller=PLACE,
)  # fmt: skip
FACTS = Facts(
    python="/usr/bin/python3", version=(3, 11, 0), torch=None, root="/home/me/.gpucloud", package="ab",
    free_bytes=1 << 40, cpus=2, time=NOW, boot_id="b", gpus=None, gpu_fault=None, agent_package="ab",
    agent_busy=False, layer=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("runs", "controller", "why"),
    [
        (None, PLACE, "no controller runs"),
        ("cd", PLACE, "the controller runs another version"),
        ("ab", PLACE, None),
        ("ab", None, None),
        (None, None, None),
    ],
)
def test_a_driver_runs_where_the_job_drives_itself(runs, controller, why):
    facts, wanted = replace(FACTS, controller_package=runs), replace(WANTED, controller=controller)
    assert CONTROLLER.needed(facts, wanted) == why


def test_a_driver_is_started_by_the_package_and_told_where_its_order_is():
    (command,) = CONTROLLER.commands(FACTS, WANTED)
    assert command.argv == (
        *("/usr/bin/python3", "-I", "/home/me/.gpucloud/lib/gpucloud-ab.zip"),
        *("drive", "--root", "/home/me/.gpucloud"),
    )
    assert command.stdin == b'{"store":"/store","order":"clusters/c/drive.json","pip_mirror":null}'


# What a machine may do to its cloud


class FrozenClock:
    def now(self):
        return NOW

    def sleep(self, seconds):
        raise AssertionError


@pytest.fixture
def group():
    groups = FakeNodeGroup(FrozenClock())
    for name in ("own", "other"):
        groups.create(name)
        groups.arm(name, LATER)
        groups.resize(name, 1, POOL)
    return OwnGroup(groups, "own")


def test_a_machine_moves_its_shut_off_closer_and_never_away(group):
    group.arm("own", LATER - timedelta(minutes=1))
    with pytest.raises(ProvisionError, match="may not move its shut-off"):
        group.arm("own", LATER)
    assert group.describe("own").armed_until == LATER - timedelta(minutes=1)


def test_a_machine_touches_no_group_but_its_own(group):
    (stranger,) = (n.id for n in group._groups.describe("other").nodes)
    for act in (
        lambda: group.describe("other"),
        lambda: group.arm("other", NOW),
        lambda: group.resize("other", 0, POOL),
        lambda: group.relieve("other", stranger),
        lambda: group.terminate("other", stranger),
        lambda: group.interrupt("other", stranger, notice=True),
        lambda: group.purge("own"),
    ):
        with pytest.raises(ProvisionError):
            act()
    group.resize("own", 0, POOL)
    assert (group.describe("own").size, group._groups.describe("other").size) == (0, 1)


def test_a_machine_makes_and_removes_no_cluster():
    own = OwnProvisioner("own")
    spec = ClusterSpec(
        name="own", region="r", zones=("r-a",), node_type="t", market=POOL.market, tags=(), public_key="k", store="/s"
    )  # fmt: skip
    assert (own.group("any", "r"), own.image("r")) == ("own", None)
    for act in (lambda: own.ensure(spec, story=print), lambda: own.destroy("own", story=print)):
        with pytest.raises(ProvisionError):
            act()


# Outputs by way of the store


class Script:
    """Outputs that a job made, as they arrive on the machine that drives."""

    def __init__(self, target):
        self.target = target

    def bring_home(self, host, code, attempt, moves=None, paths=()):
        (self.target / "results" / "deep").mkdir(parents=True)
        (self.target / "results" / "deep" / "model").write_bytes(b"weights")
        (self.target / "results" / "last").symlink_to("deep/model")
        return Brought(paths=(str(self.target / "results"),))

    def bring_profile(self, host, attempt):
        return ()


def test_an_output_of_any_size_goes_into_the_store_in_little_memory(tmp_path):
    class Large(Script):
        def bring_home(self, host, code, attempt, moves=None, paths=()):
            self.target.mkdir()
            (self.target / "empty").touch()
            with (self.target / "model").open("wb") as file:
                file.truncate(64 << 20)
            return Brought(paths=(str(self.target / "model"),))

    store = DirectoryStore(tmp_path / "store")
    tracemalloc.start()
    try:
        brought = StoredOutputs(store, "digits", tmp_path / "node", Large).bring_home(None, "code", 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(store.root / key).stat().st_size for key in brought.paths] == [0, 64 << 20]
    assert peak < 16 << 20


def test_outputs_come_home_by_way_of_the_store_once(tmp_path):
    store = DirectoryStore(tmp_path / "store")
    StoredOutputs(store, "digits", tmp_path / "node", Script).bring_home(None, "code", 1)
    home = tmp_path / "outputs"

    assert bring_stored_home(store, "digits", home).paths == (
        str(home / "results" / "deep" / "model"),
        str(home / "results" / "last"),
    )
    assert (home / "results" / "last").read_bytes() == b"weights"
    assert not (tmp_path / "node").exists()
    assert store.list("jobs/") == ()
    assert bring_stored_home(store, "digits", home).paths == ()


@pytest.mark.parametrize(
    ("name", "note"), [("bad", {"link": "../../etc/passwd"}), ("../bad", {"link": "x"}), ("a/../../b", {})]
)
def test_no_output_leaves_the_folder_for_outputs(tmp_path, name, note):
    store = DirectoryStore(tmp_path / "store")
    store.put("jobs/digits/outputs/notes.json", json.dumps({"paths": [[name, note]]}).encode())
    with pytest.raises(LandingRefused):
        bring_stored_home(store, "digits", tmp_path / "outputs")
    assert not (tmp_path / "outputs").exists()


def test_outputs_from_the_store_never_go_through_a_link_that_came_with_them_or_before(tmp_path):
    """By its text, `z` stays inside; in truth it would lead out, for what it goes up from is a link itself."""
    store, home = DirectoryStore(tmp_path / "store"), tmp_path / "here" / "outputs"
    home.mkdir(parents=True)
    (home / "p" / "q" / "r").mkdir(parents=True)
    (home / "p" / "q" / "r" / "s").symlink_to("../../../a")
    (home / "z").symlink_to("p/q/r/s/../../ssh")
    (home / "a").mkdir()
    (tmp_path / "here" / "ssh").mkdir()
    store.put("jobs/digits/outputs/files/z/authorized_keys", b"mine")
    note = {"mode": 0o644, "mtime_ns": 10**19, "size": 4}
    store.put("jobs/digits/outputs/notes.json", json.dumps({"paths": [["z/authorized_keys", note]]}).encode())
    with pytest.raises(StoreError, match="z is a link; files go into folders"):
        bring_stored_home(store, "digits", home)
    assert list((tmp_path / "here" / "ssh").iterdir()) == []
    (home / "z").unlink()
    assert bring_stored_home(store, "digits", home).paths == (str(home / "z" / "authorized_keys"),)


@pytest.mark.parametrize("size", [3, 5, 10**400])
def test_an_output_of_another_size_than_was_noted_is_not_believed(tmp_path, size):
    store = DirectoryStore(tmp_path / "store")
    store.put("jobs/digits/outputs/files/x", b"four")
    store.put("jobs/digits/outputs/notes.json", json.dumps({"paths": [["x", {"size": size}]]}).encode())
    with pytest.raises(GpucloudError):
        bring_stored_home(store, "digits", tmp_path / "outputs")
    assert not (tmp_path / "outputs" / "x").exists()


# Money while nobody looks


def test_machines_that_the_group_lists_as_ended_cost_nothing_more_though_nobody_has_settled():
    intervals = tuple(UsageInterval(node_id=i, pool=POOL, launched_at=NOW - timedelta(hours=1)) for i in ("a", "b"))
    ended = NOW - timedelta(minutes=20)
    a = node("a", state=gone("a").node.state, ended_at=ended, end_cause=EndCause.CHOICE)
    stored = state(nodes=intervals, paid_until=NOW - timedelta(minutes=10))

    one_listed = GroupView(exists=True, size=0, armed_until=None, nodes=(a,))
    known = as_listed(stored, one_listed, NOW)
    assert [interval.ended_at for interval in known.nodes] == [
        ended,
        stored.paid_until,
    ]  # b was paid until then, and no longer

    both = as_listed(stored, replace(one_listed, nodes=(a, node("b"))), NOW)
    assert [interval.ended_at for interval in both.nodes] == [ended, None]


def test_what_nobody_noted_in_the_store_keeps_nothing_else_from_coming_home(tmp_path):
    store, home = DirectoryStore(tmp_path / "store"), tmp_path / "outputs"
    for attempt in (1, 2):
        StoredOutputs(store, "digits", tmp_path / "node", Script).bring_home(None, "code", attempt)
    store.put("jobs/digits/outputs/files/attempt-1/stray", b"?")
    brought = bring_stored_home(store, "digits", home)
    assert (home / "results" / "last").read_bytes() == b"weights"
    (missing,) = brought.missing
    assert missing.path == "stray"
    assert missing.why.startswith("stays in the store: no machine of the job noted it; gpucloud cp -r digits:@store")
    assert store.list("jobs/") == ("jobs/digits/outputs/files/attempt-1/stray",)
