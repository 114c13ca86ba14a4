"""What is at work on this node, one process of each: the agent, the driver, a bootstrap of its own; and its zip.

lock          held while it runs; whoever starts the process hands it over, so that no second one can come between
<name>.json   the process that took it last, and the package that it runs from
<name>.log    what it says
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpucloud.system import processes
from gpucloud.system.processes import is_locked, locked, try_lock
from gpucloud.system.wholefile import read_tail, read_text, write_whole

_WAIT_S = 5.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleProcessFolder:
    """`folder` is that of the process called `name`."""

    folder: Path
    name: str

    @property
    def log(self) -> Path:
        """Where the process writes what it says."""
        return self.folder / f"{self.name}.log"

    def taken_by(self) -> str | None:
        """Return the package of the process that runs, "unknown" when it has not said; None when none runs."""
        return str(self._sitting().get("package", "unknown")) if is_locked(self.folder / "lock") else None

    def take(self, package: str, *, replace: bool) -> int | None:
        """Return the lock as a descriptor, which the process must inherit; None when one runs that may go on.

        With `replace`, a process of another package is ended first. A holder that is not the process that sat down
        looks whether one runs, or starts it: it is waited for.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        deadline = time.monotonic() + _WAIT_S
        while (lock := self._lock()) is None and time.monotonic() < deadline:
            sitting = self._sitting()
            if _is_alive(sitting):
                if not replace or sitting.get("package") == package:
                    return None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(str(sitting["pid"])), signal.SIGKILL)
            time.sleep(_POLL_S)
        return lock

    def sit(self, package: str) -> None:
        """Write down that this process is the one."""
        own = {"pid": os.getpid(), "started": processes.started(os.getpid()), "package": package}
        write_whole(self.folder / f"{self.name}.json", json.dumps(own))

    def failure(self, reader: int) -> str | None:
        """Wait for the word of a process that was just started, by the pipe's end; return what it said if none came."""
        with os.fdopen(reader, "rb") as ready:
            if ready.read():
                return None
        return f"the {self.name} did not start:\n{read_tail(self.log, 2000)}"

    def _lock(self) -> int | None:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        if try_lock(descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def _sitting(self) -> dict[str, object]:
        try:
            data = json.loads(read_text(self.folder / f"{self.name}.json") or "{}")
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}


def agent_process(root: Path) -> SingleProcessFolder:
    """Return the folder of the node's agent."""
    return SingleProcessFolder(folder=root / "agent", name="agent")


def controller_process(root: Path) -> SingleProcessFolder:
    """Return the folder of the node's driver."""
    return SingleProcessFolder(folder=root / "drive", name="driver")


def _is_alive(sitting: dict[str, object]) -> bool:
    pid, started = sitting.get("pid"), sitting.get("started")
    return isinstance(pid, int) and isinstance(started, str) and processes.alive(pid, started)


# What a node's own bootstrap keeps below the agent's folder: its lock, its record, its code, how it ended.
#
# boot/lock            held while it runs
# boot/node.json       the record that it goes by
# boot/code            the record's code, as it came
# boot/ended.json      how the last one ended
# agent/visited        touched whenever a supervisor asks for facts


def boot_folder(root: Path) -> Path:
    """Return the folder, made if need be."""
    made = root / "boot"
    made.mkdir(parents=True, exist_ok=True, mode=0o700)
    return made


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Be the node's only bootstrap of its own; another one is waited for. What it starts does not inherit the lock."""
    with locked(boot_folder(root) / "lock"):
        yield


def boots_itself(root: Path) -> bool:
    """Whether a bootstrap of the node's own is under way."""
    return is_locked(root / "boot" / "lock")


def wait_for_own(root: Path) -> None:
    """Return when no bootstrap of the node's own is under way."""
    with contextlib.suppress(OSError), locked(root / "boot" / "lock", shared=True, make=False):
        pass


def note_visit(root: Path) -> None:
    """Write down that a supervisor came: from then on it is not for the first boot to end this machine."""
    place = root / "agent"
    with contextlib.suppress(OSError):  # a full disk is told by the facts
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        (place / "visited").touch(mode=0o600)


# The zip that this code runs from.


def running_package() -> Path | None:
    """Return the zip that this code was read from; None when it was not read from one."""
    path = Path(sys.argv[0]).absolute()
    return path if path.suffix == ".zip" and path.is_file() else None


def package_sha256(package: Path | None) -> str:
    """Return the hash of the zip; empty for code that was not read from one."""
    return hashlib.sha256(package.read_bytes()).hexdigest() if package else ""
