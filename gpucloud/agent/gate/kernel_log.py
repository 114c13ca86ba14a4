"""What the kernel's log says of devices since boot: Xids, and fatal errors of NVSwitches."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gpucloud.commands import answered
from gpucloud.domain.gate.report import SwitchError, XidSeen
from gpucloud.domain.hardware.xids import XidClass, find_switch_error, find_xid, is_recovered, same_device, xid_class

_LONGEST = 300
_RECORD = 8192  # the kernel hands out one record a read, and none is longer (printk's LOG_LINE_MAX and prefix)
_LIMIT_S = 20.0
_DMESG = ("dmesg",)
_JOURNAL = ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-monotonic")
_STAMP = re.compile(r"^\[\s*(\d+\.\d+)\]")
_LOADED = "NVRM: loading NVIDIA UNIX"

Line = tuple[float | None, str]
"""When it was written, in seconds since boot, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSeen:
    """What still holds of the log; `unread` is why it could not be read.

    `newest` is when something was last written that makes an earlier check worth less: the driver was loaded, a device
    broke or weakened, a switch failed; in seconds since boot, None where the log has no times or nothing of the kind.
    """

    xids: tuple[XidSeen, ...] = ()
    switch_errors: tuple[SwitchError, ...] = ()
    newest: float | None = None
    unread: str | None = None


def kernel_log(read: Callable[[], Iterable[Line]] | None = None, *, sudo: bool = False) -> LogSeen:
    """Return what the log says; `sudo`: root may be asked, which hosts report to their administrator."""
    reason: OSError | None = None
    commands = (_DMESG, *((("sudo", "-n", *_DMESG),) if sudo else ()), _JOURNAL)
    for way in (read,) if read is not None else (_from_device, *(_command(argv) for argv in commands)):
        try:
            return found(way(), time.monotonic())
        except OSError as error:
            reason = reason or error
    return LogSeen(unread=reason.strerror if reason is not None else None)


def newest_event() -> float | None:
    """Return `newest` of the log where it can be read at once, else None."""
    for way in (_from_device, _command(_DMESG)):
        try:
            return found(way(), time.monotonic()).newest
        except OSError:
            continue
    return None


def found(lines: Iterable[Line], now: float) -> LogSeen:
    """Return what lines of a log say `now` seconds after the machine booted.

    A driver that was loaded anew has forgotten what was before; so has a device of which the driver says that it needs
    nothing any more.
    """
    xids: list[XidSeen] = []
    errors: list[SwitchError] = []
    newest: float | None = None
    for stamp, text in lines:
        age = now - stamp if stamp is not None else None
        xid, switch = find_xid(text), find_switch_error(text)
        if _LOADED in text:
            xids, errors, newest = [], [], stamp
        elif switch is not None:
            errors.append(SwitchError(number=switch, text=text[:_LONGEST], age_s=age))
            newest = stamp
        elif xid is not None and is_recovered(text):
            xids = [one for one in xids if not same_device(one.pci, xid.pci)]
            newest = stamp
        elif xid is not None:
            xids.append(XidSeen(number=xid.number, pci=xid.pci, text=text[text.index("NVRM:") :][:_LONGEST], age_s=age))
            newest = stamp if xid_class(xid.number) is not XidClass.APPLICATION else newest
    return LogSeen(xids=tuple(xids), switch_errors=tuple(errors), newest=newest)


def stamped(line: str) -> Line:
    """Return a line of dmesg or of the journal with its time apart."""
    stamp = _STAMP.match(line)
    return (float(stamp[1]), line[stamp.end() :]) if stamp else (None, line)


def _from_device() -> Iterable[Line]:
    """Return the records of /dev/kmsg; they end where reading would wait. Raises PermissionError."""
    lines: list[Line] = []
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
            lines.append(record_of(record.decode(errors="replace")))
    finally:
        os.close(descriptor)


def record_of(record: str) -> Line:
    """Return a record of /dev/kmsg: `6,1234,5678901,-;text`, the third its time in µs (kernel, dev-kmsg)."""
    head, _, text = record.partition(";")
    fields = head.split(",")
    stamp = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else None
    return stamp, text.partition("\n")[0]


def _command(argv: tuple[str, ...]) -> Callable[[], Iterable[Line]]:
    def read() -> Iterable[Line]:
        try:
            done = answered(argv, timeout_s=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise OSError(errno.ETIMEDOUT, f"{argv[0]}: no answer") from error
        # journalctl without the right to read answers with nothing, and rc 0: a kernel that ran has a log.
        if done.exit_code != 0 or not done.stdout.strip():
            raise OSError(errno.EPERM, f"{argv[0]}: {done.stderr.strip() or 'nothing'}")
        return [stamped(line) for line in done.stdout.splitlines()]

    return read
