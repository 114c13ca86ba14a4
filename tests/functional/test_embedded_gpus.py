"""The embedded cloud on a machine with GPUs: a stand-in nvidia-smi prints a genuine recording of four H200."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.market import type_with
from gpucloud.adapters.local.records import Folder
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Fault, Node
from gpucloud.domain.offer import Pool
from tests.standins.embedded import make_cloud, poll, running

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])

GROUP = "gpucloud-gpus"
RECORDED = Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml"
UUIDS = [f"GPU-{i:08}-0000-0000-0000-{i:012}" for i in range(4)]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalNodeGroup]:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncat {RECORDED}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    nodes = make_cloud(tmp_path / "cloud", GROUP, user_data='echo "$CUDA_VISIBLE_DEVICES" >"$HOME/devices"')
    yield nodes
    nodes.purge(GROUP)


def start(cloud: LocalNodeGroup, size: int, gpus: int) -> None:
    pool = Pool(instance_type=type_with(gpus), zone="us-east-2a", market=Market.SPOT)
    cloud.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    cloud.resize(GROUP, size, pool)


def devices_seen(tmp_path: Path, node: Node) -> str:
    path = Folder(tmp_path / "cloud").node_folder(GROUP, node.id) / "home" / "devices"
    poll(lambda: path.exists() and path.read_text().endswith("\n"))
    return path.read_text().strip()


def test_each_node_sees_gpus_of_its_own(cloud: LocalNodeGroup, tmp_path: Path) -> None:
    start(cloud, 2, gpus=2)
    poll(lambda: len(running(cloud.describe(GROUP))) == 2)
    nodes = running(cloud.describe(GROUP))
    assert sorted(uuid for node in nodes for uuid in node.devices) == UUIDS
    assert [devices_seen(tmp_path, node) for node in nodes] == [",".join(node.devices) for node in nodes]


def test_a_node_for_which_no_gpu_is_free_is_not_started_and_the_cloud_says_why(cloud: LocalNodeGroup) -> None:
    start(cloud, 2, gpus=3)
    poll(lambda: bool(running(cloud.describe(GROUP)) and cloud.describe(GROUP).refusals))
    view = cloud.describe(GROUP)
    assert len(view.alive) == 1
    (refusal,) = view.refusals
    assert refusal.fault is Fault.CAPACITY
    assert refusal.message == "a node needs 3 GPUs; those of this machine (4) are in use"


def test_a_node_in_place_of_one_that_is_taken_gets_its_gpus_when_it_is_gone(cloud: LocalNodeGroup) -> None:
    start(cloud, 2, gpus=2)
    poll(lambda: len(running(cloud.describe(GROUP))) == 2)
    taken, kept = running(cloud.describe(GROUP))
    cloud.interrupt(GROUP, taken.id, notice=True)
    cloud.relieve(GROUP, taken.id)
    poll(lambda: {node.id for node in running(cloud.describe(GROUP))} - {taken.id, kept.id} != set())
    (new,) = [node for node in running(cloud.describe(GROUP)) if node.id not in (taken.id, kept.id)]
    assert new.devices == taken.devices
    assert cloud.describe(GROUP).refusals == ()


def test_a_node_of_a_type_without_gpus_sees_none(cloud: LocalNodeGroup, tmp_path: Path) -> None:
    cloud.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=10))
    cloud.resize(GROUP, 1, Pool(instance_type="local.p2.xlarge", zone="us-east-2a", market=Market.SPOT))
    poll(lambda: len(running(cloud.describe(GROUP))) == 1)
    (node,) = running(cloud.describe(GROUP))
    assert node.devices == ()
    assert devices_seen(tmp_path, node) == ""
