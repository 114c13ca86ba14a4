"""Reading one node: what its agent says, its ranks' new output, and what others say of one that is silent."""

from __future__ import annotations

import re
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from gpucloud.domain.errors import NodeError
from gpucloud.domain.node.member import attempt_folder
from gpucloud.domain.node.node import Node, NodeState, PeerReport, peer_report_of
from gpucloud.domain.node.output import MOST_MARKS, DatedPiece, Mark, read_marks
from gpucloud.domain.node.status import RunState, Status
from gpucloud.domain.state.state import Attempt
from gpucloud.domain.supervision.membership import is_gone, progress_of
from gpucloud.domain.supervision.snapshot import NodeSnapshot, Readiness, Snapshot
from gpucloud.domain.untrusted import LOG_BYTES, STATUS_BYTES, masked
from gpucloud.ports import Host, Shell
from gpucloud.usecases.jobstore.condition import NodeStanding
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.report import JobReport, with_answers
from gpucloud.usecases.services import Services
from gpucloud.usecases.supervise.agents import read_status
from gpucloud.usecases.supervise.bootstrap import Bootstrapped
from gpucloud.usecases.supervise.prepare import Bootstrapper

_MOST = 1 << 20  # bytes of output of one rank that one pass takes
_MOST_WAITING = 100_000  # marks of one rank that wait for the store: hours of an agent's, seconds of a hostile node's
_PASSES = 3  # that one look at a node makes while there is more; a node that is slow to answer looks dead
_KEEP_AT = 1 << 16  # bytes after which read output goes to the store without waiting for the next flush
# What UTF-8 has of a letter whose last bytes are not there.
_BEGUN_LETTER = re.compile(rb"(?:[\xc2-\xf4]|[\xe0-\xf4][\x80-\xbf]|[\xf0-\xf4][\x80-\xbf]{2}|)\Z")
_LEAST_LOST = 100  # bytes: what says so is no longer
_READ = """border=$1; most=$2; shift 2
while [ $# -gt 0 ]; do
  printf '%s' "$border"; tail -c "+$2" "$1" 2>/dev/null | head -c "$most"; shift 2
done"""


@dataclass(slots=True)
class _Rank:
    """One rank's output: read up to `offset`; `unkept` is the end of it that is not in the store yet.

    Of that, a piece of `tried` bytes may be there all the same: its put failed, or only the answer to it. `marks` are
    of what is not kept, read up to `place` of the node's file. `lock` is held for moments, `keeping` while a piece is
    on its way.
    """

    offset: int
    place: int = 0
    unkept: bytes = b""
    tried: int = 0
    marks: tuple[Mark, ...] = ()
    lock: threading.Lock = field(default_factory=threading.Lock)
    keeping: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True)
