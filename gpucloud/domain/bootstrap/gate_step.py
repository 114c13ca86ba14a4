"""The step that lets a node with GPUs through the gate: once a boot, Python and driver."""

from __future__ import annotations

from gpucloud.domain.bootstrap.checks import job_python
from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.gate.wanted import ENDPOINTS, LASTS, GateOrder, GateWanted, gate_digest

GATE = "gate"
_TIMEOUT_S = 400.0


def gate_command(python: str, package: str, order: GateOrder) -> Command:
    """Return the command that checks a node; exit code 14 and its findings where it is not fit."""
    return Command(argv=(python, package, "gate"), stdin=to_json(order).encode(), timeout_s=_TIMEOUT_S)


def may_ask_root(wanted: Wanted) -> bool:
    """Whether the login may use sudo there: where gpucloud only looks, a refusal is reported to an administrator."""
    return wanted.machine is not None and wanted.machine.install


def endpoints(wanted: Wanted) -> tuple[tuple[str, str], ...]:
    """Return what the job itself says of the store's endpoint; of its environment nothing else, which has secrets."""
    return tuple(pair for pair in wanted.env if pair[0] in ENDPOINTS)


def _needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.gate is None:
        return None
    if facts.gate is None:
        return "its GPUs were not checked on this boot, or something was reported of them since"
    if facts.gate.digest != _digest(facts, wanted, wanted.gate):
        return "its GPUs, its driver or what the job wants of them are not those of the last check"
    if facts.time - facts.gate.at > LASTS:
        return f"its GPUs were checked {(facts.time - facts.gate.at).days} days ago"
    return None


def _commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.gate is None:
        return ()
    order = GateOrder(
        wanted=wanted.gate,
        digest=_digest(facts, wanted, wanted.gate),
        python=job_python(facts),
        devices=wanted.devices,
        store=wanted.store_endpoint,
        env=endpoints(wanted),
        sudo=may_ask_root(wanted),
    )
    return (gate_command(facts.python, package_path(facts.root, wanted.package), order),)


def _digest(facts: Facts, wanted: Wanted, gate: GateWanted) -> str:
    return gate_digest(gate, job_python(facts), facts.gpus or (), wanted.devices)


GATE_STEP = Step(name=GATE, needed=_needed, commands=_commands)
