"""Two attempts at one job, met at any call or instant: one stops, and nothing it wrote since is ever restored."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpucloud.domain.checkpoint.manifest import commits
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.checkpoints import listed
from tests.prove.goal import Figure, Form, Goal
from tests.standins.quick_trainer import Trainer
from tests.standins.two_attempts import meetings, overtakings

_ROUNDS = {Form.SHORT: 25, Form.LONG: 500}
_STOP_LIMIT_S = 10.0
_FENCED, _GAVE_UP = 3, 4
_PREFIX = "checkpoints"


@dataclass
class _Round:
    wrong: list[str]
    stop_s: float = 0.0
    late: int = 0


def run(form: Form) -> Iterator[Figure]:
    """Let an older trainer, stopped at a random instant or not at all, meet a newer one; then restore once more."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(_ROUNDS[form]):
            rounds.append(_one(seed, open_store(str(Path(folder) / str(seed)))))
            for what in rounds[-1].wrong:
                sys.stderr.write(f"split-brain: seed {seed}: {what}\n")
    met = [*meetings(), *overtakings()]
    for what, wrong in met:
        if wrong is not None:
            sys.stderr.write(f"split-brain: {what}: {wrong}\n")
    bad = sum(bool(one.wrong) for one in rounds) + sum(wrong is not None for _, wrong in met)
    yield Figure(name="split-brain", value=bad, limit=0)
    yield Figure(name="split-brain.meetings", value=len(met), limit=200, least=True)
    yield Figure(name="split-brain.rounds", value=len(rounds), limit=_ROUNDS[form], least=True)
    # A proof in which the older side never wrote too late would show nothing.
    yield Figure(
        name="split-brain.late-commits", value=sum(one.late > 0 for one in rounds), limit=_ROUNDS[form] // 2, least=True
    )
    if form is Form.LONG:
        yield Figure(name="split-brain.older-stops-s", value=max(one.stop_s for one in rounds), limit=_STOP_LIMIT_S)


def _one(seed: int, store: ObjectStore) -> _Round:
    dice = random.Random(seed)
    # Every second one stops itself where it hurts most: it found no newer one, and has not yet written its manifest.
    stops_at = 2 + dice.randrange(5) if seed % 2 else None
    older = _fork(lambda: _train(store, 1, stops_at))
    try:
        if stops_at is not None:
            os.waitpid(older, os.WUNTRACED)
        else:
            _until(lambda: commits(listed(store, _PREFIX)))
            time.sleep(dice.uniform(0, 0.03))
            if dice.random() < 0.5:
                os.kill(older, signal.SIGSTOP)
        base, seen = _newer(store, dice.randrange(3))
        began = time.monotonic()
        os.kill(older, signal.SIGCONT)
        code = _wait(older, _STOP_LIMIT_S + 20)
        older = 0
    finally:
        if older:
            os.kill(older, signal.SIGKILL)
            os.waitpid(older, 0)
    late = len({commit for commit in commits(listed(store, _PREFIX)) if commit.generation == 1} - seen)
    wrong = [] if code == _FENCED else [f"the older trainer ended with {code}, not by the fence"]
    last = Trainer(store, _PREFIX, 3)
    if last.base is None or (last.base.generation != 2 and last.base != base):
        wrong.append(f"{last.base} was restored; the newer trainer began from {base}")
    if [entry for entry in last.history if entry[0] == 1] != [[1, 0]]:
        wrong.append(f"steps of the older one come twice: {last.history}")
    return _Round(wrong, time.monotonic() - began, late)


def _newer(store: ObjectStore, count: int) -> tuple[object, set[object]]:
    """Take the job over, commit `count` times, and end; return what it began from, and what the older had by then."""
    newer = Trainer(store, _PREFIX, 2)
    seen = set(commits(listed(store, _PREFIX)))
    for _ in range(count):
        newer.step += 1
        newer.save()
    return newer.base, seen


def _train(store: ObjectStore, attempt: int, stops_at: int | None) -> int:
    trainer = Trainer(_StoppingStore(store, stops_at) if stops_at else store, _PREFIX, attempt)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        trainer.step += 1
        try:
            trainer.save()
        except trainer.fenced:
            return _FENCED
    return _GAVE_UP


class _StoppingStore:
    """The store, which stops this process just before the n-th manifest is written."""

    def __init__(self, store: ObjectStore, stops_at: int) -> None:
        self._store, self._left = store, stops_at

    def put(self, key: str, data: bytes | memoryview, **condition: bool) -> str:
        self._left -= "/commit/" in key
        if self._left == 0 and "/commit/" in key:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self._store.put(key, data, **condition)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def _fork(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            code = work()
        os._exit(code)
    return pid


def _wait(pid: int, limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -9


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the older trainer commits nothing")
        time.sleep(0.002)


GOAL = Goal(
    promise="of two trainers of one job the older stops, and nothing it wrote since is ever restored",
    real="processes, stopped and continued by signals; the commit protocol; the directory store",
    simulated="training: a counter takes its place; where two attempts of three ranks meet at each call to the store, "
    "before and after it, they are in one process and the store in memory",
    run=run,
)
