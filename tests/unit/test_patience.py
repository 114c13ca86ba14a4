"""What S3's answers to a part mean, how long is waited, how fast bytes leave, and memory as a file."""

import io
import random

import pytest

from gpucloud.store.parts import Pace
from gpucloud.store.s3parts import EACH_PART, Meaning, PartFile, meaning, said


def body(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no &amp; no</Message></Error>".encode()


@pytest.mark.parametrize(
    ("status", "code", "refused_before", "expected"),
    [
        (200, None, False, Meaning.DONE),
        (206, None, True, Meaning.DONE),
        (503, "SlowDown", False, Meaning.BUSY),
        (500, None, False, Meaning.BUSY),
        (429, None, True, Meaning.BUSY),
        (400, "RequestTimeout", False, Meaning.BUSY),
        (400, "BadDigest", False, Meaning.BUSY),
        (403, "AccessDenied", False, Meaning.UNSIGNED),
        (403, "AccessDenied", True, Meaning.BY_BOTO3),
        (400, "ExpiredToken", False, Meaning.UNSIGNED),
        (400, "ExpiredToken", True, Meaning.BY_BOTO3),
        (301, "PermanentRedirect", False, Meaning.BY_BOTO3),
        (307, "TemporaryRedirect", False, Meaning.BY_BOTO3),
        (400, "AuthorizationQueryParametersError", False, Meaning.BY_BOTO3),
        (404, "NoSuchUpload", False, Meaning.REFUSED),
        (400, "EntityTooLarge", False, Meaning.REFUSED),
        (416, "InvalidRange", False, Meaning.REFUSED),
    ],
)
def test_an_answer_is_understood(status, code, refused_before, expected):
    assert meaning(status, body(code) if code else b"", refused_before=refused_before) is expected


def test_a_refusal_says_its_code_and_message():
    assert said(body("SlowDown")) == ("SlowDown", "no &amp; no")
    assert said(b"not XML") == ("", "")


def test_waits_grow_to_ten_seconds_and_end_after_eight_tries():
    class Longest(random.Random):
        def uniform(self, low, high):
            return high

    assert waited(Longest()) == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10])


def test_no_two_waits_are_alike():
    assert len(set(waited(random.Random(1)))) == 7


def waited(dice):
    slept = []
    tries = EACH_PART.begin(slept.append, dice=dice)
    while tries.again():
        pass
    return slept


def test_bytes_leave_no_faster_than_the_bound_after_a_pause_too():
    clock, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    pace = Pace(100, now=lambda: clock[0], sleep=sleep)
    for _ in range(10):
        pace.wait_for(50)
    assert clock[0] == pytest.approx(4.5)  # the first leaves at once
    clock[0] = 100.0
    pace.wait_for(50)
    pace.wait_for(50)
    assert clock[0] == pytest.approx(100.45)  # a pause earns a twentieth of a second, no more


def test_without_a_bound_nothing_waits():
    Pace(sleep=lambda seconds: pytest.fail("slept")).wait_for(10**12)


def test_memory_is_read_as_a_file_and_gone_back_in():
    file = PartFile((memoryview(b"0123"), memoryview(b"45"), memoryview(b"6789")))
    assert file.readable()
    assert file.seekable()
    assert file.read(3) == b"012"
    assert file.read() == b"3456789"
    assert file.read(1) == b""
    assert (file.seek(5), file.read(2), file.read(2)) == (5, b"5", b"67")
    assert (file.seek(0, io.SEEK_END), file.tell()) == (10, 10)
    assert (file.seek(-3, io.SEEK_CUR), file.read()) == (7, b"789")


def test_no_memory_is_an_empty_file():
    assert PartFile(()).read() == b""
