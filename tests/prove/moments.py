"""Moments of jobs' lives in which something was decided: from simulated storms, and recorded on the embedded fleet.

The recording is remade with `GPUCLOUD_PROVE_RECORD=1 python -m tests.prove one-decision`, which takes some minutes. As
`python -m tests.prove.moments FILE …` this module is `gpucloud …`, and appends every moment to FILE.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

from gpucloud.domain import codec
from gpucloud.domain.state.order import VERSION as ORDER_VERSION
from gpucloud.domain.state.order import Order
from gpucloud.domain.state.state import VERSION as STATE_VERSION
from gpucloud.domain.state.state import ExitReason, JobStatus
from gpucloud.domain.supervision.action import Action
from gpucloud.domain.supervision.reconcile import decide
from gpucloud.domain.supervision.snapshot import Goal, Rules, Snapshot, Supervising, goal_of
from gpucloud.usecases.supervise import session
from tests.commandline import CommandLine
from tests.prove.entrances import Moment
from tests.sim import setting
from tests.sim.runs import verdict

RECORDED = Path(__file__).resolve().parent.parent / "data" / "fleet_moments.jsonl.gz"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityChoice:
    """The first line of a recording: whose form its orders and states have."""

    order_version: int
    state_version: int


_NOW = CapacityChoice(order_version=ORDER_VERSION, state_version=STATE_VERSION)


@contextlib.contextmanager
def taking(take: Callable[[Moment], None]) -> Iterator[None]:
    """While it lasts, every supervisor of this process gives the moments in which it decides."""
    orders: list[Order] = []

    def meant(order: Order, who: Supervising) -> Goal:
        orders[:] = [order]
        return goal_of(order, who)

    def decided(goal: Goal, snapshot: Snapshot, rules: Rules) -> Action:
        take(Moment(order=orders[0], snapshot=snapshot, rules=rules))
        return decide(goal, snapshot, rules)

    with mock.patch.object(session, "goal_of", meant), mock.patch.object(session, "decide", decided):
        yield


def of_storm(seed: int) -> list[Moment]:
    """Return the moments of the simulated storm of that seed."""
    found: list[Moment] = []
    with taking(found.append):
        verdict(seed, draw=setting.storm)
    return found


def of_fleet() -> list[Moment]:
    """Return the recorded ones. ValueError where they are of another form: then they are to be recorded anew."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        capacity_choice = codec.from_json(CapacityChoice, next(file))
        if capacity_choice != _NOW:
            raise ValueError(f"{RECORDED.name} is of {capacity_choice}, and orders and states are of {_NOW}: {__doc__}")
        return [codec.from_json(Moment, line) for line in file]


def outlived(some: list[Moment], most: int) -> list[Moment]:
    """Return so many of those in which ranks were ordered to be killed, as if that were three minutes ago."""
    killed = [
        one
        for one in some
        if one.snapshot.state.attempt is not None and one.snapshot.state.attempt.killed_at is not None
    ]
    return [_killed_early(one) for one in spread(killed, most)]


def _killed_early(moment: Moment) -> Moment:
    state, at = moment.snapshot.state, moment.snapshot.now - timedelta(minutes=3)
    last = replace(state.attempts[-1], killed_at=at)
    return replace(
        moment, snapshot=replace(moment.snapshot, state=replace(state, attempts=(*state.attempts[:-1], last)))
    )


def held(some: list[Moment], most: int) -> list[Moment]:
    """Return so many made of those at the end of a job that has machines, as if its script had failed a while ago.

    Of some the wait for a mended script is over, some are paid beyond it.
    """
    ended = [one for one in some if _has_trained(one) and one.snapshot.group.alive]
    return [_failed_before(ended[number % len(ended)], minutes=2 * number) for number in range(most if ended else 0)]


def _has_trained(moment: Moment) -> bool:
    state = moment.snapshot.state
    return state.status.ended and not state.torn_down and bool(state.attempts) and state.attempt is None


