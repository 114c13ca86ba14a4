"""Bootstraps 64 own hosts at once over OpenSSH servers with stock limits: `python -m tests.bench.bench_ssh_64`.

Two runs: a server for each host, and one server for all 64, whose `MaxStartups 10:30:100` and `MaxSessions 10` then
bound everything. A limit that is passed shows in the server's log; CPU is this process's own, as the CLI's is.
"""

from __future__ import annotations

import contextlib
import re
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from gpucloud.adapters.hosts.group import Asking, Order
from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.node import Node
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.bootstrap import bootstrap
from tests.bench.figures import figure
from tests.fakes.nodes import Server, openssh_server

HOSTS = 64
AT_ONCE = 8  # preparations of a supervisor
CPU_LIMIT_S = 0.15
_PASSED = re.compile(r"beginning MaxStartups|drop connection|exceeded MaxStartups|no more sessions|MaxSessions", re.I)


def main() -> int:
    good = True
    with tempfile.TemporaryDirectory() as name:
        for kind, count in (("each", HOSTS), ("one", 1)):
            with contextlib.ExitStack() as stack:
                servers = [stack.enter_context(server(Path(name) / kind / str(at))) for at in range(count)]
                good &= measured(kind, servers)
    return 0 if good else 1


def server(folder: Path) -> contextlib.AbstractContextManager[Server]:
    return openssh_server(folder, env={"GPUCLOUD_PYTHON": sys.executable}, home=folder / "home")


def measured(kind: str, servers: Sequence[Server]) -> bool:
    data, sha256 = package_zip()
    package = Package(data=data, sha256=sha256)
    nodes = [node_of(servers, at, kind) for at in range(HOSTS)]
    # Each server has a key of its own: the one that opens all of them is the first one's.
    trust_first(servers)
    key = servers[0].key_file
    try:
        before, started = cpu_s(), time.monotonic()
        failures = taken(nodes, key) + prepared(nodes, key, package)
        wall_s, spent_s = time.monotonic() - started, (cpu_s() - before) / HOSTS
    finally:
        for order in released(nodes, key):
            assert order.get("left") == [], order
    print("\n".join(sorted(set(failures))[:5]))
    logs = "".join((one.key_file.with_name("log")).read_text(errors="replace") for one in servers)
    good = figure(f"ssh_64_{kind}_failed", len(failures), 0)
    good &= figure(f"ssh_64_{kind}_limits_passed", len(_PASSED.findall(logs)), 0)
    good &= figure(f"ssh_64_{kind}_cpu_s_a_node", spent_s, CPU_LIMIT_S)
    figure(f"ssh_64_{kind}_wall_s", wall_s)
    return good


def node_of(servers: Sequence[Server], at: int, kind: str) -> Node:
    node = servers[at % len(servers)].node
    return replace(node, id=f"h{at}-1", root=f".gpucloud/jobs/bench-{kind}/h{at}", devices=(f"b{at}",))


def trust_first(servers: Sequence[Server]) -> None:
    first = servers[0].key_file.with_name("authorized_keys").read_text()
    for one in servers:
        one.key_file.with_name("authorized_keys").write_text(first)


def order(do: str, node: Node) -> Order:
    wanted = {"do": do, "root": node.root, "token": "bench", "name": node.id, "node": node.id, "job": "bench"}
    rest = {
        "owner": "bench",
        "until": time.time() + 600,
        "now": time.time(),
        "devices": list(node.devices),
        "store": "",
    }
    return Order(node=node, order={**wanted, **rest})


def taken(nodes: Sequence[Node], key: Path) -> list[str]:
    answers = Asking(lambda: SshShell(key)).ask([order("take", node) for node in nodes])
    return [f"take: {answer}" for answer in answers if not isinstance(answer, dict) or "address" not in answer]


def released(nodes: Sequence[Node], key: Path) -> list[dict[str, object]]:
    answers = Asking(lambda: SshShell(key, connect_timeout_s=60)).ask([order("release", node) for node in nodes])
    return [answer if isinstance(answer, dict) else {"left": str(answer)} for answer in answers]


def prepared(nodes: Sequence[Node], key: Path, package: Package) -> list[str]:
    """Bootstrap as a supervisor does: so many at once, every connection kept open to the end."""
    shell, clock = SshShell(key, connect_timeout_s=30), SystemClock()
    wanted = Wanted(
        package=package.sha256,
        code="",
        setup=None,
        setup_digest="",
        env=(),
        torchrun=False,
        gpus=1,
        asks_for_gpus=False,
    )

    def prepare(node: Node) -> str | None:
        try:
            bootstrap(shell.host(node), wanted, package, clock)
        except Exception as error:  # noqa: BLE001  counted and shown
            return f"bootstrap: {error}"
        return None

    try:
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            return [failure for failure in pool.map(prepare, nodes) if failure is not None]
    finally:
        shell.close()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
