"""`rm`: what it refuses, what it deletes, and that a name may be used again."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from gpucloud.cli.app import app
from gpucloud.cli.commands import passes, setting_up
from gpucloud.domain import codec
from gpucloud.domain.job.spec import Cloud
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.state.order import Envelope, opened
from gpucloud.domain.state.state import JobStatus
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.report import report
from gpucloud.wiring.jobs import where_listed
from tests.faults.process import Ended, run
from tests.faults.rig import JOB, Outside
from tests.faults.strikes import Strikes
from tests.unit.worlds import NOW, snapshot, state, up


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    return Outside(tmp_path)


def give(outside: Outside, *words: str) -> Ended:
    strikes = Strikes()
    named = tuple(str(outside.file) if word == outside.file.name else word for word in words)
    return run(named, outside.over(strikes), strikes)


def test_a_job_whose_machines_are_up_is_refused(outside: Outside) -> None:
    give(outside, "train", "small.yaml", "--keep")
    refused = give(outside, "rm", JOB, "--yes", "--with-checkpoints")
    assert (refused.code, f"hint: gpucloud down {JOB}" in refused.stderr) == (2, True)
    assert "error: small has succeeded, and its machines are kept for a look" in refused.stderr
    assert JobStore(outside.store, JOB).load() is not None


@pytest.mark.parametrize(
    ("changes", "why", "hint"),
    [
        (
            {"held_until": NOW, "status": JobStatus.FAILED},
            "small has failed, and its machines wait for a mended script",
            "gpucloud down small ends them; gpucloud train small goes on with them",
        ),
        (
            {"status": JobStatus.FAILED},
            "small has failed, and is not wound up: machines or results may be left",
            "gpucloud down small brings home what is there, and removes the rest",
        ),
        (
            {"status": JobStatus.FAILED, "supervisor": "process 1 on vm"},
            "small has failed, and process 1 on vm still ends its machines",
            "gpucloud down small waits for that",
        ),
        (
            {},
            "small is not over: waiting, nobody supervises",
            "gpucloud down small ends it and brings home what is there; gpucloud train small goes on with it",
        ),
    ],
)
def test_what_is_not_deleted_yet_is_said_with_what_is_to_be_done_first(
    changes: dict[str, object], why: str, hint: str
) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    told = replace(report(state(job=JOB), spend, (), snapshot(up("a")).group, None), **changes)  # type: ignore[arg-type]
    refused = passes._not_over(told, JOB)
    assert (refused.message, refused.hint) == (why, hint)


def let_one_go(outside: Outside) -> None:
    """Write down that a machine which nobody could end may live for two hours more."""
    stored = outside.store.get(f"jobs/{JOB}/state.json")
    assert stored is not None
    known = json.loads(stored.data)
    known["group"], until = None, outside.clock.now() + timedelta(hours=2)
    life = {**known["nodes"][0], "node_id": "i-0", "ended_at": None, "end_cause": None, "charged": False}
    known["nodes"].append({**life, "let_go_until": until.isoformat()})
    outside.store.put(f"jobs/{JOB}/state.json", json.dumps(known).encode())


def test_books_that_alone_tell_of_machines_that_may_live_and_cost_stay_until_these_are_off(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    let_one_go(outside)
    refused = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert refused.code == 2
    assert "error: 1 machine that could not be ended from here may be alive until 14:00:" in refused.stderr
    assert ": nothing else tells of that" in refused.stderr
    assert f"hint: gpucloud rm {JOB} once that time is over" in refused.stderr
    assert JobStore(outside.store, JOB).load() is not None

    outside.clock.sleep(2 * 3600)
    gone = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (gone.code, f"{JOB} is deleted: " in gone.stdout) == (0, True), gone.stderr


def test_checkpoints_go_only_where_that_is_said_and_nothing_without_a_yes(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    refused = give(outside, "rm", JOB, "--yes")
    assert (refused.code, "has 3 checkpoints (" in refused.stderr) == (2, True), refused.stderr
    unsaid = give(outside, "rm", JOB, "--with-checkpoints")
    assert (unsaid.code, f"nothing is deleted: gpucloud rm {JOB} --with-checkpoints --yes" in unsaid.stderr) == (
        2,
        True,
    )
    assert JobStore(outside.store, JOB).load() is not None

    gone = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (gone.code, f"{JOB} is deleted: " in gone.stdout) == (0, True), gone.stderr
    assert outside.store.list(f"jobs/{JOB}/") == ()
    assert give(outside, "status", JOB).code == 2


def test_results_on_the_users_own_hosts_are_forgotten_only_where_that_is_said_and_their_place_is_told(
    outside: Outside,
) -> None:
    give(outside, "train", "small.yaml")
    kept = outside.store.get(f"jobs/{JOB}/state.json")
    assert kept is not None
    state = json.loads(kept.data)
    lies = "of attempt 1 did not come home: whatever was written there lies on me@h-1, in ~/.gpucloud/code/aa"
    missing = {"path": "results/", "why": lies, "nearest": None, "attempt": 1}
    state["attempts"][-1].update(missing_outputs=[missing], tree="a" * 64)
    state["pool"]["market"] = "owned"
    outside.store.put(f"jobs/{JOB}/state.json", json.dumps(state).encode())

    refused = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert refused.code == 2
    assert f"results of {JOB} are on your own hosts, and nothing else says where: results/ {lies}" in refused.stderr
    assert f"gpucloud rm {JOB} --with-outputs leaves them there" in refused.stderr
    gone = give(outside, "rm", JOB, "--with-checkpoints", "--with-outputs", "--yes")
    assert (gone.code, f"results stay on your own hosts: results/ {lies}" in gone.stderr) == (0, True), gone.stderr


def test_a_job_that_went_on_while_the_question_stood_is_not_deleted(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(outside, "train", "small.yaml")

    def answered(_: str) -> bool:
        outside.store.put(f"jobs/{JOB}/logs/2/0/0", b"new")
        return True

    monkeypatch.setattr(passes, "is_meant", answered)
    refused = give(outside, "rm", JOB, "--with-checkpoints")
    assert (refused.code, f"{JOB} has gone on meanwhile" in refused.stderr) == (2, True), refused.stderr
    loaded = JobStore(outside.store, JOB).load()
    assert loaded is not None


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("before", [("train", "small.yaml"), ("up", "small.yaml")])
def test_a_start_between_any_two_deletions_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], *, is_lost: bool
) -> None:
    """A job that succeeded is followed by a new run, one that was stopped goes on: here, or under its name anew."""
    monkeypatch.setattr("gpucloud.usecases.jobstore.lease.is_over", lambda state, _: state.owner is None)
    for at in itertools.count():
        outside = Outside(tmp_path / f"{before[0]}-{at}")
        give(outside, *before)
        give(outside, "down", JOB)
        if is_lost:
            lose_the_state(outside)
        delete, deleted, started = outside.store.delete, [], []

        def struck(key: str, *, outside=outside, delete=delete, deleted=deleted, started=started, at=at) -> None:
            delete(key)
            deleted.append(key)
            if len(deleted) == at + 1 and not started:
                started.append(give(outside, "train", "small.yaml"))

        outside.store.delete = struck  # type: ignore[method-assign]
        removed = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
        if not started:
            break
        [start] = started
        what = (at, deleted[at], start.code, start.stderr, removed.stderr)
        assert removed.code == 0, what
        for name in (JOB, f"{JOB}-2"):
            there = JobStore(outside.store, name).load() is not None
            assert there == (outside.store.get(f"jobs/{name}/control/order.json") is not None), what
            assert there == (outside.home.find(name) is not None), what
        anew = deleted[at] == f"jobs/{JOB}/state.json"
        assert (outside.store.list(f"jobs/{JOB}/") != ()) == anew, what
    assert at > 3


@pytest.fixture
def deleted_elsewhere(outside: Outside) -> Outside:
    """A job that is known here, and that another machine has deleted."""
    give(outside, "train", "small.yaml")
    known = outside.home.find(JOB)
    assert known is not None
    give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    outside.home.remember(known)
    return outside


@pytest.mark.parametrize("words", [("status",), ("cost", "--all"), ("reconcile", "--all")])
def test_a_job_that_was_deleted_elsewhere_is_told_and_fails_no_command_over_all_jobs(
    deleted_elsewhere: Outside, words: tuple[str, ...]
) -> None:
    told = give(deleted_elsewhere, *words)
    assert (told.code, "unknown" in told.stdout, "not known" in told.stdout) == (0, False, False), told.stderr
    assert told.stderr == (
        f"{JOB}: it was deleted, or its store is away: it is not in it; gpucloud rm {JOB} forgets it and its"
        " machines' key\n"
    )


def test_a_job_that_was_deleted_elsewhere_is_forgotten_by_rm(deleted_elsewhere: Outside) -> None:
    assert give(deleted_elsewhere, "rm", JOB).code == 2  # what is kept here goes with a yes alone
    assert deleted_elsewhere.home.find(JOB) is not None
    gone = give(deleted_elsewhere, "rm", JOB, "--yes")
    assert (gone.code, gone.stdout) == (0, f"{JOB} is forgotten: nothing of it was in its store\n"), gone.stderr
    assert deleted_elsewhere.home.find(JOB) is None


def test_a_job_of_whose_store_something_is_left_is_not_taken_for_deleted(deleted_elsewhere: Outside) -> None:
    deleted_elsewhere.store.put(f"jobs/{JOB}/control/armings/0000", b"{}")
    told = give(deleted_elsewhere, "status")
    assert (told.code, "unknown: it cannot be read" in told.stdout) == (2, True)
    assert give(deleted_elsewhere, "rm", JOB).code == 2
    assert deleted_elsewhere.home.find(JOB) is not None


def lose_the_state(outside: Outside) -> None:
    outside.store.delete(f"jobs/{JOB}/state.json")


def test_a_job_whose_state_alone_is_lost_is_deleted_as_any_other_once_nothing_of_it_is_listed(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    lose_the_state(outside)
    refused = give(outside, "rm", JOB, "--yes")
    assert (refused.code, "has 3 checkpoints (" in refused.stderr) == (2, True), refused.stderr
    unsaid = give(outside, "rm", JOB, "--with-checkpoints")
    assert (unsaid.code, "nothing is deleted" in unsaid.stderr) == (2, True), unsaid.stderr
    assert f"{JOB} has no state: it never began, or that is lost; no machine of it is listed\n" in unsaid.stderr
    assert not JobStore(outside.store, JOB).exists()

    gone = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (gone.code, f"{JOB} is deleted: " in gone.stdout) == (0, True), gone.stderr
    assert outside.store.list(f"jobs/{JOB}/") == ()
    assert outside.home.find(JOB) is None
    assert give(outside, "up", "small.yaml").code == 0


def test_of_a_job_whose_state_is_lost_it_is_said_in_which_regions_nothing_is_listed(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(outside, "train", "small.yaml")
    lose_the_state(outside)
    cloud = outside.over(Strikes())
    (known,) = outside.home.known()
    monkeypatch.setattr("gpucloud.wiring.jobs._regions", lambda *_: ("us-east-1", "eu-west-1"))
    assert where_listed(cloud, known) == ""
    said = " in us-east-1, eu-west-1 (gpucloud gc --region REGION looks elsewhere)"
    monkeypatch.setattr("gpucloud.wiring.jobs.asker_of", lambda *_: None)
    assert where_listed(cloud, replace(known, cloud=Cloud.AWS)) == said


def test_a_job_whose_state_is_lost_is_not_deleted_while_anything_of_it_is_listed(outside: Outside) -> None:
    give(outside, "up", "small.yaml")
    lose_the_state(outside)
    kept = outside.store.list(f"jobs/{JOB}/")
    refused = give(outside, "rm", JOB, "--with-checkpoints", "--with-outputs", "--yes")
    machines = [node.id for node in outside.cloud.describe(f"gpucloud-{JOB}").alive]
    assert refused.code == 2
    assert (
        f"{JOB} has no state, and of it is still listed: group gpucloud-{JOB}, {', '.join(machines)}" in refused.stderr
    )
    assert "hint: gpucloud gc --wait --yes" in refused.stderr
    assert outside.store.list(f"jobs/{JOB}/") == kept


def test_a_job_without_a_state_whose_machines_another_home_has_is_not_deleted_here(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    lose_the_state(outside)
    key = f"jobs/{JOB}/control/order.json"
    stored = outside.store.get(key)
    assert stored is not None
    envelope = codec.from_json(Envelope, stored.data)
    order = replace(opened(envelope), host="elsewhere", by="ann@desk")
    outside.store.put(key, codec.to_json(replace(envelope, order=codec.to_json(order))).encode())
    refused = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (refused.code, "ann@desk ordered it from another home" in refused.stderr) == (2, True), refused.stderr
    assert outside.store.get(key) is not None


def test_a_deletion_of_a_job_without_a_state_that_was_cut_off_goes_on(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    lose_the_state(outside)
    JobStore(outside.store, JOB).stand_in()
    assert JobStore(outside.store, JOB).exists()
    gone = give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    assert (gone.code, outside.store.list(f"jobs/{JOB}/")) == (0, ()), gone.stderr


def test_the_name_of_a_deleted_job_begins_anew(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "rm", JOB, "--with-checkpoints", "--yes")
    again = give(outside, "up", "small.yaml")
    assert again.code == 0, again.stderr
    assert "put back" not in again.stderr
    loaded = JobStore(outside.store, JOB).load()
    assert loaded is not None
    assert (loaded[0].attempts, loaded[0].order_number) == ((), 1)


def test_the_newest_run_named_by_its_file_goes_alone_and_the_others_are_named(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "train", "small.yaml")
    gone = give(outside, "rm", "small.yaml", "--with-checkpoints", "--yes")
    assert f"of 2 runs, only {JOB}-2 is deleted; the others stay: {JOB}@1\n" in gone.stderr
    assert JobStore(outside.store, JOB).load() is not None


def test_what_is_said_of_an_older_run_names_that_run_and_not_the_newest(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "train", "small.yaml")
    refused = give(outside, "rm", f"{JOB}@1", "--yes")
    assert f"hint: gpucloud rm {JOB}@1 --with-checkpoints deletes them too" in refused.stderr, refused.stderr
    assert f"gpucloud checkpoints {JOB}@1 --pull DIR" in refused.stderr
    assert "is deleted" not in refused.stderr
    unsaid = give(outside, "rm", f"{JOB}@1", "--with-checkpoints")
    assert f"nothing is deleted: gpucloud rm {JOB}@1 --with-checkpoints --yes" in unsaid.stderr
    assert "only" not in unsaid.stderr
    gone = give(outside, "rm", f"{JOB}@1", "--with-checkpoints", "--yes")
    assert f"of 2 runs, only {JOB}@1 is deleted; the others stay: {JOB}-2\n" in gone.stderr
    assert gone.stdout.startswith(f"{JOB}@1 is deleted: ")


def test_a_jobs_name_means_its_newest_run_when_its_first_is_deleted(outside: Outside) -> None:
    give(outside, "train", "small.yaml")
    give(outside, "train", "small.yaml")
    give(outside, "rm", f"{JOB}@1", "--with-checkpoints", "--yes")
    told = give(outside, "status", JOB)
    assert (told.code, told.stdout.startswith(f"{JOB}-2: ")) == (0, True), told.stderr
    assert told.stderr == f"{JOB} means its newest run, {JOB}-2\n"


@pytest.mark.parametrize(
    ("words", "code", "with_data", "left"),
    [
        ((), 0, False, ()),
        ((), 30, False, ("s3://gpucloud-111122223333-us-east-1",)),
        (("--with-data",), 2, None, ()),
        (("--with-data", "--yes"), 0, True, ()),
    ],
)
def test_the_bucket_goes_only_where_that_is_meant(
    words: tuple[str, ...],
    code: int,
    with_data: bool | None,
    left: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[bool] = []
    aws = SimpleNamespace(
        aws=SimpleNamespace(region="us-east-1"),
        require_regions=lambda: None,
        account=lambda: SimpleNamespace(caller=lambda: "111122223333"),
        base_costs=lambda: (),
        end_base=lambda *, with_data, story: ended.append(with_data) or left,
    )
    monkeypatch.setattr(setting_up, "Gpucloud", lambda: SimpleNamespace(aws=lambda *_: aws))
    done = CliRunner().invoke(app, ["down", "--base", *words])
    assert (done.exit_code, ended) == (code, [] if with_data is None else [with_data]), done.output
    assert ("nothing is deleted: gpucloud down --base --with-data --yes" in done.stderr) == (code == 2)
