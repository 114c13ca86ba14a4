"""The kernel's log from now on, for errors of the GPU driver."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from gpucloud.domain.hardware.xids import Xid, find_error, is_of_kernel

_KMSG = Path("/dev/kmsg")
_ASKED_S = 10.0
_LONGEST = 1 << 16  # of a line that does not end
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
        self._rest = rest[-_LONGEST:]
        return lines


def _tells(program: str) -> bool:
    """Whether the journal may be read: to who may not, it says nothing and goes on, and a kernel that ran has a log."""
    argv = [program, "--dmesg", "--lines=1", "--output=cat", "--quiet"]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASKED_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(done.stdout.strip())
