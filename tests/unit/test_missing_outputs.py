"""An output of the job file that does not come home is said where nobody can overlook it, and ends nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpucloud.adapters.transfer import outputs
from gpucloud.adapters.transfer.copying import Listing, Remote, RemoteFolder
from gpucloud.adapters.transfer.outputs import OutputsFolder
from gpucloud.cli.render.reports import report_json, report_text
from gpucloud.cli.render.ways import missing_lines
from gpucloud.domain.errors import LandingRefused
from gpucloud.domain.job.spec import Job
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.node import NO_GROUP, Node
from gpucloud.domain.state.state import Attempt, ExitReason, JobStatus, MissingOutput
from gpucloud.ports import Brought, Completed, Host
from gpucloud.usecases.job.jobs import with_stored_outputs
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.report import JobReport, report
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.story import brought_line, brought_lines, missing_line
from tests.fakes.nodes import node_at
from tests.faults.process import Ended, run
from tests.faults.rig import JOB, NoOutputs, Outside, Rigged
from tests.faults.strikes import Strikes
from tests.unit.worlds import opened, state

METRICS = MissingOutput(path="metrics/", why="is not there", nearest="metric")
LINE = "outputs: metrics/ is not there; nearest: metric"


class Whole(Rigged):
    """gpucloud over fakes, for a job with outputs."""

    def __init__(self, outside: Outside, strikes: Strikes, bring: Any) -> None:
        super().__init__(outside, strikes)
        self._bring = bring

    def services(self, job: Job, name: str, **named: Any) -> Services:
        outputs = NoOutputs()
        outputs.bring_home = self._bring  # type: ignore[method-assign]
        return replace(super().services(job, name, **named), outputs=outputs)

    def bring_stored_home(self, job: Job, name: str) -> Brought:
        del job, name
        return Brought()


def trained(folder: Path, bring: Any) -> tuple[Ended, tuple[MissingOutput, ...]]:
    """Return how `train` ended, and what its state says is missing."""
    outside = Outside(folder)
    outside.job = replace(outside.job, outputs=("results/", "metrics/"))
    ended = run(("train", str(outside.file), "--json"), Whole(outside, Strikes(), bring), Strikes())
    loaded = JobStore(outside.store, JOB).load()
    assert loaded is not None
    return ended, loaded[0].missing_outputs


def test_a_job_succeeds_all_the_same_and_story_state_and_answer_name_what_is_missing(tmp_path: Path) -> None:
    home = tmp_path / "results"
    home.mkdir()
    (home / "model.pt").touch()
    ended, missing = trained(tmp_path, lambda *_: Brought(paths=(str(home),), missing=(METRICS,)))
    assert (ended.code, missing) == (0, (METRICS,))
    assert json.loads(ended.stdout)["missing_outputs"] == [
        {"path": "metrics/", "why": "is not there", "nearest": "metric", "attempt": None, "brought_by": None}
    ]
    told = [line.partition(" ")[2] for line in ended.stderr.splitlines()]
    assert told[told.index(f"brought home: {home}") + 1] == LINE


def test_outputs_that_may_lie_nowhere_are_missing_with_the_reason(tmp_path: Path) -> None:
    def refused(*_: object) -> Brought:
        raise LandingRefused("'../x' leads out")

    ended, missing = trained(tmp_path, refused)
    assert ended.code == 0
    assert [one.path for one in missing] == ["results/", "metrics/"]
    assert all(one.why.endswith("the machine of rank 0; it was refused here: '../x' leads out") for one in missing)


def test_the_report_is_about_the_last_attempt() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    first: Attempt = replace(opened("a"), reason=ExitReason.STOPPED, missing_outputs=(METRICS,))
    over = report(state(attempts=(first,)), spend, (), NO_GROUP, None)
    again = report(state(attempts=(first, replace(opened("a"), number=2))), spend, (), NO_GROUP, None)
    assert (report_json(over)["missing_outputs"] == [], report_json(again)["missing_outputs"]) == (False, [])
    assert LINE in report_text(over)
    assert LINE not in report_text(again)


def test_what_an_earlier_attempt_lost_is_told_beside_what_a_later_one_brought_home() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    lost = MissingOutput(path="out/", why="of attempt 1 did not come home: it went with a", attempt=1)
    first: Attempt = replace(opened("a"), reason=ExitReason.LOST, missing_outputs=(lost,), outputs=("out/",))
    second = replace(opened("b"), number=2, outputs=("out/",))

    def told(last: Attempt) -> tuple[str, int | None]:
        known = report(state(attempts=(first, last)), spend, (), NO_GROUP, None)
        (line,) = [line for line in report_text(known).splitlines() if line.startswith("outputs: out/")]
        return line, report_json(known)["missing_outputs"][0]["brought_by"]

    came = (
        "outputs: out/ is home, as attempt 2 left it; before that, out/ of attempt 1 did not come home: it went with a"
    )
    stays = "outputs: out/ of attempt 1 did not come home: it went with a", None
    assert told(replace(second, reason=ExitReason.SUCCEEDED)) == (came, 2)
    assert told(second) == stays  # it runs
    assert told(replace(second, reason=ExitReason.INTERRUPTED)) == stays  # its own wait for the next
    assert told(replace(second, reason=ExitReason.INTERRUPTED, outputs_came=True)) == (came, 2)
    assert told(replace(second, reason=ExitReason.SUCCEEDED, outputs=())) == stays


@pytest.mark.parametrize(
    ("supervisor", "why"),
    [
        ("process 1 on vm", "of attempt 1 is being brought from a"),
        (None, "of attempt 1 did not come home: it went with a"),
    ],
)
def test_what_somebody_fetches_is_on_its_way_and_lost_once_nobody_does(supervisor: str | None, why: str) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    lost = MissingOutput(path="out/", why="of attempt 1 did not come home: it went with a", attempt=1)
    first = replace(opened("a"), reason=ExitReason.INTERRUPTED, missing_outputs=(lost,), outputs_coming=True)
    known = report(state(attempts=(first,)), spend, (), NO_GROUP, supervisor)
    assert missing_lines(known) == [f"outputs: out/ {why}"]
    assert [one["why"] for one in report_json(known)["missing_outputs"]] == [why]


def test_what_is_in_the_store_alone_is_not_told_as_home() -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    lost = MissingOutput(path="out/", why="of attempt 1 did not come home: it went with a", attempt=1)
    first = replace(opened("a"), reason=ExitReason.LOST, missing_outputs=(lost,), outputs=("out/",))
    second = replace(opened("b"), number=2, outputs=("out/",), reason=ExitReason.SUCCEEDED)
    known = report(state(attempts=(first, second), torn_down=True), spend, (), NO_GROUP, None)
    known = replace(known, drives_itself=True, status=JobStatus.SUCCEEDED, home=None)
    in_store = "out/ in the job's store: gpucloud cp -r digits:@store/outputs FOLDER copies it"
    before = f"{lost.path} {lost.why}; what was stored before that is {in_store.removeprefix('out/ ')}"

    def told(of: JobReport) -> tuple[list[str], set[int | None]]:
        by = {one["brought_by"] for one in report_json(of)["missing_outputs"]}
        return [line.removeprefix("outputs: ") for line in missing_lines(of)], by

    assert told(with_stored_outputs(known, frozenset({2}))) == ([f"{lost.path} {lost.why}", in_store], {None})
    assert told(with_stored_outputs(known, frozenset({1, 2}))) == ([before, in_store], {None})
    assert told(with_stored_outputs(known, frozenset({1}))) == (
        [f"out/ is home, as attempt 2 left it; before that, {before}"],
        {2},
    )
    # A machine that drives its job brings results into the store: nobody has asked that yet.
    assert told(replace(known, torn_down=False)) == ([f"{lost.path} {lost.why}"], {None})


class Naming:
    """A node that has nothing of what it is asked for, and names something else."""

    def __init__(self, nearest: object, outside: tuple[tuple[int, str], ...] = ()) -> None:
        self.node: Node = node_at(22, None)
        found = [[0, "results"]] if outside else []
        rows = {"found": found, "files": [], "links": [], "folders": [], "outside": outside}
        self._said = {"base": "/", **rows, "missing": [["results/", nearest], ["/etc/shadow", "x"]]}

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        del argv, stdin, timeout_s
        return Completed(exit_code=0, stdout=json.dumps(self._said).encode(), stderr=b"")


@pytest.mark.parametrize("nearest", ["a\x1b[2Jb", "a\nb", "\ud800", "\u202ea", "x" * 5000, None])
def test_a_name_that_cannot_be_told_is_no_hint_and_what_was_not_asked_for_is_not_missing(
    tmp_path: Path, nearest: str | None
) -> None:
    brought = OutputsFolder(("results/",), tmp_path).bring_home(Naming(nearest), "code", 1)  # type: ignore[arg-type]
    assert brought == Brought(missing=(MissingOutput(path="results/", why="is not there"),))


def test_a_name_that_was_left_out_is_escaped(tmp_path: Path) -> None:
    node: Any = Naming(None, ((0, "a\x1b[2J"),))
    (missing,) = OutputsFolder(("results/",), tmp_path).bring_home(node, "code", 1).missing
    assert missing_line(missing) == (
        "outputs: results/ came without 'results/a\\x1b[2J', which leads elsewhere or is no file"
    )


def test_a_folder_that_came_home_empty_is_said_to_be_empty(tmp_path: Path) -> None:
    full, bare = tmp_path / "full", tmp_path / "bare"
    full.mkdir()
    bare.mkdir()
    (full / "model.pt").touch()
    assert brought_line(str(full)) == f"brought home: {full}"
    assert brought_line(str(full / "model.pt")) == f"brought home: {full}/model.pt"
    assert brought_line(str(bare)) == f"brought home: {bare}, an empty folder: the script wrote nothing into it"


@pytest.mark.parametrize(
    ("kept", "line"),
    [
        (("/o/a.before-attempt-2",), "1 file that lay there was not written over: kept as /o/a.before-attempt-2"),
        (
            ("/o/a.before-attempt-2", "/o/b.before-attempt-2"),
            "2 files that lay there were not written over: kept as /o/a.before-attempt-2 and 1 more of that ending",
        ),
    ],
)
def test_files_that_were_not_written_over_are_told_in_one_line(kept: tuple[str, ...], line: str) -> None:
    assert brought_lines(Brought(paths=("/o",), set_aside=kept)) == ("brought home: /o", line)


def looks_at(count: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> int:
    """Return how many calls it takes to bring so many results home: half in a folder, half found by a pattern."""
    inner = (Remote(path=f"r/{n}", top="r", inner=str(n), size=0, mode=0, mtime_ns=0) for n in range(count))
    plain = (Remote(path=f"s/{n}", top=f"s/{n}", inner="", size=0, mode=0, mtime_ns=0) for n in range(count))
    tops = (RemoteFolder(top=top, inner="", mode=0) for top in ("r", *(f"t/{n}" for n in range(count))))
    listed = Listing(base="", files=(*inner, *plain), links=(), folders=tuple(tops), missing=(), outside=())
    gone = tuple(f"s/{n}" for n in range(count // 2))
    copier = SimpleNamespace(listing=lambda _: listed, fetch=lambda *_: (0, (), gone))
    monkeypatch.setattr(outputs, "Copier", lambda *_, **__: copier)
    calls = 0

    def count_one(*_: object) -> None:
        nonlocal calls
        calls += 1

    bare = Completed(exit_code=1, stdout=b"", stderr=b"")
    host = cast("Host", SimpleNamespace(node=node_at(0, None), run=lambda *_, **__: bare))
    sys.setprofile(count_one)
    try:
        brought = OutputsFolder(("r", "s/*", "t/*", "s/1"), folder).bring_home(host, "code", 1)
    finally:
        sys.setprofile(None)
    assert len(brought.paths) == 1 + count + count - count // 2
    assert brought.missing == (MissingOutput(path="s/1", why="is not there"),)
    return calls


def test_twice_as_many_results_are_looked_at_twice_as_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert looks_at(200, monkeypatch, tmp_path) < 2.2 * looks_at(100, monkeypatch, tmp_path)
