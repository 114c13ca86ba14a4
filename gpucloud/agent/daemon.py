"""One agent per node, detached: its loop of what is wanted, what is so and what to do; limits, and what wakes it."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.agent.attempt.composing import note_writing
from gpucloud.agent.attempt.decide import (
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
    Snapshot,
    Start,
    decide,
)
from gpucloud.agent.attempt.files import AttemptFolder, Inbox, Outbox, newest, prune, saving_before
from gpucloud.agent.attempt.running import CANNOT_RUN, OutputRoom, RunningAttempt, end_beside, gone, sweep
from gpucloud.agent.metrics.node_metrics import NodeMetrics
from gpucloud.agent.network import watcher_from
from gpucloud.agent.single_process import agent_process
from gpucloud.domain.node.node import Notice
from gpucloud.domain.node.status import (
    LEAVES_AHEAD,
    LEAVES_MEASURED_SHARE,
    LEAVES_SHARE,
    OUTPUT,
    AttemptStatus,
    Launch,
    Outcome,
    RunState,
    Status,
)
from gpucloud.system import processes

_NONE = OwnEnd()


def start(
    root: Path, *, package: str, own_end: OwnEnd = _NONE, replace: bool = False, lock_memory: bool = False
) -> str:
    """Start the agent of `root` and return "started" once it reported, or "already" when one runs.

    With `replace`, an agent of another package is ended first; an attempt of its own is then swept by the new one. With
    `lock_memory` root lets what it starts lock as much as it likes.
    """
    lock = agent_process(root).take(package, replace=replace)
    if lock is None:
        return "already"
    try:
        raise_limits(lock_memory=lock_memory)
        return _detach(root, package=package, own_end=own_end)
    finally:
        os.close(lock)


def _detach(root: Path, *, package: str, own_end: OwnEnd) -> str:
    """Fork twice, so that the agent has no terminal, no session and no parent of ours; it holds the lock as we do."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(reader)
            _be_agent(root, writer, package=package, own_end=own_end)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    failure = agent_process(root).failure(reader)
    if failure is not None:
        raise SystemExit(failure)
    return "started"


def _be_agent(root: Path, ready: int, *, package: str, own_end: OwnEnd) -> None:
    os.chdir("/")
    process = agent_process(root)
    _redirect(process.log)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    processes.adopt_orphans()
    process.sit(package)
    wake = Wake()
    wake.at_child_exit()
    watcher = watcher_from(os.environ, wake.wake)
    node_metrics = NodeMetrics(root)
    agent = Agent(
        root,
        notice=lambda: watcher.notice if watcher else None,
        rebalance=lambda: watcher.rebalance if watcher else None,
        own_end=own_end,
        rest=wake.rest,
        node_metrics=node_metrics,
    )
    agent.tick()
    os.write(ready, b"ready")
    os.close(ready)
    if watcher:
        watcher.start()
    node_metrics.start()
    agent.run()


def _redirect(log: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


# Ends the loop's rest early: a child exited, or another thread has news.


class Wake:
    """A pipe that `rest` listens to."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def at_child_exit(self) -> None:
        """Wake whenever a child of this process ends; only the main thread may ask for it."""
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def wake(self) -> None:
        """End the rest now; from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._writer, b"w")

    def rest(self, seconds: float) -> None:
        """Return after `seconds`, or at once when there is news."""
        if select.select([self._reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)


# What the kernel lets the processes of an attempt have: open files, and memory that stays where it is.


_MOST_FILES = 1 << 20  # some programs close every number up to the limit, one by one
_ASKED_S = 10.0


def raise_limits(*, lock_memory: bool) -> None:
    """Raise this process's limits, and so those of all that it starts, as far as it may.

    RDMA cards register memory that must not move. What EFA's installer writes into limits.d counts from the next login
    on, and we are of an earlier one: with `lock_memory` root says it of this process.
    """
    _raise(resource.RLIMIT_NOFILE, _MOST_FILES)
    _raise(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    if lock_memory and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        root = () if os.geteuid() == 0 else ("sudo", "-n")
        argv = (*root, "prlimit", f"--pid={os.getpid()}", "--memlock=unlimited:unlimited")
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # without it, the gate warns
            subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASKED_S, check=False)


def _raise(kind: int, most: int) -> None:
    soft, hard = resource.getrlimit(kind)
    within = hard if most == resource.RLIM_INFINITY else most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft not in (resource.RLIM_INFINITY, within) and (within == resource.RLIM_INFINITY or within > soft):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (within, hard))


