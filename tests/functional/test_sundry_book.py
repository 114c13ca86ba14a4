"""What the budget does not count is billed once for each attempt, from what lies in the store and what was counted."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import pytest

from gpucloud.adapters.home import Home
from gpucloud.cli.commands import asking, logs, reaching
from gpucloud.domain.checkpoint.manifest import Commit
from gpucloud.domain.errors import StoreError
from gpucloud.domain.job.data import DataFile, data_set
from gpucloud.domain.job.quantities import format_size, format_usd
from gpucloud.domain.job.spec import KnownJob
from gpucloud.domain.money.ledger import GIB, Rates, Terms
from gpucloud.domain.node.output import DatedPiece
from gpucloud.domain.state.state import ExitReason
from gpucloud.store import open_store
from gpucloud.store.contract import CountingStore, Tally
from gpucloud.usecases.checkpoint.checkpoints import CostsOn, StoredCheckpoints, costs_on
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.supervise.provision import SundryLedger
from tests.standins.made_checkpoints import Made
from tests.standins.made_checkpoints import state as made_state
from tests.unit.worlds import NOW, opened, put_job, state

# A GiB and hour costs 0.0001 USD in March, of 744 hours.
S3 = Rates(
    region="us-east-2",
    storage_usd_per_gib_month=Decimal("0.0744") * GIB / 1000,  # so that a thousand bytes cost what a GiB does
    puts_usd_per_1000=Decimal(1),
    transfer_usd_per_gib=Decimal(GIB),
)


@pytest.fixture
def world(tmp_path):
    store, tally = open_store(str(tmp_path / "store")), Tally()
    jobs = JobStore(CountingStore(store, tally), "made")
    for step in (10, 20, 30):
        one = Made(store, jobs.checkpoints, Commit(1, step))
        one.put([list(one.tensors)], made_state(one))
    return SimpleNamespace(
        jobs=jobs,
        tally=tally,
        clock=SimpleNamespace(now=lambda: NOW),
        terms=Terms(rates=(S3,)),
        job=SimpleNamespace(checkpoint=SimpleNamespace(keep=3), data=()),
    )


def test_an_attempt_is_billed_once_for_its_room_and_requests_and_what_came_home(world):
    first = opened("a", first_step=1, last_step=30, ended_at=NOW - timedelta(minutes=30), reason=ExitReason.LOST)
    second = opened("a", number=2, first_step=1, last_step=30)
    made = state(attempts=(first, second))
    world.tally.add(puts=2000)

    SundryLedger(services=world).bill(made, second, 3)
    SundryLedger(services=world).bill(made, second, 3)

    charges = {charge.kind.value: charge for charge in world.jobs.charges()}
    assert sorted(charges) == ["requests", "storage", "transfer"]
    assert charges["transfer"].usd == 3
    # 2,000 were counted; each of 3 saves is thought to be an object, a manifest and a list.
    assert charges["requests"].usd == Decimal("2.009")
    size = sum(len(world.jobs.store.get(key).data) for key in world.jobs.store.list("jobs/made/") if "/data/" in key)
    assert charges["storage"].usd == (Decimal("0.0001") * size / 1000 / 2).quantize(Decimal("0.00000001"))
    assert {charge.attempt for charge in charges.values()} == {2}
    assert charges["storage"].start == NOW - timedelta(minutes=30)


def test_data_in_another_region_is_billed_once_for_each_machine_that_takes_part(world):
    far = data_set("s3://far/set", [DataFile(path="a", size=10**9, etag="e", key="set/a")], region="eu-west-1")
    near = data_set("s3://near/set", [DataFile(path="a", size=10**9, etag="e", key="set/a")], region="us-east-2")
    for one in (far, near):
        world.jobs.keep_data_set(one)
    world.job.data = (("s3://far/set", "/far"), ("s3://near/set", "/near"), ("s3://never/listed", "/never"))
    first = opened("a", "b", ended_at=NOW, reason=ExitReason.LOST)
    second = opened("b", "c", number=2)
    pool = replace(state().pool, zone="us-east-2a")
    SundryLedger(services=world).bill(state(pool=pool, attempts=(first,)), first, 0)
    SundryLedger(services=world).bill(state(pool=pool, attempts=(first, second)), second, 0)
    billed = [(charge.attempt, charge.usd) for charge in world.jobs.charges() if charge.kind.value == "data"]
    assert billed == [(1, Decimal("0.04")), (2, Decimal("0.02"))]


def test_a_store_that_costs_nothing_is_not_even_looked_at(world):
    free = SimpleNamespace(**{**vars(world), "terms": Terms(), "jobs": None})
    SundryLedger(services=free).bill(state(attempts=(opened("a"),)), opened("a"), 0)


def test_bytes_that_are_pulled_later_are_a_charge_of_no_attempt(world):
    put_job(world.jobs, state(job="made", group="gpucloud-made"))
    asker = Asker(jobs=world.jobs, market=None, group=None, clock=world.clock, terms=world.terms)
    asker.bill_pull(7)
    replace(asker, clock=SimpleNamespace(now=lambda: NOW + timedelta(seconds=1))).bill_pull(0)
    replace(asker, clock=SimpleNamespace(now=lambda: NOW + timedelta(seconds=2)), terms=Terms()).bill_pull(7)
    assert [(charge.usd, charge.attempt) for charge in world.jobs.charges()] == [(7, None)]


def test_the_requests_of_a_pull_are_charged_with_its_bytes(world):
    put_job(world.jobs, state(job="made", group="gpucloud-made"))
    world.tally.take()
    asker = Asker(jobs=world.jobs, market=None, group=None, clock=world.clock, terms=world.terms, tally=world.tally)
    world.jobs.records.append_log(1, 0, 0, DatedPiece(data=b"seven b"))
    told = b"".join(piece.data for _, piece in asker.output(attempt=None, rank=None, follow=False))
    asker.bill_pull(len(told))
    charges = {charge.kind.value: charge for charge in world.jobs.charges()}
    assert charges["transfer"].usd == 7
    # The log was put and listed; it was read, and so was the state, for the output and for the bill.
    assert (charges["requests"].usd, charges["requests"].note) == (Decimal("0.002"), "2 PUT, 3 GET")


@pytest.fixture
def charged(world, tmp_path, monkeypatch):
    """A job of this user's whose embedded cloud charges what S3 does."""
    home = Home(tmp_path)
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path))
    monkeypatch.setattr("gpucloud.wiring.clouds.Terms", partial(Terms, rates=(S3,)))
    put_job(world.jobs, state(job="made", group="gpucloud-made"))
    world.jobs.records.append_log(1, 0, 0, DatedPiece(data=b"hello\n"))
    home.remember(KnownJob(name="made", store=world.jobs.store.url, file=tmp_path / "gpucloud.yaml"))
    return world.jobs


