"""One suite over every object store."""

import array
import random
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from botocore.exceptions import ClientError, NoCredentialsError, ReadTimeoutError, SSOTokenLoadError
from botocore.response import StreamingBody

from gpucloud.domain import untrusted
from gpucloud.domain.errors import CredentialsError, StoreError
from gpucloud.domain.state.event import Event
from gpucloud.store import Conflict, Sums, TooLarge, get_small, open_store
from gpucloud.store import s3 as s3_module
from gpucloud.store.contract import CountingStore, Tally
from gpucloud.usecases.jobstore.events import EventLog
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.lab.aws import Lab
from tests.sim.loom import Loom
from tests.sim.store import Store


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """S3 that checks what it is sent, and where one conditional write in ten meets another that is under way."""
    with Lab(tmp_path_factory.mktemp("lab")) as standing:
        standing.collide(0.1)
        yield standing


@pytest.fixture
def s3(lab, monkeypatch, request):
    for name, value in lab.settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    store = open_store(f"s3://bucket/{abs(hash(request.node.name))}/jobs")
    if not _has_bucket(store):
        store._client.create_bucket(Bucket="bucket")
    yield store
    store.close()


def _has_bucket(store):
    return any(bucket["Name"] == "bucket" for bucket in store._client.list_buckets()["Buckets"])


@pytest.fixture
def any_store(request, tmp_path):
    def opened(kind):
        if kind == "s3":
            return request.getfixturevalue("s3")
        if kind == "memory":
            return MemoryStore(JumpingClock())
        if kind == "counting":
            return CountingStore(open_store((tmp_path / "counted").as_uri()), Tally())
        return open_store((tmp_path / "a store" / "below").as_uri())

    return opened


@pytest.fixture(params=["directory", "s3", "memory", "counting"])
def store(request, any_store):
    return any_store(request.param)


def test_what_was_put_is_got(store):
    version = store.put("a/b.json", b"first")
    stored = store.get("a/b.json")
    assert (stored.data, stored.version) == (b"first", version)


def test_a_memoryview_and_no_bytes_at_all_can_be_put(store):
    store.put("view", memoryview(bytearray(b"12345"))[1:4])
    store.put("empty", b"")
    assert store.get("view").data == b"234"
    assert store.get("empty").data == b""


def test_what_is_not_there_is_none(store):
    store.put("a/b", b"x")
    assert store.get("a/c") is None
    assert store.get("a") is None
    assert store.get("a/b/c") is None


def test_put_if_absent_keeps_what_is_there(store):
    store.put("key", b"first", if_absent=True)
    with pytest.raises(Conflict):
        store.put("key", b"second", if_absent=True)
    assert store.get("key").data == b"first"


def test_put_if_version_replaces_only_that_version(store):
    first = store.put("key", b"first")
    second = store.put("key", b"second", if_version=first)
    assert second != first
    with pytest.raises(Conflict):
        store.put("key", b"third", if_version=first)
    assert store.get("key").data == b"second"


def test_put_if_version_of_what_is_not_there_conflicts(store):
    version = store.put("key", b"first")
    store.delete("key")
    with pytest.raises(Conflict):
        store.put("key", b"second", if_version=version)
    assert store.get("key") is None


@pytest.mark.parametrize(
    ("key", "most", "said"),
    [
        ("jobs/j/status/driving/n.json", untrusted.STATUS_BYTES, "1 MiB is the most that is read of it"),
        ("jobs/j/state.json", untrusted.RECORD_BYTES, "16 MiB is the most that is read of it: nothing is done by it"),
    ],
)
def test_an_object_larger_than_its_kind_is_known_without_being_brought_in(store, monkeypatch, key, most, said):
    store.put(key, b" " * most)
    assert len(store.get(key).data) == most
    version = store.put(key, b" " * (most + 1))
    monkeypatch.setattr(StreamingBody, "read", _fetched)
    with pytest.raises(TooLarge, match=said) as raised:
        store.get(key)
    assert key in raised.value.message
    assert raised.value.hint == "gpucloud down j ends the job all the same"
    assert (raised.value.size, raised.value.about.version, raised.value.about.data) == (most + 1, version, b"")
    assert get_small(store, key).version == version


