"""An EC2 instance as a node: its pool, how SSH reaches it, and why it ended."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from gpucloud.adapters.aws.faults import code_in, known
from gpucloud.adapters.aws.nodes.listing import Described
from gpucloud.adapters.aws.nodes.place import RELIEVED_TAG, SSH_TAG
from gpucloud.domain.job import Access, Market
from gpucloud.domain.node import EndCause, Fault, Node, NodeState, Refusal
from gpucloud.domain.offer import Pool

# A machine's own timer and the cloud's schedule are set to the same moment by two clocks.
_CLOCKS_DIFFER = timedelta(seconds=5)
_STATES = {"pending": NodeState.PENDING, "running": NodeState.RUNNING}
_BY_US = "Client.UserInitiatedShutdown"
_BY_ITSELF = "Client.InstanceInitiatedShutdown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How SSH reaches the machines of a region, and as whom; of one that says itself how, `access` is that."""

    region: str
    user: str
    port: int
    access: Access

    def proxy(self, instance_id: str) -> tuple[str, ...]:
        """Return the command that leads to the machine's SSH; empty where it is reached directly."""
        if self.access is not Access.SESSION_MANAGER:
            return ()
        document = ("--document-name", "AWS-StartSSHSession", "--parameters", f"portNumber={self.port}")
        return ("aws", "ssm", "start-session", "--region", self.region, "--target", instance_id, *document)


def node_of(instance: Described, reach: Reach, shut_off: datetime | None, now: datetime) -> Node:
    """Return the instance as a node; `shut_off` is the group's, `now` counts as the end of one that ended untold."""
    state = _STATES.get(instance["State"]["Name"], NodeState.TERMINATED)
    ended = max(instance["LaunchTime"], _ended_at(instance) or now) if state is NodeState.TERMINATED else None
    private = instance.get("PrivateIpAddress") or ""
    reach = replace(reach, access=_access(instance, reach.access))
    public = instance.get("PublicIpAddress") if reach.access is Access.PUBLIC else None
    return Node(
        id=instance["InstanceId"],
        pool=_pool(instance),
        state=state,
        launched_at=instance["LaunchTime"],
        address=public or private,
        port=reach.port,
        user=reach.user,
        private_address=private,
        interface=None,
        proxy=reach.proxy(instance["InstanceId"]),
        ended_at=ended,
        end_cause=end_cause(_reason(instance), ended, shut_off) if ended else None,
    )


def end_cause(reason: str, ended: datetime, shut_off: datetime | None) -> EndCause:
    """Return why an instance ended, from its StateReason code. What nobody explains is charged: CRASH."""
    past = shut_off is not None and ended >= shut_off - _CLOCKS_DIFFER
    if reason == _BY_US:
        return EndCause.SCHEDULE if past else EndCause.CHOICE
    if reason in (_BY_ITSELF, ""):
        return EndCause.SCHEDULE if past else EndCause.CRASH
    return EndCause.INTERRUPTED  # taken, or died of AWS's own refusal before it ran


def refusal_of(instance: Described, at: datetime) -> Refusal | None:
    """Return the refusal that an instance tells by its death at launch; None when it died of anything else."""
    reason = _reason(instance)
    if instance["State"]["Name"] in _STATES or reason in (_BY_US, _BY_ITSELF, "") or "SpotInstance" in reason:
        return None
    text = f"{reason}: {instance.get('StateReason', {}).get('Message', '')}"
    code = reason if known(reason).fault is not Fault.UNKNOWN else code_in(text) or reason
    meaning = known(code)
    return Refusal(
        pool=_pool(instance),
        fault=meaning.fault,
        code=code,
        message=meaning.line or text,
        at=at,
        hint=meaning.step,
    )


def is_relieved(instance: Described) -> bool:
    """Whether another machine was started in its place."""
    return any(tag["Key"] == RELIEVED_TAG for tag in instance.get("Tags", ()))


def ended_by_a_user(instance: Described) -> bool:
    """Whether a user ended it: then a shut-off that AWS has forgotten since may be why."""
    return instance["State"]["Name"] not in _STATES and _reason(instance) == _BY_US


def _pool(instance: Described) -> Pool:
    market = Market.SPOT if instance.get("InstanceLifecycle") == "spot" else Market.ON_DEMAND
    zone = instance["Placement"]["AvailabilityZone"]
    return Pool(instance_type=instance["InstanceType"], zone=zone, market=market)


def _access(instance: Described, wished: Access) -> Access:
    """Who wishes for a public address may have got a machine that AWS gives none: its template says so in a tag."""
    told = any(tag == {"Key": SSH_TAG, "Value": Access.SESSION_MANAGER.value} for tag in instance.get("Tags", ()))
    return Access.SESSION_MANAGER if told and wished is Access.PUBLIC else wished


def _reason(instance: Described) -> str:
    return str(instance.get("StateReason", {}).get("Code", ""))


def _ended_at(instance: Described) -> datetime | None:
    """AWS tells the time in prose only: `User initiated (2026-11-21 10:00:00 GMT)`."""
    told = re.search(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) GMT\)", instance.get("StateTransitionReason") or "")
    return datetime.strptime(told[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc) if told else None
