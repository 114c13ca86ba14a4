"""A bootstrap killed at any of its steps, given again: the same node in the end, and nothing done twice."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

from gpucloud.adapters.packaging import package_zip
from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.job.spec import Job
from gpucloud.system import processes
from gpucloud.system.retries import SystemClock
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.bootstrap import Bootstrapped, bootstrap
from gpucloud.usecases.supervise.needs import of_node, wanted_for
from tests.fakes.nodes import Server, embedded_server
from tests.prove.goal import Figure, Form, Goal
from tests.standins.agent_node import AgentNode

STORE = "file:///store"
SETUP = "echo done >>$HOME/setups"
DURING_S = 0.03


class When(Enum):
    """When the process that bootstraps is killed: before a command, under way, or when it has been answered."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


@dataclass(slots=True)
class Struck:
    """A host whose caller is killed at command number `at`; None: it only counts."""

    host: Any
    at: int | None = None
    when: When = When.BEFORE
    count: int = 0

    @property
    def node(self) -> Any:
        """The node that it is."""
        return self.host.node

    def run(self, argv: tuple[str, ...], **named: Any) -> Any:
        """Run the command, or die of it."""
        self.count += 1
        due = self.count == self.at
        if due and self.when is When.BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if due and self.when is When.DURING:
            signal.setitimer(signal.ITIMER_REAL, DURING_S)  # SIGALRM ends a process that has not asked for it
        result = self.host.run(argv, **named)
        if due:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def run(form: Form) -> Iterator[Figure]:
    """Yield in how many cases the node came out otherwise, and how many cases there were."""
    data, sha256 = package_zip()
    package = Package(data=data, sha256=sha256)
    wrong = cases = 0
    with _node() as (server, job):
        commands, wanted = _undisturbed(server, job, package)
    for at in range(1, commands + 1):
        for when in [When.DURING] if form is Form.SHORT else When:
            cases += 1
            with _node() as (server, job):
                for fault in _faults(server, job, package, wanted, at, when):
                    wrong += 1
                    sys.stderr.write(f"bootstrap-kill: {when.value} command {at}: {fault}\n")
    yield Figure(name="bootstrap-kill", value=wrong, limit=0)
    yield Figure(name="bootstrap-kill.cases", value=cases, limit=4 if form is Form.SHORT else 18, least=True)


@contextlib.contextmanager
def _node() -> Iterator[tuple[Server, Job]]:
    """Give a bare node with an SSH server, and a job whose code is on it; its agent ends with it."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-boot-") as name:
        folder = Path(name)
        home, code = folder / "home", folder / "code"
        code.mkdir()
        env = {"GPUCLOUD_PYTHON": sys.executable, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(home)}
        try:
            with embedded_server(folder, env=env) as server:
                yield (
                    server,
                    Job(
                        name="j", run="train.py", budget_usd=Decimal(1), source=code / "j.yaml", code=code, setup=SETUP
                    ),
                )
        finally:
            with contextlib.suppress(FileNotFoundError):
                AgentNode(home, Path()).destroy()


def _undisturbed(server: Server, job: Job, package: Package) -> tuple[int, dict[str, object]]:
    """Return how many commands a bootstrap takes, and what it makes of the node."""
    with contextlib.closing(SshShell(server.key_file)) as shell:
        host = Struck(shell.host(server.node))
        fit = _fit(host, job, package)
    return host.count, _state(server, fit)


def _faults(
    server: Server, job: Job, package: Package, wanted: dict[str, object], at: int, when: When
) -> Iterator[str]:
    if not _killed(server, job, package, at, when):
        yield "it was not killed"
    with contextlib.closing(SshShell(server.key_file)) as shell:
        host = shell.host(server.node)
        state = _state(server, _fit(host, job, package))
        if when is When.DURING and state["setups"] == 2 * str(wanted["setups"]):
            state["setups"] = wanted["setups"]  # it was killed before it was noted that it is done
        for name in sorted(wanted.keys() | state.keys()):
            if state.get(name) != wanted.get(name):
                yield f"{name} is {state.get(name)}, not {wanted.get(name)}"
        changed = _fit(host, job, package).changed
        if changed:
            yield f"once more changes {changed}"


def _killed(server: Server, job: Job, package: Package, at: int, when: When) -> bool:
    """Bootstrap in a process of its own, which is killed there."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(BaseException):
            _fit(Struck(SshShell(server.key_file).host(server.node), at, when), job, package)
        os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


def _fit(host: Any, job: Job, package: Package) -> Bootstrapped:
    wanted = wanted_for(job, package=package.sha256, code=str(job.code), secrets={}, store_url=STORE, power_off=())
    return bootstrap(host, of_node(wanted, job, None, host.node, STORE), package, SystemClock())


def _state(server: Server, fit: Bootstrapped) -> dict[str, object]:
    """Return what must be the same: lock record, package, one setup, an agent that lives, nothing half made."""
    home, folder = str(server.home), str(server.home.parent)
    root, package = Path(fit.root), Path(fit.package_path)
    agent = AgentNode(server.home, package)
    return {
        **{f"lock.{name}": repr(value).replace(folder, "…") for name, value in fit.lock.items()},
        "packages": [path.name for path in (root / "lib").glob("*.zip")],
        "package size": package.stat().st_size,
        "setups": (server.home / "setups").read_text() if (server.home / "setups").exists() else "",
        "agent lives": _is_alive(agent.pid),
        "half made": sorted(path.name for path in root.rglob("*.new")),
        "root": fit.root.replace(home, "~"),
    }


def _is_alive(pid: int) -> bool:
    return processes.started(pid) is not None


GOAL = Goal(
    promise="the process that bootstraps a node, killed before, during and after each of its commands: the same"
    " bootstrap again ends in the same state, the job's setup was done once, or again where it was killed under way,"
    " and once more changes nothing",
    real="bootstrap over SSH, the embedded fleet's server, the agent, the job's setup",
    simulated="the node is this machine with another home; short: only during each command",
    run=run,
)
