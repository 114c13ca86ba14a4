"""Killed, stopped or out of disk at any call of a save: the newest checkpoint is whole, and the run goes on from it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpucloud.resume.restoring import Restored
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.system import processes
from tests.prove.goal import Figure, Form, Goal
from tests.standins.befalling import Fault, befall
from tests.standins.own_bucket import bucket
from tests.standins.saved_runs import PREFIX, SavedRun, ended, forking

KEEP = 2  # of three saves: the last one deletes the first
_KILLED = -9


class _NotReached(Exception):
    """The attempt made fewer calls than the one at which the fault was to befall it: this was no case."""


class _Case:
    """One attempt with a fault in one rank, then another without; the answer says what did not hold."""

    def __init__(self, run: SavedRun, whole: SavedRun) -> None:
        self._run = run
        self._whole = whole

    def killed(self, rank: int, at: int, *, to_the_end: bool) -> str | None:
        """The rank dies at the call of that number."""
        return self._killed("die", rank, at, to_the_end=to_the_end)

    def writer_killed(self, rank: int, at: int) -> str | None:
        """The process that writes for the rank dies; the attempt goes on to its end, which is that of a whole one."""
        codes = self._attempt("writer", rank, at, at)
        if any(codes):
            return f"the loss of a writer ended the attempt: {codes}"
        ended = self._run.digests() == self._whole.digests()
        return self._wrong() or (None if ended else "the end is another than undisturbed")

    def killed_talking(self, rank: int, at: int, *, to_the_end: bool) -> str | None:
        """The rank dies at the moment of that number of its talk with S3."""
        return self._killed("talk", rank, at, to_the_end=to_the_end)

    def stopped(self, rank: int, at: int) -> str | None:
        """The rank stops at the call of that number; another attempt takes over and ends; then the rank goes on."""
        older = self._run.start(_hook(self._run, "stop", rank, at, at))
        newer = replace(self._run, folder=self._run.folder / "newer", store=self._run.url)
        try:
            if not _comes_to_a_stop(older[rank]):
                raise _NotReached
            codes = newer.attempt()
            found, wrong = newer.restored(), self._wrong()
        finally:
            _continue(older[rank])
            late = ended(older)
        if any(codes) or newer.digests() != self._whole.digests():
            return f"the newer attempt ended with {codes}, or as another than undisturbed: {newer.said()[-500:]}"
        if wrong or found is None or found.commit.step != self._whole.steps:
            return f"committed is the end of {found and found.commit}: {wrong}"
        return self._wrong_since(found, newer, late)

    def _wrong_since(self, found: Restored, newer: SavedRun, codes: list[int]) -> str | None:
        """What the older attempt did when it went on counts only if it had still to take a generation: a higher one."""
        again = newer.restored()
        if again is None or again.files != _files(self._whole, self._whole.steps):
            return f"the older attempt went on, and restored is {again and again.commit}, or other bytes"
        if again.commit.generation > found.commit.generation:
            return f"the attempt of the higher generation ended with {codes}" if any(codes) else None
        if again.commit != found.commit:
            return f"what the older attempt did since changed what is restored: {again.commit}"
        fenced = any(codes) or found.commit.generation == 1  # all was committed when it was stopped
        return None if fenced else f"the older attempt ended with {codes}, not by the fence"

    def full(self, rank: int, first: int, last: int, *, to_the_end: bool) -> str | None:
        """The disk is full for the rank from one call to another."""
        codes = self._attempt("full", rank, first, last)
        if _KILLED in codes and self._run.ranks == 1:
            return f"a full disk is no death: {codes}"
        return self._wrong() or (self._wrong_end() if to_the_end else None)

    def _killed(self, kind: str, rank: int, at: int, *, to_the_end: bool) -> str | None:
        codes = self._attempt(kind, rank, at, at)
        if codes[rank] != _KILLED:
            return f"rank {rank} was to die and ended with {codes}"
        return self._wrong() or (self._wrong_end() if to_the_end else None)

    def _attempt(self, kind: str, rank: int, first: int, last: int) -> list[int]:
        codes = _attempt(self._run, rank, kind, first, last)
        # Two ranks race for who makes a folder, so that neither makes the same number of calls each time.
        if not any(codes) and _counted(self._run) < first:
            raise _NotReached
        return codes

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


@dataclass
class _Tally:
    """How many faults befell a run, in how many of them something did not hold, and how many came too late."""

    cases: int = 0
    wrong: int = 0
    missed: int = 0

    def take(self, cases: Iterator[tuple[str, Callable[[], str | None]]]) -> None:
        for name, case in cases:
            try:
                found = case()
            except _NotReached:
                self.missed += 1
                continue
            self.cases += 1
            if found is not None:
                self.wrong += 1
                sys.stderr.write(f"ckpt-torn: {name}: {found}\n")


def run(form: Form) -> Iterator[Figure]:
    """Yield what went wrong, and in how many cases."""
    short = form is Form.SHORT
    disk, talk, brain, three = _Tally(), _Tally(), _Tally(), _Tally()
    with tempfile.TemporaryDirectory() as name, forking():
        folder = Path(name).resolve()
        for ranks in (1,) if short else (1, 2):
            disk.take(_cases(folder / str(ranks), ranks, form))
        brain.take(_stops(folder / "stops", form))
        if not short:
            three.take(_deaths(folder / "3", 3))
        with bucket(folder / "lab") as url:
            talk.take(_talks(folder / "s3", url, 1, form))
            if not short:
                three.take(_talks(folder / "s3-3", url, 3, form))
    tallies = (disk, talk, brain, three)
    yield Figure(name="ckpt-torn", value=sum(tally.wrong for tally in tallies), limit=0)
    yield Figure(name="ckpt-torn.cases", value=disk.cases, limit=40 if short else 400, least=True)
    yield Figure(name="ckpt-torn.s3-cases", value=talk.cases, limit=4 if short else 80, least=True)
    yield Figure(name="ckpt-torn.split-brain", value=brain.cases, limit=2 if short else 40, least=True)
    if not short:
        yield Figure(name="ckpt-torn.three-ranks", value=three.cases, limit=200, least=True)
    missed = sum(tally.missed for tally in tallies)
    yield Figure(name="ckpt-torn.not-reached", value=missed, limit=0 if short else 60)


def _cases(folder: Path, ranks: int, form: Form) -> Iterator[tuple[str, Callable[[], str | None]]]:
    folder.mkdir()
    whole = _whole(folder, ranks)
    for rank in range(ranks):
        deadly = _calls(folder / f"count-{rank}", ranks, rank, "die")
        for_room = _calls(folder / f"count-room-{rank}", ranks, rank, "full")
        for kind in ("killed", "writer-killed", "full-once", "full-for-ever"):
            for at in range(1, (for_room if kind.startswith("full") else deadly) + 1):
                if form is Form.SHORT and at % (4 if kind == "killed" else 12) != 1:
                    continue
                ends = form is Form.LONG or at % 8 == 1
                name = f"{kind} at call {at} of rank {rank} of {ranks}"
                run = SavedRun(folder / f"{kind}-{rank}-{at}", ranks=ranks, keep=KEEP)
                yield name, _case(_Case(run, whole), kind, rank, at, ends)


def _case(case: _Case, kind: str, rank: int, at: int, ends: bool) -> Callable[[], str | None]:
    if kind == "killed":
        return lambda: case.killed(rank, at, to_the_end=ends)
    if kind == "writer-killed":
        return lambda: case.writer_killed(rank, at)
    return lambda: case.full(rank, at, at + 2 if kind == "full-once" else sys.maxsize, to_the_end=ends)


def _deaths(folder: Path, ranks: int) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Each rank dies at each of its calls to the disk; every fourth run goes on to its end."""
    folder.mkdir()
    whole = _whole(folder, ranks)
    for rank in range(ranks):
        for at in range(1, _calls(folder / f"count-{rank}", ranks, rank, "die") + 1):
            case = _Case(SavedRun(folder / f"{rank}-{at}", ranks=ranks, keep=KEEP), whole)
            name = f"killed at call {at} of rank {rank} of {ranks}"
            yield name, partial(case.killed, rank, at, to_the_end=at % 4 == 1)