def _fetched(*_):
    raise AssertionError("the object's bytes were fetched from S3")


def test_a_prefix_that_somebody_filled_is_refused_and_not_read_to_its_end(store, monkeypatch):
    for number in range(4):
        store.put(f"jobs/full/{number}", b"")
    monkeypatch.setattr(untrusted, "LISTED_KEYS", 3)

    with pytest.raises(StoreError, match="more than 3 objects lie below jobs/full/"):
        store.list("jobs/full/")
    assert len(store.list("jobs/full/1")) == 1


def test_keys_are_listed_by_prefix_in_order(store):
    for key in ("b/2", "a/10", "a/1", "ab/3", "a/1x/y"):
        store.put(key, b"")
    assert store.list("a/") == ("a/1", "a/10", "a/1x/y")
    assert store.list("a/1") == ("a/1", "a/10", "a/1x/y")
    assert store.list("a") == ("a/1", "a/10", "a/1x/y", "ab/3")
    assert store.list("") == ("a/1", "a/10", "a/1x/y", "ab/3", "b/2")
    assert store.list("c/") == ()


def test_deleting_twice_is_no_error(store):
    store.put("a/b/c", b"x")
    store.delete("a/b/c")
    store.delete("a/b/c")
    store.delete("never/was")
    assert store.list("") == ()


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "..", "a//b", "a/", "./a", "a\0b", "a/.gpucloud-lock"])
def test_a_key_that_could_leave_the_store_is_refused(store, key):
    for act in (lambda: store.put(key, b"x"), lambda: store.get(key), lambda: store.delete(key)):
        with pytest.raises(StoreError, match="cannot be a key"):
            act()


def test_an_age_is_told_by_the_stores_own_clock(store):
    store.put("key", b"x")
    stored = store.get("key")
    assert timedelta(seconds=-1) <= stored.store_time - stored.modified <= timedelta(seconds=60)
    assert stored.store_time.tzinfo is not None


def test_of_many_writers_one_wins_the_absent_key(store):
    writers = 6
    together = threading.Barrier(writers)

    def write(number):
        together.wait()
        try:
            store.put(f"race/{turn}", f"writer {number}".encode(), if_absent=True)
        except Conflict:
            return None
        return f"writer {number}".encode()

    with ThreadPoolExecutor(writers) as pool:
        for turn in range(10):
            winners = [w for w in pool.map(write, range(writers)) if w]
            assert [store.get(f"race/{turn}").data] == winners


def test_no_increment_by_compare_and_swap_is_lost(store):
    store.put("counter", b"0")

    def increment(number):
        done = 0
        while done < 10:
            seen = store.get("counter")
            # A nonce, as the contract asks for: two that write the same count could not tell whose it is.
            count = b"%d %d-%d" % (int(seen.data.split()[0]) + 1, number, done)
            try:
                store.put("counter", count, if_version=seen.version)
                done += 1
            except Conflict:
                continue

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(increment, range(4)))
    assert store.get("counter").data.split()[0] == b"40"


@pytest.fixture(params=["directory", "s3", "memory", "simulated"])
def large(request, tmp_path):
    """Also the store of the simulation, which checks no keys."""
    return Store(Loom()) if request.param == "simulated" else request.getfixturevalue("any_store")(request.param)


LARGE = random.Random(6).randbytes(2**20) * 40 + b"end"  # two parts


def test_pieces_are_written_as_one_object_and_their_sums_come_back(large):
    first, rest = memoryview(LARGE)[:1001], memoryview(LARGE)[1001:]
    assert large.write("a/large", (first, memoryview(b""), rest)) == Sums(
        size=41943043, crc32=(zlib.crc32(LARGE[: 32 * 2**20]), zlib.crc32(LARGE[32 * 2**20 :]))
    )
    assert large.get("a/large").data == LARGE
    assert large.list("") == ("a/large",)


def test_numbers_are_written_as_the_bytes_they_lie_in(large):
    numbers = array.array("d", range(5))
    large.write("numbers", (memoryview(numbers),))
    there = array.array("d", bytes(40))
    assert large.read_into("numbers", 0, memoryview(there))
    assert there == numbers


