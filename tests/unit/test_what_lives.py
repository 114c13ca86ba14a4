"""What is said of machines when the user leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.cli.commands.supervising import answer_left, say_what_is_left
from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render.bills import spend_text
from gpucloud.cli.render.plans import plan_json, plan_rows
from gpucloud.cli.render.reports import report_text
from gpucloud.domain.job.spec import Market, Resources
from gpucloud.domain.market.plan import make_plan
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.domain.money.ledger import Terms
from gpucloud.domain.offer import Offer, Pool, PricePoint
from gpucloud.domain.state.state import ExitReason, JobState, JobStatus, UsageInterval
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.usecases.job.jobs import Asker, Kept, LeftJob
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.story import silence
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.fakes.node_group import FakeNodeGroup
from tests.unit.worlds import NOW, POOL, job, opened, put_job, snapshot, state, up

ARMED = NOW + timedelta(minutes=30)


def test_machines_that_were_asked_for_and_not_seen_yet_are_not_denied(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(LeftJob(state=replace(state(), nodes=(), paid_until=NOW + timedelta(minutes=30))), NOW)
    said = capsys.readouterr().err
    assert "no machines are alive" not in said
    assert (
        "no machine has been seen; one that was asked for last is paid until 12:30:00 UTC, then off by itself" in said
    )
    assert "`gpucloud down " in said


def test_without_an_armed_shut_off_there_are_no_machines(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(LeftJob(state=replace(state(), nodes=(), paid_until=None)), NOW)
    assert capsys.readouterr().err.endswith("no machines are alive\n")


def test_programs_hear_of_who_leaves_what_people_do(capsys: pytest.CaptureFixture[str]) -> None:
    alive = UsageInterval(node_id="a", pool=POOL, launched_at=NOW)
    known = replace(state(), group="gpucloud-digits", nodes=(alive,), paid_until=ARMED)
    asker = SimpleNamespace(
        left_job=lambda: LeftJob(state=known),
        clock=SimpleNamespace(now=lambda: NOW),
        jobs=SimpleNamespace(job="digits"),
    )
    assert answer_left(asker, Leave(exit_code=130), as_json=True) == 130  # type: ignore[arg-type]
    said = capsys.readouterr()
    lines = ["left digits as it is", "alive and paid until 12:30:00 UTC, then off by themselves: a"]
    way = "`gpucloud train digits` goes on, `gpucloud down digits` ends them now"
    error = json.loads(said.out)["error"]
    assert said.err.splitlines() == [*lines, way]
    assert (error["message"], error["hint"]) == ("; ".join(lines), way)


def last_line(capsys: pytest.CaptureFixture[str], **left: Any) -> str:
    alive = UsageInterval(node_id="a", pool=POOL, launched_at=NOW)
    known = {"group": "gpucloud-digits", "nodes": (alive,), "paid_until": ARMED, **left.pop("state", {})}
    first = left.pop("first", str)
    say_what_is_left(LeftJob(state=replace(state(), **known), **left), NOW, first)
    return capsys.readouterr().err.splitlines()[-1]


OWN = {"drives_itself": True}
COMES = "digits drives itself once that machine is there; `gpucloud logs -f digits` follows it, {down} ends it"
UNSEEN_TO = "nobody looks for machines until {train}; {down} ends it"
SEEN_TO = "its own machines see to its end once that machine is there; {down} waits for it"
DONE = {"status": JobStatus.SUCCEEDED, "exit_reason": ExitReason.SUCCEEDED, "exit_code": 0}
STOPPED, HUNG = ExitReason.STOPPED, ExitReason.HUNG


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ({"end": STOPPED, "supervisor": "process 1 on vm"}, "process 1 on vm sees to its end; {down} waits for it"),
        ({"end": STOPPED}, "nobody sees to its end now: {down} does"),
        ({"end": STOPPED, "state": OWN}, "its own machines see to its end; {down} waits for it"),
        ({"state": {"attempts": (opened("a", ending_reason=STOPPED),)}}, "nobody sees to its end now: {down} does"),
        ({"state": {"attempts": (opened("a", ending_reason=HUNG),)}}, "{train} goes on, {down} ends them now"),
        ({"state": OWN}, "digits drives itself; `gpucloud logs -f digits` follows it, {down} ends it"),
        ({"state": {**OWN, "nodes": ()}, "asked_for": 0}, UNSEEN_TO),
        ({"state": {**OWN, "nodes": (), "paid_until": None}}, UNSEEN_TO),
        ({"state": {**OWN, "nodes": ()}, "asked_for": 1}, COMES),
        ({"state": {**OWN, "nodes": ()}}, COMES),
        ({"end": STOPPED, "state": {**OWN, "nodes": ()}, "asked_for": 1}, SEEN_TO),
        ({"end": STOPPED, "state": {**OWN, "nodes": ()}, "asked_for": 0}, "nobody sees to its end now: {down} does"),
        ({"state": {"nodes": ()}, "asked_for": 0}, "{train} goes on, {down} ends it"),
        ({"state": DONE}, "{down} removes what is left on the cloud"),
        ({"state": {**OWN, **DONE, "nodes": ()}, "asked_for": 0}, "{down} removes what is left on the cloud"),
    ],
)  # fmt: skip
def test_who_leaves_reads_who_goes_on_with_the_job_or_with_its_end(
    capsys: pytest.CaptureFixture[str], left: Any, line: str
) -> None:
    said = last_line(capsys, **left)
    assert said == line.format(down="`gpucloud down digits`", train="`gpucloud train digits`")


@pytest.mark.parametrize(
    ("left", "line"),
    [
        ({}, "first: {train} goes on, {down} ends them now"),
        ({"state": {"nodes": ()}, "asked_for": 0}, "first: {train} goes on, {down} ends it"),
        ({"end": STOPPED}, "nobody sees to its end now: first: {down} does"),
        ({"state": OWN}, "digits drives itself; `gpucloud logs -f digits` follows it, {down} ends it"),
        ({"end": STOPPED, "state": OWN}, "its own machines see to its end; {down} waits for it"),
    ],
)
def test_what_has_to_be_so_before_a_command_does_anything_is_said_of_what_waits_for_one_alone(
    capsys: pytest.CaptureFixture[str], left: Any, line: str
) -> None:
    said = last_line(capsys, first=lambda: "first: ", **left)
    assert said == line.format(down="`gpucloud down digits`", train="`gpucloud train digits`")


def test_only_a_group_that_asks_for_machines_may_have_one_that_no_listing_shows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    none = replace(state(), nodes=(), paid_until=NOW + timedelta(minutes=30))
    for asked_for, unseen in ((0, False), (1, True), (None, True)):
        say_what_is_left(LeftJob(state=none, asked_for=asked_for), NOW)
        said = capsys.readouterr().err
        assert ("one that was asked for last is paid" in said) is unseen
        assert ("no machines are alive" in said) is not unseen


def test_a_job_that_has_ended_and_whose_end_was_ordered_is_not_to_end_any_more() -> None:
    over = replace(state(), status=JobStatus.STOPPED)
    assert LeftJob(state=over, end=STOPPED).ends
    assert not LeftJob(state=replace(over, torn_down=True), end=STOPPED).ends


HOSTS = Pool(instance_type="", zone="", market=Market.OWNED)
AT_THEIR_END = "12:30:00 UTC"


def hosts_of_ones_own(**of_state: Any) -> JobState:
    nodes = (UsageInterval(node_id="gpu1", launched_at=NOW, pool=HOSTS),)
    return replace(state(), pool=HOSTS, cap_usd_per_hour=Decimal(0), nodes=nodes, paid_until=ARMED, **of_state)


def asker_of_hosts(**ordered: Any) -> Asker:
    """Return who answers for a job on a host of one's own that nobody supervises."""
    clock = JumpingClock(NOW)
    group, jobs = FakeNodeGroup(clock), JobStore(MemoryStore(clock), "digits")
    group.create("gpucloud-digits")
    group.arm("gpucloud-digits", ARMED)
    group.resize("gpucloud-digits", 1, HOSTS)
    put_job(jobs, hosts_of_ones_own(), **ordered)
    return Asker(jobs=jobs, market=FREE, group=group, clock=clock, terms=Terms())


