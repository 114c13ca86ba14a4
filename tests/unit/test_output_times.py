"""When output was written: the agent's marks, on their way into the store and out of it."""

from __future__ import annotations

from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.agent.attempt import running
from gpucloud.agent.attempt.running import OutputTimes, gone
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import StoreError
from gpucloud.domain.node.output import MOST_MARKS, DatedPiece, Mark, mark_line, read_marks, read_piece, with_times
from gpucloud.domain.untrusted import LOG_BYTES, LOG_TIMES_BYTES
from gpucloud.ports import Completed
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise import look
from gpucloud.usecases.supervise.look import LogReader, read_output
from tests.unit.worlds import node

MS = 1763983245123


def marked(text: bytes) -> list[tuple[int, int | None]]:
    return [(mark.until, mark.at_ms) for mark in read_marks(text, 0, 0)[0]]


def test_what_came_is_marked_ten_times_a_second_and_no_more_is_said_to_be_there(tmp_path: Path) -> None:
    times, said = OutputTimes(tmp_path), []
    for now_s, size in ((0.0, 10), (0.05, 20), (0.11, 30), (0.15, 30), (0.3, 30), (0.31, 40)):
        said.append(times.look(((0, size),), now_s=now_s, at_ms=MS + int(now_s * 1000)))
    said.append(times.look(((0, 50),), now_s=0.35, at_ms=MS + 350, last=True))
    assert [until for ((_, until),) in said] == [10, 10, 30, 30, 30, 40, 50]
    found = (tmp_path / "rank-0.times").read_bytes()
    assert marked(found) == [(10, MS), (30, MS + 110), (40, MS + 310), (50, MS + 350)]


def test_what_was_written_while_the_disk_was_full_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times, append = OutputTimes(tmp_path), running._append

    def full(path: Path, data: bytes) -> None:
        append(path, data[:5])
        raise OSError("No space left on device")

    times.look(((0, 10),), now_s=0, at_ms=MS)
    monkeypatch.setattr(running, "_append", full)
    assert times.look(((0, 20),), now_s=1, at_ms=MS + 1000) == ((0, 20),)
    assert times.look(((0, 30),), now_s=2, at_ms=MS + 2000) == ((0, 30),)
    monkeypatch.setattr(running, "_append", append)
    times.look(((0, 40),), now_s=3, at_ms=MS + 3000)
    found = (tmp_path / "rank-0.times").read_bytes()
    assert marked(found) == [(10, MS), (20, None), (30, None), (40, MS + 3000)]


def test_marks_are_read_on_where_a_line_has_ended() -> None:
    text = mark_line(10, MS) + mark_line(25, MS + 100)
    marks, place = read_marks(text + b"40 17", 100, 10)
    assert (marks, place) == ((Mark(until=25, at_ms=MS + 100, place=117),), 134)


@pytest.mark.parametrize("text", [b"\0" * 50 + b"\n", b"x y\n", b"-5 3\n", b"5 99999999999999\n", b"5 5 5\n", b"5\n"])
def test_what_is_no_mark_is_passed_over(text: bytes) -> None:
    assert marked(mark_line(10, MS) + text + mark_line(20, MS)) == [(10, MS), (20, MS)]


def test_marks_of_every_byte_are_thinned_so_that_a_node_fills_nobodys_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "_MOST_WAITING", 50_000)
    reader = LogReader(
        jobs=SimpleNamespace(records=SimpleNamespace(log_end=lambda *_: (0, 0))),  # type: ignore[arg-type]
        output=lambda *_: None,
    )
    reader.offset(1, 0)
    for begin in range(0, 60_000, 10_000):
        reader.take_times(1, 0, b"".join(mark_line(until, MS + until) for until in range(begin + 1, begin + 10_001)))
    marks = reader._ranks[1, 0].marks
    assert len(marks) == 30_000
    assert (marks[-1].until, marks[-1].at_ms) == (60_000, MS + 60_000)
    assert all(later.until > mark.until for mark, later in pairwise(marks))


def test_a_mark_that_goes_back_is_none() -> None:
    assert marked(mark_line(10, MS) + mark_line(9, MS) + mark_line(10, MS) + mark_line(11, MS)) == [(10, MS), (11, MS)]


