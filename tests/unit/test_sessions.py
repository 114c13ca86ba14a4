"""One job and many entrances, over fakes: each goes by the order and the state alone, whoever came before."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpucloud.adapters.jobfile import read_job
from gpucloud.domain.errors import (
    CredentialsError,
    GpucloudError,
    HostUnreachable,
    LeaseHeld,
    NodeError,
    ProvisionError,
    StoreError,
)
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.money.ledger import ChargeKind, Rates, Terms
from gpucloud.domain.state.order import with_budget
from gpucloud.domain.state.state import ExitReason, JobStatus, MissingOutput, Owner
from gpucloud.domain.supervision.action import Action
from gpucloud.domain.supervision.membership import shown_of
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Rules, Snapshot
from gpucloud.usecases.job.jobs import Asker, Unsupervised
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from gpucloud.usecases.jobstore.orders import Orders
from gpucloud.usecases.supervise import session
from tests.fakes.agent import Training
from tests.fakes.fleet_shell import FleetHost
from tests.faults.process import Ended, run
from tests.faults.rig import GROUP, JOB, Outside, Rigged, _Cloud
from tests.faults.strikes import Strikes
from tests.unit import worlds


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


def give(outside: Outside, *words: str, at: int | None = None) -> Ended:
    """Give a command as a process of its own; with `at`, killed at that call."""
    strikes = Strikes(at=at)
    named = tuple(str(outside.file) if word == outside.file.name else word for word in words)
    return run(named, outside.over(strikes), strikes)


def jobs(outside: Outside) -> JobStore:
    return JobStore(outside.store, JOB)


def state(outside: Outside):
    loaded = jobs(outside).load()
    assert loaded is not None
    return loaded[0]


def orders(outside: Outside) -> Orders:
    return Orders(jobs=jobs(outside), clock=outside.clock)


def alive(outside: Outside) -> int:
    return len(outside.cloud.describe(GROUP).alive)


def test_machines_that_are_kept_stay_up_whoever_comes_by_until_their_time_is_over(outside: Outside) -> None:
    assert give(outside, "train", "small.yaml", "--keep").code == 0
    armed = outside.cloud.describe(GROUP).armed_until
    assert (alive(outside), state(outside).torn_down) == (2, False)

    for words in (("reconcile", JOB), ("reconcile", "--all"), ("budget", JOB, "2 USD"), ("reconcile", JOB)):
        ended = give(outside, *words)
        assert ended.code == 0, (words, ended.stderr)
        assert (alive(outside), outside.cloud.describe(GROUP).armed_until) == (2, armed), words
    lowered = give(outside, "budget", JOB, "0.5 USD")
    assert lowered.code == 0, lowered.stderr
    closer = outside.cloud.describe(GROUP).armed_until
    assert closer is not None
    assert armed is not None
    assert outside.clock.now() < closer < armed
    assert (alive(outside), state(outside).torn_down) == (2, False)

    outside.pass_by(timedelta(hours=1).total_seconds())
    assert alive(outside) == 0
    assert give(outside, "reconcile", "--all").code == 0
    assert (state(outside).torn_down, outside.cloud.describe(GROUP).exists) == (True, False)


def test_a_second_train_after_one_that_kept_its_machines_is_a_run_of_its_own_and_says_so(outside: Outside) -> None:
    give(outside, "train", "small.yaml", "--keep")
    armed = outside.cloud.describe(GROUP).armed_until
    again = give(outside, "train", "small.yaml")
    assert JobStore(outside.store, f"{JOB}-2").load() is not None, again.stderr
    assert (alive(outside), state(outside).torn_down) == (2, False)
    assert f"{JOB} keeps 2 machines, paid until {armed:%H:%M:%S} UTC: `gpucloud down {JOB}@1` ends them" in again.stderr
    assert "this run has machines of its own" in again.stderr


def test_how_long_a_start_took_counts_from_the_order_to_train_and_not_from_the_machines(outside: Outside) -> None:
    assert give(outside, "up", "small.yaml").code == 0
    up_at = state(outside).began_at
    outside.pass_by(600)
    assert give(outside, "reconcile", JOB).code == 0
    assert state(outside).began_at == up_at
    ordered_at = outside.clock.now()
    assert give(outside, "train", "small.yaml").code == 0
    began_at = state(outside).began_at
    assert began_at is not None
    assert began_at >= ordered_at
    (started,) = (one for one in jobs(outside).events.read() if one.kind == "started")
    assert started.seconds is not None
    assert started.seconds < 600


def test_whoever_ends_a_files_newest_run_hears_of_machines_that_another_run_of_it_keeps(outside: Outside) -> None:
    give(outside, "train", "small.yaml", "--keep")
    give(outside, "up", "small.yaml")
    kept = f"{JOB} keeps 2 machines, paid until"
    ended = give(outside, "down", "small.yaml")
    assert (ended.code, alive(outside)) == (0, 2)
    assert kept in ended.stderr
    assert kept not in give(outside, "down", f"{JOB}@1").stderr
    assert (alive(outside), kept in give(outside, "down", "small.yaml").stderr) == (0, False)


def test_a_run_that_trains_is_not_said_to_keep_its_machines(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "train", "small.yaml", at=200)
    second = JobStore(outside.store, f"{JOB}-2").load()
    assert second is not None
    assert len(second[0].alive) == 2
    ended = give(outside, "down", f"{JOB}@1")
    assert (ended.code, "keeps" in ended.stderr) == (0, False), ended.stderr


def test_a_pass_over_machines_that_are_up_trains_nothing(outside: Outside) -> None:
    assert give(outside, "up", "small.yaml").code == 0
    for words in (("reconcile", JOB), ("reconcile", "--all"), ("reconcile", JOB)):
        assert give(outside, *words).code == 0
        assert state(outside).attempts == ()
    assert alive(outside) == 2
    assert give(outside, "train", "small.yaml").code == 0
    assert state(outside).exit_reason is ExitReason.SUCCEEDED


def test_whoever_goes_on_with_a_drill_or_a_lowered_budget_goes_by_what_was_ordered(outside: Outside) -> None:
    give(outside, "train", "small.yaml", "--drill", "--budget", "0.9USD", at=60)
    order = orders(outside).newest().order
    assert (order.drill, order.budget_usd, order.file_budget_usd) == (True, Decimal("0.9"), 1)
    for _ in range(200):
        assert give(outside, "reconcile", JOB).code in (0, 4)
        outside.pass_by(1.0)
        if state(outside).torn_down:
            break
    assert state(outside).exit_reason is ExitReason.SUCCEEDED
    assert [attempt.reason for attempt in state(outside).attempts] == [ExitReason.INTERRUPTED, ExitReason.SUCCEEDED]


def test_a_down_that_comes_while_a_start_makes_its_machines_ends_the_job(outside: Outside) -> None:
    ensure = outside.provisioner.ensure
    outside.provisioner.ensure = lambda *a, **b: (orders(outside).end(), ensure(*a, **b))[1]  # type: ignore[method-assign]
    ended = give(outside, "train", "small.yaml")

    assert (ended.code, state(outside).exit_reason, state(outside).torn_down) == (130, ExitReason.STOPPED, True)
    assert state(outside).attempts == ()
    assert alive(outside) == 0


def test_output_that_cannot_be_kept_for_a_moment_ends_no_supervisor(outside: Outside) -> None:
    put = fails_once(outside.store.put, StoreError("s3 answers 503", may_pass=True), lambda key, *_: "/logs/" in key)
    outside.store.put = put  # type: ignore[method-assign]
    ended = give(outside, "train", "small.yaml")
    assert (ended.code, state(outside).exit_reason) == (0, ExitReason.SUCCEEDED), ended.stderr
    assert "s3 answers 503; trying again for 120 s" in ended.stderr


def test_a_cloud_that_fails_for_a_moment_keeps_nobody_from_taking_a_job_back(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    stored = jobs(outside).load()
    assert stored is not None
    jobs(outside).replace(replace(stored[0], drives_itself=True), stored[1].version)
    throttled = ProvisionError("the cloud is busy", hint=None, may_pass=True)
    outside.provisioner.ensure = fails_once(outside.provisioner.ensure, throttled)  # type: ignore[method-assign]
    ended = give(outside, "train", "small.yaml")
    assert (ended.code, state(outside).exit_reason) == (0, ExitReason.SUCCEEDED), ended.stderr
    assert "the cloud is busy; trying again for 120 s" in ended.stderr


class WrongClock:
    """This machine's clock, so much ahead of the store's and the cloud's."""

    def __init__(self, outside: Outside, ahead: timedelta) -> None:
        self._outside, self._ahead = outside, ahead

    def now(self) -> datetime:
        return self._outside.clock.now() + self._ahead

    def sleep(self, seconds: float) -> None:
        self._outside.clock.sleep(seconds)


