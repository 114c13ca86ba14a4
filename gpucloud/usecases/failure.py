"""What a failed script said, where the person who looks on has not seen it already."""

from __future__ import annotations

from gpucloud.domain.agentstatus import Outcome
from gpucloud.domain.reconcile import members_of, part_of
from gpucloud.domain.seen import Seen
from gpucloud.domain.state import Attempt
from gpucloud.ports import Host, Shell
from gpucloud.usecases.jobstore import JobStore

_LINES = 40


def last_words(attempt: Attempt, seen: Seen, jobs: JobStore, shell: Shell) -> str | None:
    """Return the end of the failed rank's output; None when it is rank 0's, which was shown as it came.

    Where no script wrote anything, the launcher's own output tells why it could not start.
    """
    for node in members_of(attempt, seen):
        part = part_of(attempt, node)
        if node is None or part is None or part.outcome is not Outcome.FAILED:
            continue
        rank = part.failed_rank if part.failed_rank is not None else 0
        text = _kept(jobs, attempt.number, rank)
        if not text:
            return _tail(f"the launcher on {node.node.id}", _launcher(shell.host(node.node), attempt.number))
        return None if rank == 0 else _tail(f"rank {rank}", text)
    return None


def _kept(jobs: JobStore, attempt: int, rank: int) -> str:
    parts = [part for part in jobs.log_parts(attempt) if part.rank == rank]
    return "".join(jobs.read_log(part).decode(errors="replace") for part in parts[-4:])


def _launcher(host: Host, attempt: int) -> str:
    done = host.run(("tail", "-n", str(_LINES), f".gpucloud/attempts/{attempt:04d}/launcher.log"))
    return done.stdout.decode(errors="replace")


def _tail(who: str, text: str) -> str:
    lines = text.rstrip().splitlines()[-_LINES:]
    return "\n".join([f"{who} failed:", *(f"  | {line}" for line in lines)])
