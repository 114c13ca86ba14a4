"""What is saved while a script does not train: evaluates, or waits for data, for longer than a notice leaves.

The state is copied as such a pause begins, before the script swaps in averaged weights or draws numbers. Nothing is
written of it until somebody asks for a stop, and only where every rank is in a pause at the same step.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import torch

from gpucloud.domain.errors import UsageError
from gpucloud.resume.folder import AttemptFolder
from gpucloud.resume.keeping import Keeper, Moment
from gpucloud.resume.ranks import Ranks

_LOOK_S = 0.5
_STALL_S = 2.0
"""Who has waited so long for a batch is in a pause."""


class Pauses:
    """A thread looks for a wish to stop during a pause; `over` waits for it, and is called before ranks agree again."""

    def __init__(self, keeper: Keeper, ranks: Ranks, folder: AttemptFolder) -> None:
        self._keeper = keeper
        self._ranks = ranks
        self._folder = folder
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._at: tuple[int, int] = 0, 0  # the step, and how many pauses there were at it

    @contextlib.contextmanager
    def during(self, step: int, now: Callable[[], Moment]) -> Iterator[None]:
        """What is inside is a pause after that step. Raises what `over` does, UsageError for what has no form."""
        begun = self.begin(step, now)
        try:
            yield
        finally:
            if begun:  # not by a phase around this one
                self.over()

    def stalls(self, at: Callable[[], tuple[int, Callable[[], Moment]] | None]) -> Stalls:
        """Return what a script waits for batches in; `at` says after which step, None in the midst of one."""
        return Stalls(self, at)

    def begin(self, step: int, now: Callable[[], Moment]) -> bool:
        """Begin a pause, which the script's own thread ends by `over`, and return whether this is the begin of one.

        Raises UsageError for what has no form.
        """
        if self._thread is not None or (saving := self._keeper.hold(step, now)) is None:
            return False
        self._at = step, self._at[1] + 1 if self._at[0] == step else 0
        self._ended.clear()
        thread = threading.Thread(target=self._watch, args=(saving,), name="gpucloud pause", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: the next step heeds the wish
            self._keeper.drop()
            return False
        self._thread = thread
        return True

    def settle_here(self) -> None:
        """Wait, in another thread than the script's, until the GPU is done: only the script knows its streams."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
            torch.cuda.synchronize()

    def over(self) -> None:
        """End the pause, if this is one: at once, or when a save that all ranks began in it is over. Raises Fenced."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._keeper.drop()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _watch(self, saving: int) -> None:
        try:
            if self._meets():
                self.settle_here()
                self._keeper.land(saving)
        except Exception as error:  # noqa: BLE001  (raised where the script can hear it)
            self._failed = error

    def _meets(self) -> bool:
        with contextlib.suppress(RuntimeError):  # no store, as where another rank is gone
            meeting = self._ranks.meeting("pause-{}-{}".format(*self._at))
            while meeting is not None:
                ended = self._ended.wait(_LOOK_S)
                if not ended and (self._folder.stop_asked() is not None or meeting.called()):
                    meeting.call()
                stands = meeting.leave() if ended else meeting.stands()
                if stands is not None:
                    return stands
        return False


class Stalls:
    """Enter it to wait for a batch. A thread begins a pause for those who wait long."""

    def __init__(self, pauses: Pauses, at: Callable[[], tuple[int, Callable[[], Moment]] | None]) -> None:
        self._pauses = pauses
        self._at = at
        self._since: float | None = None
        self._lock = threading.Lock()
        with contextlib.suppress(RuntimeError):  # no thread to be had: the next step heeds the wish
            threading.Thread(target=_look, args=(weakref.ref(self),), name="gpucloud stalls", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._since = None
        self._pauses.over()

    def look(self) -> None:
        """Begin a pause if the script has waited for long."""
        with self._lock:
            stalls = self._since is not None and time.monotonic() - self._since > _STALL_S
            if stalls and (at := self._at()) is not None:
                with contextlib.suppress(UsageError):  # it comes out of the next save
                    self._pauses.settle_here()
                    self._pauses.begin(*at)


def _look(stalls: weakref.ref[Stalls]) -> None:
    while (there := stalls()) is not None:
        there.look()
        del there
        time.sleep(_LOOK_S)