def test_an_object_without_a_byte_is_one(large):
    assert large.write("empty", ()) == Sums(size=0, crc32=())
    assert large.get("empty").data == b""
    assert large.read_into("empty", 0, memoryview(bytearray()))
    assert not large.read_into("missing", 0, memoryview(bytearray()))


def test_what_is_there_is_written_over(large):
    large.put("key", b"first and long")
    large.write("key", (memoryview(b"second"),))
    assert large.get("key").data == b"second"


def test_a_range_is_read_into_ready_memory(large):
    large.write("key", (memoryview(LARGE),))
    for at, length in ((0, 10), (7, 2**20), (32 * 2**20 - 5, 10), (5, len(LARGE) - 5), (len(LARGE) - 1, 1)):
        memory = bytearray(b"x" * (length + 2))
        assert large.read_into("key", at, memoryview(memory)[1:-1])
        assert memory[1:-1] == LARGE[at : at + length]
        assert memory[:1] + memory[-1:] == b"xx"


def test_a_range_beyond_the_end_or_of_a_missing_object_is_not_read(large):
    large.put("a/key", b"12345")
    for key, at in (("a/key", 1), ("a/key", 5), ("a/key", 99), ("a/missing", 0), ("a", 0), ("a/key/below", 0)):
        assert not large.read_into(key, at, memoryview(bytearray(5)))
    assert large.read_into("a/key", 0, memoryview(bytearray(5)))


def test_an_unknown_scheme_is_refused():
    for url in ("gs://bucket", "s3://", "", "file://host/path"):
        with pytest.raises(StoreError, match="names no store"):
            open_store(url)


def _lose_reply(store, monkeypatch, *, retried):
    """The next conditional write arrives, its reply is lost, and botocore's own retry (if any) meets the result."""
    real = store._client.put_object

    def put_object(**request):
        real(**request)
        if not retried:
            raise ReadTimeoutError(endpoint_url="s3")
        try:
            return real(**request)
        except ClientError as error:
            error.response["ResponseMetadata"]["RetryAttempts"] = 1
            raise

    monkeypatch.setattr(store._client, "put_object", put_object)


@pytest.mark.parametrize("retried", [True, False])
def test_a_write_whose_reply_was_lost_is_no_conflict_with_itself(s3, monkeypatch, retried):
    with monkeypatch.context() as lossy:
        _lose_reply(s3, lossy, retried=retried)
        version = s3.put("key", b"mine", if_absent=True)
        assert s3.put("key", b"mine too", if_version=version) != version
    assert s3.get("key").data == b"mine too"


def _collide(store, monkeypatch, *, times, first=lambda **request: None):
    """The next `times` conditional writes meet another one that is under way; `first` is what comes of it."""
    real, left, waits = store._client.put_object, [times], []

    def put_object(**request):
        if left[0] == 0:
            return real(**request)
        left[0] -= 1
        first(**request)
        raise ClientError(
            {"Error": {"Code": "ConditionalRequestConflict"}, "ResponseMetadata": {"HTTPStatusCode": 409}}, "Put"
        )

    monkeypatch.setattr(store._client, "put_object", put_object)
    monkeypatch.setattr(store, "_sleep", waits.append)
    return waits


def test_a_write_that_collides_is_no_conflict_and_is_tried_again(s3, monkeypatch):
    waits = _collide(s3, monkeypatch, times=3)
    s3.put("key", b"mine", if_absent=True)
    assert s3.get("key").data == b"mine"
    assert waits[:3] == [0.05, 0.1, 0.2]  # and longer where the lab's own collisions come on top


def test_a_write_that_collided_with_anothers_is_a_conflict(s3, monkeypatch):
    other = open_store(s3.url)
    _collide(s3, monkeypatch, times=1, first=lambda **request: other.put("key", b"theirs"))
    with pytest.raises(Conflict):
        s3.put("key", b"mine", if_absent=True)
    assert s3.get("key").data == b"theirs"
    other.close()


