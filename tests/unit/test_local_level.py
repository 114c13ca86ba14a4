"""The embedded cloud's decisions."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

from gpucloud.adapters.local.node import settle
from gpucloud.adapters.local.records import (
    GroupRecord,
    NodeRecord,
    Settings,
    ended,
    group_from,
    node_from,
    noticed,
    settings_from,
    to_json,
)
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause, NodeState
from gpucloud.domain.offer import Pool

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
POOL = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)
GROUP = GroupRecord(
    name="gpucloud-digits",
    region="us-east-2",
    zones=("us-east-2a",),
    node_type="local.p3.2xlarge",
    market=Market.SPOT,
    tags=(("gpucloud:job", "digits"),),
    public_key="ssh-ed25519 AAAA",
    store="/store",
    size=2,
    pool=POOL,
    armed_until=NOW + timedelta(hours=1),
    launched=2,
)


def node(number: int) -> NodeRecord:
    return NodeRecord(
        id=f"i-{number:017x}",
        number=number,
        pool=POOL,
        launched_at=NOW - timedelta(minutes=5),
        address=f"127.0.0.{10 + number}",
        port=2200 + number,
        user="me",
        interface="lo",
        host_key="ssh-ed25519 AAAA",
        state=NodeState.RUNNING,
    )


TWO = (node(1), node(2))


def endings(group: GroupRecord, nodes: tuple[NodeRecord, ...], now: datetime = NOW) -> list[EndCause | None]:
    return [n.ending for n in settle(group, nodes, now).nodes]


def test_a_group_at_its_level_needs_nothing() -> None:
    step = settle(GROUP, TWO, NOW)
    assert (step.group, step.nodes, step.starts) == (GROUP, TWO, 0)


def test_missing_nodes_are_started() -> None:
    assert settle(GROUP, (), NOW).starts == 2


def test_relieved_ending_and_ended_nodes_are_replaced() -> None:
    for changed in (
        replace(node(1), relieved=True),
        replace(node(1), ending=EndCause.CHOICE),
        replace(node(1), state=NodeState.TERMINATED, ending=EndCause.CRASH),
    ):
        assert settle(GROUP, (changed, node(2)), NOW).starts == 1


def test_the_newest_surplus_is_ended_whatever_the_order() -> None:
    assert endings(replace(GROUP, size=1), (node(2), node(1))) == [EndCause.CHOICE, None]


def test_surplus_of_another_pool_than_the_groups_is_ended_before_the_newest() -> None:
    other = replace(POOL, market=Market.ON_DEMAND)
    assert endings(replace(GROUP, size=1, pool=other), (node(1), replace(node(2), pool=other))) == [
        EndCause.CHOICE,
        None,
    ]


def test_nothing_starts_unarmed_or_at_the_shut_off() -> None:
    assert settle(replace(GROUP, armed_until=None), (), NOW).starts == 0
    step = settle(replace(GROUP, armed_until=NOW), TWO, NOW)
    assert (step.group.size, step.starts) == (0, 0)
    assert [n.ending for n in step.nodes] == [EndCause.SCHEDULE, EndCause.SCHEDULE]


def test_a_node_is_taken_when_its_time_comes_and_not_before() -> None:
    nodes = (replace(node(1), interrupted_at=NOW), node(2))
    assert endings(GROUP, nodes, NOW - timedelta(microseconds=1)) == [None, None]
    assert endings(GROUP, nodes) == [EndCause.INTERRUPTED, None]


def test_what_ended_first_keeps_its_cause() -> None:
    nodes = (replace(node(1), ending=EndCause.CHOICE, interrupted_at=NOW), node(2))
    assert endings(replace(GROUP, armed_until=NOW), nodes) == [EndCause.CHOICE, EndCause.SCHEDULE]


def test_a_notice_names_a_whole_second_no_sooner_than_promised_and_stays() -> None:
    once = noticed(node(1), NOW + timedelta(microseconds=1), 4.0)
    assert once.interrupted_at == NOW + timedelta(seconds=5)
    assert noticed(once, NOW + timedelta(seconds=3), 4.0) == once
    assert noticed(node(1), NOW, 4.0).interrupted_at == NOW + timedelta(seconds=4)


def test_the_shut_off_is_not_charged_beyond_its_time() -> None:
    scheduled = replace(node(1), ending=EndCause.SCHEDULE)
    group = replace(GROUP, armed_until=NOW)
    assert ended(scheduled, group, NOW + timedelta(hours=8)).ended_at == NOW
    assert ended(replace(scheduled, ending=EndCause.CHOICE), group, NOW + timedelta(hours=8)).ended_at == NOW + (
        timedelta(hours=8)
    )


def test_records_survive_being_written() -> None:
    record = replace(noticed(node(1), NOW, 4.0), ending=EndCause.CRASH, ended_at=NOW, user_data_exit=3, frozen=True)
    assert group_from(to_json(GROUP)) == GROUP
    assert group_from(to_json(replace(GROUP, pool=None, armed_until=None))) == replace(
        GROUP, pool=None, armed_until=None
    )
    assert node_from(to_json(record)) == record
    settings = Settings(clock_factor=12.5, server=("sshd", "-D"), daemon=("keep", "--it"))
    assert settings_from(to_json(settings)) == settings
    assert settings_from(to_json(Settings())) == Settings()
