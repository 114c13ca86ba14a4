"""A setup that fails: whether that is the job's own fault, or one machine's."""

from __future__ import annotations

from gpucloud.domain.supervision.membership import is_gone
from gpucloud.domain.supervision.seen import NodeSeen, Readiness, Seen


def failed_setup(seen: Seen) -> str | None:
    """Return why the job's setup can work on no machine; None where it has worked on one, or may yet.

    One that is gone says nothing any more: after it failed, another one's may have worked, and that be gone as well.
    """
    if _has_worked(seen) or _may_work(seen):
        return None
    return next((node.setup_failed for node in seen.nodes if node.setup_failed is not None and not is_gone(node)), None)


def is_in_doubt(node: NodeSeen, seen: Seen) -> bool:
    """Whether the machine's setup failed, and another one's is to tell whose fault that is."""
    return node.setup_failed is not None and not _has_worked(seen) and _may_work(seen)


def _has_worked(seen: Seen) -> bool:
    """Whether a machine has been made ready since the run was begun, or begun again: with this very setup."""
    opened = len(seen.state.attempts) > seen.state.reopened_after
    return opened or any(node.readiness is Readiness.READY and not is_gone(node) for node in seen.nodes)


def _may_work(seen: Seen) -> bool:
    return any(node.readiness is Readiness.PREPARING and not is_gone(node) for node in seen.nodes)
