"""`status`, `watch`, `metrics`, `logs --launch` and `ssh`: they ask, and supervise nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable

from gpucloud.cli.commands.copying import one_node
from gpucloud.cli.commands.logs import require_attempt
from gpucloud.cli.render.onlookers import Display, display
from gpucloud.cli.render.reports import jobs_text, newest_first, report_json, report_text, stay_text
from gpucloud.cli.render.use import headline, history_json, history_rows, use_rows
from gpucloud.cli.render.words import say, say_json, say_words, table, tell
from gpucloud.cli.target import all_called, called, known_job, report_or_line
from gpucloud.domain.errors import NodeError, StoreError
from gpucloud.domain.job.quantities import counted
from gpucloud.ports import Shell
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.jobstore import JobStore
from gpucloud.usecases.jobstore.report import Condition, JobReport
from gpucloud.usecases.supervise.look import visited
from gpucloud.usecases.supervise.usage import read_history
from gpucloud.wiring import Gpucloud, KnownJob

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
        say(jobs_text(reports, all_called(cloud)))
    if hidden := len(found) - len(reports):
        tell(f"not shown: {counted(hidden, 'rehearsal')} of --verify-resume: gpucloud status --all")
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


def launches(target: str | None, *, attempt: int | None) -> int:
    """Write how each node of each attempt was launched, secrets left out; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    if attempt is not None:
        require_attempt(cloud.asker(known).stored_state(), attempt)
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
    shell = cloud.shell(known.name, cloud.cloud_of(known).cloud_profile)
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


# `watch`: how a job stands and uses its GPUs, look by look, from any terminal; the job is left alone.


_LIVE_S = 1.0
_PLAIN_S = 10.0
_REPORT_S = 3.0  # the state in the store and the cloud's list change more slowly than GPUs


def watch(target: str | None, *, as_json: bool) -> int:
    """Show a job's GPUs, steps and money until its machines are gone, or stay for its user; return the exit code.

    Live on a terminal, lines every ten seconds elsewhere. Ctrl-C ends the watching alone.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    shell, live = cloud.visitor(known), sys.stdout.isatty() and not as_json
    try:
        with display() if live else _Lines(as_json=as_json) as shown:
            last = _look(cloud.asker(known), shell, cloud.clock.sleep, shown, every_s=_LIVE_S if live else _PLAIN_S)
    except KeyboardInterrupt:
        tell(f"{known.name} goes on as before")
        return 130
    finally:
        shell.close()
    if (stay := stay_text(last)) is not None:
        tell(stay)
    return 0


def _look(asker: Asker, shell: Shell, sleep: Callable[[float], None], shown: Display, *, every_s: float) -> JobReport:
    report, age_s = asker.report(), 0.0
    while True:
        report = visited(report, shell)
        shown.show(report)
        if report.status.ended and (not report.nodes or report.condition in (Condition.HELD, Condition.KEPT)):
            return report
        sleep(every_s)
        age_s += every_s
        if age_s >= _REPORT_S:
            report, age_s = asker.report(), 0.0


class _Lines:
    """One paragraph a look, or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, report: JobReport) -> None:
        """Write how it stands."""
        if self._as_json:
            say_json(report_json(report), is_one_of_many=True)
            return
        say(headline(report))
        rows = use_rows(report)[1:]
        if rows:
            say(table(rows))