@pytest.mark.parametrize("lines", [False, True])
def test_logs_that_are_read_out_of_the_store_are_charged(charged, lines, capfdbinary):
    assert logs.logs("made", logs.Wanted(as_json=lines)) == 0
    assert b"hello" in capfdbinary.readouterr().out
    sums = {charge.kind.value: charge.usd for charge in charged.charges()}
    assert sums == {"transfer": 6, "requests": Decimal("0.001")}


def test_what_is_copied_out_of_the_store_is_charged(charged, tmp_path):
    copied = reaching.copy("made:@store/logs", str(tmp_path / "logs"), node=None, recursive=True, as_json=False)
    assert copied == 0
    assert (tmp_path / "logs" / "0001" / "rank-00000" / "000000000000").read_bytes() == b"hello\n"
    assert {charge.kind.value: charge.usd for charge in charged.charges()} == {
        "transfer": 6,
        "requests": Decimal("0.001"),
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_checkpoints_that_stay_after_the_end_are_told_with_what_they_cost_a_month(charged, capfd, as_json):
    stored = charged.load()[0]
    count, size = StoredCheckpoints(store=charged.store, prefix=charged.checkpoints, keep=2).held()
    usd = Decimal("0.0744") * size / 1000
    assert costs_on(charged, stored, Terms(rates=(S3,))) is None
    assert asking.status("made", history=False, rehearsals=False, as_json=as_json) == 0
    assert "in the store" not in capfd.readouterr().err
    reason = ExitReason.SUCCEEDED
    ended = replace(stored, status=reason.status, exit_reason=reason, exit_code=reason.exit_code)
    ended = replace(ended, torn_down=True, group=None)
    assert costs_on(charged, ended, Terms()) is None
    found = costs_on(charged, ended, Terms(rates=(S3,)))
    assert found == CostsOn(checkpoints=3, size=size, usd_per_month=usd, goes_on=False)
    charged.replace(ended, charged.load()[1].version)
    assert asking.status("made", history=False, rehearsals=False, as_json=as_json) == 0
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"3 checkpoints ({format_size(size)}) of made stay in the store, for about {format_usd(usd)} a month:"
        " gpucloud rm made --with-checkpoints deletes them"
    )
    assert count == 3