PIECE = DatedPiece(
    data=b"one\ntwo\nthree\n",
    marks=(Mark(until=4, at_ms=MS), Mark(until=8, at_ms=None), Mark(until=13, at_ms=MS + 5)),
    place=77,
)


def test_a_piece_is_kept_with_its_times_in_one_line_before_it() -> None:
    stored = with_times(PIECE)
    head = b'#gpucloud-times {"version":1,"at":[[4,1763983245123],[4,null],[5,5]],"node":77}\n'
    assert stored == head + b"one\ntwo\nthree\n"
    assert read_piece(stored) == PIECE
    at = datetime(2025, 11, 24, 11, 20, 45, 123000, tzinfo=timezone.utc)
    later = at.replace(microsecond=128000)
    assert [*PIECE.stretches()] == [(b"one\n", at), (b"two\n", None), (b"three", later), (b"\n", None)]
    assert [data for data, _ in PIECE.after(6).stretches()] == [b"o\n", b"three", b"\n"]


def test_a_piece_without_times_is_its_bytes_alone() -> None:
    assert with_times(DatedPiece(data=b"one\n")) == b"one\n"
    assert read_piece(b"one\n") == DatedPiece(data=b"one\n")


def test_a_script_that_writes_what_looks_like_times_changes_nothing() -> None:
    said = DatedPiece(data=with_times(PIECE))
    assert read_piece(with_times(said)).data == said.data


@pytest.mark.parametrize(
    "head",
    [
        b'{"version":2,"at":[],"node":0}',
        b'{"version":1,"at":[[5,1]],"node":0}',
        b'{"version":1,"at":[[0,1]],"node":0}',
        b'{"version":1,"at":[[1,-1]],"node":0}',
        b'{"version":1,"at":[[1,1]],"node":0,"more":1}',
        b"{",
        b"\xff",
    ],
)
def test_times_that_nobody_can_read_are_shown_and_date_nothing(head: bytes) -> None:
    stored = b"#gpucloud-times " + head + b"\none\n"
    assert read_piece(stored) == DatedPiece(data=stored)
    assert read_piece(stored[:20]) == DatedPiece(data=stored[:20])


def test_the_most_marks_of_a_piece_fit_into_their_line() -> None:
    marks = tuple(Mark(until=(n + 1) * 600, at_ms=MS + n * 10_000_000) for n in range(MOST_MARKS))
    piece = DatedPiece(data=b"x" * LOG_BYTES, marks=marks, place=10**15)
    assert len(with_times(piece)) - LOG_BYTES < LOG_TIMES_BYTES
    assert read_piece(with_times(piece)) == piece


class Machine:
    """A node with one rank's files, whose output is asked for as the real shell is."""

    node = node("a")

    def __init__(self) -> None:
        self.files = {"log": b"", "times": b""}
        self.asked: list[tuple[str, int]] = []

    def write(self, data: bytes, at_ms: int | None) -> None:
        self.files["log"] += data
        self.files["times"] += mark_line(len(self.files["log"]), at_ms)

    def run(self, argv: tuple[str, ...], **_: Any) -> Completed:
        _, _, _, _, border, most, *files = argv
        said = b""
        for path, start in zip(files[::2], files[1::2], strict=True):
            kind = path.rpartition(".")[2]
            self.asked.append((kind, int(start)))
            said += border.encode() + self.files[kind][int(start) - 1 :][: int(most)]
        return Completed(exit_code=0, stdout=said, stderr=b"")

    def read(self, logs: LogReader, until: int | None = None, *, last: bool = False) -> None:
        until = len(self.files["log"]) if until is None else until
        read_output(self, 1, ((0, until),), logs, last=last)  # type: ignore[arg-type]


def jobs_in(folder: Path) -> JobStore:
    return JobStore(DirectoryStore(folder), "small")


def told(jobs: JobStore) -> list[tuple[bytes, int | None]]:
    found = []
    for part in jobs.records.log_parts():
        for data, at in jobs.records.read_dated(part).stretches():
            found.append((data, None if at is None else round(at.timestamp() * 1000) - MS))
    return found


