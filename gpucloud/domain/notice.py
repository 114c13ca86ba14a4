"""What the instance metadata service says about the node's end, as a `Notice`."""

from __future__ import annotations

import json
from datetime import datetime, timezone

from gpucloud.domain.bounds import in_calendar
from gpucloud.domain.node import Notice

_ACTIONS = ("terminate", "stop", "hibernate")


def notice_from(instance_action: str) -> Notice | None:
    """Return the notice in a `spot/instance-action` document; None for a document that says nothing known.

    `{"action": "terminate", "time": "2017-09-18T08:22:00Z"}` (EC2 User Guide, "Spot Instance interruption
    notices"). An unknown document is no reason to stop a training run, hence None and no error.
    """
    try:
        document = json.loads(instance_action)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("action") not in _ACTIONS:
        return None
    at = _time(document.get("time"))
    return Notice(action=document["action"], at=at) if at else None


def recommended_at(rebalance: str) -> datetime | None:
    """Return since when a `events/recommendations/rebalance` document recommends to leave; None for an unknown one.

    `{"noticeTime": "2020-10-27T08:22:00Z"}` (EC2 User Guide, "EC2 instance rebalance recommendations").
    """
    try:
        document = json.loads(rebalance)
    except (ValueError, RecursionError):
        return None
    return _time(document.get("noticeTime")) if isinstance(document, dict) else None


def _time(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        # Python 3.10 does not read the `Z`.
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
        at = at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return at if in_calendar(at) else None
