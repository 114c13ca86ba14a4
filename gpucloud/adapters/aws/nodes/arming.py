"""The shut-off of a group: scheduled actions that need nobody, read back before any machine is started.

One fires at the time itself, and AWS forgets it then; another one fires again and again from five minutes later on, so
that a level that is raised too late, by a process that slept meanwhile, is lowered too. What would keep either from
ending machines is lifted: scale-in protection, suspended processes, other policies of termination.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.launching import insist
from gpucloud.adapters.aws.nodes.listing import (
    HOLDING_PROCESSES,
    Listing,
    ShutOff,
    held_back,
    read_shut_off,
    settings_that_hold_back,
)
from gpucloud.adapters.aws.nodes.place import SHUT_OFF, SHUT_OFF_AGAIN, Place
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError

_NOTHING = {"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0}
_AGAIN = timedelta(minutes=5)
_AGAIN_EVERY = "*/5 * * * *"
_READ_BACK_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # a listing lags by some tens of seconds at times


def put_shut_off(
    aws: Aws,
    place: Place,
    until: datetime,
    armed: ShutOff,
    *,
    now: Callable[[], datetime],
    sleep: Callable[[float], None],
) -> datetime | None:
    """Set the shut-off and return the time that AWS lists; None when `until` has passed. ProvisionError otherwise.

    AWS keeps whole seconds: the time is rounded down, so that the cloud never promises more than was asked for.
    `armed` is what stands. Of the two actions the one that fires later is moved first when the time is put off, and
    last when it is brought forward: at no moment does the group lack a shut-off, or have one that is too early.
    """
    at = until.replace(microsecond=0)
    if at <= now():
        return None
    first = (SHUT_OFF, SHUT_OFF_AGAIN) if armed.at is not None and at < armed.at else (SHUT_OFF_AGAIN, SHUT_OFF)
    with aws.calling("autoscaling", f"arm the shut-off of {place}", place.region) as client:
        try:
            for name in first:
                again = {"Recurrence": _AGAIN_EVERY} if name == SHUT_OFF_AGAIN else {}
                _put(client, place, name, at + _AGAIN if again else at, again, sleep)
        except botocore.exceptions.ClientError as error:
            if code_of(error) == "ValidationError" and at <= now():
                return None  # it passed on the way there
            raise
    if until_listed(aws, place, lambda listed: listed == ShutOff(at=at, again=at + _AGAIN), sleep):
        return at
    if at <= now():
        return None  # it has fired, and AWS has forgotten it
    raise ProvisionError(
        f"{place}: the shut-off was set to {at:%H:%M:%S} UTC and AWS does not list it; nothing is started",
        hint="the same command again",
        may_pass=True,
    )


def until_listed(aws: Aws, place: Place, wanted: Callable[[ShutOff], bool], sleep: Callable[[float], None]) -> bool:
    """Whether AWS lists a shut-off that is as wanted within half a minute."""
    for wait_s in _READ_BACK_S:
        if wanted(read_shut_off(aws, place)):
            return True
        sleep(wait_s)
    return wanted(read_shut_off(aws, place))


def lift(
    aws: Aws, place: Place, listing: Listing, renewed: Callable[[], Listing], sleep: Callable[[float], None]
) -> None:
    """Take away what keeps the shut-off from ending machines. ProvisionError while AWS still lists any of it."""
    if not held_back(listing):
        return
    protected = sorted(m["InstanceId"] for m in listing.members if m.get("ProtectedFromScaleIn"))
    suspended = sorted(listing.suspended & HOLDING_PROCESSES)
    changes = settings_that_hold_back(listing.group or {})
    group = {"AutoScalingGroupName": place.cluster}
    with aws.calling("autoscaling", f"let the shut-off of {place} end its machines", place.region) as client:
        if changes:
            insist(lambda: client.update_auto_scaling_group(**group, **changes), sleep)
        for first in range(0, len(protected), 50):  # as many as a call takes
            asked = {**group, "InstanceIds": protected[first : first + 50], "ProtectedFromScaleIn": False}
            insist(partial(client.set_instance_protection, **asked), sleep)
        if suspended:
            insist(lambda: client.resume_processes(**group, ScalingProcesses=suspended), sleep)
    for wait_s in _READ_BACK_S:
        if not held_back(renewed()):
            return
        sleep(wait_s)
    raise ProvisionError(
        f"{place}: the shut-off could not end its machines: {', '.join(held_back(renewed())) or 'lifted just now'}",
        hint="take that away, or: gpucloud down",
        may_pass=True,
    )


def set_to_nothing(aws: Aws, place: Place, sleep: Callable[[float], None]) -> None:
    """Set the level to 0 now, whatever is scheduled."""
    with aws.calling("autoscaling", f"set the size of {place} to 0", place.region) as client:
        insist(lambda: client.update_auto_scaling_group(AutoScalingGroupName=place.cluster, **_NOTHING), sleep)


def shut_off_now(aws: Aws, place: Place, *, now: Callable[[], datetime], sleep: Callable[[float], None]) -> None:
    """Set the level to 0, and take the schedule away: no later shut-off may look like one that lies ahead.

    The action that recurs stays, and comes soon: what another process raises at this moment is lowered by it.
    """
    set_to_nothing(aws, place, sleep)
    with aws.calling("autoscaling", f"take back the shut-off of {place}", place.region) as client:
        try:
            client.delete_scheduled_action(AutoScalingGroupName=place.cluster, ScheduledActionName=SHUT_OFF)
        except botocore.exceptions.ClientError as error:
            if code_of(error) not in ("ValidationError", "ResourceNotFound"):
                raise
        _put(client, place, SHUT_OFF_AGAIN, now().replace(microsecond=0) + _AGAIN, {"Recurrence": _AGAIN_EVERY}, sleep)


def _put(
    client: Any, place: Place, name: str, at: datetime, again: dict[str, str], sleep: Callable[[float], None]
) -> None:
    asked = {"AutoScalingGroupName": place.cluster, "ScheduledActionName": name, "StartTime": at}
    insist(lambda: client.put_scheduled_update_group_action(**asked, **again, **_NOTHING), sleep)