class LogReader:
    """Where each rank's output has been read to, what goes to the store, and who gets the lines.

    `hidden` are words that neither gets to see.
    """

    jobs: JobStore
    output: Callable[[int, int, str], None]
    hidden: tuple[bytes, ...] = ()
    taken: int = 0
    _ranks: dict[tuple[int, int], _Rank] = field(default_factory=dict)
    _launches: set[tuple[int, int]] = field(default_factory=set)

    def offset(self, attempt: int, rank: int) -> int:
        """Return how many bytes have been read; what an earlier supervisor kept counts."""
        key = (attempt, rank)
        if key not in self._ranks:
            offset, place = self.jobs.records.log_end(attempt, rank)
            self._ranks[key] = _Rank(offset=offset, place=place)
        return self._ranks[key].offset

    def times_from(self, attempt: int, rank: int, until: int) -> int | None:
        """Return where to read on in the node's file of times, None while those of all before `until` are known."""
        self.offset(attempt, rank)
        known = self._ranks[attempt, rank]
        return None if known.marks and known.marks[-1].until >= until else known.place

    def take_times(self, attempt: int, rank: int, data: bytes) -> None:
        """Take what the node's file of times has next."""
        known = self._ranks[attempt, rank]
        with known.lock:
            after = known.marks[-1].until if known.marks else known.offset - len(known.unkept)
            marks, place = read_marks(data, known.place, after)
            known.marks = _thinned((*known.marks, *marks))
            # Where so much has no line's end, the node gave the oldest marks' blocks back.
            known.place = place if place > known.place or len(data) < _MOST else place + len(data)

    def take(self, attempt: int, rank: int, data: bytes, *, last: bool) -> None:
        """Take new output: whole lines, or all of it when it is the `last` or a line is too long to wait for.

        A line that is written over, such as a progress bar, is not waited for: its last state is worth most where its
        node is lost.
        """
        whole = self._whole(data, last=last and len(data) < _MOST)
        if not whole:
            return
        whole = masked(whole, self.hidden)
        known = self._ranks[attempt, rank]
        with known.lock:
            known.offset += len(whole)
            known.unkept += whole
        self.taken += len(whole)
        self.output(attempt, rank, whole.decode(errors="replace"))
        if len(known.unkept) >= _KEEP_AT and known.keeping.acquire(blocking=False):
            try:
                self._keep(attempt, rank)
            finally:
                known.keeping.release()

    def skip(self, attempt: int, rank: int, until: int) -> None:
        """Go on at byte `until`, if that is farther: what is before it was never read, and is no longer there.

        A line that says how much it was takes the place of the last of it, here as in the store; for very little, it
        takes that of what follows too.
        """
        before = self.offset(attempt, rank)
        if until <= before:
            return
        lost = max(until - before, _LEAST_LOST)
        said = f"({lost} bytes of output came faster than they could be read)\n"
        known = self._ranks[attempt, rank]
        with known.keeping:
            self._keep(attempt, rank)
            known.offset, known.unkept = before + lost, said.encode()
        self.output(attempt, rank, said)

    def asks_for_launch(self, attempt: int, node: int) -> bool:
        """Whether that launch was not read yet."""
        return (attempt, node) not in self._launches

    def keep_launch(self, attempt: int, node: int, data: bytes) -> None:
        """Take a launch, and keep it in the store."""
        self.jobs.records.keep_launch(attempt, node, data)
        self._launches.add((attempt, node))

    def flush(self) -> None:
        """Write what was read to the store. After a StoreError the same again writes what is missing."""
        for (attempt, rank), known in tuple(self._ranks.items()):
            with known.keeping:
                self._keep(attempt, rank)

    def _whole(self, data: bytes, *, last: bool) -> bytes:
        if last:
            return data
        lines = data.rfind(b"\n") + 1
        if b"\r" in data[lines:]:
            return data[: data.rfind(b"\r") + 1] if len(data) >= _MOST else data[: self._uncut(data)]
        if lines or len(data) < _MOST:
            return data[:lines]
        return data[: self._uncut(data)]  # one line without an end

    def _uncut(self, data: bytes) -> int:
        """Return how much of the data ends with no beginning of a hidden word or of a letter, whose rest may follow."""
        data = masked(data, self.hidden)  # of a whole word no part is the beginning of another
        cut, before = len(data) - len(_BEGUN_LETTER.findall(data[-3:])[0]), -1
        while cut != before:
            before = cut
            for word in self.hidden:
                begun = (n for n in range(min(len(word) - 1, cut), 0, -1) if data.endswith(word[:n], 0, cut))
                cut -= next(begun, 0)
        return cut

    def _keep(self, attempt: int, rank: int) -> None:
        """A piece is tried as it was, until it is in the store: one that is there already is left as it is."""
        known = self._ranks[attempt, rank]
        while known.unkept:
            with known.lock:
                start = known.offset - len(known.unkept)
                known.tried = known.tried or min(len(known.unkept), LOG_BYTES, _most_marked(known.marks, start))
                piece = _dated(known, start)
            self.jobs.records.append_log(attempt, rank, start, piece)
            with known.lock:
                known.unkept, known.tried = known.unkept[len(piece.data) :], 0
                end = start + len(piece.data)
                known.marks = tuple(mark for mark in known.marks if mark.until > end)


def _thinned(marks: tuple[Mark, ...]) -> tuple[Mark, ...]:
    """Return no more marks than are kept: a later one dates what stands before it too, and the last one stays."""
    while len(marks) > _MOST_WAITING:
        marks = marks[::-2][::-1]
    return marks


def _most_marked(marks: tuple[Mark, ...], start: int) -> int:
    """Return how many bytes from `start` on have no more marks than a piece may have."""
    return marks[MOST_MARKS - 1].until - start if len(marks) > MOST_MARKS else LOG_BYTES


def _dated(known: _Rank, start: int) -> DatedPiece:
    """Return the piece that is tried, with its marks; the last of them may be behind what follows, too."""
    data, place = known.unkept[: known.tried], known.place
    marks: list[Mark] = []
    for mark in known.marks:
        until = min(mark.until - start, len(data))
        if until > (marks[-1].until if marks else 0):
            marks.append(Mark(until=until, at_ms=mark.at_ms))
        if mark.until - start > len(data):
            place = mark.place
            break
    return DatedPiece(data=data, marks=tuple(marks), place=place)


