"""The agent's loop: what is wanted, what is so, what to do about it; then say how it stands."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.attemptfolder import AttemptFolder, Inbox, Outbox, newest, prune, saving_before
from gpucloud.agent.decide import (
    Abort,
    Action,
    Kill,
    OwnEnd,
    PowerOff,
    Prepaid,
    Rest,
    Save,
    SaveEarly,
    Saving,
    Seen,
    Start,
    decide,
)
from gpucloud.agent.metrics.node_metrics import NodeMetrics
from gpucloud.agent.outputroom import OutputRoom, gone
from gpucloud.agent.running import CANNOT_RUN, RunningAttempt, end_beside, sweep
from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.status import AttemptStatus, Launch, Outcome, RunState, Status

# Each look costs about 0.3 ms of a core that sleeps otherwise: 20 a second are 0.6 %.
_POLL_S = 0.05
_SWEEP_LIMIT_S = 5.0  # a process that the kernel holds (a lost disk, a lost GPU) must not keep the agent from reporting


class Agent:
    """One node's part; `root` is `~/.gpucloud`. All it knows is in files: it may be killed and started at any time."""

    def __init__(
        self,
        root: Path,
        *,
        notice: Callable[[], Notice | None],
        rebalance: Callable[[], datetime | None] = lambda: None,
        own_end: OwnEnd,
        rest: Callable[[float], None],
        node_metrics: NodeMetrics,
    ) -> None:
        folder = root / "agent"
        self._attempts = root / "attempts"
        self._inbox = Inbox(folder)
        self._outbox = Outbox(folder)
        self._notice = notice
        self._rebalance = rebalance
        self._own_end = own_end
        self._rest = rest
        self._node_metrics = node_metrics
        self._boot_id = processes.boot_id()
        self._prepaid: Prepaid | None = None
        self._powered_off = False
        self._saved_early: tuple[datetime, int] | None = None
        self._running: RunningAttempt | None = None
        self._room: OutputRoom | None = None  # of the attempt that ended last
        self._saving_before: Saving | None = None
        self._newest = newest(self._attempts)
        self._attempt = self._recover()

    def run(self) -> None:
        """Reconcile for ever."""
        complaint = ""
        while True:
            try:
                self.tick()
            except OSError as error:
                # A full or failing disk: go on, the next tick may do better. Said once, not fifty times a second.
                if str(error) != complaint:
                    complaint = str(error)
                    sys.stderr.write(f"{datetime.now(timezone.utc).isoformat()} {complaint}\n")
            self._rest(_POLL_S)

    def tick(self) -> None:
        """One pass: observe, decide, act, report."""
        self._inbox.poll()
        now = datetime.now(timezone.utc)
        self._renew(now)
        action = decide(
            Seen(
                desired=self._inbox.desired,
                running=self._running.folder.number if self._running else None,
                newest=self._newest,
                notice=self._notice(),
                prepaid=self._prepaid,
                now=now,
                power_off_after=self._own_end.after,
                rebalance=self._rebalance(),
                saving=self._running.folder.saving() or self._saving_before if self._running else None,
            )
        )
        try:
            self._act(action)
        finally:
            self._advance()
            self._report()

    def _recover(self) -> AttemptStatus | None:
        """Sweep what an agent that died left running, and return how the newest attempt stands."""
        if self._newest == 0:
            return None
        folder = AttemptFolder(self._attempts, self._newest)
        found = folder.verdict()
        if found is not None:
            return found
        end_beside(folder)
        if not sweep(folder, limit_s=_SWEEP_LIMIT_S):
            sys.stderr.write(f"attempt {folder.number}: something of it cannot be killed\n")
        return self._close(folder, _ended(folder, Outcome.KILLED, None))

    def _renew(self, now: datetime) -> None:
        until = self._inbox.desired.paid_until if self._inbox.desired else None
        if until is None:
            self._prepaid = None
        elif self._prepaid is None or self._prepaid.until != until:
            # Paid time that is prolonged is one long lease: a last, short piece of it still has the whole time to save.
            before = self._prepaid if self._prepaid is not None and now < self._prepaid.until else None
            self._prepaid = Prepaid(until=until, heard_at=before.heard_at if before else now)
            self._powered_off = False

    def _act(self, action: Action) -> None:
        match action:
            case Start(launch=launch):
                self._newest = launch.attempt
                self._begin(launch)
            case Save(reason=reason, at=at):
                if self._running:
                    self._running.folder.ask_to_stop(reason, at)
            case SaveEarly(since=since):
                self._save_early(since)
            case Abort():
                if self._running:
                    self._running.abort()
            case Kill():
                if self._running:
                    self._running.kill()
            case PowerOff():
                self._end_node()
            case Rest():
                pass

    def _begin(self, launch: Launch) -> None:
        if self._prepaid is not None:
            self._prepaid = replace(self._prepaid, heard_at=datetime.now(timezone.utc))
        # Until this attempt has saved, what an earlier one of the job measured here says how long that takes.
        self._saving_before = saving_before(self._attempts, launch.attempt)
        prune(self._attempts, launch.attempt)
        folder = AttemptFolder(self._attempts, launch.attempt)
        try:
            self._running = RunningAttempt(launch, folder)
        except OSError as error:
            # No folder could be made: the attempt will not run here, and the supervisor must hear it.
            sys.stderr.write(f"attempt {launch.attempt}: {error}\n")
            self._attempt = _ended(folder, Outcome.FAILED, CANNOT_RUN)

    def _save_early(self, since: datetime) -> None:
        """One save for one recommendation: attempts that begin after it know of it."""
        if self._running and self._saved_early in (None, (since, self._running.folder.number)):
            self._running.folder.ask_to_save(since)
            self._saved_early = (since, self._running.folder.number)

    def _end_node(self) -> None:
        if self._own_end.argv and not self._powered_off:
            self._powered_off = True
            subprocess.Popen(self._own_end.argv, stdin=subprocess.DEVNULL, start_new_session=True)

    def _advance(self) -> None:
        if self._running is None:
            if self._room is not None:
                self._room.settle(now_s=time.monotonic())
            return
        self._attempt = self._running.advance(self._node_metrics.spared)
        if self._attempt.state is RunState.EXITED:
            folder, self._room, self._running = self._running.folder, self._running.room, None
            self._close(folder, self._attempt)

    def _close(self, folder: AttemptFolder, status: AttemptStatus) -> AttemptStatus:
        # Unwritten on a full disk, the verdict still stands in this process; a later agent would say KILLED.
        with contextlib.suppress(OSError):
            folder.write_verdict(status)
        return status

    def _measure(self) -> None:
        launch = self._inbox.desired.launch if self._inbox.desired else None
        devices = dict(launch.env).get("CUDA_VISIBLE_DEVICES") if launch else None
        folder = self._running.folder.path if self._running else None
        self._node_metrics.look(self._attempt, folder, devices)

    def _report(self) -> None:
        self._measure()
        status = Status(
            beat=0,
            epoch=self._inbox.epoch,
            desired_sha256=self._inbox.sha256,
            boot_id=self._boot_id,
            notice=self._notice(),
            attempt=self._attempt,
            gpus=self._node_metrics.gpus,
            unhealthy=self._node_metrics.unhealthy,
            host=self._node_metrics.host,
            rebalance=self._rebalance(),
        )
        self._outbox.publish(status, now_s=time.monotonic())


def _ended(folder: AttemptFolder, outcome: Outcome, exit_code: int | None) -> AttemptStatus:
    output = folder.output()
    return AttemptStatus(
        attempt=folder.number,
        state=RunState.EXITED,
        outcome=outcome,
        exit_code=exit_code,
        progress=folder.progress(),
        failed_rank=None,
        output=output,
        dropped=gone(folder.path, output),
    )
