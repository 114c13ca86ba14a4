"""The process tree of one attempt."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.attemptfolder import AttemptFolder
from gpucloud.agent.composing import MARK, compose, end_recorded
from gpucloud.agent.outputroom import OutputRoom
from gpucloud.agent.outputtimes import OutputTimes
from gpucloud.agent.stacks import ask_for_stacks, told_of
from gpucloud.domain.agentstatus import AttemptStatus, Launch, RunState
from gpucloud.wholefile import write_whole

CANNOT_RUN = 127  # what a shell answers when it cannot start a command

_TELLING_S = 3.0  # for ranks to write where they are; one that the kernel holds never does
_END_LIMIT_S = 15.0  # a container engine that does not answer must not keep the agent from its other duties


class RunningAttempt:
    """An attempt that was begun by this process; `status` says RUNNING until nothing of it is alive."""

    def __init__(self, launch: Launch, folder: AttemptFolder) -> None:
        """Make the folder and start the launcher; FileExistsError when the attempt was begun before."""
        folder.create()
        self.folder = folder
        self._ranks = tuple(int(rank) for rank in dict(launch.env).get("GPUCLOUD_RANKS", "").split())
        self._exit_code: int | None = None
        self._killing = False
        self._aborting_since: float | None = None
        self._ended_beside = False
        self.room = OutputRoom(folder.path)
        self._times = OutputTimes(folder.path)
        self._launcher = self._start(launch)

    def kill(self) -> None:
        """Ask for the end; `advance` brings it about."""
        self._killing = True

    def abort(self) -> None:
        """Have the ranks tell where they are, then ask for the end; call it again until `advance` says it is over."""
        if self._aborting_since is None:
            self._aborting_since = time.monotonic()
            ask_for_stacks(self.folder.path)
        elif time.monotonic() - self._aborting_since >= _TELLING_S or not told_of(self.folder.path):
            self.kill()

    def advance(self, spare: frozenset[int] = frozenset()) -> AttemptStatus:
        """Look after the processes, and return how the attempt stands; those of `spare` are no part of it."""
        self._reap()
        over = self._exit_code is not None or self._killing or self._only_launcher_left()
        if over and self._swept(spare):
            self._reap()
            return self._verdict()
        output = self._output()
        return AttemptStatus(
            attempt=self.folder.number,
            state=RunState.RUNNING,
            outcome=None,
            exit_code=None,
            progress=self.folder.progress(),
            failed_rank=None,
            output=output,
            dropped=self.room.look(output, now_s=time.monotonic()),
        )

    def _output(self, *, last: bool = False) -> tuple[tuple[int, int], ...]:
        """Note when what is there came, and return how much of it that is."""
        sizes, at_ms = self.folder.output(), time.time_ns() // 1_000_000
        return self._times.look(sizes, now_s=time.monotonic(), at_ms=at_ms, last=last)

    def _start(self, launch: Launch) -> subprocess.Popen[bytes] | None:
        if launch.container is not None and launch.container.home:
            Path(launch.container.home).mkdir(mode=0o700, parents=True, exist_ok=True)  # else Docker does, as root
        composed = compose(launch, self.folder.path)
        write_whole(self.folder.path / "launch.json", composed.shown(launch))
        log_path = self.folder.path / "launcher.log"
        try:
            with log_path.open("ab") as log:
                return subprocess.Popen(
                    composed.argv,
                    cwd=launch.directory,
                    env={**os.environ, **composed.given},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._exit_code = CANNOT_RUN
            _note(self.folder, f"cannot start {composed.argv[0]} in {launch.directory}: {error}\n")
            return None

    def _reap(self) -> None:
        """Collect every child that ended: as subreaper the agent is the parent of each orphan."""
        while self._launcher is not None:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None:
                return
            if ended.si_pid == self._launcher.pid:
                self._exit_code = self._launcher.wait()
            else:
                os.waitpid(ended.si_pid, 0)

    def _swept(self, spare: frozenset[int]) -> bool:
        """Whether nothing of the attempt is alive any more; call it again until it says so."""
        if not self._ended_beside:
            end_beside(self.folder)
            self._ended_beside = True
        return sweep(self.folder, spare=spare)

    def _only_launcher_left(self) -> bool:
        """Whether every rank wrote its last word and is gone: torchrun's own exit (0.4 s) needs no waiting for."""
        if self._launcher is None or not self._ranks:
            return False
        if not any(self.folder.all_said(word, self._ranks) for word in ("done", "left")):
            return False
        return not processes.descendants(self._launcher.pid)

    def _verdict(self) -> AttemptStatus:
        killed = self._killing or self._aborting_since is not None
        failed = self._exit_code not in (0, None) and not killed
        output = self._output(last=True)
        return AttemptStatus(
            attempt=self.folder.number,
            state=RunState.EXITED,
            outcome=self.folder.outcome(self._ranks, self._exit_code, killed=killed),
            exit_code=self._exit_code,
            progress=self.folder.progress(),
            failed_rank=self.folder.failed_rank() if failed else None,
            output=output,
            dropped=self.room.look(output, now_s=time.monotonic()),
        )


def sweep(folder: AttemptFolder, *, limit_s: float = 0.25, spare: frozenset[int] = frozenset()) -> bool:
    """SIGKILL everything of the attempt; False when something is still alive after `limit_s` (call again).

    The mark is the attempt's folder, because nodes of the embedded fleet may share one process table; `spare` are
    children of the agent that are no part of any attempt.
    """
    return processes.kill_below(os.getpid(), mark=(MARK, str(folder.path)), limit_s=limit_s, spare=spare)


def end_beside(folder: AttemptFolder) -> None:
    """End what of the attempt is no process below us: its container. What is gone already is no error."""
    argv = end_recorded(folder.path)
    if not argv:
        return
    try:
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_END_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        _note(folder, f"{' '.join(argv)}: {error}\n")


def _note(folder: AttemptFolder, text: str) -> None:
    try:
        with (folder.path / "launcher.log").open("a") as log:
            log.write(text)
    except OSError:
        return  # the status says 127 all the same
