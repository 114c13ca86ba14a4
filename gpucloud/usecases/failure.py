"""What a failed script said: its exception in one line, and its output where nobody has seen that already."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpucloud.domain.agentstatus import Outcome
from gpucloud.domain.launch import attempt_folder
from gpucloud.domain.raised import failure_of, unsaved_of, without_code_folder
from gpucloud.domain.state import Attempt
from gpucloud.domain.supervision.membership import members_of, part_of
from gpucloud.domain.supervision.seen import NodeSeen, Seen
from gpucloud.ports import Host, Shell
from gpucloud.usecases.jobstore import JobStore

_LINES = 40
_END = 8000  # of a rank's output: what it said just before
# What the other ranks say when one of them is gone: gloo's and NCCL's words, as torch 2.6 to 2.13 raises them.
_PEER_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|gloo/transport|DistBackendError|NCCL (error|communicator)"
    r"|Timed out waiting .* for (send|recv)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What the rank that failed first said.

    `shown` is the end of its output, None where it was shown as it came. `failure` is its exception in one line.
    """

    shown: str | None = None
    failure: str | None = None


def last_words(attempt: Attempt, seen: Seen, jobs: JobStore, shell: Shell) -> LastWords:
    """Return what the rank that failed first said last; rank 0's output was shown as it came.

    Where no script wrote anything, the launcher's own output tells why it could not start.
    """
    failed = {_rank_of(attempt, node): node for node in members_of(attempt, seen) if node and _failed(attempt, node)}
    if not failed:
        return LastWords()
    texts = {rank: _kept(jobs, attempt.number, rank) for rank in failed}
    rank = first_to_fail(texts)
    if not texts[rank]:
        node = failed[rank].node
        said = _launcher(shell.host(node), attempt.number)
        return LastWords(shown=_tail(f"the launcher on {node.id}", said))
    shown = None if rank == 0 else _tail(f"rank {rank}", texts[rank])
    return LastWords(shown=shown, failure=cause(texts, rank))


def cause(texts: Mapping[int, str], rank: int) -> str | None:
    """Return what ended the scripts in one line; of ranks that all lost a peer, first why one could not save."""
    failure = failure_of(texts[rank], rank)
    if failure is None or _PEER_LOST.search(failure) is None:
        return failure
    unsaved = next((said for text in texts.values() if (said := unsaved_of(text[-_END:])) is not None), None)
    return f"{unsaved}; then {failure}" if unsaved is not None else failure


def first_to_fail(texts: Mapping[int, str]) -> int:
    """Return the rank whose output names a cause of its own; ranks that only lost a peer failed because of it."""
    return min(texts, key=lambda rank: (_PEER_LOST.search(texts[rank][-4000:]) is not None, not texts[rank], rank))


def _failed(attempt: Attempt, node: NodeSeen) -> bool:
    part = part_of(attempt, node)
    return part is not None and part.outcome in (Outcome.BARRED, Outcome.FAILED)


def _rank_of(attempt: Attempt, node: NodeSeen) -> int:
    part = part_of(attempt, node)
    return part.failed_rank if part is not None and part.failed_rank is not None else 0


def _kept(jobs: JobStore, attempt: int, rank: int) -> str:
    parts = [part for part in jobs.records.log_parts(attempt) if part.rank == rank]
    return "".join(jobs.records.read_log(part).decode(errors="replace") for part in parts[-4:])


def _launcher(host: Host, attempt: int) -> str:
    done = host.run(("tail", "-n", str(_LINES), f"{attempt_folder(host.node.root, attempt)}/launcher.log"))
    return done.stdout.decode(errors="replace")


def _tail(who: str, text: str) -> str:
    lines = without_code_folder(text).rstrip().splitlines()[-_LINES:]
    return "\n".join([f"{who} failed:", *(f"  | {line}" for line in lines)])
