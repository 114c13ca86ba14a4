"""Processes of this machine: listed, killed whole, told apart; short commands; locks on files, which exclude others.

Linux reads `/proc`; elsewhere `ps` answers. Standard library only: nodes use it before anything is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_NAMESPACE = _PROC / "self/ns/pid"
_LINUX = sys.platform.startswith("linux")
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True, slots=True)
class Process:
    """A running process; `started` differs between two processes that had the same pid."""

    pid: int
    parent: int
    started: str


def listing() -> tuple[Process, ...]:
    """Return every process that is alive (zombies are not)."""
    return tuple(_from_proc()) if _LINUX else tuple(_from_ps())


def started(pid: int) -> str | None:
    """Return what tells this process from a later one with the same pid; None when it is not alive."""
    if _LINUX:
        process = _read_stat(pid)
        return process.started if process else None
    return next((p.started for p in listing() if p.pid == pid), None)


def alive(pid: int, start: str) -> bool:
    """Whether that very process still runs."""
    return started(pid) == start


def cpus() -> int:
    """Return how many CPUs this process may use: a container, a batch system or `taskset` may leave it some only."""
    if _LINUX:
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def space() -> str:
    """Return what tells the pids here from those of another boot, machine or container with the same host name.

    The name of a PID namespace alone does not: Linux numbers them alike on every machine.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(_NAMESPACE.readlink())
    return f"{boot_id()} {namespace}".strip()


def descendants(pid: int) -> tuple[int, ...]:
    """Return the pids of everything below `pid`, without itself."""
    return tuple(_below({pid}, listing()))


def marked(name: str, value: str) -> tuple[int, ...]:
    """Return the pids of all processes, save this one, that were started with NAME=value in their environment.

    macOS hides the environment of programs that are part of the system: there only their parents are found.
    """
    bearing = _bearing(f"{name}={value}")
    return tuple(p.pid for p in listing() if p.pid in bearing and p.pid != os.getpid())


def has_variable(pid: int, prefix: str) -> bool:
    """Whether the process was started with a variable whose `NAME=` is `prefix`."""
    if not _LINUX:
        return any(f" {prefix}" in row for row in _ps("-Eww", "-p", str(pid), "-o", "command="))
    return any(entry.startswith(os.fsencode(prefix)) for entry in _environment(str(pid)))


def shows_handlers() -> bool:
    """Whether it can be seen here which processes have handlers."""
    return Path("/proc/self/status").exists()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal; False where that cannot be seen."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def command(pid: int) -> tuple[str, ...]:
    """Return the command line of the process; nothing where that cannot be seen."""
    with contextlib.suppress(OSError):
        return tuple(os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes()).split("\0")[:-1])
    return ()


def executable(pid: int) -> str:
    """Return the file that the process runs: of a script its interpreter's; "" where it cannot be seen."""
    return _link(pid, "exe")


def program(pid: int) -> str:
    """Return the name of the file that the process runs, as `executable`."""
    return Path(executable(pid)).name


def directory(pid: int) -> str:
    """Return the folder that the process is in; "" where it cannot be seen."""
    return _link(pid, "cwd")


