"""`gpucloud local interrupt|kill|freeze|cut|heal|weather|shortage`: what the embedded fleet does when asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone
from enum import Enum
from typing import TYPE_CHECKING

from gpucloud.cli.commands.copying import group_of, one_node
from gpucloud.cli.render.words import say, say_json, tell
from gpucloud.cli.target import known_job
from gpucloud.domain import codec
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.quantities import parse_span
from gpucloud.wiring import Gpucloud

if TYPE_CHECKING:
    from gpucloud.adapters.local.group import LocalNodeGroup

_NODE_ID = re.compile(r"i-0[0-9a-f]{16}")


class Drill(Enum):
    """What is done to a node; the value is the word for it when it is done."""

    INTERRUPT = "noticed"
    KILL = "interrupted"
    FREEZE = "frozen"
    CUT = "cut"
    HEAL = "healed"
    REBALANCE = "recommended to leave"


def drill(target: str | None, node_id: str | None, what: Drill, *, as_json: bool) -> int:
    """Have the embedded cloud do that to a node; return the exit code.

    `target` is the node itself, or a job as elsewhere; then `node_id`, or the job's first node that is up, is meant.
    """
    nodes, job, group, node = _meant(target, node_id)
    _does(nodes, what)(group, node)
    if what is Drill.CUT and not nodes.has_own_network(group, node):
        tell(f"{node}: only the way to it is cut; GPUCLOUD_LOCAL_TIER=a gives machines a network that can be cut too")
    if as_json:
        say_json({"job": job, "node": node, "done": what.value})
    else:
        say(f"{node}: {what.value}")
    return 0


def weather(target: str | None, *, seed: int, mean: str, unannounced: float, as_json: bool) -> int:
    """Have the embedded cloud take nodes at random times drawn from a seed; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    try:
        mean_s = parse_span(mean).total_seconds()
    except ValueError as error:
        raise UsageError(f"--mean: {error}") from error
    nodes = cloud.embedded(known)
    nodes.schedule_interruptions(group_of(cloud, known), seed=seed, mean_s=mean_s, unannounced=unannounced)
    if as_json:
        say_json({"job": known.name, "seed": seed, "mean_s": mean_s, "unannounced": unannounced})
    else:
        say(f"{known.name}: nodes are interrupted every {mean_s:g} s on average, seed {seed}")
    return 0


def shortage(lasting: str, *, as_json: bool) -> int:
    """Have the embedded cloud start no spot machines for that long, 0s: from now on again; return the exit code."""
    try:
        span = parse_span(lasting)
    except ValueError as error:
        raise UsageError(str(error), hint="gpucloud local shortage 5min") from error
    until = datetime.now(timezone.utc) + span
    Gpucloud().local().nodes().run_short(until)
    if as_json:
        say_json({"no_spot_until": codec.plain(until)})
    else:
        say(f"no spot machines start until {until:%H:%M:%S} UTC; those that run stay")
    return 0


def _does(nodes: LocalNodeGroup, what: Drill) -> Callable[[str, str], None]:
    match what:
        case Drill.INTERRUPT:
            return lambda group, node: nodes.interrupt(group, node, notice=True)
        case Drill.KILL:
            return lambda group, node: nodes.interrupt(group, node, notice=False)
        case Drill.FREEZE:
            return nodes.freeze
        case Drill.CUT:
            return nodes.cut
        case Drill.HEAL:
            return nodes.heal
        case Drill.REBALANCE:
            return nodes.recommend_rebalance


def _meant(target: str | None, node_id: str | None) -> tuple[LocalNodeGroup, str, str, str]:
    """Return the embedded cloud's groups, and the job, the group and the node that are meant."""
    cloud = Gpucloud()
    if target is not None and node_id is None and _NODE_ID.fullmatch(target):
        nodes = cloud.local().nodes()
        found = nodes.owner_of(target)
        if found is None:
            raise UsageError(f"no machine of the embedded fleet is called {target}", hint="gpucloud status JOB")
        group, job = found
        return nodes, job, group, target
    known = known_job(cloud, target)
    nodes = cloud.embedded(known)
    node = one_node(cloud, known, node_id)
    return nodes, known.name, group_of(cloud, known), node.id
