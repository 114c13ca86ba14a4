"""Numbers and times that machines and scripts name: none of them is more than a sum can hold."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.agent.attempt.files import AttemptFolder, newest
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Piece,
    Promise,
    commit_key,
    commits,
    generation_key,
    generations,
    manifest_bytes,
    read_attempt,
    read_base,
    read_manifest,
    seal,
    starting,
    starting_key,
    unseal,
)
from gpucloud.domain.checkpoint.rounds import read_answer, read_call
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.quantities import span_of
from gpucloud.domain.node.node import notice_from, recommended_at
from gpucloud.domain.node.status import AttemptStatus, RunState, Status, status_from_json, status_to_json
from gpucloud.domain.state.state import JobState
from gpucloud.domain.supervision.membership import hang_limit, time_to_go
from gpucloud.domain.supervision.snapshot import Limits
from gpucloud.domain.untrusted import COUNTED
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.jobstore.jobstore import JobStore
from tests.unit.worlds import opened, progress, state


@pytest.mark.parametrize("seconds", [1e300, float("inf"), -1e300, float("-inf"), float("nan"), 1.5])
def test_a_span_of_any_number_can_be_added_to_a_time(seconds):
    now = datetime(2026, 11, 23, tzinfo=timezone.utc)
    assert now - timedelta(days=40000) < now + span_of(seconds) < now + timedelta(days=40000)
    assert span_of(1.5) == timedelta(seconds=1.5)


def test_a_script_that_means_to_make_more_steps_than_there_is_time_ends_no_supervisor():
    assert time_to_go(progress(5, total_steps=10**15, step_seconds=1e6)) > timedelta(days=10000)


def test_a_step_that_took_longer_than_there_is_time_ends_no_supervisor():
    limit = hang_limit(1.0, (replace(opened("a"), longest_step_s=1e300),), Limits())
    assert limit > timedelta(days=10000)


@pytest.mark.parametrize("name", ["commit/000001/" + "9" * 26 + ".json", "commit/" + "1" * 19 + "/000000001.json"])
def test_a_checkpoint_of_a_step_that_nobody_could_store_is_none(name):
    assert list(commits([name])) == []


def shown(value):
    return repr(value)[:24]


HOSTILE = (True, False, -1, COUNTED, 10**19, 10**400, 1.0, 1e300, *map(float, ("inf", "nan")), "1", None, [], [1], {})
"""In a number's place: none of them counts anything that a job has."""
PROGRESS = {"step": 1, "first_step": 0, "phase": "train", "written_at": 1e9}
A = Piece(key="data/000001/000000002/a", size=1, crc32=(1,))
WHOLE = unseal(manifest_bytes(Manifest(commit=Commit(1, 2), world=1, promise=Promise(), pieces=(A,))))


def piece(**changes):
    return {"key": "data/000001/000000002/node-00001/a", "size": 1, "crc32": [1], **changes}


def damaged(read, body):
    with pytest.raises(ValueError, match=r".") as raised:
        read(seal(body))
    return raised.type in (ValueError, Malformed)


@pytest.mark.parametrize("number", HOSTILE, ids=shown)
@pytest.mark.parametrize("field", ["generation", "step", "world"])
def test_a_manifest_of_a_number_that_is_none_is_damaged(field, number):
    assert read_manifest(seal(WHOLE)).commit == Commit(1, 2)
    assert damaged(read_manifest, {**WHOLE, field: number})


@pytest.mark.parametrize("value", [*HOSTILE, "EXACT", "exact ", "\x1b[2J", "x" * 10**6], ids=shown)
@pytest.mark.parametrize("field", ["level", "why"])
def test_a_manifest_of_a_word_that_is_none_is_damaged(field, value):
    assert damaged(read_manifest, {**WHOLE, field: value})


def test_no_rank_is_more_than_a_job_can_have():
    assert damaged(read_manifest, {**WHOLE, "world": 10**6 + 1})
    assert damaged(read_manifest, {**WHOLE, "world": 0})


@pytest.mark.parametrize("number", HOSTILE, ids=shown)
@pytest.mark.parametrize("changes", [{"size": ...}, {"crc32": [...]}, {"size": 0, "crc32": [...]}, {"key": ...}])
def test_an_object_of_a_number_that_is_none_is_damaged(changes, number):
    told = {k: number if v is ... else [number] if isinstance(v, list) else v for k, v in changes.items()}
    assert damaged(read_manifest, {**WHOLE, "pieces": [piece(**told)]})
    assert damaged(lambda data: read_answer(data, Commit(1, 2), 1), {"node": 1, "pieces": [piece(**told)]})


@pytest.mark.parametrize("pieces", [*HOSTILE[:-3], {}, {"a": 1}, [1], [[]], "ab"], ids=shown)
def test_a_manifest_whose_objects_are_none_is_damaged(pieces):
    assert damaged(read_manifest, {**WHOLE, "pieces": pieces})


