"""`status`, `metrics`, `logs` and `ssh`: they ask, and supervise nothing."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass

from gpucloud.cli.logwriting import LogWriter, log_writer
from gpucloud.cli.machines import one_node
from gpucloud.cli.render import say, say_json, say_words, table, tell
from gpucloud.cli.reports import jobs_text, newest_first, report_json, report_text
from gpucloud.cli.target import called, known_job, report_or_line
from gpucloud.cli.use import history_json, history_rows
from gpucloud.domain.errors import NodeError, StoreError, UsageError
from gpucloud.domain.state import JobState
from gpucloud.usecases.attemptrecords import BEFORE, LogPart
from gpucloud.usecases.history import read_history
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.jobstore import JobStore
from gpucloud.wiring import Gpucloud, KnownJob

_LINES = re.compile(rb"[^\n]*\n|[^\n]+")  # a bar's states, between carriage returns, are one
_PROGRAM = re.compile(r"[\w@%+=:,./-]+")

# The package that the agent runs from answers; which one that is the agent has written down.
_METRICS = """\
py="${GPUCLOUD_PYTHON:-python3}"
sha=$(sed -n 's/.*"package": "\\([0-9a-f]*\\)".*/\\1/p' "$1/agent/agent.json") || exit 1
exec "$py" -I "$1/lib/gpucloud-$sha.zip" metrics --root "$1"
"""


def status(target: str | None, *, history: bool, every: bool, as_json: bool) -> int:
    """Say where one job stands, or all that are known; return the exit code.

    With `history`, how its machines were used from the first attempt on. The short runs of `--verify-resume` are listed
    with `every` alone.
    """
    cloud = Gpucloud()
    if history:
        return _history(cloud, known_job(cloud, target), as_json=as_json)
    if target is None:
        return _status_of_all(cloud, every=every, as_json=as_json)
    known = known_job(cloud, target)
    report = cloud.visited(known, cloud.asker(known).report())
    if as_json:
        say_json(report_json(report))
    else:
        say_words(report_text(report))
    if report.status.ended and cloud.has_stored_outputs(known):
        tell(f"outputs are in the job's store: `gpucloud down {called(cloud, known)}` brings them home")
    return 0


def _status_of_all(cloud: Gpucloud, *, every: bool, as_json: bool) -> int:
    told = (report_or_line(cloud, known, visits=True) for known in cloud.home.known())
    found = [report for report in told if report is not None]
    reports = newest_first([report for report in found if every or not report.rehearses])
    if as_json:
        say_json({"jobs": [report_json(report) for report in reports]})
    else:
        names = {known.name: called(cloud, known) for known in cloud.home.known()}
        say(jobs_text(reports, names))
    if hidden := len(found) - len(reports):
        tell(f"{hidden} rehearsals of --verify-resume are not shown: gpucloud status --all")
    return 0


def metrics(target: str | None, node_id: str | None) -> int:
    """Write a node's figures as Prometheus reads them; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    node = one_node(cloud, known, node_id)
    shell = cloud.visitor(known)
    try:
        done = shell.host(node).run(("sh", "-c", _METRICS, "sh", node.root))
    finally:
        shell.close()
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise NodeError(f"{node.id} tells no metrics: {said}", hint=f"gpucloud status {known.name}")
    say(done.stdout.decode(errors="replace").removesuffix("\n"))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which output `logs` writes: of one attempt, of one rank, of all before now the last `tail` lines."""

    follow: bool = False
    attempt: int | None = None
    rank: int | None = None
    tail: int | None = None


def logs(target: str | None, wanted: Wanted, *, as_json: bool) -> int:
    """Write the output of a job's ranks, to its end with `follow`; return the exit code. UsageError without any."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker, read = cloud.asker(known), 0
    if wanted.attempt is not None and not wanted.follow:
        _require_attempt(asker.stored_state(), wanted.attempt)
    writer = log_writer(follow=wanted.follow, as_json=as_json)
    shown = _Shown(asker=asker, writer=writer, as_json=as_json, tail=wanted.tail)
    try:
        for part, data in asker.output(
            attempt=wanted.attempt, rank=wanted.rank, follow=wanted.follow, caught_up=shown.caught_up
        ):
            read += len(data)
            shown.take(part, data)
        writer.end()
    finally:
        asker.bill_pull(read)
    if not read:
        of_rank = "" if wanted.rank is None else f" of rank {wanted.rank}"
        raise UsageError(f"{known.name} has no output{of_rank} yet", hint=f"gpucloud status {known.name}")
    return 0