def _link(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return str((_PROC / str(pid) / name).readlink())
    return ""


def writing(pid: int) -> tuple[str, ...]:
    """Return the files that the process has open for writing, not just for appending; none that cannot be seen."""
    found = (_link(pid, f"fd/{number}") for number, flags in open_to_write(pid) if not flags & os.O_APPEND)
    return tuple(path for path in found if _is_file_named(path))


def open_to_write(pid: int) -> Iterator[tuple[str, int]]:
    """Yield the number of what the process has open for writing, with its flags; none that cannot be seen."""
    with contextlib.suppress(OSError):
        for number in os.listdir(_PROC / str(pid) / "fd"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = (_PROC / str(pid) / "fdinfo" / number).read_text()
                flags = int(text.split("flags:")[1].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    yield number, flags


def _is_file_named(path: str) -> bool:
    is_device = path.startswith(("/dev/", "/proc/")) and not path.startswith("/dev/shm/")  # noqa: S108  # nosec B108
    return path.startswith("/") and not is_device and not path.endswith(" (deleted)")


def kill_below(
    pid: int, *, mark: tuple[str, str] | None = None, limit_s: float = 5.0, spare: frozenset[int] = frozenset()
) -> bool:
    """SIGKILL everything below `pid`, everything that bears `mark` and everything below that, until nothing is left.

    Returns False when something was still alive after `limit_s`. `pid` itself, this process and those of `spare` live.
    """
    return _kill(lambda: _tree({pid}, mark) - {pid} - spare, limit_s)


def kill_marked(mark: tuple[str, str], *, limit_s: float = 5.0) -> bool:
    """SIGKILL everything that bears `mark` and everything below it, until nothing is left; False after `limit_s`.

    All are stopped before any is killed: the orphans of a killed process would no longer be found below it.
    """
    _stop(lambda: _tree(set(), mark))
    return _kill(lambda: _tree(set(), mark), limit_s)


def stop_tree(pid: int, *, mark: tuple[str, str] | None = None) -> None:
    """SIGSTOP `pid`, everything below it, everything that bears `mark` and everything below that."""
    _stop(lambda: _tree({pid}, mark))


def continue_tree(pid: int, *, mark: tuple[str, str] | None = None) -> None:
    """SIGCONT what `stop_tree` stopped."""
    _signal(_tree({pid}, mark), signal.SIGCONT)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it (Linux), so that no daemon escapes `descendants`."""
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def uptime() -> float:
    """Return seconds since some moment, those during which the machine slept too; it never goes back."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # macOS counts sleep in this one, not in time.monotonic()


class TooLong(Exception):
    """What was to be done took more than the time that it was given."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise TooLong in what is done here after so much of this process's own time; in its first thread alone.

    A regular expression hears it too: `re` looks for signals while it searches.
    """

    def over(_number: int, _frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, over)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def boot_id() -> str:
    """Return what tells this boot from another."""
    path = _PROC / "sys/kernel/random/boot_id"
    if path.exists():
        return path.read_text().strip()
    return subprocess.run(["sysctl", "-n", "kern.boottime"], capture_output=True, text=True, check=False).stdout.strip()


def _from_proc() -> Iterator[Process]:
    for name in os.listdir(_PROC):
        if name.isdigit():
            process = _read_stat(int(name))
            if process is not None:
                yield process


def _read_stat(pid: int) -> Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces: count fields from the last one.
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), fields[19])


def _from_ps() -> Iterator[Process]:
    for line in _ps("-axo", "pid=,ppid=,stat=,lstart="):
        pid, parent, stat, start = line.split(None, 3)
        if not stat.startswith("Z"):
            yield Process(int(pid), int(parent), start.strip())


def _tree(roots: set[int], mark: tuple[str, str] | None) -> set[int]:
    if mark is not None:
        roots = roots | set(marked(*mark))
    return (roots | _below(roots, listing())) - {os.getpid()}


def _below(roots: set[int], processes: tuple[Process, ...]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue += below
    return found


def _kill(targets: Callable[[], set[int]], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    empty = 0
    # Twice empty: a process whose parent ends while the list is being read is below nobody in that list.
    while empty < 2:
        found = targets()
        empty = 0 if found else empty + 1
        if found:
            if time.monotonic() > deadline:
                return False
            _signal(sorted(found), signal.SIGKILL)  # parents first: none is to see its child go, and write on
            time.sleep(0.005)
    return True


def _stop(targets: Callable[[], set[int]]) -> None:
    stopped: set[int] = set()
    while not (found := targets()) <= stopped:
        _signal(found - stopped, signal.SIGSTOP)
        stopped |= found


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _bearing(entry: str) -> set[int]:
    if not _LINUX:
        shown = _ps("-axEww", "-o", "pid=,command=")
        return {int(line.split(None, 1)[0]) for line in shown if f" {entry} " in f"{line} "}
    wanted = os.fsencode(entry)
    return {int(name) for name in os.listdir(_PROC) if name.isdigit() and wanted in _environment(name)}


def _environment(pid: str) -> list[bytes]:
    try:
        return (_PROC / pid / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _ps(*options: str) -> list[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}  # the form of dates must not change between two calls
    return subprocess.run(["ps", *options], capture_output=True, text=True, check=False, env=env).stdout.splitlines()


# Short commands of the system, of which none can hold up whoever asks.


_DIES_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """How a command ended, and what it said; `stderr` is empty where both streams were asked for as one."""

    exit_code: int
    stdout: str
    stderr: str = ""


def answered(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, merged: bool = False
) -> Answered:
    """Run the command without any input and return its answer; `merged`: both streams as one.

    Raises OSError where there is no such program, subprocess.TimeoutExpired a second after the limit at the latest:
    `subprocess.run` waits without a limit for what it has killed, and a process that the kernel holds (state D, as
    nvidia-smi before a driver that is stuck) does not die.
    """
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except BaseException:
        leave(child)
        raise
    return Answered(exit_code=child.returncode, stdout=out, stderr=err or "")


def last_line(said: bytes) -> str:
    """Return the last line of what a program said: of one that failed, most often why."""
    return said.decode(errors="replace").strip().rpartition("\n")[2]


def leave(child: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill the process group that it leads, wait a second for it, and leave it where it does not die."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_DIES_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # nobody waits for it any more, and nobody warns of it
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # what it did not read yet
                stream.close()


# Locks on files. They belong to the open file: threads exclude each other too, and a process's end gives them back.


@contextmanager
def locked(path: Path, *, shared: bool = False, make: bool = True) -> Iterator[None]:
    """Hold the lock, which is waited for as long as it takes; programs started meanwhile do not inherit it. OSError.

    `shared`: beside others that share it. `make`: a file that is not there is made, in a folder that is.
    """
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file, held until it is closed; False when somebody has it. OSError."""
    return _at_once(descriptor, fcntl.LOCK_EX)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock; two that look do not see each other. False where there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _at_once(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _at_once(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Who starts one, and what one needs to find this package.


def user_name() -> str:
    """Return the name of the account that this process runs as."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run as numbers without a name
        return str(os.getuid())


def import_path() -> dict[str, str]:
    """Return PYTHONPATH where this package is not installed, else nothing."""
    parent = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(scheme)).resolve() for scheme in ("purelib", "platlib")}
    return {} if parent in installed else {"PYTHONPATH": str(parent)}
