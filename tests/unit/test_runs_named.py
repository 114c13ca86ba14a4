"""Which run a name means, and how the list of all jobs is ordered."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.home import Home
from gpucloud.adapters.keys import KeyRing
from gpucloud.adapters.local.market import LocalCensus
from gpucloud.adapters.transfer.localfiles import mark_results
from gpucloud.cli.commands import checkpoints
from gpucloud.cli.commands.asking import Asked, cost, status
from gpucloud.cli.commands.machines import Sweep, gc
from gpucloud.cli.commands.passes import forget, rm
from gpucloud.cli.commands.reaching import _parsed, copy
from gpucloud.cli.commands.training import plan
from gpucloud.cli.render.bills import money_json
from gpucloud.cli.render.reports import jobs_text, newest_first, report_json, report_text
from gpucloud.cli.target import (
    called,
    known_job,
    other_runs,
    read_target,
    refuse_to_forget,
    report_of,
    require_one_run,
    what_a_start_finds,
)
from gpucloud.domain.errors import CredentialsError, GpucloudError, JobFileError, StoreError, StrangersRun, UsageError
from gpucloud.domain.job.spec import Cloud, KnownJob
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import NO_GROUP
from gpucloud.domain.state.order import opened, sealed
from gpucloud.domain.state.state import ExitReason, JobStatus
from gpucloud.domain.supervision.budget import LimitEnd
from gpucloud.domain.supervision.strays import CLUSTER, JOB, MANAGED, STORE, Thing
from gpucloud.store import open_store
from gpucloud.store.contract import NoBucket, StoreAway
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.orders import Given, Orders, Reader, is_strangers
from gpucloud.usecases.jobstore.report import JobReport, report
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.found import jobs_in, sweepers
from gpucloud.wiring.jobs import starter
from tests.unit.worlds import NOW, order, put_job, state

BASES = {"boom": "boom", "boom-2": "boom", "boom-10": "boom", "other-2": "other-2", "other": "other"}


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    home = Home(tmp_path)
    for name in BASES:
        home.remember(KnownJob(name=name, store="/store", file=tmp_path / "job.yaml"))

    def asker_of(_: Any, known: KnownJob) -> Any:
        stored = SimpleNamespace(torn_down=known.name not in cloud.alive)
        return SimpleNamespace(order=lambda: SimpleNamespace(base=BASES[known.name]), stored_state=lambda: stored)

    monkeypatch.setattr("gpucloud.cli.target.asker_of", asker_of)
    is_here = {"has_home": lambda known: known.file.parent.is_dir(), "outputs_of": lambda *_: ""}
    cloud = SimpleNamespace(home=home, alive=set(), has_stored_outputs=lambda _: False, **is_here)
    return cloud


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("boom", "boom-10"),
        ("boom-2", "boom-2"),
        ("boom@1", "boom"),
        ("boom-1", "boom"),
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
    assert capsys.readouterr().err == "boom means its newest run, boom-10; the first is boom@1\n"


def test_a_first_run_that_has_machines_yet_is_meant_by_its_name(cloud: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cloud.alive.add("boom")
    assert known_job(cloud, "boom").name == "boom"
    assert capsys.readouterr().err == "boom means its first run, which is not torn down yet; the newest is boom-10\n"


@pytest.mark.parametrize("name", ["boom@3", "boom@x", "bum@1"])
def test_a_run_that_never_was_is_no_job(cloud: Any, name: str) -> None:
    with pytest.raises(UsageError, match="no job is called"):
        read_target(cloud, name)


def listed(job: str, minutes: int, status: JobStatus) -> JobReport:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.25"), promised_usd=Decimal(0))
    told = report(state(job=job, status=status), spend, (), NO_GROUP, None)
    ended = NOW + timedelta(minutes=minutes + 1) if status.ended else None
    told = replace(told, torn_down=status.ended)
    return replace(told, started_at=NOW + timedelta(minutes=minutes), ended_at=ended)


def test_all_jobs_are_listed_with_the_newest_first() -> None:
    jobs = [listed("boom", 0, JobStatus.FAILED), listed("boom-2", 9, JobStatus.RUNNING)]
    assert jobs_text(newest_first(jobs)) == (
        "job     status                      started (UTC)  ended        step  machines  spent\n"
        "boom-2  waiting, nobody supervises  03-01 12:09    -            -     0         0.25 of 1.00 USD\n"
        "boom    failed                      03-01 12:00    03-01 12:01  -     0         0.25 of 1.00 USD"
    )


def test_known_jobs_that_cannot_be_read_are_listed_and_are_not_said_to_have_spent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    Gpucloud().home.remember(KnownJob(name="away", store=str(tmp_path / "away"), file=tmp_path / "job.yaml"))
    assert status(None, history=False, rehearsals=False, as_json=False) == 2
    told = capsys.readouterr()
    assert told.out.splitlines()[1].split("  ")[:2] == ["away", "unknown: it cannot be read"]
    assert told.err.startswith("away: there is no job 'away' in ")
    assert cost([], Asked(every=True), as_json=False) == 2
    assert capsys.readouterr().out == "what away spent is not known\n"
    for answered in (
        status(None, history=False, rehearsals=False, as_json=True),
        cost([], Asked(every=True), as_json=True),
    ):
        assert answered == 2
    for line in capsys.readouterr().out.splitlines():
        told_json = json.loads(line)
        assert told_json["jobs"] == []
        assert [(one["job"], one["error"], one["exit_code"]) for one in told_json["unread"]] == [("away", "usage", 2)]


def test_a_job_whose_store_is_a_folder_that_has_nothing_of_it_is_no_job_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    store = tmp_path / "away"
    store.mkdir()  # as a place where nothing is mounted
    old = KnownJob(name="away", store=str(store), file=tmp_path / "job.yaml")
    Gpucloud().home.remember(old)
    assert status(None, history=False, rehearsals=False, as_json=False) == 2
    with pytest.raises(UsageError, match="there is no job 'away'"):
        refuse_to_forget(Gpucloud(), replace(old, store=str(tmp_path / "other")))
    open_store(str(store)).put("jobs/other/state.json", b"{}")
    capsys.readouterr()
    assert status(None, history=False, rehearsals=False, as_json=False) == 0
    assert capsys.readouterr().out == "no jobs yet\n"
    refuse_to_forget(Gpucloud(), replace(old, store=str(tmp_path / "other")))


def test_a_job_whose_state_alone_is_lost_is_told_as_that_with_what_ends_its_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    Gpucloud().home.remember(KnownJob(name="lost", store=str(tmp_path / "store"), file=tmp_path / "job.yaml"))
    store = open_store(str(tmp_path / "store"))
    store.put("jobs/lost/control/order.json", b"{}")
    assert status(None, history=False, rehearsals=False, as_json=False) == 2
    assert capsys.readouterr().err == (
        f"lost: {store.url} has an order of lost and no state: it never began, or its state is lost"
        " (gpucloud train with its job file goes on, gpucloud rm lost deletes it;"
        " gpucloud gc lists machines that it may have)\n"
    )


@pytest.mark.parametrize("is_another", [False, True])
def test_a_known_job_whose_store_is_away_is_neither_deleted_nor_begun_anew_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_another: bool
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    store, file = tmp_path / "disk", tmp_path / "gpucloud.yaml"
    (tmp_path / "train.py").touch()
    file.write_text(f"{FILE}store: {store}\n")
    job = Gpucloud().read_job(file)
    put_job(JobStore(open_store(str(store)), "live"), state(job="live"), resolved=job)
    Gpucloud().home.remember(Gpucloud().known(job, "live", file))
    store.rename(tmp_path / "moved")
    store.mkdir()
    if is_another:
        open_store(str(store)).put("jobs/other/state.json", b"{}")
    cloud, why = Gpucloud(), "is another store than it was" if is_another else "has nothing of the store that it was"
    [known] = cloud.home.known()
    assert not cloud.is_deleted(known)
    assert status(None, history=False, rehearsals=False, as_json=False) == 15
    assert f"live: {store}, the store's folder, {why} (mount it again" in capsys.readouterr().err
    for asked in (
        partial(rm, "live", with_checkpoints=True, with_outputs=True, yes=True, as_json=False),
        partial(known_job, cloud, str(file)),
        partial(jobs_in, cloud, str(store)),
        partial(next(sweepers(cloud, (), str(store), (), print)).store.get, "jobs/live/state.json"),  # type: ignore[union-attr]
        partial(cloud.store(job).put, "jobs/live/state.json", b"{}"),
    ):
        with pytest.raises(StoreError, match=why) as refused:
            asked()
        assert "if it is lost for good, gpucloud rm live --forget forgets what was in it" in (refused.value.hint or "")
    shutil.rmtree(store)
    (tmp_path / "moved").rename(store)
    assert status(None, history=False, rehearsals=False, as_json=False) == 0


def test_a_new_job_marks_a_store_that_lost_its_marker_as_the_known_jobs_in_it_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, store = _live(tmp_path, monkeypatch)
    (store / "gpucloud-store").unlink()
    (tmp_path / "new.yaml").write_text(f"{FILE.replace('live', 'new')}store: {store}\n")
    new = cloud.read_job(tmp_path / "new.yaml")
    cloud.store(new).put("jobs/new/state.json", b"{}")
    assert cloud.known(new, "new", tmp_path / "new.yaml").store_identity == cloud.home.known()[0].store_identity
    assert status("live", history=False, rehearsals=False, as_json=False) == 0


def test_of_a_store_that_was_moved_it_is_said_how_its_run_goes_on_and_a_link_to_it_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud, store = _live(tmp_path, monkeypatch)
    moved = store.rename(tmp_path / "moved")
    orders = Orders(jobs=JobStore(open_store(str(moved)), "live"), clock=cloud.clock)
    for asked in (orders.given, partial(cloud.store_of(cloud.home.known()[0]).list, "")):
        with pytest.raises(StoreError) as refused:
            asked()
        assert "a link to it" in (refused.value.hint or "")
    store.symlink_to(moved)
    assert status("live", history=False, rehearsals=False, as_json=False) == 0


@pytest.mark.parametrize("by", ["away", "wiped", "another"])
def test_a_job_whose_store_is_lost_is_forgotten_when_that_is_asked_and_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    cloud, store = _live(tmp_path, monkeypatch)
    key = cloud.home.key("live")
    key.parent.mkdir(parents=True)
    key.touch()
    with pytest.raises(UsageError, match="is there, and has something of live"):
        forget("live", yes=True, as_json=False)
    shutil.rmtree(store)
    if by != "away":
        store.mkdir()
    if by == "another":
        open_store(str(store)).put("jobs/other/state.json", b"{}")
    with pytest.raises(StoreError) as refused:
        rm("live", with_checkpoints=True, with_outputs=True, yes=True, as_json=False)
    assert "gpucloud rm live --forget forgets" in (refused.value.hint or "")
    capsys.readouterr()
    assert forget("live", yes=False, as_json=False) == 2  # nobody is there to be asked
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith(f"live: {store}, the store's folder, ")
    assert told[1] == "no machine of it is listed (on the embedded fleet of this home)"
    assert key.exists()
    assert forget("live", yes=True, as_json=False) == 0
    assert capsys.readouterr().out == "live is forgotten: its store is away\n"
    assert (cloud.home.find("live"), key.exists()) == (None, False)
    assert status(None, history=False, rehearsals=False, as_json=False) == 0
    job = cloud.read_job(tmp_path / "gpucloud.yaml")
    assert cloud.store(job).put("jobs/live/state.json", b"{}")


LOGIN = CredentialsError("cannot list jobs/live/: the SSO session has expired", hint="aws sso login")
UNREACHED = StoreError("cannot list jobs/live/: could not connect", hint="check the network", may_pass=True)
NOT_OURS = StoreError("cannot list jobs/live/: AccessDenied", hint="let this identity list the bucket")


@pytest.mark.parametrize("error", [LOGIN, UNREACHED, NOT_OURS])
@pytest.mark.parametrize("typed", [None, "", "y\n", "live\n"])
def test_a_job_whose_store_cannot_be_asked_is_forgotten_by_nobody_but_a_person_who_types_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    typed: str | None,
    error: GpucloudError,
) -> None:
    cloud, _ = _live(tmp_path, monkeypatch)
    key = cloud.home.key("live")
    key.parent.mkdir(parents=True)
    key.touch()

    def refused(*_: object) -> Any:
        raise error

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return typed is not None

    monkeypatch.setattr(Gpucloud, "store_of", refused)
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    is_meant = typed == "live\n"
    with contextlib.nullcontext() if is_meant else pytest.raises(type(error), match="cannot list"):
        assert forget("live", yes=True, as_json=False) == 0
    assert (cloud.home.find("live") is None, key.exists()) == (is_meant, not is_meant)
    told = capsys.readouterr().err
    assert ("no machine of it is listed (on the embedded fleet of this home)" in told) is (typed is not None)
    way = "where it is lost for good, gpucloud rm live --forget on a terminal has that confirmed"
    assert (way in told) is (typed is None)


@pytest.mark.parametrize("error", [NoBucket("there is no bucket"), StoreAway("another is there")])
def test_a_job_whose_store_is_known_to_be_away_is_forgotten_without_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StoreError
) -> None:
    cloud, _ = _live(tmp_path, monkeypatch)

    def refused(*_: object) -> Any:
        raise error

    monkeypatch.setattr(Gpucloud, "store_of", refused)
    assert forget("live", yes=True, as_json=False) == 0
    assert cloud.home.find("live") is None


def test_what_still_runs_of_a_job_that_is_forgotten_is_named_and_gc_ends_it_as_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, store = _live(tmp_path, monkeypatch)
    url = cloud.home.known()[0].store
    tags = ((MANAGED, "true"), (CLUSTER, "gpucloud-live"), (JOB, "live"), (STORE, url))
    node = Thing(kind="node", id="i-1", account="embedded", region="local", tags=tags)
    monkeypatch.setattr(LocalCensus, "things", lambda _: (node, replace(node, id="i-2", tags=tags[:3])))
    shutil.rmtree(store)
    assert forget("live", yes=True, as_json=False) == 0
    way = f"gpucloud gc --cloud local --store {url}"
    told = f"still there: node i-1. Once the job is forgotten, `{way} --wait --yes` ends that\n"
    assert told in capsys.readouterr().err
    assert gc(Sweep(clouds=(Cloud.LOCAL,), store=url), as_json=False) == 30
    assert "i-1" in capsys.readouterr().out


def _live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Gpucloud, Path]:
    """Return a home that knows an unfinished job, and the folder of its store."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    store, file = tmp_path / "disk", tmp_path / "gpucloud.yaml"
    (tmp_path / "train.py").touch()
    file.write_text(f"{FILE}store: {store}\n")
    cloud = Gpucloud()
    job = cloud.read_job(file)
    put_job(JobStore(open_store(str(store)), "live"), state(job="live"), resolved=job)
    cloud.home.remember(cloud.known(job, "live", file))
    return cloud, store