class Free:
    """Implements `MarketData`: what is one's own costs nothing."""

    def offers(self, wanted: Resources) -> tuple[Offer, ...]:
        return (Offer(pool=HOSTS, usd_per_hour=Decimal(0), cap_usd_per_hour=Decimal(0), as_of=NOW, gpus=1),)

    def prices(self, pool: Pool, start: datetime, end: datetime) -> tuple[PricePoint, ...]:
        return (PricePoint(since=start, usd_per_hour=Decimal(0)),)


FREE = Free()


def test_own_hosts_are_left_as_taken_and_are_free_again_by_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    say_what_is_left(LeftJob(state=hosts_of_ones_own()), NOW)
    assert f"alive and taken until {AT_THEIR_END}, then free again by themselves: gpu1\n" in capsys.readouterr().err


def test_nobody_reads_that_own_hosts_are_paid_or_go_off() -> None:
    told = asker_of_hosts().report()
    text = report_text(told)
    assert f"all is free again at {AT_THEIR_END}" in text
    assert f"1 machine, taken until {AT_THEIR_END}: " in text
    assert told.spend.off_at is None
    assert spend_text(told.spend) == "spent  0.00 of 1.00 USD"
    assert " off" not in text
    assert "paid" not in text


def test_the_plan_of_own_hosts_costs_nothing_at_the_worst_and_switches_nothing_off() -> None:
    plan = make_plan(job(resources=Resources(nodes=1)), FREE.offers(Resources()), NOW, PrepaidRule())
    assert plan_rows(plan)["worst cost"] == "0.00 USD, nothing is paid for your own hosts"
    assert plan_json(plan)["worst_usd"] == "0"


def test_own_hosts_that_do_not_answer_are_taken_and_not_paid() -> None:
    alone = snapshot(up("gpu1"), state=hosts_of_ones_own(), armed=ARMED)
    assert silence(alone, Limits()) == f"no machine answers: gpu1; taken until {AT_THEIR_END}"


def test_own_hosts_that_a_run_keeps_are_taken_and_not_paid() -> None:
    kept = Kept(name="digits", run=1, machines=1, until=ARMED, as_of=NOW, owned=True)
    assert str(kept) == f"digits keeps 1 machine, taken until {AT_THEIR_END}: `gpucloud down digits@1` ends it now"
