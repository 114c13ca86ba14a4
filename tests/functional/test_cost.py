"""`gpucloud cost` as its user meets it: tables, JSON, CSV, several jobs, and what cannot be asked."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.home import Home
from gpucloud.cli.commands import asking as billed_command
from gpucloud.cli.commands.asking import Asked, cost, require_one
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.money.costs import Billed, BilledLine
from gpucloud.domain.money.ledger import Charge, ChargeKind, Rates, Terms
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import PricePoint
from gpucloud.domain.state.state import ExitReason, JobStatus, UsageInterval
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.money.spend import SpendTracker
from gpucloud.wiring.clouds import LocalCloud
from tests.unit.worlds import POOL, opened, put_job, state

BORN = datetime(2026, 11, 10, 23, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
RATES = Rates(region="us-east-2", disk_usd_per_gib_month=Decimal("0.72"), address_usd_per_hour=Decimal("0.005"))
TERMS = Terms(disk_gib=100, public_address=True, rates=(RATES,))  # 0.10 USD an hour for a disk in November


class OnePrice:
    def offers(self, wanted):
        return ()

    def prices(self, pool, start, end):
        return (PricePoint(since=start, usd_per_hour=Decimal("0.36")),)


def interval(node_id, begins, ends):
    return UsageInterval(
        node_id=node_id,
        pool=POOL,
        launched_at=BORN + begins * HOUR,
        ended_at=BORN + ends * HOUR,
        end_cause=EndCause.CHOICE,
    )


def make(home: Home, name, *, tags=(), intervals=(), attempts=(), bill_differences=()):
    """A known job that has ended, with its machines' charges in its ledger."""
    jobs = JobStore(open_store(home.store), name)
    made = state(
        job=name,
        group=None,
        paid_until=None,
        nodes=intervals,
        attempts=attempts,
        tags=tags,
        status=JobStatus.SUCCEEDED,
        exit_reason=ExitReason.SUCCEEDED,
        torn_down=True,
    )
    put_job(jobs, SpendTracker(jobs, OnePrice(), TERMS).settle(made, BORN + 9 * HOUR), budget_usd=Decimal(5))
    for number, charge in enumerate(bill_differences):
        jobs.bill_outside_budget(f"{number}", (charge,))
    home.remember(KnownJob(name=name, store=jobs.store.url, file=Path("/nowhere/gpucloud.yaml")))
    return jobs


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    home = Home(tmp_path)
    ends = (opened("i-a", ended_at=BORN + HOUR, reason=ExitReason.LOST), opened("i-b", number=2))
    make(
        home,
        "vision",
        tags=(("project", "eyes"),),
        intervals=(interval("i-a", 0, 2), interval("i-b", 1, 2)),
        attempts=ends,
        bill_differences=(
            Charge(
                node_id="",
                attempt=1,
                start=BORN,
                end=BORN + HOUR,
                usd_per_hour=Decimal(0),
                usd=Decimal("0.25"),
                kind=ChargeKind.TRANSFER,
                estimated=True,
            ),
        ),
    )
    make(home, "words", tags=(("project", "ears"),), intervals=(interval("i-c", 3, 4),), attempts=(opened("i-c"),))
    make(home, "more-words", tags=(("project", "ears"),), intervals=(interval("i-d", 4, 5),), attempts=(opened("i-d"),))
    return home


def said(capsys, *targets, **asked):
    assert cost(targets, Asked(**asked), as_json=False) == 0
    return capsys.readouterr().out


def answer(capsys, *targets, **asked):
    assert cost(targets, Asked(**asked), as_json=True) == 0
    return json.loads(capsys.readouterr().out)


def test_a_jobs_cost_is_a_table_by_attempt_and_what_is_left(home, capsys):
    assert said(capsys, "vision") == (
        "attempt  from (UTC)        machine hours   compute      disk   address  transfer       USD\n"
        "1        2026-11-10 23:00           1.00  0.360000  0.100000  0.005000  0.250000  0.715000  partly estimated\n"
        "2        2026-11-11 00:00           2.00  0.720000  0.200000  0.010000  0.000000  0.930000\n"
        "total                               3.00  1.080000  0.300000  0.015000  0.250000  1.645000\n"
        "\n"
        "spent    1.40 of 5.00 USD\n"
        "outside  0.25 USD, not in the budget: storage, requests, transfer, data from other regions and drills\n"
    )