def test_a_job_known_without_its_stores_identity_is_read_as_before_and_its_next_start_notes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    store, file = tmp_path / "disk", tmp_path / "gpucloud.yaml"
    (tmp_path / "train.py").touch()
    file.write_text(f"{FILE}store: {store}\n")
    cloud = Gpucloud()
    job = cloud.read_job(file)
    put_job(JobStore(open_store(str(store)), "live"), state(job="live"), resolved=job)
    (store / "gpucloud-store").unlink()
    cloud.home.remember(cloud.known(job, "live", file))
    assert cloud.home.known()[0].store_identity is None
    assert status(None, history=False, rehearsals=False, as_json=False) == 0
    cloud.store(job).put("any", b"")
    assert cloud.known(job, "live", file).store_identity is not None


def test_without_a_name_and_a_file_the_known_jobs_are_named(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no job is named") as refused:
        known_job(cloud, None)
    assert refused.value.hint == "name one: boom-10, boom-2, boom@1, …; gpucloud status lists them"
    for path in (tmp_path / "index").glob("*.json"):
        path.unlink()
    with pytest.raises(UsageError) as refused:
        known_job(cloud, None)
    assert refused.value.hint == "gpucloud init writes one"


FILE = "name: live\nrun: train.py\nbudget: 1 USD\nresources: {nodes: 1, gpus: 1}\ncode: .\n"


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Gpucloud, Path, Path]:
    """Two folders with a job file of the same name; the other's run is in the store, and is the newest."""
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    cloud = Gpucloud()
    mine, other = (tmp_path / folder / "gpucloud.yaml" for folder in ("mine", "other"))
    for number, file in enumerate((mine, other), 1):
        file.parent.mkdir()
        (file.parent / "train.py").touch()
        file.write_text(FILE)
        name = "live" if number == 1 else "live-2"
        jobs = JobStore(open_store(cloud.home.store), name)
        resolved = cloud.read_job(file)
        put_job(jobs, state(job=name), resolved=resolved, base="live", run=number, host=cloud.home.identity)
        cloud.home.remember(KnownJob(name=name, store=jobs.store.url, file=file.resolve()))
    return cloud, mine, other