@dataclass(slots=True)
class _Shown:
    """Writes output piece by piece, with a line on standard error before each attempt's.

    Of what was kept before somebody asked, only the last `tail` lines, None for all.
    """

    asker: Asker
    writer: LogWriter
    as_json: bool
    tail: int | None
    _attempt: int | None = None
    _waiting: deque[tuple[LogPart, bytes]] | None = None

    def __post_init__(self) -> None:
        if self.tail is not None:
            self._waiting = deque(maxlen=self.tail)

    def take(self, part: LogPart, data: bytes) -> None:
        """Write the piece, or keep its last lines until all that there is has been read."""
        if self._waiting is None:
            self._write(part, data)
        else:
            self._waiting.extend((part, line) for line in _LINES.findall(data))

    def caught_up(self) -> None:
        """Write the last lines; all that comes from now on is new."""
        waiting, self._waiting = self._waiting, None
        for part, line in waiting or ():
            self._write(part, line)

    def _write(self, part: LogPart, data: bytes) -> None:
        if part.attempt != self._attempt:
            self.writer.end()
            if not self.as_json:
                tell(attempt_header(part.attempt, self.asker.stored_state()))
        self._attempt = part.attempt
        self.writer.write(part, data)


def attempt_header(number: int, state: JobState) -> str:
    """Return the line before an attempt's output: which it is, on how many machines, from which step."""
    if number == BEFORE:
        return "── setup that failed ──"
    attempt = next((one for one in state.attempts if one.number == number), None)
    parts = [f"attempt {number}"]
    if attempt is not None:
        parts.append(f"{len(attempt.members)} node{'s' if len(attempt.members) != 1 else ''}")
        parts += [f"from step {attempt.first_step}"] if attempt.first_step is not None else []
    return f"── {', '.join(parts)} ──"


def launches(target: str | None, *, attempt: int | None) -> int:
    """Write how each node of each attempt was launched, secrets left out; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    if attempt is not None:
        _require_attempt(cloud.asker(known).stored_state(), attempt)
    for number, node, data in JobStore(cloud.store_of(known), known.name).records.launches(attempt):
        try:
            launch = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"the launch of attempt {number} on node {node} is damaged: {error}") from error
        say_json({"attempt": number, "node": node, "launch": launch}, is_one_of_many=True)
    return 0


def ssh(target: str | None, node_id: str | None, command: tuple[str, ...]) -> int:
    """Open a shell on a node, or run a command there; return its exit code. One word may be a whole shell line."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    node = one_node(cloud, known, node_id)
    shell = cloud.shell(known.name, cloud.cloud_of(known).manners)
    try:
        return shell.host(node).interact(shell_line(command))
    finally:
        shell.close()


def shell_line(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words to run on a node: a single one that is more than a program's name is a line for its shell."""
    is_line = len(command) == 1 and not _PROGRAM.fullmatch(command[0])
    return ("sh", "-c", *command) if is_line else command


def _history(cloud: Gpucloud, known: KnownJob, *, as_json: bool) -> int:
    asker = cloud.asker(known)
    asker.stored_state()  # UsageError when there is no such job
    kept = read_history(asker.jobs)
    if as_json:
        say_json({"job": known.name, "history": history_json(kept)})
    elif kept:
        say(table(history_rows(kept)))
    else:
        say(f"{known.name}: no use is kept yet: it comes every few minutes, and when an attempt ends")
    return 0


def _require_attempt(state: JobState, number: int) -> None:
    if number not in [attempt.number for attempt in state.attempts]:
        last = f"its newest is {state.attempts[-1].number}" if state.attempts else "none has started yet"
        raise UsageError(f"{state.job} has no attempt {number}: {last}", hint=f"gpucloud status {state.job}")
