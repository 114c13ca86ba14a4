"""Memory as the file that boto3 wants to read a body from."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from gpucloud.domain.parts import Part, size_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PartFile(io.RawIOBase):
    """The bytes of a part, to be read and gone back in; copied as they are read, a little at a time."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self._part = part
        self._size = size_of(part)
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill the buffer as far as one stretch of memory goes; 0 at the end."""
        into = memoryview(buffer).cast("B")
        start = 0
        for view in self._part:
            if self._at < start + len(view):
                found = view[self._at - start :][: len(into)]
                into[: len(found)] = found
                self._at += len(found)
                return len(found)
            start += len(view)
        return 0
