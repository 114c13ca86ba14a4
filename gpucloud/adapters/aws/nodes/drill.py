"""A drill: AWS Fault Injection Service sends a spot machine a real notice and takes it two minutes later."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from gpucloud.adapters.aws.nodes.listing import Described
from gpucloud.adapters.aws.nodes.place import CLUSTER_TAG, Place, drill_role
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError

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