def _stops(folder: Path, form: Form) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The first of two ranks, which commits, stops at each of its calls to the disk; in the short form an only rank."""
    folder.mkdir()
    ranks = 1 if form is Form.SHORT else 2
    whole = _whole(folder, ranks)
    calls = _calls(folder / "count", ranks, 0, "stop")
    for at in range(1, calls + 1) if form is Form.LONG else (calls // 3, 2 * calls // 3):
        case = _Case(SavedRun(folder / str(at), ranks=ranks, keep=KEEP), whole)
        yield f"stopped at call {at} of rank 0 of {ranks}, and continued", partial(case.stopped, 0, at)


def _talks(folder: Path, url: str, ranks: int, form: Form) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """The deaths at each moment of what a rank says to S3; in the short form five of them, one up to the end."""
    folder.mkdir()
    whole = _whole(folder, ranks)
    for rank in range(ranks):
        place = f"{url}/{ranks}-{rank}"
        undisturbed = SavedRun(folder / f"count-{rank}", ranks=ranks, keep=KEEP, store=f"{place}/count")
        assert _attempt(undisturbed, rank, "talk", 0, 0) == [0] * ranks, undisturbed.said()
        moments = _counted(undisturbed)
        every = range(1, moments + 1) if form is Form.LONG else range(moments // 10, moments, moments // 5)
        for at in every:
            case = _Case(SavedRun(folder / f"{rank}-{at}", ranks=ranks, keep=KEEP, store=f"{place}/{at}"), whole)
            ends = at < moments // 5 if form is Form.SHORT else ranks == 1 or at % 4 == 1
            name = f"killed at moment {at} of the talk of rank {rank} of {ranks} with S3"
            yield name, partial(case.killed_talking, rank, at, to_the_end=ends)


def _whole(folder: Path, ranks: int) -> SavedRun:
    whole = SavedRun(folder / "whole", ranks=ranks, keep=100)
    assert whole.attempt() == [0] * ranks, whole.said()
    return whole


def _calls(folder: Path, ranks: int, rank: int, kind: str) -> int:
    """Return how many calls of an undisturbed rank to the disk such a fault counts: the most of three attempts."""
    counts = []
    folder.mkdir()
    for turn in range(3 if ranks > 1 else 1):
        run = SavedRun(folder / str(turn), ranks=ranks, keep=KEEP)
        codes = _attempt(run, rank, kind, 0, 0)
        assert codes == [0] * ranks, run.said()
        counts.append(_counted(run))
    return max(counts)


def _attempt(run: SavedRun, rank: int, kind: str, first: int, last: int) -> list[int]:
    """Run an attempt in which the fault befalls one rank, or the process that writes for it."""
    return run.attempt(_hook(run, kind, rank, first, last))


def _hook(run: SavedRun, kind: str, rank: int, first: int, last: int) -> Callable[[int], None]:
    fault = Fault(kind=kind, first=first, last=last, below=run.url, calls=str(run.folder / "calls"))

    def hook(own: int) -> None:
        if own == rank:
            befall(fault, run.folder / "first")

    return hook


def _comes_to_a_stop(pid: int) -> bool:
    """Wait until the process is stopped; False when it ends instead."""
    while True:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state in "TZX":
            return state == "T"
        time.sleep(0.005)


def _continue(pid: int) -> None:
    """Let the process go on, after those below it: it looks after them."""
    for one in (*processes.descendants(pid), pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGCONT)


def _counted(run: SavedRun) -> int:
    return (run.folder / "calls").stat().st_size


def _files(whole: SavedRun, step: int) -> tuple[tuple[str, bytes], ...]:
    checkpoints = Checkpoints(open_store(whole.url), PREFIX, keep=100)
    manifest = next(one for one in checkpoints.candidates() if one.commit.step == step)
    objects = checkpoints.fetch(manifest)
    assert objects is not None
    return tuple((p.key.rpartition("/")[2], data) for p, data in zip(manifest.pieces, objects, strict=True))


GOAL = Goal(
    promise="killed, stopped, or out of disk at any call of a save: the newest checkpoint is whole and the run goes on "
    "exactly; one that goes on although another took over changes nothing",
    real="the training script over gloo (1 to 3 ranks), gpucloud.resume with the processes that write, the store in a "
    "directory and in S3 over HTTP, SIGKILL (in a write, or a request: half of it done; or all, and the answer unread)",
    simulated="the full disk: calls answer ENOSPC; S3 is a strict emulation; power failures are not among the faults",
    run=run,
)
