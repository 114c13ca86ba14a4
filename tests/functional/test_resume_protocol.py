"""The commit protocol, killed at every call to the store."""

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.checkpoint.manifest import Commit, Manifest, Promise, Why, commit_key, generation_key, seal
from gpucloud.domain.errors import StoreError
from gpucloud.domain.untrusted import COUNTED
from gpucloud.store import Conflict, Stored, checkpoints, newest_commit
from gpucloud.store.checkpoints import Checkpoints, Fenced
from tests.fakes.whole_objects import WholeObjects

PREFIX = "jobs/x/checkpoints"
LAST = 5
NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


class MemoryStore(WholeObjects):
    """An object store in a dict, with the contract's conditions (or, faulty, without them)."""

    url = "memory:"

    def __init__(self, *, conditions=True):
        self.objects = {}
        self.conditions = conditions
        self.age = timedelta(0)  # of every object

    def get(self, key):
        if key not in self.objects:
            return None
        return Stored(data=self.objects[key], version="", modified=NOW, store_time=NOW + self.age)

    def put(self, key, data, *, if_absent=False, if_version=None):
        if if_absent and self.conditions and key in self.objects:
            raise Conflict(key)
        self.objects[key] = bytes(data)
        return ""

    def list(self, prefix):
        return tuple(sorted(key for key in self.objects if key.startswith(prefix)))

    def delete(self, key):
        self.objects.pop(key, None)


class Killed(BaseException):
    """The process is gone: nothing catches this."""


class KillingStore:
    """Passes calls on, and ends the process before or after the n-th (the reply to it is lost)."""

    url = "memory:"

    def __init__(self, store, at, *, after):
        self.store, self.left, self.after, self.calls = store, at, after, 0

    def __getattr__(self, name):
        def call(*positional, **named):
            self.calls += 1
            if self.calls == self.left and not self.after:
                raise Killed
            try:
                return getattr(self.store, name)(*positional, **named)
            finally:
                if self.calls == self.left:
                    raise Killed

        return call


def body(step, rank):
    return random.Random(f"{step}-{rank}").randbytes(64)


def attempt(store, acknowledged, last=LAST):
    """One attempt of two ranks: restores, checks what it restored, and saves every step up to the last."""
    checkpoints = Checkpoints(store, PREFIX, keep=2)
    base, step = None, 0
    checkpoints.announce(1)
    for manifest in checkpoints.candidates():
        objects = checkpoints.fetch(manifest)
        if objects is not None:
            base, step = manifest.commit, manifest.commit.step
            assert objects == (body(step, 0), body(step, 1))
            break
    assert step >= max(acknowledged, default=0)
    assert checkpoints.begin(base=base, attempt=1)
    for now in range(step + 1, last + 1):
        save(checkpoints, now)
        acknowledged.append(now)
        checkpoints.collect()


def save(checkpoints, step):
    commit = Commit(checkpoints.generation, step)
    pieces = tuple(checkpoints.upload(commit, f"rank-{r}", memoryview(body(step, r))) for r in range(2))
    checkpoints.commit(Manifest(commit=commit, world=2, promise=Promise(), pieces=pieces))


def killed(store, acknowledged, at, *, after, last=LAST):
    with pytest.raises(Killed):
        attempt(KillingStore(store, at, after=after), acknowledged, last)


def calls_of_a_whole_run():
    counting = KillingStore(MemoryStore(), 0, after=False)
    attempt(counting, [])
    return counting.calls


@pytest.mark.parametrize("after", [False, True])
def test_killed_at_any_call_no_commit_is_lost_and_no_restore_is_wrong(after):
    for at in range(1, calls_of_a_whole_run() + 1):
        store, acknowledged = MemoryStore(), []
        killed(store, acknowledged, at, after=after)
        attempt(store, acknowledged)
        assert newest_commit(store, PREFIX)[0] == LAST


def test_killed_again_and_again_the_run_comes_to_its_end():
    for seed in range(150):
        chance = random.Random(seed)
        store, acknowledged = MemoryStore(), []
        for _ in range(4):
            at = chance.randint(1, 25)
            try:
                attempt(KillingStore(store, at, after=chance.random() < 0.5), acknowledged)
            except Killed:
                continue
        attempt(store, acknowledged)
        assert newest_commit(store, PREFIX)[0] == LAST