@pytest.mark.parametrize("number", HOSTILE, ids=shown)
def test_a_generations_record_of_a_number_that_is_none_is_damaged(number):
    assert read_base(seal({"base": [3, 0]})) == Commit(3, 0)
    assert damaged(read_base, {"base": [number, 1]})
    assert damaged(read_base, {"base": [1, number]})
    if number is not None:
        assert damaged(read_base, {"base": number})
        assert damaged(read_attempt, {"base": None, "attempt": number})
    assert damaged(read_base, {"base": [1, 2, 3]})
    assert damaged(read_base, {})
    assert read_attempt(seal({"base": None, "attempt": COUNTED - 1})) == COUNTED - 1


@pytest.mark.parametrize("number", HOSTILE, ids=shown)
def test_what_nodes_call_and_answer_with_a_number_that_is_none_is_damaged(number):
    call = {"step": 1, "folder": "a", "paths": ["a/b"], "over": False}
    assert read_call(seal(call)).step == 1
    assert damaged(read_call, {**call, "step": number})
    assert damaged(lambda data: read_answer(data, Commit(1, 2), 1), {"node": number, "pieces": None})
    if not isinstance(number, str):
        assert damaged(read_call, {**call, "folder": number})
        assert damaged(read_call, {**call, "paths": [number]})
    if number not in ([], ["x"]):
        assert damaged(read_call, {**call, "paths": number})
    if number not in (True, False):
        assert damaged(read_call, {**call, "over": number})


@pytest.mark.parametrize("number", [COUNTED, 10**18 - 1])
def test_a_name_that_counts_further_than_any_job_is_no_checkpoints(number):
    names = [generation_key(number), starting_key(number), commit_key(Commit(number, 1)), commit_key(Commit(1, number))]
    assert (generations(names), starting(names), commits(names)) == ((), (), ())
    names = [generation_key(COUNTED - 1), starting_key(COUNTED - 1), commit_key(Commit(COUNTED - 1, COUNTED - 1))]
    assert all((generations(names), starting(names), commits(names)))
    assert commits([commit_key(Commit(1, 2)).translate({ord("0"): "\u0660"})]) == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("progress.json", json.dumps({**PROGRESS, "written_at": at})) for at in (10**400, float("nan"), -1e300)),
        *(("progress.json", json.dumps({**PROGRESS, "written_at": at})) for at in ("0001-01-01", "x", None, [], True)),
        *(("progress.json", json.dumps({**PROGRESS, "step": step})) for step in (-1, 10**15, 10**19, True, 1.0)),
        ("progress.json", json.dumps({**PROGRESS, "phase": "x" * 5000})),
        ("progress.json", json.dumps({**PROGRESS, "longest_s": 1e300})),
        *((name, "[" * 100_000) for name in ("progress.json", "saving.json", "exit.json")),
        *((name, '{"seconds": %s, "step": 1}' % ("9" * 400)) for name in ("progress.json", "saving.json", "exit.json")),
        ("saving.json", '{"seconds": NaN, "step": 1}'),
        ("saving.json", '{"seconds": -1, "step": 1}'),
        ("saving.json", '{"seconds": 1, "step": true}'),
        ("saving.json", '{"seconds": 1, "step": 1e300}'),
        ("exit.json", '{"attempt":1,"state":"exited","outcome":null,"exit_code":999,"progress":null,"failed_rank":1}'),
        ("rank-" + "9" * 200 + ".log", "x"),
        ("rank-1000000.log", "x"),
        ("launcher.log", "Root Cause (first observed failure):\n rank : " + "9" * 30 + "\n"),
        ("launcher.log", "Root Cause (first observed failure):\n rank : " + "9" * 5000 + "\n"),
        ("launcher.log", "Process name: [[1,1],1000000]\n"),
    ],
    ids=shown,
)  # fmt: skip
def test_what_a_script_writes_among_its_attempts_files_ends_no_agent_and_hides_no_status(tmp_path, name, text):
    folder = AttemptFolder(tmp_path, 7)
    folder.create()
    (folder.path / name).write_text(text)
    part = AttemptStatus(
        attempt=7,
        state=RunState.EXITED,
        outcome=None,
        exit_code=1,
        progress=folder.progress(),
        failed_rank=folder.failed_rank(),
        output=folder.output(),
    )
    status = Status(heartbeat=1, epoch=1, boot_id="b", notice=None, attempt=part)
    assert status_from_json(status_to_json(status)) == status
    assert (part.progress, part.failed_rank, part.output) == (None, None, ())
    assert (folder.saving(), folder.verdict()) == (None, None)


