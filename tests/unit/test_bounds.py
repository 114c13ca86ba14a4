"""What machines say is read up to a limit, and what cannot be is one clear error."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from random import Random

import pytest

from gpucloud.domain.checkpoint.manifest import Commit, commit_key, generation_key, starting_key
from gpucloud.domain.checkpoint.rounds import answer_key, call_key
from gpucloud.domain.checkpoint.standing import CheckpointMark
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.errors import GpucloudError, OrderUnreadable, StateUnreadable, StoreError
from gpucloud.domain.money.ledger import Charge
from gpucloud.domain.node.bootstrap.wanted import record_key
from gpucloud.domain.node.status import AttemptStatus, Progress, RunState, Status, status_from_json, status_to_json
from gpucloud.domain.supervision.self_driving import order_key as drive_key
from gpucloud.domain.untrusted import COUNTED, MOST_RANKS, OBJECT_BYTES, RECORD_BYTES, STATUS_BYTES, most_of, unpacked
from gpucloud.store import TooLarge, directory, newest_commit
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.records import HistoryPart
from gpucloud.usecases.supervise import look
from gpucloud.usecases.supervise.agents import read_status
from gpucloud.usecases.supervise.look import LogReader
from tests.standins.lying_node import LyingHost, bomb, hostile_json
from tests.unit.worlds import state

PROGRESS = Progress(
    step=7, first_step=0, total_steps=9, loss=0.5, phase="train", committed_step=5, step_seconds=0.1, age_s=1.0
)
PART = AttemptStatus(
    attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, progress=PROGRESS, failed_rank=None
)
STATUS = Status(heartbeat=3, epoch=1, boot_id="b", notice=None, attempt=PART)


LOG = "logs/0001/rank-00000/000000000007"


@dataclass(frozen=True)
class Sums:
    usd: Decimal = Decimal(0)
    span: timedelta = timedelta(0)
    share: float = 0.0
    count: int = 0


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_what_is_packed_unpacks_up_to_the_limit(pack):
    assert unpacked(pack(b"x" * 1000), 1000) == b"x" * 1000
    for data in (pack(b"x" * 1001), pack(b"x" * 1000)[:-1], b"x", b"", b"\x1f\x8b\x08"):
        with pytest.raises(ValueError, match=r"."):
            unpacked(data, 1000)


def test_a_packed_history_without_end_costs_little_memory_and_is_one_error(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("jobs/j/metrics/0001/n-000000000000.jsonl.gz", bomb(64 << 20))
    part = HistoryPart(attempt=1, node_id="n", offset=0, key="jobs/j/metrics/0001/n-000000000000.jsonl.gz")
    tracemalloc.start()
    with pytest.raises(StoreError, match="is damaged: it unpacks to more than"):
        JobStore(store, "j").records.read_history(part)
    assert tracemalloc.get_traced_memory()[1] < 40 << 20
    tracemalloc.stop()


def sparse(root: Path, key: str, size: int) -> None:
    """An object of that many zeros, which take no room."""
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("size", [RECORD_BYTES + 1, 40 << 30])
def test_a_record_of_a_machine_that_is_too_large_costs_no_memory_and_counts_for_nothing(
    tmp_path: Path, size: int
) -> None:
    store, own = DirectoryStore(tmp_path), JobStore(DirectoryStore(tmp_path), "j")
    written = from_json(Charge, json.dumps(CHARGE))
    JobStore(store, "j", on_machine=True).bill("n-1", (written,))
    for key in ("state.json", "ledger/n-2.json", "ledger/pages/000000.json", "status/driving/n-1.json", LOG):
        sparse(tmp_path, f"jobs/j/{key}", size)
    for key in ("gen/000001.json", "commit/000001/000000009.json"):
        sparse(tmp_path, f"jobs/j/checkpoints/{key}", size)
    stored_checkpoints = StoredCheckpoints(store=store, prefix="jobs/j/checkpoints", keep=3)
    tracemalloc.start()
    with pytest.raises(StateUnreadable, match=r"jobs/j/state.json has .*, and 16 MiB is the most") as raised:
        own.load()
    assert raised.value.hint == "gpucloud down j ends the job all the same"
    assert own.charges() == (written,)
    assert own.trial("n-1") is None
    assert own.records.log_end(1, 0)[0] == 7
    assert CheckpointMark.DAMAGED in stored_checkpoints.standing()[0].marks
    assert newest_commit(store, "jobs/j/checkpoints") is None
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_an_order_that_is_too_large_is_one_that_nobody_can_read(tmp_path: Path) -> None:
    own = JobStore(DirectoryStore(tmp_path), "j")
    sparse(tmp_path, "jobs/j/control/order.json", RECORD_BYTES + 1)
    with pytest.raises(OrderUnreadable, match="16 MiB is the most"):
        own.order()
    assert own.order_version() is not None
    assert own.time() is not None


@pytest.mark.parametrize(
    "key",
    [
        "jobs/j/state.json",
        "jobs/j/control/order.json",
        "jobs/j/control/spec.yaml",
        "jobs/j/control/billed.json",
        "jobs/j/control/armings/000001.json",
        "jobs/j/control/ledger/n.json",
        "jobs/j/ledger/pages/000001.json",
        "jobs/j/ledger/beside/x.json",
        "jobs/j/launches/lock.json",
        "jobs/j/launches/0001/00000.json",
        "jobs/j/status/driving/n.json",
        "jobs/j/logs/0001/rank-00000/000000000000",
        "jobs/j/metrics/0001/n-000000000000.jsonl.gz",
        "jobs/j/checkpoints/" + generation_key(1),
        "jobs/j/checkpoints/" + starting_key(1),
        "jobs/j/checkpoints/" + commit_key(Commit(1, 2)),
        "jobs/j/checkpoints/" + call_key(1),
        "jobs/j/checkpoints/" + answer_key(Commit(1, 2), 3),
        commit_key(Commit(1, 2)),
        record_key("gpucloud-j"),
        drive_key("gpucloud-j"),
        "clusters/gpucloud-j/hosts/AROA:i-1",
        "clusters/gpucloud-j/hosts.json",
    ],
)
def test_whatever_is_parsed_is_small(key: str) -> None:
    assert most_of(key) <= RECORD_BYTES


def test_what_is_only_copied_may_be_large() -> None:
    keys = ("jobs/j/outputs/files/status/a.json", "jobs/j/control/code/ab", "clusters/gpucloud-j/gpucloud-ab.zip")
    assert {most_of(key) for key in keys} == {OBJECT_BYTES}


def test_output_that_waited_for_the_store_is_kept_in_pieces_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "LOG_BYTES", 4)
    records = JobStore(DirectoryStore(tmp_path), "j").records
    logs = LogReader(JobStore(DirectoryStore(tmp_path), "j"), lambda *_: None)
    assert logs.offset(1, 0) == 0
    logs.take(1, 0, b"123456789\n", last=True)
    logs.flush()
    assert [records.read_log(part) for part in records.log_parts()] == [b"1234", b"5678", b"9\n"]


def test_an_object_that_is_too_large_to_be_read_whole_is_read_in_pieces_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "most_of", lambda _: 4)
    store, into = DirectoryStore(tmp_path), memoryview(bytearray(3))
    store.put("four", b"four")
    store.put("fives", b"fives")
    assert store.get("four") is not None
    with pytest.raises(TooLarge) as raised:
        store.get("fives")
    assert (raised.value.size, store.read_into("fives", 2, into), bytes(into)) == (5, True, b"ves")


@pytest.mark.parametrize(
    "text",
    [
        '{"count": %s}' % ("1" * 400),
        '{"count": %s}' % ("1" * 5000),
        '{"share": %s}' % ("9" * 400),
        '{"span": %s}' % ("9" * 20),
        '{"span": %s}' % ("9" * 30),
        '{"usd": "1e999999999"}',
        '{"usd": "NaN"}',
        '{"usd": "sNaN"}',
        '{"usd": "Infinity"}',
        '{"usd": "0E-999999999"}',
        '{"usd": "-1e-99999"}',
        '{"usd": %s}' % ("1" * 400),
        '{"usd": NaN}',
        '{"usd": Infinity}',
        '{"usd": "%s"}' % ("1" * 400),
        '{"usd": [[[[]]]]}',
        "[" * 990 + "]" * 990,
        "[" * 100_000,
        '{"usd":' * 900 + "1" + "}" * 900,
        '{"count": true}',
        '{"count": 1.0}',
    ],
)
def test_numbers_without_measure_are_no_values(text: str) -> None:
    with pytest.raises(Malformed):
        from_json(Sums, text)


def test_numbers_of_any_size_that_is_met_are_read() -> None:
    text = f'{{"usd": "0.{"0" * 90}1", "span": {10**17}, "share": 1e300, "count": {2**63}}}'
    assert from_json(Sums, text).count == 2**63
    assert from_json(Sums, '{"usd": "-123456789012.123456789012345678"}').usd < 0


@dataclass(frozen=True)
class Nested:
    inner: Nested | None = None


def test_what_holds_itself_too_often_is_no_value() -> None:
    text = '{"inner":' * 900 + "null" + "}" * 900
    with pytest.raises(Malformed, match="recursion"):
        from_json(Nested, text)


@pytest.mark.parametrize(
    "changes",
    [
        {"heartbeat": -1},
        {"heartbeat": 2**62},
        {"step": -1},
        {"step_seconds": 1e300},
        {"step_seconds": "nan"},
        {"step_seconds": -1.0},
        {"age_s": "inf"},
        {"waiting_share": "nan"},
        {"output": [[0, -5]]},
        {"output": [[0, 2**62]]},
        {"boot_id": "x" * 5000},
        {"rebalance": "9999-12-31T23:59:59+00:00"},
        {"notice": {"action": "stop", "at": "0001-01-01T00:00:00+00:00"}},
        {"phase": "x" * 5000},
        {"step": COUNTED},
        {"total_steps": 10**20 - 1},
        {"epoch": COUNTED},
        *({"exit_code": code} for code in (-129, 256, 10**19, True, 1.0, "1")),
        *({"failed_rank": rank} for rank in (-1, MOST_RANKS, 10**19, True, 0.0, "0")),
        {"output": [[-1, 5]]},
        {"dropped": [[MOST_RANKS, 5]]},
    ],
)
def test_a_status_of_what_cannot_be_is_none(changes: dict[str, object]) -> None:
    said = json.loads(status_to_json(STATUS))
    for part in (said, said["attempt"], said["attempt"]["progress"]):
        part.update({key: value for key, value in changes.items() if key in part})
    with pytest.raises(Malformed):
        status_from_json(json.dumps(said))
    assert read_status(LyingHost(says=lambda _: json.dumps(said).encode())) is None
    assert status_from_json(status_to_json(STATUS)) == STATUS


AT = "2026-11-22T00:00:00+00:00"
GPU = {"at": AT, "index": 0, "use": 1, "memory_used_mib": 1, "memory_mib": 1, "temperature": 1, "power": 1.0}
HOST = {"at": AT, "cpu": 1.0, "memory_used_mib": 1, "memory_mib": 1, "disk_free_mib": 1, "received": 1, "sent": 1}


@pytest.mark.parametrize("value", [2**61, -(2**61), "inf", "-inf", "nan", 1e300, "x" * 5000, True])
@pytest.mark.parametrize(
    ("like", "name"),
    [(GPU, name) for name in (*list(GPU)[1:], "ecc_uncorrected", "power_limit", "sm_clock")]
    + [(HOST, name) for name in list(HOST)[1:]],
)
def test_a_sample_of_what_cannot_be_makes_a_status_none(like: dict[str, object], name: str, value: object) -> None:
    said = json.loads(status_to_json(STATUS))
    sample = {**like, name: value}
    said |= {"gpus": [sample]} if like is GPU else {"host": sample}
    with pytest.raises(Malformed):
        status_from_json(json.dumps(said))
    said |= {"gpus": [GPU], "host": HOST}
    assert status_from_json(json.dumps(said)).gpus


@pytest.mark.parametrize("told", [{"uuid": "x" * 5000}, {"pci": "x" * 5000}, {"slowdowns": ["x" * 9] * 500}])
def test_a_sample_of_words_without_end_makes_a_status_none(told: dict[str, object]) -> None:
    said = json.loads(status_to_json(STATUS))
    with pytest.raises(Malformed):
        status_from_json(json.dumps({**said, "gpus": [{**GPU, **told}]}))


@pytest.mark.parametrize("part", [{"exit_code": -9}, {"exit_code": 255}, {"failed_rank": 99_999}, {"exit_code": -64}])
def test_a_part_may_end_with_every_code_and_signal_there_is_on_every_rank(part: dict[str, int]) -> None:
    ended = replace(STATUS, attempt=replace(PART, state=RunState.EXITED, **part))
    assert status_from_json(status_to_json(ended)) == ended


def test_a_status_without_end_is_none() -> None:
    good = status_to_json(STATUS).encode()
    assert read_status(LyingHost(says=lambda _: good)) == STATUS
    assert read_status(LyingHost(says=lambda _: good + b" " * STATUS_BYTES)) is None


def test_no_status_that_is_made_to_harm_does_more_than_to_be_passed_over() -> None:
    like = json.loads(status_to_json(STATUS))
    for seed in range(600):
        read_status(LyingHost(says=lambda _, seed=seed: hostile_json(Random(seed), like)))


CHARGE = {
    "node_id": "n", "attempt": 1, "start": "2026-11-22T00:00:00+00:00", "end": "2026-11-22T01:00:00+00:00",
    "usd_per_hour": "1", "usd": "1", "pool": None, "kind": "compute", "note": "", "estimated": False,
}  # fmt: skip


def test_charges_below_nothing_do_not_lower_the_sum(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    lower = {**CHARGE, "usd": "-0.9"}
    store.put(
        "jobs/j/ledger/n.json",
        json.dumps({"version": 1, "charges": [CHARGE, lower, {**lower, "usd": "NaN"}][:2]}).encode(),
    )
    store.put(
        "jobs/j/ledger/pages/000000.json",
        json.dumps({"version": 1, "nodes": ["m"], "charges": [{**lower, "node_id": "m"}]}).encode(),
    )
    assert sum(charge.usd for charge in JobStore(store, "j").charges()) == 1
    assert [charge.usd for charge in JobStore(store, "j", on_machine=True).bill_of("n")] == [1]


def test_a_ledger_that_is_made_to_harm_is_one_clear_error_to_machines_and_raises_no_sum_of_the_users(
    tmp_path: Path,
) -> None:
    store, refused = DirectoryStore(tmp_path), 0
    for seed in range(150):
        for key, like in (
            ("n", {"version": 1, "charges": [CHARGE]}),
            ("pages/000000", {"version": 1, "nodes": ["n"], "charges": [CHARGE]}),
        ):
            (tmp_path / "jobs" / "j" / "ledger" / "pages").mkdir(parents=True, exist_ok=True)
            (tmp_path / "jobs" / "j" / "ledger" / f"{key}.json").write_bytes(hostile_json(Random(seed), like))
            assert sum(charge.usd for charge in JobStore(store, "j").charges()) >= 0
            try:
                JobStore(store, "j", on_machine=True).charges()
            except GpucloudError as error:
                refused += "is damaged" in str(error)
            (tmp_path / "jobs" / "j" / "ledger" / f"{key}.json").unlink()
    assert refused > 40


@pytest.mark.parametrize("changes", [{"epoch": 10**19}, {"seq": 10**19}, {"epoch": -1}, {"seq": -1}])
def test_a_state_that_counts_further_than_any_job_is_damaged(tmp_path: Path, changes: dict[str, int]) -> None:
    store = DirectoryStore(tmp_path)
    store.put("jobs/digits/state.json", to_json(state(**changes)).encode())
    with pytest.raises(StateUnreadable, match="counts further than any job does") as raised:
        JobStore(store, "digits").load()
    assert raised.value.hint
