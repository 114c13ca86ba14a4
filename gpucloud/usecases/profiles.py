"""Bringing home what profilers recorded, from every node of an attempt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpucloud.domain.bounds import STATUS_BYTES
from gpucloud.domain.errors import NodeError, StoreError
from gpucloud.domain.node import Node
from gpucloud.domain.profile import parse_summary, summary_lines
from gpucloud.ports import Outputs, Shell

_SUMMARY = "rank-0.summary.json"


def bring_profiles(outputs: Outputs, shell: Shell, nodes: tuple[Node, ...], attempt: int) -> Iterator[str]:
    """Yield what to tell: where the profiles are, what rank 0's says; a node that is gone keeps its own."""
    brought: list[Path] = []
    for node in nodes:
        try:
            brought += (Path(path) for path in outputs.bring_profile(shell.host(node), attempt))
        except (NodeError, StoreError) as error:
            yield f"the profile of {node.id} could not be brought home: {error}"
    traces = [path for path in brought if not path.name.endswith(".summary.json")]
    if not traces:
        yield "no profile: no rank came as far, or the script does not use gpucloud.resume and there is no nsys"
        return
    yield f"brought home: {len(traces)} profiles in {traces[0].parent}"
    for path in brought:
        # A node may send a folder or a link by that name.
        if path.name == _SUMMARY and path.is_file() and not path.is_symlink() and path.stat().st_size <= STATUS_BYTES:
            try:
                yield from summary_lines(parse_summary(path.read_bytes()))
            except (ValueError, OverflowError) as error:
                yield f"what the profile says of itself is damaged: {error}"
