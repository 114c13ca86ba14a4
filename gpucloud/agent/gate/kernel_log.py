"""Xids in the kernel's log since boot."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterable

from gpucloud.domain.gate.report import XidSeen
from gpucloud.domain.hardware.xids import find_xid

_LONGEST = 300
_RECORD = 8192  # the kernel hands out one record a read, and none is longer (printk's LOG_LINE_MAX and prefix)
_COMMANDS = (("dmesg",), ("sudo", "-n", "dmesg"), ("journalctl", "-k", "-b", "--no-pager", "-q"))


def xids(read: Callable[[], Iterable[str]] | None = None) -> tuple[tuple[XidSeen, ...], str | None]:
    """Return the Xids, and why the log could not be read if it could not."""
    reason: OSError | None = None
    for way in (read,) if read is not None else (_from_device, *(_command(argv) for argv in _COMMANDS)):
        try:
            return tuple(found(way())), None
        except OSError as error:
            reason = reason or error
    return (), reason.strerror if reason is not None else None


def found(lines: Iterable[str]) -> Iterable[XidSeen]:
    """Yield the Xids in lines of a log."""
    for line in lines:
        xid = find_xid(line)
        if xid is not None:
            yield XidSeen(number=xid.number, pci=xid.pci, text=line[line.index("NVRM:") :][:_LONGEST])


def _from_device() -> Iterable[str]:
    """Return the records of /dev/kmsg; they end where reading would wait. Raises PermissionError."""
    lines: list[str] = []
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, _RECORD)
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the next one is there
                    continue
                if error.errno == errno.EAGAIN:
                    return lines
                raise
            if not record:
                return lines
            lines.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])
    finally:
        os.close(descriptor)


def _command(argv: tuple[str, ...]) -> Callable[[], Iterable[str]]:
    def read() -> Iterable[str]:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=20,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(errno.ETIMEDOUT, f"{argv[0]}: no answer") from error
        # journalctl without the right to read answers with nothing, and rc 0: a kernel that ran has a log.
        if done.returncode != 0 or not done.stdout.strip():
            raise OSError(errno.EPERM, f"{argv[0]}: {done.stderr.strip() or 'nothing'}")
        return done.stdout.splitlines()

    return read
