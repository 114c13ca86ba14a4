"""Terraform's lock object in S3 when its Terraform is dead: removed only when that is proven."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from gpucloud.adapters.terraform.record import Run, read
from gpucloud.adapters.terraform.statehome import StateHome
from gpucloud.domain.errors import ProvisionError
from gpucloud.store.contract import Stored

_POLL_S = 0.5


def stuck_lock(home: StateHome, *, wait_s: float, story: Callable[[str], None]) -> str | None:
    """Return the id of a lock whose Terraform is proven dead; None when nothing is locked.

    A living one is waited for; ProvisionError after `wait_s`: who holds it, since when, until when at most.
    """
    deadline, told = time.monotonic() + wait_s, False
    while (lock := home.store.get(home.lock)) is not None:
        about = _about(lock)
        stored = home.store.get(home.run)
        run = read(Run, stored.data) if stored else None
        if run is not None and _is_dead(run, lock, about):
            story(f"Terraform's lock on {home.name} was left by a run that is dead; removing it")
            return str(about.get("ID", ""))
        if time.monotonic() > deadline:
            raise _held(home, run, lock, about)
        if not told:
            story(f"{about.get('Who', 'somebody')} is at work on {home.name} with Terraform; waiting for it")
            told = True
        time.sleep(_POLL_S)
    return None


def _is_dead(run: Run, lock: Stored, about: dict[str, Any]) -> bool:
    if not _is_of(run, about):
        return False
    return run.is_gone() or lock.store_time - lock.modified > timedelta(seconds=run.ends_within_s)


def _is_of(run: Run, about: dict[str, Any]) -> bool:
    """Whether the lock is that run's: somebody may have run Terraform by hand, whom nothing here ends."""
    return str(about.get("Who", "")).rpartition("@")[2] == run.host


def _held(home: StateHome, run: Run | None, lock: Stored, about: dict[str, Any]) -> ProvisionError:
    since = lock.modified.astimezone(timezone.utc)
    message = f"{about.get('Who', 'somebody')} holds Terraform's lock on {home.name} since {_clock(since)}"
    if run is None or not _is_of(run, about):
        return ProvisionError(
            message, hint=f"if that run is dead: delete the object {home.lock} in {home.store.url}, then try again"
        )
    until = since + timedelta(seconds=run.ends_within_s)
    return ProvisionError(message, hint=f"try again when it has ended; the lock is taken over at {_clock(until)}")


def _clock(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"


def _about(lock: Stored) -> dict[str, Any]:
    try:
        value = json.loads(lock.data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