def test_a_file_whose_jobs_newest_run_is_another_files_is_answered_with_both_runs_names(
    two_files: tuple[Gpucloud, Path, Path],
) -> None:
    cloud, mine, other = two_files
    assert known_job(cloud, str(other)).name == "live-2"
    with pytest.raises(UsageError, match=f"live-2 is a run of {other}") as refused:
        known_job(cloud, str(mine))
    assert refused.value.hint == (
        "name: live-mine in this file; named instead of the file, live-2 is that run, live@1 this file's"
    )


@pytest.mark.parametrize(
    "changed",
    [
        ("run: train.py", "run: gone.py"),
        ("run: train.py", "run: python gone.py"),
        ("run: train.py", "run: ./go.sh"),
        ("run: train.py", "run: old/train.py"),
        ("code: .", "code: gone"),
        ("code: .", "conda: gone.yml"),
        ("code: .", "data: {gone: /gone}"),
        ("code: .", "cloud: ssh\nssh: {hosts: [me@gpu1], key: gone}\nstore: ../home/store"),
    ],
)
def test_what_is_missing_beside_the_file_keeps_nobody_from_a_run_of_it(
    two_files: tuple[Gpucloud, Path, Path], changed: tuple[str, str]
) -> None:
    cloud, _, other = two_files
    (other.parent / "old").mkdir()
    (other.parent / ".gitignore").write_text("old/\n")
    for name in ("go.sh", "old/train.py"):
        (other.parent / name).touch()
    other.write_text(other.read_text().replace(*changed))
    assert known_job(cloud, str(other), only_own="down", adopts=True).name == "live-2"
    with pytest.raises(JobFileError):
        read_target(cloud, str(other), to_start=True)


