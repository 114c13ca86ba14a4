"""The step that has every data set of the job whole on the node."""

from __future__ import annotations

from gpucloud.domain.bootstrap.checks import job_python
from gpucloud.domain.bootstrap.facts import Facts
from gpucloud.domain.bootstrap.probing import package_path
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json
from gpucloud.domain.data import DataWanted

_SLOWEST_BYTES_PER_S = 10e6
_BASE_TIMEOUT_S = 600.0


def lacking(facts: Facts, wanted: Wanted) -> tuple[DataWanted, ...]:
    """Return the sets that the node does not have."""
    return tuple(one for one in wanted.data if one.key not in facts.staged)


def data_command(do: str, one: DataWanted, facts: Facts, wanted: Wanted) -> Command:
    """Return the command for one set: `stage`, or `place` and `finish` (see `agent/data/command.py`)."""
    order = {"key": one.key, "content": one.content, "target": one.target, "below_root": one.below_root}
    asked = to_json({"do": do, "order": order, "env": wanted.env if one.in_s3 else ()})
    return Command(
        argv=(job_python(facts), package_path(facts.root, wanted.package), "data", "--root", facts.root),
        stdin=asked.encode() + b"\n" + one.packed,
        timeout_s=_BASE_TIMEOUT_S + one.size / _SLOWEST_BYTES_PER_S,
    )


def _needed(facts: Facts, wanted: Wanted) -> str | None:
    sets = lacking(facts, wanted)
    return f"{sets[0].source} is not whole at {sets[0].target}" if sets else None


def _commands(facts: Facts, wanted: Wanted) -> tuple[Command, ...]:
    return tuple(data_command("stage", one, facts, wanted) for one in lacking(facts, wanted) if one.in_s3)


DATA = Step(name="data", needed=_needed, commands=_commands)
