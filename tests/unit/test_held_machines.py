"""Machines that wait for a mended script: for whom, how long, and what the next command does with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucloud.cli.render.onlookers import PlainOnlooker
from gpucloud.cli.render.reports import report_text
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.quantities import parse_span
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.launch import script_of
from gpucloud.domain.node.node import NO_GROUP
from gpucloud.domain.state.order import held_until, is_closed, keeps, without_drill_done
from gpucloud.domain.state.state import CheckpointRef, ExitReason, JobState, JobStatus, Owner
from gpucloud.domain.supervision import transitions
from gpucloud.domain.supervision.action import Arm, CloseAttempt, Done, OpenAttempt, TearDown
from gpucloud.domain.supervision.capacity import shortest_start
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Limits, Rules, Supervising, goal_of
from gpucloud.usecases.job.ordered import adopt
from gpucloud.usecases.jobstore.condition import Saves
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.report import report
from gpucloud.usecases.jobstore.runs import runs_otherwise
from tests.fakes.agent import Training
from tests.faults.process import Ended, run
from tests.faults.rig import GROUP, JOB, Outside, Rigged
from tests.faults.strikes import Strikes
from tests.unit.worlds import NOW, opened, order, snapshot, state, up

MINUTES = timedelta(minutes=5)
GOAL, RULES = Goal(nodes=2, budget_usd=Decimal(1)), Rules()
FAILED = state(
    status=JobStatus.FAILED,
    exit_reason=ExitReason.USER_ERROR,
    exit_code=20,
    ended_at=NOW - timedelta(minutes=2),
    attempts=(replace(opened("a", "b"), reason=ExitReason.USER_ERROR),),
)
HELD_UNTIL = NOW + timedelta(minutes=3)
MENDED = r"small failed at .*: it goes on from step 4 with the script as it is now \(`--again` begins a new run\)\n"


def decided(failed: JobState = FAILED, armed: datetime | None = HELD_UNTIL, **goal: object) -> object:
    there = snapshot(up("a"), up("b"), state=failed, armed=armed, payable_until=NOW + timedelta(hours=1))
    return decide(replace(GOAL, **{"hold": MINUTES, **goal}), there, RULES)


def test_the_shut_off_comes_when_the_wait_is_over_sooner_or_later_than_it_was_armed() -> None:
    assert decided(armed=NOW + timedelta(minutes=30)) == Arm(until=HELD_UNTIL)
    assert decided() == Done()
    assert decided(armed=HELD_UNTIL - timedelta(seconds=29)) == Done()
    assert decided(armed=NOW + timedelta(minutes=1)) == Arm(until=HELD_UNTIL)
    assert decided(armed=NOW + timedelta(minutes=20), hold=timedelta(hours=1)) == Arm(until=NOW + timedelta(minutes=58))


def test_a_shut_off_that_somebody_removed_is_armed_anew_no_later_than_the_wait_and_the_budget_end() -> None:
    assert decided(armed=None) == Arm(until=HELD_UNTIL)
    there = snapshot(up("a"), state=FAILED, armed=None, payable_until=NOW + timedelta(minutes=1))
    assert decide(replace(GOAL, hold=MINUTES), there, RULES) == Arm(until=NOW + timedelta(minutes=1))
    unpaid = replace(there, payable_until=None)
    assert decide(replace(GOAL, hold=MINUTES), unpaid, RULES) == TearDown()


def test_machines_wait_no_longer_than_the_budget_pays_for() -> None:
    there = snapshot(up("a"), state=FAILED, armed=HELD_UNTIL, payable_until=NOW + timedelta(minutes=1))
    assert decide(replace(GOAL, hold=MINUTES), there, RULES) == Arm(until=NOW + timedelta(minutes=1))


@pytest.mark.parametrize(
    ("failed", "goal"),
    [
        (FAILED, {"hold": None}),
        (FAILED, {"end": ExitReason.STOPPED}),
        (FAILED, {"hold": timedelta(minutes=1)}),
        (replace(FAILED, exit_reason=ExitReason.LOST), {}),
        (replace(FAILED, exit_reason=ExitReason.SUCCEEDED), {}),
        (replace(FAILED, exit_reason=ExitReason.UNPREPARED, exit_code=14), {}),
    ],
)
def test_nothing_else_holds_machines(failed: JobState, goal: dict[str, object]) -> None:
    assert decided(failed, **goal) == TearDown()


def test_machines_that_drive_their_job_hold_none() -> None:
    assert held_until(order(hold=MINUTES), FAILED) == HELD_UNTIL
    assert held_until(order(hold=MINUTES, unattended=timedelta(hours=8)), FAILED) is None
    assert goal_of(order(hold=MINUTES), Supervising()).hold == MINUTES
    assert goal_of(order(hold=MINUTES, unattended=timedelta(hours=8)), Supervising()).hold is None
    assert goal_of(order(hold=MINUTES), Supervising(node="i-1")).hold is None
    assert not keeps(order(hold=MINUTES), FAILED)
    assert not is_closed(order(hold=MINUTES), FAILED)


def test_machines_of_a_setup_that_failed_wait_for_a_mended_one_in_the_same_run() -> None:
    failed = replace(FAILED, attempts=())
    assert decided(failed) == Done()
    assert held_until(order(hold=MINUTES), failed) == HELD_UNTIL
    assert adopt(failed, None, reopens=True).status is JobStatus.WAITING
    assert adopt(failed, None) == failed  # machines that wait in vain are torn down first
    torn_down = replace(failed, torn_down=True, group=None)
    assert not is_closed(order(hold=MINUTES), torn_down)
    assert adopt(torn_down, None).status is JobStatus.WAITING


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    found = Outside(tmp_path, training=Training(fails_at=6))
    found.job = replace(found.job, hold=MINUTES)
    return found


def give(outside: Outside, *words: str) -> Ended:
    strikes = Strikes()
    named = tuple(str(outside.file) if word == outside.file.name else word for word in words)
    return run(named, outside.over(strikes), strikes)


def stored(outside: Outside, name: str = JOB) -> JobState | None:
    loaded = JobStore(outside.store, name).load()
    return loaded[0] if loaded is not None else None


def alive(outside: Outside) -> int:
    return len(outside.cloud.describe(GROUP).alive)


def test_the_same_train_goes_on_with_the_held_machines_from_the_newest_checkpoint(outside: Outside) -> None:
    failed = give(outside, "train", "small.yaml")
    assert failed.code == 20
    assert "2 machines are ready for a mended script until " in failed.stdout
    machines = {interval.node_id for interval in stored(outside).alive}  # type: ignore[union-attr]
    assert len(machines) == 2

    outside.fleet.training = Training()
    mended = give(outside, "train", "small.yaml")
    assert mended.code == 0, mended.stderr
    assert "small goes on with the script as it is now, from step 4, on the 2 machines held for it" in mended.stderr
    ended = stored(outside)
    assert ended is not None
    assert [attempt.reason for attempt in ended.attempts] == [ExitReason.USER_ERROR, ExitReason.SUCCEEDED]
    assert {interval.node_id for interval in ended.nodes} == machines
    assert (ended.torn_down, alive(outside), outside.breaches) == (True, 0, [])
    assert stored(outside, f"{JOB}-2") is None


def test_whoever_comes_by_meanwhile_leaves_them_and_later_tears_down(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    until = outside.cloud.describe(GROUP).armed_until
    assert until is not None
    assert until - outside.clock.now() <= MINUTES
    for words in (("reconcile", JOB), ("reconcile", "--all")):
        assert give(outside, *words).code == 20
        assert (alive(outside), outside.cloud.describe(GROUP).armed_until) == (2, until)

    outside.pass_by(MINUTES.total_seconds() + 60)
    assert alive(outside) == 0
    give(outside, "reconcile", "--all")
    ended = stored(outside)
    assert ended is not None
    assert ended.torn_down


def test_they_wait_for_as_long_as_was_asked_for_though_less_was_armed_when_the_script_failed(outside: Outside) -> None:
    outside.job = replace(outside.job, hold=timedelta(hours=1), budget_usd=Decimal(9))
    give(outside, "train", "small.yaml")
    until = outside.cloud.describe(GROUP).armed_until
    assert until is not None
    assert timedelta(minutes=58) < until - outside.clock.now() <= timedelta(hours=1)
    outside.pass_by(timedelta(minutes=55).total_seconds())
    assert (alive(outside), outside.breaches) == (2, [])


def test_down_ends_them_at_once(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    assert give(outside, "down", JOB).code == 0
    assert alive(outside) == 0


def later(outside: Outside) -> None:
    outside.pass_by(MINUTES.total_seconds() + 60)


def other_machines(outside: Outside) -> None:
    wanted = replace(outside.job.resources, gpus=2)
    outside.job = replace(outside.job, resources=wanted, budget_usd=Decimal(9))


@pytest.mark.parametrize("change", [later, other_machines])
def test_a_train_that_cannot_use_them_tears_them_down_and_goes_on_with_others(
    outside: Outside, change: Callable[[Outside], None]
) -> None:
    give(outside, "train", "small.yaml")
    outside.fleet.training = Training()
    change(outside)
    new = give(outside, "train", "small.yaml")
    before = stored(outside)
    assert before is not None
    assert "the machines of small wait no longer for a mended script: they are torn down first\n" in new.stderr
    assert re.search(MENDED, new.stderr), new.stderr
    assert len(before.attempts) == 2, new.stderr
    if outside.job.budget_usd != 1:
        assert "budget: 1.00 USD → 9.00 USD" in new.stderr
    assert stored(outside, f"{JOB}-2") is None


@pytest.mark.parametrize("change", [later, lambda outside: None])
def test_again_begins_a_new_run_whether_machines_are_held_or_not(
    outside: Outside, change: Callable[[Outside], None]
) -> None:
    give(outside, "train", "small.yaml")
    outside.fleet.training = Training()
    change(outside)
    new = give(outside, "train", "small.yaml", "--again")
    before, after = stored(outside), stored(outside, f"{JOB}-2")
    assert before is not None
    assert after is not None, new.stderr
    assert (before.status, before.torn_down, len(before.attempts)) == (JobStatus.FAILED, True, 1)
    assert re.search(
        r"small failed at .*: this starts small-2, a new run from step 0 \(the checkpoint at step 4 is not used\)\n",
        new.stderr,
    )


def test_a_run_whose_script_failed_goes_on_from_its_checkpoint_with_what_is_left_of_its_budget(
    outside: Outside,
) -> None:
    outside.job = replace(outside.job, hold=None)
    failed = give(outside, "train", "small.yaml")
    assert failed.code == 20
    left = re.search(r"this run goes on from step 4, with the (0\.\d+) USD left of its budget", failed.stdout)
    assert left is not None, failed.stdout
    outside.fleet.training = Training()
    assert give(outside, "train", "small.yaml", "--budget", "0.01USD").code == 10
    again = give(outside, "train", "small.yaml")
    assert (again.code, re.search(MENDED, again.stderr) is not None) == (0, True), again.stderr
    ended = stored(outside)
    assert ended is not None
    assert [one.first_step for one in ended.attempts][1:] == [5]


def test_what_failed_and_was_not_torn_down_is_torn_down_and_gone_on_with_by_one_command(outside: Outside) -> None:
    outside.job = replace(outside.job, hold=None)
    give(outside, "train", "small.yaml")
    failed = stored(outside)
    assert failed is not None
    with take(JobStore(outside.store, JOB), outside.clock) as lease:
        lease.write(replace(failed, torn_down=False))
    outside.fleet.training = Training()
    mended = give(outside, "train", "small.yaml")
    assert mended.code == 0
    assert len(stored(outside).attempts) == 2  # type: ignore[union-attr]
    assert "what is left of small is torn down first\n" in mended.stderr  # none of it waited for a script
    assert "wait no longer" not in mended.stderr


def left_after_a_success(outside: Outside) -> None:
    """A run as machines that drove it leave it: it has succeeded, and nothing of it is torn down."""
    outside.job = replace(outside.job, hold=None)
    outside.fleet.training = Training()
    assert give(outside, "train", "small.yaml").code == 0
    succeeded = stored(outside)
    assert succeeded is not None
    with take(JobStore(outside.store, JOB), outside.clock) as lease:
        lease.write(replace(succeeded, torn_down=False))


def edited_after_a_success(outside: Outside) -> None:
    """The job file is another by now: a start means a new run."""
    left_after_a_success(outside)
    outside.file.write_text(f"{outside.file.read_text()}# edited\n")


@pytest.mark.parametrize(
    "words", [("train",), ("train", "--json"), ("train", "--detach"), ("train", "--budget", "1 USD")]
)
def test_the_same_command_after_a_success_that_was_not_torn_down_tears_it_down_and_trains_nothing(
    outside: Outside, words: tuple[str, ...]
) -> None:
    left_after_a_success(outside)
    same = give(outside, words[0], "small.yaml", *words[1:])
    found = stored(outside)
    assert found is not None
    assert (same.code, found.torn_down, len(found.attempts)) == (0, True, 1), same.stderr
    assert stored(outside, f"{JOB}-2") is None
    assert re.search(
        "small succeeded at .*, and no edit was seen since: what is left of it is torn down, and nothing is"
        r" trained \(`--again` begins a new run\)\n",
        same.stderr,
    ), same.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("train",),
        ("up",),
        *(("train", *asks) for asks in (["--again"], ["--drill"], ["--keep"], ["--budget", "2 USD"])),
    ],
)
def test_what_succeeded_and_was_not_torn_down_is_torn_down_and_followed_by_a_new_run(
    outside: Outside, words: tuple[str, ...]
) -> None:
    (edited_after_a_success if words == ("train",) else left_after_a_success)(outside)
    new = give(outside, words[0], "small.yaml", *words[1:])
    before, after = stored(outside), stored(outside, f"{JOB}-2")
    assert before is not None
    assert after is not None, new.stderr
    assert (before.status, before.torn_down, len(before.attempts)) == (JobStatus.SUCCEEDED, True, 1)
    assert len(after.nodes) >= 2
    torn_down = (
        "what is left of small is torn down first, then a new run begins\n.* removing what is left on the cloud(.*\n)*"
        "small is torn down\nno file has come home: .*`gpucloud checkpoints small@1 --export FILE` .*"
    )
    begun = "small succeeded at .*: this starts small-2, a new run"
    assert re.search(f"{torn_down}(.*\n)*{begun} from step 0\n", new.stderr), new.stderr


@pytest.mark.parametrize("words", [("down", JOB), ("reconcile", JOB)])
def test_whoever_ends_or_looks_after_a_job_knows_by_its_order_how_it_saves(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    give(outside, "train", "small.yaml")
    policies: list[object] = []

    def plain(limits: Limits, saves: Saves | None) -> PlainOnlooker:
        policies.append(saves and saves.policy)
        return PlainOnlooker(limits, saves)

    monkeypatch.setattr("gpucloud.cli.commands.supervising.PlainOnlooker", plain)
    give(outside, *words)
    assert policies == [outside.job.checkpoint]


def first_of_the_plan(outside: Outside) -> str:
    return give(outside, "plan", "small.yaml").stderr.splitlines()[0]


def test_a_plan_says_what_a_start_does_with_what_a_success_has_left(outside: Outside) -> None:
    left_after_a_success(outside)
    new = "this is the plan of a new run"
    assert first_of_the_plan(outside) == (
        "small has succeeded, and no edit was seen since: `gpucloud train` tears down what is left of it and trains"
        f" nothing (`--again` begins a new run); {new}"
    )
    edited_after_a_success(outside)
    assert first_of_the_plan(outside) == (
        f"small has succeeded: `gpucloud train` tears down what is left of it first; {new}"
    )
    outside.job = replace(outside.job, deadline=timedelta(minutes=1))  # it is of the new run
    outside.pass_by(3600)
    assert "is refused" not in first_of_the_plan(outside)
    supervised_by_another(outside)
    assert first_of_the_plan(outside) == (
        "warning: small has succeeded, and process 1 on elsewhere winds it up: `gpucloud train` is refused until that"
        f" is done; {new}"
    )
    refused = give(outside, "train", "small.yaml")
    assert refused.code == 4
    assert "small has succeeded, and process 1 on elsewhere winds it up (last sign" in refused.stderr
    assert "hint: the same command again once that is done, which begins a new run then; if it is dead, the same" in (
        refused.stderr
    )


def supervised_by_another(outside: Outside) -> None:
    jobs = JobStore(outside.store, JOB)
    loaded = jobs.load()
    assert loaded is not None
    owner = Owner(id="1", host="elsewhere", pid=1, started="1", since=outside.clock.now())
    jobs.replace(replace(loaded[0], owner=owner), loaded[1].version)


def test_a_plan_says_which_machines_a_success_keeps_beside_the_new_run(outside: Outside) -> None:
    outside.fleet.training = Training()
    assert give(outside, "train", "small.yaml", "--keep").code == 0
    assert re.fullmatch(
        r"small keeps 2 machines, paid until \d\d:\d\d:\d\d UTC: `gpucloud down small@1` ends them now;"
        r" `gpucloud train` starts a new run on machines of its own",
        first_of_the_plan(outside),
    )


def test_a_plan_says_that_a_start_is_refused_by_a_store_that_is_away(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreError("/mnt/store, the store's folder, is not there", hint="mount it", may_pass=True)

    monkeypatch.setattr("gpucloud.cli.target.refuse_to_forget", away)
    planned = give(outside, "plan", "small.yaml")
    assert (planned.code, planned.stderr.splitlines()[0]) == (
        0,
        "warning: `gpucloud train` is refused now: /mnt/store, the store's folder, is not there; mount it",
    )


def test_up_says_that_held_machines_are_made_ready_and_run_nothing_yet(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    ready = give(outside, "up", "small.yaml")
    assert (
        "small: the 2 machines held for it are made ready; `gpucloud train small` then goes on from step 4\n"
        in ready.stderr
    )


def test_a_new_run_that_must_be_meant_is_not_begun_by_tearing_down_the_one_before(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited_after_a_success(outside)
    monkeypatch.setattr("gpucloud.cli.commands.training.repeats_at_a_cost", lambda job, before: before is not None)
    new = give(outside, "train", "small.yaml")
    assert (new.code, stored(outside, f"{JOB}-2")) == (2, None)
    refused = "small-2 would be a new run with a budget of 1.00 USD: nothing was started"
    assert re.search(rf"\nsmall is torn down\nno file has come home: (.*\n)*error: .*{refused}", new.stderr)
    assert stored(outside).torn_down  # type: ignore[union-attr]
    give(outside, "train", "small.yaml", "--again")
    assert stored(outside, f"{JOB}-2") is not None


def test_programs_read_first_of_a_new_run_that_is_refused_what_became_of_the_one_before(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited_after_a_success(outside)
    monkeypatch.setattr("gpucloud.cli.commands.training.repeats_at_a_cost", lambda job, before: before is not None)
    refused = give(outside, "train", "small.yaml", "--json")
    message = json.loads(refused.stdout)["error"]["message"]
    assert re.match(r"small is torn down; no file has come home: .*; small succeeded at .*, and small-2", message)


def test_no_new_run_begins_while_results_of_the_one_before_find_no_room(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited_after_a_success(outside)

    def full(*_: object) -> None:
        raise StoreError("No space left on device")

    monkeypatch.setattr(Rigged, "bring_stored_home", full)
    for words in (("train",), ("up",), ("train", "--again", "--json")):
        with take(JobStore(outside.store, JOB), outside.clock) as lease:
            lease.write(replace(lease.state, torn_down=False))
        ended = give(outside, words[0], "small.yaml", *words[1:])
        assert (ended.code, stored(outside, f"{JOB}-2")) == (15, None)
        assert "they are in the job's store: `gpucloud down small` tries again" in ended.stderr
        assert (
            "no new run was begun, as results of small are not home yet: the same command again begins one\n"
            in ended.stderr
        )
    assert json.loads(ended.stdout)["job"] == JOB


def test_a_run_that_goes_on_mended_waits_for_no_results(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    give(outside, "train", "small.yaml")
    outside.fleet.training = Training()
    later(outside)
    bring, full = Rigged.bring_stored_home, StoreError("No space left on device")
    tries = iter((full, None))

    def once_full(*given: Any) -> Any:
        if (error := next(tries)) is not None:
            raise error
        return bring(*given)

    monkeypatch.setattr(Rigged, "bring_stored_home", once_full)
    assert give(outside, "train", "small.yaml").code == 0
    assert len(stored(outside).attempts) == 2  # type: ignore[union-attr]


def test_a_machine_that_was_taken_while_it_was_held_is_not_counted_to_those_that_are_gone_on_with(
    outside: Outside,
) -> None:
    give(outside, "train", "small.yaml")
    outside.fleet.training = Training()
    held = stored(outside)
    assert held is not None
    outside.cloud.resize(GROUP, 1, held.pool)  # none comes in its place
    if alive(outside) == 2:
        outside.cloud.interrupt(GROUP, held.alive[0].node_id, notice=False)
    assert alive(outside) == 1
    mended = give(outside, "train", "small.yaml")
    assert "from step 4, on the 1 machine held for it" in mended.stderr
    assert mended.code == 0


def test_a_plan_says_that_a_run_whose_machines_are_held_is_gone_on_with_and_of_a_supervised_one_that_it_is_not(
    outside: Outside,
) -> None:
    give(outside, "train", "small.yaml")
    first = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    assert re.fullmatch(
        r"small has failed: `gpucloud train` goes on with it after step 4 on the 2 machines held for it until"
        r" \d\d:\d\d:\d\d UTC; this is the plan of a new run",
        first,
    ), first
    supervised_by_another(outside)
    first = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    refused = "`gpucloud train` is refused until that is done; this is the plan of a new run"
    assert first == f"warning: small has failed, and process 1 on elsewhere winds it up: {refused}"


@pytest.mark.parametrize("hold", [MINUTES, None])
def test_past_its_deadline_a_failed_run_is_refused_with_both_ways_on(outside: Outside, hold: timedelta | None) -> None:
    outside.job = replace(outside.job, hold=hold, deadline=timedelta(hours=3))
    assert give(outside, "train", "small.yaml").code == 20
    outside.fleet.training = Training()
    outside.pass_by(4 * 3600)
    planned = give(outside, "plan", "small.yaml").stderr.splitlines()[0]
    assert re.fullmatch(
        r"warning: `gpucloud train` is refused: the deadline of small was at .*: it counts from its first start; with a"
        r" later `deadline:` it goes on from step 4; gpucloud train small --again begins a new run",
        planned,
    ), planned
    late = give(outside, "train", "small.yaml")
    late = give(outside, "train", "small.yaml") if late.code == 20 else late
    assert late.code == 2
    assert re.search(r"the deadline of small was at .*: it counts from its first start", late.stderr)
    assert "goes on from step 4; gpucloud train small --again begins a new run" in late.stderr
    assert give(outside, "train", "small.yaml", "--again").code != 2
    assert stored(outside, f"{JOB}-2") is not None


def test_a_start_for_which_no_time_is_left_is_refused_before_anything_is_rented(outside: Outside) -> None:
    """So little before its deadline not even the shortest start fits that was seen."""
    outside.job = replace(outside.job, hold=None, deadline=timedelta(hours=3))
    began = outside.clock.now()
    assert give(outside, "train", "small.yaml").code == 20
    outside.fleet.training = Training()
    before = stored(outside)
    assert before is not None
    left_s = shortest_start(before, Limits()).total_seconds() / 2
    outside.pass_by(3 * 3600 - left_s - (outside.clock.now() - began).total_seconds())
    refused = give(outside, "train", "small.yaml")
    assert (refused.code, stored(outside)) == (2, before), refused.stderr
    assert re.search(
        r"[\d.]+ s are left until the deadline of small.*: a start takes [\d.]+ s at the least, and nothing would",
        refused.stderr,
    )
    least = re.search(r"hint: deadline: (3h \d+min), for .*a changeover of 12 min", refused.stderr)
    assert least is not None, refused.stderr
    outside.job = replace(outside.job, deadline=parse_span(least[1]))
    assert give(outside, "train", "small.yaml").code == 0


def test_again_begins_a_new_run_of_any_whose_deadline_has_passed(outside: Outside) -> None:
    outside.job = replace(outside.job, hold=None, deadline=timedelta(hours=3))
    assert give(outside, "train", "small.yaml").code == 20
    failed = stored(outside)
    assert failed is not None
    with take(JobStore(outside.store, JOB), outside.clock) as lease:  # as `down` leaves one that still trained
        lease.write(replace(failed, status=JobStatus.STOPPED, exit_reason=ExitReason.STOPPED, exit_code=130))
    outside.fleet.training = Training()
    outside.pass_by(4 * 3600)
    late = give(outside, "train", "small.yaml")
    assert (late.code, "gpucloud train small --again begins a new run" in late.stderr) == (2, True), late.stderr
    give(outside, "train", "small.yaml", "--again")
    assert stored(outside, f"{JOB}-2") is not None


def test_what_a_start_compares_with_is_what_ran_and_not_the_file_that_tore_it_down(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    outside.fleet.training = Training()
    other_machines(outside)
    outside.job = replace(outside.job, env=(("LR", "2"),))
    outside.file.write_text(outside.file.read_text() + "# another text\n")
    told = give(outside, "train", "small.yaml").stderr
    assert re.search(r"changed: the job file differs from the one of the last start in .*env", told), told
    assert "changed: the code differs" not in told


def test_a_budget_that_is_too_small_to_go_on_is_said_before_anything_is_done(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    outside.job = replace(outside.job, budget_usd=Decimal("0.02"))
    refused = give(outside, "train", "small.yaml")
    assert refused.code == 10
    assert "USD left of 0.02 USD, too little to go on" in refused.stderr
    least = re.search(r"hint: gpucloud train small --budget '(0\.\d\d) USD' is the least; or a new run", refused.stderr)
    assert least is not None, refused.stderr
    outside.fleet.training = Training()
    below = give(outside, "train", "small.yaml", "--budget", f"{Decimal(least[1]) - Decimal('0.01')}USD")
    assert below.code == 10
    assert "mended" not in below.stderr
    assert give(outside, "train", "small.yaml", "--budget", f"{least[1]}USD").code in (0, 10)
    assert len(stored(outside).attempts) == 2  # type: ignore[union-attr]


def test_without_a_word_in_the_job_file_nothing_is_held_where_nobody_sits(outside: Outside) -> None:
    outside.job = replace(outside.job, hold=None)
    assert give(outside, "train", "small.yaml").code == 20
    assert alive(outside) == 0


def test_up_after_the_wait_goes_on_with_the_run_too(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    later(outside)
    again = give(outside, "up", "small.yaml")
    ready = "machines are made ready; `gpucloud train small` then goes on from step 4 (`--again` begins a new run)"
    assert re.search(rf"small failed at .*: {re.escape(ready)}\n", again.stderr), again.stderr
    assert stored(outside, f"{JOB}-2") is None


def test_the_last_line_of_a_setup_that_failed_names_the_command_the_log_and_what_to_type() -> None:
    message = "setup: `pip install nothing` ended with exit code 1: no such package"
    failed = replace(FAILED, attempts=(), message=message)
    world = snapshot(up("a"), up("b"), state=failed)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.01"), promised_usd=Decimal(0))
    told = replace(report(failed, spend, (), world.group, None), held_until=HELD_UNTIL)
    *_, last, held = report_text(told).splitlines()
    assert last == (
        f"digits: failed: {message} · gpucloud logs digits · mend it and run the same command:"
        " this run goes on from the beginning, on the 2 machines held for it"
    )
    assert held.startswith("2 machines are ready for a mended setup until ")
    over = report(failed, spend, (), NO_GROUP, None)
    assert (
        report_text(over)
        .splitlines()[-1]
        .endswith(
            " · mend it and run the same command: this run goes on from the beginning,"
            " with the 0.99 USD left of its budget"
        )
    )


def test_the_last_line_says_from_where_a_failed_run_goes_on() -> None:
    failed = replace(FAILED, checkpoint=CheckpointRef(step=4, sha256="0" * 64))
    world = snapshot(up("a"), state=failed)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.01"), promised_usd=Decimal(0))
    over = report(failed, spend, (), NO_GROUP, None)
    assert (
        report_text(over)
        .splitlines()[-1]
        .endswith(
            " · mend it and run the same command: this run goes on from step 4, with the 0.99 USD left of its budget"
            " (--again begins a new run)"
        )
    )
    held = replace(report(failed, spend, (), world.group, None), held_until=HELD_UNTIL)
    assert (
        report_text(held)
        .splitlines()[-2]
        .endswith(" · mend it and run the same command: this run goes on from step 4, on the 1 machine held for it")
    )


def test_a_run_that_has_succeeded_is_not_reopened_by_a_start_that_came_for_a_failed_one() -> None:
    succeeded = replace(
        FAILED,
        status=JobStatus.SUCCEEDED,
        exit_reason=ExitReason.SUCCEEDED,
        exit_code=0,
        attempts=(*FAILED.attempts, replace(opened("a", "b"), number=2, reason=ExitReason.SUCCEEDED)),
    )
    assert adopt(succeeded, None, reopens=True) == succeeded


def test_a_reopened_run_is_not_told_as_failed_any_more() -> None:
    goes_on = adopt(FAILED, None, reopens=True)
    world = snapshot(up("a"), up("b"), state=goes_on)
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.01"), promised_usd=Decimal(0))
    told = report_text(report(goes_on, spend, (), world.group, "process 1 on vm"))
    assert "failed" not in told, told
    assert "mend it" not in told


def test_a_script_that_is_started_otherwise_has_told_nothing_of_how_many_steps_it_has() -> None:
    before = replace(opened("a"), reason=ExitReason.DEADLINE, total_steps=2000, last_step=272)
    stopped = state(attempts=(before, replace(before, number=2, reason=None)))
    assert [one.total_steps for one in adopt(stopped, None).attempts] == [2000, 2000]
    adopted = adopt(stopped, None, reruns="another")
    assert [one.total_steps for one in adopted.attempts] == [None, 2000]
    # What still runs of the old script has its own length, which is not that of the next attempt.
    closed = transitions.close_attempt(adopted, CloseAttempt(reason=ExitReason.INTERRUPTED), NOW)
    assert [one.total_steps for one in closed.attempts] == [None, None]
    done = transitions.close_attempt(adopted, CloseAttempt(reason=ExitReason.SUCCEEDED), NOW)
    assert [one.total_steps for one in done.attempts] == [None, 2000]


def test_an_attempt_whose_script_was_edited_and_put_back_is_not_outdated() -> None:
    job = order().resolved
    first, second = script_of(job), script_of(replace(job, run="train.py --steps 9"))
    training = transitions.open_attempt(state(), OpenAttempt(number=1, node_ids=("a",)), 29500, NOW, "1" * 64, job)
    edited = adopt(training, None, reruns=second)
    assert [one.outdated for one in edited.attempts] == [True]
    assert [one.outdated for one in adopt(edited, None, reruns=first).attempts] == [False]
    assert first == script_of(replace(job, budget_usd=Decimal(9)))
    assert first != script_of(replace(job, own_code_sha256="2" * 64))


def test_an_attempt_runs_otherwise_under_an_order_of_other_code_or_of_keys_that_reach_it():
    before = order(code_sha256="1" * 64)
    assert not runs_otherwise(before, before)
    assert runs_otherwise(before, replace(before, code_sha256="2" * 64))
    assert runs_otherwise(before, replace(before, resolved=replace(before.resolved, run="train.py --steps 9")))
    assert runs_otherwise(before, replace(before, resolved=replace(before.resolved, env=(("STEPS", "9"),))))
    assert not runs_otherwise(before, replace(before, resolved=replace(before.resolved, budget_usd=Decimal(9))))


def test_who_leaves_a_job_after_its_drill_has_no_second_one() -> None:
    drilled = state(attempts=(opened("a", "b"),), drilled=1)
    left = without_drill_done(order(drill=True), drilled)
    assert adopt(drilled, None, drills=left.drill).drilled == 1
    assert without_drill_done(order(drill=True), state()).drill