def test_a_job_of_which_nothing_is_there_is_told_from_one_that_cannot_be_looked_at(
    two_files: tuple[Gpucloud, Path, Path],
) -> None:
    cloud, mine, _ = two_files
    mine.write_text(FILE.replace("live", "fresh"))
    with pytest.raises(UsageError, match="fresh was never started") as refused:
        known_job(cloud, str(mine))
    assert (refused.value.code, refused.value.exit_code) == ("never_started", 2)
    assert refused.value.hint == f"nothing of it runs or costs; gpucloud train {mine} starts it"
    mine.write_text(FILE.replace("budget", "bugdet"))
    with pytest.raises(JobFileError) as refused:
        known_job(cloud, str(mine))
    assert refused.value.code == "job_file"


def signed_by_a_stranger(tmp_path: Path, run: str, host: str = "elsewhere") -> Any:
    """Have the run's order be one that somebody gave in another home, signed by a key of his; return the key's line."""
    his = KeyRing(tmp_path / "his", {})
    jobs = JobStore(open_store(Gpucloud().home.store), run)
    envelope, version = jobs.order()
    given = replace(opened(envelope), host=host)
    jobs.put_order(sealed(given, his.signer().key_id, his.signer().sign(sealed(given).signed)), version)
    return his.signer().line


def test_a_clone_at_the_same_path_and_with_the_same_file_is_no_word_for_a_strangers_run(
    two_files: tuple[Gpucloud, Path, Path], tmp_path: Path
) -> None:
    cloud, _, other = two_files
    assert known_job(cloud, str(other), only_own="down").name == "live-2"
    signed_by_a_stranger(tmp_path, "live-2")
    assert known_job(cloud, str(other)).name == "live-2"  # to look at
    with pytest.raises(StrangersRun, match=f"live-2 is a run of {other} of me@here, unfinished, ordered") as refused:
        known_job(cloud, str(other), only_own="down")
    assert "`gpucloud keys add NAME KEY` with what `gpucloud keys` shows there" in str(refused.value.hint)
    assert "in a pipeline, one GPUCLOUD_SSH_KEY for all its runners (`gpucloud ci init`), or --adopt" in str(
        refused.value.hint
    )
    assert refused.value.exit_code == 3  # a pipeline takes 2 for one of which nothing was ever started
    assert str(refused.value.hint).endswith("; named instead of the file, live-2 is that run, live-2 this file's")
    assert known_job(cloud, "live-2", only_own="down").name == "live-2"  # its name is meant
    cloud.home.forget(cloud.home.find("live-2"))
    with pytest.raises(StrangersRun) as refused:
        known_job(cloud, str(other), only_own="down")
    assert str(refused.value.hint).endswith(f"; gpucloud down {other} --adopt ends that run")
    assert known_job(cloud, str(other), only_own="down", adopts=True).name == "live-2"