def test_every_way_of_summing_makes_the_same_sum(home, capsys):
    sums = {}
    for way in ("job", "attempt", "node", "day", "kind", "tag:project"):
        rows = answer(capsys, every=True, by=way)["rows"]
        sums[way] = sum(Decimal(row["usd"]) for row in rows)
    assert set(sums.values()) == {Decimal("2.575")}


def test_days_are_utcs_and_a_charge_over_midnight_is_in_both(home, capsys):
    rows = answer(capsys, "vision", by="day")["rows"]
    assert [(row["group"], row["usd"], row["machine_seconds"]) for row in rows] == [
        ({"day": "2026-11-10"}, "0.715", 3600),
        ({"day": "2026-11-11"}, "0.93", 7200),
    ]


def test_since_a_day_is_what_was_spent_from_its_midnight_on(home, capsys):
    assert [row["usd"] for row in answer(capsys, "vision", by="job", since="2026-11-11")["rows"]] == ["0.93"]
    assert answer(capsys, "vision", by="job", since="2026-11-12")["rows"] == []


def test_jobs_are_summed_by_their_tags(home, capsys):
    make(home, "untagged", intervals=(interval("i-e", 0, 1),), attempts=(opened("i-e"),))
    rows = answer(capsys, every=True, by="tag:project")["rows"]
    assert [(row["group"]["project"], row["usd"]) for row in rows] == [
        ("-", "0.465"),
        ("ears", "0.93"),
        ("eyes", "1.645"),
    ]


def test_several_jobs_have_a_row_each_and_attempts_of_their_own(home, capsys):
    assert [line.split()[0] for line in said(capsys, "words", "vision").splitlines()] == [
        "job",
        "vision",
        "words",
        "total",
    ]
    rows = answer(capsys, "words", "vision", by="attempt")["rows"]
    assert [tuple(row["group"].values()) for row in rows] == [("vision", "1"), ("vision", "2"), ("words", "1")]


def test_json_has_every_charge_and_those_that_the_budget_counts_sum_to_what_was_spent(home, capsys):
    told = answer(capsys, "vision")
    assert told["spend"]["spent_usd"] == "1.395"
    assert told["spend"]["outside_budget_usd"] == "0.25"
    assert sum(Decimal(charge["usd"]) for charge in told["charges"]) == Decimal("1.395")
    assert [(charge["kind"], charge["usd"], charge["estimated"]) for charge in told["outside_budget"]] == [
        ("transfer", "0.25", True)
    ]
    assert told["tags"] == {"project": "eyes"}
    assert told["by_kind"] == [
        {"kind": "compute", "usd": "1.08"},
        {"kind": "disk", "usd": "0.3"},
        {"kind": "address", "usd": "0.015"},
        {"kind": "transfer", "usd": "0.25"},
    ]


def test_csv_has_a_line_for_each_charge_with_tags_in_columns(home, capsys):
    lines = list(csv.DictReader(io.StringIO(said(capsys, every=True, to="-"))))
    assert sum(Decimal(line["usd"]) for line in lines) == Decimal("2.575")
    first = next(line for line in lines if line["job"] == "words" and line["kind"] == "compute")
    assert first == {
        "job": "words",
        "node": "i-c",
        "attempt": "1",
        "kind": "compute",
        "start": "2026-11-11T02:00:00+00:00",
        "end": "2026-11-11T03:00:00+00:00",
        "usd_per_hour": "0.36",
        "usd": "0.36",
        "note": "",
        "estimated": "False",
        "instance_type": "local.p2.xlarge",
        "zone": "us-east-2a",
        "market": "spot",
        "seconds": "3600",
        "in_budget": "True",
        "tag:project": "ears",
    }


