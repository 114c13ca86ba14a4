"""What every Outputs does: straight from the machine, and by way of a store."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from gpucloud.adapters.transfer import copying
from gpucloud.adapters.transfer.localfiles import CameNotes
from gpucloud.adapters.transfer.outputs import OutputsFolder, StoredOutputs, bring_stored_home
from gpucloud.domain.errors import HostUnreachable, LandingRefused, NodeError, StoreError
from gpucloud.domain.state.state import MissingOutput
from gpucloud.ports import Brought, Host, Outputs
from gpucloud.store import PART_BYTES
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.landing import Landing
from gpucloud.system import wholefile
from gpucloud.usecases.supervise.story import brought_lines, missing_line
from tests.fakes.nodes import node_at
from tests.fakes.shell import FakeShell
from tests.unit.worlds import opened

NAMED = ("results/", "run.sh", "metrics/", "*.pt")


@dataclass(frozen=True)
class Case:
    """Outputs, what has them at home in the end, and where that is."""

    outputs: Outputs
    arrive: Callable[[], object]
    home: Path


@pytest.fixture(params=["straight", "stored"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    home = tmp_path / "outputs"

    def fetching(target: Path) -> Outputs:
        return OutputsFolder(NAMED, target, python=sys.executable)

    if request.param == "straight":
        return Case(fetching(home), lambda: None, home)
    store = DirectoryStore(tmp_path / "store")
    outputs = StoredOutputs(store, "digits", tmp_path / "drive" / "outputs", fetching)
    return Case(outputs, lambda: bring_stored_home(store, "digits", home), home)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[Host, Host]:
    shell = FakeShell(tmp_path / "homes")
    return shell.host(node_at(22, None)), shell.host(node_at(23, None, name="another"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A code folder after a run, with outputs of several kinds."""
    folder = tmp_path / "code"
    (folder / "results" / "deep").mkdir(parents=True)
    for name, mode in (("results/deep/model", 0o640), ("results/tool", 0o755), ("run.sh", 0o700)):
        (folder / name).write_text(name)
        (folder / name).chmod(mode)
        os.utime(folder / name, ns=(1_700_000_000_000_000_000, 1_700_000_000_000_000_000))
    (folder / "results" / "last").symlink_to("deep/model")
    (folder / "metrics").mkdir()
    (folder / "metrics" / "loss").touch()
    (folder / "best.pt").touch()
    return folder


def modes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): stat.filemode(path.stat().st_mode) for path in files}


def test_files_arrive_with_their_bytes_their_modes_and_their_times(
    case: Case, hosts: tuple[Host, Host], code: Path
) -> None:
    case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    assert modes(case.home) == {
        "best.pt": ANY,
        "metrics/loss": ANY,
        "results/deep/model": "-rw-r-----",
        "results/tool": "-rwxr-xr-x",
        "run.sh": "-rwx------",
    }
    assert (case.home / "results" / "tool").read_text() == "results/tool"
    assert (case.home / "run.sh").stat().st_mtime_ns == 1_700_000_000_000_000_000


def test_links_arrive_as_links(case: Case, hosts: tuple[Host, Host], code: Path) -> None:
    case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    assert (case.home / "results" / "last").readlink() == Path("deep/model")


def test_a_file_that_nobody_may_read_or_write_is_its_owners_at_home(
    case: Case, hosts: tuple[Host, Host], code: Path
) -> None:
    (code / "run.sh").chmod(0o111)
    case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    assert modes(case.home)["run.sh"] == "-rwx--x--x"


def test_what_a_second_machine_brings_takes_nothing_from_the_first(
    case: Case, hosts: tuple[Host, Host], code: Path
) -> None:
    case.outputs.bring_home(hosts[0], str(code), 1)
    (code / "results" / "tool").unlink()
    (code / "results" / "last").unlink()
    (code / "results" / "other").symlink_to("deep/model")
    case.outputs.bring_home(hosts[1], str(code), 1)
    case.arrive()
    assert modes(case.home)["results/tool"] == "-rwxr-xr-x"
    assert sorted(path.name for path in (case.home / "results").iterdir() if path.is_symlink()) == ["last", "other"]


