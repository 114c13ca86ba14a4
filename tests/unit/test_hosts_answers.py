"""What own hosts answer: one that nobody can use is a fault of that host, and ends nothing here."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gpucloud.adapters.hosts.group import Asking, Order, why_not
from gpucloud.domain.errors import NodeError
from gpucloud.ports import Completed
from tests.unit.worlds import NOW, node

HOLDER = {"until": 1763983245.5, "devices": ["0"], "job": "digits", "owner": "ann@box"}


def answered(answer: object) -> Any:
    done = Completed(exit_code=0, stdout=json.dumps(answer).encode() + b"\n", stderr=b"")
    host = SimpleNamespace(run=lambda *_, **__: done, close=lambda: None)
    asking = Asking(lambda: SimpleNamespace(host=lambda _: host, close=lambda: None))  # type: ignore[arg-type, return-value]
    (said,) = asking.ask([Order(node=node("a"), order={"do": "take"})])
    return said


@pytest.mark.parametrize(
    "answer",
    [
        {"address": "10.0.0.1"},
        {"address": None},
        {"held": HOLDER},
        {"store": "missing", "folder": "/s"},
        {"left": ["/x"]},
    ],
)
def test_what_a_host_may_answer_is_taken_as_it_is(answer: dict[str, Any]) -> None:
    assert answered(answer) == answer


@pytest.mark.parametrize(
    "answer",
    [
        {"held": {**HOLDER, "until": 1e300}},
        {"held": {**HOLDER, "until": float("nan")}},
        {"held": {**HOLDER, "until": "later"}},
        {"held": {**HOLDER, "devices": [1]}},
        {"held": {**HOLDER, "job": None}},
        {"held": {"devices": []}},
        {"held": "ann"},
        {"left": [1]},
        {"left": 5},
        {"store": False},
        {"store": "gone"},
        {"store": "missing", "folder": 5},
        {"address": 5},
        {},
        5,
    ],
)
def test_words_that_cannot_be_are_the_hosts_own_fault(answer: object) -> None:
    said = answered(answer)
    assert isinstance(said, NodeError)
    assert "an answer that is none" in said.message


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("missing", "there is no /s, the store's folder: a folder that all hosts share, or store: s3://bucket/prefix"),
        (
            "another",
            "/s is another folder there than the store's here: a folder that all hosts share,"
            " or store: s3://bucket/prefix",
        ),
        (
            "unreadable",
            "bob may not read /s, the store's folder of ann: log in as ann, or store: s3://bucket/prefix",
        ),
        (
            "unwritable",
            "bob may not write to /s, the store's folder of ann: log in as ann, or mount it for writing,"
            " or store: s3://bucket/prefix",
        ),
    ],
)
def test_a_store_that_a_host_cannot_use_is_told_with_who_may_not_and_what_helps(fault: str, why: str) -> None:
    answer = {"store": fault, "folder": "/s", "login": "bob", "owner": "ann"}
    assert why_not(answer, NOW) == (why, True)
