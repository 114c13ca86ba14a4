"""Calls that AWS refuses only because it is still busy with the one before."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import botocore.exceptions

from gpucloud.adapters.aws.faults import code_of

Answer = TypeVar("Answer")

# botocore repeats what was throttled; these come as plain refusals (HTTP 4xx) and are over by themselves.
_BUSY = ("ResourceContention", "IdempotentCallInProgress", "ScalingActivityInProgress")
_GONE = re.compile(r"not part of|not found|no managed instance", re.IGNORECASE)
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


def insist(call: Callable[[], Answer], sleep: Callable[[float], None]) -> Answer:
    """Return the call's answer, repeating it for about half a minute while AWS is busy; it must bear repeating."""
    for wait_s in _WAITS_S:
        try:
            return call()
        except botocore.exceptions.ClientError as error:
            if not code_of(error).startswith(_BUSY):
                raise
            sleep(wait_s)
    return call()


def unless_gone(call: Callable[[], Answer]) -> bool:
    """Make a call about one machine of a group; False when AWS says that the group has no such machine (any more)."""
    try:
        call()
    except botocore.exceptions.ClientError as error:
        if code_of(error) != "ValidationError" or not _GONE.search(str(error)):
            raise
        return False
    return True
