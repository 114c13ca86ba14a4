"""Output between a node and the store: whole lines, each once, no secret, and no more disk than is stated."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from gpucloud.agent.outputroom import OutputRoom
from gpucloud.domain.masking import masked, words_of
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.lookout import LogReader

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
    return b"".join(jobs.read_log(part) for part in jobs.log_parts())


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


def test_secrets_are_stars_in_the_store_and_on_the_terminal(jobs, reader, told):
    take(reader, b"token=hunter2hunter2!\n")
    reader.flush()
    assert told == ["token=**************!\n"]
    assert kept(jobs) == b"token=**************!\n"


def test_each_line_of_a_secret_is_hidden_and_short_ones_are_not():
    words = words_of(["-----BEGIN\nabcdefgh12\nshort\n", "on", "password"])
    assert masked(b"a abcdefgh12 short on password\n", words) == b"a ********** short on ********\n"


def test_what_was_dropped_unread_is_said_in_its_place(jobs, reader, told):
    take(reader, b"one\n")
    reader.skip(1, 0, 1000)
    reader.skip(1, 0, 50)
    take(reader, b"after\n")
    reader.flush()
    said = "(996 bytes of output came faster than they could be read)\n"
    assert told == ["one\n", said, "after\n"]
    parts = [(part.offset, jobs.read_log(part)) for part in jobs.log_parts()]
    assert parts == [(0, b"one\n"), (1000 - len(said), said.encode() + b"after\n")]


def test_a_few_bytes_that_were_dropped_make_room_for_saying_so(jobs, reader):
    take(reader, b"one\n")
    reader.skip(1, 0, 7)
    assert reader.offset(1, 0) == 104
    reader.flush()
    assert kept(jobs) == b"one\n(100 bytes of output came faster than they could be read)\n"


class Ended(Asker):
    def state(self):
        return SimpleNamespace(status=SimpleNamespace(ended=True))


def test_what_two_supervisors_kept_comes_once(jobs):
    asker = Ended(jobs=jobs, market=None, group=None, clock=None, terms=None)
    jobs.append_log(1, 0, 0, b"one\ntwo\n")
    jobs.append_log(1, 0, 4, b"two\nthree\n")
    jobs.append_log(1, 0, 8, b"three\n")
    got = [data for _, data in asker.output(attempt=None, rank=None, follow=False)]
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


def test_ranks_share_the_room_and_little_output_is_left_alone(tmp_path):
    room = OutputRoom(tmp_path, kept_bytes=4 * MIB, step_bytes=MIB)
    assert room.look(((0, 2 * MIB), (1, 3 * MIB)), now_s=0.0) == ((1, MIB),)
    assert not os.listdir(tmp_path)
