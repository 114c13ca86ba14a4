"""The steps that make a node fit, in their order."""

from __future__ import annotations

from gpucloud.domain.bootstrap.data_step import DATA
from gpucloud.domain.bootstrap.driver_step import DRIVER
from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.gate_step import GATE_STEP
from gpucloud.domain.bootstrap.image_step import image_order, image_reason
from gpucloud.domain.bootstrap.layer_step import LAYER
from gpucloud.domain.bootstrap.machine_step import MACHINE
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted

_PULL_TIMEOUT_S = 3600.0  # images with CUDA have 10 GB and more
# The cloud's schedule ends the group at that time, and may take a minute. Only where it did not does a node end itself,
# which lowers its group first, for as long as a minute: one that went alone would be replaced.
_POWER_OFF_AFTER_S = 60


def _agent_needed(facts: Facts, wanted: Wanted) -> str | None:
    if facts.agent_package is None:
        return "no agent runs"
    # An agent that runs another version is replaced when that costs nothing.
    if facts.agent_package != wanted.package and not facts.agent_busy:
        return "the agent runs another version"
    return None


def _agent_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    zip_path = package_path(facts.root, wanted.package)
    start: tuple[str, ...] = (facts.python, "-I", zip_path, "agent", "--root", facts.root, "--replace")
    if wanted.machine is not None and wanted.machine.efa and wanted.machine.install:
        start = (*start, "--lock-memory")
    if not wanted.power_off:
        return (Command(argv=start),)
    return (Command(argv=(*start, "--power-off-after", str(_POWER_OFF_AFTER_S), "--power-off", *wanted.power_off)),)


def _image_commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    pull = (facts.python, package_path(facts.root, wanted.package), "image", "--root", facts.root)
    return (Command(argv=pull, stdin=image_order(wanted), timeout_s=_PULL_TIMEOUT_S),)


STEPS = (
    MACHINE,
    # The command returns when the agent has written its first status.
    Step(name="agent", needed=_agent_needed, commands=_agent_commands, proves_itself=True),
    Step(name="image", needed=image_reason, commands=_image_commands),
    LAYER,
    DATA,
    GATE_STEP,
    DRIVER,
)
