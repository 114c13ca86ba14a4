"""The whole check of this machine: look, try out, judge; what passed is written down for this boot."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from gpucloud.agent.gate.kernel_log import kernel_log
from gpucloud.agent.gate.look import look, with_log
from gpucloud.agent.gate.record import write_down
from gpucloud.agent.gate.surroundings import clock_is_kept, memlock, reach, write_mbps
from gpucloud.agent.gate.try_out import try_out
from gpucloud.domain.gate.check import Checked
from gpucloud.domain.gate.findings import failures
from gpucloud.domain.gate.judge import judge
from gpucloud.domain.gate.report import Report
from gpucloud.domain.gate.wanted import GateOrder, store_endpoint


def check(root: Path, order: GateOrder, *, busy: bool = False) -> Checked:
    """Look at this machine, put it to work where that is wanted, judge it; what has a digest and passes is recorded.

    `busy`: an attempt of ours runs here, and holds devices by right.
    """
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / "gate.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would measure each other
        started = time.monotonic()
        report = look(order, busy=busy)
        if order.wanted.full:
            report = _fully(root, order, report)
        report = replace(report, seconds=round(time.monotonic() - started, 2))
        findings = judge(report, order.wanted)
        if order.digest and not failures(findings):
            write_down(root, order.digest, report, findings)
    return Checked(report=report, findings=findings)


def _fully(root: Path, order: GateOrder, report: Report) -> Report:
    store = store_endpoint(order, os.environ)
    seen = replace(
        report,
        clock_kept=clock_is_kept(),
        free_bytes=shutil.disk_usage(root).free,
        write_mbps=write_mbps(root),
        memlock=memlock(),
        store=reach(store) if store else None,
    )
    # Without devices there is nothing to put to work; with them, the job's torch is tried even where they are too few.
    tried = order.wanted.torch and seen.gpus and order.python and not seen.stand_in
    # What the devices did at work may be in the kernel's log only.
    return with_log(try_out(order, seen), kernel_log(sudo=order.sudo)) if tried else seen
