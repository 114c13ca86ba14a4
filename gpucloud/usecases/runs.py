"""The runs of a job in a store: `digits`, then `digits-2`, …"""

from __future__ import annotations

import re

from gpucloud.domain.state import JobState
from gpucloud.store import ObjectStore
from gpucloud.usecases.jobstore import JobStore, job_names


def current_run(store: ObjectStore, name: str) -> tuple[str, JobState] | None:
    """Return a job's newest run with its state; None when there is none."""
    runs = [(number, run) for run in job_names(store) if (number := run_number(name, run))]
    if not runs:
        return None
    newest = max(runs)[1]
    loaded = JobStore(store, newest).load()
    return (newest, loaded[0]) if loaded else None


def run_number(name: str, run: str) -> int:
    """Return 1 for the job's first run, n for `name-n`, 0 for another job."""
    if run == name:
        return 1
    m = re.fullmatch(re.escape(name) + r"-(\d+)", run)
    return int(m[1]) if m and int(m[1]) >= 2 else 0