def test_csv_of_sums_goes_into_a_file(home, capsys):
    assert said(capsys, every=True, by="tag:project", to="sums.csv") == ""
    lines = list(csv.DictReader(io.StringIO(Path("sums.csv").read_text())))
    assert [(line["project"], line["compute"], line["usd"]) for line in lines] == [
        ("ears", "0.72", "0.93"),
        ("eyes", "1.08", "1.645"),
    ]


@pytest.mark.parametrize(
    ("targets", "asked", "hint"),
    [
        (("vision",), Asked(by="colour"), "--by job, attempt, node, day, kind or tag:KEY"),
        (("vision",), Asked(by="tag:"), "--by job, attempt, node, day, kind or tag:KEY"),
        (("vision",), Asked(since="yesterday"), "--since 2026-11-01: from midnight on, UTC"),
        (("vision",), Asked(since="2026-02-30"), "--since 2026-11-01: from midnight on, UTC"),
        (("vision",), Asked(to="/nowhere/x.csv"), "--csv names a file, or -"),
        (("vision",), Asked(every=True), "name some, or leave the names out"),
        (("visoin",), Asked(), "did you mean vision?"),
    ],
)
def test_what_cannot_be_answered_is_said_with_what_can(home, targets, asked, hint):
    with pytest.raises(UsageError) as caught:
        cost(targets, asked, as_json=False)
    assert caught.value.hint == hint


class Bill:
    """What a cloud says; counts how often it was asked."""

    def __init__(self):
        self.asked = 0

    def of_job(self, job, first, now):
        self.asked += 1
        lines = (
            BilledLine(day="2026-11-10", usage="USE2-SpotUsage:p2.xlarge", usd=Decimal("0.37")),
            BilledLine(day="2026-11-10", usage="USE2-EBS:VolumeUsage.gp3", usd=Decimal("0.10")),
            BilledLine(day="2026-11-11", usage="USE2-SpotUsage:p2.xlarge", usd=Decimal("0.72")),
            BilledLine(day="2026-11-11", usage="Tax", usd=Decimal("0.01")),
        )
        return Billed(asked_at=now, first=f"{first:%Y-%m-%d}", lines=lines, requests=1)


def test_the_bill_stands_beside_the_ledger_and_is_asked_for_once_a_day(home, capsys, monkeypatch):
    bill = Bill()
    monkeypatch.setattr(LocalCloud, "billing", lambda self: bill)
    for _ in range(2):
        assert billed_command.bill("vision", as_json=True) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[0])
    assert bill.asked == 1
    assert [
        (row["day"], row["kind"], row["ours_usd"], row["billed_usd"], row["drift_usd"]) for row in told["rows"]
    ] == [
        ("2026-11-10", "compute", "0.36", "0.37", "0.01"),
        ("2026-11-10", "disk", "0.1", "0.1", "0"),
        ("2026-11-10", "address", "0.005", "0", "-0.005"),
        ("2026-11-10", "transfer", "0.25", "0", "-0.25"),
        ("2026-11-11", "compute", "0.72", "0.72", "0"),
        ("2026-11-11", "disk", "0.2", "0", "-0.2"),
        ("2026-11-11", "address", "0.01", "0", "-0.01"),
        ("2026-11-11", None, "0", "0.01", "0.01"),
    ]


def test_the_kept_bill_is_asked_for_again_after_a_day(home, monkeypatch, capsys):
    bill = Bill()
    monkeypatch.setattr(LocalCloud, "billing", lambda self: bill)
    billed_command.bill("vision", as_json=False)
    jobs = JobStore(open_store(home.store), "vision")
    kept = jobs.billed()
    jobs.keep_billed(replace(kept, asked_at=kept.asked_at - timedelta(days=1)))
    billed_command.bill("vision", as_json=False)
    assert bill.asked == 2


def test_nobody_sends_a_bill_for_the_embedded_fleet(home):
    with pytest.raises(UsageError, match="nobody sends a bill for vision"):
        billed_command.bill("vision", as_json=False)


def test_a_bill_is_of_one_job():
    with pytest.raises(UsageError, match="--bill is about one job"):
        require_one(("a", "b"), Asked())
    with pytest.raises(UsageError, match="--bill is about one job"):
        require_one(("a",), Asked(by="day"))
    require_one(("a",), Asked())
