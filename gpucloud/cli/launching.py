"""Leaving a job that goes on: driven by its own machines, or by a process here in the background."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.reports import plan_json, report_json
from gpucloud.cli.supervising import Begun, answer, run, say_what_lives
from gpucloud.domain.driving import Unattended
from gpucloud.domain.errors import LeaseHeld
from gpucloud.domain.supervision.seen import Goal, Until
from gpucloud.usecases.jobs import Asker


def launch(begun: Begun, unattended: Unattended, *, as_json: bool) -> int:
    """Return when the machines are there, paid, and drive the job: nothing of the user's need run from then on."""
    asker, nodes, now = begun.asker, begun.job.resources.nodes, begun.cloud.clock.now()
    goal = Goal(nodes=nodes, until=Until.LAUNCHED, keep=unattended.keep, began_at=now)
    try:
        run(begun, goal, unattended)
    except Leave as leave:
        say_what_lives(asker.state())
        return leave.exit_code
    report = asker.report()
    if report.status.ended:
        return answer(report, as_json=as_json)
    if as_json:
        say_json({**report_json(report), "plan": plan_json(begun.start.plan)})
    else:
        say(f"{begun.name} drives itself until {report.paid_until:%Y-%m-%d %H:%M} UTC at the latest")
        tell(f"`gpucloud logs -f {begun.name}` follows it, `gpucloud down {begun.name}` ends it")
        tell(f"`gpucloud train {begun.name}` brings its results home, and goes on when that time is over")
    return 0


def detach(begun: Begun, *, keep: bool, drill: bool, as_json: bool) -> int:
    """Start this command again in a session of its own, its story in a file; wait until it holds the job."""
    job, log = begun.job, begun.cloud.home.log(begun.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag, on in (("--keep", keep), ("--drill", drill)) if on]
    if job.profile_steps:
        flags += ["--profile-steps", str(job.profile_steps)]
    flags += ["--budget", f"{job.budget_usd:f} USD"]
    with log.open("ab") as out:
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpucloud", "train", str(begun.read.file.resolve())),
                *("--cloud", job.cloud.value, "--json", *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    asker = begun.asker
    _await_supervisor(asker, child, log)
    if as_json:
        say_json({**report_json(asker.report()), "plan": plan_json(begun.start.plan), "log": str(log)})
    else:
        say(f"{begun.name} goes on in the background (process {child.pid})")
        tell(f"`gpucloud logs -f {begun.name}` follows it, `gpucloud status {begun.name}` says where it stands")
    return 0


def _await_supervisor(asker: Asker, child: subprocess.Popen[bytes], log: Path) -> None:
    while asker.supervisor() is None:
        code = child.poll()
        if code is not None:
            if asker.state().status.ended:
                return
            raise LeaseHeld(f"the background supervisor ended at once with code {code}", hint=f"see {log}")
        asker.clock.sleep(0.05)
