"""What `logs` writes before the output of each attempt and before its lines, and which lines of it."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.cli.commands import logs
from gpucloud.cli.render import output as log_output
from gpucloud.domain.checkpoint.manifest import Counts
from gpucloud.domain.errors import GpucloudError, UsageError
from gpucloud.domain.job.quantities import format_moment
from gpucloud.domain.job.spec import Market
from gpucloud.domain.money.budget import Spend
from gpucloud.domain.node.output import DatedPiece, Mark
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason, JobStatus, UsageInterval
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.usecases.job.jobs import Unsupervised
from gpucloud.usecases.jobstore.records import AttemptRecords, LogPart, launched_ranks
from gpucloud.usecases.jobstore.report import report
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.test_shown import Terminal
from tests.unit.worlds import NOW, POOL, opened, snapshot, state, up

STATE = state(attempts=(opened("a", "b", number=1, first_step=1), opened("a", number=2)))
AT = datetime(2026, 11, 24, 18, 40, tzinfo=timezone.utc)


def part(attempt: int, rank: int = 0) -> LogPart:
    return LogPart(attempt=attempt, rank=rank, offset=0, key=f"{attempt}")


def piece(data: bytes) -> DatedPiece:
    return DatedPiece(data=data)


def dated(*stretches: tuple[bytes, int | None]) -> DatedPiece:
    """A piece whose stretches were there so many seconds after `AT`."""
    data, marks = b"", []
    for text, seconds in stretches:
        data += text
        at_ms = None if seconds is None else int(AT.timestamp() + seconds) * 1000
        marks.append(Mark(until=len(data), at_ms=at_ms))
    return DatedPiece(data=data, marks=tuple(marks))


class Stored:
    """A job's stored state, and how many ranks its nodes have."""

    def __init__(self, ranks: int = 1, *, launched: dict[int, int] | None = None) -> None:
        self.ranks, self.launched = ranks, launched or {}

    def stored_state(self) -> Any:
        return STATE

    def ranks_of_a_node(self, attempt: int) -> int:
        return self.launched.get(attempt, self.ranks)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logs, "tell", lines.append)
    return lines


