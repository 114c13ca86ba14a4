"""An error as the user meets it: one message, one hint, one exit code; our own faults go to a file."""

from __future__ import annotations

import errno
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path

from gpucloud.cli.render.words import error_json, say_json, tell_error
from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.wiring import Gpucloud

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_FULL = "`df -h` says which disk is full; `gpucloud down JOB` works on a full one"


def exit_code_of(error: Exception) -> int:
    """Say what went wrong, as JSON too when that was asked for, and return the exit code."""
    known = known_error(error)
    tell_error(known)
    if "--json" in sys.argv:
        say_json(error_json(known))
    return known.exit_code


def known_error(error: Exception) -> GpucloudError:
    """Return the error as one that the user meets; one that nobody foresaw is a fault of ours, and says so."""
    return error if isinstance(error, GpucloudError) else _of_the_system(error) or _ours(error)


def _of_the_system(error: Exception) -> GpucloudError | None:
    if isinstance(error, OSError) and error.filename is not None:
        return StoreError(f"{error.filename}: {error.strerror}", hint="check the disk's space and the folder's rights")
    if isinstance(error, OSError) and error.errno in _OF_A_DISK:  # of a file that was open, which has no name any more
        return StoreError(f"a file could not be written: {error.strerror}", hint=f"free some space: {_FULL}")
    return None


def _ours(error: Exception) -> GpucloudError:
    path = _write(error) if "--debug" in sys.argv else None
    hint = f"the traceback is in {path}" if path else "`gpucloud --debug …` writes a traceback to a file"
    return GpucloudError(f"a fault of gpucloud itself: {type(error).__name__}: {error}", hint=hint)


def _write(error: Exception) -> Path | None:
    path = Gpucloud().home.root / "logs" / f"fault-{datetime.now(timezone.utc):%Y%m%dT%H%M%S}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
    except OSError:
        return None
    return path
