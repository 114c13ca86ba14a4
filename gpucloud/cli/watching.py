"""`watch`: how a job stands and uses its GPUs, look by look, from any terminal; the job is left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpucloud.cli.onlookers import Display, display
from gpucloud.cli.render import say, say_json, table, tell
from gpucloud.cli.reports import report_json, stay_text
from gpucloud.cli.target import known_job
from gpucloud.cli.use import headline, use_rows
from gpucloud.domain.condition import Condition
from gpucloud.ports import Shell
from gpucloud.usecases.jobs import Asker
from gpucloud.usecases.report import JobReport
from gpucloud.usecases.visiting import visited
from gpucloud.wiring import Gpucloud

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
