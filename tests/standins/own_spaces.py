"""A small fleet of nodes with namespaces of their own and real SSH servers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from gpucloud.adapters.keys import generate_key
from gpucloud.adapters.local.provision import ensure_group
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.job.spec import Market
from gpucloud.domain.node.node import Node
from gpucloud.domain.offer import Pool
from gpucloud.ports import Host
from tests.emulation.group import EmulatedGroup, own_spaces
from tests.standins.embedded import poll, running, spec_of

GROUP = "gpucloud-spaces"
POOL = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)


@dataclass
class Spaces:
    """A group of nodes with namespaces of their own, and a way in."""

    root: Path
    cloud: EmulatedGroup
    shell: SshShell

    def size(self, size: int, *, minutes: float = 10) -> tuple[Node, ...]:
        """Have so many nodes and return them once they run."""
        self.cloud.arm(GROUP, datetime.now(timezone.utc) + timedelta(minutes=minutes))
        self.cloud.resize(GROUP, size, POOL)
        poll(lambda: len(running(self.cloud.describe(GROUP))) == size, limit_s=30)
        return running(self.cloud.describe(GROUP))

    def host(self, node: Node) -> Host:
        return self.shell.host(node)

    def says(self, node: Node, *argv: str) -> str:
        """What a command says on the node; it has to succeed."""
        done = self.host(node).run(argv)
        assert done.exit_code == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def python(self, node: Node, text: str) -> str:
        return self.says(node, sys.executable, "-I", "-S", "-c", text)


@contextlib.contextmanager
def spaces(root: Path, *, home_mib: int = 0, connect_s: float = 3.0) -> Iterator[Spaces]:
    key = root / "key"
    ensure_group(root / "cloud", replace(spec_of(GROUP), public_key=generate_key(key)))
    cloud = EmulatedGroup(root / "cloud", clock_factor=240.0, daemon=own_spaces(home_mib))
    shell = SshShell(key, connect_timeout_s=connect_s, python=sys.executable)
    try:
        yield Spaces(root, cloud, shell)
    finally:
        shell.close()
        cloud.purge(GROUP)
