"""Hosts that do not serve: why, when they are asked again, and what that means for the level."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from gpucloud.adapters.hosts.records import POOL, Hosts, PassedOver, Place
from gpucloud.domain.errors import GpucloudError, HostUnreachable, KeyRefused
from gpucloud.domain.node import Fault, Refusal
from gpucloud.domain.quantities import format_moment

__all__ = ["POOL", "fallen_short", "marked", "over", "why_not"]

_AGAIN = timedelta(seconds=20)


def why_not(answer: dict[str, Any] | GpucloudError, now: datetime) -> tuple[str, bool] | None:
    """Return why the host was not taken, and whether that lasts until somebody changes something; None: it was."""
    if isinstance(answer, GpucloudError):
        lasting = not isinstance(answer, HostUnreachable) or isinstance(answer, KeyRefused)
        hint = f" (hint: {answer.hint})" if lasting and answer.hint else ""
        return f"{answer.message}{hint}", lasting
    if answer.get("store") is False:
        return "does not see the store's folder: store: s3://bucket/prefix, or a folder that all hosts share", True
    holder = answer.get("held")
    if holder is None:
        return None
    until = datetime.fromtimestamp(float(holder["until"]), timezone.utc)
    devices = f"GPUs {', '.join(holder['devices'])}" if holder["devices"] else "it"
    ends = format_moment(until, now, seconds=False)
    return f"{holder['job']} of {holder['owner']} has {devices} until {ends}, unless it goes on", False


def over(
    name: str, why: str, now: datetime, *, lasting: bool = False, last_until: datetime | None = None
) -> PassedOver:
    """Return a host's mark: it is asked again in 20 s."""
    again_at = now + _AGAIN
    return PassedOver(name=name, why=why, again_at=again_at, last_until=last_until or again_at, lasting=lasting)


def marked(record: Hosts, marks: tuple[PassedOver, ...], *, told: bool = True) -> Hosts:
    """Return the record with the marks, the newest of each host, and with a refusal for each that is to be told."""
    if not marks:
        return record
    names = {mark.name for mark in marks}
    kept = tuple(mark for mark in record.passed_over if mark.name not in names)
    refusals = tuple(
        _refusal(Fault.TRANSIENT, f"{m.name}: {m.why}", "HostPassedOver", m.again_at - _AGAIN) for m in marks if told
    )
    return replace(record, passed_over=(*kept, *marks), refusals=(*record.refusals, *refusals)[-64:])


def fallen_short(record: Hosts, places: tuple[Place, ...], now: datetime) -> Hosts:
    """Return the record at the level that was reached, with the refusal that says why it is not more.

    Waiting helps where another job may end or a host may boot; where too many have a lasting fault, it does not.
    """
    if len(record.counted) >= record.size:
        return record
    lasting = sum(mark.lasting for mark in record.passed_over)
    fault = Fault.PARAMETER if len(places) - lasting < record.size else Fault.CAPACITY
    whys = "; ".join(f"{mark.name}: {mark.why}" for mark in record.passed_over)
    message = f"{len(record.counted)} of {record.size} hosts; {whys or 'no other host is in the job file'}"
    refusal = _refusal(fault, message, "NoHost", now)
    return replace(record, size=len(record.counted), refusals=(*record.refusals, refusal)[-64:])


def _refusal(fault: Fault, message: str, code: str, at: datetime) -> Refusal:
    return Refusal(pool=POOL, fault=fault, code=code, message=message, at=at)