# The agent's loop: what is wanted, what is so, what to do about it; then say how it stands.


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
        self._leaves_s: tuple[float, float, float] | None = None
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
            Snapshot(
                desired=self._inbox.desired,
                running=self._running.folder.number if self._running else None,
                newest=self._newest,
                notice=self._notice(),
                prepaid=self._prepaid,
                now=now,
                power_off_after=self._own_end.after,
                rebalance=self._rebalance(),
                saving=self._saving(),
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
        note_writing(folder.path)
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
                    is_paid = self._prepaid is None or datetime.now(timezone.utc) < self._prepaid.until
                    self._running.kill(gently=is_paid)
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
            self._attempt = self._close(folder, self._attempt)

    def _close(self, folder: AttemptFolder, status: AttemptStatus) -> AttemptStatus:
        # Unwritten on a full disk, the verdict still stands in this process, without its time; a later agent would say
        # KILLED.
        try:
            folder.write_verdict(status)
        except OSError:
            return replace(status, over_s=None)
        return status

    def _measure(self) -> None:
        launch = self._inbox.desired.launch if self._inbox.desired else None
        devices = dict(launch.env).get("CUDA_VISIBLE_DEVICES") if launch else None
        folder = self._running.folder.path if self._running else None
        self._node_metrics.look(self._attempt, folder, devices)

    def _as_old_as_it_is(self) -> AttemptStatus | None:
        """Return how the attempt stands; of one that has ended, its script's last word grows older."""
        if self._attempt is None or self._attempt.state is not RunState.EXITED:
            return self._attempt
        return self._attempt.later(AttemptFolder(self._attempts, self._attempt.attempt).since_verdict())

    def _saving(self) -> Saving | None:
        return self._running.folder.saving() or self._saving_before if self._running else None

    def _leaves(self, prepaid: Prepaid, running: RunningAttempt) -> tuple[float, float, float]:
        """Return how long before its paid time ends what runs leaves, now and at the most, and the share of that time.

        All are 0 where it trains on.
        Where nothing is saved and outputs are to come home, its supervisor ends it as early.
        """
        told = self._attempt.shown if self._attempt is not None else None
        if told is not None and told.phase == OUTPUT and not running.leaves_early:
            return 0.0, 0.0, 0.0
        saving = self._saving()
        at_most = saving.most_ahead if saving is not None else LEAVES_AHEAD
        share = LEAVES_MEASURED_SHARE if saving is not None else LEAVES_SHARE
        return prepaid.ahead(saving).total_seconds(), at_most.total_seconds(), share

    def _report(self) -> None:
        self._measure()
        if self._running and self._prepaid:
            self._leaves_s = self._leaves(self._prepaid, self._running)
        status = Status(
            heartbeat=0,
            epoch=self._inbox.epoch,
            desired_sha256=self._inbox.sha256,
            boot_id=self._boot_id,
            notice=self._notice(),
            attempt=self._as_old_as_it_is(),
            gpus=self._node_metrics.gpus,
            unhealthy=self._node_metrics.unhealthy,
            host=self._node_metrics.host,
            rebalance=self._rebalance(),
            leaves_s=self._leaves_s[0] if self._leaves_s else None,
            leaves_at_most_s=self._leaves_s[1] if self._leaves_s else None,
            leaves_share=self._leaves_s[2] if self._leaves_s else None,
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
