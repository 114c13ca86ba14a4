"""A script that saves by itself: its processes, and what is said of it to the user and to the agent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.attempt.composing import MARK
from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.domain.node.status import UNTOLD
from gpucloud.wholefile import read_text, write_whole

# The variables that tell a rank, by what started it: torchrun (accelerate, Lightning), mpirun, or ourselves.
_OF_A_RANK = ("TORCHELASTIC_RUN_ID=", "OMPI_COMM_WORLD_RANK=", "RANK=")
_SHELLS = ("sh", "dash", "bash", "zsh", "ash")
_PROC = Path("/proc")


def ranks(folder: Path) -> tuple[int, ...]:
    """Return the pids of the attempt's ranks: neither what started them, nor the workers that they started.

    In containers too: their processes are seen from outside, by the attempt's mark.
    """
    listing = {process.pid: process for process in processes.listing()}
    ours = {pid for pid in processes.marked(MARK, str(folder)) if pid in listing}
    for variable in _OF_A_RANK:
        bearing = {pid for pid in ours if processes.has_variable(pid, variable)}
        programs = {pid for pid in bearing if not _is_shell(pid)}
        outermost = tuple(pid for pid in sorted(programs) if not _has_above(pid, programs, listing))
        if outermost:
            return outermost
    return ()


def tell(folder: Path, name: str) -> int:
    """Send the signal to every rank and return how many there were."""
    found = ranks(folder)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.Signals[name])
    return len(found)


def written_to(folder: Path) -> frozenset[int]:
    """Return the inodes of the files that a process of the attempt has open for writing (Linux; elsewhere none)."""
    return frozenset(inode for pid in processes.marked(MARK, str(folder)) for inode in _written_by(pid))


def end(folder: Path) -> None:
    """SIGKILL everything of the attempt but this process."""
    processes.kill_below(os.getpid(), mark=(MARK, str(folder)))


def _written_by(pid: int) -> Iterator[int]:
    try:
        numbers = os.listdir(_PROC / str(pid) / "fd")
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError, ValueError, IndexError):
            flags = (_PROC / str(pid) / "fdinfo" / number).read_text().split("flags:")[1].split()[0]
            about = (_PROC / str(pid) / "fd" / number).stat()
            if int(flags, 8) & os.O_ACCMODE and stat.S_ISREG(about.st_mode):
                yield about.st_ino


def _is_shell(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "comm").read_text().strip() in _SHELLS
    except OSError:
        return False


def _has_above(pid: int, programs: set[int], listing: dict[int, processes.Process]) -> bool:
    above = listing[pid].parent
    while above in listing:
        if above in programs:
            return True
        above = listing[above].parent
    return False


# What the keeper says: to the user, and to the node's agent.


class Reporting:
    """The attempt's folder, as the agent reads it. A full disk silences what is said, never what is done."""

    def __init__(self, folder: Path, *, rank: int, first_step: int = 1) -> None:
        self.first_step = first_step
        self._folder = folder
        self._log = folder / f"rank-{rank}.log"
        self._leads = rank == 0
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Tell the user, in the output of the first rank; on other nodes in the launcher's."""
        line = f"gpucloud: {text}\n"
        if not self._leads:
            sys.stderr.write(line)
            return
        try:
            with self._log.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(line)
        except OSError:
            sys.stderr.write(line)

    def say_once(self, text: str) -> None:
        """Tell the user, unless this was told before."""
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def progress(self, committed: int) -> None:
        """Say which step is in the store, 0 for none: on the first rank's node, whose word it is."""
        if not self._leads:
            return
        self._write(
            "progress.json",
            {
                "step": committed,
                "first_step": self.first_step,
                "phase": UNTOLD,
                "committed_step": committed or None,
                "written_at": time.time(),
            },
        )

    def saving(self, seconds: float) -> None:
        """Say how long it takes from a file at rest to its commit, as the first rank's node knows it."""
        if not self._leads:
            return
        self._write("saving.json", {"seconds": seconds, "step": None})

    def barred(self, why: str) -> None:
        """Say that what was saved could not be read here and now, so that the script was not begun."""
        self._write("barred-0.json", {"why": why})

    def stop(self) -> datetime | None:
        """Return until when the script may take to leave; None while nobody wants it to."""
        text = read_text(self._folder / "stop.json")
        if text is None:
            return None
        try:
            return datetime.fromisoformat(json.loads(text)["at"])
        except (ValueError, KeyError, TypeError):
            return datetime.now(timezone.utc)

    def why_stop(self) -> Why:
        """Return what the script is to leave for, STOP where that is not told."""
        try:
            return Why(json.loads(read_text(self._folder / "stop.json") or "")["reason"])
        except (ValueError, KeyError, TypeError):
            return Why.STOP

    def _write(self, name: str, content: dict[str, object]) -> None:
        try:
            write_whole(self._folder / name, json.dumps(content))
        except OSError as error:
            sys.stderr.write(f"{name}: {error}\n")
