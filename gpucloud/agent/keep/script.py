"""The script's processes: who is to be signalled, who still writes, how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

from gpucloud import processes
from gpucloud.agent.composing import MARK

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
