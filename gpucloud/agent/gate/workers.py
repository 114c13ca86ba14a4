"""Workers in the job's Python: started, waited for, ended, and what they said."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gpucloud
from gpucloud.commands import leave
from gpucloud.domain.codec import Malformed, from_json, to_json
from gpucloud.domain.gate.probing import ProbeOrder, Said

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What one worker said, the end of its complaints, and whether it had to be ended."""

    said: tuple[Said, ...]
    complaint: str
    ended: bool


def work(
    python: str,
    orders: tuple[ProbeOrder, ...],
    env: Mapping[str, str],
    *,
    limit_s: float,
    beside: Callable[[], None] = lambda: None,
) -> tuple[Heard, ...]:
    """Run one worker for each order and return what they said; `beside` is called now and then meanwhile."""
    with tempfile.TemporaryDirectory(prefix="gpucloud-gate-") as folder, contextlib.ExitStack() as stack:
        started = [_Worker(stack, Path(folder), python, order, env) for order in orders]
        until = time.monotonic() + limit_s
        while any(worker.runs for worker in started) and time.monotonic() < until:
            beside()
            time.sleep(_LOOK_S)
        return tuple(worker.heard() for worker in started)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


class _Worker:
    """One process group; it is ended with the stack that it was started in."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, python: str, order: ProbeOrder, env: Mapping[str, str]
    ) -> None:
        self._out, self._err = (folder / f"{order.rank}.{name}" for name in ("out", "err"))
        self._ended = False
        out, err = stack.enter_context(self._out.open("wb")), stack.enter_context(self._err.open("wb"))
        self._process = subprocess.Popen(
            (python, "-m", "gpucloud.probe"),
            env={**os.environ, **env, "PYTHONPATH": str(Path(gpucloud.__file__).parent.parent)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        stack.callback(self._end)
        with contextlib.suppress(BrokenPipeError), self._process.stdin:  # type: ignore[union-attr]
            self._process.stdin.write(to_json(order).encode())  # type: ignore[union-attr]

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def heard(self) -> Heard:
        if self.runs:
            self._ended = True
            self._end()
        said = [one for line in _text(self._out).splitlines() if (one := _parsed(line)) is not None]
        return Heard(said=tuple(said), complaint=_last_line(_text(self._err)), ended=self._ended)

    def _end(self) -> None:
        leave(self._process)


def _parsed(line: str) -> Said | None:
    """NCCL writes to standard output too when it is asked to be chatty."""
    try:
        return from_json(Said, line) if line.startswith("{") else None
    except Malformed:
        return None


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:300] if lines else ""
