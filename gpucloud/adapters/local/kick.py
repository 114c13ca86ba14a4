"""Starts the embedded cloud's daemon unless it lives."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time

from gpucloud.adapters.local.folder import Folder
from gpucloud.adapters.local.node import import_path
from gpucloud.domain.errors import ProvisionError

# An interpreter without site-packages (10 ms) forks once more and ends, so that the daemon is nobody's child:
# nobody has to wait for it, and it outlives whoever asked for it.
_ORPHAN = "import os, sys\nif os.fork() == 0:\n    os.execv(sys.argv[1], sys.argv[1:])"
_LIMIT_S = 20.0
_STARTS = 2
_POLL_S = 0.005


def kick(folder: Folder) -> bool:
    """Return when the daemon lives: whether that took a start. ProvisionError when it does not start.

    A daemon that has started has dealt with what an earlier one left: records read after that are true.

    The daemon lives as long as it holds its lock, and is born with it: whoever gets the lock starts the daemon and
    hands the lock over as an open file, so that there is no moment at which a second one could start.
    """
    deadline = time.monotonic() + _LIMIT_S
    starts, waited = int(begin(folder)), False
    while not folder.daemon_pid.exists():
        if starts > _STARTS or time.monotonic() > deadline:
            raise ProvisionError("the embedded cloud does not start", hint=f"look into {folder.log}")
        time.sleep(_POLL_S)
        waited = True
        # A daemon with little to do may have come and gone meanwhile: then its file is there, and its lock is free.
        if not folder.daemon_pid.exists():
            starts += begin(folder)
    return waited


def begin(folder: Folder) -> bool:
    """Start the daemon unless it lives, and do not wait for it: whether it was started. ProvisionError as for `kick`.

    Called with the folder's lock held, it has the daemon wait for that lock: what is written meanwhile will be kept,
    though its author die at once; when nothing was written, the daemon ends.
    """
    lock = os.open(folder.daemon_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        folder.daemon_pid.unlink(missing_ok=True)
        _start(folder, lock)
        return True
    finally:
        os.close(lock)


def _start(folder: Folder, lock: int) -> None:
    daemon = (sys.executable, "-m", "gpucloud.adapters.local.daemon", "--root", str(folder.root), "--lock", str(lock))
    try:
        with folder.log.open("ab") as log:
            subprocess.run(
                (sys.executable, "-I", "-S", "-c", _ORPHAN, *daemon),
                env=_environment(),
                cwd=folder.root,  # `-m` searches there first: it must not be a folder with a `random.py` of the user's
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
                check=True,
            )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ProvisionError(f"cannot start the embedded cloud: {error}", hint=f"look into {folder.log}") from error


def _environment() -> dict[str, str]:
    """Return the daemon's environment: no secret of the caller's, and no mark of a node that the caller may be on."""
    kept = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    return {**kept, "LANG": "C.UTF-8", **import_path()}
