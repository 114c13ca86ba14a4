"""The nodes' history reaches the store once, whoever brings it, and is read back after the nodes are gone."""

from __future__ import annotations

import gzip
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from gpucloud.domain.codec import to_json
from gpucloud.domain.node.use import GpuSpan, Span
from gpucloud.domain.untrusted import HISTORY_BYTES
from gpucloud.ports import Completed
from gpucloud.store import open_store
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.usage import EVERY, UsageHistory, read_history
from tests.fakes.shell import FakeShell
from tests.unit.worlds import node

START = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


class Clock:
    def __init__(self) -> None:
        self.at = START

    def now(self) -> datetime:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def jobs(tmp_path):
    return JobStore(open_store(str(tmp_path / "store")), "digits")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "nodes" / "i-1" / ".gpucloud" / "attempts" / "0001" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def host(tmp_path):
    return FakeShell(tmp_path / "nodes").host(node("i-1"))


def span(tens: int) -> Span:
    gpu = GpuSpan(
        index=0, use=90.0, use_most=97, memory_used_mib=70000, memory_mib=143771, temperature=61, power=600.0,
        power_most=650.0,
    )  # fmt: skip
    return Span(start=START + timedelta(seconds=10 * tens), seconds=10.0, gpus=(gpu,), host=None)


def lines(*tens: int) -> str:
    return "".join(to_json(span(ten)) + "\n" for ten in tens)


def test_new_whole_lines_are_brought_every_few_minutes_and_at_the_end(jobs, file, host):
    clock = Clock()
    history = UsageHistory(jobs, clock)
    file.write_text(lines(0, 1) + lines(2)[:40])
    history.look(host, 1)
    assert jobs.records.history_parts() == ()  # it is not time yet
    clock.sleep(EVERY.total_seconds())
    history.look(host, 1)
    file.write_text(lines(0, 1, 2, 3))
    history.look(host, 1)
    history.look(host, 1, last=True)
    history.look(host, 1, last=True)
    (found,) = read_history(jobs)
    assert (found.attempt, found.node_id) == (1, "i-1")
    assert found.spans == (span(0), span(1), span(2), span(3))
    assert [part.offset for part in jobs.records.history_parts(1)] == [0, len(lines(0, 1))]


def test_a_later_supervisor_goes_on_where_the_store_ends(jobs, file, host):
    file.write_text(lines(0, 1))
    UsageHistory(jobs, Clock()).look(host, 1, last=True)
    file.write_text(lines(0, 1, 2))
    UsageHistory(jobs, Clock()).look(host, 1, last=True)
    assert read_history(jobs)[0].spans == (span(0), span(1), span(2))


def test_a_node_without_history_leaves_nothing(jobs, host):
    UsageHistory(jobs, Clock()).look(host, 1, last=True)
    assert read_history(jobs) == ()


def test_a_damaged_piece_stops_no_supervisor(jobs, file, host):
    file.write_text(lines(0))
    jobs.records.append_history(1, "i-1", 0, b"torn")
    UsageHistory(jobs, Clock()).look(host, 1, last=True)
    assert len(jobs.records.history_parts()) == 1


def test_a_node_that_says_more_than_it_was_asked_for_leaves_a_history_that_can_be_read(jobs, host):
    said = Completed(exit_code=0, stdout=(b"x" * 99 + b"\n") * (HISTORY_BYTES // 100 + 1), stderr=b"")
    loud = SimpleNamespace(node=host.node, run=lambda *_, **__: said)
    UsageHistory(jobs, Clock()).look(loud, 1, last=True)
    (found,) = read_history(jobs)
    assert (found.node_id, found.spans) == ("i-1", ())


def test_a_damaged_piece_hides_no_other(jobs):
    jobs.records.append_history(1, "i-1", 0, b"torn")
    jobs.records.append_history(1, "i-2", 0, gzip.compress(lines(1).encode()))
    assert [(one.node_id, one.spans) for one in read_history(jobs)] == [("i-1", ()), ("i-2", (span(1),))]


def test_a_line_of_a_newer_version_is_passed_over(jobs, file, host):
    file.write_text('{"start": "soon"}\n' + lines(1))
    UsageHistory(jobs, Clock()).look(host, 1, last=True)
    assert read_history(jobs)[0].spans == (span(1),)
