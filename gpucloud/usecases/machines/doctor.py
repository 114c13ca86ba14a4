"""Examining machines: those of a job, from any terminal, and the one that gpucloud runs on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gpucloud.domain.codec import Malformed
from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.bootstrap.facts import (
    PROBE_LIMIT_S,
    Bare,
    Facts,
    package_path,
    parse_facts,
    probe,
    question,
    ship,
)
from gpucloud.domain.node.bootstrap.steps import endpoints, gate_command, job_python, may_ask_root, require_python
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.gate.report import Checked, GateOrder, GateWanted
from gpucloud.domain.node.node import Node, NodeState
from gpucloud.domain.state.state import JobState
from gpucloud.ports import Host
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.needs import of_node, parse_checked, wanted_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One machine: what its check said, or why there is none. `busy`: a job uses it, it was not put to work."""

    node: Node
    checked: Checked | None = None
    busy: bool = False
    error: str | None = None


def examine(world: Services, state: JobState, *, full: bool) -> tuple[Examined, ...]:
    """Return how each machine of the job that runs is; the package is put there if it is not. Raises ProvisionError."""
    listed = world.group.describe(state.group).alive if state.group is not None else ()
    running = [node for node in listed if node.state is NodeState.RUNNING and node.host_key is not None]
    with ThreadPoolExecutor(max_workers=16) as hands:
        return tuple(hands.map(lambda node: _examined(world, state, node, full=full), running))


def _examined(world: Services, state: JobState, node: Node, *, full: bool) -> Examined:
    try:
        host = world.shell.host(node)
        wanted = of_node(_wanted(world), world.job, state.gpu, node, world.store.url)
        facts = _facts(host, wanted, world)
        checked = _check(host, facts, wanted, full=full and not facts.agent_busy)
    except NodeError as error:
        return Examined(node=node, error=str(error))
    return Examined(node=node, checked=checked, busy=full and facts.agent_busy)


def _wanted(world: Services) -> Wanted:
    return wanted_for(
        world.job,
        package=world.package.sha256,
        code="",
        secrets={},
        store_url=world.store.url,
        power_off=world.power_off,
    )


def _facts(host: Host, wanted: Wanted, world: Services) -> Facts:
    found = _probed(host, wanted)
    if not isinstance(found, Facts):
        require_python(found.python, found.version)
        host.run(ship(found.python or "", world.package.sha256, host.node.root), stdin=world.package.data)
        found = _probed(host, wanted)
    if isinstance(found, Bare):
        raise NodeError(f"{host.node.id}: the package does not run there", hint="gpucloud ssh, and see its Python")
    return found


def _probed(host: Host, wanted: Wanted) -> Facts | Bare:
    done = host.run(probe(wanted.package, host.node.root), stdin=question(wanted), timeout_s=PROBE_LIMIT_S)
    try:
        return parse_facts(done.stdout)
    except Malformed as error:
        raise NodeError(f"{host.node.id}: {done.stderr.decode(errors='replace').strip()[-300:]}") from error


def _check(host: Host, facts: Facts, wanted: Wanted, *, full: bool) -> Checked:
    gate = wanted.gate or GateWanted(gpus=0, torch=False)  # a job on CPUs: what GPUs there are is looked at
    order = GateOrder(
        wanted=replace(gate, full=full),
        digest="",
        python=job_python(facts),
        devices=wanted.devices,
        store=wanted.store_endpoint,
        env=endpoints(wanted),
        sudo=may_ask_root(wanted),
    )
    command = gate_command(facts.python, package_path(facts.root, wanted.package), order)
    done = host.run(command.argv, stdin=command.stdin, timeout_s=command.timeout_s)
    checked = parse_checked(done.stdout)
    if checked is None:
        raise NodeError(f"{host.node.id}: gate: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return checked


# What is said of the machine that gpucloud runs on.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that gpucloud needs or can use here; `ok` is None where it is not needed."""

    name: str
    ok: bool | None
    text: str
    hint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This machine: what gpucloud needs of it, and its GPUs."""

    checks: tuple[Check, ...]
    checked: Checked