def _failed_before(moment: Moment, minutes: int) -> Moment:
    snapshot, state = moment.snapshot, moment.snapshot.state
    last = replace(state.attempts[-1], reason=ExitReason.USER_ERROR)
    failed = replace(
        state,
        status=JobStatus.FAILED,
        exit_reason=ExitReason.USER_ERROR,
        exit_code=ExitReason.USER_ERROR.exit_code,
        ended_at=snapshot.now - timedelta(minutes=minutes % 8),
        attempts=(*state.attempts[:-1], last),
    )
    order, armed = replace(moment.order, hold=timedelta(minutes=5)), snapshot.group.armed_until
    if armed is not None and minutes % 4:
        snapshot = replace(
            snapshot, group=replace(snapshot.group, armed_until=min(armed, snapshot.now + timedelta(minutes=2)))
        )
    return replace(moment, order=order, snapshot=replace(snapshot, state=failed))


def spread(some: list[Moment], most: int) -> list[Moment]:
    """Return so many at the most, from the first on and about equally far from each other."""
    step = max(1.0, len(some) / most)
    return [some[int(number * step)] for number in range(min(most, len(some)))]


_STORIES: tuple[tuple[tuple[str, ...], float, int | None, tuple[tuple[str, ...], ...]], ...] = (
    (("train", "--keep"), 0, None, (("reconcile", "small"), ("down", "small"))),
    (("train", "--drill"), 0, None, (("reconcile", "--all"),)),
    (("up",), 0, None, (("train",), ("down", "small"))),
    (("train", "--detach"), 0, None, (("reconcile", "small"), ("budget", "small", "0.70 USD"), ("down", "small"))),
    (("train",), 12, signal.SIGKILL, (("reconcile", "small"), ("budget", "small", "0.60 USD"), ("train",))),
    (("train",), 14, signal.SIGINT, (("down", "small"),)),
    (("train",), 6, signal.SIGKILL, (("reconcile", "--all"), ("up",), ("down", "small"))),
)
"""A first command, after how many seconds it is struck with what (0: never), and the commands that follow."""


def record(kind: Callable[[Moment], object], each: int = 3) -> int:
    """Let the stories happen on the embedded fleet, and keep so many moments of each kind; return how many."""
    moments = [moment for number in range(len(_STORIES)) for moment in _happen(number)]
    kept: dict[object, list[Moment]] = {}
    for moment in moments:
        kept.setdefault(kind(moment), []).append(moment)
    lines = [codec.to_json(moment) for some in kept.values() for moment in spread(some, each)]
    with gzip.GzipFile(RECORDED, "wb", mtime=0) as file:
        file.write("\n".join([codec.to_json(_NOW), *lines, ""]).encode())
    return len(lines)


def _happen(number: int) -> list[Moment]:
    first, after_s, blow, others = _STORIES[number]
    with tempfile.TemporaryDirectory(prefix="gpucloud-moments-") as folder:
        out = Path(folder) / "moments"
        line = _Recorded(Path(folder), out)
        try:
            file = line.job(steps=60, step_s=0.1, extra="outputs: [results/]\n" if number % 2 else "")
            process = line.start(*first, file)
            if blow is not None:
                time.sleep(after_s)
                process.send_signal(blow)
            process.wait(150)
            for words in others:
                line.run(*words, *([file] if len(words) == 1 else []))
        finally:
            line.close()
        texts = out.read_text().replace(folder, "/job").splitlines() if out.exists() else []
        found = [codec.from_json(Moment, text) for text in texts]
    return [_nowhere(moment) for moment in found]


def _nowhere(moment: Moment) -> Moment:
    """No path and no name of the machine that recorded it."""
    job = replace(moment.order.resolved, source=Path("/job/small.yaml"), code=Path("/job/code"))
    changes = tuple(replace(change, by="me@here") for change in moment.order.budget_changes)
    order = replace(
        moment.order, store="file:///store", by="me@here", host="here", resolved=job, budget_changes=changes
    )
    return replace(
        moment, order=order, snapshot=replace(moment.snapshot, state=replace(moment.snapshot.state, owner=None))
    )


class _Recorded(CommandLine):
    def __init__(self, folder: Path, out: Path) -> None:
        super().__init__(folder)
        self._out = out

    def argv(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.prove.moments", str(self._out), *arguments]


def _main() -> None:
    from gpucloud.__main__ import main  # noqa: PLC0415  (only where this module is that command)

    out = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.argv = ["gpucloud", *sys.argv[2:]]
    with taking(lambda moment: _append(out, moment)):
        main()


def _append(out: int, moment: Moment) -> None:
    os.write(out, f"{codec.to_json(moment)}\n".encode())


if __name__ == "__main__":
    _main()
