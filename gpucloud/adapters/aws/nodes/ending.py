"""The end of all machines of a cluster: asked for by id, and believed when nothing lists them any more."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of
from gpucloud.adapters.aws.nodes.place import Place
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
