"""How a script hears that it is to save and leave, by the attempt's folder or by signals, and what rank 0 reports."""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import signal
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from gpucloud.domain.checkpoint.manifest import Why
from gpucloud.system.wholefile import write_whole

_WITH_AN_END = (Why.NOTICE, Why.BUDGET)
_TO_LEAVE_S = 1.0  # for the ranks to end


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """Files that appear whole. Without a folder nothing is written, and what asks for a stop are `signals`, if any."""

    path: Path | None
    signals: Signals | None = None

    def listen(self) -> None:
        """Take signals for notices from now on, where there are no files for that."""
        if self.signals is not None:
            self.signals.listen()

    def close(self) -> None:
        """The rank is done here: signals are the script's again."""
        if self.signals is not None:
            self.signals.close()

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file. Raises OSError, as on a full disk."""
        if self.path is not None:
            write_whole(self.path / name, json.dumps(content), mode=0o666)  # a container's user may be another

    def tell(self, name: str, content: dict[str, Any]) -> None:
        """Write what only informs: no training ends because a disk is full."""
        with contextlib.suppress(OSError):
            self.write(name, content)

    def stop_asked(self) -> Why | None:
        """Return what this node's agent wants the ranks to save and leave for; None while it does not."""
        if self.path is None:
            return Why.NOTICE if self.signals is not None and self.signals.heard else None
        if not os.path.exists(f"{self.path}/stop.json"):  # noqa: PTH110  asked often, and `Path` takes longer
            return None
        reason = self.stop_reason()
        return Why(reason) if reason in _WITH_AN_END else Why.STOP

    def save_asked(self) -> int:
        """Return the number of the newest wish of this node's agent that the ranks save and go on; 0 without one."""
        if self.path is None or not os.path.exists(f"{self.path}/save.json"):  # noqa: PTH110
            return 0
        try:
            return int(json.loads((self.path / "save.json").read_text())["since"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def seconds_left(self) -> float:
        """Return how long there is for a last save on this node: until the time that the agent wrote, if that counts.

        A stop that the user wishes has no end; its time is when it was asked for.
        """
        try:
            asked = json.loads((self.path or Path()).joinpath("stop.json").read_text())
            if asked["reason"] not in _WITH_AN_END:
                return math.inf
            at = datetime.fromisoformat(asked["at"])
            return max(0.0, (at - datetime.now(timezone.utc)).total_seconds() - _TO_LEAVE_S)
        except (OSError, ValueError, KeyError, TypeError):
            return math.inf

    def stop_reason(self) -> str:
        """Return why, in one word; `another node` when this node was not asked."""
        if self.signals is not None and self.signals.heard:
            return self.signals.heard
        try:
            return str(json.loads((self.path or Path()).joinpath("stop.json").read_text())["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return "another node"


# Where no agent is: Slurm, Kubernetes, torchrun by hand.


_NOTICES = (signal.SIGTERM, signal.SIGUSR1)
_WAITING, _NOTED, _OVER = range(3)
_PARENT_NOTES_S = 2.0


class Signals:
    """SIGTERM and SIGUSR1, taken for a notice until `close`; `heard` is the first that came, empty before.

    A handler that the script had is called as well. What is ignored, or was not Python's to handle, is left so.
    """

    def __init__(self) -> None:
        self.heard = ""
        self._pid = os.getpid()
        self._stage = mmap.mmap(-1, 1)  # shared with children that are forked
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take them, where this is the thread that may."""
        for number in _NOTICES:
            before = _of_this_process(signal.getsignal(number), number)
            if before is signal.SIG_DFL or callable(before):
                with contextlib.suppress(ValueError):  # another thread than the main one
                    signal.signal(number, self._hear)
                    self._before[number] = before

    def close(self) -> None:
        """Give them back to whoever had them."""
        self._stage[0] = _OVER
        for number, before in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, before)
        self._before = {}

    def _hear(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            self._hear_in_child(number)
            return
        self.heard = self.heard or signal.Signals(number).name
        self._stage[0] = max(self._stage[0], _NOTED)
        if callable(before := self._before.get(number)):
            before(number, frame)

    def seen_from_here(self, number: int) -> Any:
        """The handler that this process has by it: in one that was forked since, what it stands before."""
        if os.getpid() == self._pid:
            return self._hear
        return _of_this_process(self._before.get(number, signal.SIG_DFL), number)

    def _hear_in_child(self, number: int) -> None:
        """A data loader's worker: a scheduler's notice goes to all processes, and training needs it for the next step.

        Its own parent ends it by SIGTERM too, without having had one, or when it is over.
        """
        until = time.monotonic() + _PARENT_NOTES_S
        while self._stage[0] == _WAITING and number == signal.SIGTERM and time.monotonic() < until:
            time.sleep(_PARENT_NOTES_S / 100)
        if number == signal.SIGTERM and self._stage[0] != _NOTED:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _of_this_process(handler: Any, number: int) -> Any:
    """Look through a listener that a fork inherited: it would take this process for a worker, and end it."""
    listener = getattr(handler, "__self__", None)
    return listener.seen_from_here(number) if isinstance(listener, Signals) else handler


def say(text: str) -> None:
    """Tell the user one line of the story."""
    sys.stderr.write(f"gpucloud: {text}\n")
    sys.stderr.flush()


# What rank 0 reports of the run while it runs.


_REMEMBERED = 20  # steps, for the median
_LEAST_S = 0.2  # between two files within one phase


class Standing(Protocol):
    """Where a run stands; what does not change while the steps are counted is read when it is written."""

    @property
    def steps_done(self) -> int:
        """The last step that is done."""
        ...

    @property
    def total_steps(self) -> int | None:
        """How many there will be, None where nobody knows."""
        ...

    @property
    def committed_step(self) -> int:
        """The newest checkpoint's step, 0 without one."""
        ...


class Progress:
    """Writes `progress.json`: at every change of phase at once, else five times a second at most, by a thread."""

    def __init__(self, folder: AttemptFolder, standing: Standing) -> None:
        self._folder = folder
        self._standing = standing
        self._first_step = standing.steps_done + 1
        self._phase = "start"
        self._loss = LastLoss()
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._waits: deque[float] = deque(maxlen=_REMEMBERED)
        self._waited_s = 0.0
        self._longest: float | None = None
        self._over = False
        self._unsaved: str | None = None
        self._stepped_at = time.monotonic()
        self._written_at = 0.0
        self._beside = Beside(folder, "progress.json")
        weakref.finalize(self, self._beside.close)
        self.write()

    @property
    def step_seconds(self) -> float | None:
        """The median of the last steps' times; None before the first."""
        return statistics.median(self._seconds) if self._seconds else None

    def batch_wanted(self) -> None:
        """Training begins, or begins again: what was before does not count as a step's time."""
        self._stepped_at = time.monotonic()
        self._waited_s = 0.0

    def waited(self, seconds: float) -> None:
        """The script waited so long for a batch; it counts with the step that the batch is for."""
        self._waited_s += seconds

    def stepped(self, loss: Any) -> None:
        """A step was done; `loss` is a number or a tensor, nobody waits for it."""
        now = time.monotonic()
        if self._seconds:  # the first step compiles and loads: it has a limit of its own
            self._longest = max(self._longest or 0.0, now - self._stepped_at)
        self._seconds.append(now - self._stepped_at)
        self._waits.append(self._waited_s)
        self._waited_s = 0.0
        self._stepped_at = now
        if loss is not None:
            self._loss.offer(loss)
        phase = "done" if self._over else "train"
        if self._phase != phase:
            self._phase = phase
            self.write()
        elif now - self._written_at >= _LEAST_S and self._folder.path is not None:
            self._written_at = now
            self._beside.offer(self._report())

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report the phase while inside; its time does not count as a step's."""
        before, self._phase = self._phase, self._phase if self._over else name
        self.write()
        try:
            yield
        finally:
            self._phase = self._phase if self._over else before
            self._stepped_at = time.monotonic()
            self.write()

    def done(self, unsaved: str | None = None) -> None:
        """The training is over: whatever the script still does, nobody is to wait for another step.

        `unsaved` is why the last step is not saved, None where it is.
        """
        self._phase, self._over, self._unsaved = "done", True, unsaved
        self.write()

    def unsaved(self, why: str) -> None:
        """The script has come to its end, and its last step is not saved: it ends by that, and is not done."""
        self._unsaved = why
        self.write()

    def write(self) -> None:
        """Report now."""
        if self._folder.path is not None:
            self._written_at = time.monotonic()
            self._beside.write(self._report())

    def _report(self) -> dict[str, Any]:
        return {
            "step": self._standing.steps_done,
            "first_step": self._first_step,
            "total_steps": self._standing.total_steps,
            "loss": self._loss.now() if self._phase == "train" else self._loss.final(),
            "phase": self._phase,
            "committed_step": self._standing.committed_step or None,
            "step_seconds": self.step_seconds,
            "waiting_share": self._waiting_share(),
            "longest_s": self._longest,
            "unsaved": self._unsaved,
            "written_at": time.time(),
        }

    def _waiting_share(self) -> float | None:
        """Return the share of the last steps' time that went by waiting for batches, None without a loader's word."""
        steps = sum(self._seconds)
        return round(min(1.0, sum(self._waits) / steps), 3) if steps > 0 and any(self._waits) else None


class Beside:
    """One file that informs, written by a thread of its own: a slow disk keeps no step waiting.

    What is offered replaces what was offered before and is not written yet.
    """

    def __init__(self, folder: AttemptFolder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._offered: dict[str, Any] | None = None
        self._asked = threading.Event()
        self._writes = threading.Lock()  # so that nothing older is written after something newer
        self._closed = False
        self._thread: threading.Thread | None = None

    def offer(self, content: dict[str, Any]) -> None:
        """Have it written soon, without waiting for it."""
        self._offered = content
        if self._thread is None and not self._begun():
            self.write(content)
        self._asked.set()

    def write(self, content: dict[str, Any]) -> None:
        """Write it now, instead of what was offered."""
        with self._writes:
            self._offered = None
            self._folder.tell(self._name, content)

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._asked.set()

    def _begun(self) -> bool:
        thread = threading.Thread(target=self._run, name=f"gpucloud {self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread to be had
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while not self._closed:
            self._asked.wait()
            self._asked.clear()
            with self._writes:
                content, self._offered = self._offered, None
                if content is not None:
                    self._folder.tell(self._name, content)


# The loss for reports, without making the training thread wait for the GPU.


class LastLoss:
    """The newest loss that is known. One on a GPU is copied beside the training, and known some steps later.

    Asking the GPU for a number (`float(loss)`) waits until everything queued before it is done, and the queue then runs
    dry: five times a second of that took 4 % of the throughput of a GPT on four H200.
    """

    def __init__(self) -> None:
        self._value: float | None = None
        self._newest: Any = None
        self._copy: torch.Tensor | None = None
        self._landing: torch.cuda.Event | None = None

    def offer(self, loss: Any) -> None:
        """Remember the loss of a step: a number, or a tensor with one element on any device."""
        self._newest = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def now(self) -> float | None:
        """Return the newest value that is here; never waits."""
        if isinstance(self._newest, torch.Tensor) and self._newest.is_cuda:
            self._land()
        elif self._newest is not None:
            self._value = float(self._newest)
        return self._value

    def _land(self) -> None:
        if self._copy is None:  # pinned once: making it waits for the GPU
            self._copy = torch.empty((), dtype=torch.float32, pin_memory=True)
        if self._landing is not None:
            if not self._landing.query():  # type: ignore[no-untyped-call]
                return
            self._value = float(self._copy)
        self._copy.copy_(self._newest.reshape(()), non_blocking=True)
        self._landing = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landing.record()

    def final(self) -> float | None:
        """Return the newest value, waiting for it."""
        if self._newest is not None:
            self._value, self._landing = float(self._newest), None
        return self._value
