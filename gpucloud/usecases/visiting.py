"""Asking a job's nodes how they stand, from any terminal, beside whoever supervises them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from gpucloud.domain.errors import NodeError
from gpucloud.domain.node import Node, NodeState
from gpucloud.ports import Shell
from gpucloud.usecases.lookout import read_status
from gpucloud.usecases.report import JobReport, NodeStanding

_AT_ONCE = 16


def visited(report: JobReport, shell: Shell) -> JobReport:
    """Return the report with what its nodes say now, if an attempt is open; one that does not answer has no status."""
    nodes = [node for node in report.nodes if node.state is NodeState.RUNNING and node.host_key is not None]
    if not nodes or not report.attempts or report.attempts[-1].reason is not None:
        return report
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(nodes))) as pool:
        return replace(report, standing=tuple(pool.map(lambda node: _visit(node, shell), nodes)))


def _visit(node: Node, shell: Shell) -> NodeStanding:
    try:
        return NodeStanding(node_id=node.id, status=read_status(shell.host(node)))
    except NodeError:
        return NodeStanding(node_id=node.id, status=None)