def read_node(
    host: Host, node_id: str, attempt: Attempt | None, workers: int, logs: LogReader
) -> tuple[Status | None, bool]:
    """Return what the node's agent says, None before it says anything, and whether there was new output for `logs`.

    Raises HostUnreachable. A torn or foreign status reads as None. Asking is one small command; output is fetched
    only when the status tells of more than has been read, because asking goes on while the script needs the cores.
    """
    status = read_status(host)
    part, before = status.attempt if status is not None else None, logs.taken
    if attempt is not None and part is not None and part.attempt == attempt.number:
        written = dict(part.output)
        _keep_launch(host, node_id, attempt, logs)
        own = _ranks(node_id, attempt, workers)
        for rank, gone in part.dropped:
            if rank in own and gone <= written.get(rank, 0):  # of others' output no node has a say
                logs.skip(attempt.number, rank, gone)
        for _ in range(_PASSES):
            already = logs.taken
            behind = tuple(r for r in own if written.get(r, 0) > logs.offset(attempt.number, r))
            asked = tuple((r, written[r]) for r in behind)
            read_output(host, attempt.number, asked, logs, last=part.state is RunState.EXITED)
            if logs.taken - already < _MOST // 2:
                break
    return status, logs.taken > before


def _keep_launch(host: Host, node_id: str, attempt: Attempt, logs: LogReader) -> None:
    """Keep how the node's part was launched, once: its agent leaves the values of secrets out."""
    rank = next((member.rank for member in attempt.members if member.node_id == node_id), None)
    if rank is None or not logs.asks_for_launch(attempt.number, rank):
        return
    done = host.run(("cat", f"{host.node.root}/attempts/{attempt.number:04d}/launch.json"))
    if done.exit_code == 0 and len(done.stdout) <= STATUS_BYTES:
        logs.keep_launch(attempt.number, rank, done.stdout)


def read_output(host: Host, number: int, asked: tuple[tuple[int, int], ...], logs: LogReader, *, last: bool) -> None:
    """Give new output of these ranks to `logs`, with its times; with `last`, an unfinished line too.

    `asked` has with each rank how much its agent has marked: what was written since comes with the next look.
    """
    if not asked:
        return
    folder, files, dated = attempt_folder(host.node.root, number), [], []
    for rank, _ in asked:
        files += [f"{folder}/rank-{rank}.log", str(logs.offset(number, rank) + 1)]
    for rank, until in asked:
        place = logs.times_from(number, rank, min(until, logs.offset(number, rank) + _MOST))
        if place is not None:
            dated.append(rank)
            files += [f"{folder}/rank-{rank}.times", str(place + 1)]
    border = f"--{uuid.uuid4().hex}--"  # no output holds it by accident
    done = host.run(("sh", "-c", _READ, "sh", border, str(_MOST), *files))
    told = done.stdout.split(border.encode())[1:]
    for rank, data in zip(dated, told[len(asked) :], strict=False):
        logs.take_times(number, rank, data)
    for (rank, until), data in zip(asked, told, strict=False):
        logs.take(number, rank, data[: max(0, until - logs.offset(number, rank))], last=last)


def _ranks(node_id: str, attempt: Attempt, workers: int) -> tuple[int, ...]:
    """The global ranks that run on the node: torchrun numbers them node by node."""
    nodes = [member.rank for member in attempt.members if member.node_id == node_id]
    return tuple(node * workers + local for node in nodes for local in range(workers))


# Asking others about machines that do not answer us: their peers, and the training itself.


_LIMIT_S = 2.0
_TRAINING = "the training, whose steps go on,"
# A step that a machine took part in may be told of so much later: rank 0 writes five times a second, its agent ten.
_TOLD_LATE = timedelta(seconds=1.5)


@dataclass(slots=True)
class _Asked:
    """A peer's knock at a silent machine; `peer_report` is of the last one that is over."""

    peer: str = ""
    work: Future[PeerReport] | None = None
    peer_report: PeerReport = PeerReport.NOTHING
    reporter: str = ""


@dataclass(slots=True)
class _Steps:
    """When the open attempt was seen at which step, at every step that was seen; the newest last."""

    attempt: int = 0
    snapshot: deque[tuple[datetime, int]] = field(default_factory=lambda: deque(maxlen=256))

    def made_since(self, moment: datetime) -> int:
        """Return how many steps were made after `moment`, as far as they were seen."""
        before = [step for at, step in self.snapshot if at <= moment]
        return self.snapshot[-1][1] - max(before) if before else 0


