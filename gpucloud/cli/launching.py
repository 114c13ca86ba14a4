"""Leaving a job that goes on: driven by its own machines, or by a process here in the background."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpucloud.cli.interrupts import Leave
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.reports import plan_json, report_json
from gpucloud.cli.supervising import Begun, answer, run, say_what_lives
from gpucloud.domain.errors import GpucloudError
from gpucloud.usecases.jobs import Asker


def launch(begun: Begun, *, as_json: bool) -> int:
    """Return when the machines are there, paid, and drive the job: nothing of the user's need run from then on."""
    asker = begun.asker
    try:
        run(begun, leaves=True)
    except Leave as leave:
        say_what_lives(asker.state(), asker.clock.now())
        return leave.exit_code
    report = asker.report()
    if report.status.ended:
        return answer(report, as_json=as_json)
    if as_json:
        say_json({**report_json(report), "plan": _plan_json(begun)})
    else:
        say(f"{begun.name} drives itself until {report.paid_until:%Y-%m-%d %H:%M} UTC at the latest")
        tell(f"`gpucloud logs -f {begun.name}` follows it, `gpucloud down {begun.name}` ends it")
        tell(f"`gpucloud train {begun.name}` brings its results home, and goes on when that time is over")
    return 0


def detach(begun: Begun, *, as_json: bool) -> int:
    """Start this command again in a session of its own, its story in a file; wait until it holds the job.

    Where it has left by then, what it left with is the answer here too: its error, or how the job stands.
    """
    job, order, log = begun.job, begun.start.order, begun.cloud.home.log(begun.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    flags = [flag for flag, on in (("--keep", order.keep), ("--drill", order.drill)) if on]
    if job.profile_steps:
        flags += ["--profile-steps", str(job.profile_steps)]
    flags += ["--budget", f"{order.budget_usd:f} USD"]
    asker = begun.asker
    epoch = asker.state().epoch
    with log.open("ab") as out:
        said_from = out.tell()
        child = subprocess.Popen(
            [
                *(sys.executable, "-m", "gpucloud", "train", str(begun.read.file.resolve())),
                *("--cloud", job.cloud.value, "--adopt", "--json", *flags),  # whose run it is was asked before
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    if not _holds(asker, child):
        error = _error_of(asker, child.returncode, epoch, log, said_from)
        if error is not None:
            raise error
        return answer(asker.report(), as_json=as_json)
    if as_json:
        say_json({**report_json(asker.report()), "plan": _plan_json(begun), "log": str(log)})
    else:
        say(f"{begun.name} goes on in the background (process {child.pid})")
        tell(f"`gpucloud logs -f {begun.name}` follows it, `gpucloud status {begun.name}` says where it stands")
    return 0


def _plan_json(begun: Begun) -> dict[str, Any] | None:
    return plan_json(begun.start.plan) if begun.start.plan is not None else None


def _holds(asker: Asker, child: subprocess.Popen[bytes]) -> bool:
    """Wait until the child itself holds the job, or has left; another supervisor may be what it is refused for."""
    while True:
        left = child.poll() is not None
        owner = asker.state().owner
        if owner is not None and (owner.pid, owner.node) == (child.pid, ""):
            return True
        if left:
            return False
        asker.clock.sleep(0.05)


def _error_of(asker: Asker, code: int, epoch: int, log: Path, since: int) -> GpucloudError | None:
    """Return what kept a child from the job that left with that code; None where it held the job and saw to its end.

    `epoch` was the last before it came, `since` where its story begins in the log.
    """
    state = asker.state()
    if code == 0 or (state.epoch > epoch and state.status.ended and state.exit_code == code):
        return None
    for line in reversed(log.read_bytes()[since:].splitlines()):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            told = json.loads(line)["error"]
            if told["exit_code"] == code:
                error = GpucloudError(str(told["message"]), hint=told["hint"])
                error.code, error.exit_code = str(told["code"]), code
                return error
    return GpucloudError(f"the process in the background ended at once with code {code}", hint=f"see {log}")