def test_nothing_is_brought_twice(case: Case, hosts: tuple[Host, Host], code: Path) -> None:
    case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    (case.home / "run.sh").write_text("mine")
    case.arrive()
    assert (case.home / "run.sh").read_text() == "mine"


def test_what_is_not_there_is_named_with_what_is_nearest_and_all_else_arrives(
    case: Case, hosts: tuple[Host, Host], code: Path
) -> None:
    (code / "metrics").rename(code / "metric")
    (code / "best.pt").rename(code / "best.pth")
    brought = case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    assert brought.missing == (
        MissingOutput(path="metrics/", why="is not there", nearest="metric"),
        MissingOutput(path="*.pt", why="is not there", nearest=None),
    )
    assert sorted(modes(case.home)) == ["results/deep/model", "results/tool", "run.sh"]


def test_where_nothing_is_there_all_of_it_is_named_and_nothing_fails(
    case: Case, hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    (tmp_path / "bare").mkdir()
    brought = case.outputs.bring_home(hosts[0], str(tmp_path / "bare"), 1)
    case.arrive()
    assert (brought.paths, [one.path for one in brought.missing]) == ((), list(NAMED))
    assert not case.home.exists()


def test_what_leads_elsewhere_or_is_no_file_is_named_as_left_out(
    case: Case, hosts: tuple[Host, Host], code: Path, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    (code / "results" / "run-1").symlink_to(tmp_path / "scratch")
    os.mkfifo(code / "results" / "pipe")
    (code / "last.pt").symlink_to("gone.pt")
    brought = case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    assert brought.missing == (
        MissingOutput(
            path="results/", why="came without results/pipe and 1 more, which lead elsewhere or are no files"
        ),
        MissingOutput(path="*.pt", why="came without last.pt, which leads elsewhere or is no file"),
    )
    assert (case.home / "best.pt").is_file()


def test_of_what_is_all_there_nothing_is_missing(case: Case, hosts: tuple[Host, Host], code: Path) -> None:
    assert case.outputs.bring_home(hosts[0], str(code), 1).missing == ()


def test_nothing_that_came_home_before_is_written_over(case: Case, hosts: tuple[Host, Host], code: Path) -> None:
    """Each attempt's words stay, whether it came home before the next one began or lay in the store with it."""
    steps, home = code / "results" / "steps.txt", case.home / "results"
    for attempt, words in ((1, "one"), (2, "two"), (3, "two"), (4, "three")):
        steps.write_text(words)
        (code / "results" / "last").unlink()
        (code / "results" / "last").symlink_to("tool" if attempt > 1 else "deep/model")
        case.outputs.bring_home(hosts[0], str(code), attempt)
        if attempt != 1:
            case.arrive()
    found = {path.name: path.read_text() for path in home.glob("steps*")}
    assert found == {"steps.txt": "three", "steps.txt.before-attempt-2": "one", "steps.txt.before-attempt-4": "two"}
    assert (home / "last").readlink() == Path("tool")
    assert sorted(path.name for path in home.iterdir()) == ["deep", "last", *sorted(found), "tool"]


def test_what_the_user_has_put_there_is_kept_too(case: Case, hosts: tuple[Host, Host], code: Path) -> None:
    (case.home / "results").mkdir(parents=True)
    (case.home / "results" / "tool").write_text("mine")
    (case.home / "results" / "tool.before-attempt-1").write_text("older")
    case.outputs.bring_home(hosts[0], str(code), 1)
    case.arrive()
    found = {path.name: path.read_text() for path in (case.home / "results").glob("tool*")}
    assert found == {"tool": "results/tool", "tool.before-attempt-1": "older", "tool.before-attempt-1.2": "mine"}


def test_what_an_earlier_attempt_left_in_the_store_comes_home_before_what_is_newer(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    store, home = DirectoryStore(tmp_path / "store"), tmp_path / "outputs"
    tool = code / "results" / "tool"
    earlier = partial(bring_stored_home, store, "digits", home)
    by_store = StoredOutputs(store, "digits", None, lambda to: OutputsFolder(NAMED, to, python=sys.executable))
    straight = OutputsFolder(NAMED, home, python=sys.executable, earlier=earlier)
    tool.write_text("one")
    by_store.bring_home(hosts[0], str(code), 1)
    tool.write_text("two")
    brought = straight.bring_home(hosts[0], str(code), 2)
    found = {path.name: path.read_text() for path in (home / "results").glob("tool*")}
    assert found == {"tool": "two", "tool.before-attempt-2": "one"}
    assert brought.set_aside == (str(home / "results" / "tool.before-attempt-2"),)
    assert store.list("jobs/") == ()


def test_one_name_that_the_disk_at_home_cannot_have_keeps_no_other_result_from_coming(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hosts: tuple[Host, Host]
) -> None:
    """Straight, and out of the store, where a machine had put them as they were."""
    code, home, store = tmp_path / "code", tmp_path / "home", DirectoryStore(tmp_path / "store")
    (code / "results").mkdir(parents=True)
    for name in ("Best.pt", "best.pt"):
        (code / "results" / name).write_text(name)
    (code / "results" / "out").symlink_to("mine/file")
    outputs = OutputsFolder(("results/",), home / "o", python=sys.executable)
    by_store = StoredOutputs(store, "digits", None, lambda to: OutputsFolder(("results/",), to, python=sys.executable))
    by_store.bring_home(hosts[0], str(code), 1)
    for folder in ("o", "s"):
        (home / folder / "results").mkdir(parents=True)
        (home / folder / "results" / "mine").symlink_to("/")
    monkeypatch.setattr(Landing, "_folds", lambda _: True)

    for brought, to in (
        (outputs.bring_home(hosts[0], str(code), 1), "o"),
        (bring_stored_home(store, "digits", home / "s"), "s"),
    ):
        found = home / to / "results"
        assert {path.name: path.read_text() for path in found.glob("*est*")} == {
            "Best.pt": "Best.pt",
            "best.pt.2": "best.pt",
        }
        assert brought.renamed == (("results/best.pt", "results/best.pt.2"),)
        (missing,) = brought.missing
        assert missing_line(missing).startswith(
            "outputs: results/out was left out: it is a link to 'mine/file', which leads out through a link in "
        )
        assert "results/best.pt came as results/best.pt.2: the disk here takes its name for another's" in brought_lines(
            brought
        )
        assert not any(path.endswith("/out") for path in brought.paths)


def test_outputs_find_another_place_where_those_of_an_earlier_attempt_are_refused(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    def refused() -> Brought:
        raise LandingRefused("'../x' leads out")

    with pytest.raises(StoreError, match=r"'\.\./x' leads out"):
        OutputsFolder(NAMED, tmp_path / "o", python=sys.executable, earlier=refused).bring_home(hosts[0], str(code), 2)


def test_what_is_here_already_does_not_count_as_having_come(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    outputs = OutputsFolder(("results",), tmp_path / "outputs", python=sys.executable)
    whole = outputs.bring_home(hosts[0], str(code), 1).size
    assert whole == sum(
        path.stat().st_size for path in (code / "results").rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert outputs.bring_home(hosts[0], str(code), 2).size == 0
    (code / "results" / "tool").write_text("other")
    assert outputs.bring_home(hosts[0], str(code), 3).size == 5


def test_a_copy_that_is_given_up_when_all_of_it_has_come_changes_nothing_here(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    heard = []

    def moves() -> None:
        heard.append(1)
        if len(heard) == calls:
            raise NodeError("another try brings the outputs", hint=None)

    calls = 0
    OutputsFolder(("results",), tmp_path / "first", python=sys.executable).bring_home(hosts[0], str(code), 1, moves)
    calls, heard = len(heard), []
    with pytest.raises(NodeError):
        OutputsFolder(("results",), tmp_path / "o", python=sys.executable).bring_home(hosts[0], str(code), 1, moves)
    assert not (tmp_path / "o" / "results").exists()


@pytest.mark.parametrize("here", [b"", b"first" * 40], ids=["nothing here", "another one here"])
def test_results_are_told_to_live_while_they_are_hashed_there_and_here_within_a_large_file_too(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path, monkeypatch: pytest.MonkeyPatch, here: bytes
) -> None:
    """What is heard of nothing for ten minutes counts as standing still, and one hash of 75 GB takes as long."""
    for module in (copying, wholefile):
        monkeypatch.setattr(module, "HASHED_BYTES", 50)
    monkeypatch.setattr(copying, "_HASHED_BYTES_PER_CALL", 100)
    monkeypatch.setattr(copying, "BATCH_BYTES", 50)
    (code / "large").write_bytes(data := b"there" * 40)
    (tmp_path / "o").mkdir()
    if here:
        (tmp_path / "o" / "large").write_bytes(here)
    heard: list[str] = []
    monkeypatch.setattr(wholefile, "_sha256_between", _told(heard, "hash here", wholefile._sha256_between))
    monkeypatch.setattr(copying.NodeProgram, "run", _told(heard, "node", copying.NodeProgram.run))
    outputs = OutputsFolder(("large",), tmp_path / "o", python=sys.executable)

    assert outputs.bring_home(hosts[0], str(code), 1, lambda: heard.append("lives")).size == 200
    assert (tmp_path / "o" / "large").read_bytes() == data
    assert heard[:5] == ["node", "node", "lives", "node", "lives"]  # listed, and hashed in two requests
    hashed = [after for one, after in pairwise(heard) if one == "hash here"]
    assert hashed == ["lives"] * (4 + 4 + 8 if here else 4)  # what lies here, what came, and both once more


def _told(heard: list[str], word: str, does: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any, **others: Any) -> Any:
        heard.append(word)
        return does(*args, **others)

    return told


def test_what_was_set_aside_before_is_not_kept_once_more(tmp_path: Path, hosts: tuple[Host, Host], code: Path) -> None:
    outputs, tool = OutputsFolder(("results",), tmp_path / "o", python=sys.executable), code / "results" / "tool"
    for attempt, text in enumerate(("one", "two", "one", "two", "three"), 1):
        tool.write_text(text)
        outputs.bring_home(hosts[0], str(code), attempt)
    found = {path.name: path.read_text() for path in (tmp_path / "o" / "results").glob("tool*")}
    assert found == {"tool": "three", "tool.before-attempt-2": "one", "tool.before-attempt-3": "two"}


def test_a_file_that_was_being_written_when_its_script_was_killed_is_named(
    case: Case, hosts: tuple[Host, Host], code: Path, tmp_path: Path
) -> None:
    node = hosts[0].node
    attempts = tmp_path / "homes" / node.id / node.root / "attempts"
    for number, word in enumerate((f'["{code}/best.pt", "{code}/results/tool", "/etc/passwd", 3]', "{", '{"a": 1}'), 1):
        (attempts / f"{number:04d}").mkdir(parents=True)
        (attempts / f"{number:04d}" / "writing.json").write_text(word)
    why = "was being written when the script was ended: it may be incomplete"
    assert case.outputs.bring_home(hosts[0], str(code), 1).missing == (
        MissingOutput(path="results/tool", why=why),
        MissingOutput(path="best.pt", why=why),
    )
    for attempt in (2, 3, 4):
        assert case.outputs.bring_home(hosts[0], str(code), attempt).missing == ()


def test_a_machine_that_goes_once_its_outputs_have_landed_takes_nothing_of_them(
    case: Case, hosts: tuple[Host, Host], code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, answer = hosts[0], hosts[0].run
    attempt = tmp_path / "homes" / host.node.id / host.node.root / "attempts" / "0001"
    attempt.mkdir(parents=True)
    (attempt / "writing.json").write_text(f'["{code}/best.pt"]')

    def run(argv: tuple[str, ...], **options: Any) -> Any:
        if any(place.exists() for place in tmp_path.glob("**/outputs*/best.pt")):
            raise HostUnreachable("it is gone")
        return answer(argv, **options)

    monkeypatch.setattr(host, "run", run)
    assert [one.path for one in case.outputs.bring_home(host, str(code), 1).missing] == ["best.pt"]
    case.arrive()
    assert (case.home / "results" / "tool").read_text() == "results/tool"


def test_what_lies_at_home_already_is_not_read_from_the_store_again(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, home = DirectoryStore(tmp_path / "store"), tmp_path / "outputs"
    by_store = StoredOutputs(store, "digits", None, lambda to: OutputsFolder(NAMED, to, python=sys.executable))
    read: list[str] = []
    plain = store.read_into

    def counted(key: str, at: int, into: memoryview) -> bool:
        read.append(key.rpartition("/")[2])
        return plain(key, at, into)

    monkeypatch.setattr(store, "read_into", counted)
    by_store.bring_home(hosts[0], str(code), 1)
    (home / "results").mkdir(parents=True)
    (home / "results" / "tool").write_text("results/tool")
    (home / "run.sh").write_text("run.SH")  # as long, and another
    brought = bring_stored_home(store, "digits", home)
    assert ("tool" in read, "run.sh" in read, "model" in read) == (False, True, True)
    assert (home / "run.sh").read_text() == "run.sh"
    assert str(home / "results" / "tool") in brought.paths
    assert brought.size == len("results/deep/model") + len("run.sh")
    assert store.list("jobs/digits/outputs/") == ()


def test_a_large_file_that_goes_into_the_store_is_heard_of_part_by_part(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    with (code / "best.pt").open("wb") as file:
        file.truncate(70 << 20)
    store, heard = DirectoryStore(tmp_path / "store"), []
    put = partial(StoredOutputs(store, "digits", None, OutputsFolder)._put, "jobs/digits/outputs/files/best.pt")
    put(code / "best.pt", lambda: heard.append(1))
    assert len(heard) == -(-(70 << 20) // PART_BYTES)
    assert (store.root / "jobs/digits/outputs/files/best.pt").stat().st_size == 70 << 20

    def another_try() -> None:
        raise NodeError("another try brings the outputs")

    with pytest.raises(NodeError):
        put(code / "best.pt", another_try)


def test_what_came_home_is_known_there_by_the_attempt_that_it_is_of(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    outputs = OutputsFolder(("results/", "gone"), tmp_path / "home", python=sys.executable, marks=True)
    attempt = opened(hosts[0].node.id, number=2)
    assert outputs.came(attempt) is None
    brought = outputs.bring_home(hosts[0], str(code), 2)
    assert [one.path for one in brought.missing] == ["gone"]
    assert outputs.came(attempt) is None
    outputs.note(attempt, brought.missing, attempt.started_at)
    assert outputs.came(attempt) == brought.missing
    others = (opened(hosts[0].node.id, number=3), opened(hosts[1].node.id, number=2))
    assert [outputs.came(other) for other in others] == [None, None]


def test_files_that_lay_where_outputs_came_home_are_counted_unless_they_came_too(
    tmp_path: Path, hosts: tuple[Host, Host], code: Path
) -> None:
    (code / "results").mkdir(exist_ok=True)
    for name, text in (("same.txt", "as before"), ("new.txt", "of now"), ("other.txt", "another")):
        (code / "results" / name).write_text(text)
    home = tmp_path / "home"
    (home / "results").mkdir(parents=True)
    for name, text in (("same.txt", "as before"), ("ckpt_20.pt", "of a run before"), ("other.txt", "of a run before")):
        (home / "results" / name).write_text(text)
    time.sleep(0.05)
    began = datetime.now(timezone.utc)
    time.sleep(0.05)

    for number in (1, 2):  # what an attempt brought is the run's, whichever brings next
        outputs = OutputsFolder(("results/",), home, python=sys.executable, marks=True)
        attempt = opened(hosts[0].node.id, number=number)
        outputs.note(attempt, outputs.bring_home(hosts[0], str(code), number).missing, began)
        assert CameNotes(home).beside(attempt) == 1
        (code / "results" / "new.txt").unlink(missing_ok=True)