@dataclass(slots=True)
class PeerReports:
    """Hears second witnesses beside everything else; a machine that answers again needs none."""

    services: Services
    bootstrapper: Bootstrapper
    pool: ThreadPoolExecutor
    _asked: dict[str, _Asked] = field(default_factory=dict)
    _steps: _Steps = field(default_factory=_Steps)

    def hear(self, snapshot: Snapshot) -> Snapshot:
        """Return what is seen with what is said of each silent machine; ask about those that are silent for long."""
        self._watch_steps(snapshot)
        peers = [n for n in snapshot.nodes if n.readiness is Readiness.READY and not n.silent_for and not is_gone(n)]
        return replace(snapshot, nodes=tuple(self._hear(node, peers, snapshot) for node in snapshot.nodes))

    def _hear(self, node: NodeSnapshot, peers: list[NodeSnapshot], snapshot: Snapshot) -> NodeSnapshot:
        if is_gone(node) or not node.silent_for:
            self._asked.pop(node.node.id, None)
            return node
        if self._trains_on(node, snapshot):
            return replace(node, peer_report=PeerReport.ALIVE, reporter=_TRAINING)
        # A third of the time in which it is believed: then the answer is there when it is needed.
        if node.silent_for < self.services.rules.limits.silent / 3:
            return node
        asked = self._ask(node.node, [peer.node for peer in peers])
        return replace(node, peer_report=asked.peer_report, reporter=asked.reporter)

    def _ask(self, node: Node, peers: list[Node]) -> _Asked:
        asked = self._asked.setdefault(node.id, _Asked())
        if asked.work is not None and asked.work.done():
            asked.peer_report, asked.reporter, asked.work = asked.work.result(), asked.peer, None
        if asked.work is None and peers:
            later = [peer for peer in peers if peer.id > asked.peer]  # each in its turn
            peer = min(later or peers, key=lambda one: one.id)
            asked.peer, asked.work = (
                peer.id,
                self.pool.submit(self._probe_peer, peer, self.bootstrapper.made_of(peer.id), node),
            )
        return asked

    def _probe_peer(self, peer: Node, made: Bootstrapped, node: Node) -> PeerReport:
        command = (made.base_python, made.package_path, "probe", "--root", made.root, "--limit", f"{_LIMIT_S:g}")
        try:
            host = self.services.shell.host(peer)
            done = host.run((*command, node.private_address, str(node.port)), timeout_s=3 * _LIMIT_S)
        except NodeError:
            return PeerReport.NOTHING
        return peer_report_of(done.exit_code, done.stdout.decode(errors="replace"))

    def _watch_steps(self, snapshot: Snapshot) -> None:
        attempt = snapshot.state.attempt
        progress = progress_of(attempt, snapshot) if attempt is not None else None
        if attempt is None or progress is None:
            return
        if self._steps.attempt != attempt.number:
            self._steps = _Steps(attempt=attempt.number)
        if not self._steps.snapshot or progress.step > self._steps.snapshot[-1][1]:
            self._steps.snapshot.append((snapshot.now, progress.step))

    def _trains_on(self, node: NodeSnapshot, snapshot: Snapshot) -> bool:
        """Ranks agree at every step (gpucloud.resume), so that a step needs all; one may have been under way."""
        attempt = snapshot.state.attempt
        if attempt is None or node.node.id not in {member.node_id for member in attempt.members}:
            return False
        since = snapshot.now - node.silent_for + _TOLD_LATE
        return self._steps.attempt == attempt.number and self._steps.made_since(since) >= 2


# Asking a job's nodes how they stand, from any terminal, beside whoever supervises them.


_AT_ONCE = 16
_TWO_BEATS_S = 1.2  # an agent writes every half second, whether something is new or not


def visited(report: JobReport, shell: Shell, sleep: Callable[[float], object] | None = None) -> JobReport:
    """Return the report with what its nodes say now; one that does not answer has no status.

    They are asked of an open attempt, and where one of them is to take the job over. With `sleep`, nodes that nobody
    supervises, and those that tell their supervisor nothing, are asked twice: what stands still is of an earlier time,
    as on a node whose disk is full, and counts as no answer.
    """
    nodes = [node for node in report.nodes if node.state is NodeState.RUNNING and node.host_key is not None]
    if not nodes or (report.open_attempt is None and not report.hands_over):
        return report
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, len(nodes))) as pool:
        standing = tuple(pool.map(lambda node: _visit(node, shell), nodes))
        silent = {one.node_id for one in report.silent}
        doubted = [
            node
            for node, one in zip(nodes, standing, strict=True)
            if one.status is not None and (report.supervisor is None or node.id in silent)
        ]
        if sleep is not None and doubted:
            sleep(_TWO_BEATS_S)
            again = {one.node_id: one for one in pool.map(lambda node: _visit(node, shell), doubted)}
            standing = tuple(_moved(one, again.get(one.node_id)) for one in standing)
    return with_answers(report, standing)


def _moved(before: NodeStanding, now: NodeStanding | None) -> NodeStanding:
    if now is None:
        return before
    stands = before.status is not None and now.status is not None and before.status.heartbeat == now.status.heartbeat
    return replace(now, status=None) if stands else now


def _visit(node: Node, shell: Shell) -> NodeStanding:
    try:
        return NodeStanding(node_id=node.id, status=read_status(shell.host(node)))
    except NodeError:
        return NodeStanding(node_id=node.id, status=None)
