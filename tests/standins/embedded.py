"""An embedded cloud whose nodes run a stand-in for the SSH server, and ways to look at it from outside."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpucloud.adapters.local.group import LocalNodeGroup
from gpucloud.adapters.local.provision import ensure_group
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import GroupView, Node, NodeState
from gpucloud.ports import ClusterSpec

STAND_IN = (sys.executable, str(Path(__file__).with_name("ssh_banner.py")))


def make_cloud(
    root: Path,
    group: str,
    *,
    user_data: str = "",
    clock_factor: float = 240.0,
    server: tuple[str, ...] | None = STAND_IN,
    daemon: tuple[str, ...] | None = None,
) -> LocalNodeGroup:
    """Return a cloud with one empty group; its notices are 0.5 s long (and up to a second more)."""
    spec = spec_of(group)
    assert ensure_group(root, spec, user_data=user_data) == group
    return LocalNodeGroup(root, clock_factor=clock_factor, server=server, daemon=daemon)


def spec_of(group: str) -> ClusterSpec:
    """Return what a group is made from."""
    return ClusterSpec(
        name=group,
        region="us-east-2",
        zones=("us-east-2a", "us-east-2b"),
        node_type="local.p3.2xlarge",
        market=Market.SPOT,
        tags=(("gpucloud:job", "contract"),),
        public_key="ssh-ed25519 AAAA",
        store="/nowhere",
    )


def poll(wanted: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Return as soon as it is as wanted; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not wanted():
        assert time.monotonic() < deadline, "never so"
        time.sleep(0.01)


def running(view: GroupView) -> tuple[Node, ...]:
    return tuple(node for node in view.nodes if node.state is NodeState.RUNNING)


def daemons(root: Path) -> list[int]:
    """Return the pids of the daemons that work on `root`; a child that has not yet become its own program is none."""
    shown = subprocess.run(["ps", "-axww", "-o", "pid=,ppid=,command="], capture_output=True, text=True).stdout
    lines = (line.split(None, 2) for line in shown.splitlines())
    found = {
        int(pid): int(parent)
        for pid, parent, command in lines
        if command.startswith((f"{sys.executable} -m ", f"{sys.executable} -c "))
        and f" --root {root} --lock " in command
    }
    return [pid for pid, parent in found.items() if parent not in found]