def test_a_strangers_run_is_deleted_where_that_is_meant_and_what_is_said_of_it_names_it(
    two_files: tuple[Gpucloud, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, _, other = two_files
    jobs = JobStore(open_store(cloud.home.store), "live-2")
    cloud.home.forget(cloud.home.find("live-2"))  # a home that is new, as of a laptop that was installed anew
    signed_by_a_stranger(tmp_path, "live-2")
    delete = partial(rm, str(other), with_checkpoints=False, with_outputs=False, yes=True, as_json=False)

    with pytest.raises(StrangersRun) as refused:
        delete()
    assert str(refused.value.hint).endswith(f"; gpucloud rm {other} --adopt deletes that run")
    with pytest.raises(UsageError, match="live-2 is not over") as unfinished:
        delete(adopts=True)
    assert str(unfinished.value.hint).startswith("gpucloud down live-2 ")
    assert known_job(cloud, "live-2", only_own="down").store == jobs.store.url  # as the hint says

    stored, as_stored = jobs.load()
    jobs.replace(replace(stored, status=JobStatus.STOPPED, torn_down=True), as_stored.version)
    cloud.home.forget(cloud.home.find("live-2"))
    (kept := other.parent / "outputs" / "live-2").mkdir(parents=True)
    mark_results(kept)
    assert delete(adopts=True) == 0
    assert f"; results of live-2 stay in {kept}\n" in capsys.readouterr().err
    assert kept.is_dir()
    assert not jobs.exists()
    assert cloud.home.find("live-2") is None


def test_what_means_a_run_of_another_store_is_taken_by_cp_and_stands_unquoted_in_json(
    two_files: tuple[Gpucloud, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, _, _ = two_files
    shared, here = tmp_path / "shared by all" / "gpucloud.yaml", tmp_path / "here"
    shared.parent.mkdir()
    (shared.parent / "train.py").touch()
    shared.write_text(f"{FILE}store: {tmp_path / 'team'}\n")
    store = open_store(str(tmp_path / "team"))
    over = state(job="live", status=JobStatus.STOPPED, torn_down=True)
    put_job(JobStore(store, "live"), over, resolved=cloud.read_job(shared), base="live", host=cloud.home.identity)
    store.put("jobs/live/outputs/files/best.pt", b"of the team")
    said = called(cloud, cloud.known(cloud.read_job(shared), "live", shared))
    assert said == f"'{shared}'"

    (source,) = shlex.split(f"{said}:@store/outputs")
    assert copy(source, str(here), node=None, recursive=True, as_json=False) == 0
    assert next(here.rglob("best.pt")).read_bytes() == b"of the team"
    with pytest.raises(UsageError) as refused:
        copy(f"{shared}:@store/output", str(here), node=None, recursive=True, as_json=False)
    assert refused.value.hint == f"did you mean {said}:@store/outputs/files?"
    assert status(str(shared), history=False, rehearsals=False, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["job"], answer["name"]) == (str(shared), "live")
    local = tmp_path / "of:two.yaml"
    assert [_parsed(one) for one in (str(local), f"{tmp_path}/gone.yaml:x")] == [local, tmp_path / "gone.yaml:x"]


def test_a_run_of_another_store_takes_nothing_with_it_of_this_homes_run_of_the_name(
    two_files: tuple[Gpucloud, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud, _, _ = two_files
    own, shared = cloud.home.find("live"), tmp_path / "shared" / "gpucloud.yaml"
    assert own is not None
    shared.parent.mkdir()
    (shared.parent / "train.py").touch()
    shared.write_text(f"{FILE}store: {tmp_path / 'team'}\n")
    jobs = JobStore(open_store(str(tmp_path / "team")), "live")
    over = state(job="live", status=JobStatus.STOPPED, torn_down=True)
    put_job(jobs, over, resolved=cloud.read_job(shared), base="live", host=cloud.home.identity)
    kept = (cloud.home.key("live"), cloud.home.key("live").with_name("live.pub"), cloud.home.log("live"))
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    delete = partial(rm, str(shared), with_checkpoints=False, with_outputs=False, as_json=False)

    assert status(str(shared), history=False, rehearsals=False, as_json=False) == 0
    assert capsys.readouterr().out.startswith(f"{shared}: stopped")  # `live` means this home's own
    assert delete(adopts=True, yes=False) == 2
    assert f"nothing is deleted: gpucloud rm {shared} --adopt --yes\n" in capsys.readouterr().err
    assert delete(yes=True) == 0
    assert capsys.readouterr().out == f"the run of {shared} is deleted: 2 objects\n"
    assert not jobs.exists()
    assert cloud.home.find("live") == own
    assert all(path.exists() for path in kept)
    cloud.home.clear(own)
    cloud.home.forget(own)
    assert (cloud.home.find("live"), [path for path in kept if path.exists()]) == (None, [])


def test_a_start_goes_on_with_no_strangers_run_until_his_key_is_trusted(
    two_files: tuple[Gpucloud, Path, Path], tmp_path: Path
) -> None:
    cloud, _, other = two_files
    read = read_target(cloud, str(other))
    key = signed_by_a_stranger(tmp_path, "live-2")
    with pytest.raises(StrangersRun, match="ordered from another home by nobody whom you trust") as refused:
        starter(cloud, read.job).found(read.job, read.spec)
    assert str(refused.value.hint).endswith("; gpucloud train gpucloud.yaml --adopt takes that run over")
    assert starter(cloud, read.job).found(read.job, read.spec, adopts=True) is not None
    cloud.keys().add("he", key)
    assert starter(cloud, read.job).found(read.job, read.spec) is not None


@pytest.mark.parametrize(
    ("host", "signed", "ends", "strangers"),
    [
        ("here", False, True, False),  # one home, whoever wrote to it last
        ("here", True, False, False),
        ("elsewhere", True, False, True),
        ("elsewhere", False, False, False),  # of before orders were signed
        ("elsewhere", False, True, False),  # whoever ended it unsigned says nothing of who gave it
    ],
)
def test_a_run_is_a_strangers_by_home_and_signature(
    tmp_path: Path, host: str, signed: bool, ends: bool, strangers: bool
) -> None:
    given, his = order(host=host, end=ExitReason.STOPPED if ends else None), KeyRing(tmp_path / "his", {}).signer()
    envelope = sealed(given, his.key_id, his.sign(sealed(given).signed)) if signed else sealed(given)
    found = Given(order=given, envelope=envelope, version="1")
    reader = Reader(trust=KeyRing(tmp_path / "mine", {}).trust(), marks=Home(tmp_path).order_marks)
    assert is_strangers(found, "here", reader) is strangers
    assert not is_strangers(found, "here", None)  # where nobody verifies


def test_a_run_that_somebody_without_a_say_has_ended_is_still_its_givers(tmp_path: Path) -> None:
    """Runners of one pipeline have one key, and a home each."""
    jobs = JobStore(open_store(str(tmp_path / "store")), "digits")
    mine, his, third = (KeyRing(tmp_path / name, {}) for name in ("mine", "his", "third"))

    def orders_of(keys: KeyRing, home: str) -> Orders:
        reader = Reader(trust=keys.trust(), marks=Home(tmp_path / home).order_marks)
        return Orders(jobs=jobs, clock=SystemClock(), signer=keys.signer(), reader=reader)

    orders_of(mine, "runner-1").first(order(store=jobs.store.url, job="digits", host="runner-1"))
    orders_of(his, "his").end()

    again = orders_of(mine, "runner-2")
    ended = again.newest()
    assert not again.is_trusted(ended)
    assert not is_strangers(ended, "runner-2", again.reader)
    assert is_strangers(ended, "his", orders_of(his, "his").reader)
    assert is_strangers(ended, "third", orders_of(third, "third").reader)
    third.add("me", mine.signer().line)
    assert not is_strangers(ended, "third", orders_of(third, "third").reader)
    forged = replace(ended, envelope=replace(ended.envelope, signature="AAAA"))
    assert is_strangers(forged, "runner-2", again.reader)  # a signature that is not its key's


def test_an_order_in_place_of_one_that_nobody_can_read_says_nothing_of_whose_the_run_is(tmp_path: Path) -> None:
    given, his = order(host="elsewhere", spec_sha256="", end=ExitReason.STOPPED), KeyRing(tmp_path / "his", {}).signer()
    found = Given(order=given, envelope=sealed(given, his.key_id, his.sign(sealed(given).signed)), version="1")
    reader = Reader(trust=KeyRing(tmp_path / "mine", {}).trust(), marks=Home(tmp_path).order_marks)
    assert not is_strangers(found, "here", reader)


def test_a_plan_knows_whose_name_it_is(two_files: tuple[Gpucloud, Path, Path]) -> None:
    cloud, mine, other = two_files
    said, _ = what_a_start_finds(cloud, read_target(cloud, str(other)), offline=True)
    asks = "`gpucloud train` asks for another name, or for --adopt"
    assert said == f"warning: live is a run of {mine}: {asks}"
    assert what_a_start_finds(cloud, read_target(cloud, str(mine)), offline=True) == (None, None)
    mine.unlink()  # moved
    assert what_a_start_finds(cloud, read_target(cloud, str(other)), offline=True) == (None, None)


def test_a_run_whose_file_is_another_jobs_by_now_is_not_gone_on_with_by_its_name(
    two_files: tuple[Gpucloud, Path, Path],
) -> None:
    cloud, mine, _ = two_files
    assert read_target(cloud, "live@1").job.name == "live"
    mine.write_text(FILE.replace("name: live", "name: live-b"))
    with pytest.raises(UsageError) as refused:
        read_target(cloud, "live@1")
    assert refused.value.message == f"{mine} is of live-b by now, and live@1 is a run of another name"
    assert refused.value.hint == f"`name:` as it was means live@1 again; live-b is meant by {mine}"


def test_a_run_whose_file_is_gone_says_what_a_start_needs(two_files: tuple[Gpucloud, Path, Path]) -> None:
    cloud, _, other = two_files
    known = cloud.home.find("live-2")
    assert known is not None
    assert "go on: gpucloud train live-2 · end it: gpucloud down live-2" in report_text(report_of(cloud, known))
    other.unlink()
    gone = report_of(cloud, known)
    on = f"go on: gpucloud train FILE · end it: gpucloud down live-2\nFILE is its job file where it is now: {other} is "
    assert on in report_text(gone)
    stopped = replace(gone, status=JobStatus.STOPPED, exit_reason=ExitReason.STOPPED, torn_down=True)
    assert report_text(stopped).splitlines()[-1] == (
        "gpucloud train FILE goes on in the same run, from the beginning, with the 1.00 USD left of its budget;"
        f" FILE is its job file where it is now: {other} is there no more"
    )
    with pytest.raises(UsageError) as refused:
        read_target(cloud, "live-2")
    assert refused.value.hint == (
        "live-2 was begun from it: name the file where it is now, or gpucloud down live-2 ends the job"
    )
    jobs = JobStore(cloud.store_of(known), known.name)
    loaded = jobs.load()
    assert loaded is not None
    jobs.replace(replace(loaded[0], status=JobStatus.SUCCEEDED, torn_down=True), loaded[1].version)
    with pytest.raises(UsageError) as refused:
        read_target(cloud, "live-2")
    assert str(refused.value.hint).endswith("name the file where it is now, or gpucloud status live-2 shows the job")


_LOST = "FILE is its job file where it is now: {file} is there no more"
_RENAMED = "FILE is one with `name: live`: {file} is of anew by now"


@pytest.mark.parametrize(("named", "why"), [(None, _LOST), ("anew", _RENAMED), ("live", None)])
def test_no_command_that_is_refused_is_named_where_the_job_file_is_gone_or_anothers(
    two_files: tuple[Gpucloud, Path, Path], monkeypatch: pytest.MonkeyPatch, named: str | None, why: str | None
) -> None:
    cloud, _, file = two_files
    known = cloud.home.find("live-2")
    assert known is not None
    if named is None:
        file.unlink()
    else:
        file.write_text(FILE.replace("name: live", f"name: {named}"))
    means, after = ("live-2", "") if why is None else ("FILE", f"; {why.format(file=file)}")
    assert f"gpucloud train {means} · end it" in report_text(report_of(cloud, known))

    ended = replace(listed("live-2", 0, JobStatus.STOPPED), base="live", run=2, supervisor=None)
    way = "the deadline is over, step 4 is saved: gpucloud train {} --budget '2 USD' goes on from there"
    parts = {"told": "the deadline is over, step 4 is saved", "option": " --budget '2 USD'"}
    end = LimitEnd(job="live-2", **parts, then="goes on from there")
    late = replace(ended, exit_reason=ExitReason.DEADLINE, message=end.said(), limit_end=end)
    failed = replace(ended, exit_reason=ExitReason.USER_ERROR, status=JobStatus.FAILED)
    found = [late, failed, replace(ended, exit_reason=ExitReason.STOPPED)]
    asked = SimpleNamespace(
        report=lambda: found.pop(0),
        with_stored_checkpoint=lambda told: told,
        order=lambda: SimpleNamespace(base="live"),
        is_newest_run=lambda: True,
    )
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asked)
    assert report_of(cloud, known).message == way.format(means) + after
    again = "run the same command" if why is None else "gpucloud train FILE"
    told = report_text(report_of(cloud, known))
    assert f"mend it and {again}: this run goes on from the beginning" in told
    assert told.endswith(after)
    told = report_text(report_of(cloud, known))
    assert f"gpucloud train {means} goes on in the same run" in told
    assert told.endswith(after)


@pytest.mark.parametrize("said", ["checkpoint: {keep: 1}\n", "checkpoint: [\n", None])
def test_how_many_checkpoints_are_kept_is_what_was_ordered_whatever_the_file_says_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    cloud, file = Gpucloud(), tmp_path / "gpucloud.yaml"
    (tmp_path / "train.py").touch()
    file.write_text(FILE + "checkpoint: {keep: 10}\n")
    jobs = JobStore(open_store(cloud.home.store), "live")
    put_job(jobs, state(job="live"), resolved=cloud.read_job(file), base="live", host=cloud.home.identity)
    cloud.home.remember(KnownJob(name="live", store=jobs.store.url, file=file))
    if said is None:
        file.unlink()
    else:
        file.write_text(FILE + said)
    assert checkpoints._job("live", checkpoints.Asked()).stored_checkpoints.keep == 10
    order_key = "jobs/live/control/order.json"
    jobs.store.delete(order_key)
    jobs.store.put(order_key, b"{")  # damaged: what can be read of the job can be read all the same
    assert checkpoints._job("live", checkpoints.Asked()).name == "live"
    with pytest.raises(StoreError):
        checkpoints._job("live", checkpoints.Asked(prune=True))


def test_no_checkpoint_is_pruned_by_an_order_that_stands_in_for_a_lost_one(
    two_files: tuple[Gpucloud, Path, Path],
) -> None:
    cloud, mine, _ = two_files
    jobs = JobStore(open_store(cloud.home.store), "live")
    jobs.store.put("jobs/live/control/order.json", b"{")
    Orders(jobs=jobs, clock=cloud.clock).end_in_place(cloud.read_job(mine), cloud.home.identity)
    assert checkpoints._job("live@1", checkpoints.Asked()).name == "live"
    with pytest.raises(UsageError, match="nobody can tell how many checkpoints live keeps"):
        checkpoints._job("live@1", checkpoints.Asked(prune=True))


def test_a_first_run_with_later_ones_is_called_so_and_others_by_their_names(cloud: Any) -> None:
    assert {one.name: called(cloud, one) for one in cloud.home.known()} == {
        "boom": "boom@1", "boom-10": "boom-10", "boom-2": "boom-2", "other": "other@1", "other-2": "other-2",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "job"), [("boom", "boom@1"), ("boom-2", "boom-2")])
def test_people_and_programs_are_told_what_means_the_very_run(
    cloud: Any, monkeypatch: pytest.MonkeyPatch, name: str, job: str
) -> None:
    asked = SimpleNamespace(
        report=lambda: listed(name, 0, JobStatus.FAILED),
        with_stored_checkpoint=lambda told: told,
        is_newest_run=lambda: True,
    )
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asked)
    told = report_of(cloud, cloud.home.find(name))
    assert report_text(told).startswith(f"{job}: failed")
    assert jobs_text([told]).splitlines()[1].startswith(f"{job}  failed")
    assert (report_json(told)["job"], money_json(told)["job"]) == (job, job)
    assert (report_json(told)["name"], money_json(told)["name"]) == (name, name)


@pytest.mark.parametrize(("looks", "newest"), [(False, True), (True, True), (False, False), (True, False)])
@pytest.mark.parametrize(("name", "is_known"), [("boom", True), ("boom-10", False)])
def test_the_message_of_an_earlier_run_names_no_command_that_goes_on_with_a_later_one(
    cloud: Any, monkeypatch: pytest.MonkeyPatch, name: str, is_known: bool, looks: bool, newest: bool
) -> None:
    """A run that is not known here may have been begun elsewhere: its store is asked, whichever command answers."""
    ended = replace(listed(name, 0, JobStatus.FAILED), exit_reason=ExitReason.DEADLINE, base="boom")
    cloud.home.find(name).file.touch()
    cloud.read_job = lambda _: SimpleNamespace(name="boom")
    kept = "the deadline is over, step 40 is saved"
    said = f"{kept}: with a later one in the job file, gpucloud train boom goes on from there"
    end = LimitEnd(job="boom", told=kept, before="with a later one in the job file, ", then="goes on from there")
    ended = replace(ended, message=end.said(), limit_end=end, run=int(name.partition("-")[2] or 1))
    asked = SimpleNamespace(
        report=lambda: ended,
        with_stored_checkpoint=lambda told: told,
        order=lambda: SimpleNamespace(base="boom"),
        is_newest_run=lambda: newest,
    )
    monkeypatch.setattr("gpucloud.cli.target.asker_of", lambda *_: asked)
    monkeypatch.setattr("gpucloud.cli.target.visited_report", lambda *given: given[-1])
    told = report_of(cloud, cloud.home.find(name), visits=looks)
    superseded = is_known or not newest
    assert told.superseded is superseded
    assert told.message == (kept if superseded else said)


@pytest.mark.parametrize("name", ["boom@1", "boom-2", "other", None, "./gpucloud.yaml"])
def test_what_means_one_run_is_deleted(cloud: Any, name: str | None) -> None:
    require_one_run(cloud, name, "gpucloud rm JOB")


def test_by_a_name_of_several_runs_nothing_is_deleted(cloud: Any) -> None:
    with pytest.raises(UsageError, match="boom has 3 runs: boom@1, boom-10, boom-2") as refused:
        require_one_run(cloud, "boom", "gpucloud rm JOB")
    assert refused.value.hint == "gpucloud rm boom@1, gpucloud rm boom-10 or gpucloud rm boom-2"


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("boom-10", ("boom-2", "boom@1")),
        ("boom-2", ("boom-10", "boom@1")),
        ("boom", ("boom-10", "boom-2")),
        ("other", ()),
    ],
)
def test_a_run_knows_the_other_runs_of_its_job(cloud: Any, name: str, others: tuple[str, ...]) -> None:
    assert other_runs(cloud, cloud.home.find(name)) == others


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        (".", "gpucloud init writes one"),
        ("job", "cd job && gpucloud init writes one"),
        ("full", "the folder's job file is ./full/gpucloud.yaml"),
        ("./job", "cd job && gpucloud init writes one"),
        ("./none.yaml", "gpucloud status lists known jobs"),
        ("none.py", "gpucloud status lists known jobs"),
        ("gone/trian.py", "gpucloud status lists known jobs"),
        ("full/trian.py", "did you mean full/train.py?"),
        ("full/gpuclod.yaml", "did you mean full/gpucloud.yaml?"),
        ("full/train.py", "gpucloud init --run train.py writes a job file for it"),
    ],
)
def test_what_is_no_job_file_is_answered_with_what_writes_one_or_with_the_nearest(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "full").mkdir()
    for name in ("gpucloud.yaml", "train.py"):
        (tmp_path / "full" / name).touch()
    with pytest.raises(UsageError) as refused:
        read_target(cloud, target)
    assert refused.value.hint == hint
    assert ("is a script" in refused.value.message) is (target == "full/train.py")


def test_a_plan_says_which_secrets_a_start_would_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "train.py").touch()
    file = tmp_path / "gpucloud.yaml"
    file.write_text(FILE + "secrets: [HF_TOKEN]\n")
    assert plan(str(file), on=None, plot=None, as_json=True) == 0
    lacks = "warning: secrets: HF_TOKEN not set in the environment: `gpucloud train` is refused; export HF_TOKEN=…\n"
    assert lacks in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "h")
    assert plan(str(file), on=None, plot=None, as_json=True) == 0
    assert lacks not in capsys.readouterr().err
