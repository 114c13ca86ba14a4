"""Large objects to and from S3: what the network and the server can do to a part, and what comes of it."""

import datetime
import ipaddress
import random
import ssl
import sys
import tracemalloc
import zlib
from unittest import mock

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.errors import CredentialsError, DataStoreError, StoreError
from gpucloud.store import Sums, open_store, s3, s3parts
from gpucloud.store.s3client import Objects
from tests.standins import fast_bucket
from tests.standins.fast_bucket import Fault

PART = 1 << 16
DATA = random.Random(3).randbytes(3 * PART + 100)  # four parts
SUMS = Sums(size=len(DATA), crc32=tuple(zlib.crc32(DATA[at : at + PART]) for at in range(0, len(DATA), PART)))


@pytest.fixture(scope="module")
def standing():
    with fast_bucket.serving() as server:
        yield server


@pytest.fixture
def server(standing, small_parts):
    standing.reset()
    return standing


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, standing):
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "NO_PROXY", "no_proxy", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in standing.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", PART)
    monkeypatch.setattr(s3parts, "PART_BYTES", PART)


@pytest.fixture(scope="module")
def opened(standing):
    """One for all: boto3 takes its time over a client."""
    waited = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in standing.environment.items():
            patch.setenv(name, value)
        store = s3.S3Store("s3://bucket/below", sleep=waited.append)
        store._parts()
    yield store, waited
    store.close()


@pytest.fixture
def waited(opened):
    opened[1].clear()
    return opened[1]


@pytest.fixture
def store(server, opened):
    opened[0]._parts().moves.avoided_until = 0.0
    return opened[0]


def write(store, data=DATA):
    return store.write("key", (memoryview(data),))


def read(store, at=0, length=None):
    memory = bytearray(len(DATA) if length is None else length)
    return bytes(memory) if store.read_into("key", at, memoryview(memory)) else None


def test_parts_go_up_and_come_back(server, store):
    assert write(store) == SUMS
    assert server.data("bucket/below/key") == DATA
    assert read(store) == DATA
    assert sorted(server.actions()) == [
        "CompleteMultipartUpload", "CreateMultipartUpload", *["GetObject"] * 4, *["UploadPart"] * 4,
    ]  # fmt: skip
    assert all(request.signed_in_url for request in server.requests if request.action in ("UploadPart", "GetObject"))


def test_an_object_of_one_part_goes_up_with_one_request(server, store):
    assert write(store, DATA[:PART]) == Sums(size=PART, crc32=SUMS.crc32[:1])
    assert server.actions() == ["PutObject"]
    assert server.data("bucket/below/key") == DATA[:PART]


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (500, "InternalError"), (400, "RequestTimeout"), (400, "BadDigest"), (429, "")],
)
@pytest.mark.parametrize("how", ["refused", "early"])
def test_a_busy_server_is_asked_again_after_a_wait(server, store, waited, status, code, how):
    server.faults = [
        Fault(action="UploadPart", how=how, status=status, code=code, times=2),
        Fault(action="GetObject", how=how, status=status, code=code, times=1),
    ]
    assert write(store) == SUMS
    assert read(store) == DATA
    assert len(waited) == 3
    assert all(0 <= wait_s <= 0.4 for wait_s in waited)


@pytest.mark.parametrize("how", ["reset", "lost"])
def test_a_part_whose_connection_breaks_is_sent_again(server, store, how):
    server.faults = [Fault(action="UploadPart", how=how, times=2, skip=1)]
    assert write(store) == SUMS
    assert server.data("bucket/below/key") == DATA
    assert server.actions().count("UploadPart") == 6


@pytest.mark.parametrize("how", ["cut", "lost", "reset"])
def test_an_answer_that_ends_early_is_asked_for_again(server, store, how):
    write(store)
    server.faults = [Fault(action="GetObject", how=how, times=3)]
    assert read(store) == DATA
    assert server.actions().count("GetObject") == 7