def test_collisions_without_an_end_are_an_error_that_may_pass_and_no_conflict(s3, monkeypatch):
    version = s3.put("key", b"first")
    waits = _collide(s3, monkeypatch, times=9)
    with pytest.raises(StoreError) as caught:
        s3.put("key", b"second", if_version=version)
    assert type(caught.value) is StoreError
    assert caught.value.may_pass
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert s3.get("key").data == b"first"


def test_a_retried_write_that_meets_anothers_bytes_is_a_conflict(s3, monkeypatch):
    s3.put("key", b"theirs")

    def refuse(**request):
        raise ClientError({"Error": {"Code": "PreconditionFailed"}, "ResponseMetadata": {"RetryAttempts": 1}}, "Put")

    monkeypatch.setattr(s3._client, "put_object", refuse)
    with pytest.raises(Conflict):
        s3.put("key", b"mine", if_absent=True)


@pytest.mark.parametrize(
    ("raised", "expected", "hint"),
    [
        (NoCredentialsError(), CredentialsError, "log in"),
        (SSOTokenLoadError(error_msg="gone"), CredentialsError, "log in"),
        (ClientError({"Error": {"Code": "ExpiredToken"}}, "Get"), CredentialsError, "log in"),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "Get"), StoreError, "let this identity"),
        (ReadTimeoutError(endpoint_url="s3"), StoreError, "network"),
    ],
)
def test_every_error_of_the_library_becomes_ours_with_a_hint(s3, monkeypatch, raised, expected, hint):
    def fail(*positional, **named):
        raise raised

    for name in ("get_object", "put_object", "delete_object", "get_paginator", "create_multipart_upload"):
        monkeypatch.setattr(s3._client, name, fail)
    for act in (
        lambda: s3.get("key"),
        lambda: s3.put("key", b"x"),
        lambda: s3.put("key", b"x", if_absent=True),
        lambda: s3.put("key", bytes(65 * 2**20)),
        lambda: s3.delete("key"),
        lambda: s3.list(""),
    ):
        with pytest.raises(expected) as caught:
            act()
        assert type(caught.value) is expected
        assert hint in caught.value.hint


def test_a_bucket_that_is_not_there_is_named(s3):
    other = open_store("s3://nothing-here/prefix")
    for act in (lambda: other.get("key"), lambda: other.put("key", b"x", if_absent=True), lambda: other.list("")):
        with pytest.raises(StoreError, match="nothing-here") as raised:
            act()
        assert "make the bucket" in raised.value.hint
    other.close()


def test_more_keys_than_a_page_holds_are_all_listed(s3):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: s3.put(f"many/{n:04d}", b""), range(1005)))
    assert len(s3.list("many/")) == 1005


def test_a_server_that_checks_sums_is_told_those_of_every_part(s3, lab, monkeypatch):
    monkeypatch.setattr(s3_module, "is_aws", lambda client: True)
    telling = open_store(s3.url)
    lab.faults.add("UploadPart", service="s3", code="SlowDown", times=1)
    lab.faults.add("UploadPart", service="s3", code="InternalError", status=500, times=1)
    lab.faults.add("CompleteMultipartUpload", service="s3", when="after", times=1)
    assert telling.write("told", (memoryview(LARGE),)).crc32 == (
        zlib.crc32(LARGE[: 32 * 2**20]), zlib.crc32(LARGE[32 * 2**20 :]),
    )  # fmt: skip
    assert telling.get("told").data == LARGE
    telling.close()


def test_an_object_larger_than_one_request_goes_up_in_parts(s3):
    data = bytes(range(256)) * (66 * 2**12)
    version = s3.put("large", memoryview(data))
    stored = s3.get("large")
    assert stored.version == version
    assert stored.data == data


def test_of_many_who_put_one_event_at_once_the_first_is_kept(store):
    at = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
    written = [Event(kind="ended", at=at, job="job", which="1", message=f"by {who}") for who in range(8)]
    log = EventLog(store, "job")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(log.put, written))
    (first,) = log.read()
    log.put(replace(first, message="by a later one"))

    assert log.read() == (first,)
    assert first in written
    assert log.read(frozenset({first.name})) == ()
