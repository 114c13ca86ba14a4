"""The step that gives a machine its driver and system software."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.machine import digest

# Modules that are compiled take four minutes on two old cores, EFA's installer as long; a lock may be waited for too.
_TIMEOUT_S = 3600.0


def _needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.machine is None:
        return None
    if facts.machine is None:
        return "its system software was not looked at since it booted"
    if facts.machine.digest != digest(wanted.machine):
        return "the job wants other system software"
    # The driver may have gone since: an upgrade under our feet, a GPU that fell off the bus.
    return facts.gpu_fault if wanted.machine.gpus else None


def _commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    if wanted.machine is None:
        return ()
    argv = (facts.python, package_path(facts.root, wanted.package), "machine")
    return (Command(argv=argv, stdin=to_json(wanted.machine).encode(), timeout_s=_TIMEOUT_S, reboots=True),)


MACHINE = Step(name="machine", needed=_needed, commands=_commands)
