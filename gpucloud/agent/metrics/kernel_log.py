"""What the kernel's log says of devices, since boot and from now on: Xids, and fatal errors of NVSwitches."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gpucloud.domain.node.gate.report import SwitchError, XidLine
from gpucloud.domain.node.hardware import (
    Xid,
    XidClass,
    find_error,
    find_switch_error,
    find_xid,
    is_of_kernel,
    is_recovered,
    same_device,
    xid_class,
)
from gpucloud.system.processes import answered

_LONGEST = 300
_READ = 2048  # of a line; the kernel's have half of that
_MOST = 500  # Xids that are kept: one of each number and device, the last
_RECORD = 8192  # the kernel hands out one record a read, and none is longer (printk's LOG_LINE_MAX and prefix)
_LIMIT_S = 20.0
_DMESG = ("dmesg", "--kernel")  # without what programs wrote there
_JOURNAL = ("journalctl", "-k", "-b", "--no-pager", "-q", "-o", "short-monotonic", "SYSLOG_IDENTIFIER=kernel")
_STAMP = re.compile(r"^\[\s{0,16}([0-9]{1,12}\.[0-9]{1,9})\]")
_TIME_US = re.compile(r"[0-9]+,[0-9]+,([0-9]{1,18})(?:,|$)")
_LOADED = "NVRM: loading NVIDIA UNIX"

Key = TypeVar("Key")
Value = TypeVar("Value")

Line = tuple[float | None, str]
"""When it was written, in seconds since boot, and its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelErrors:
    """What still holds of the log; `unread` is why it could not be read.

    `newest` is when something was last written that makes an earlier check worth less: the driver was loaded, a device
    broke or weakened, a switch failed; in seconds since boot, None where the log has no times or nothing of the kind.
    """

    xids: tuple[XidLine, ...] = ()
    switch_errors: tuple[SwitchError, ...] = ()
    newest: float | None = None
    unread: str | None = None


def kernel_log(read: Callable[[], Iterable[Line]] | None = None, *, sudo: bool = False) -> KernelErrors:
    """Return what the log says; `sudo`: root may be asked, which hosts report to their administrator."""
    reason: OSError | None = None
    commands = (_DMESG, *((("sudo", "-n", *_DMESG),) if sudo else ()), _JOURNAL)
    for way in (read,) if read is not None else (_from_device, *(_command(argv) for argv in commands)):
        try:
            return found(way(), time.monotonic())
        except OSError as error:
            reason = reason or error
    return KernelErrors(unread=reason.strerror if reason is not None else None)


def newest_event() -> float | None:
    """Return `newest` of the log where it can be read at once, else None."""
    for way in (_from_device, _command(_DMESG)):
        try:
            return found(way(), time.monotonic()).newest
        except OSError:
            continue
    return None


def found(lines: Iterable[Line], now: float) -> KernelErrors:
    """Return what lines of a log say `now` seconds after the machine booted.

    A driver that was loaded anew has forgotten what was before; so has a device of which the driver says that it needs
    nothing any more.
    """
    xids: dict[tuple[int, str], XidLine] = {}
    errors: dict[int, SwitchError] = {}
    newest: float | None = None
    for stamp, whole in lines:
        text, age = whole[:_READ], max(0.0, now - stamp) if stamp is not None else None
        xid, switch = find_xid(text), find_switch_error(text)
        if _LOADED in text:
            xids, errors, newest = {}, {}, stamp
        elif switch is not None:
            _put_last(errors, switch, SwitchError(number=switch, text=text[:_LONGEST], age_s=age))
            newest = stamp
        elif xid is not None and is_recovered(text):
            xids = {key: one for key, one in xids.items() if not same_device(one.pci, xid.pci)}
            newest = stamp
        elif xid is not None:
            said = text[text.index("NVRM:") :][:_LONGEST]
            _put_last(xids, (xid.number, xid.pci), XidLine(number=xid.number, pci=xid.pci, text=said, age_s=age))
            newest = stamp if xid_class(xid.number) is not XidClass.APPLICATION else newest
    return KernelErrors(xids=tuple(xids.values()), switch_errors=tuple(errors.values()), newest=newest)


