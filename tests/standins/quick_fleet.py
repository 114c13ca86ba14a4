"""The real command line over the embedded fleet with a job without torch, and with prepaid times made short."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from gpucloud.adapters.local.node import MARK
from gpucloud.adapters.local.records import Folder, GroupRecord
from gpucloud.domain.money.budget import PrepaidRule
from gpucloud.system import processes
from tests.commandline import CommandLine
from tests.emulation.group import CUTTABLE, OWN_SPACES, EmulatedGroup
from tests.emulation.rights import missing_right
from tests.standins import quick_trainer

GROUP = "gpucloud-small"

JOB = """\
name: small
code: code
run: train.py
launcher: plain
resources: {{nodes: {nodes}, gpus: 1}}
env: {{STEPS: "{steps}", STEP_S: "{step_s}", EVERY: "{every}"}}
budget: {budget}
"""

_HORIZON_S = PrepaidRule().horizon.total_seconds()


class QuickFleet(CommandLine):
    """`horizon_s`: for how long machines are paid ahead; None: as always."""

    def __init__(self, folder: Path, horizon_s: float | None = None, **environment: str) -> None:
        if horizon_s is not None:
            environment["GPUCLOUD_LOCAL_MONEY_FACTOR"] = f"{_HORIZON_S / horizon_s:g}"
        super().__init__(folder, **environment)

    def quick_job(
        self, *, steps: int, step_s: float, every: int = 5, budget: str = "1 USD", nodes: int | str = 2
    ) -> str:
        """Write the job and return its file."""
        code = self.folder / "code"
        code.mkdir(exist_ok=True)
        shutil.copy(quick_trainer.__file__, code / "train.py")
        file = self.folder / "small.yaml"
        file.write_text(JOB.format(steps=steps, step_s=step_s, every=every, budget=budget, nodes=nodes))
        return str(file)

    @property
    def group(self) -> EmulatedGroup:
        return EmulatedGroup(self.home / "cloud")

    @property
    def record(self) -> GroupRecord | None:
        """The group as the cloud keeps it."""
        with contextlib.suppress(FileNotFoundError):
            return Folder(self.home / "cloud").group(GROUP)
        return None

    def launched(self) -> list[str]:
        """The ids of all nodes that were ever started, in order."""
        return [node.id for node in self.group.describe(GROUP).nodes]

    def paid_for(self) -> set[str]:
        """The ids of all nodes that the job paid for, its group being gone."""
        return {one["node"] for one in self.run("cost", "small", "--json").json["by_node"]}

    def running_on(self, node_id: str) -> tuple[int, ...]:
        """The processes of a node."""
        return processes.marked(MARK, node_id)

    def agent_of(self, node_id: str) -> int:
        """The process of the node's agent, by its number here and not on the node."""
        for pid in self.running_on(node_id):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"agent" in words and b"--root" in words:
                    return pid
        raise AssertionError(f"{node_id} has no agent")

    def lines(self, rank: int) -> list[str]:
        """What a rank has written, over all attempts."""
        return self.run("logs", "small", "--rank", str(rank)).stdout.splitlines()

    def history(self) -> list[list[int]]:
        """Whose steps the finished job consists of: `[generation, the step it began from]`."""
        said = [line for line in self.lines(0) if line.startswith("history ")]
        return json.loads(said[-1].split(" ", 1)[1]) if said else []


@contextlib.contextmanager
def quick_fleet(
    folder: Path, *, horizon_s: float | None = None, daemon: tuple[str, ...] | None = None
) -> Iterator[QuickFleet]:
    """Give a fleet that this daemon keeps, the product's own if left out.

    Own spaces become loopback, and that is said, where the kernel has no namespaces for this user.
    """
    if daemon == OWN_SPACES and (why := missing_right()):
        sys.stderr.write(f"loopback, where nothing cuts the link between two machines: {why}\n")
        daemon = CUTTABLE
    # Without Terraform, which takes seconds to make the same group.
    line = QuickFleet(folder, horizon_s, PATH="/usr/bin:/bin")
    line.env.pop("GPUCLOUD_NODE", None)
    EmulatedGroup(line.home / "cloud", daemon=daemon)
    try:
        yield line
    finally:
        line.close()


def living(line: QuickFleet) -> list[str]:
    """The nodes of the fleet of which some process runs."""
    own = os.getpid()
    return [node for node in line.launched() if any(pid != own for pid in line.running_on(node))]
