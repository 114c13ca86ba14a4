from __future__ import annotations

import json
import math
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.node.status import (
    Desired,
    Progress,
    Status,
    Stop,
    desired_from_json,
    desired_to_json,
    status_from_json,
    status_to_json,
)

WHOLE = Desired(epoch=3, launch=None, stop=Stop.SAVE, paid_until=datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc))

zones = st.sampled_from([timezone.utc, timezone(timedelta(hours=-7))])
times = st.datetimes(datetime(1971, 1, 1), datetime(2499, 12, 30), timezones=zones)  # noqa: DTZ001
# NaN is not equal to itself: it has a test of its own.
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(datetime, times)
st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))


@given(st.from_type(Desired))
def test_every_desired_survives_the_way_through_json(desired):
    assert desired_from_json(desired_to_json(desired)) == desired


@given(st.from_type(Status))
def test_every_status_survives_the_way_through_json(status):
    text = status_to_json(status)
    assert from_json(Status, text) == status
    assert "\n" not in text


def test_a_desired_is_this_text():
    assert desired_to_json(WHOLE) == '{"epoch":3,"launch":null,"stop":"save","paid_until":"2026-01-02T03:04:05+00:00"}'


@given(st.integers(min_value=0, max_value=len(desired_to_json(WHOLE)) - 1))
def test_a_desired_torn_anywhere_is_malformed(length):
    with pytest.raises(Malformed):
        desired_from_json(desired_to_json(WHOLE)[:length])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epoch", True, "Desired.epoch: expected int, found True"),
        ("epoch", "3", "Desired.epoch: expected int, found '3'"),
        ("stop", "perhaps", "Desired.stop: 'perhaps' is not a valid Stop"),
        ("paid_until", "2026-01-02T03:04:05", "Desired.paid_until: a time without its zone: 2026-01-02T03:04:05"),
        ("launch", [], "Desired.launch: expected an object, found a list"),
        ("launch", {"attempt": 1, "argv": "ls", "directory": "/", "env": []}, "argv: expected a list, found 'ls'"),
        ("launch", {"attempt": 1, "argv": [], "directory": "/", "env": [["A"]]}, "env[0]: expected 2 items, found 1"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(key, value, message):
    data = {**json.loads(desired_to_json(WHOLE)), key: value}
    with pytest.raises(Malformed) as caught:
        desired_from_json(json.dumps(data))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 100_000, b"", b"null", b"3"])
def test_no_bytes_raise_anything_but_malformed(text):
    with pytest.raises(Malformed):
        status_from_json(text)


def test_a_loss_that_is_not_a_number_is_valid_json_and_comes_back():
    progress = Progress(
        step=1,
        first_step=1,
        total_steps=None,
        loss=math.nan,
        phase="train",
        committed_step=None,
        step_seconds=math.inf,
        age_s=0.0,
    )
    text = to_json(progress)
    assert json.loads(text, parse_constant=pytest.fail)["loss"] == "nan"
    again = from_json(Progress, text)
    assert math.isnan(again.loss)
    assert again.step_seconds == math.inf


@pytest.mark.parametrize(("share", "is_so"), [(0.0, True), (0.4, True), (0.5, False), (-0.1, False)])
def test_a_share_of_the_paid_time_that_no_agent_leaves_early_is_believed_of_none(share, is_so):
    said = status_to_json(Status(heartbeat=1, epoch=1, boot_id="b", notice=None, attempt=None, leaves_share=share))
    if is_so:
        assert status_from_json(said).leaves_share == share
    else:
        with pytest.raises(Malformed):
            status_from_json(said)


@pytest.mark.parametrize("key", ["leaves_s", "leaves_at_most_s"])
@pytest.mark.parametrize(("leaves_s", "is_so"), [(0.0, True), (720.0, True), (-1.0, False), (1e300, False)])
def test_a_time_to_leave_that_cannot_be_is_believed_of_no_node(key, leaves_s, is_so):
    said = status_to_json(Status(heartbeat=1, epoch=1, boot_id="b", notice=None, attempt=None, **{key: leaves_s}))
    if is_so:
        assert getattr(status_from_json(said), key) == leaves_s
    else:
        with pytest.raises(Malformed):
            status_from_json(said)