def test_whatever_is_damaged_an_older_checkpoint_is_restored():
    whole = MemoryStore()
    attempt(whole, [])
    newest = [key for key in whole.objects if f"{LAST:09d}" in key]
    assert len(newest) == 3
    for key in newest:
        data = whole.objects[key]
        changed = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(len(data))]
        for damaged in [*changed, data[:-1], b"", None]:
            store = MemoryStore()
            store.objects = {k: v for k, v in whole.objects.items() if k != key}
            if damaged is not None:
                store.objects[key] = damaged
            found = Checkpoints(store, PREFIX, keep=2)
            steps = [m.commit.step for m in found.candidates() if found.fetch(m) is not None]
            assert steps == [LAST - 1]


def test_a_flipped_byte_in_any_part_is_found_and_so_is_what_lies_behind_the_end(monkeypatch):
    for module in (objects, checkpoints):
        monkeypatch.setattr(module, "PART_BYTES", 24)
    whole = MemoryStore()
    attempt(whole, [])
    data_keys = [key for key in whole.objects if f"{LAST:09d}/rank" in key]
    (manifest,) = [m for m in Checkpoints(whole, PREFIX, keep=2).candidates() if m.commit.step == LAST]
    assert [len(piece.crc32) for piece in manifest.pieces] == [3, 3]  # 64 bytes each
    for key in data_keys:
        data = whole.objects[key]
        for damaged in [*(data[:i] + bytes([data[i] ^ 8]) + data[i + 1 :] for i in range(64)), data + b"\0", data[:48]]:
            store = MemoryStore()
            store.objects = whole.objects | {key: damaged}
            assert Checkpoints(store, PREFIX, keep=2).fetch(manifest) is None
    assert Checkpoints(whole, PREFIX, keep=2).fetch(manifest) == (body(LAST, 0), body(LAST, 1))


def test_a_manifest_may_be_put_again_when_the_answer_was_lost():
    store = MemoryStore()
    first = Checkpoints(store, PREFIX, keep=2)
    first.begin(base=None, attempt=1)
    save(first, 1)
    before = dict(store.objects)
    save(first, 1)
    assert store.objects == before


def test_a_damaged_generation_record_does_not_hide_older_checkpoints():
    store = MemoryStore()
    attempt(store, [])
    store.objects[f"{PREFIX}/gen/000002.json"] = b"{"
    assert newest_commit(store, PREFIX)[0] == LAST


def test_a_replaced_writer_cannot_commit_and_its_earlier_late_commits_are_not_restored():
    store = MemoryStore()
    zombie = Checkpoints(store, PREFIX, keep=2)
    zombie.begin(base=None, attempt=1)
    save(zombie, 1)
    save(zombie, 2)
    successor = Checkpoints(store, PREFIX, keep=2)
    base = next(successor.candidates()).commit
    # The zombie looked for a newer generation just before there was one, and commits just after.
    late = KillingStore(store, 0, after=False)
    zombie._store = _BeginsBefore(late, f"{PREFIX}/{commit_key(Commit(1, 3))}", successor, base)
    with pytest.raises(Fenced):  # it finds out, so that it does not say that this step is saved
        save(zombie, 3)
    assert f"{PREFIX}/{commit_key(Commit(1, 3))}" in store.objects
    with pytest.raises(Fenced):
        save(zombie, 4)
    before = dict(store.objects)
    zombie.collect()
    assert store.objects == before
    assert next(Checkpoints(store, PREFIX, keep=2).candidates()).commit == Commit(1, 2)
    assert newest_commit(store, PREFIX)[0] == 2


def writer_of(store, *steps):
    """One that goes on saving, and deletes what it needs no longer after each save."""
    writer = Checkpoints(store, PREFIX, keep=2)
    writer.begin(base=None, attempt=1)
    go_on(writer, *steps)
    return writer


def go_on(writer, *steps):
    for step in steps:
        save(writer, step)
        writer.collect()


def test_collection_leaves_what_it_cannot_read_with_its_data():
    store = MemoryStore()
    writer = writer_of(store, 1, 2, 3)
    for step, data in ((2, b"torn"), (3, seal({"format": 6}))):
        store.put(f"{PREFIX}/{commit_key(Commit(1, step))}", data)
    go_on(writer, 4, 5, 6)
    left = {key.removeprefix(f"{PREFIX}/") for key in store.objects}
    assert {int(key.split("/")[2][:9]) for key in left if key.startswith("commit/")} == {2, 3, 5, 6}
    assert {int(key.split("/")[2]) for key in left if key.startswith("data/")} == {2, 3, 5, 6}