class Writer:
    """Notes what is written, and that a line was left when another attempt began."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def write(self, part: LogPart, data: bytes, at: datetime | None = None) -> None:
        del part, at
        self.lines.append(data.decode())

    def end(self) -> None:
        if self.lines:
            self.lines.append("(ended)")


def ranks_of(wanted: logs.Wanted, *, each: int = 1) -> logs.Ranks:
    return logs.Ranks(asker=Stored(each), state=STATE, wanted=wanted)  # type: ignore[arg-type]


def shown_to(lines: list[str], wanted: logs.Wanted, since: logs.Since | None = None) -> logs.Shown:
    return logs.Shown(ranks=ranks_of(wanted), writer=Writer(lines), wanted=wanted, since=since)


def test_each_attempts_output_has_a_line_before_it(written: list[str]) -> None:
    shown = shown_to(written, logs.Wanted())
    for number, data in ((1, b"one\n"), (1, b"two\n"), (2, b"three\n")):
        shown.take(part(number), piece(data))
    assert written == [
        "── attempt 1, 2 nodes, from the beginning ──",
        "one\n",
        "two\n",
        "(ended)",
        "── attempt 2, 1 node ──",
        "three\n",
    ]


def test_the_line_before_an_attempt_says_that_its_script_began_anew_and_calls_a_save_what_it_is() -> None:
    anew = opened("a", number=2, first_step=1, last_step=185, begun_anew=True)
    assert logs.attempt_header(2, anew) == "── attempt 2, 1 node, began anew ──"
    counted = opened("a", number=2, first_step=3, counts=Counts.SAVES)
    assert logs.attempt_header(2, counted) == "── attempt 2, 1 node, after save 2 ──"
    assert logs.attempt_header(1, replace(counted, first_step=1)) == "── attempt 1, 1 node, from the beginning ──"
    assert logs.attempt_header(2, replace(counted, counts=None)) == "── attempt 2, 1 node, from step 3 ──"


def test_the_first_step_that_a_script_prints_is_not_told_as_the_one_that_it_began_at() -> None:
    prints = opened("a", number=2, first_step=20, last_step=60, printed_step=60, counts=Counts.STEPS)
    assert logs.attempt_header(2, prints) == "── attempt 2, 1 node, first step printed: 20 ──"
    saves = replace(prints, first_step=3, counts=Counts.SAVES)
    assert logs.attempt_header(2, saves) == "── attempt 2, 1 node, after save 2 ──"


@pytest.mark.parametrize(
    ("member", "attempt", "life", "wanted", "said"),
    [
        ({}, {}, {}, {}, True),
        ({}, {}, {}, {"rank": 0}, True),
        ({"outcome": Outcome.LEFT}, {}, {}, {}, False),  # its script was heard to its end
        ({}, {"reason": None}, {}, {}, False),  # it is open: what nobody fetches of that is said at the end
        ({}, {}, {"last_word_at": NOW + timedelta(seconds=28)}, {}, False),
        ({}, {}, {"last_word_at": None}, {}, False),
        ({}, {}, {"last_word_at": NOW + timedelta(minutes=1)}, {}, False),  # it went on with the next attempt
        ({}, {}, {"ended_at": None}, {}, False),
        ({}, {}, {"pool": replace(POOL, market=Market.OWNED)}, {}, False),  # its output lies there still
    ],
)
def test_of_an_attempt_whose_machine_went_unheard_it_is_said_since_when_its_output_may_not_be_whole(
    written: list[str], member: Any, attempt: Any, life: Any, wanted: Any, said: bool
) -> None:
    ended = opened("a", **{"reason": ExitReason.INTERRUPTED, "ended_at": NOW + timedelta(seconds=40), **attempt})
    ended = replace(ended, members=tuple(replace(one, **member) for one in ended.members))
    told = {"last_word_at": NOW + timedelta(seconds=20), "ended_at": NOW + timedelta(seconds=30), **life}
    node = UsageInterval(**{"node_id": "a", "pool": POOL, "launched_at": NOW, **told})
    shown = shown_to(written, logs.Wanted(**wanted))
    asker = SimpleNamespace(
        rules=SimpleNamespace(limits=Limits()), flush_s=1.0, clock=JumpingClock(NOW), ranks_of_a_node=lambda _: 1
    )
    shown.ranks = logs.Ranks(asker=asker, state=state(attempts=(ended,), nodes=(node,)), wanted=shown.wanted)  # type: ignore[arg-type]
    shown.take(part(1), piece(b"one\n"))
    shown.take(part(1), piece(b"two\n"))

    at = format_moment(NOW + timedelta(seconds=19), NOW)
    lines = [f"its output after {at} may not be whole: its machine is gone"] if said else []
    assert written == ["── attempt 1, 1 node ──", *lines, "one\n", "two\n"]


def test_a_tail_is_of_what_was_there_and_all_that_follows_comes(written: list[str]) -> None:
    shown = shown_to(written, logs.Wanted(tail=2))
    shown.take(part(1), piece(b"one\ntwo\n 1%\r"))
    shown.take(part(1), piece(b"99%\rthree\n"))
    assert written == []
    shown.caught_up(None)
    shown.take(part(1), piece(b"four\nfive\nsix\n"))
    assert written == [
        "── attempt 1, 2 nodes, from the beginning ──",
        "two\n",
        " 1%\r99%\rthree\n",
        "four\nfive\nsix\n",
    ]


def test_a_tail_is_of_each_rank_over_all_attempts(written: list[str]) -> None:
    shown = shown_to(written, logs.Wanted(tail=1))
    for attempt, rank, data in ((1, 0, b"zero\n"), (1, 1, b"one\ntwo\n"), (2, 0, b"three\nfour\n")):
        shown.take(part(attempt, rank), piece(data))
    shown.caught_up(None)
    assert [line for line in written if line.endswith("\n")] == ["two\n", "four\n"]


def test_a_job_that_is_followed_and_has_written_nothing_says_so_once(written: list[str]) -> None:
    shown = shown_to(written, logs.Wanted(follow=True))
    shown.caught_up(None)
    shown.caught_up(None)
    assert written == ["digits has no output yet: following (Ctrl-C leaves, the job goes on)"]


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("10m", "2026-11-24T18:30:00+00:00"),
        ("1h30m", "2026-11-24T17:10:00+00:00"),
        ("18:39", "2026-11-24T18:39:00+00:00"),
        ("18:41:30", "2026-11-23T18:41:30+00:00"),
        ("2026-11-24T18:40:00Z", "2026-11-24T18:40:00+00:00"),
        ("2026-11-24T18:40:00.5", "2026-11-24T18:40:00.500000+00:00"),
        ("2026-11-24T20:40:00+02:00", "2026-11-24T18:40:00+00:00"),  # UTC is what is said of it
        ("2026-11-24", "2026-11-24T00:00:00+00:00"),
    ],
)
def test_since_is_a_span_a_time_of_day_or_a_time(text: str, at: str) -> None:
    assert logs.since_time(text, AT).isoformat() == at


@pytest.mark.parametrize("text", ["yesterday", "25:00", "10", "", "999999999h", "0001-01-01T00:00:00+23:59"])
def test_what_is_no_time_is_answered_with_those_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="is no time") as raised:
        logs.since_time(text, AT)
    assert raised.value.hint == "--since 10m, --since 18:40 or --since 2026-11-24T18:40:00Z; UTC where no zone is named"


def test_a_tail_of_more_lines_than_a_machine_can_count_is_all_of_them() -> None:
    tail = logs.Tail(10**20)
    tail.take(part(1), b"one\ntwo\n", None)
    assert [data for _, data, _ in tail.left()] == [b"one\n", b"two\n"]


def test_lines_since_a_time_are_those_that_ended_then(written: list[str]) -> None:
    wanted = logs.Wanted(since="10m")
    shown = shown_to(written, wanted, logs.Since(AT + timedelta(seconds=10)))
    shown.take(part(2), dated((b"old\nbegun", 9), (b" and ended\n", 10), (b"new\n", 11)))
    shown.take(part(2), dated((b"of no known time\n", None)))
    assert written == ["── attempt 2, 1 node ──", "begun and ended\n", "new\n", "of no known time\n"]


def test_older_lines_without_a_time_are_left_out_and_counted(written: list[str]) -> None:
    since = logs.Since(AT + timedelta(days=9000))
    shown = shown_to(written, logs.Wanted(since="10m"), since)
    shown.take(part(2), dated((b"one\n", 5), (b"two\nthree\n", None)))
    assert (written, since.undated, shown.read_any, shown.wrote_any) == ([], 2, True, False)
    logs._say_what_is_left_out(shown, replace(since, at=AT, undated=1))
    assert written == ["no output since 2026-11-24 18:40:00 UTC", "left out: 1 older line of no known time"]


def output(monkeypatch: pytest.MonkeyPatch, wanted: logs.Wanted, *, each: int = 1, is_terminal: bool = False) -> str:
    """What `logs` writes of two ranks' output to a pipe, or to a terminal."""
    for runner in log_output._RUNNERS:
        monkeypatch.delenv(runner, raising=False)
    out = Terminal(is_terminal=is_terminal)
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(log_output, "_is_file", lambda: False)
    monkeypatch.setattr(logs, "tell", lambda _: None)
    ranks = ranks_of(wanted, each=each)
    writer = log_output.log_writer(
        follow=wanted.follow, as_json=wanted.as_json, timestamps=wanted.timestamps, place=ranks.place
    )
    shown = logs.Shown(ranks=ranks, writer=writer, wanted=wanted)
    shown.take(part(1, 0), dated((b"epoch 1\nepo", 0), (b"ch 2\n\n", 1), (b"bad \xff\n", None)))
    shown.take(part(1, 1), dated((b"\r 1%\r99%", 2), (b"\r100%\n", 3), (b"left", 4)))
    writer.end()
    return out.written().decode(errors="surrogateescape")


