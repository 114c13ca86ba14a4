"""What an Auto Scaling group says of its own doings: refused launches, and a shut-off that has fired."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone

from gpucloud.adapters.aws.faults import code_in, known, known_of_new
from gpucloud.adapters.aws.nodes.listing import Described, Listing
from gpucloud.domain.node import Refusal
from gpucloud.domain.offer import Pool


def refusals(listing: Listing, pool: Pool) -> tuple[Refusal, ...]:
    """Return the latest refusal of every pool and code. `pool` is the group's: a message may name another type."""
    activities = listing.activities
    latest: dict[tuple[Pool, str], Refusal] = {}
    for activity in activities:
        if activity["StatusCode"] == "Failed" and activity["Description"].startswith("Launching"):
            refusal = _refusal(activity, pool, settling=listing.settles(activity["StartTime"]))
            key = (refusal.pool, refusal.code)
            if key not in latest or latest[key].at < refusal.at:
                latest[key] = refusal
    return tuple(latest.values())


def fired_shut_off(activities: Iterable[Described]) -> datetime | None:
    """Return when a schedule last set the group to 0: AWS forgets a schedule that has fired."""
    told = (
        re.search(r"At (\S+Z) a scheduled action .*desired: 0\b", activity.get("Cause") or "")
        for activity in activities
    )
    times = [datetime.strptime(m[1], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc) for m in told if m]
    return max(times, default=None)


def _refusal(activity: Described, pool: Pool, *, settling: bool) -> Refusal:
    text = activity.get("StatusMessage") or ""
    code = code_in(text)
    meaning = known_of_new(code, text) if settling else known(code)
    return Refusal(
        pool=_named(text, activity.get("Details") or "", pool),
        fault=meaning.fault,
        code=code or "Failed",
        message=meaning.line or text[:300],
        at=activity.get("EndTime") or activity["StartTime"],
        hint=meaning.step,
    )


def _named(text: str, details: str, pool: Pool) -> Pool:
    """The pool may have been changed since: AWS names the zone, and the type when it has no capacity."""
    kind = re.search(r"sufficient ([a-z0-9-]+\.[a-z0-9-]+) capacity", text)
    zone = re.search(r'"Availability Zone": ?"([a-z0-9-]+)"', details)
    return replace(pool, instance_type=kind[1] if kind else pool.instance_type, zone=zone[1] if zone else pool.zone)
