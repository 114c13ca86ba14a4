"""Killed, or out of disk, at any call of a save: the newest checkpoint is whole, and the run goes on from it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from tests.prove.goal import Figure, Form, Goal
from tests.standins import disk_faults
from tests.standins.disk_faults import Fault
from tests.standins.saved_runs import PREFIX, SavedRun, forking

KEEP = 2  # of three saves: the last one deletes the first
_KILLED = -9


class _Case:
    """One attempt with a fault in one rank, then another without; `wrong` says what did not hold."""

    def __init__(self, folder: Path, whole: SavedRun) -> None:
        self._run = SavedRun(folder, ranks=whole.ranks, keep=KEEP)
        self._whole = whole

    def killed(self, rank: int, at: int, *, to_the_end: bool) -> str | None:
        codes = self._attempt(rank, disk_faults.die(at), deadly=True)
        if codes[rank] != _KILLED:
            return f"rank {rank} was to die and ended with {codes}"
        return self._wrong() or (self._wrong_end() if to_the_end else None)

    def full(self, rank: int, first: int, last: int, *, to_the_end: bool) -> str | None:
        codes = self._attempt(rank, disk_faults.full(first, last), deadly=False)
        if _KILLED in codes and self._run.ranks == 1:
            return f"a full disk is no death: {codes}"
        return self._wrong() or (self._wrong_end() if to_the_end else None)

    def _attempt(self, rank: int, fault: Fault, *, deadly: bool) -> list[int]:
        def hook(own: int) -> None:
            if own == rank:
                disk_faults.befall(self._run.url, fault, deadly=deadly)

        return self._run.attempt(hook)

    def _wrong(self) -> str | None:
        """Every checkpoint that counts is whole, and the newest is what an undisturbed run had at its step."""
        checkpoints = Checkpoints(open_store(self._run.url), PREFIX, keep=KEEP)
        damaged: list[int] = []
        readable = checkpoints.candidates(lambda commit: damaged.append(commit.step))
        damaged += [manifest.commit.step for manifest in readable if checkpoints.fetch(manifest) is None]
        if damaged:
            return f"committed and not whole: steps {damaged}"
        found = self._run.restored()
        if found is not None and found.files != _files(self._whole, found.commit.step):
            return f"the checkpoint of step {found.commit.step} is not what the run had then"
        step = found.commit.step if found else 0
        told = self._told()
        return f"step {told} was told to be saved, and step {step} is" if told > step else None

    def _wrong_end(self) -> str | None:
        codes = self._run.attempt()
        if any(codes):
            return f"the next attempt ended with {codes}: {self._run.said()[-500:]}"
        return None if self._run.digests() == self._whole.digests() else "the end is another than undisturbed"

    def _told(self) -> int:
        said = self._run.folder / f"attempt-{self._run.attempts}-0" / "progress.json"
        try:
            return int(json.loads(said.read_text())["committed_step"] or 0)
        except FileNotFoundError:
            return 0


def run(form: Form) -> Iterator[Figure]:
    """Yield what went wrong, and in how many cases."""
    cases = wrong = 0
    with tempfile.TemporaryDirectory() as folder, forking():
        for ranks in (1,) if form is Form.SHORT else (1, 2):
            for name, case in _cases(Path(folder).resolve() / str(ranks), ranks, form):
                cases += 1
                found = case()
                if found is not None:
                    wrong += 1
                    sys.stderr.write(f"ckpt-torn: {name}: {found}\n")
    yield Figure(name="ckpt-torn", value=wrong, limit=0)
    yield Figure(name="ckpt-torn.cases", value=cases, limit=40 if form is Form.SHORT else 400, least=True)


def _cases(folder: Path, ranks: int, form: Form) -> Iterator[tuple[str, Callable[[], str | None]]]:
    folder.mkdir()
    whole = SavedRun(folder / "whole", ranks=ranks, keep=100)
    assert whole.attempt() == [0] * ranks, whole.said()
    for rank in range(ranks):
        calls = _calls(folder / f"count-{rank}", ranks, rank)
        for at in range(1, calls + 1):
            ends = form is Form.LONG or at % 8 == 1
            for kind in ("killed", "full-once", "full-for-ever"):
                if form is Form.SHORT and kind != "killed" and at % 8 != 2:
                    continue
                name = f"{kind} at call {at} of rank {rank} of {ranks}"
                yield name, _case(folder / f"{kind}-{rank}-{at}", whole, kind, rank, at, ends)


def _case(folder: Path, whole: SavedRun, kind: str, rank: int, at: int, ends: bool) -> Callable[[], str | None]:
    case = _Case(folder, whole)
    if kind == "killed":
        return lambda: case.killed(rank, at, to_the_end=ends)
    return lambda: case.full(rank, at, at + 2 if kind == "full-once" else sys.maxsize, to_the_end=ends)


def _calls(folder: Path, ranks: int, rank: int) -> int:
    """Return how many calls to the disk the rank makes in an undisturbed attempt."""
    run = SavedRun(folder, ranks=ranks, keep=KEEP)

    def hook(own: int) -> None:
        if own == rank:
            disk_faults.befall(run.url, _written(folder / "calls"), deadly=False)

    folder.mkdir()
    assert run.attempt(hook) == [0] * ranks, run.said()
    return len((folder / "calls").read_bytes())


def _written(file: Path) -> Fault:
    """Count the calls in a file's length: the process that counts is another."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return lambda _number, _name: os.write(descriptor, b".") < 0


def _files(whole: SavedRun, step: int) -> tuple[tuple[str, bytes], ...]:
    checkpoints = Checkpoints(open_store(whole.url), PREFIX, keep=100)
    manifest = next(one for one in checkpoints.candidates() if one.commit.step == step)
    objects = checkpoints.fetch(manifest)
    assert objects is not None
    return tuple((p.key.rpartition("/")[2], data) for p, data in zip(manifest.pieces, objects, strict=True))


GOAL = Goal(
    promise="killed, or out of disk, at any call of a save: the newest checkpoint is whole and the run goes on exactly",
    real="the training script over gloo, gpucloud.resume, the directory store, SIGKILL (in a write: half of it done)",
    simulated="the full disk: calls answer ENOSPC; power failures are not among the faults",
    run=run,
)