@pytest.mark.parametrize("reason", [ExitReason.USER_ERROR, ExitReason.STOPPED])
def test_checkpoints_that_the_next_train_goes_on_from_are_told_as_such_once_the_machines_have_ended(
    charged, capfd, reason
):
    """While they are held for a mended script, or are still being ended, `rm` is refused."""
    stored, found = charged.load()
    ended = replace(stored, status=reason.status, exit_reason=reason, exit_code=reason.exit_code)
    assert costs_on(charged, ended, Terms(rates=(S3,))) is None
    charged.replace(replace(ended, torn_down=True, group=None), found.version)
    assert asking.status("made", history=False, rehearsals=False, as_json=True) == 0
    told = capfd.readouterr().err.splitlines()[-1].partition(" a month: ")[2]
    deletes = "gpucloud rm made --with-checkpoints deletes them"
    assert told == f"the next `train` goes on from the newest; if none is to come, {deletes}"


def test_a_copy_out_of_the_store_that_was_cut_off_goes_on_where_it_ended(charged, tmp_path, monkeypatch):
    """What is written once is known by its key, what is too large to be read at once by its version."""
    store, root = charged.store, "jobs/made/checkpoints/data/000009/000000010"
    store.put(f"{root}/part-a", b"a" * 40)
    store.put(f"{root}/part-b", b"b" * 50)
    monkeypatch.setattr("gpucloud.store.directory.most_of", lambda key: 45 if "part-" in key else 1 << 20)
    monkeypatch.setattr("gpucloud.store.filling._PIECE_BYTES", 10)
    monkeypatch.setattr(reaching, "_ANEW_BYTES", 10)
    read, reads, dies = type(store).read_into, [], [True]

    def read_into(self, key, at, into):
        if dies[0] and at == 30:
            raise KeyboardInterrupt
        reads.append((key.rpartition("/")[2], at, len(into)))
        return read(self, key, at, into)

    monkeypatch.setattr(type(store), "read_into", read_into)
    source, here = "made:@store/checkpoints/data/000009/000000010", tmp_path / "here"
    copy = partial(reaching.copy, source, str(here), node=None, recursive=True, as_json=False)
    with pytest.raises(KeyboardInterrupt):
        copy()
    assert reads == [("part-b", 0, 10), ("part-b", 10, 10), ("part-b", 20, 10)]
    assert not list(here.rglob("part-*"))
    reads.clear()
    dies[0] = False
    assert copy() == 0
    assert reads == [
        *(("part-a", 39, 1), ("part-a", 40, 1)),
        *(("part-b", 20, 10), ("part-b", 30, 10), ("part-b", 40, 10)),
    ]
    assert [(here / name).read_bytes() for name in ("part-a", "part-b")] == [b"a" * 40, b"b" * 50]


def test_a_result_in_a_folder_named_as_that_of_checkpoints_comes_as_it_is_now(charged, tmp_path, monkeypatch):
    key, best = "jobs/made/outputs/files/checkpoints/data/best.txt", tmp_path / "here" / "best.txt"
    source = "made:@store/outputs/files/checkpoints/data"
    copy = partial(reaching.copy, source, str(tmp_path / "here"), node=None, recursive=True, as_json=False)
    charged.store.put(key, b"OLD-RESULT")

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(reaching.Landing, "settle", dies)
        with pytest.raises(KeyboardInterrupt):
            copy()
    charged.store.put(key, b"NEW-RESULT")
    assert copy() == 0
    assert best.read_bytes() == b"NEW-RESULT"


def test_what_is_deleted_in_the_store_while_it_is_copied_is_named_and_not_counted(
    charged, tmp_path, monkeypatch, capfd
):
    charged.records.append_log(1, 1, 0, DatedPiece(data=b"hello\n"))
    get = type(charged.store).get
    monkeypatch.setattr(type(charged.store), "get", lambda self, key: None if "rank-00001" in key else get(self, key))
    copied = reaching.copy("made:@store/logs", str(tmp_path / "logs"), node=None, recursive=True, as_json=True)
    answer = json.loads(capfd.readouterr().out)
    assert (copied, answer["files"], answer["node"]) == (14, 1, None)
    assert [one.partition("/rank-")[2] for one in answer["refused"]] == [
        "00001/000000000000 was deleted while it was copied"
    ]
    assert [path.name for path in (tmp_path / "logs" / "0001").iterdir()] == ["rank-00000"]


def test_who_may_only_read_reads_all_the_same(charged, monkeypatch, capfd):
    def refused(*_, **__):
        raise StoreError("403")

    monkeypatch.setattr(JobStore, "bill_outside_budget", refused)
    assert logs.logs("made", logs.Wanted()) == 0
    assert capfd.readouterr().out == "hello\n"
