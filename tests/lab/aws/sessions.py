"""Session Manager: sessions that lead to a machine's SSH, where both sides have the rights to one.

The lab runs no agent of AWS's on its machines and no plugin for its caller: what each of the two asks of AWS before a
session stands is judged when one is started. A machine whose role lacks it is not connected, as on AWS.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from tests.iam.judge import Need
from tests.lab.aws import faults
from tests.lab.aws.calls import Call
from tests.lab.aws.faults import Reply
from tests.lab.aws.permissions import Permissions
from tests.lab.aws.roles import arn_of
from tests.lab.aws.world import ACCOUNT, World

_CHANNELS = [f"ssmmessages:{verb}{kind}Channel" for verb in ("Create", "Open") for kind in ("Control", "Data")]


class Sessions:
    """Answers StartSession and TerminateSession; a session's stream is the machine's own SSH."""

    def __init__(self, world: World, permissions: Permissions) -> None:
        self._world = world
        self._permissions = permissions

    def answer(self, call: Call) -> Reply | None:
        """Return the reply; None: not one of ours."""
        if call.service != "ssm" or call.action not in {"StartSession", "TerminateSession"}:
            return None
        return self._start(call) if call.action == "StartSession" else _json({"SessionId": call.params["SessionId"]})

    def _start(self, call: Call) -> Reply:
        target = str(call.params["Target"])
        instance = next((one for one in self._world.instances() if one.id == target), None)
        if instance is None or instance.state != "running" or not self._registered(instance, call.region):
            return faults.error("ssm", "TargetNotConnected", f"{target} is not connected.", 400)
        user = self._permissions.user_of(call.key)
        session = f"{user}-{uuid.uuid4().hex[:17]}"
        arn = f"arn:aws:ssm:{call.region}:{ACCOUNT}:session/{session}"
        channel = (Need(action="ssmmessages:OpenDataChannel", arn=arn),)
        if self._permissions.refused_to_key(call.key, "ssmmessages OpenDataChannel", channel) is not None:
            return faults.error("ssm", "AccessDenied", f"{user} may not open the channel of {session}", 403)
        (port,) = call.params["Parameters"]["portNumber"]
        stream = f"ws://{instance.private_ip_address}:{port}"
        return _json({"SessionId": session, "TokenValue": uuid.uuid4().hex, "StreamUrl": stream})

    def _registered(self, instance: Any, region: str) -> bool:
        """Whether the machine's agent may tell of itself and hold its channels (what its managed policy is for)."""
        role = arn_of(instance)
        if role is None:
            return False
        arn = f"arn:aws:ec2:{region}:{ACCOUNT}:instance/{instance.id}"
        asked = [
            ("ssm UpdateInstanceInformation", Need(action="ssm:UpdateInstanceInformation", arn=arn, kind="instance")),
            *((one.replace(":", " "), Need(action=one)) for one in _CHANNELS),
        ]
        refused = [self._permissions.refused_to_role(role, call, (need,)) for call, need in asked]
        return not any(refused)


def _json(body: dict[str, str]) -> Reply:
    return 200, "application/x-amz-json-1.1", json.dumps(body).encode()