def test_lines_come_into_the_store_with_the_time_at_which_their_node_had_them(tmp_path: Path) -> None:
    machine, jobs = Machine(), jobs_in(tmp_path)
    logs = LogReader(jobs, lambda *_: None)
    machine.write(b"one\ntw", MS)
    machine.read(logs)
    logs.flush()
    machine.write(b"o\nthree\n", MS + 100)
    machine.files["log"] += b"four\n"  # the agent has not looked yet
    machine.read(logs, until=14)
    logs.flush()
    assert told(jobs) == [(b"one\n", 0), (b"tw", 0), (b"o\nthree\n", 100)]
    assert logs.offset(1, 0) == 14


@pytest.mark.parametrize("ends", [1, 2, 3, 5])
def test_a_supervisor_that_comes_later_goes_on_with_the_times_where_the_last_one_stopped(
    tmp_path: Path, ends: int
) -> None:
    """Each line comes once with its own time, and no mark is read from the beginning again."""
    machine, jobs = Machine(), jobs_in(tmp_path)
    for number in range(10):
        machine.write(b"line %d\nbegun " % number, MS + number)
        logs = LogReader(jobs, lambda *_: None)
        machine.read(logs)
        if number % ends == 0:
            logs.flush()
    machine.read(logs, last=True)
    logs.flush()
    assert b"".join(data for data, _ in told(jobs)) == machine.files["log"]
    whole, lines = b"", {}
    for data, at in told(jobs):
        lines.update(dict.fromkeys((whole + data).split(b"\n")[:-1], at))
        whole = (whole + data).split(b"\n")[-1]
    assert lines == {(b"begun " if n else b"") + b"line %d" % n: n for n in range(10)}
    assert max(start for kind, start in machine.asked if kind == "times") > 1


class Failing(DirectoryStore):
    """A store that does not answer for a while."""

    fails = True

    def put(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails:
            raise StoreError("the store does not answer", may_pass=True)
        return super().put(*args, **kwargs)


def test_what_waited_for_the_store_keeps_its_times_and_a_piece_has_no_more_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpucloud.usecases.supervise.look.MOST_MARKS", 2)
    machine, store = Machine(), Failing(tmp_path)
    jobs = JobStore(store, "small")
    logs = LogReader(jobs, lambda *_: None)
    for number in range(5):
        machine.write(b"%d\n" % number, MS + number)
        machine.read(logs)
        with pytest.raises(StoreError):
            logs.flush()
    store.fails = False
    logs.flush()
    assert told(jobs) == [(b"0\n", 0), (b"1\n", 1), (b"2\n", 2), (b"3\n", 3), (b"4\n", 4)]
    assert [len(jobs.records.read_dated(part).marks) for part in jobs.records.log_parts()] == [1, 2, 2]


def test_a_node_that_notes_no_times_has_its_output_read_all_the_same(tmp_path: Path) -> None:
    machine, jobs = Machine(), jobs_in(tmp_path)
    machine.files["log"] = b"one\n"
    logs = LogReader(jobs, lambda *_: None)
    machine.read(logs)
    logs.flush()
    assert told(jobs) == [(b"one\n", None)]


def test_a_line_that_says_what_was_dropped_leaves_the_times_of_the_others_alone(tmp_path: Path) -> None:
    machine, jobs = Machine(), jobs_in(tmp_path)
    logs = LogReader(jobs, lambda *_: None)
    machine.write(b"x" * 999 + b"\n", MS)
    machine.write(b"after\n", MS + 7)
    logs.skip(1, 0, 1000)
    machine.read(logs)
    logs.flush()
    said = b"(1000 bytes of output came faster than they could be read)\n"
    assert told(jobs) == [(said, 0), (b"after\n", 7)]


def test_an_agent_that_comes_later_says_what_its_predecessor_gave_back(tmp_path: Path) -> None:
    with (tmp_path / "rank-1.log").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"the end\n")
    (tmp_path / "rank-0.log").write_bytes(b"whole\n")
    assert gone(tmp_path, ((0, 6), (1, (1 << 20) + 8), (2, 5))) == ((1, 1 << 20),)
    assert to_json(gone(tmp_path, ((0, 6),))) == "[]"
