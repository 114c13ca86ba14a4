"""What product code takes from `threading`, `concurrent.futures` and the operating system, over simulated time."""

from __future__ import annotations

import contextlib
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

from gpucloud.usecases.jobstore import events, lease
from gpucloud.usecases.supervise import agents, observe, prepare, session
from tests.sim.loom import Killed, Loom, Process


@contextlib.contextmanager
def simulated(
    loom: Loom, dice: random.Random, processes: dict[int, Process], bootstrap: Callable[..., Any]
) -> Iterator[None]:
    """While it lasts, the product's supervisor waits, computes and dies in the loom's time."""
    here = SimpleNamespace(
        alive=lambda pid, started: pid in processes and processes[pid].alive and started == f"start {pid}",
        started=lambda pid: f"start {pid}",
        space=lambda: "",
    )
    with contextlib.ExitStack() as stack:
        for module, name, stand_in in (
            (lease, "threading", Threading(loom)),
            (events, "threading", Threading(loom)),
            (lease, "os", SimpleNamespace(getpid=lambda: loom.process.pid)),
            (lease, "socket", SimpleNamespace(gethostname=lambda: loom.process.host)),
            (lease, "processes", here),
            (lease, "uuid", SimpleNamespace(uuid4=lambda: uuid.UUID(int=dice.getrandbits(128), version=4))),
            (session, "ThreadPoolExecutor", lambda **_: Executor(loom)),
            (observe, "wait", lambda futures, timeout: wait(loom, futures, timeout)),
            (agents, "wait", lambda futures, timeout: wait(loom, futures, timeout)),
            (prepare, "bootstrap", bootstrap),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


class Threading:
    """Stands for the module `threading`."""

    def __init__(self, loom: Loom) -> None:
        self._loom = loom

    def Event(self) -> Event:  # noqa: N802
        return Event(self._loom)

    def RLock(self) -> Lock:  # noqa: N802
        return Lock(self._loom)

    def Thread(self, *, target: Callable[[], Any], name: str, daemon: bool) -> Thread:  # noqa: N802
        return Thread(self._loom, target)


class Event:
    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self._set = False
        self._waiting: list[Any] = []

    def set(self) -> None:
        self._set = True
        for strand in self._waiting:
            self._loom.wake(strand)
        self._waiting = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiting.append(self._loom.current)
            self._loom.park(timeout)
        return self._set


class Lock:
    """Re-entrant for one strand."""

    def __init__(self, loom: Loom) -> None:
        self._loom = loom
        self._owner: Any = None
        self._depth = 0
        self._waiting: list[Any] = []

    def __enter__(self) -> None:
        me = self._loom.current
        while self._owner not in (None, me):
            self._waiting.append(me)
            self._loom.park(None)
        self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            if self._waiting:
                self._loom.wake(self._waiting.pop(0))


class Thread:
    def __init__(self, loom: Loom, target: Callable[[], Any]) -> None:
        self._loom = loom
        self._target = target
        self._done = Event(loom)

    def start(self) -> None:
        self._loom.spawn(self._loom.process, self._run)

    def join(self, timeout: float | None = None) -> None:
        self._done.wait(timeout)

    def _run(self) -> None:
        self._target()
        self._done.set()


class Future:
    def __init__(self, loom: Loom) -> None:
        self._ended = Event(loom)
        self._is_done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._is_done

    def exception(self) -> BaseException | None:
        self.await_end(None)
        return self._error

    def result(self) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        return self._value

    def await_end(self, timeout: float | None) -> None:
        if not self._is_done:
            self._ended.wait(timeout)

    def work(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._value = function(*arguments)
        except Exception as error:  # noqa: BLE001  as concurrent.futures does
            self._error = error
        self._is_done = True
        self._ended.set()


class Executor:
    def __init__(self, loom: Loom) -> None:
        self._loom = loom

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future = Future(self._loom)
        self._loom.spawn(self._loom.process, lambda: future.work(function, arguments))
        return future

    def shutdown(self, *, wait: bool, cancel_futures: bool) -> None:
        pass


def wait(loom: Loom, futures: Sequence[Future], timeout: float) -> None:
    """As `concurrent.futures.wait`: until all are done, or the time is over."""
    deadline = loom.now + timeout
    for future in futures:
        if not future.done():
            future.await_end(max(0.0, deadline - loom.now))


__all__ = ["Killed", "simulated"]