def test_lines_of_several_ranks_say_which_node_and_rank_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output(monkeypatch, logs.Wanted()) == (
        "a rank 0 | epoch 1\na rank 0 | epoch 2\na rank 0 | \na rank 0 | bad \udcff\nb rank 1 | 100%\nb rank 1 | left\n"
    )


def test_ranks_have_labels_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal(is_terminal=False))
    ranks = ranks_of(logs.Wanted(), each=6)
    assert [ranks.place(part(1, rank)).label for rank in (0, 5, 11)] == ["a rank 0  | ", "a rank 5  | ", "b rank 11 | "]
    assert ranks.place(part(2, 3)).label == "rank 3 | "


@pytest.mark.parametrize("wanted", [logs.Wanted(rank=0), logs.Wanted(rank=0, follow=True)])
def test_the_lines_of_one_rank_are_as_it_wrote_them(monkeypatch: pytest.MonkeyPatch, wanted: logs.Wanted) -> None:
    assert output(monkeypatch, wanted).startswith("epoch 1\nepoch 2\n\nbad \udcff\n")


def test_timestamps_are_of_each_lines_end_and_of_no_line_that_nobody_dated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert output(monkeypatch, logs.Wanted(timestamps=True)).splitlines() == [
        "a rank 0 | 2026-11-24T18:40:00.000Z epoch 1",
        "a rank 0 | 2026-11-24T18:40:01.000Z epoch 2",
        "a rank 0 | 2026-11-24T18:40:01.000Z ",
        "a rank 0 |                          bad \udcff",
        "b rank 1 | 2026-11-24T18:40:03.000Z 100%",
        "b rank 1 | 2026-11-24T18:40:04.000Z left",
    ]


