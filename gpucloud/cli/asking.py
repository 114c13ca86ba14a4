"""`status`, `metrics`, `logs --launch` and `ssh`: they ask, and supervise nothing."""

from __future__ import annotations

import json
import re

from gpucloud.cli.logs import require_attempt
from gpucloud.cli.machines import one_node
from gpucloud.cli.render import say, say_json, say_words, table, tell
from gpucloud.cli.reports import jobs_text, newest_first, report_json, report_text
from gpucloud.cli.target import all_called, called, known_job, report_or_line
from gpucloud.cli.use import history_json, history_rows
from gpucloud.domain.errors import NodeError, StoreError
from gpucloud.domain.quantities import counted
from gpucloud.usecases.history import read_history
from gpucloud.usecases.jobstore import JobStore
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
