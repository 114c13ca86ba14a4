"""Starting machines: the group's settings for a pool, and one synchronous launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_in, code_of, known, known_of_new
from gpucloud.adapters.aws.nodes.insisting import insist
from gpucloud.adapters.aws.nodes.listing import Described, Listing, settings_that_hold_back
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.offer import Pool

# The call is newer than some endpoints, policies and versions of botocore.
_NO_SUCH_CALL = ("InvalidAction", "UnknownOperation", "UnknownOperationException", "UnsupportedOperation")
NOT_ALLOWED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation")
_REFUSING = (Fault.CAPACITY, Fault.QUOTA, Fault.PERMISSION, Fault.PARAMETER)


class NoLaunchCall(Exception):
    """Endpoint, caller or botocore has no `LaunchInstances`; `lasting` unless only this launch could not use it."""

    def __init__(self, *, lasting: bool) -> None:
        super().__init__()
        self.lasting = lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What one launch brought: the machines that were started, and why others were not."""

    ids: tuple[str, ...]
    refusals: tuple[Refusal, ...]


def subnet_of(listing: Listing, pool: Pool) -> str:
    """Return the subnet of the pool's zone. ProvisionError when the cluster has none there."""
    subnets = listing.subnets
    if pool.zone not in subnets:
        zones = ", ".join(sorted(subnets)) or "no zone"
        raise ProvisionError(
            f"the cluster has no subnet in {pool.zone} (it has {zones})",
            hint="gpucloud up, which makes what is missing",
        )
    return subnets[pool.zone]


def settings(listing: Listing, size: int, pool: Pool, template: Described | None) -> dict[str, Any]:
    """Return what must change at the group so that it holds `size` machines and starts those of `pool`.

    The maximum is the level: whatever is repeated or raced, AWS starts no more. `template` is what it starts them by,
    None where it starts none.
    """
    group = listing.group or {}
    wanted: dict[str, Any] = {"MinSize": 0, "MaxSize": size}
    if size > 0:
        wanted["VPCZoneIdentifier"] = subnet_of(listing, pool)
    changes = {name: value for name, value in wanted.items() if group.get(name) != value}
    own = group.get("LaunchTemplate", {})
    if template is not None and any(own.get(name) != value for name, value in template.items()):
        changes["LaunchTemplate"] = dict(template)
    return {**changes, **settings_that_hold_back(group)}


def launch(client: Any, sleep: Callable[[float], None], now: Callable[[], datetime], **asked: Any) -> Launched:
    """Start machines and return what came of it. NoLaunchCall, ClientError.

    `asked`: name, number, pool, subnet, token, and whether the cluster is so new that AWS may not know all of it yet.
    A repeat with the same token starts nothing twice: botocore repeats it by itself when the answer is lost.
    """
    call = getattr(client, "launch_instances", None)
    if call is None:
        raise NoLaunchCall(lasting=True)
    try:
        answer = insist(lambda: call(**_request(asked)), sleep)
    except botocore.exceptions.ClientError as error:
        return _refused(error, asked, now())
    ids = tuple(i for collection in answer.get("Instances", ()) for i in collection["InstanceIds"])
    told = ((e["ErrorCode"], e.get("ErrorMessage", "")) for e in answer.get("Errors", ()))
    refusals = tuple(_refusal(code, message, asked, now()) for code, message in told)
    if not ids and any(refusal.code in NOT_ALLOWED for refusal in refusals):
        # It is a fleet with the caller's rights, which tells in its answer what it may not do; the group has its own.
        raise NoLaunchCall(lasting=True)
    if len(ids) < asked["number"] and not refusals:
        refusals = (_refusal("UnfulfillableCapacity", "", asked, now()),)
    return Launched(ids=ids, refusals=refusals)


def _request(asked: dict[str, Any]) -> dict[str, Any]:
    return {
        "AutoScalingGroupName": asked["name"],
        "RequestedCapacity": asked["number"],
        "SubnetIds": [asked["subnet"]],
        "ClientToken": asked["token"],
        "RetryStrategy": "none",
    }


def _refused(error: botocore.exceptions.ClientError, asked: dict[str, Any], at: datetime) -> Launched:
    code = code_of(error)
    if code in _NO_SUCH_CALL or code in NOT_ALLOWED:
        raise NoLaunchCall(lasting=True) from error
    if code == "ValidationError":
        raise NoLaunchCall(lasting=False) from error
    if known(code).fault not in _REFUSING:
        raise error
    return Launched(ids=(), refusals=(_refusal(code, str(error), asked, at),))


def _refusal(code: str, message: str, asked: dict[str, Any], at: datetime) -> Refusal:
    told = code if known(code).fault is not Fault.UNKNOWN else code_in(message) or code
    meaning = known_of_new(told, message) if asked["settling"] else known(told)
    line = meaning.line or message[:300]
    return Refusal(pool=asked["pool"], fault=meaning.fault, code=told, message=line, at=at, hint=meaning.step)
