"""The writer process of a rank (`gpucloud.store.writing`), as the rank sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import gpucloud

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
