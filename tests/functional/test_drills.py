"""`gpucloud local interrupt|kill|freeze NODE`, over an embedded cloud without a job."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.records import Folder, NodeRecord
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import EndCause
from gpucloud.domain.offer import Pool
from tests.commandline import CommandLine
from tests.standins.embedded import make_cloud, poll, running

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])
GROUP = "gpucloud-contract"
POOL = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[CommandLine]:
    cloud = make_cloud(tmp_path / "home" / "cloud", GROUP)
    cloud.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    cloud.resize(GROUP, 1, POOL)
    poll(lambda: len(running(cloud.describe(GROUP))) == 1)
    yield CommandLine(tmp_path)
    cloud.purge(GROUP)


def record(line: CommandLine, node_id: str) -> NodeRecord:
    found = Folder(line.home / "cloud").node(GROUP, node_id)
    assert found is not None
    return found


def test_a_node_is_frozen_noticed_and_taken_by_its_name(line):
    group = LocalNodeGroup(line.home / "cloud")
    (node,) = group.describe(GROUP).alive
    assert line.run("local", "freeze", node.id).stdout == f"{node.id}: frozen\n"
    assert record(line, node.id).frozen
    noticed = line.run("local", "interrupt", node.id, "--json")
    assert noticed.json == {"version": 1, "job": "contract", "node": node.id, "done": "noticed"}
    assert record(line, node.id).noticed_at is not None
    assert line.run("local", "kill", node.id).stdout == f"{node.id}: lost\n"
    poll(lambda: record(line, node.id).ended_at is not None)
    assert record(line, node.id).ending is EndCause.INTERRUPTED


def test_a_node_that_no_group_has_is_refused_in_one_line(line):
    answer = line.run("local", "kill", "i-00000000000000000")
    assert answer.code == 2
    assert answer.stderr.splitlines()[0].endswith("no machine of the embedded fleet is called i-00000000000000000")