BUSY = ClientError({"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}, "ListObjectsV2")


@pytest.mark.parametrize(
    ("error", "unreached"), [(EndpointConnectionError(endpoint_url="https://s3.example"), "s3://data"), (BUSY, None)]
)
def test_a_bucket_of_data_that_is_not_reached_is_told_from_one_that_is_busy(monkeypatch, error, unreached):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    bucket = Objects("s3://data/x")
    monkeypatch.setattr(bucket, "_client", mock.Mock(get_paginator=mock.Mock(side_effect=error)))
    with pytest.raises(DataStoreError) as raised:
        bucket.listed()
    assert (raised.value.unreached, raised.value.may_pass) == (unreached, True)


@pytest.mark.parametrize(("action", "how"), [("GetObject", "cut"), ("UploadPart", "reset"), ("UploadPart", "refused")])
def test_patience_ends_with_an_error_that_may_pass(server, store, waited, action, how):
    write(store)
    server.faults = [Fault(action=action, how=how, times=1000)]
    with pytest.raises(StoreError) as raised:
        write(store) if action == "UploadPart" else read(store)
    assert type(raised.value) is StoreError
    assert raised.value.may_pass
    assert 7 <= len(waited) <= 28  # of each part that was tried
    assert max(waited) <= 10
    assert not server.uploads  # nothing is left that costs money
    assert server.data("bucket/below/key") == DATA  # and what was there still is


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (403, "RequestExpired"), (400, "ExpiredToken")])
@pytest.mark.parametrize("how", ["refused", "early"])
def test_an_expired_signature_is_made_anew(server, store, waited, status, code, how):
    server.faults = [Fault(action="UploadPart", how=how, status=status, code=code, skip=2)]
    assert write(store) == SUMS
    server.faults = [Fault(action="GetObject", how=how, status=status, code=code)]
    assert read(store) == DATA
    assert waited == []
    assert all(request.signed_in_url for request in server.requests if request.action in ("UploadPart", "GetObject"))


def test_where_signatures_in_urls_are_forbidden_boto3_sends_and_the_urls_are_left_alone(server, store):
    server.refuse = lambda request: request.signed_in_url
    assert write(store) == SUMS
    assert server.data("bucket/below/key") == DATA
    assert read(store) == DATA
    before = len(server.requests)
    assert store.write("small", (memoryview(b"abc"), memoryview(b"def"))).size == 6
    assert server.data("bucket/below/small") == b"abcdef"
    assert not store.read_into("small", 4, memoryview(bytearray(3)))
    assert not store.read_into("missing", 4, memoryview(bytearray(3)))
    assert not any(request.signed_in_url for request in server.requests[before:])


def test_what_is_forbidden_altogether_is_an_error_with_its_hint(server, store):
    server.refuse = lambda request: request.action in ("UploadPart", "GetObject")
    with pytest.raises(StoreError, match="AccessDenied") as raised:
        write(store)
    assert "let this identity" in raised.value.hint
    assert not raised.value.may_pass
    assert not server.uploads
    with pytest.raises(StoreError, match="AccessDenied"):
        read(store)


def test_a_caller_whom_nobody_knows_is_told_so(server, store):
    server.faults = [Fault(action="PutObject", how="refused", status=403, code="InvalidAccessKeyId", times=9)]
    with pytest.raises(CredentialsError):
        write(store, b"x")


def test_a_refusal_that_no_wait_mends_is_told_at_once(server, store, waited):
    server.faults = [Fault(action="PutObject", how="refused", status=404, code="NoSuchBucket", times=9)]
    with pytest.raises(StoreError, match="NoSuchBucket") as raised:
        write(store, b"x")
    assert "make the bucket" in raised.value.hint
    assert waited == []


def test_a_completion_whose_reply_was_lost_is_found_by_the_etag(server, store):
    server.faults = [Fault(action="CompleteMultipartUpload", how="lost")]
    assert write(store) == SUMS
    assert server.data("bucket/below/key") == DATA
    assert server.actions().count("UploadPart") == 4


def test_a_completion_whose_reply_was_lost_is_found_by_its_sums(server, monkeypatch):
    monkeypatch.setattr(s3, "is_aws", lambda client: True)
    store = open_store("s3://bucket/below")
    server.etags_are_md5 = False
    server.faults = [Fault(action="CompleteMultipartUpload", how="lost")]
    assert write(store) == SUMS
    assert server.actions().count("UploadPart") == 4
    store.close()


def test_where_nobody_can_tell_what_a_lost_reply_said_the_object_goes_up_once_more(server, store):
    server.etags_are_md5 = False
    server.faults = [Fault(action="CompleteMultipartUpload", how="lost")]
    assert write(store) == SUMS
    assert server.data("bucket/below/key") == DATA
    assert server.actions().count("UploadPart") == 8


def test_another_object_in_its_place_is_not_taken_for_ours(server, store):
    store.write("key", (memoryview(DATA[::-1]),))
    server.faults = [Fault(action="CompleteMultipartUpload", how="refused", status=404, code="NoSuchUpload", times=2)]
    with pytest.raises(StoreError, match="NoSuchUpload"):
        write(store)
    assert server.data("bucket/below/key") == DATA[::-1]