@pytest.mark.parametrize("name", ["progress.json", "saving.json", "exit.json"])
def test_a_file_without_end_among_an_attempts_files_is_none(tmp_path, name):
    folder = AttemptFolder(tmp_path, 7)
    folder.create()
    for make in (lambda path: os.truncate(path, 1 << 40), lambda path: (path.unlink(), os.mkfifo(path))):
        (folder.path / name).touch()
        make(folder.path / name)
        assert (folder.progress(), folder.saving(), folder.verdict()) == (None, None, None)


def test_an_attempts_folder_that_no_agent_made_counts_for_nothing(tmp_path):
    for name in ("0003", "9" * 16, "9" * 30):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) == 3


def test_what_nobody_could_read_again_is_not_written():
    with pytest.raises(ValueError, match="more than 20 digits"):
        to_json(replace(state(), epoch=10**20))


@pytest.mark.parametrize("when", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59+00:00"])
def test_a_time_outside_the_calendars_sums_is_no_time(when):
    text = to_json(replace(state(), paid_until=datetime(2026, 1, 1, tzinfo=timezone.utc)))
    with pytest.raises(Malformed, match="a time that cannot be"):
        from_json(JobState, text.replace("2026-01-01T00:00:00+00:00", when))


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Anything:
    at: datetime | None
    span: timedelta
    usd: Decimal
    count: int
    share: float
    text: str
    data: bytes
    path: Path
    colours: tuple[Colour, ...]
    pair: tuple[int, str]
    inner: Anything | None = None


ZONES = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
TIMES = st.builds(lambda at, zone: at.replace(tzinfo=zone), st.datetimes(), ZONES)
NUMBERS = st.integers() | st.integers(-(10**20) - 9, -(10**20) + 9) | st.integers(10**20 - 9, 10**20 + 9)
SUMS = st.decimals() | st.builds(lambda digits, power: Decimal(digits).scaleb(power), NUMBERS, st.integers(-400, 400))
THINGS = st.recursive(
    st.none(),
    lambda inner: st.builds(
        Anything,
        at=st.none() | TIMES,
        span=st.timedeltas(),
        usd=SUMS,
        count=NUMBERS,
        share=st.floats(allow_nan=False),
        text=st.text(),
        data=st.binary(),
        path=st.builds(Path, st.text()),
        colours=st.lists(st.sampled_from(Colour)).map(tuple),
        pair=st.tuples(st.integers(0, 9), st.text()),
        inner=inner,
    ),
    max_leaves=3,
).filter(lambda thing: thing is not None)


@given(THINGS)
def test_whatever_is_written_is_read_back_equal(thing):
    try:
        text = to_json(thing)
    except ValueError:
        return
    assert from_json(Anything, text) == thing


@pytest.mark.parametrize("year", [1, 1969, 2501, 9999])
def test_a_time_that_nobody_would_read_again_is_refused_where_it_is_written(year):
    when = datetime(year, 6, 1, tzinfo=timezone.utc)
    with pytest.raises(ValueError, match=f"the time {re.escape(when.isoformat())} cannot be stored"):
        to_json(replace(state(), paid_until=when))
    with pytest.raises(ValueError, match="without its zone cannot be stored"):
        to_json(replace(state(), paid_until=datetime(2026, 1, 1)))  # noqa: DTZ001  that is what is refused


@pytest.mark.parametrize("year", [1970, 2500])
def test_the_first_and_the_last_time_are_written_and_read(year):
    paid = replace(state(), paid_until=datetime(year, 6, 1, tzinfo=timezone.utc))
    assert from_json(JobState, to_json(paid)) == paid


@pytest.mark.parametrize("usd", ["NaN", "sNaN", "Infinity", "1e61", "1e999999999", "1e-201", "0e-999999", "1" * 301])
def test_a_sum_that_nobody_would_read_again_is_refused_where_it_is_written(usd):
    with pytest.raises(ValueError, match="cannot be stored"):
        to_json(replace(state(), left_usd_per_hour=Decimal(usd)))


def test_a_state_that_cannot_be_stored_is_one_clear_error_and_the_one_before_stays(tmp_path):
    jobs = JobStore(DirectoryStore(tmp_path), "digits")
    version = jobs.create(state())
    with pytest.raises(StoreError, match=r"the time 2501-06-01T00:00:00\+00:00 cannot be stored"):
        jobs.replace(replace(state(), paid_until=datetime(2501, 6, 1, tzinfo=timezone.utc)), version)
    assert jobs.load()[0] == state()


@pytest.mark.parametrize("time", ["1969-12-31T00:00:00Z", "2501-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_a_notice_for_a_time_outside_the_calendar_is_none(time):
    assert notice_from(json.dumps({"action": "terminate", "time": time})) is None
    assert recommended_at(json.dumps({"noticeTime": time})) is None
