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
# What was made a moment ago, and is not known everywhere yet: a template's version, a role's profile.
_NOT_YET = re.compile(
    r"launch ?template.*(not exist|not ?found)|invalid iam instance profile|InvalidLaunchTemplate\w*\.\w*NotFound",
    re.IGNORECASE | re.DOTALL,
)
_GONE = re.compile(r"not part of|not found|no managed instance", re.IGNORECASE)
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


def insist(call: Callable[[], Answer], sleep: Callable[[float], None]) -> Answer:
    """Return the call's answer, repeating it for half a minute while AWS is busy, or does not know yet what it made.

    The call must bear repeating.
    """
    for wait_s in _WAITS_S:
        try:
            return call()
        except botocore.exceptions.ClientError as error:
            if not (code_of(error).startswith(_BUSY) or _NOT_YET.search(str(error))):
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
