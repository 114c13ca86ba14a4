"""Which of the zones that are up a policy prefers."""

from __future__ import annotations

from collections.abc import Iterable

from gpucloud.domain.policy.observation import ZoneState


def cheapest(zones: Iterable[ZoneState], below_usd_per_hour: float) -> ZoneState | None:
    """Return the cheapest zone among those that are up and cost less than that; the first of equals."""
    best = None
    for zone in zones:
        if zone.up and zone.usd_per_hour < below_usd_per_hour:
            best, below_usd_per_hour = zone, zone.usd_per_hour
    return best


def named(zones: Iterable[ZoneState], name: str | None) -> ZoneState | None:
    """Return the zone of that name."""
    return next((zone for zone in zones if zone.zone == name), None)
