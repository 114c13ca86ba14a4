"""Memory that a rank fills with its share of the state and that its writer reads: made once, used by every save."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import weakref

import torch

from gpucloud.domain.quantities import format_size
from gpucloud.resume.folder import say
from gpucloud.resume.memory import NoMemory

_STRETCH = 16 * 2**20
_ROUND = 2**20


class Arena:
    """One shared segment without a name: it is gone with the processes that have it open.

    A page that is touched for the first time costs many times a copy into it, so a thread does that ahead of the first
    save. For a rank with a GPU, the same thread pins the memory: copies from there then run beside everything else.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self.descriptor = _segment()
        weakref.finalize(self, os.close, self.descriptor)
        self.size = 0
        self._gpu = gpu
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._warming: threading.Thread | None = None

    def hold(self, size: int) -> None:
        """Have room for that many bytes; what was there before may be lost. Raises NoMemory, then all is as before."""
        if size <= self.size:
            return
        rounded = -(-size // _ROUND) * _ROUND
        segment = self._mapped(rounded)
        self.close()
        self.size = rounded
        with contextlib.suppress(AttributeError, OSError):  # large pages, where the system has them
            segment.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(segment, dtype=torch.uint8)
        self._warming = threading.Thread(target=self._warm, args=(self._bytes,), daemon=True)
        self._warming.start()

    def tensor(self, begin: int, end: int) -> torch.Tensor:
        """Return these bytes as a tensor (uint8) that shares them."""
        return self._bytes[begin:end]

    def write(self, begin: int, data: bytes) -> None:
        """Put bytes there."""
        ctypes.memmove(self._bytes.data_ptr() + begin, data, len(data))

    def settle(self) -> None:
        """Wait until every page was touched, and pinned."""
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def close(self) -> None:
        """Give the memory back; the descriptor stays."""
        self.settle()
        if self._gpu is not None and self.size:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._bytes, self.size = torch.empty(0, dtype=torch.uint8), 0

    def _mapped(self, size: int) -> mmap.mmap:
        try:
            os.ftruncate(self.descriptor, size)
            return mmap.mmap(self.descriptor, size)
        except (OSError, MemoryError) as error:  # a limit of the process's own, or a kernel that promises no more
            raise NoMemory(f"{format_size(size)} wanted, which the system refuses: {error}") from error

    def _warm(self, memory: torch.Tensor) -> None:
        # Through ctypes, which lets the training go on meanwhile; stretches keep other calls for memory from waiting.
        for begin in range(0, len(memory), _STRETCH):
            ctypes.memset(memory.data_ptr() + begin, 0, min(_STRETCH, len(memory) - begin))
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # a thread's own; else this would open a context on the first GPU
            refused = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)  # type: ignore[no-untyped-call]
            if int(refused):
                say(f"{len(memory) / 1e9:.1f} GB of memory could not be pinned ({refused}): saves take training longer")


def _segment() -> int:
    if hasattr(os, "memfd_create"):  # not /dev/shm, which containers keep small
        return os.memfd_create("gpucloud-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
