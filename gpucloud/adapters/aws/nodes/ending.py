"""Machines that end: all of a cluster, by id, until nothing lists them; or one, by a drill of FIS."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.listing import Described
from gpucloud.adapters.aws.nodes.place import CLUSTER_TAG, Place, drill_role
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError

LIMIT_S = 300.0
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a listing still shows: machines that cost money, and those that the group still lists."""

    alive: tuple[str, ...]
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Purge:
    """How to end a cluster's machines: `listings` empty ones in a row, `settle_s` apart and more, are believed."""

    place: Place
    listings: int
    settle_s: float
    end: Callable[[tuple[str, ...]], None]
    now: Callable[[], datetime]
    sleep: Callable[[float], None]


def end(aws: Aws, place: Place, ids: Iterable[str]) -> None:
    """Terminate instances in one call; those that AWS does not know (any more) are passed over."""
    asked = sorted(ids)
    with aws.calling("ec2", f"end {', '.join(asked)}", place.region) as client:
        while asked:
            try:
                client.terminate_instances(InstanceIds=asked)
            except botocore.exceptions.ClientError as error:
                # One unknown id makes AWS refuse the whole call.
                unknown = set(re.findall(r"i-[0-9a-f]+", str(error))) & set(asked)
                if code_of(error) != "InvalidInstanceID.NotFound" or not unknown:
                    raise
                asked = [node_id for node_id in asked if node_id not in unknown]
            else:
                return


def end_all(look: Callable[[], Left | None], purge: Purge) -> None:
    """End what `look` finds until it finds nothing, twice and more. ProvisionError naming what is left at the limit.

    `look` returns None when AWS could not be asked just now.
    """
    deadline = purge.now() + timedelta(seconds=LIMIT_S)
    empty, wait_s, left = 0, _FIRST_WAIT_S, Left(alive=(), members=())
    while empty < purge.listings:
        found = look()
        if found is not None and not (found.alive or found.members):
            empty += 1
            if empty < purge.listings:
                purge.sleep(purge.settle_s * empty)
            continue
        empty, left = 0, found or left
        if purge.now() > deadline:
            raise _still_alive(purge.place, left)
        if left.alive:
            purge.end(left.alive)
        purge.sleep(wait_s)
        wait_s = min(wait_s * 1.5, _LONGEST_WAIT_S)


def _still_alive(place: Place, left: Left) -> ProvisionError:
    ids = sorted({*left.alive, *left.members})
    return ProvisionError(
        f"{place}: {', '.join(ids) or 'AWS cannot be asked whether machines are'} still alive after {LIMIT_S:.0f} s",
        hint=f"the same command again, or: aws ec2 terminate-instances --region {place.region} "
        f"--instance-ids {' '.join(ids)}",
    )


# A drill: AWS Fault Injection Service sends a spot machine a real notice and takes it two minutes later.


_POLL_S = 0.5
_POLLS = 40


def send_notice(aws: Aws, place: Place, group: Described, node_id: str, sleep: Callable[[float], None]) -> None:
    """Have the machine interrupted with two minutes' notice; return once AWS does it. ProvisionError when it fails."""
    partition, account = _owner(group)
    with aws.calling("fis", f"interrupt {node_id} for a drill", place.region) as client:
        template = client.create_experiment_template(**_template(partition, account, place, node_id))
        template_id = template["experimentTemplate"]["id"]
        try:
            started = client.start_experiment(
                clientToken=uuid.uuid4().hex, experimentTemplateId=template_id, tags=_tags(place)
            )
            _await_start(client, started["experiment"]["id"], node_id, sleep)
        finally:
            client.delete_experiment_template(id=template_id)


def _template(partition: str, account: str, place: Place, node_id: str) -> dict[str, Any]:
    return {
        "clientToken": uuid.uuid4().hex,
        "description": f"gpucloud drill: {node_id} of {place.cluster}",
        "roleArn": f"arn:{partition}:iam::{account}:role/{drill_role(place.region)}",
        "stopConditions": [{"source": "none"}],
        "targets": {
            "machine": {
                "resourceType": "aws:ec2:spot-instance",
                "resourceArns": [f"arn:{partition}:ec2:{place.region}:{account}:instance/{node_id}"],
                "selectionMode": "ALL",
            }
        },
        "actions": {
            "interrupt": {
                "actionId": "aws:ec2:send-spot-instance-interruptions",
                "parameters": {"durationBeforeInterruption": "PT2M"},  # the least: the notice goes out at once
                "targets": {"SpotInstances": "machine"},
            }
        },
        "tags": _tags(place),
    }


def _await_start(client: Any, experiment: str, node_id: str, sleep: Callable[[float], None]) -> None:
    for _ in range(_POLLS):
        state = client.get_experiment(id=experiment)["experiment"]["state"]
        if state["status"] in ("running", "completed"):
            return
        if state["status"] not in ("pending", "initiating"):
            raise ProvisionError(
                f"the drill for {node_id} {state['status']}: {state.get('reason', 'AWS says no reason')}",
                hint="gpucloud up, which makes the drill's role; only spot machines can be interrupted",
            )
        sleep(_POLL_S)
    raise ProvisionError(f"the drill for {node_id} did not start", hint="the same command again")


def _tags(place: Place) -> dict[str, str]:
    return {"gpucloud:managed": "true", CLUSTER_TAG: place.cluster}


def _owner(group: Described) -> tuple[str, str]:
    """Partition and account, from the group's own ARN."""
    parts = str(group["AutoScalingGroupARN"]).split(":")
    return parts[1], parts[4]
