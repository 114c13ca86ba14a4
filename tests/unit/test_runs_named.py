"""Which run a name means, and how the list of all jobs is ordered."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.home import Home, KnownJob
from gpucloud.cli.reports import jobs_text, newest_first
from gpucloud.cli.target import known_job, read_target
from gpucloud.domain.errors import UsageError
from gpucloud.domain.ledger import Spend
from gpucloud.domain.node import NO_GROUP
from gpucloud.domain.state import JobStatus
from gpucloud.usecases.report import JobReport, report
from tests.unit.worlds import NOW, state

BASES = {"boom": "boom", "boom-2": "boom", "boom-10": "boom", "other-2": "other-2", "other": "other"}


@pytest.fixture
def cloud(tmp_path: Path) -> Any:
    home = Home(tmp_path)
    for name in BASES:
        home.remember(KnownJob(name=name, store="/store", file=tmp_path / "job.yaml"))

    def asker(known: KnownJob) -> Any:
        stored = SimpleNamespace(torn_down=known.name not in cloud.alive)
        return SimpleNamespace(order=lambda: SimpleNamespace(base=BASES[known.name]), stored_state=lambda: stored)

    cloud = SimpleNamespace(home=home, asker=asker, alive=set())
    return cloud


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("boom", "boom-10"),
        ("boom-2", "boom-2"),
        ("boom@1", "boom"),
        ("boom@2", "boom-2"),
        ("other", "other"),
        ("other-2", "other-2"),
    ],
)
def test_a_jobs_name_means_its_newest_run_and_a_runs_own_name_that_run(cloud: Any, name: str, meant: str) -> None:
    assert known_job(cloud, name).name == meant


def test_it_is_said_which_run_is_meant(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    known_job(cloud, "boom")
    known_job(cloud, "boom-2")
    assert capsys.readouterr().err == "boom: its newest run, boom-10; its first is boom@1\n"


def test_a_first_run_that_has_machines_yet_is_meant_by_its_name(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.alive.add("boom")
    assert known_job(cloud, "boom").name == "boom"
    assert capsys.readouterr().err == "boom: its first run, which is not torn down yet; its newest is boom-10\n"


@pytest.mark.parametrize("name", ["boom@3", "boom@x", "bum@1"])
def test_a_run_that_never_was_is_no_job(cloud: Any, name: str) -> None:
    with pytest.raises(UsageError, match="no job is called"):
        read_target(cloud, name)


def listed(job: str, minutes: int, status: JobStatus) -> JobReport:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.25"), promised_usd=Decimal(0))
    told = report(state(job=job, status=status), spend, (), NO_GROUP, None)
    ended = NOW + timedelta(minutes=minutes + 1) if status.ended else None
    return replace(told, started_at=NOW + timedelta(minutes=minutes), ended_at=ended)


def test_all_jobs_are_listed_with_the_newest_first() -> None:
    jobs = [listed("boom", 0, JobStatus.FAILED), listed("boom-2", 9, JobStatus.RUNNING)]
    assert jobs_text(newest_first(jobs)) == (
        "job     status                      started (UTC)  ended        step  machines  spent\n"
        "boom-2  waiting, nobody supervises  03-01 12:09    -            -     0         0.25 of 1.00 USD\n"
        "boom    failed                      03-01 12:00    03-01 12:01  -     0         0.25 of 1.00 USD"
    )
