"""What is stored is read by the gpucloud that means the same by it, and by no other; nothing in it is ever dropped."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass

import pytest

from gpucloud.domain.codec import Malformed, OtherVersion, from_json, plain, to_json
from gpucloud.domain.errors import StoreError
from gpucloud.domain.node.status import Desired, Stop, desired_from_json, desired_to_json
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import JobState
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.lease import take
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.unit.worlds import NOW, opened, order, put_job, state


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    a: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outer:
    version: int = 3
    one: _Inner
    many: tuple[_Inner, ...] = ()


def text(**changes):
    return json.dumps({"version": 3, "one": {"a": 1}, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"new": 1}, "'new' not known"),
        ({"one": {"a": 1, "b": 2}}, "_Outer.one: 'b' not known"),
        ({"many": [{"a": 1}, {"a": 1, "b": 2}]}, r"many\[1\]: 'b' not known"),
    ],
)
def test_a_key_that_is_not_known_is_refused_wherever_it_stands(changes, said):
    with pytest.raises(Malformed, match=said):
        from_json(_Outer, text(**changes))
    assert from_json(_Outer, text(**changes), of_any_version=True).one == _Inner(a=1)


@pytest.mark.parametrize("found", [4, 2, 0, True, "3", None])
def test_another_version_is_told_before_anything_else_is_looked_at(found):
    with pytest.raises(OtherVersion, match=f"version {found!r}, and this gpucloud knows version 3"):
        from_json(_Outer, text(version=found, one="something else by then", new=1))


def test_what_has_no_version_is_of_none():
    with pytest.raises(OtherVersion, match="version 0, and this gpucloud knows version 3"):
        from_json(_Outer, '{"one": {"a": 1}}')


def test_an_agent_hears_a_newer_supervisor():
    told = {**plain(Desired(epoch=4, launch=None, stop=Stop.NO, paid_until=NOW)), "new": 1}
    assert desired_from_json(json.dumps(told)).epoch == 4
    assert desired_from_json(desired_to_json(Desired(epoch=4, launch=None, stop=Stop.NO, paid_until=NOW))).epoch == 4


@pytest.fixture
def jobs():
    jobs = JobStore(MemoryStore(JumpingClock(NOW)), "digits")
    put_job(jobs, state(attempts=(opened("a"),)))
    return jobs


def written_by_a_newer_one(jobs, **changes):
    key = "jobs/digits/state.json"
    stored = jobs.store.get(key)
    jobs.store.put(key, json.dumps({**json.loads(stored.data), **changes}).encode(), if_version=stored.version)
    return jobs.store.get(key)


def test_an_older_gpucloud_stops_at_a_newer_state_with_one_line_and_writes_nothing(jobs):
    before = written_by_a_newer_one(jobs, version=2, owner={"another": "shape"})

    with pytest.raises(StoreError) as refused:
        take(jobs, JumpingClock(NOW))

    assert "state.json is of version 2, and this gpucloud knows version 1" in refused.value.message
    assert "\n" not in refused.value.message
    assert "pip install -U gpucloud" in refused.value.hint
    assert jobs.store.get("jobs/digits/state.json").version == before.version


def test_a_state_with_something_unknown_in_it_is_not_written_without_it(jobs):
    before = written_by_a_newer_one(jobs, tomorrow=True)

    with pytest.raises(StoreError, match="'tomorrow' not known"):
        take(jobs, JumpingClock(NOW))
    assert jobs.store.get("jobs/digits/state.json").version == before.version


def test_a_bill_of_another_version_is_in_no_sum(jobs):
    jobs.bill("a", ())
    (key,) = (key for key in jobs.store.list("jobs/digits/") if key.endswith("a.json"))
    jobs.store.put(key, b'{"version":2,"charges":"something else"}')

    with pytest.raises(StoreError, match="version 2, and this gpucloud knows version 1"):
        jobs.charges()


@pytest.mark.parametrize("kind", [JobState, Order])
def test_what_decides_carries_a_version(kind):
    assert is_dataclass(kind)
    assert {"version"} <= {field.name for field in fields(kind)}


def test_what_was_written_is_read_back():
    assert from_json(Order, to_json(order())) == order()
    assert from_json(JobState, to_json(state(attempts=(opened("a"),)))) == state(attempts=(opened("a"),))


def test_what_is_no_object_has_no_version():
    assert from_json(tuple[str, ...], '["a"]') == ("a",)
    with pytest.raises(Malformed):
        from_json(tuple[str, ...], '{"version": 2}')
