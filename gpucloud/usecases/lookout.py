"""Reading one node: its agent's status and the new output of its ranks, in one round trip."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from gpucloud.domain.agentstatus import Status, status_from_json
from gpucloud.domain.state import Attempt
from gpucloud.ports import Host
from gpucloud.usecases.jobstore import JobStore

_MOST = 1 << 20  # bytes of output of one rank that one pass takes
_KEEP_AT = 1 << 16  # bytes after which read output goes to the store without waiting for the next flush
_SCRIPT = """border=$1; most=$2; shift 2
cat .gpucloud/agent/status.json 2>/dev/null
while [ $# -gt 0 ]; do
  printf '%s' "$border"; tail -c "+$2" "$1" 2>/dev/null | head -c "$most"; shift 2
done"""


@dataclass(slots=True)
class _Rank:
    """One rank's output: read up to `offset`; `unkept` is the end of it that is not in the store yet."""

    offset: int
    unkept: bytes = b""


@dataclass(slots=True)
class LogReader:
    """Where each rank's output has been read to, what goes to the store, and who gets the lines."""

    jobs: JobStore
    output: Callable[[int, int, str], None]
    _ranks: dict[tuple[int, int], _Rank] = field(default_factory=dict)

    def offset(self, attempt: int, rank: int) -> int:
        """Return how many bytes have been read; what an earlier supervisor kept counts."""
        key = (attempt, rank)
        if key not in self._ranks:
            self._ranks[key] = _Rank(offset=self.jobs.log_length(attempt, rank))
        return self._ranks[key].offset

    def take(self, attempt: int, rank: int, data: bytes, *, last: bool) -> None:
        """Take new output: whole lines, or all of it when it is the `last` or a line is too long to wait for."""
        whole = data if last or len(data) >= _MOST else data[: data.rfind(b"\n") + 1]
        if not whole:
            return
        known = self._ranks[attempt, rank]
        known.offset += len(whole)
        known.unkept += whole
        self.output(attempt, rank, whole.decode(errors="replace"))
        if len(known.unkept) >= _KEEP_AT:
            self._keep(attempt, rank)

    def flush(self) -> None:
        """Write what was read to the store."""
        for attempt, rank in tuple(self._ranks):
            self._keep(attempt, rank)

    def _keep(self, attempt: int, rank: int) -> None:
        known = self._ranks[attempt, rank]
        if known.unkept:
            data, known.unkept = known.unkept, b""
            self.jobs.append_log(attempt, rank, known.offset - len(data), data)


def read_node(
    host: Host, node_id: str, attempt: Attempt | None, workers: int, logs: LogReader, *, last: bool = False
) -> Status | None:
    """Return what the node's agent says, None before it says anything; new output goes to `logs`.

    Raises HostUnreachable. A torn or foreign status reads as None.
    """
    ranks = _ranks(node_id, attempt, workers)
    number = attempt.number if attempt else 0
    files: list[str] = []
    for rank in ranks:
        files += [f".gpucloud/attempts/{number:04d}/rank-{rank}.log", str(logs.offset(number, rank) + 1)]
    border = f"--{uuid.uuid4().hex}--"
    done = host.run(("sh", "-c", _SCRIPT, "sh", border, str(_MOST), *files))
    status, *outputs = done.stdout.split(border.encode())
    for rank, data in zip(ranks, outputs, strict=False):
        logs.take(number, rank, data, last=last)
    try:
        return status_from_json(status) if status else None
    except ValueError:
        return None


def _ranks(node_id: str, attempt: Attempt | None, workers: int) -> tuple[int, ...]:
    """The global ranks that run on the node: torchrun numbers them node by node."""
    if attempt is None:
        return ()
    nodes = [member.rank for member in attempt.members if member.node_id == node_id]
    return tuple(node * workers + local for node in nodes for local in range(workers))
