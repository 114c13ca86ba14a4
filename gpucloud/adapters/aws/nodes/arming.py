"""The shut-off of a group: a scheduled action that needs nobody, read back before any machine is started."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.insisting import insist
from gpucloud.adapters.aws.nodes.listing import shut_off_of
from gpucloud.adapters.aws.nodes.place import SHUT_OFF, Place
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError

_NOTHING = {"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0}
_READ_BACKS = 6
_READ_BACK_S = 0.5


def put_shut_off(
    aws: Aws, place: Place, until: datetime, *, now: Callable[[], datetime], sleep: Callable[[float], None]
) -> datetime | None:
    """Set the shut-off and return the time that AWS lists; None when `until` has passed. ProvisionError otherwise.

    AWS keeps whole seconds: the time is rounded down, so that the cloud never promises more than was asked for.
    """
    at = until.replace(microsecond=0)
    if at <= now():
        return None
    with aws.calling("autoscaling", f"arm the shut-off of {place}", place.region) as client:
        try:
            insist(
                lambda: client.put_scheduled_update_group_action(
                    AutoScalingGroupName=place.cluster, ScheduledActionName=SHUT_OFF, StartTime=at, **_NOTHING
                ),
                sleep,
            )
        except botocore.exceptions.ClientError as error:
            if code_of(error) == "ValidationError" and at <= now():
                return None  # it passed on the way there
            raise
    for _ in range(_READ_BACKS):
        listed = shut_off_of(aws, place)
        if listed == at:
            return at
        sleep(_READ_BACK_S)
    if at <= now():
        return None  # it has fired, and AWS has forgotten it
    raise ProvisionError(
        f"{place}: the shut-off was set to {at:%H:%M:%S} UTC and AWS does not list it; nothing is started",
        hint="the same command again",
    )


def set_to_nothing(aws: Aws, place: Place, sleep: Callable[[float], None]) -> None:
    """Set the level to 0 now, whatever is scheduled."""
    with aws.calling("autoscaling", f"set the size of {place} to 0", place.region) as client:
        insist(lambda: client.update_auto_scaling_group(AutoScalingGroupName=place.cluster, **_NOTHING), sleep)


def shut_off_now(aws: Aws, place: Place, sleep: Callable[[float], None]) -> None:
    """Set the level to 0 and take the schedule away: no later shut-off may look like one that lies ahead."""
    set_to_nothing(aws, place, sleep)
    with aws.calling("autoscaling", f"take back the shut-off of {place}", place.region) as client:
        try:
            client.delete_scheduled_action(AutoScalingGroupName=place.cluster, ScheduledActionName=SHUT_OFF)
        except botocore.exceptions.ClientError as error:
            if code_of(error) not in ("ValidationError", "ResourceNotFound"):
                raise
