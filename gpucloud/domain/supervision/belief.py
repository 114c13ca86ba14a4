"""When a machine that tells us nothing is believed to be dead: a second witness agrees (DESIGN §7), or nobody can."""

from __future__ import annotations

from datetime import timedelta

from gpucloud.domain.supervision.membership import is_gone, somebody_answers
from gpucloud.domain.supervision.seen import Limits, NodeSeen, Seen
from gpucloud.domain.witness import Word


def believed_dead(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    """Whether the silent machine is given up, or the one that answers and has said nothing for `alone`.

    Of a silent one the cloud says that it is impaired, or another machine knocked in vain; where nobody can tell, it is
    given up after `alone`. All machines silent at once means that we are offline: then only the cloud is believed,
    unless there is but one machine.
    """
    if is_gone(node):
        return False
    if node.mute_for >= limits.alone:
        return True
    if node.silent_for < limits.silent:
        return False
    if node.node.impaired:
        return True
    if node.word is Word.ALIVE:
        return False
    if node.word is Word.DEAD and somebody_answers(seen):
        return True
    return node.silent_for >= limits.alone and (somebody_answers(seen) or _is_only_one(seen))


def is_out_of_reach(node: NodeSeen, seen: Seen, limits: Limits) -> bool:
    """Whether the machine is of no use to us: alive or not, we cannot reach it, and others we can."""
    return believed_dead(node, seen, limits) or (node.silent_for >= limits.alone and somebody_answers(seen))


def vouched_for(seen: Seen, limits: Limits) -> tuple[NodeSeen, ...]:
    """Return the machines that do not answer us, and of which another witness says that they live."""
    silent = (n for n in seen.nodes if not is_gone(n) and n.silent_for >= limits.silent)
    return tuple(node for node in silent if node.word is Word.ALIVE and not node.node.impaired)


def is_doubtful(node: NodeSeen | None) -> bool:
    """Whether it may yet turn out that the machine went: it is silent, and nobody has vouched for it."""
    return node is not None and not is_gone(node) and node.silent_for > timedelta(0) and node.word is not Word.ALIVE


def _is_only_one(seen: Seen) -> bool:
    return sum(not is_gone(node) for node in seen.nodes) == 1