@pytest.mark.parametrize("hours", [-1, 1])
def test_no_clock_of_this_machine_moves_a_shut_off_a_deadline_or_a_bill(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    outside.file.write_text(f"{outside.file.read_text()}deadline: 40min\n")
    outside.job = replace(outside.job, deadline=timedelta(minutes=40))
    real = Rigged.__init__

    def rigged(self: Rigged, *arguments: Any) -> None:
        real(self, *arguments)
        self.clock = WrongClock(outside, timedelta(hours=hours))  # type: ignore[assignment]

    monkeypatch.setattr(Rigged, "__init__", rigged)
    began = outside.clock.now()
    assert give(outside, "up", "small.yaml").code == 0
    until = outside.cloud.describe(GROUP).armed_until
    assert until is not None
    assert timedelta(minutes=28) < until - began < timedelta(minutes=31)
    assert give(outside, "budget", JOB, "0.3 USD").code == 0
    closer = outside.cloud.describe(GROUP).armed_until
    assert closer is not None
    assert outside.clock.now() < closer < until
    ended = give(outside, "train", "small.yaml")
    assert (ended.code, state(outside).exit_reason) == (0, ExitReason.SUCCEEDED), ended.stderr
    assert jobs(outside).charges()
    assert all(began <= charge.start <= charge.end <= closer for charge in jobs(outside).charges())


def fails_once(call: Any, error: Exception, when: Any = lambda *_: True) -> Any:
    """Return what raises the error at the first call that fits, and then does what the call does."""
    errors = [error]

    def called(*arguments: Any, **named: Any) -> Any:
        if errors and when(*arguments):
            raise errors.pop()
        return call(*arguments, **named)

    return called


def test_a_budget_that_is_lowered_while_a_job_runs_is_acted_on_by_whoever_runs_it(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    before = outside.cloud.describe(GROUP).armed_until
    orders(outside).change(lambda newest: with_budget(newest, Decimal("0.3")))
    outside.pass_by(1.0)
    assert give(outside, "reconcile", JOB).code == 0
    after = outside.cloud.describe(GROUP).armed_until

    assert before is not None
    assert after is not None
    assert after < before
    assert (state(outside).order_number, state(outside).paid_until) == (2, after)


def test_a_job_file_that_was_edited_since_the_start_is_not_obeyed_by_a_pass_and_that_is_said(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    outside.file.write_text(outside.file.read_text().replace("nodes: 2", "nodes: 1"))
    ended = give(outside, "reconcile", JOB)

    assert "was changed since the job was started: its order 1 counts" in ended.stderr
    assert alive(outside) == 2


def test_a_drill_is_billed_once_and_not_to_the_budget(outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(region="us-east-2", drill_usd=Decimal("0.2"))
    monkeypatch.setattr(_Cloud, "cloud_profile", replace(_Cloud.cloud_profile, terms=Terms(rates=(rates,))))
    give(outside, "train", "small.yaml", "--drill")
    give(outside, "reconcile", JOB)
    assert [one.reason for one in state(outside).attempts] == [ExitReason.INTERRUPTED, ExitReason.SUCCEEDED]
    drills = [one for one in jobs(outside).charges() if one.kind is ChargeKind.DRILL]
    assert [(one.usd, one.attempt, one.node_id) for one in drills] == [(Decimal("0.2"), 1, "")]


@pytest.mark.parametrize("kind", [ProvisionError, CredentialsError])
def test_a_drill_that_the_cloud_refuses_ends_neither_the_run_nor_the_supervision_and_costs_nothing(
    outside: Outside, monkeypatch: pytest.MonkeyPatch, kind: type[GpucloudError]
) -> None:
    rates = Rates(region="us-east-2", drill_usd=Decimal("0.2"))
    monkeypatch.setattr(_Cloud, "cloud_profile", replace(_Cloud.cloud_profile, terms=Terms(rates=(rates,))))

    def refuse(*_: object, **__: object) -> None:
        raise kind("no such role", hint="gpucloud up")

    monkeypatch.setattr(outside.cloud, "interrupt", refuse)
    ended = give(outside, "train", "small.yaml", "--drill")
    assert [one.reason for one in state(outside).attempts] == [ExitReason.SUCCEEDED]
    said = "the drill did not take place: no such role (gpucloud up)"
    assert (ended.code, ended.stderr.count(f" {said}\n"), ended.stdout.count(said)) == (20, 1, 1)
    assert (state(outside).drilled, state(outside).torn_down, alive(outside)) == (None, True, 0)
    assert [one for one in jobs(outside).charges() if one.kind is ChargeKind.DRILL] == []


def test_a_drill_is_asked_for_again_when_the_cloud_did_not_answer(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(region="us-east-2", drill_usd=Decimal("0.2"))
    monkeypatch.setattr(_Cloud, "cloud_profile", replace(_Cloud.cloud_profile, terms=Terms(rates=(rates,))))
    taken, asked = outside.cloud.interrupt, []

    def answer_once_more(*place: str, notice: bool) -> None:
        asked.append(place)
        if len(asked) == 1:
            raise ProvisionError("throttled", may_pass=True)
        taken(*place, notice=notice)

    monkeypatch.setattr(outside.cloud, "interrupt", answer_once_more)
    ended = give(outside, "train", "small.yaml", "--drill")
    assert (ended.code, len(asked), state(outside).drilled) == (0, 2, 1)
    drills = [one for one in jobs(outside).charges() if one.kind is ChargeKind.DRILL]
    assert [(one.usd, one.attempt) for one in drills] == [(Decimal("0.2"), 1)]


def test_a_drill_that_the_cloud_may_have_begun_counts_and_is_paid(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Rates(region="us-east-2", drill_usd=Decimal("0.2"))
    monkeypatch.setattr(_Cloud, "cloud_profile", replace(_Cloud.cloud_profile, terms=Terms(rates=(rates,))))
    monkeypatch.setattr(outside.cloud, "interrupt", lambda *_, **__: "the cloud does not say yet that it does")
    ended = give(outside, "train", "small.yaml", "--drill")
    assert (ended.code, ended.stderr.count("drill: the cloud does not say yet that it does\n")) == (
        20,
        1,
    )  # none was taken
    assert [one.usd for one in jobs(outside).charges() if one.kind is ChargeKind.DRILL] == [Decimal("0.2")]


@pytest.mark.parametrize(("use", "reason"), [(5, ExitReason.IDLE), (90, None)])
def test_a_job_that_leaves_its_gpus_idle_ends_though_nobody_supervises_it_for_long(tmp_path, use, reason) -> None:
    outside = Outside(tmp_path, Training(steps=10_000, gpu_use=use))
    outside.file.write_text(outside.file.read_text() + "idle: {below: 30, for: 1 min}\n")
    outside.job = read_job(outside.file)
    give(outside, "train", "small.yaml", at=130)
    for _ in range(40):
        assert give(outside, "reconcile", JOB).code in (0, 4, ExitReason.IDLE.exit_code)
        outside.pass_by(3.0)
    assert state(outside).exit_reason is reason


def test_a_pass_over_all_jobs_is_no_failure_where_one_is_well_supervised(outside: Outside) -> None:
    """A schedule calls it every few minutes: it may not be red for as long as all is well."""
    give(outside, "up", "small.yaml")
    owner = Owner(id="1", host="elsewhere", pid=1, started="1", since=outside.clock.now())
    loaded = jobs(outside).load()
    assert loaded is not None
    jobs(outside).replace(replace(loaded[0], owner=owner), loaded[1].version)

    alone = give(outside, "reconcile", JOB)
    assert (alone.code, "supervised by process 1 on elsewhere" in alone.stderr) == (LeaseHeld.exit_code, True)
    every = give(outside, "reconcile", "--all", "--json")
    assert every.code == 0, every.stderr
    (found,) = json.loads(every.stdout)["jobs"]
    assert (found["job"], found["error"], found["exit_code"]) == (JOB, "lease_held", 0)
    assert (found["condition"], found["supervisor"]) == ("starting", "process 1 on elsewhere")
    assert "elsewhere" in found["message"]


def test_a_run_that_another_process_ends_while_a_start_looks_at_it_is_followed_by_a_new_one(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    taken: list[str] = []

    def remember(known: KnownJob) -> None:
        """Between the start's look at the run and its lease, another process brings it to its end."""
        real(known)
        if not taken:
            taken.append(known.name)
            assert give(outside, "train", "small.yaml").code == 0

    real = outside.home.remember
    object.__setattr__(outside, "home", _Remembering(outside.home, remember))
    ended = give(outside, "train", "small.yaml")
    assert taken == [JOB]
    assert f"{JOB} ended just now" in ended.stderr
    assert JobStore(outside.store, f"{JOB}-2").load() is not None


def test_a_run_that_somebody_ends_while_a_start_looks_at_it_stays_ended_and_nothing_is_rented(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    ended: list[str] = []

    def remember(known: KnownJob) -> None:
        real(known)
        if not ended:
            ended.append(known.name)
            assert give(outside, "down", JOB).code == 0

    real = outside.home.remember
    object.__setattr__(outside, "home", _Remembering(outside.home, remember))
    late = give(outside, "train", "small.yaml")
    assert (late.code, ended) == (4, [JOB]), late.stderr
    assert "order 2" in late.stderr
    stored = JobStore(outside.store, JOB).load()
    assert stored is not None
    assert (stored[0].status, stored[0].torn_down, len(stored[0].attempts)) == (JobStatus.STOPPED, True, 1)


def test_a_failed_run_that_a_newer_one_followed_meanwhile_is_not_gone_on_with(outside: Outside) -> None:
    outside.fleet.training = Training(fails_at=6)
    assert give(outside, "train", "small.yaml").code == 20
    begun: list[str] = []

    def remember(known: KnownJob) -> None:
        real(known)
        if not begun:
            begun.append(known.name)
            give(outside, "train", "small.yaml", "--again")

    real = outside.home.remember
    object.__setattr__(outside, "home", _Remembering(outside.home, remember))
    late = give(outside, "train", "small.yaml")
    assert late.code == 4
    assert f"a newer run of {JOB} was begun just now" in late.stderr
    stored = JobStore(outside.store, JOB).load()
    assert stored is not None
    assert len(stored[0].attempts) == 1
    object.__setattr__(outside, "home", outside.home._home)  # type: ignore[attr-defined]
    over = give(outside, "budget", f"{JOB}@1", "9USD")
    assert over.code == 2
    assert "is over: no budget limits it any more" in over.stderr
    assert "run the same command" not in give(outside, "status", f"{JOB}@1").stdout


def test_again_says_where_it_goes_on_all_the_same(outside: Outside) -> None:
    give(outside, "train", "small.yaml", at=130)
    give(outside, "down", JOB)
    goes_on = give(outside, "train", "small.yaml", "--again")
    assert "small goes on: `--again` begins a new run of what has succeeded, failed by its own error" in goes_on.stderr
    assert JobStore(outside.store, f"{JOB}-2").load() is None


def test_a_start_of_a_supervised_job_says_nothing_of_changes_that_do_not_come(outside: Outside) -> None:
    give(outside, "up", "small.yaml")
    owner = Owner(id="1", host="elsewhere", pid=1, started="1", since=outside.clock.now())
    loaded = jobs(outside).load()
    assert loaded is not None
    jobs(outside).replace(replace(loaded[0], owner=owner), loaded[1].version)
    before = Orders(jobs=jobs(outside), clock=outside.clock).newest()
    late = give(outside, "train", "small.yaml", "--budget", "5USD")
    assert late.code == LeaseHeld.exit_code
    assert late.stderr.startswith(f"error: {JOB} is supervised by process 1 on elsewhere"), late.stderr
    assert f"gpucloud budget {JOB} SUM changes its budget" in late.stderr
    assert Orders(jobs=jobs(outside), clock=outside.clock).newest() == before


class _Remembering:
    """A home that tells when it is to remember a job."""

    def __init__(self, home: object, remember: object) -> None:
        self._home = home
        self.remember = remember

    def __getattr__(self, name: str) -> object:
        return getattr(self._home, name)


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rigged, "unable", lambda *_: None)


@pytest.mark.usefixtures("drives")
def test_who_leaves_a_job_to_its_machines_leaves_when_one_has_shown_that_it_can_drive(outside: Outside) -> None:
    ended = give(outside, "train", "small.yaml", "--detach", "--unattended", "2h")
    assert ended.code == 0
    assert not state(outside).status.ended
    assert orders(outside).newest().order.unattended == timedelta(hours=2)


@pytest.mark.usefixtures("drives")
def test_who_leaves_a_job_to_its_machines_waits_until_one_of_them_supervises_it(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = outside.clock.sleep

    def pass_by(seconds: float) -> None:
        sleep(seconds)
        if orders(outside).newest().order.unattended is not None:
            with suppress(LeaseHeld):
                take(jobs(outside), outside.clock, node="node-1")

    monkeypatch.setattr(outside.clock, "sleep", pass_by)
    ended = give(outside, "train", "small.yaml", "--detach", "--unattended", "2h", "--json")
    told = json.loads(ended.stdout)
    assert (ended.code, told["supervisor"], told["condition"]) == (0, "its own node node-1", "preparing")
    assert "none of its machines" not in ended.stderr


@pytest.mark.usefixtures("drives")
def test_output_of_a_job_that_one_of_its_machines_is_about_to_take_is_not_said_to_be_fetched_by_nobody(
    tmp_path: Path,
) -> None:
    outside = Outside(tmp_path, training=Training(steps=400, every=100))
    give(outside, "train", "small.yaml", at=300)
    lease_s = state(outside).lease_s
    with suppress(LeaseHeld), take(jobs(outside), outside.clock) as lease:
        lease.write(replace(lease.state, drives_itself=True))
    found = orders(outside).newest()
    orders(outside).give(replace(found.order, number=found.order.number + 1, unattended=timedelta(hours=2)), found)
    asked = logs_asker(outside)
    outside.clock.sleep(lease_s)
    assert unsupervised(asked) is None
    outside.clock.sleep(3600)
    assert unsupervised(asked) is not None  # none has taken it


def test_the_first_decision_of_who_takes_a_job_over_knows_how_far_it_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = Outside(tmp_path, training=Training(steps=4000, every=100))
    give(outside, "train", "small.yaml", at=300)
    known = state(outside).attempts[-1].last_step or 0
    outside.clock.sleep(600)
    seen: list[Snapshot] = []

    def noted(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
        seen.append(snapshot)
        return decide(goal, snapshot, rules)

    monkeypatch.setattr(session, "decide", noted)
    give(outside, "reconcile", "small.yaml")
    told = [(shown_of(one.state.attempts[-1], one)[0], one.state.attempts[-1].last_step) for one in seen]
    heard = next((progress.step, last) for progress, last in told if progress is not None)
    assert heard[0] == heard[1] > known


@pytest.mark.parametrize("flush_s", [1, 5])
def test_what_was_not_yet_kept_when_its_supervisor_died_is_not_said_to_be_fetched(
    tmp_path: Path, flush_s: float
) -> None:
    outside = Outside(tmp_path, training=Training(steps=400, every=100))
    give(outside, "train", "small.yaml", at=300)
    outside.clock.sleep(state(outside).lease_s)
    loaded = jobs(outside).load()
    assert loaded is not None
    asked = replace(logs_asker(outside), flush_s=flush_s)
    left = unsupervised(asked)
    assert left is not None
    assert left.fetched_until == loaded[1].modified - timedelta(seconds=flush_s)
    attempt = left.state.attempt
    assert attempt is not None
    assert not asked.is_off(attempt, left.state)
    outside.clock.sleep(24 * 3600)
    assert asked.is_off(attempt, left.state)


def test_nothing_is_said_to_be_fetched_by_who_hears_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Outside(tmp_path, training=Training(steps=4000, every=100))
    give(outside, "train", "small.yaml", at=300)
    outside.clock.sleep(state(outside).lease_s)
    before = unsupervised(logs_asker(outside))
    monkeypatch.setattr(FleetHost, "run", out_of_reach)
    outside.clock.sleep(60)
    give(outside, "reconcile", "small.yaml")
    outside.clock.sleep(state(outside).lease_s)
    after = unsupervised(logs_asker(outside))
    assert before is not None
    assert after is not None
    assert after.fetched_until <= before.fetched_until


def out_of_reach(*_: object, **__: object) -> Any:
    raise NodeError("no route to host", hint=None)


def unsupervised(asker: Asker) -> Unsupervised | None:
    looks: list[Unsupervised | None] = []
    assert list(asker.output(attempt=None, rank=7, follow=False, caught_up=looks.append)) == []
    return looks[0]


def logs_asker(outside: Outside) -> Asker:
    market: Any = outside.market
    return Asker(jobs=jobs(outside), market=market, group=outside.cloud, clock=outside.clock, terms=Terms())


@pytest.mark.usefixtures("drives")
@pytest.mark.parametrize("words", [(), ("--json",)])
def test_who_leaves_a_job_that_no_machine_takes_over_hears_that_none_has(
    outside: Outside, words: tuple[str, ...]
) -> None:
    ended = give(outside, "train", "small.yaml", "--detach", "--unattended", "2h", *words)
    assert ended.code == 0
    assert "none of its machines has taken over within 1 min: `gpucloud status small`" in ended.stderr
    assert "drives itself" not in ended.stdout
    advice = (
        "`gpucloud logs -f small` follows it; `gpucloud down small` ends it;"  # its file names no outputs
        " `gpucloud train small` begins again at step 0 when that time is over"  # and its script saves nothing
    )
    assert (advice in ended.stderr) is (not words)
    assert "unsupervised" in ended.stdout if words else "nobody supervises" in ended.stdout.lower()


@pytest.mark.usefixtures("drives")
def test_a_right_that_machines_lack_is_named_and_the_job_is_supervised_to_its_end(tmp_path: Path) -> None:
    outside = Outside(tmp_path, training=Training(nodes=2, steps=400, every=100, step_s=0.5))
    outside.refused = "AccessDenied: s3:PutObject on jobs/small/state.json"
    ended = give(outside, "train", "small.yaml", "--detach", "--unattended", "2h")
    assert ended.code == 0
    assert state(outside).exit_reason is ExitReason.SUCCEEDED
    assert orders(outside).newest().order.unattended is None
    said = ended.stderr
    assert "small cannot drive itself: " in said
    assert "may not do what driving the job needs: AccessDenied: s3:PutObject on jobs/small/state.json" in said


def test_words_of_machines_are_written_with_what_else_is_and_never_by_themselves(outside: Outside) -> None:
    """Forty looks at machines that train, each of which hears something new: the state is written at none."""
    outside.fleet.training = Training(steps=50, step_s=1.0, every=1000)
    ticks: list[datetime] = []
    written: list[datetime] = []
    sleep, put = outside.clock.sleep, outside.store.put

    def slept(seconds: float) -> None:
        ticks.append(outside.clock.now())
        sleep(seconds)

    def putting(key: str, *given: Any, **named: Any) -> str:
        if key == f"jobs/{JOB}/state.json":
            written.append(outside.clock.now())
        return put(key, *given, **named)

    outside.clock.sleep, outside.store.put = slept, putting  # type: ignore[method-assign]
    ended = give(outside, "train", "small.yaml")
    assert ended.code == 0, ended.stderr
    began = state(outside).attempts[0].started_at
    trains = (began + timedelta(seconds=5), began + timedelta(seconds=45))
    assert len([at for at in ticks if trains[0] < at < trains[1]]) >= 35
    assert [at for at in written if trains[0] < at < trains[1]] == []
    assert all(
        interval.last_word_at is not None and interval.last_word_at > trains[1] for interval in state(outside).nodes
    )


def test_that_results_came_is_written_at_once_for_who_brought_them_may_be_going() -> None:
    missing = MissingOutput(path="results/", why="went", attempt=1)
    waiting = replace(worlds.opened("a"), reason=ExitReason.INTERRUPTED, missing_outputs=(missing,))
    came = replace(waiting, missing_outputs=(), outputs_came=True)
    before, after = (worlds.state(attempts=(one,)) for one in (waiting, came))
    assert session._is_news(before, after, worlds.NOW)
    assert not session._is_news(after, after, worlds.NOW)


def test_a_machine_that_falls_silent_is_written_once_with_when_it_was_heard_last(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.fleet.training = Training(steps=200, step_s=1.0, every=1000)
    frozen_from = outside.clock.now() + timedelta(seconds=20)
    check, put = FleetHost.check, outside.store.put
    written: list[tuple[datetime, Any]] = []

    def checked(own: FleetHost) -> None:
        if outside.clock.now() >= frozen_from and own.node.id.endswith("2"):
            raise HostUnreachable(f"{own.node.id}: timed out")
        check(own)

    def putting(key: str, data: Any, *given: Any, **named: Any) -> str:
        if key == f"jobs/{JOB}/state.json":
            written.append((outside.clock.now(), json.loads(data)))
        return put(key, data, *given, **named)

    monkeypatch.setattr(FleetHost, "check", checked)
    outside.store.put = putting  # type: ignore[method-assign]
    give(outside, "train", "small.yaml", at=900)
    told = [found for at, found in written if frozen_from <= at]
    assert len(told) == 1, told
    frozen, other = sorted(told[0]["nodes"], key=lambda interval: interval["node_id"], reverse=True)
    assert frozen["last_word_at"] <= frozen["silent_at"] < f"{frozen_from + timedelta(seconds=3):%Y-%m-%dT%H:%M:%S}"
    assert other["silent_at"] is None
    assert other["last_word_at"] > frozen["last_word_at"]