def _put_last(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """A device that is ill may say the same thousands of times: the last one counts, and the newest of all stay."""
    kept.pop(key, None)
    if len(kept) >= _MOST:
        del kept[next(iter(kept))]
    kept[key] = value


def stamped(line: str) -> Line:
    """Return a line of dmesg or of the journal with its time apart."""
    stamp = _STAMP.match(line)
    return (float(stamp[1]), line[stamp.end() :]) if stamp else (None, line)


def _from_device() -> Iterable[Line]:
    """Return the kernel's own records of /dev/kmsg, up to now. Raises PermissionError."""
    lines: list[Line] = []
    until = time.monotonic() + _LIMIT_S  # somebody may write faster than we read
    descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        while time.monotonic() < until:
            try:
                record = os.read(descriptor, _RECORD)
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while we read: the next one is there
                    continue
                if error.errno == errno.EAGAIN:
                    break
                raise
            if not record:
                break
            text = record.decode(errors="replace")
            if is_of_kernel(text):
                lines.append(record_of(text))
        return lines
    finally:
        os.close(descriptor)


def record_of(record: str) -> Line:
    """Return a record of /dev/kmsg: `6,1234,5678901,-;text`, the third its time in µs (kernel, dev-kmsg)."""
    head, _, text = record.partition(";")
    time_us = _TIME_US.match(head)
    stamp = int(time_us[1]) / 1e6 if time_us else None
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


# The kernel's log from now on, for errors of the GPU driver.


_KMSG = Path("/dev/kmsg")
_ASKED_S = 10.0
_LONGEST_KERNEL = 1 << 16  # of a line that does not end
_OF_KERNEL = "SYSLOG_IDENTIFIER=kernel"
"""What programs wrote into the kernel's log is in the journal too, under a name that they choose (journald-kmsg.c)."""


class KernelLog:
    """Reads /dev/kmsg, or follows journalctl where only the journal may be read; `readable` says whether any can be."""

    def __init__(self, kmsg: Path = _KMSG) -> None:
        self._journal: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._stream = self._open(kmsg)

    @property
    def readable(self) -> bool:
        """Whether errors will be seen at all."""
        return self._stream is not None

    @property
    def pid(self) -> int | None:
        """The process that follows the journal, if one does."""
        return self._journal.pid if self._journal else None

    def news(self) -> tuple[Xid, ...]:
        """Return the errors since the last call."""
        told = (line.decode(errors="replace") for line in self._lines() if b"Xid" in line)
        return tuple(xid for line in told if is_of_kernel(line) and (xid := find_error(line)))

    def close(self) -> None:
        """End."""
        if self._journal is not None:
            with contextlib.suppress(ProcessLookupError):
                self._journal.kill()
            self._journal.wait(1.0)
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None

    def _open(self, kmsg: Path) -> int | None:
        try:
            stream = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(stream, 0, os.SEEK_END)
        except OSError:
            return self._follow_journal()
        return stream

    def _follow_journal(self) -> int | None:
        program = shutil.which("journalctl")
        if program is None or not _tells(program):
            return None
        reader, writer = os.pipe()
        self._journal = subprocess.Popen(
            [program, "--dmesg", "--follow", "--lines=0", "--output=cat", _OF_KERNEL],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(writer)
        os.set_blocking(reader, False)
        return reader

    def _lines(self) -> list[bytes]:
        """One read of kmsg is one record; one that was overwritten meanwhile is EPIPE, and the next one follows."""
        data = [self._rest]
        for _ in range(1000):
            try:
                got = os.read(self._stream, 8192) if self._stream is not None else b""
            except BrokenPipeError:
                continue
            except OSError:
                break
            if not got:
                break
            data.append(got)
        *lines, rest = b"".join(data).split(b"\n")
        self._rest = rest[-_LONGEST_KERNEL:]
        return lines


def _tells(program: str) -> bool:
    """Whether the journal may be read: to who may not, it says nothing and goes on, and a kernel that ran has a log."""
    argv = [program, "--dmesg", "--lines=1", "--output=cat", "--quiet"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASKED_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(done.stdout.strip())
