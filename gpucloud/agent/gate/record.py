"""The record of the last check that passed, for this boot."""

from __future__ import annotations

import json
from pathlib import Path

from gpucloud import processes, smi
from gpucloud.agent.kernel_log import newest_event
from gpucloud.domain.codec import Malformed, from_json, plain
from gpucloud.domain.node.gate.report import Finding, GateFact, Report, figures
from gpucloud.wholefile import read_text, write_whole

_RECORD = "gate.json"


def gate_fact(root: Path) -> GateFact | None:
    """Return what the last check on this boot passed.

    None when there was none, when the machine booted since, or its log tells of something newer: the driver was loaded
    anew, a device broke or was reset.
    """
    try:
        data = json.loads(read_text(root / _RECORD) or "")
        if data.pop("boot_id") != processes.boot_id():
            return None
        fact = from_json(GateFact, json.dumps(data))
    except (ValueError, KeyError, AttributeError, Malformed):
        return None
    newest = None if smi.are_stand_ins() else newest_event()
    return None if newest is not None and newest > (fact.newest or 0.0) else fact


def write_down(root: Path, digest: str, report: Report, findings: tuple[Finding, ...]) -> None:
    """Write the record of a check that passed; what it found wanting all the same are remarks."""
    remarks = tuple(f"{finding} ({finding.hint})" for finding in findings)
    fact = GateFact(digest=digest, at=report.at, newest=report.newest, figures=figures(report), remarks=remarks)
    write_whole(root / _RECORD, json.dumps({"boot_id": processes.boot_id(), **plain(fact)}))
