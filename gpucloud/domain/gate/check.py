"""A check: what was seen, and how it was judged."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.gate.findings import Finding
from gpucloud.domain.gate.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The answer of a node's `gate` command."""

    report: Report
    findings: tuple[Finding, ...]
