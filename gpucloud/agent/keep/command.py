"""`keep`: puts a directory back, then is the parent of the script that goes on from it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpucloud.agent.attemptfolder import LEFT_EXIT_CODE
from gpucloud.agent.keep.depot import Depot
from gpucloud.agent.keep.keeper import Keeper
from gpucloud.agent.keep.putting import Directory, Fetched
from gpucloud.agent.keep.reporting import Reporting
from gpucloud.agent.keep.taking import Taking
from gpucloud.agent.keep.together import Answering, Calling
from gpucloud.domain.errors import GpucloudError, StoreError, UsageError
from gpucloud.domain.keeping.order import KeepOrder
from gpucloud.domain.manifest import Commit

_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_JOIN_S = 0.5
_Answer = TypeVar("_Answer")


def keep(order: KeepOrder, words: tuple[str, ...]) -> int:
    """Return the exit code of the attempt on this node."""
    # Ranks are made to tell where they are by SIGABRT; with `launcher: plain` this process bears a rank's variables.
    signal.signal(signal.SIGABRT, lambda *_: None)
    reporting = Reporting(Path(order.folder), rank=order.first_rank)
    try:
        taking = _Start(order, reporting).taking()
    except _Stopped:
        return LEFT_EXIT_CODE
    except (GpucloudError, OSError) as error:
        hint = f" ({error.hint})" if isinstance(error, GpucloudError) else ""
        reporting.say(f"the directory {order.directory} could not be put back: {error}{hint}")
        if not isinstance(error, UsageError):  # what cannot be read now may be later, or elsewhere
            reporting.barred(str(error))
        return 1
    return Keeper(order, _directory(order), reporting, taking).run(words)


class _Stopped(Exception):
    """The end was asked for before anything began."""


class _Start:
    """Puts the directory back, from the same commit on every node."""

    def __init__(self, order: KeepOrder, reporting: Reporting) -> None:
        self._order = order
        self._reporting = reporting
        self._depot = Depot(order.store, order.prefix, keep=order.keep)
        self._checkpoints = self._depot.checkpoints
        self._directory = _directory(order)
        self._copies = Path(order.folder) / "copies"

    def taking(self) -> Taking | None:
        """Return what takes this node's sets, None where they are not wanted. Raises StoreError, OSError, _Stopped."""
        order, rule = self._order, self._order.rule
        if order.rank == 0:
            _patiently(lambda: self._checkpoints.announce(order.attempt))
        found = _patiently(self._newest)
        if rule.per_node and order.rank != 0:
            return self._answering(found)
        base = self._directory.place(found, self._reporting.say)
        if order.rank != 0:
            return None
        self._begin(base)
        kind = Calling if rule.per_node else Taking
        return kind(self._depot, self._copies, rule, self._reporting.say, base=base)

    def _newest(self) -> Fetched | None:
        # Node 0 says for all that a commit is whole: what others alone will read is read by it too.
        whole = self._order.rule.per_node and self._order.rank == 0
        return self._directory.fetch_newest(self._depot, self._reporting.say, whole=whole)

    def _answering(self, found: Fetched | None) -> Answering:
        """Node 0 decides where all begin, and says so by the generation's record."""
        while not _patiently(lambda: self._checkpoints.join(self._order.attempt)):
            if self._reporting.stop() is not None:
                raise _Stopped
            time.sleep(_JOIN_S)
        base = self._checkpoints.base
        if base != (found.commit if found else None):
            found = None if base is None else _patiently(lambda: self._just(base))
        self._directory.place(found, self._reporting.say)
        rule, attempt = self._order.rule, self._order.attempt
        return Answering(self._depot, self._copies, rule, self._reporting.say, attempt=attempt)

    def _just(self, base: Commit) -> Fetched:
        manifest = self._checkpoints.manifest(base)
        found = self._directory.fetch(self._depot, manifest) if manifest else None
        if found is None:
            raise StoreError(
                f"the checkpoint of step {base.step}, from which node 0 begins, is not as it was written",
                hint="gpucloud checkpoints --verify says what is damaged",
            )
        return found

    def _begin(self, base: Commit | None) -> None:
        say = self._reporting.say
        if not self._checkpoints.begin(base=base, attempt=self._order.attempt):
            say("this store ignores conditional writes: two attempts at once would not notice each other")
        if base is not None:
            self._reporting.first_step = base.step + 1
            say(f"put back the checkpoint of step {base.step}: best effort, what your script saves")
        self._reporting.progress(base.step if base else 0)


def _directory(order: KeepOrder) -> Directory:
    return Directory(Path(order.directory), Path(order.code), order.rule)


def _patiently(work: Callable[[], _Answer]) -> _Answer:
    """An outage is no damage: it is waited for, for half a minute."""
    for wait_s in (*_WAITS_S, None):
        try:
            return work()
        except StoreError as error:
            if wait_s is None or not error.may_pass:
                raise
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")
