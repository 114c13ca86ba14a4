"""The embedded node's SFTP: its file system, relative paths below the home folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface
from paramiko.sftp import SFTP_FAILURE, SFTP_OK


class NodeFiles(SFTPServerInterface):
    """Answers SFTP requests with the rights of this process; nothing is hidden from the node's user."""

    def __init__(self, server: paramiko.ServerInterface, *, home: Path) -> None:
        super().__init__(server)
        self._home = home

    def canonicalize(self, path: str) -> str:
        """Return the absolute path, without following links."""
        return os.path.normpath(self._home / path)

    def list_folder(self, path: str) -> list[SFTPAttributes] | int:
        """Return the attributes of what is in a folder."""
        with contextlib.ExitStack() as stack:
            try:
                listing = stack.enter_context(os.scandir(self._home / path))
                return [SFTPAttributes.from_stat(item.stat(follow_symlinks=False), item.name) for item in listing]
            except OSError as error:
                return _code(error)

    def stat(self, path: str) -> SFTPAttributes | int:
        """Return the attributes of what a path leads to."""
        return _attributes((self._home / path).stat)

    def lstat(self, path: str) -> SFTPAttributes | int:
        """Return the attributes of the path itself."""
        return _attributes((self._home / path).lstat)

    def open(self, path: str, flags: int, attr: SFTPAttributes) -> SFTPHandle | int:
        """Open a file."""
        try:
            fd = os.open(self._home / path, flags, 0o666 if attr.st_mode is None else attr.st_mode)
        except OSError as error:
            return _code(error)
        return _OpenFile(fd, flags, str(self._home / path))

    def remove(self, path: str) -> int:
        """Delete a file."""
        return _done((self._home / path).unlink)

    def rename(self, oldpath: str, newpath: str) -> int:
        """Move a file; SFTP version 3 refuses an existing target."""
        if os.path.lexists(self._home / newpath):
            return SFTP_FAILURE
        return self.posix_rename(oldpath, newpath)

    def posix_rename(self, oldpath: str, newpath: str) -> int:
        """Move a file over whatever has the new name."""
        return _done(lambda: (self._home / oldpath).replace(self._home / newpath))

    def mkdir(self, path: str, attr: SFTPAttributes) -> int:
        """Make a folder."""
        return _done(lambda: (self._home / path).mkdir(0o777 if attr.st_mode is None else attr.st_mode))

    def rmdir(self, path: str) -> int:
        """Delete an empty folder."""
        return _done((self._home / path).rmdir)

    def chattr(self, path: str, attr: SFTPAttributes) -> int:
        """Set mode, owner, times or size."""
        return _done(lambda: SFTPServer.set_file_attr(str(self._home / path), attr))

    def readlink(self, path: str) -> str | int:
        """Return a link's target."""
        try:
            return str((self._home / path).readlink())
        except OSError as error:
            return _code(error)

    def symlink(self, target_path: str, path: str) -> int:
        """Make a link."""
        return _done(lambda: (self._home / path).symlink_to(target_path))


class _OpenFile(SFTPHandle):
    def __init__(self, fd: int, flags: int, name: str) -> None:
        super().__init__(flags)
        self._name = name
        access = flags & (os.O_WRONLY | os.O_RDWR)
        mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "r+b"}[access]
        # Unbuffered: reads and writes of one handle share a position that the base class tracks.
        self.readfile = self.writefile = os.fdopen(fd, mode, buffering=0)

    def stat(self) -> SFTPAttributes | int:
        return _attributes(lambda: os.fstat(self.readfile.fileno()))

    def chattr(self, attr: SFTPAttributes) -> int:
        return _done(lambda: SFTPServer.set_file_attr(self._name, attr))


def _attributes(status: Callable[[], os.stat_result]) -> SFTPAttributes | int:
    try:
        return SFTPAttributes.from_stat(status())
    except OSError as error:
        return _code(error)


def _done(work: Callable[[], Any]) -> int:
    try:
        work()
    except OSError as error:
        return _code(error)
    return SFTP_OK


def _code(error: OSError) -> int:
    return SFTPServer.convert_errno(error.errno or 0)
