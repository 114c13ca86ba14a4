"""Memory that a rank fills with its share of the state, and the process that writes from it into the store."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import gpucloud
from gpucloud.domain.checkpoint.objects import SUM_BYTES, blank, entries_of, header_bytes, placed, sums_at
from gpucloud.domain.job.quantities import format_size
from gpucloud.resume.folder import say
from gpucloud.resume.ranks import NoMemory
from gpucloud.resume.state.tree import NAMES, Tensors, size_of, tensor_at

_STRETCH = 16 * 2**20
_ROUND = 2**20


class SaveBuffer:
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


# Where each tensor of a rank's share lies in its buffer: decided once, used while names, shapes and types stay.


SMALL_BYTES = 256 * 2**10
"""Tensors up to this size lie beside each other, so that a GPU can gather them and send them at once."""

_LEAST_HEADER = 16 * 2**10

Pair = tuple[torch.Tensor, torch.Tensor]
"""A place in the buffer, and the tensor that is copied there."""


class Plan:
    """One object: a header with room to grow, then the tensors, each at a place that its type allows.

    Behind it there is room for the sums of what a GPU has (`sums`), which is not part of the object.
    """

    def __init__(self, tensors: Tensors, save_buffer: SaveBuffer, *, header: int) -> None:
        self._save_buffer = save_buffer
        self._signature = _signature(tensors)
        # The widest types first: so every tensor is aligned although there are no holes between them.
        order = sorted(tensors, key=lambda name: _rank_of(tensors[name], name))
        self._places = placed((name, NAMES[tensors[name].dtype], tuple(tensors[name].shape)) for name in order)
        self._number = {place.name: number for number, place in enumerate(self._places)}
        self._entries = entries_of(self._places)
        self._tensors_size = self._places[-1].end if self._places else 0
        self._blank = blank(len(self._places))
        self._room = 0
        self.grow(len(self._entries) + sum(map(len, self._blank.values())) + header)

    @property
    def size(self) -> int:
        """The whole object's, in bytes."""
        return self._room + self._tensors_size

    def fits(self, tensors: Tensors) -> bool:
        """Whether these tensors can go to the same places."""
        return _signature(tensors) == self._signature

    def holds(self, tensors: Tensors) -> bool:
        """Whether these, of all that there is, can go to the same places."""
        places = ((self._into.get(name), tensor) for name, tensor in tensors.items())
        return all(p is not None and (p.dtype, p.shape) == (t.dtype, t.shape) for p, t in places)

    def grow(self, header: int) -> None:
        """Have room for a header of that size and half as much again. Raises NoMemory, then all is as before."""
        room = -(-max(_LEAST_HEADER, 3 * header // 2) // 4096) * 4096
        begin = sums_at(room + self._tensors_size)
        end = begin + SUM_BYTES * len(self._places)
        self._save_buffer.hold(end)
        self._room = room
        memory = self._save_buffer.tensor(0, self.size)
        self.begin = memory.data_ptr()
        self.sums = self._save_buffer.tensor(begin, end).view(torch.int64)
        self._into = {place.name: tensor_at(memory, self._room, place) for place in self._places}

    def head(self, metadata: dict[str, str]) -> None:
        """Write the object's header."""
        data = self._header(metadata)
        if len(data) > self._room:
            self.grow(len(data))
            data = self._header(metadata)
        self._save_buffer.settle()
        self._save_buffer.write(0, data)

    def head_in_place(self, metadata: dict[str, str]) -> bool:
        """Write the object's header while tensors are copied behind it; False when there is no room for it."""
        data = self._header(metadata)
        if len(data) > self._room:
            self.grow(len(data))
            return False
        self._save_buffer.write(0, data)
        return True

    def pairs(self, tensors: Tensors) -> Iterator[Pair]:
        """Yield what is to be copied whereto, in the order of places; after `head`, which may move them."""
        for name in sorted(tensors, key=self._number.__getitem__):
            yield self._into[name], tensors[name]

    def _header(self, metadata: dict[str, str]) -> bytes:
        return header_bytes(self._entries, {**self._blank, **metadata}, self._room)


def _signature(tensors: Tensors) -> tuple[tuple[str, torch.dtype, torch.Size], ...]:
    return tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())


def _rank_of(tensor: torch.Tensor, name: str) -> tuple[int, str, bool, str]:
    return -tensor.dtype.itemsize, str(tensor.dtype), size_of(tensor) > SMALL_BYTES, name


# Sums of what a GPU has, made there, by which the rank's writer sees whether what was copied is that.


Run = tuple[torch.Tensor, list[torch.Tensor]]
"""A place in the buffer, and the tensors that travel there together; flat, where they are several."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class Sums:
    """Where the sums go: behind the object, in its buffer (`gpucloud.domain.checkpoint.objects`)."""

    def __init__(self, memory: torch.Tensor, begin: int, runs: list[Run]) -> None:
        """`memory` has 64-bit numbers; `begin` is the address of the object's first byte, where places in it begin."""
        self.count = len(runs)
        self._memory = memory
        self._stretches = [_Stretch(run, begin) for run in runs]
        self._told = torch.tensor([one.told for one in self._stretches], dtype=torch.int64).reshape(-1)
        self._there: torch.Tensor | None = None

    def send(self) -> None:
        """Have the GPU's current stream sum all that will be copied, and bring the sums to where they go."""
        if not self.count:
            return
        if self._there is None:
            self._there = torch.empty(self.count, dtype=torch.int64, device=self._stretches[0].device)
        for stretch, slot in zip(self._stretches, self._there.unbind(), strict=True):
            words = stretch.words()
            every = tuple(range(words.dim()))
            if words.device == slot.device:
                torch.sum(words, dim=every, dtype=torch.int64, out=slot)
            else:  # a model that lies on several GPUs of one process
                slot.copy_(words.sum(dim=every, dtype=torch.int64))
        self._memory[: 3 * self.count] = self._told
        self._memory[3 * self.count : 4 * self.count].copy_(self._there, non_blocking=True)


class _Stretch:
    """Tensors that lie beside each other in the buffer, as words of whole numbers that are summed."""

    def __init__(self, run: Run, begin: int) -> None:
        into, self._tensors = run
        at = into.data_ptr() - begin
        self.device = self._tensors[0].device
        self._words = words_of(self._tensors[0]) if len(self._tensors) == 1 else None
        size = sum(map(size_of, self._tensors))
        width = self._words.element_size() if self._words is not None else _width(size)
        self.told = (at, at + size, width)

    def words(self) -> torch.Tensor:
        if self._words is not None:
            return self._words
        gathered = torch.cat(self._tensors)
        return gathered.view(_WORDS[_width(size_of(gathered))])


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as whole numbers as wide as it allows, with which a GPU is quickest."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        return tensor.view(_WORDS[tensor.element_size()])
    flat = tensor.reshape(-1)
    return flat.view(_WORDS[_width(size_of(flat), flat.data_ptr(), int(flat.storage_offset()) * flat.element_size())])


def _width(*numbers: int) -> int:
    return next(width for width in _WORDS if all(number % width == 0 for number in numbers))


# The writer process of a rank (`gpucloud.store.writing`), as the rank sees it.


_LOOK_S = 1.0  # between two looks at whether it was stopped
_END_S = 60.0  # for deleting older checkpoints
_NAME = "gpucloud.store.writing"
_PROGRAM = f"import sys; sys.path[:] = sys.argv[2].split('\\n'); from {_NAME} import main; sys.exit(main(sys.argv[3:]))"

Answer = dict[str, Any]


class Lost(Exception):
    """The process ended, or was stopped: what it was doing will not be done."""


class Writer:
    """Starts the process, tells it what to do and hears its answers; after `Lost`, the next command starts another."""

    def __init__(self, url: str, prefix: str, keep: int, descriptor: int) -> None:
        self._arguments = (url, prefix, str(keep), str(descriptor))
        self._descriptor = descriptor
        self._heard = b""
        self._looked_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process, unless it runs; it is ready long before the first save."""
        if self._process is not None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, _NAME, "\n".join(_places()), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            pass_fds=(self._descriptor,),
        )
        self._heard = b""
        self._end = weakref.finalize(self, _end, self._process, os.getpid())

    def tell(self, command: Answer) -> None:
        """Give the process a command. Raises Lost."""
        self.start()
        try:
            self._pipe("stdin").write(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise self._lost(str(error)) from error

    def answer(self, wait_s: float = 0.0) -> Answer | None:
        """Return the next answer, None when there is none yet. Raises Lost."""
        if b"\n" not in self._heard:
            self._hear(wait_s)
        line, found, rest = self._heard.partition(b"\n")
        if not found:
            return None
        self._heard = rest
        answer: Answer = json.loads(line)
        return answer

    def close(self, limit_s: float = _END_S) -> None:
        """Let the process finish what it does, at most so long, and end it."""
        if self._process is not None:
            with contextlib.suppress(Lost, subprocess.TimeoutExpired):
                self.tell({"end": True})
                self._process.wait(max(0.0, min(limit_s, _END_S)))
        self.kill()

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._end()
            self._process = None

    def _hear(self, wait_s: float) -> None:
        if self._process is None:
            raise Lost("it was ended")
        pipe = self._pipe("stdout")
        readable = select.poll()  # `select.select` takes no descriptor above 1,023
        readable.register(pipe, select.POLLIN)
        while readable.poll(1000 * wait_s):
            data = os.read(pipe.fileno(), 65536)
            if not data:
                raise self._lost("it ended")
            self._heard += data
            if b"\n" in data:
                return
        if time.monotonic() - self._looked_at > _LOOK_S:
            self._looked_at = time.monotonic()
            if _stopped(self._process.pid):
                raise self._lost("it was stopped")

    def _lost(self, why: str) -> Lost:
        self.kill()
        return Lost(f"the process that writes checkpoints is lost: {why}")

    def _pipe(self, name: str) -> Any:
        return getattr(self._process, name)


def _places() -> list[str]:
    """Return where this rank imports from, in its order, so that the writer finds the same gpucloud and boto3.

    The script's own folder comes last: what the script never imports of it may have the name of a module that the
    writer needs, as `queue.py` has.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    own = str(Path(script).absolute().parent) if script else ""
    places = [os.path.abspath(place) for place in sys.path]  # noqa: PTH100  an empty one is the working folder
    first = [place for place in places if place not in (own, os.getcwd())]  # noqa: PTH109
    return list(dict.fromkeys((*first, *places, str(Path(gpucloud.__file__).parents[1]))))


def _stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; no other but the one who did that would ever continue it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in {"T", "t"}
    except (OSError, IndexError):
        return False


def _end(process: subprocess.Popen[bytes], parent: int) -> None:
    if os.getpid() != parent:  # a data loader's worker, which was forked
        return
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()
