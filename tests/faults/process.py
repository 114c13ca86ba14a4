"""One run of the command line as a process that may die: in this one, over fakes that outlive it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import itertools
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

from typer.main import get_command

from gpucloud.__main__ import main
from gpucloud.adapters.transfer.sync import _refusal
from gpucloud.cli.app import app
from gpucloud.domain import codec
from tests.faults.strikes import Killed, Strikes

T = TypeVar("T")
File = tuple[str, bytes, int]
Files = tuple[File, ...]
_numbers = itertools.count(1)
_COMMAND = get_command(app)  # what typer makes of it is the same every time, and takes as long as a whole run
_HINTS = functools.cache(codec.get_type_hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a process ended: as a shell tells it, 137 for one that was killed."""

    code: int
    stdout: str
    stderr: str


class InlinePool:
    """A pool whose work is done when it is asked for: the same calls in the same order at every run."""

    def __init__(self, **_: object) -> None:
        pass

    def submit(self, do: Callable[..., T], *arguments: Any, **named: Any) -> Future[T]:
        done: Future[T] = Future()
        try:
            done.set_result(do(*arguments, **named))
        except Exception as error:  # noqa: BLE001  (as a pool does; what is no Exception ends this process)
            done.set_exception(error)
        return done

    def shutdown(self, *, wait: bool = True, cancel_futures: bool = False) -> None:
        """Nothing is left to do."""


class InlineThread:
    """A thread whose work is done when it is started."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:
        del name, daemon
        self._target = target

    def start(self) -> None:
        """Do it."""
        self._target()

    def join(self, timeout: float | None = None) -> None:
        """It is done."""


class Trees:
    """Makes a tree of stored code once by the node's program, which is a process, and copies it from then on.

    Only the very bytes that have made a whole tree before make one so.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], Files] = {}
        self._whole: dict[str, Files] = {}

    def refusal(self, folder: Path, sha256: str, stored: bytes) -> str | None:
        """Stand for `sync._refusal`."""
        tree = folder / sha256
        if not stored and not tree.exists():
            return "files of it are missing"
        if tree.exists() and self._whole.get(sha256) == tuple(_files_of(tree)):
            return None
        key = (sha256, hashlib.sha256(stored).digest())
        if tree.exists() or key not in self._made:
            why = _refusal(folder, sha256, stored)
            if why is None:
                self._whole[sha256] = tuple(_files_of(tree))
                self._made |= {key: self._whole[sha256]} if stored else {}
            return why
        for name, data, mode in self._made[key]:
            file = tree / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)
        return None


def _files_of(tree: Path) -> Iterator[File]:
    for file in sorted(tree.rglob("*")):
        if file.is_file():
            yield str(file.relative_to(tree)), file.read_bytes(), stat.S_IMODE(file.stat().st_mode)


_TREES = Trees()


def run(arguments: tuple[str, ...], cloud: object, strikes: Strikes) -> Ended:
    """Run `gpucloud` with these arguments over `cloud`, which stands for the composition; return how it ended."""
    out, err = io.StringIO(), io.StringIO()
    with (
        as_process(cloud),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["gpucloud", *arguments]),
    ):
        code = _code_of_main(strikes)
    strikes.dead = strikes.dead or 1  # whatever is left of it, a thread, makes no call
    return Ended(code=code, stdout=out.getvalue(), stderr=err.getvalue())


def run_main(arguments: tuple[str, ...]) -> int:
    """Run `gpucloud` with these arguments in whatever `quick` world there is; return its exit code."""
    sys.argv = ["gpucloud", *arguments]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Have what is the same at every run be made once; `sys.argv` is as before in the end."""
    with (
        mock.patch("gpucloud.cli.app.app", _COMMAND),
        mock.patch("gpucloud.domain.codec.get_type_hints", _HINTS),
        mock.patch.object(sys, "argv", list(sys.argv)),
    ):
        yield


def _code_of_main(strikes: Strikes) -> int:
    try:
        main()
    except Killed:
        return strikes.dead
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextlib.contextmanager
def as_process(cloud: object) -> Iterator[None]:
    """Each run is a process of its own to those who ask whether the last one lives, its signals as at a start."""
    number = next(_numbers)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where a shell began us beside itself
    with (
        mock.patch("gpucloud.cli.app.app", _COMMAND),
        mock.patch("gpucloud.domain.codec.get_type_hints", _HINTS),
        mock.patch("gpucloud.cli.commands.training.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.cli.commands.passes.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.cli.commands.asking.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.cli.commands.reaching.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.cli.commands.logs.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.cli.commands.events.Gpucloud", return_value=cloud),
        mock.patch("gpucloud.usecases.supervise.session.ThreadPoolExecutor", InlinePool),
        mock.patch("gpucloud.usecases.jobstore.events.threading", SimpleNamespace(Thread=InlineThread)),
        mock.patch("gpucloud.usecases.jobstore.lease.Lease._renew_for_ever"),  # by a clock that does not stand still
        mock.patch("gpucloud.adapters.transfer.sync._refusal", _TREES.refusal),
        mock.patch("gpucloud.system.processes.started", return_value=f"process {number}"),
        mock.patch("gpucloud.system.processes.alive", lambda _, started: started == f"process {number}"),
        mock.patch("sys.stdin", io.StringIO()),
    ):
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
