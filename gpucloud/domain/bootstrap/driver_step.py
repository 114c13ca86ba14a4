"""The step that has a job's driver run on the node; of jobs that drive themselves."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json

_TIMEOUT_S = 900.0  # an interpreter that can drive may have to be made first


def _needed(facts: Facts, wanted: Wanted) -> str | None:
    if wanted.driver is None:
        return None  # one that runs ends by itself when its order is withdrawn
    if facts.driver_package is None:
        return "no driver runs"
    return None if facts.driver_package == wanted.package else "the driver runs another version"


def _commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    zip_path = package_path(facts.root, wanted.package)
    argv = (facts.python, "-I", zip_path, "drive", "--root", facts.root)
    return (Command(argv=argv, stdin=to_json(wanted.driver).encode(), timeout_s=_TIMEOUT_S),)


# The command returns when the driver has read its order.
DRIVER = Step(name="driver", needed=_needed, commands=_commands, proves_itself=True)