def test_every_part_says_its_crc32_where_the_server_checks_it(server, monkeypatch):
    monkeypatch.setattr(s3, "is_aws", lambda client: True)
    store = open_store("s3://bucket/below")
    assert write(store) == SUMS
    write_one = store.write("one", (memoryview(b"abc"),))
    assert write_one.crc32 == (zlib.crc32(b"abc"),)
    said = [r for r in server.requests if r.action in ("UploadPart", "PutObject")]
    assert len(said) == 5
    assert all("x-amz-checksum-crc32" in request.headers for request in said)
    assert all("x-amz-checksum-crc32" in request.query["X-Amz-SignedHeaders"] for request in said)
    store.close()


def test_connections_are_kept_and_ones_that_the_server_closed_are_not_used(server, store):
    write(store)
    for _ in range(5):
        assert read(store) == DATA
    assert server.connections <= 17  # boto3's, and one for each thread
    server.hang_up()
    assert read(store) == DATA
    assert store._parts().moves.wire._idle


def test_a_server_without_ranges_is_an_error_and_no_damage(server, store):
    write(store)
    server.knows_ranges = False
    for at, length in ((10, 5), (0, 5), (10, len(DATA))):
        with pytest.raises(StoreError, match="when asked for a range"):
            read(store, at, length)
    store.write("key", (memoryview(b"short"),))
    assert read(store, 0, 5) == b"short"
    assert read(store, 0, 6) is None


def test_more_parts_than_s3_takes_are_refused_before_anything_is_sent(server, store, monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 1)
    with pytest.raises(StoreError, match="10000 parts"):
        write(store, bytes(10_001))
    assert server.requests == []


def test_a_proxy_is_left_to_boto3(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://s3.behind.invalid")
    store = open_store("s3://bucket/below")
    assert write(store) == SUMS
    assert read(store) == DATA
    assert not any(request.signed_in_url for request in server.requests)
    store.close()


def test_a_server_that_no_proxy_is_for_is_spoken_to_directly(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    store = open_store("s3://bucket/below")
    assert write(store) == SUMS
    assert all(request.signed_in_url for request in server.requests if request.action == "UploadPart")
    store.close()


def test_tls_trusts_whom_boto3_trusts(tmp_path, monkeypatch, small_parts):
    certificate = own_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with fast_bucket.serving(context) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        distrusting = s3.S3Store("s3://bucket/below", sleep=lambda seconds: None)
        with pytest.raises(StoreError):
            write(distrusting, b"abc")
        distrusting.close()
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        store = open_store("s3://bucket/below")
        assert write(store) == SUMS
        assert read(store) == DATA
        store.close()


def test_authorities_that_cannot_be_read_are_named(server, monkeypatch, tmp_path):
    store = open_store("s3://bucket/below")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing"))
    store = open_store("s3://bucket/below")
    with pytest.raises(StoreError, match="missing") as raised:
        write(store, b"abc")
    assert "AWS_CA_BUNDLE" in raised.value.hint
    store.close()


def test_credentials_that_come_to_their_end_are_renewed_between_parts(server, monkeypatch, tmp_path):
    script = tmp_path / "credentials.py"
    script.write_text(
        "import datetime, json, uuid\n"
        "end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=11)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'a', 'SecretAccessKey': 'b',"
        " 'SessionToken': uuid.uuid4().hex, 'Expiration': end.isoformat()}))\n"
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = open_store("s3://bucket/below")
    assert write(store) == SUMS
    tokens = {r.query["X-Amz-Security-Token"] for r in server.requests if r.action == "UploadPart"}
    assert len(tokens) > 1  # botocore renews what ends within 15 minutes
    store.close()


def test_a_bound_holds_for_all_threads_together(server):
    waits = []
    store = open_store("s3://bucket/below", bytes_per_s=1e6)
    store._pace._sleep = waits.append
    store._pace._now = lambda: 0.0
    store._pace._free_at = 0.0
    assert write(store) == SUMS
    assert max(waits) == pytest.approx((len(DATA) - PART) / 1e6, abs=PART / 1e6)
    store.close()


def test_nothing_is_copied(standing, opened):
    standing.reset()
    store = opened[0]
    data, back = memoryview(bytearray(70 << 20)), memoryview(bytearray(70 << 20))
    write(store, b"first")  # what is imported and opened once
    theirs = 70 << 20  # the server lives in this process
    tracemalloc.start()
    try:
        store.write("large", (data,))
        assert store.read_into("large", 0, back)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - theirs < 8 << 20


def own_certificate(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "own.pem").write_bytes(pem + made.public_bytes(serialization.Encoding.PEM))
    return folder / "own.pem"
