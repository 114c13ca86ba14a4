"""SSH to nodes that have no processes: every command that a supervisor sends is answered from `FakeFleet`."""

from __future__ import annotations

import json
from pathlib import Path

from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import HostUnreachable
from gpucloud.domain.node.bootstrap.facts import Facts
from gpucloud.domain.node.node import Node
from gpucloud.domain.node.status import desired_to_json, status_to_json
from gpucloud.ports import Completed, PortForward
from tests.fakes.agent import FakeFleet, Machine
from tests.fakes.node_group import FakeNodeGroup

_PYTHON = "/usr/bin/python3"


class FleetShell:
    """Implements `Shell`; a node that the cloud has ended does not answer."""

    def __init__(self, fleet: FakeFleet, cloud: FakeNodeGroup, group: str) -> None:
        self.fleet = fleet
        self.cloud = cloud
        self.group = group

    def host(self, node: Node) -> FleetHost:
        host = FleetHost(self, node)
        host.check()
        return host

    def close(self) -> None:
        """Nothing is open."""


class FleetHost:
    """Implements `Host`."""

    def __init__(self, shell: FleetShell, node: Node) -> None:
        self.node = node
        self._shell = shell

    def check(self) -> None:
        """Raise HostUnreachable when the machine is gone; else let its time pass."""
        self._shell.fleet.live(self._shell.group)
        alive = {node.id for node in self._shell.cloud.describe(self._shell.group).alive}
        if self.node.id not in alive:
            raise HostUnreachable(f"{self.node.id}: connection refused")

    def sync(self, root: Path, target: str) -> str:
        self.check()
        return f"{target}/{root.name}"

    def renew(self) -> None:
        pass

    def interact(self, argv: tuple[str, ...], forwards: tuple[PortForward, ...] = ()) -> int:
        return self.run(argv).exit_code

    def close(self) -> None:
        """Nothing is open."""

    def run(self, argv: tuple[str, ...], *, stdin: bytes = b"", timeout_s: float = 30.0) -> Completed:
        del timeout_s
        self.check()
        match argv:
            case ("/bin/sh", "-c", _, "sh", package, root):
                return _said(self._facts(package, root))
            case (program, "-c", _, package, str()) if program == _PYTHON:
                self._own.package = package
            case (_, "-I", _, "agent", *_):
                self._own.agent = self._own.package
            case ("cat", path):
                return self._file(path)
            case ("sh", "-c", script, "sh", path) if path.endswith("/agent/desired.json") and "mv -f" in script:
                self._own.take(stdin)
            case ("sh", "-c", _, "sh", border, most, *files):
                return _said(self._output(border, int(most), files))
            case (str(), "-c", script, *ports) if "socket" in script:
                return _said(f"32768 60999 {' '.join(ports)}\n".encode())
            case (program, _, "probe", *_, address, port) if program == _PYTHON:
                nodes = self._shell.cloud.describe(self._shell.group).alive
                there = any((node.private_address, str(node.port)) == (address, port) for node in nodes)
                return _said(b"alive" if there else b"dead")
            case _:
                raise AssertionError(f"no node answers {argv}")
        return _said(b"")

    @property
    def _own(self) -> Machine:
        return self._shell.fleet.machine(self.node.id)

    def _facts(self, package: str, root: str) -> bytes:
        own = self._own
        if own.package != package:
            return json.dumps({"python": _PYTHON, "version": [3, 11, 4]}).encode()
        facts = Facts(
            python=_PYTHON,
            version=(3, 11, 4),
            torch="2.6.0",
            root=f"/home/{self.node.user}/{root}",
            package=package,
            free_bytes=1 << 34,
            cpus=2,
            time=self._shell.fleet.clock.now(),
            boot_id=self.node.id,
            gpus=None,
            gpu_fault=None,
            agent_package=own.agent,
            agent_busy=own.part is not None,
            layer=None,
        )
        return to_json(facts).encode()

    def _file(self, path: str) -> Completed:
        own = self._own
        if path.endswith("/agent/status.json") and own.agent is not None:
            return _said(status_to_json(self._shell.fleet.status(self._shell.group, self.node.id)).encode())
        if path.endswith("/desired.json") and own.desired is not None:
            return _said(desired_to_json(own.desired).encode())
        if path.endswith("/launch.json") and own.part is not None:
            return _said(b'{"argv": []}')
        return Completed(exit_code=1, stdout=b"", stderr=b"no such file")

    def _output(self, border: str, most: int, files: list[str]) -> bytes:
        """The ranks' output from an offset on; nothing of what the agent measured, which is kept elsewhere."""
        said = b""
        for path, start in zip(files[::2], files[1::2], strict=False):
            rank, _, kind = path.rpartition("rank-")[2].partition(".")
            kept = self._own.log.get(int(rank), b"") if kind == "log" else b""
            said += border.encode() + kept[int(start) - 1 :][:most]
        return said


def _said(stdout: bytes) -> Completed:
    return Completed(exit_code=0, stdout=stdout, stderr=b"")
