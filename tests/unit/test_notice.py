from __future__ import annotations

from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.node.node import Notice, notice_from, recommended_at

AT = datetime(2017, 9, 18, 8, 22, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("document", "at"),
    [
        ('{"noticeTime": "2017-09-18T08:22:00Z"}', AT),
        ('{"noticeTime": "soon"}', None),
        ('{"time": "2017-09-18T08:22:00Z"}', None),
        ("404 - Not Found", None),
        ("[]", None),
        ("[" * 100_000, None),
    ],
)
def test_a_recommendation_to_leave_is_read_from_ec2s_document_and_from_no_other(document, at):
    assert recommended_at(document) == at


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_the_document_of_ec2_is_a_notice(action):
    document = f'{{"action": "{action}", "time": "2017-09-18T08:22:00Z"}}'
    assert notice_from(document) == Notice(action=action, at=AT)


def test_a_time_with_another_zone_is_the_same_moment_in_utc():
    assert notice_from('{"action": "stop", "time": "2017-09-18T01:22:00-07:00"}').at.isoformat() == AT.isoformat()


@pytest.mark.parametrize(
    "document",
    [
        "",
        "404 - Not Found",
        "[]",
        "{}",
        '{"action": "reboot", "time": "2017-09-18T08:22:00Z"}',
        '{"action": ["terminate"], "time": "2017-09-18T08:22:00Z"}',
        '{"action": "terminate"}',
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": 1505722920}',
        '{"action": "terminate", "time": "0001-01-01T00:00:00+14:00"}',
        '{"noticeTime": "2017-09-18T08:22:00Z"}',
    ],
)
def test_a_document_that_says_nothing_known_is_no_notice(document):
    assert notice_from(document) is None


@given(st.text())
def test_no_text_raises(document):
    notice_from(document)