def test_what_an_attempt_may_begin_from_stays_while_it_starts_however_often_the_one_before_saves():
    store = MemoryStore()
    older = writer_of(store, 1, 2)
    newer = Checkpoints(store, PREFIX, keep=2)
    newer.announce(2)
    base = next(newer.candidates())
    go_on(older, 3, 4, 5, 6)
    assert newer.fetch(base) == (body(2, 0), body(2, 1))
    newer.begin(base=base.commit, attempt=2)
    with pytest.raises(Fenced):
        save(older, 7)
    assert newest_commit(store, PREFIX)[0] == base.commit.step == 2
    go_on(newer, 3)
    assert not [key for key in store.objects if "start" in key]


def test_a_generation_that_no_later_one_could_follow_is_one_error_and_nothing_is_written():
    store = MemoryStore()
    writer_of(store, 1)
    store.put(f"{PREFIX}/{generation_key(COUNTED - 1)}", b"{}")
    before = dict(store.objects)
    with pytest.raises(StoreError, match=r"gen/999999999999999\.json counts further than any job does") as raised:
        Checkpoints(store, PREFIX, keep=2).begin(base=None, attempt=2)
    assert (store.objects, raised.value.hint) == (before, "delete it: no gpucloud wrote it")


def test_an_attempt_that_came_no_further_than_its_start_keeps_the_one_before_from_deleting_for_an_hour():
    store = MemoryStore()
    older = writer_of(store, 1, 2)
    Checkpoints(store, PREFIX, keep=2).announce(1)  # as one that was started by hand beside it
    go_on(older, 3)
    assert [m.commit.step for m in older.candidates()] == [3, 2, 1]
    store.age = timedelta(hours=1)
    go_on(older, 4)
    assert [m.commit.step for m in older.candidates()] == [4, 3]


def test_the_same_step_may_be_committed_again_for_another_reason_and_nothing_else():
    store = MemoryStore()
    writer = Checkpoints(store, PREFIX, keep=2)
    writer.begin(base=None, attempt=1)
    piece = writer.upload(Commit(1, 3), "rank-0", memoryview(b"weights"))
    due = Manifest(commit=Commit(1, 3), world=1, promise=Promise(), pieces=(piece,), why=Why.DUE)
    writer.commit(due)
    writer.commit(replace(due, why=Why.LAST))
    with pytest.raises(Fenced):
        writer.commit(replace(due, pieces=()))
    assert writer.manifest(Commit(1, 3)) == due


class _BeginsBefore:
    """Lets another attempt begin just before a certain key is written."""

    def __init__(self, store, key, other, base):
        self._passed, self._key, self._other, self._base = store, key, other, base

    def put(self, key, data, **condition):
        if key == self._key:
            self._other.begin(base=self._base, attempt=2)
        return self._passed.put(key, data, **condition)

    def __getattr__(self, name):
        return getattr(self._passed, name)


def test_a_generation_is_never_below_the_attempts_number_and_never_used_twice():
    store = MemoryStore()
    numbers = []
    for number in (3, 3, 1, 9):
        checkpoints = Checkpoints(store, PREFIX, keep=2)
        checkpoints.begin(base=None, attempt=number)
        numbers.append(checkpoints.generation)
    assert numbers == [3, 4, 5, 9]


def test_a_store_that_ignores_conditions_is_found_out():
    store = MemoryStore(conditions=False)
    checkpoints = Checkpoints(store, PREFIX, keep=2)
    assert not checkpoints.begin(base=None, attempt=1)
    save(checkpoints, 1)
    assert newest_commit(store, PREFIX)[0] == 1


def test_an_outage_while_restoring_is_an_error_and_not_damage():
    class Down(MemoryStore):
        def get(self, key):
            raise StoreError("no answer")

    store = Down()
    attempt_store = MemoryStore()
    attempt(attempt_store, [])
    store.objects = attempt_store.objects
    with pytest.raises(StoreError):
        next(Checkpoints(store, PREFIX, keep=2).candidates())
    with pytest.raises(StoreError):
        newest_commit(store, PREFIX)


def test_without_a_commit_there_is_no_newest_one():
    store = MemoryStore()
    assert newest_commit(store, PREFIX) is None
    Checkpoints(store, PREFIX, keep=2).begin(base=None, attempt=1)
    assert newest_commit(store, PREFIX) is None
