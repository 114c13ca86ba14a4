"""Output between a node and the store: whole lines, each once, no secret, and no more disk than is stated."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from urllib.parse import quote, urlencode

import pytest

from gpucloud.agent.attempt import running
from gpucloud.agent.attempt.files import AttemptFolder, prune
from gpucloud.agent.attempt.running import OutputRoom
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import HostUnreachable, StoreError
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.node.status import Outcome
from gpucloud.domain.state.state import ExitReason, JobStatus
from gpucloud.domain.supervision.snapshot import Rules
from gpucloud.domain.untrusted import masked, words_of
from gpucloud.ports import Completed
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise import closing
from gpucloud.usecases.supervise.closing import Closing
from gpucloud.usecases.supervise.look import LogReader
from tests.fakes.clock import JumpingClock
from tests.unit.worlds import NOW, job, node, opened, part, put_job, snapshot, state, up

MIB = 1 << 20


@pytest.fixture
def jobs(tmp_path):
    return JobStore(DirectoryStore(tmp_path), "small")


@pytest.fixture
def told():
    return []


@pytest.fixture
def reader(jobs, told):
    return LogReader(jobs, lambda attempt, rank, text: told.append(text), words_of(["hunter2hunter2"]))


def kept(jobs):
    return b"".join(jobs.records.read_log(part) for part in jobs.records.log_parts())


def take(reader, data, *, last=False):
    reader.offset(1, 0)
    reader.take(1, 0, data, last=last)


def test_an_unfinished_line_waits_for_its_end(jobs, reader, told):
    take(reader, b"one\ntw")
    assert (told, reader.offset(1, 0)) == (["one\n"], 4)
    take(reader, b"two\n")
    reader.flush()
    assert kept(jobs) == b"one\ntwo\n"


def test_a_full_piece_ends_with_a_line_too(reader, told):
    take(reader, b"x" * (MIB - 3) + b"\nab")
    assert (len(told[0]), reader.offset(1, 0)) == (MIB - 2, MIB - 2)


def test_a_line_longer_than_a_piece_is_not_waited_for_and_no_secret_is_cut_in_two(jobs, reader):
    data = b"x" * (MIB - 6) + b"hunter2hunter2" + b"y" * 20 + b"\n"
    take(reader, data[:MIB])
    take(reader, data[reader.offset(1, 0) :], last=True)
    reader.flush()
    assert kept(jobs) == data.replace(b"hunter2hunter2", b"*" * 14)


class LossyStore(DirectoryStore):
    """Puts a piece, or does not, and says in both cases that it failed; `answers` are what it does next."""

    answers: ClassVar[list[str]] = []

    def put(self, key, data, **conditions):
        answer = self.answers.pop(0) if self.answers else "put"
        if answer != "lost":
            super().put(key, data, **conditions)
        if answer != "put":
            raise StoreError("the store does not answer", may_pass=True)


@pytest.mark.parametrize("answers", [["lost"], ["unsaid"], ["lost", "unsaid"], ["unsaid", "lost", "unsaid"]])
def test_a_piece_whose_put_failed_is_put_again_whatever_was_read_meanwhile(tmp_path, told, answers):
    store = LossyStore(tmp_path)
    jobs = JobStore(store, "small")
    reader = LogReader(jobs, lambda attempt, rank, text: told.append(text))
    take(reader, b"one\n")
    reader.flush()
    LossyStore.answers[:] = answers
    take(reader, b"two\n")
    for line in (b"three\n", b"four\n", b"five\n"):
        with contextlib.suppress(StoreError):
            reader.flush()
        take(reader, line)
    reader.flush()
    assert kept(jobs) == b"one\ntwo\nthree\nfour\nfive\n"
    assert told == ["one\n", "two\n", "three\n", "four\n", "five\n"]


def test_what_is_read_while_a_piece_is_on_its_way_is_kept_once_and_nothing_is_lost(tmp_path):
    jobs = JobStore(DirectoryStore(tmp_path), "small")
    reader = LogReader(jobs, lambda *_: None)
    lines = [b"%06d\n" % number for number in range(4000)]

    def read():
        for line in lines:
            take(reader, line)

    thread = threading.Thread(target=read)
    thread.start()
    while thread.is_alive():
        reader.flush()
    thread.join()
    reader.flush()
    assert kept(jobs) == b"".join(lines)


def test_how_much_of_a_rank_is_kept_is_asked_of_that_rank_alone(tmp_path):
    asked = []

    class Listing(DirectoryStore):
        def list(self, prefix):
            asked.append(prefix)
            return super().list(prefix)

    jobs = JobStore(Listing(tmp_path), "small")
    for rank in range(64):
        jobs.records.append_log(1, rank, 0, DatedPiece(data=b"a line\n"))
    assert jobs.records.log_end(1, 7)[0] == 7
    assert asked == ["jobs/small/logs/0001/rank-00007/"]


def test_secrets_are_stars_in_the_store_and_on_the_terminal(jobs, reader, told):
    take(reader, b"token=hunter2hunter2!\n")
    reader.flush()
    assert told == ["token=**************!\n"]
    assert kept(jobs) == b"token=**************!\n"


def test_each_line_of_a_secret_is_hidden_and_short_ones_are_not():
    words = words_of(["-----BEGIN\nabcdefgh12\nshort\n", "on", "password"])
    assert masked(b"a abcdefgh12 short on password\n", words) == b"a ********** short on ********\n"


SECRET = "p+ss/wörd's \"$x\\1!?"


@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda secret: json.dumps({"token": [secret]}, ensure_ascii=False),
        repr,
        lambda secret: f"https://me:{quote(secret, safe='')}@example.org/",
        lambda secret: f"https://example.org/?t={quote(secret, safe='').lower()}&q=1",
        lambda secret: urlencode({"t": secret, "u": "x"}),
        lambda secret: f"curl -H {shlex.quote('Bearer ' + secret)}",
        lambda secret: f"export T={shlex.quote(secret)}",
        lambda secret: base64.b64encode(secret.encode()).decode(),
        lambda secret: base64.urlsafe_b64encode(secret.encode()).decode().rstrip("="),
        lambda secret: base64.b64encode(f"{secret}\n".encode()).decode(),
        lambda secret: base64.b64encode(f"me:{secret}".encode()).decode(),
        lambda secret: base64.b64encode(f"you:{secret}!".encode()).decode(),
        lambda secret: base64.b64encode(f"us:{secret}!!".encode()).decode(),
        lambda secret: base64.encodebytes(secret.encode() * 9).decode(),
        lambda secret: secret.encode().hex(),
        lambda secret: secret.encode().hex().upper(),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, "hunter2hunter2", "a secret with words", "x" * 8, "0123456789" * 9])
def test_a_secret_is_hidden_however_a_program_writes_it_down(secret, write):
    line = write(secret).encode()
    found = masked(line, words_of([secret, secret * 9]))

    assert len(found) == len(line)
    assert found.count(b"*") >= len(secret) * 3 // 4
    for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe=""), secret.encode().hex()):
        assert form.encode() not in found


def test_what_has_nothing_of_a_secret_stays(reader):
    text = json.dumps({"step": 1, "loss": 0.25, "path": "/a/b?c=d%20e", "sha": "0" * 64}).encode()

    assert masked(text, words_of([SECRET, "hunter2hunter2"])) == text


def test_what_was_dropped_unread_is_said_in_its_place(jobs, reader, told):
    take(reader, b"one\n")
    reader.skip(1, 0, 1000)
    reader.skip(1, 0, 50)
    take(reader, b"after\n")
    reader.flush()
    said = "(996 bytes of output came faster than they could be read)\n"
    assert told == ["one\n", said, "after\n"]
    parts = [(part.offset, jobs.records.read_log(part)) for part in jobs.records.log_parts()]
    assert parts == [(0, b"one\n"), (1000 - len(said), said.encode() + b"after\n")]


def test_a_few_bytes_that_were_dropped_make_room_for_saying_so(jobs, reader):
    take(reader, b"one\n")
    reader.skip(1, 0, 7)
    assert reader.offset(1, 0) == 104
    reader.flush()
    assert kept(jobs) == b"one\n(100 bytes of output came faster than they could be read)\n"


def test_what_two_supervisors_kept_comes_once(jobs):
    put_job(jobs, state(job=jobs.job, status=JobStatus.SUCCEEDED))
    asker = Asker(jobs=jobs, market=None, group=None, clock=None, terms=None)
    jobs.records.append_log(1, 0, 0, DatedPiece(data=b"one\ntwo\n"))
    jobs.records.append_log(1, 0, 4, DatedPiece(data=b"two\nthree\n"))
    jobs.records.append_log(1, 0, 8, DatedPiece(data=b"three\n"))
    got = [piece.data for _, piece in asker.output(attempt=None, rank=None, follow=False)]
    assert b"".join(got) == b"one\ntwo\nthree\n"


def test_the_oldest_output_gives_its_blocks_back_only_after_that_was_said(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"a" * (4 * MIB))
    room = OutputRoom(tmp_path, kept_bytes=MIB, step_bytes=MIB)
    before = log.stat().st_blocks
    assert room.look(((0, 4 * MIB),), now_s=100.0) == ((0, 3 * MIB),)
    assert log.stat().st_blocks == before
    assert room.look(((0, 4 * MIB),), now_s=105.0) == ((0, 3 * MIB),)
    assert (log.stat().st_size, log.stat().st_blocks * 512) == (4 * MIB, MIB)
    with log.open("ab") as file:
        file.write(b"b")
    with log.open("rb") as file:
        file.seek(3 * MIB)
        assert file.read() == b"a" * MIB + b"b"


def test_what_an_attempt_said_in_its_last_seconds_to_be_gone_goes_after_its_end(tmp_path):
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"a" * (4 * MIB))
    room = OutputRoom(tmp_path, kept_bytes=MIB, step_bytes=MIB)
    room.look(((0, 4 * MIB),), now_s=100.0)
    room.settle(now_s=104.9)
    assert log.stat().st_blocks * 512 == 4 * MIB
    room.settle(now_s=105.0)
    assert (log.stat().st_size, log.stat().st_blocks * 512) == (4 * MIB, MIB)


def test_where_the_file_system_gives_no_blocks_back_nothing_is_said_to_be_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_free", lambda path, length: False)
    room = OutputRoom(tmp_path, kept_bytes=MIB, step_bytes=MIB)
    assert room.look(((0, 9 * MIB),), now_s=0.0) == ()


def test_what_nobody_follows_keeps_its_end_only(tmp_path):
    log = tmp_path / "nccl-host-1.log"
    log.write_bytes(b"a" * 3 * MIB + b"z" * 100)
    small = tmp_path / "launcher.log"
    small.write_bytes(b"a" * MIB)
    room = OutputRoom(tmp_path, step_bytes=MIB)
    room.look((), now_s=0.0)
    assert (log.stat().st_size, log.read_bytes()[-100:]) == (3 * MIB + 100, b"z" * 100)
    assert log.stat().st_blocks * 512 < 2 * MIB
    assert small.read_bytes() == b"a" * MIB


def test_attempts_long_ago_leave_what_later_ones_go_by_and_are_never_begun_again(tmp_path):
    for number in (1, 2, 3):
        folder = AttemptFolder(tmp_path, number)
        folder.create()
        for name in ("exit.json", "saving.json", "rank-0.log", "nccl-a-1.log"):
            (folder.path / name).write_text(name)
        (folder.path / "profile").mkdir()
    prune(tmp_path, 4)
    left = {folder.name: sorted(path.name for path in folder.iterdir()) for folder in tmp_path.iterdir()}
    whole = ["exit.json", "nccl-a-1.log", "profile", "rank-0.log", "saving.json"]
    assert left == {"0001": ["exit.json", "saving.json"], "0002": whole, "0003": whole}
    with pytest.raises(FileExistsError):
        AttemptFolder(tmp_path, 1).create()


def test_ranks_share_the_room_and_little_output_is_left_alone(tmp_path):
    room = OutputRoom(tmp_path, kept_bytes=4 * MIB, step_bytes=MIB)
    assert room.look(((0, 2 * MIB), (1, 3 * MIB)), now_s=0.0) == ((1, MIB),)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(("most", "seconds"), [(5 * MIB, 0.0), (1 << 40, 200.0)])
def test_a_node_whose_output_has_no_end_keeps_no_attempt_from_being_closed(jobs, told, monkeypatch, most, seconds):
    clock = JumpingClock(NOW)
    monkeypatch.setattr(closing, "KEPT_OUTPUT_BYTES", most)

    class Endless:
        """It claims a petabyte, and whenever it is asked there is more."""

        node = node("a")

        def run(self, argv, **_):
            clock.sleep(seconds)
            if argv[0] == "sh":
                return Completed(exit_code=0, stdout=argv[4].encode() + b"x\n" * 400_000, stderr=b"")
            ended = replace(part(1, Outcome.KILLED), output=((0, 10**15),))
            return Completed(exit_code=0, stdout=to_json(up("a", ended).status).encode(), stderr=b"")

    reader = LogReader(jobs, lambda *_: None)
    ending = Closing(
        services=SimpleNamespace(
            shell=SimpleNamespace(host=lambda _: Endless()), job=job(), clock=clock, rules=Rules()
        ),
        home=None,
        logs=reader,
        history=SimpleNamespace(look=lambda *_, **__: None),
        watcher=SimpleNamespace(story=told.append),
    )
    attempt = opened("a", ending_reason=ExitReason.STOPPED)
    ending._read_to_the_end(snapshot(up("a", part(1)), state=state(attempts=(attempt,))))

    assert 0 < reader.taken <= 9 * MIB
    assert told == ["a says more than can be waited for: the rest of its output is left out"]


@pytest.mark.parametrize(
    ("cuts", "silent", "read", "lines"),
    [
        (2, 0.0, 8, []),
        (9, 0.0, 0, ["the rest of what a said could not be read: a: connection reset"]),
        (9, 1.0, 0, []),
        (1, 5.0, 0, []),
    ],
)
def test_a_line_that_breaks_at_the_end_of_an_attempt_costs_none_of_its_output(jobs, told, cuts, silent, read, lines):
    """What is left is read before the machine is ended; one that does not answer is not asked."""

    class Breaking:
        node = node("a")

        def __init__(self):
            self.cuts = cuts

        def run(self, argv, **_):
            if self.cuts:
                self.cuts -= 1
                raise HostUnreachable("a: connection reset", hint=None)
            if argv[0] == "sh":
                said = b"the end\n" if argv[-1] == "1" else b""
                return Completed(exit_code=0, stdout=argv[4].encode() + said, stderr=b"")
            ended = replace(part(1, Outcome.FAILED), output=((0, 8),))
            return Completed(exit_code=0, stdout=to_json(up("a", ended).status).encode(), stderr=b"")

    host, reader = Breaking(), LogReader(jobs, lambda *_: None)
    ending = Closing(
        services=SimpleNamespace(
            shell=SimpleNamespace(host=lambda _: host), job=job(), clock=JumpingClock(NOW), rules=Rules()
        ),
        home=None,
        logs=reader,
        history=SimpleNamespace(look=lambda *_, **__: None),
        watcher=SimpleNamespace(story=told.append),
    )
    world = snapshot(up("a", part(1, Outcome.FAILED), silent=silent), state=state(attempts=(opened("a"),)))
    ending._read_to_the_end(world)

    assert (reader.taken, told) == (read, lines)
    assert host.cuts == (cuts if silent == 5.0 else max(0, cuts - (1 if silent else 3)))
