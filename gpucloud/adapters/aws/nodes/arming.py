"""The shut-off of a group: scheduled actions that need nobody, read back before any machine is started.

One fires at the time itself, and AWS forgets it then; another one fires again and again from five minutes later on, so
that a level that is raised too late, by a process that slept meanwhile, is lowered too. What would keep either from
ending machines is lifted: scale-in protection, suspended processes, other policies of termination.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.launching import insist
from gpucloud.adapters.aws.nodes.listing import (
    AUTO_SHUTDOWN,
    AUTO_SHUTDOWN_AGAIN,
    CLUSTER_TAG,
    HOLDING_PROCESSES,
    AutoShutdown,
    Described,
    Listing,
    Place,
    drill_role,
    held_back,
    read_auto_shutdown,
    settings_that_hold_back,
)
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import ProvisionError
from gpucloud.system.retries import Retry

_NOTHING = {"MinSize": 0, "MaxSize": 0, "DesiredCapacity": 0}
_AGAIN = timedelta(minutes=5)
_AGAIN_EVERY = "*/5 * * * *"
_READ_BACK = Retry(first_s=0.5, longest_s=15.0, tries=7)  # a listing lags by some tens of seconds at times


def put_auto_shutdown(
    aws: Aws,
    place: Place,
    until: datetime,
    armed: AutoShutdown,
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
    first = (
        (AUTO_SHUTDOWN, AUTO_SHUTDOWN_AGAIN)
        if armed.at is not None and at < armed.at
        else (AUTO_SHUTDOWN_AGAIN, AUTO_SHUTDOWN)
    )
    with aws.calling("autoscaling", f"arm the shut-off of {place}", place.region) as client:
        try:
            for name in first:
                again = {"Recurrence": _AGAIN_EVERY} if name == AUTO_SHUTDOWN_AGAIN else {}
                _put(client, place, name, at + _AGAIN if again else at, again, sleep)
        except botocore.exceptions.ClientError as error:
            if code_of(error) == "ValidationError" and at <= now():
                return None  # it passed on the way there
            raise
    if until_listed(aws, place, lambda listed: listed == AutoShutdown(at=at, again=at + _AGAIN), sleep):
        return at
    if at <= now():
        return None  # it has fired, and AWS has forgotten it
    raise ProvisionError(
        f"{place}: the shut-off was set to {at:%H:%M:%S} UTC and AWS does not list it; nothing is started",
        hint="the same command again",
        may_pass=True,
    )


def until_listed(
    aws: Aws, place: Place, wanted: Callable[[AutoShutdown], bool], sleep: Callable[[float], None]
) -> bool:
    """Whether AWS lists a shut-off that is as wanted within half a minute."""
    tries = _READ_BACK.begin(sleep)
    while not wanted(read_auto_shutdown(aws, place)):
        if not tries.again():
            return False
    return True


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
    tries = _READ_BACK.begin(sleep)
    while still := held_back(renewed()):
        if not tries.again():
            break
    else:
        return
    raise ProvisionError(
        f"{place}: the shut-off could not end its machines: {', '.join(still)}",
        hint="take that away, or: gpucloud down",
        may_pass=True,
    )


def set_to_nothing(aws: Aws, place: Place, sleep: Callable[[float], None]) -> None:
    """Set the level to 0 now, whatever is scheduled."""
    with aws.calling("autoscaling", f"set the size of {place} to 0", place.region) as client:
        insist(lambda: client.update_auto_scaling_group(AutoScalingGroupName=place.cluster, **_NOTHING), sleep)


def shut_down_now(aws: Aws, place: Place, *, now: Callable[[], datetime], sleep: Callable[[float], None]) -> None:
    """Set the level to 0, and take the schedule away: no later shut-off may look like one that lies ahead.

    The action that recurs stays, and comes soon: what another process raises at this moment is lowered by it.
    """
    set_to_nothing(aws, place, sleep)
    with aws.calling("autoscaling", f"take back the shut-off of {place}", place.region) as client:
        try:
            client.delete_scheduled_action(AutoScalingGroupName=place.cluster, ScheduledActionName=AUTO_SHUTDOWN)
        except botocore.exceptions.ClientError as error:
            if code_of(error) not in ("ValidationError", "ResourceNotFound"):
                raise
        _put(
            client,
            place,
            AUTO_SHUTDOWN_AGAIN,
            now().replace(microsecond=0) + _AGAIN,
            {"Recurrence": _AGAIN_EVERY},
            sleep,
        )


def _put(
    client: Any, place: Place, name: str, at: datetime, again: dict[str, str], sleep: Callable[[float], None]
) -> None:
    asked = {"AutoScalingGroupName": place.cluster, "ScheduledActionName": name, "StartTime": at}
    insist(lambda: client.put_scheduled_update_group_action(**asked, **again, **_NOTHING), sleep)


# Machines that end: all of a cluster, by id, until nothing lists them; or one, by a drill of FIS.


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
_FAILED = (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError)


_UNANSWERED = (botocore.exceptions.ReadTimeoutError, botocore.exceptions.ConnectionClosedError)


def send_notice(aws: Aws, place: Place, group: Described, node_id: str, sleep: Callable[[float], None]) -> str | None:
    """Have the machine interrupted with two minutes' notice; ProvisionError and CredentialsError where AWS refuses.

    None once AWS does it. A drill that may be begun is no refusal, whatever fails after: it is told what is not known.
    """
    partition, account = _owner(group)
    with aws.calling("fis", f"interrupt {node_id} for a drill", place.region) as client:
        template = client.create_experiment_template(**_template(partition, account, place, node_id))
        template_id = template["experimentTemplate"]["id"]
        try:
            started = client.start_experiment(
                clientToken=uuid.uuid4().hex, experimentTemplateId=template_id, tags=_tags(place)
            )
            return _await_start(client, started["experiment"]["id"], node_id, sleep)
        except _UNANSWERED:
            return f"AWS did not answer whether it takes {node_id}"
        finally:
            with contextlib.suppress(*_FAILED):  # a template that stays costs nothing
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


def _await_start(client: Any, experiment: str, node_id: str, sleep: Callable[[float], None]) -> str | None:
    unknown = f"AWS has begun to take {node_id}, and does not say yet that it does"
    for _ in range(_POLLS):
        try:
            state = client.get_experiment(id=experiment)["experiment"]["state"]
        except _FAILED as error:
            unknown = f"AWS has begun to take {node_id}, and cannot be asked whether it does ({code_of(error)})"
        else:
            if state["status"] in ("running", "completed"):
                return None
            if state["status"] in ("failed", "cancelled"):  # before its only action, or in that
                raise ProvisionError(
                    f"the drill for {node_id} {state['status']}: {state.get('reason', 'AWS says no reason')}",
                    hint="gpucloud up, which makes the drill's role; only spot machines can be interrupted",
                )
        sleep(_POLL_S)
    return unknown


def _tags(place: Place) -> dict[str, str]:
    return {"gpucloud:managed": "true", CLUSTER_TAG: place.cluster}


def _owner(group: Described) -> tuple[str, str]:
    """Partition and account, from the group's own ARN."""
    parts = str(group["AutoScalingGroupARN"]).split(":")
    return parts[1], parts[4]