def test_a_bar_that_is_followed_ends_with_the_time_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = output(monkeypatch, logs.Wanted(timestamps=True, follow=True)).splitlines()
    assert lines[-2:] == ["b rank 1 | 2026-11-24T18:40:03.000Z 100%", "b rank 1 | 2026-11-24T18:40:04.000Z left"]


def test_lines_of_json_have_node_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.loads(line) for line in output(monkeypatch, logs.Wanted(as_json=True)).splitlines()]
    assert lines[1] == {
        "version": 1, "attempt": 1, "rank": 0, "node": "a", "at": "2026-11-24T18:40:01.000Z", "line": "epoch 2",
    }  # fmt: skip
    assert [(one["node"], one["at"]) for one in lines[-2:]] == [
        ("b", "2026-11-24T18:40:03.000Z"),
        ("b", "2026-11-24T18:40:04.000Z"),
    ]
    assert lines[3]["at"] is None


def test_ranks_are_on_the_nodes_that_their_own_attempt_had_whatever_the_job_has_by_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attempt 1 had a rank on each of two nodes; the job has four a node since."""
    monkeypatch.setattr("sys.stdout", Terminal(is_terminal=False))
    asker = Stored(4, launched={1: 1})
    ranks = logs.Ranks(asker=asker, state=STATE, wanted=logs.Wanted())  # type: ignore[arg-type]
    assert [ranks.place(part(1, rank)) for rank in (0, 1)] == [
        log_output.Place(node="a", label="a rank 0 | "),
        log_output.Place(node="b", label="b rank 1 | "),
    ]
    assert ranks.node(part(2, 3)) == "a"
    assert logs.Ranks(asker=asker, state=STATE, wanted=logs.Wanted(node="b")).wants(part(1, 1))  # type: ignore[arg-type]
    ranks.wanted = logs.Wanted(rank=3)
    ranks.require_wanted()


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ({"env": [["GPUCLOUD_RANKS", "0 1 2 3"], ["X", "1"]]}, 4),
        ({"env": [["GPUCLOUD_RANKS", "4 5"]]}, 2),
        ({"env": [["LOCAL_WORLD_SIZE", "1"]]}, 1),
        ({"env": [["LOCAL_WORLD_SIZE", "9999999999"]]}, None),
        ({"env": [["LOCAL_WORLD_SIZE", "many"]]}, None),
        ({"env": []}, None),
        ({"env": [[["a"], 1]]}, None),
        ({"env": 3}, None),
        ([], None),
    ],
)
def test_how_many_ranks_a_node_had_stands_in_its_launch_which_may_say_anything(launch: Any, ranks: int | None) -> None:
    assert launched_ranks(json.dumps(launch).encode()) == ranks


def test_one_nodes_output_is_had_by_its_name(written: list[str]) -> None:
    shown = shown_to(written, logs.Wanted(node="b"))
    shown.take(part(1, 0), piece(b"of a\n"))
    shown.take(part(1, 1), piece(b"of b\n"))
    assert written[1:] == ["of b\n"]
    with pytest.raises(UsageError, match="no attempt of digits ran on c") as raised:
        ranks_of(logs.Wanted(node="c")).require_wanted()
    assert raised.value.hint == "one of a, b"


def test_a_rank_that_no_attempt_had_is_answered_with_those_that_there_were() -> None:
    with pytest.raises(UsageError, match="digits has no rank 4: its ranks were 0 to 3") as raised:
        ranks_of(logs.Wanted(rank=4), each=2).require_wanted()
    assert raised.value.hint == "gpucloud logs digits --rank 3"
    ranks_of(logs.Wanted(rank=3), each=2).require_wanted()


@pytest.mark.parametrize(
    ("job", "message", "hint"),
    [
        (state(), "digits has not started its script yet: no output", "gpucloud status digits says where it stands"),
        (
            state(attempts=(opened("a"),)),
            "digits has no output of rank 1 yet",
            "gpucloud logs -f digits waits for it, gpucloud status digits says where the job stands",
        ),
        (
            state(attempts=(opened("a"),), status=JobStatus.FAILED),
            "digits has ended, and there is no output of rank 1",
            "gpucloud status digits says how it ended, gpucloud logs digits --launch what was run",
        ),
    ],
)
def test_a_job_without_output_says_why_and_what_helps(job: Any, message: str, hint: str) -> None:
    error: GpucloudError = logs._no_output(job, logs.Wanted(rank=1), is_alone=False)
    assert (error.message, error.hint, error.exit_code) == (message, hint, 2)


class Silent(Stored):
    """A job that runs when it is asked for first, and ends without a word."""

    def __init__(self, *statuses: JobStatus) -> None:
        super().__init__()
        self.statuses = list(statuses)
        self.clock = JumpingClock(AT)
        self.looks: list[Unsupervised | None] = [None]
        self.off = False
        self.end: ExitReason | None = None

    def stored_state(self) -> Any:
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return replace(STATE, status=status)

    def output(self, *, caught_up: Any, **_: Any) -> Any:
        for look in self.looks:
            caught_up(look)
        return iter(())

    def bill_pull(self, fetched: int) -> None:
        assert fetched == 0

    def is_off(self, *_: Any) -> bool:
        return self.off

    def order(self) -> Any:
        return SimpleNamespace(end=self.end)


def asked_of(monkeypatch: pytest.MonkeyPatch, asker: Silent, wanted: logs.Wanted) -> int:
    monkeypatch.setattr(logs, "Gpucloud", SimpleNamespace)
    monkeypatch.setattr(logs, "asker_of", lambda *_: asker)
    monkeypatch.setattr(logs, "known_job", lambda *_: None)
    return logs.logs("digits", wanted)


def test_a_silent_job_that_was_followed_to_its_end_is_no_error(
    monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    asker = Silent(JobStatus.RUNNING, JobStatus.SUCCEEDED)
    assert asked_of(monkeypatch, asker, logs.Wanted(follow=True)) == 0
    assert written == [
        "digits has no output yet: following (Ctrl-C leaves, the job goes on)",
        "digits has ended, and there is no output",
    ]


def test_a_script_that_prints_nothing_is_told_once_with_what_it_does(
    monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    began = AT - timedelta(seconds=10)
    silent = state(job="digits", attempts=(replace(opened("a", first_step=1, last_step=7), started_at=began),))
    asker = Silent(JobStatus.RUNNING)
    monkeypatch.setattr(asker, "stored_state", lambda: silent)
    known = replace(report(silent, spend, (), snapshot(up("a")).group, "process 1 on vm"), looked_at=AT, heard_at=AT)
    monkeypatch.setattr(logs, "report_of", lambda *_, **__: known)

    def output(caught_up: Any, **_: Any) -> Any:
        for _ in range(80):
            caught_up(None)
            asker.clock.sleep(1)
        return iter(())

    monkeypatch.setattr(asker, "output", output)
    assert asked_of(monkeypatch, asker, logs.Wanted(follow=True)) == 0
    assert written[:2] == [
        "digits has no output yet: following (Ctrl-C leaves, the job goes on)",
        f"attempt 1 has printed nothing since it began at {began:%H:%M:%S} UTC: training,"
        f" step 7 as of {AT:%H:%M:%S} UTC; `gpucloud watch digits` shows more",
    ]
    assert len(written) == 3


@pytest.mark.parametrize(
    ("wanted", "quiet"),
    [
        (logs.Wanted(since="1m"), None),
        (logs.Wanted(tail=0), None),
        (logs.Wanted(node="b"), None),
        (logs.Wanted(rank=0), None),
        (logs.Wanted(rank=1), "rank 1 of attempt 1 has printed nothing since it began"),
    ],
)
def test_of_a_script_whose_output_is_left_out_is_not_said_that_it_printed_nothing(
    monkeypatch: pytest.MonkeyPatch, written: list[str], wanted: logs.Wanted, quiet: str | None
) -> None:
    spend = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))
    open_ = replace(opened("a", "b", first_step=1, last_step=7), started_at=AT - timedelta(hours=2))
    prints = state(job="digits", attempts=(open_,))
    asker = Silent(JobStatus.RUNNING)
    monkeypatch.setattr(asker, "stored_state", lambda: prints)
    monkeypatch.setattr(asker, "bill_pull", lambda _: None)
    known = replace(report(prints, spend, (), snapshot(up("a")).group, "process 1 on vm"), looked_at=AT, heard_at=AT)
    monkeypatch.setattr(logs, "report_of", lambda *_, **__: known)

    def output(caught_up: Any, rank: int | None, **_: Any) -> Any:
        if rank in (None, 0):
            yield part(1), dated((b"epoch 1\n", -300))
        for _ in range(40):
            caught_up(None)
            asker.clock.sleep(1)

    monkeypatch.setattr(asker, "output", output)
    assert asked_of(monkeypatch, asker, replace(wanted, follow=True)) == 0
    told = [line.partition(" at ")[0] for line in written if "has printed nothing" in line]
    assert told == ([quiet] if quiet else [])
    whose = {"b": "of b ", None: "of rank 1 "}[wanted.node] if wanted.node or wanted.rank else None
    none = [f"digits has no output {whose}yet: following (Ctrl-C leaves, the job goes on)"] if whose else []
    assert [line for line in written if "no output" in line and "following" in line] == none


UNTIL = AT - timedelta(minutes=10)
LEFT = Unsupervised(state=state(attempts=(opened("a"),)), fetched_until=UNTIL)
NO_OUTPUT = "digits has no output yet: following (Ctrl-C leaves"


@pytest.mark.parametrize(
    ("looks", "off", "said"),
    [
        (
            [LEFT, LEFT],
            False,
            (
                f"{NO_OUTPUT})",
                f"fetched until {UNTIL:%H:%M:%S} UTC: nobody supervises digits,"
                " so that what it wrote since is not here; gpucloud train digits goes on, and fetches it",
            ),
        ),
        (
            [None, LEFT],  # its supervisor dies while it is followed
            True,
            (
                f"{NO_OUTPUT}, the job goes on)",
                f"fetched until {UNTIL:%H:%M:%S} UTC: nobody supervises digits,"
                " and what it wrote since went with its machines; gpucloud train digits goes on",
            ),
        ),
        (
            [replace(LEFT, state=state()), replace(LEFT, state=state())],
            True,
            (
                f"{NO_OUTPUT})",
                "nobody supervises digits: it writes nothing more until `gpucloud train digits` goes on",
            ),
        ),
    ],
)
def test_who_follows_a_job_that_nobody_sees_to_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    written: list[str],
    looks: list[Unsupervised | None],
    off: bool,
    said: tuple[str, ...],
) -> None:
    asker = Silent(JobStatus.RUNNING, JobStatus.SUCCEEDED)
    asker.looks, asker.off = looks, off
    asked_of(monkeypatch, asker, logs.Wanted(follow=True))
    assert tuple(written[:-1]) == said


@pytest.mark.parametrize(
    ("left", "off", "said"),
    [
        (LEFT, False, "so that what it wrote since is not here; {way}, and fetches it"),
        (LEFT, True, "and what it wrote since went with its machines; {way}"),
        (replace(LEFT, state=state()), False, "nobody supervises digits: {way}"),
    ],
)
def test_of_a_job_that_is_to_end_no_output_is_promised_by_going_on(
    monkeypatch: pytest.MonkeyPatch, written: list[str], left: Unsupervised, off: bool, said: str
) -> None:
    asker = Silent(JobStatus.RUNNING, JobStatus.SUCCEEDED)
    asker.looks, asker.off, asker.end = [left], off, ExitReason.STOPPED
    asked_of(monkeypatch, asker, logs.Wanted(follow=True))
    assert written[1].endswith(said.format(way="it is to end: gpucloud down digits ends it"))


def test_of_an_attempt_whose_output_nobody_fetched_it_is_not_said_that_there_is_none_yet(
    monkeypatch: pytest.MonkeyPatch, written: list[str]
) -> None:
    asker = Silent(JobStatus.RUNNING)
    asker.looks = [LEFT]
    with pytest.raises(UsageError, match="no output of digits was fetched before its supervisor went") as raised:
        asked_of(monkeypatch, asker, logs.Wanted())
    assert raised.value.hint == "gpucloud train digits goes on and fetches it, gpucloud status digits"
    assert written == []


CLOSED = replace(opened("a"), reason=ExitReason.LOST, ended_at=AT)
SECOND = replace(LEFT, state=state(attempts=(CLOSED, replace(opened("b"), number=2))))


@pytest.mark.parametrize(
    ("wanted", "is_told"),
    [
        (logs.Wanted(), True),
        (logs.Wanted(attempt=2), True),
        (logs.Wanted(rank=1), True),
        (logs.Wanted(node="b"), True),
        (logs.Wanted(attempt=1), False),
        (logs.Wanted(rank=2), False),  # the first attempt alone had it
        (logs.Wanted(node="a"), False),
    ],
)
def test_that_nobody_fetches_output_is_said_where_that_of_the_open_attempt_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, written: list[str], wanted: logs.Wanted, is_told: bool
) -> None:
    asker = Silent(JobStatus.RUNNING)
    asker.looks = [SECOND]
    monkeypatch.setattr(asker, "ranks_of_a_node", {1: 4, 2: 2}.get, raising=False)
    monkeypatch.setattr(asker, "stored_state", lambda: SECOND.state)
    with pytest.raises(UsageError) as raised:
        asked_of(monkeypatch, asker, wanted)
    assert ("was fetched before its supervisor went" in raised.value.message) is is_told
    if wanted.attempt == 1:
        assert raised.value.message == "attempt 1 of digits has ended, and there is no output"
    part = SimpleNamespace(attempt=wanted.attempt or 1, rank=wanted.rank or 0)
    piece = SimpleNamespace(data=b"")
    monkeypatch.setattr(logs.Ranks, "wants", lambda *_: True)
    monkeypatch.setattr(logs.Shown, "_dated", lambda *_: ())
    monkeypatch.setattr(asker, "bill_pull", lambda _: None)
    monkeypatch.setattr(asker, "output", lambda caught_up, **_: (caught_up(SECOND), iter([(part, piece)]))[1])
    assert asked_of(monkeypatch, asker, wanted) == 0
    assert [line.startswith("fetched until") for line in written] == ([True] if is_told else [])


@pytest.mark.parametrize("wanted", [{"attempt": 1}, {"rank": 2}, {"node": "a"}])
@pytest.mark.parametrize(
    ("looks", "end", "told"),
    [
        (SECOND, None, "nobody supervises digits: gpucloud train digits goes on"),
        (SECOND, ExitReason.STOPPED, "nobody supervises digits: it is to end: gpucloud down digits ends it"),
        (
            replace(SECOND, state=state(attempts=(CLOSED,))),
            None,
            "nobody supervises digits: it writes nothing more until `gpucloud train digits` goes on",
        ),
    ],
)
def test_who_follows_other_output_than_that_of_the_open_attempt_is_not_told_that_this_one_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    written: list[str],
    wanted: Any,
    looks: Unsupervised,
    end: ExitReason | None,
    told: str,
) -> None:
    asker = Silent(JobStatus.RUNNING)
    asker.looks, asker.end = [looks], end
    monkeypatch.setattr(asker, "ranks_of_a_node", {1: 4, 2: 2}.get, raising=False)
    monkeypatch.setattr(asker, "stored_state", lambda: looks.state)
    asked_of(monkeypatch, asker, logs.Wanted(follow=True, **wanted))
    assert [line for line in written if "nobody supervises" in line] == [told]


@pytest.mark.parametrize("status", [JobStatus.SUCCEEDED, JobStatus.RUNNING])
def test_a_silent_job_that_is_not_followed_or_was_over_is_one(
    monkeypatch: pytest.MonkeyPatch, written: list[str], status: JobStatus
) -> None:
    with pytest.raises(UsageError, match="no output"):
        asked_of(monkeypatch, Silent(status), logs.Wanted(follow=status.ended))
    assert written == []


def test_for_a_rank_that_the_newest_attempt_has_no_other_launch_is_read() -> None:
    class Asked(Stored):
        asked: list[int]

        def ranks_of_a_node(self, attempt: int) -> int:
            self.asked.append(attempt)
            return super().ranks_of_a_node(attempt)

    def asked_for(rank: int) -> list[int]:
        asker = Asked(launched={1: 2, 2: 8})
        asker.asked = []
        ranks = logs.Ranks(asker=asker, state=STATE, wanted=logs.Wanted(rank=rank))  # type: ignore[arg-type]
        if rank < 8:
            ranks.require_wanted()
        else:
            with pytest.raises(UsageError, match="has no rank 8: its ranks were 0 to 7"):
                ranks.require_wanted()
        return asker.asked

    assert [asked_for(rank) for rank in (0, 7, 8)] == [[], [2], [2, 1]]


@pytest.mark.parametrize(
    ("nodes", "listed"), [((0, 1), []), ((1,), ["jobs/moons/launches/0002/"]), ((), ["jobs/moons/launches/0002/"])]
)
def test_the_ranks_of_a_node_are_read_from_its_own_attempts_launches(nodes, listed) -> None:
    class Counting(MemoryStore):
        def list(self, prefix: str) -> tuple[str, ...]:
            asked.append(prefix)
            return super().list(prefix)

    asked: list[Any] = []
    records = AttemptRecords(Counting(JumpingClock()), "moons")
    for node in nodes:
        records.keep_launch(2, node, json.dumps({"env": {"LOCAL_WORLD_SIZE": "4"}}).encode())
    records.keep_launch(1, 0, json.dumps({"env": {"LOCAL_WORLD_SIZE": "8"}}).encode())
    asked.clear()
    assert records.workers(2) == (4 if nodes else None)
    assert asked == listed
