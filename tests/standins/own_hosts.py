"""Hosts that exist already: real SSH servers on loopback, each with a home of its own, and a job file that names them.

Their computer is this one; what is a stand-in is only that several "hosts" share it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpucloud.adapters.hosts.records import Place
from gpucloud.system import processes
from tests.fakes.nodes import Server, embedded_server, openssh_server


@dataclass
class OwnHosts:
    """Hosts that one key opens."""

    servers: list[Server]
    key: Path

    def places(self) -> tuple[Place, ...]:
        return tuple(
            Place(
                name=f"h{at}",
                address=server.node.address,
                port=server.node.port,
                user=server.node.user,
                host_key=server.node.host_key or "",
            )
            for at, server in enumerate(self.servers)
        )

    def section(self, *numbers: int, price: str = "0 USD", gpus: Callable[[int], str] | None = None) -> str:
        """Return the job file's part that names these hosts, all of them if none is named."""
        gpus = gpus or (lambda _: "[]")
        lines = [f"cloud: ssh\nssh:\n  key: {self.key}\n  price: {price}\n  hosts:\n"]
        for at in numbers or range(len(self.servers)):
            node = self.servers[at].node
            lines.append(f"    - {{address: 127.0.0.1, port: {node.port}, user: {node.user}, gpus: {gpus(at)},\n")
            lines.append(f'       host_key: "{node.host_key}"}}\n')
        return "".join(lines)

    def kill(self, at: int) -> None:
        """End a host as a power cut does, save that its disk stays: its SSH server and everything that it runs."""
        server = self.servers[at]
        sessions = processes.descendants(server.process.pid)
        server.process.kill()
        server.process.wait()
        for pid in (*sessions, *_naming(f"{self.servers[at].home}/.gpucloud/jobs/")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def name(self, at: int) -> str:
        """Return what gpucloud calls the host."""
        return f"127.0.0.1-p{self.servers[at].node.port}"

    def taken(self, at: int) -> list[dict[str, object]]:
        """Return what the host's own note says of who has it, of this host's entries."""
        notes = (self.servers[at].home / ".gpucloud" / "taken").glob("*.json")
        entries = [entry for note in notes for entry in json.loads(note.read_text())]
        return [entry for entry in entries if entry["name"] == self.name(at)]

    def processes(self, at: int) -> list[int]:
        """Return what of gpucloud's jobs runs on the host."""
        return _naming(f"{self.servers[at].home}/.gpucloud/jobs/")

    def left(self, at: int = 0) -> list[str]:
        """Return what of gpucloud's jobs lies on a host."""
        return sorted(
            str(path.name) for path in (self.servers[at].home / ".gpucloud" / "jobs").glob(f"*/{self.name(at)}")
        )


@contextlib.contextmanager
def own_hosts(folder: Path, count: int, *, openssh: bool = False, pythons: Sequence[Path] = ()) -> Iterator[OwnHosts]:
    """Give hosts of the embedded fleet's SSH server, or of OpenSSH's with its stock limits; each with its Python."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        servers = []
        for at in range(count):
            place = folder / f"h{at}"
            place.mkdir()
            env = {"GPUCLOUD_PYTHON": str(pythons[at]) if pythons else sys.executable}
            for half in ("user", "user.pub"):
                if servers and (servers[0].key_file.with_name(half)).exists():
                    (place / half).write_bytes(servers[0].key_file.with_name(half).read_bytes())
                    (place / half).chmod(0o600)
            if openssh:
                server = stack.enter_context(openssh_server(place, name=f"h{at}", env=env, home=place / "home"))
            else:
                server = stack.enter_context(embedded_server(place, name=f"h{at}", env=env))
            servers.append(server)
            stack.callback(_end_all, server.home)
        yield OwnHosts(servers, servers[0].key_file)


def _end_all(home: Path) -> None:
    for pid in _naming(f"{home}/.gpucloud/"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _naming(text: str) -> list[int]:
    """Return the processes whose command line or environment names `text`."""
    found = []
    for process in processes.listing():
        with contextlib.suppress(OSError):
            said = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            if os.fsencode(text) in said and process.pid != os.getpid():
                found.append(process.pid)
    return found
